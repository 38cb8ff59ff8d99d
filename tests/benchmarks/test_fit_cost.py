"""The fit of the cost model: on the committed sweeps, cut down so that it takes a second."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretuned.artifacts.records import Op
from pretuned.kernels.cost import CONSTANTS, Constants, ConstantsFamily, Specialized, WeightGrad
from pretuned.kernels.spec import Edge, Schedule, TileRows

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture
def tool() -> SimpleNamespace:
    from benchmarks.model import fit_cost, fitting, selection, sweeps, vectors

    modules = {"fit_cost": fit_cost, "fitting": fitting, "selection": selection, "sweeps": sweeps, "vectors": vectors}
    return SimpleNamespace(**modules)


def _cells(tool: SimpleNamespace, *ops: Op) -> list[object]:
    return [cell for op in ops for cell in tool.sweeps.load(RESULTS / f"sweep-h200-{op.value}-bf16.json")]


def test_a_fit_is_deterministic_and_helps(tool: SimpleNamespace) -> None:
    cells = [cell for cell in _cells(tool, *Op) if cell.model == "olmoe" and cell.tokens in (128, 8192)]
    first, again = (tool.fitting.fit(cells, tool.fitting.PRIOR, 60) for _ in range(2))
    assert first == again != tool.fitting.PRIOR
    packed = tool.vectors.parts(cells)
    assert tool.fitting.objective(packed, first) < tool.fitting.objective(packed, tool.fitting.PRIOR)
    assert tool.fitting.fit(cells, tool.fitting.PRIOR, 60, seed=1) != first


def test_dw_is_fitted_with_the_constants_of_the_others_held(tool: SimpleNamespace) -> None:
    cells = [cell for cell in _cells(tool, Op.DW) if cell.model == "olmoe"]
    constants, begun = tool.fitting.fit(cells, CONSTANTS, 40), CONSTANTS
    names = {name for name, *_ in tool.fitting.FITTED_DW}
    own = {name for name in Specialized._fields if "weight_" in name}
    assert names == {
        "write_share",
        *(f"weight.{name}" for name in WeightGrad._fields),
        *(f"specialized.{name}" for name in own),
    }
    for name in (*Constants.__slots__, *ConstantsFamily.__slots__):
        owner = Constants if name in Constants.__slots__ else ConstantsFamily
        held, was = (c if owner is Constants else c.hopper for c in (constants, begun))
        if name not in ("hopper", "write_share", "weight", "specialized"):
            assert getattr(held, name) == getattr(was, name), name
    for name in set(Specialized._fields) - own:
        assert getattr(constants.hopper.specialized, name) == getattr(begun.hopper.specialized, name), name
    assert constants.hopper.weight != begun.hopper.weight


@pytest.mark.parametrize("changes", [{}, {"half_columns": True, "split_tail": True, "half": 0.9}])
def test_the_fit_sees_the_model_itself(tool: SimpleNamespace, changes: dict[str, float]) -> None:
    """The arrays that the search evaluates hold what kernels/cost_model.py says, cell by cell."""
    hopper = CONSTANTS.hopper
    constants = CONSTANTS._replace(hopper=hopper._replace(specialized=hopper.specialized._replace(**changes)))
    cells = [cell for cell in _cells(tool, *Op) if cell.tokens in (1, 1024, 8192)]
    rankings, seen = tool.sweeps.Rankings(constants), 0
    for part in tool.vectors.parts(cells):
        estimates = part.estimates_us(constants).tolist()
        for start, cell in zip(part.starts.tolist(), part.cells, strict=True):
            times = {i: estimates[start + i] for i in range(len(cell.variants))}
            assert times == pytest.approx({i: us for us, i in rankings.of(cell)}, rel=1e-12)
            seen += 1
    assert seen == len(cells) == 108


@pytest.mark.parametrize(("K", "less"), [(2880, True), (2816, False), (128, True)])
def test_the_fit_sees_narrow_configs(tool: SimpleNamespace, K: int, less: bool) -> None:
    """Beside the same configs without it."""
    cell = next(cell for cell in _cells(tool, Op.DW) if cell.tokens == 8192 and cell.model == "gpt-oss-20b")
    wide = [
        variant
        for variant in cell.variants
        if variant.config.schedule.warp_specialized
        and not (variant.config.edge is Edge.HALF or variant.config.schedule is Schedule.PINGPONG)
    ]
    narrow = [replace(variant, config=variant.config._replace(edge=Edge.HALF)) for variant in wide]
    several = replace(
        cell, problem=cell.problem._replace(K=K), variants=(*wide, *narrow), times_us=(1.0,) * (2 * len(wide))
    )
    (part,) = tool.vectors.parts([several])
    ranked = {i: us for us, i in tool.sweeps.Rankings(CONSTANTS).of(several)}
    assert dict(enumerate(part.estimates_us(CONSTANTS).tolist())) == pytest.approx(ranked, rel=1e-12)
    assert wide
    assert all((ranked[len(wide) + i] < ranked[i]) is less for i in range(len(wide)))


def test_the_fit_sees_tiles_that_are_distributed(tool: SimpleNamespace) -> None:
    """Beside those of the same size that aren't, and of 192 columns."""
    cell = next(cell for cell in _cells(tool, Op.FORWARD) if cell.tokens == 1024 and cell.model == "qwen3-next")
    taken = [
        variant
        for variant in cell.variants
        if variant.config.schedule.warp_specialized and variant.config.block_n == 128
    ]
    several = [
        replace(variant, config=variant.config._replace(schedule=Schedule.PINGPONG)) for variant in taken
    ] + taken
    cell = replace(cell, variants=tuple(several), times_us=(1.0,) * len(several))
    (part,) = tool.vectors.parts([cell])
    ranked = {i: us for us, i in tool.sweeps.Rankings(CONSTANTS).of(cell)}
    assert dict(enumerate(part.estimates_us(CONSTANTS).tolist())) == pytest.approx(ranked, rel=1e-12)
    assert taken
    assert all(ranked[i] > ranked[len(taken) + i] for i in range(len(taken)))


