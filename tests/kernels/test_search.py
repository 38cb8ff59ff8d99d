from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from pretuned.artifacts.records import PLAIN_DTYPES, DType, Layout, Op
from pretuned.kernels.arch import limits, supported
from pretuned.kernels.hopper_w4a16 import DTYPES
from pretuned.kernels.registry import refusal
from pretuned.kernels.search import FP32_LIMIT, LIMIT, candidates, fallbacks, shared_bytes_at_least
from pretuned.kernels.spec import Config, Loads, Schedule, Spec, TileRows

EVERY = list(itertools.product(Op, (dtype for dtype in DType if dtype in PLAIN_DTYPES), supported()))
QUANTISED = [dtype for dtype in DType if dtype.quantised and not dtype.quantises_x]


@pytest.mark.parametrize(("op", "dtype", "sm"), EVERY)
def test_candidates_are_valid_unique_and_fit(op: Op, dtype: DType, sm: int) -> None:
    configs = candidates(op, dtype, sm)
    assert len(set(configs)) == len(configs)
    assert [refusal(Spec(op, dtype, config), sm) for config in configs] == [None] * len(configs)
    limit = limits(sm).shared_per_block_bytes
    assert max(shared_bytes_at_least(op, dtype, config, sm) for config in configs) <= limit
    assert candidates(op, dtype, sm) == configs


@pytest.mark.parametrize(("op", "dtype", "sm"), EVERY)
def test_the_number_of_candidates(op: Op, dtype: DType, sm: int) -> None:
    count = len(candidates(op, dtype, sm))
    if dtype is DType.FP32:
        assert 4 <= count <= FP32_LIMIT
    else:
        assert 16 <= count <= LIMIT


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.TF32])
@pytest.mark.parametrize("op", Op)
def test_the_limit_cuts_off_nothing_that_was_measured(op: Op, dtype: DType) -> None:
    """The last of the pool are those for one token: they would be missed."""
    assert len(candidates(op, dtype, 90)) < LIMIT


@pytest.mark.parametrize(("op", "dtype", "sm"), EVERY)
def test_tma_only_where_the_hardware_has_it(op: Op, dtype: DType, sm: int) -> None:
    kinds = {config.loads is Loads.TMA for config in candidates(op, dtype, sm)}
    assert kinds == ({False} if sm < 90 or dtype is DType.FP32 else {False, True})


@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
def test_what_won_on_hopper_is_there(op: Op) -> None:
    configs = candidates(op, DType.BF16, 90)
    assert Config(128, 256, 64, 8, 3, loads=Loads.TMA) in configs
    assert Config(128, 256, 64, 8, 4, loads=Loads.TMA) in configs
    assert Config(64, 128, 128, 4, 4, loads=Loads.TMA) in configs
    assert Config(128, 128, 64, 4, 3, loads=Loads.TMA) in configs
    assert Config(16, 256, 128, 4, 3, loads=Loads.TMA) in configs
    assert Config(16, 64, 256, 4, 3, schedule=Schedule.TILE) in configs
    assert Config(16, 64, 128, 4, 4, loads=Loads.TMA, schedule=Schedule.TILE) in configs


def _sweep(op: Op) -> tuple[dict[str, Config], list[dict[str, Any]]]:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / f"sweep-h200-{op.value}-bf16.json"
    sweep = json.loads(path.read_text())
    variants = {n: Config.from_pairs(tuple(v["config"].items())) for n, v in sweep["variants"].items()}
    return variants, sweep["cells"]


@pytest.mark.parametrize("op", Op)
def test_the_hopper_list_holds_the_fastest_of_every_cell_measured(op: Op) -> None:
    variants, cells = _sweep(op)
    listed = set(candidates(op, DType.BF16, 90))
    for cell in cells:
        times = cell["us"]
        assert min(us for n, us in times.items() if variants[n] in listed) <= 1.01 * min(times.values()), cell


