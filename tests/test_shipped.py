"""The bundles in the wheel: sound, small, of these very kernels, and for sm_90 measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretuned.aot.journal import read_journal
from pretuned.aot.records import Measured
from pretuned.aot.verify import sound
from pretuned.artifacts.store import open_bundle
from pretuned.artifacts.types import Op, Source
from pretuned.kernels.revisions import source_sha256

FOLDER = Path(__file__).parents[1] / "artifacts" / "bundles"
BUNDLES = sorted(FOLDER.glob("*.msgpack"))
JOURNAL = Path(__file__).parents[1] / "benchmarks" / "results" / "catalogue-h200.journal"
MOST_BYTES = 16_400_000


def test_which_there_are_and_how_large() -> None:
    capabilities = (100, 103, 120, 121, 80, 86, 89, 90)
    assert [path.name for path in BUNDLES] == [f"catalogue-sm{sm}.msgpack" for sm in capabilities]
    assert sum(path.stat().st_size for path in BUNDLES) < MOST_BYTES


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.stem)
def test_every_one_is_sound_and_of_these_kernels(path: Path) -> None:
    bundle = sound(str(path))
    for kernel in bundle.kernels:
        assert kernel.source_sha256.hex() == source_sha256(kernel.name), (
            f"{path.name} was built of another {kernel.name}: build it anew (docs/build.md, What ships)"
        )
    assert {problem.op for problem in bundle.choices} == set(Op)


def test_the_one_for_sm_90_was_measured_on_an_h200() -> None:
    with open_bundle(FOLDER / "catalogue-sm90.msgpack") as bundle:
        gpus = bundle.gpus
        choices = [choice for problem in bundle.problems() for choice in bundle.find(problem)]
    assert [gpu.name for gpu in gpus] == ["NVIDIA H200"]
    measured = [choice for choice in choices if choice.source is Source.MEASURED]
    assert len(measured) > 0.9 * len(choices)
    assert all(choice.gpu == 0 and choice.time_ns > 0 for choice in measured)


def test_every_specialised_kernel_was_right_on_an_h200() -> None:
    """No interpreter runs them: what the journal judged on the GPU are these very cubins, of this very source."""
    contents = read_journal(JOURNAL)
    for kernel in contents.header.kernels:
        assert kernel.source_sha256.hex() == source_sha256(kernel.name), (
            f"{kernel.name} changed since it was judged on an H200. On one: aot measure candidates.msgpack --models "
            f"'catalogue tp=1 dtype=bf16' --journal {JOURNAL.name} (docs/build.md, What ships)"
        )
    judged = {timing.variant for one in contents.records if isinstance(one, Measured) for timing in one.timings}
    with open_bundle(FOLDER / "catalogue-sm90.msgpack") as bundle:
        specialised = [one for one in bundle.variants() if one.kernel.endswith(("_specialized", "_fitted"))]
    assert {one.kernel for one in specialised} == {"rows_specialized", "rows_fitted", "weight_specialized"}
    assert {one.cubin_sha256 for one in specialised} <= judged