def test_the_fit_sees_tiles_that_are_fitted(tool: SimpleNamespace) -> None:
    """By both warpgroups and in turns; of few rows and many."""
    for tokens in (1024, 8192):
        cell = next(cell for cell in _cells(tool, Op.FORWARD) if cell.tokens == tokens and cell.model == "qwen3-next")
        taken = [variant for variant in cell.variants if variant.config.schedule.warp_specialized][:1]
        fitted = [
            variant.config._replace(block_m=rows, block_n=128, schedule=schedule, rows=TileRows.FITTED)
            for variant in taken
            for rows, schedule in ((256, Schedule.COOPERATIVE), (192, Schedule.PINGPONG))
        ]
        several = [replace(taken[0], config=config) for config in fitted] + taken
        cell = replace(cell, variants=tuple(several), times_us=(1.0,) * len(several))
        (part,) = tool.vectors.parts([cell])
        ranked = {i: us for us, i in tool.sweeps.Rankings(CONSTANTS).of(cell)}
        assert dict(enumerate(part.estimates_us(CONSTANTS).tolist())) == pytest.approx(ranked, rel=1e-12)


@pytest.mark.parametrize(("N", "K"), [(2048, 1024), (1024, 2048), (5760, 2880)])
def test_the_fit_sees_tiles_that_lie_across(tool: SimpleNamespace, N: int, K: int) -> None:
    """Beside the same configs that don't; of dw turned round they take as long, but for what a row of a tile writes."""
    cell = next(cell for cell in _cells(tool, Op.DW) if cell.tokens == 8192 and cell.model == "olmoe")
    along = [
        variant
        for variant in cell.variants
        if variant.config.schedule is Schedule.PINGPONG and variant.config.block_k == 192
    ]
    lying = [replace(variant, config=variant.config._replace(block_n=192, block_k=128)) for variant in along]

    def estimates(N: int, K: int) -> list[float]:
        variants, times = (*along, *lying), (1.0,) * (2 * len(along))
        several = replace(cell, problem=cell.problem._replace(N=N, K=K), variants=variants, times_us=times)
        (part,) = tool.vectors.parts([several])
        ranked = {i: us for us, i in tool.sweeps.Rankings(CONSTANTS).of(several)}
        estimated: list[float] = part.estimates_us(CONSTANTS).tolist()
        assert dict(enumerate(estimated)) == pytest.approx(ranked, rel=1e-12)
        return estimated

    straight, round_ = estimates(N, K), estimates(K, N)
    assert along
    for i in range(len(along)):
        assert straight[i] == pytest.approx(round_[len(along) + i], rel=0.01)