@pytest.mark.parametrize("op", [Op.DX, Op.DW])
def test_what_never_came_near_the_fastest_is_not_listed(op: Op) -> None:
    # Each kind for itself: the others are for more than 512 experts and for tf32.
    variants, cells = _sweep(op)
    listed = set(candidates(op, DType.BF16, 90))
    nearest: dict[Config, float] = {}
    for cell in cells:
        for kind in (False, True):
            times = {variants[n]: us for n, us in cell["us"].items() if variants[n].schedule.warp_specialized is kind}
            for config, us in times.items():
                nearest[config] = min(nearest.get(config, 9.0), us / min(times.values()))
    assert {str(config): near for config, near in nearest.items() if config in listed and near > 1.021} == {}
    assert len(listed & set(nearest)) >= 19


def test_both_kinds_of_grid_on_ampere() -> None:
    assert {config.schedule is not Schedule.TILE for config in candidates(Op.FORWARD, DType.BF16, 80)} == {False, True}


def test_a_small_shared_memory_leaves_the_large_tiles_out() -> None:
    large = Config(128, 256, 64, 8, 4, loads=Loads.TMA)
    assert large not in candidates(Op.FORWARD, DType.BF16, 120)
    assert shared_bytes_at_least(Op.FORWARD, DType.BF16, large, 90) == 4 * (128 + 256) * 64 * 2


def test_dw_counts_its_own_tile() -> None:
    config = Config(32, 128, 256, 8, 4)  # 128 x 256 of w, 32 rows a step
    assert shared_bytes_at_least(Op.DW, DType.BF16, config, 80) == 3 * (128 + 256) * 32 * 2


@pytest.mark.parametrize(("op", "dtype", "sm"), EVERY)
def test_fallbacks_use_pointers_and_fit_everywhere(op: Op, dtype: DType, sm: int) -> None:
    configs = fallbacks(op, dtype, sm)
    assert 1 <= len(configs) <= 2
    for config in configs:
        assert refusal(Spec(op, dtype, config, alignment=1), sm) is None
        assert config.loads is Loads.POINTER
        assert shared_bytes_at_least(op, dtype, config, sm) <= 48 * 1024


@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_weights_have_candidates_of_their_own_on_hopper_and_those_of_one_kernel_everywhere(
    dtype: DType,
) -> None:
    for op, sm in itertools.product(Op, supported()):
        listed = candidates(op, dtype, sm)
        everywhere = {config for config in listed if config.schedule is Schedule.TILE}
        assert bool(everywhere) is bool(fallbacks(op, dtype, sm)) is (op is not Op.DW)
        own = op is Op.FORWARD or (op is Op.DX and dtype is not DType.FP8_CHANNEL_A16)
        assert (len(listed) > len(everywhere)) is (own and sm == 90 and dtype in DTYPES)
        for config in everywhere:
            assert refusal(Spec(op, dtype, config, Layout.STORED), sm) is None
    if dtype in DTYPES:
        configs = [config for config in candidates(Op.FORWARD, dtype, 90) if config.schedule is not Schedule.TILE]
        assert len(set(configs)) == len(configs) >= 6
        assert {(config.schedule, config.loads) for config in configs} == {(Schedule.W4A16, Loads.TMA)}
        assert {config.rows for config in configs} == set(TileRows)
        for config in configs:
            assert refusal(Spec(Op.FORWARD, dtype, config), 90) is None
            assert shared_bytes_at_least(Op.FORWARD, dtype, config, 90) <= limits(90).shared_per_block_bytes


def test_codes_take_less_room_than_what_they_stand_for() -> None:
    config = Config(64, 128, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W4A16, rows=TileRows.FITTED)
    sizes = {dtype: shared_bytes_at_least(Op.FORWARD, dtype, config, 90) for dtype in QUANTISED}
    assert sizes[DType.MXFP4] == 4 * 128 * (64 * 2 + 128 // 2)
    assert sizes[DType.FP8_BLOCK_A16] == 4 * 128 * (64 * 2 + 128)


@pytest.mark.parametrize("listing", [candidates, fallbacks])
def test_an_unsupported_capability_is_an_error(listing: object) -> None:
    with pytest.raises(LookupError, match="sm_75 is not known; supported: 80"):
        listing(Op.FORWARD, DType.BF16, 75)  # type: ignore[operator]
