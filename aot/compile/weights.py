"""A bundle of the kernels that write and read quantised weights, and of nothing else: no choice names them.

python -m pretuned.aot.compile.weights --sm 90 -o artifacts/bundles/weights-sm90.msgpack
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...artifacts.errors import CompileError
from ...artifacts.files.publish import publish
from ...artifacts.format.codec import encode
from ...artifacts.records.bundle import Bundle
from ...artifacts.records.precision import DType
from ...artifacts.records.target import Target
from ...kernels.hardware.arch import arch_of
from ...kernels.rowops import weight_specs
from .pool import CompileJob, compile_all
from .triton import driver_for, kernels_of, producer_of


def weights_bundle(sm: int) -> Bundle:
    """Compile them for a capability, without a GPU.

    Raises
    ------
    CompileError
        if one is not compiled.
    """
    results = compile_all([CompileJob(one, sm) for one in weight_specs(tuple(DType))])
    for one in results:
        if one.compiled is None:
            raise CompileError(f"{one.job.spec} for sm_{sm}: {one.reason}")
    code = [one.compiled for one in results if one.compiled is not None]
    maker = producer_of(sm)
    return Bundle(
        target=Target(sm, arch_of(sm).arch_specific),
        min_driver=driver_for(sm, maker),
        producer=maker,
        kernels=kernels_of(code),
        gpus=(),
        variants=tuple(one.variant for one in code),
        cubins=tuple(one.cubin for one in code),
        choices={},
        models=(),
    )


def main() -> None:
    """Write the bundle of one capability."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=int, default=90)
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    publish(given.out, encode(weights_bundle(given.sm)))


if __name__ == "__main__":
    main()