def test_values_are_read_back_as_they_were_put(tool: SimpleNamespace) -> None:
    ranges = (*tool.fitting.FITTED, *tool.fitting.FITTED_DW)
    values = [low for _, low, _, _ in ranges]
    changed = tool.fitting.with_values(CONSTANTS, 90, ranges, values)
    assert tool.fitting.values_of(changed, 90, ranges) == values
    assert changed.blackwell is CONSTANTS.blackwell


def test_the_block_written_is_the_one_in_force(tool: SimpleNamespace) -> None:
    recorded = json.loads((RESULTS / "fit-h200-bf16.json").read_text())
    text = tool.fit_cost.CALIBRATION.read_text()
    block = text.split(tool.fit_cost.BEGIN)[1].split(tool.fit_cost.END)[0]
    header = f"# Fitted to sweeps with the sha256 {recorded['sweeps_sha256']} by python\n"
    assert block.startswith(header)
    words = [line.removeprefix("#").strip() for line in block.split("_HOPPER = ")[0].splitlines()[1:]]
    assert " ".join(words) == recorded["command"]
    names = {"ConstantsFamily": ConstantsFamily, "Specialized": Specialized, "WeightGrad": WeightGrad}
    exec(tool.fit_cost.source(CONSTANTS, 90, "# told"), names)
    assert names["_HOPPER"] == CONSTANTS.hopper
    assert block.split("_HOPPER = ")[1] == tool.fit_cost.source(CONSTANTS, 90, header).split("_HOPPER = ")[1]


def test_what_no_sweep_tells_outlives_a_fit(tool: SimpleNamespace) -> None:
    kept = tool.fit_cost.with_held(tool.fitting.PRIOR)
    assert kept.hopper.short_reads == CONSTANTS.hopper.short_reads > 1
    assert kept.hopper.specialized.dealt_memory == CONSTANTS.hopper.specialized.dealt_memory > 1
    assert kept.hopper.norm == tool.fitting.PRIOR.hopper.norm != CONSTANTS.hopper.norm


def test_tables_of_disjoint_cells_merge(tool: SimpleNamespace) -> None:
    cells = _cells(tool, Op.DW)
    whole = tool.sweeps.judge(cells, CONSTANTS)
    models = sorted({cell.model for cell in cells})
    parts = [
        tool.sweeps.judge([c for c in cells if (c.model in models[:2]) is half], CONSTANTS) for half in (True, False)
    ]
    merged = tool.sweeps.merged(parts)
    assert list(merged) == list(whole)
    for name, row in whole.items():
        assert merged[name] == pytest.approx(row, abs=2e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("op", Op)
def test_how_few_variants_are_enough_is_as_recorded(tool: SimpleNamespace, op: Op) -> None:
    recorded = json.loads((RESULTS / "select-h200-bf16.json").read_text())["select"][op.value]
    summary = tool.selection.summary(_cells(tool, op), op, CONSTANTS)
    assert summary == recorded
    losses = [row["mean_loss"] for row in summary["sets"]]
    assert all(more <= fewer + 1e-3 for fewer, more in itertools.pairwise(losses))
    assert losses[3] < 0.01
