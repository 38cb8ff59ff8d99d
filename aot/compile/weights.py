"""A bundle of the kernels that write and read quantised weights, and of fp8 training: no choice names them.

python -m pretuned.aot.compile.weights --sm 90 -o artifacts/bundles/weights-sm90.msgpack
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...artifacts.codec import encode
from ...artifacts.errors import CompileError
from ...artifacts.publishing import publish
from ...artifacts.records import Bundle, DType, Target
from ...kernels.arch import arch_of
from ...kernels.rowops import RowOpSpec, weight_specs
from ...kernels.search import of_training
from ...kernels.spec import Spec
from .pool import CompileJob, compile_all
from .triton import driver_for, kernels_of, producer_of


def weights_bundle(sm: int) -> Bundle:
    """Compile the kernels of weights and of fp8 training for one capability. Needs no GPU.

    Raises
    ------
    CompileError
        if a kernel can't be compiled.
    """
    gemms, rows = of_training(sm)
    wanted: list[Spec | RowOpSpec] = [*weight_specs(tuple(DType)), *gemms, *rows]
    results = compile_all([CompileJob(spec, sm) for spec in wanted])
    for result in results:
        if result.compiled is None:
            raise CompileError(f"{result.job.spec} for sm_{sm}: {result.reason}")
    code = [result.compiled for result in results if result.compiled is not None]
    maker = producer_of(sm)
    return Bundle(
        target=Target(sm, arch_of(sm).arch_specific),
        min_driver=driver_for(sm, maker),
        producer=maker,
        kernels=kernels_of(code),
        gpus=(),
        variants=tuple(compiled.variant for compiled in code),
        cubins=tuple(compiled.cubin for compiled in code),
        choices={},
        models=(),
    )


def main() -> None:
    """Write the bundle of one capability."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=int, default=90)
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    publish(options.out, encode(weights_bundle(options.sm)))


if __name__ == "__main__":
    main()
