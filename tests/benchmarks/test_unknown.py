"""Shapes that no list has: what a seed draws, and the journal of their times."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from types import ModuleType

import pytest

from pretuned.aot.journal.file import Header, read_journal
from pretuned.aot.journal.records import Measured, Timing
from pretuned.aot.measure.job import MeasureJob, MeasureResult
from pretuned.artifacts.bundle_file import BundleFile, open_bundle
from pretuned.artifacts.records import DType, Op, Problem
from pretuned.kernels.chips import chip_of
from pretuned.kernels.cost import Resources
from pretuned.kernels.cost_model import estimate_us

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def tool() -> ModuleType:
    from benchmarks.model import unknown

    return unknown


class Modelled:
    """A bench on which each variant takes what the cost model says, but the modelled choice twice that."""

    def __init__(self, bundle: BundleFile) -> None:
        self._bundle, self._chip = bundle, chip_of(bundle.gpus[0], 90)

    def run(self, job: MeasureJob) -> MeasureResult:
        timings = []
        for place, i in enumerate(job.contenders):
            variant = self._bundle.variant(i)
            ns = round(1e3 * estimate_us(job.problem, job.bucket, Resources.of(variant), self._chip))
            timings.append(Timing(variant.cubin_sha256, (ns * (2 if place == 0 else 1),) * 2, 0.001, 8, 0.001))
        first = timings[0].variant
        return MeasureResult(Measured(job.problem, job.bucket, first, tuple(timings), None, None, 1.0, 13000))


def test_a_seed_draws_the_same_products_and_none_that_is_known(tool: ModuleType) -> None:
    first = list(itertools.islice(tool.drawn(1, set()), 20))
    assert first == list(itertools.islice(tool.drawn(1, set()), 20))
    assert first != list(itertools.islice(tool.drawn(2, set()), 20))
    assert len(set(first)) == 20
    assert first[0] not in list(itertools.islice(tool.drawn(1, {first[0]}), 20))
    for E, N, K in first:
        assert 7 <= E <= 200
        assert N % 32 == K % 32 == 0
        assert 2 * math.prod((E, N, K)) <= tool.MOST_BYTES


def test_what_was_timed_is_not_timed_again(tool: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "some.journal"
    with open_bundle(tool.BUNDLE) as bundle:
        shapes = list(itertools.islice(tool.drawn(1, set()), 2))
        header = Header(90, bundle.gpus[0], bundle.kernels)
        bench = Modelled(bundle)
        assert tool.time_all(shapes[:1], bundle, bench, header, path, math.inf, quick=True) == 12
        size = path.stat().st_size
        assert tool.time_all(shapes[:1], bundle, bench, header, path, math.inf, quick=True) == 12
        assert path.stat().st_size == size
        assert tool.time_all(shapes, bundle, bench, header, path, 0.0, quick=True) == 12  # its time was over
        assert tool.time_all(shapes, bundle, bench, header, path, math.inf, quick=True) == 24
    records = [record for record in read_journal(path).records if isinstance(record, Measured)]
    assert len(records) == 24
    assert {record.bucket // tool.top_k_of(record.problem.E, 8) for record in records} == set(tool.TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "worst", "modelled"), [("h100", 0.15, 0.025), ("h200", 0.18, 0.013)])
def test_shapes_that_no_list_has_lose_little(tool: ModuleType, gpu: str, worst: float, modelled: float) -> None:
    """Of products that another seed drew than the ones by which the neighbours' weights were set."""
    with open_bundle(tool.BUNDLE) as bundle:
        cells = list(tool.judged(bundle, read_journal(RESULTS / f"unknown-{gpu}.journal.xz")))
    assert len(cells) > 300
    shares = sorted(cell.chosen for cell in cells)
    assert statistics.fmean(shares) < 0.013
    assert shares[int(0.95 * len(shares))] < 0.06
    assert shares[-1] < worst
    assert statistics.fmean(cell.chosen for cell in cells if cell.tokens == 8192) < 0.02
    assert statistics.fmean(cell.modelled for cell in cells) > modelled


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [pytest.param("h100", marks=pytest.mark.nightly), "h200"])
def test_a_shortlist_by_neighbours_loses_less_than_one_by_the_cost_model(tool: ModuleType, gpu: str) -> None:
    with open_bundle(tool.BUNDLE) as bundle:
        contents = read_journal(RESULTS / f"unknown-{gpu}.journal.xz")
        alone = sorted(cell.chosen for cell in tool.judged(bundle, contents))
        for share, most in ((tool.SHARE, 0.0012), (tool.ON_DEMAND, 0.0005)):
            lists = tool.shortlists(bundle, contents, share)
            (losses, size), (by_model, as_many) = lists["neighbours too"], lists["cost model"]
            assert len(losses) == len(alone) > 300
            assert statistics.fmean(losses) <= min(most, statistics.fmean(by_model))
            assert losses[int(0.95 * len(losses))] < min(0.007, alone[int(0.95 * len(alone))])
            assert size <= as_many


@pytest.mark.slow
@pytest.mark.parametrize(
    ("journal", "bundle", "most"),
    [
        ("catalogue-h100", "catalogue", 0.007),
        pytest.param("quantised-h100", "quantised", 0.02, marks=pytest.mark.nightly),
        ("quantised-h200", "quantised", 0.02),
        pytest.param("deployed-h100", "catalogue", 0.007, marks=pytest.mark.nightly),
        pytest.param("catalogue-h200", "catalogue", 0.007, marks=pytest.mark.nightly),
    ],
)
def test_journals_of_shapes_that_count_as_not_measured(
    tool: ModuleType, journal: str, bundle: str, most: float
) -> None:
    with open_bundle(tool.BUNDLE.with_name(f"{bundle}-sm90.msgpack")) as opened:
        cells = list(tool.judged(opened, read_journal(RESULTS / f"{journal}.journal.xz")))
    assert len(cells) > 4000
    assert statistics.fmean(cell.chosen for cell in cells) <= most


def test_the_table_is_of_all_and_of_each_op(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(Op.DX, DType.BF16, 8, 64, 64)
    tool.show([tool.Judged(problem, 16, 0.10, 0.02, 2.0), tool.Judged(problem, 8192, 0.30, 0.0, 0.5)])
    output = capsys.readouterr().out
    assert "all, cost model" in output
    assert "dX, neighbours too" in output
    assert "forward" not in output
    assert "20.00%" in output
    assert "1.00x its speed, slower by over 3 % in 1, at worst 0.50x" in output


def test_what_a_decision_costs(tool: ModuleType) -> None:
    """A few of them: the figures are another machine's affair."""
    cost = tool.cost(tool.BUNDLE, shapes=3, again=10)
    assert set(cost) == {"forward plain", "forward gather", "forward scatter", "dX plain", "dW plain"}
    for row in cost.values():
        assert 0 < row["table_us"] < row["another_median_us"]
