"""Specialised kernels whose warpgroups take whole tiles of 128 or 192 columns in turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pretuned.aot.plan.families import Family, Pool
from pretuned.artifacts.records import DType, Fusion, Layout, Op, Problem
from pretuned.kernels import registry
from pretuned.kernels.arch import limits
from pretuned.kernels.chips import chip_for
from pretuned.kernels.cost import CONSTANTS, Resources
from pretuned.kernels.cost_model import estimate_us
from pretuned.kernels.search import candidates, shared_bytes_at_least
from pretuned.kernels.spec import Cache, Config, Edge, Loads, Schedule, Spec, TileRows

SPECIALIZED = Path(__file__).parents[3] / "kernels" / "hopper_plain" / "rows.py"
ROWS = Config(128, 192, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG)
DEALT = Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.PINGPONG)
WEIGHT = Config(32, 128, 192, 8, 10, loads=Loads.TMA, schedule=Schedule.PINGPONG)
ACROSS = Config(32, 192, 128, 8, 10, loads=Loads.TMA, schedule=Schedule.PINGPONG)


def refused(op: Op, config: Config, dtype: DType = DType.BF16, fusion: Fusion = Fusion.NONE) -> str:
    return registry.refusal(Spec(op, dtype, config, fusion=fusion)) or ""


@pytest.mark.parametrize("config", [ROWS, DEALT, WEIGHT, ACROSS])
def test_what_can_be_pingpong(config: Config) -> None:
    op = Op.DW if config in (WEIGHT, ACROSS) else Op.FORWARD
    assert not refused(op, config)
    assert str(config).endswith(" tma pingpong")
    assert "loads is POINTER, wanted TMA" in refused(op, config._replace(loads=Loads.POINTER))
    assert "edge is HALF, wanted WHOLE" in refused(op, config._replace(edge=Edge.HALF))
    assert "cache is EVICT_FIRST, wanted DEFAULT" in refused(op, config._replace(cache=Cache.EVICT_FIRST))
    assert "num_warps is 4, wanted 8" in refused(op, config._replace(num_warps=4))
    assert "num_stages is 1, wanted 2 to 15" in refused(op, config._replace(num_stages=1))
    assert "num_stages is 16, wanted 1 to 15" in refused(op, config._replace(num_stages=16))
    for name in ("block_m", "block_n", "block_k"):
        other = 256 if config is DEALT or getattr(config, name) == 192 else 192  # 128 x 192, 192 deep, is one of dW
        assert f"is {other}, wanted" in refused(op, config._replace(**{name: other}))
    wide = refused(op, config._replace(schedule=Schedule.COOPERATIVE))
    assert ("is 192, wanted" in wide) is (config is not DEALT)


@pytest.mark.parametrize("wrong", [{"block_m": 64}, {"block_m": 256}, {"block_k": 32}])
def test_rows_have_two_shapes_of_tiles(wrong: dict[str, int]) -> None:
    """A part of w has 64 columns, and lies as lines of 64 of its reduction: deeper ones would be read crosswise."""
    for config in (ROWS, DEALT):
        assert "wanted" in refused(Op.FORWARD, config._replace(**wrong))
        assert "block_n is 64, wanted" in refused(Op.FORWARD, config._replace(block_n=64))
    assert "block_k is 128, wanted 64" in refused(Op.FORWARD, ROWS._replace(block_k=128))  # that is a tile of dW


def test_a_step_of_dw_has_any_rows() -> None:
    assert not refused(Op.DW, WEIGHT._replace(block_m=64, num_stages=5))
    assert not refused(Op.DW, ACROSS._replace(block_m=64, num_stages=5))
    cases = ((Op.FORWARD, ROWS), (Op.FORWARD, DEALT), (Op.DW, WEIGHT), (Op.DW, ACROSS))
    assert [registry.transposed(*case) for case in cases] == [False, False, False, True]
    assert "block_n is 64, wanted 128" in refused(Op.DW, WEIGHT._replace(block_n=64))


def test_which_kernels_have_such_code() -> None:
    for op in Op:
        for dtype in DType:
            for fusion in (Fusion.NONE, Fusion.GATHER, Fusion.SCATTER):
                for config in (ROWS, DEALT, WEIGHT, ACROSS):
                    plain = fusion is Fusion.NONE or (fusion is Fusion.SCATTER and op is not Op.DW)
                    fits = (config in (WEIGHT, ACROSS)) == (op is Op.DW) and plain
                    there = fits and dtype in (DType.BF16, DType.FP16)
                    assert (not refused(op, config, dtype, fusion)) is there
    both = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
    assert not refused(Op.DX, both, DType.FP16, Fusion.GATHER)


def test_how_many_columns_a_tile_can_be_distinguished() -> None:
    """Their number goes to the warpgroups in 20 bits."""
    for config, op, columns_are in (
        (ROWS, Op.FORWARD, "N"),
        (ROWS, Op.DX, "K"),
        (DEALT, Op.FORWARD, "N"),
        (DEALT, Op.DX, "K"),
        (WEIGHT, Op.DW, "K"),
        (ACROSS, Op.DW, "N"),
    ):
        most = (128 if config is DEALT else 192) << 20
        problem = Problem(op, DType.BF16, 4, 64, 64)._replace(**{columns_are: most})
        assert registry.beyond(problem, config) is None
        more = problem._replace(**{columns_are: most + 8})
        assert f"the most columns of {config} are {most}, these are {most + 8}" in str(registry.beyond(more, config))
        plain = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
        assert registry.beyond(more, plain) is None


def test_how_long_a_reduction_can_be() -> None:
    """Its steps go to the warpgroups in 20 bits."""
    for config in (ROWS, Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)):
        most = 64 * ((1 << 20) - 1)
        assert registry.beyond(Problem(Op.FORWARD, DType.BF16, 4, 64, most), config) is None
        assert "reduction" in str(registry.beyond(Problem(Op.FORWARD, DType.BF16, 4, 64, most + 1), config))
        assert "reduction" in str(registry.beyond(Problem(Op.DX, DType.BF16, 4, most + 1, 64), config))
    assert registry.beyond(Problem(Op.FORWARD, DType.BF16, 4, 64, 2**31 - 1), Config(16, 64, 128, 4, 3)) is None


def test_a_bundle_from_before_has_none() -> None:
    wide = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
    before = tuple(pair for pair in wide.pairs() if pair[0] != "pingpong")
    assert Config.from_pairs(before) == wide
    assert Config.from_pairs(ROWS.pairs()) == ROWS


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Op)
def test_it_is_tried_where_there_is_such_code(op: Op, dtype: DType) -> None:
    configs = [
        config
        for sm in (80, 90, 100, 120)
        for config in candidates(op, dtype, sm)
        if config.schedule is Schedule.PINGPONG
    ]
    fixed = [config for config in configs if config.rows is TileRows.FIXED]  # of those test_ragged.py speaks
    wanted = [WEIGHT, ACROSS] if op is Op.DW else [ROWS, DEALT]
    assert fixed == (wanted if dtype in (DType.BF16, DType.FP16) else [])


@pytest.mark.parametrize("fusion", [Fusion.GATHER, Fusion.SILU, Fusion.SILU | Fusion.GATHER])
def test_it_gathers_no_rows(fusion: Fusion) -> None:
    family = Family(Op.FORWARD, DType.BF16, Layout.NK, fusion)
    assert not [config for config in Pool().candidates(family, 90) if config.schedule is Schedule.PINGPONG]
    assert "schedule is PINGPONG, wanted COOPERATIVE" in refused(Op.FORWARD, ROWS, fusion=fusion)
    for other in (Fusion.NONE, Fusion.SCATTER):
        for config in (ROWS, DEALT):
            assert config in Pool().candidates(replace(family, fusion=other), 90)
            assert not refused(Op.FORWARD, config, fusion=other)


def test_its_boxes_have_64_columns() -> None:
    for config in (ROWS, DEALT):
        assert registry.boxes(Spec(Op.FORWARD, DType.BF16, config))["w"] == (1, 64, 64)
    for config in (WEIGHT, ACROSS):
        assert registry.boxes(Spec(Op.DW, DType.BF16, config)) == {
            "dy": (1, 1, 32, 64),
            "x": (1, 1, 32, 64),
            "dw": (1, 64, 64),
        }
        constants = registry.constants(Spec(Op.DW, DType.BF16, config), 90)
        assert (constants["BLOCK_M"], constants["BLOCK_K"], constants["ACROSS"]) == (32, 192, config is ACROSS)


def test_tiles_of_128_columns_are_distributed_in_turn_but_for_the_last_rounds() -> None:
    """All others go to programs as they become free: whoever reads this of the config must agree with the kernel."""
    cases = ((Op.FORWARD, ROWS), (Op.FORWARD, DEALT), (Op.DW, WEIGHT), (Op.DW, ACROSS))
    assert [registry.dealt(*case) for case in cases] == [False, True, False, False]
    assert not registry.dealt(Op.FORWARD, DEALT._replace(schedule=Schedule.COOPERATIVE))
    assert not registry.dealt(Op.FORWARD, Config(64, 128, 128, 4, 4, loads=Loads.TMA))
    assert "    if PINGPONG and BLOCK_N == 2 * PART:\n        rounds =" in SPECIALIZED.read_text()


def test_their_ring_has_no_words_to_spare() -> None:
    """A product of 128 columns is written as it is: none of its words lie past the ring's end."""
    ends = {config: registry.constants(Spec(Op.FORWARD, DType.BF16, config), 90) for config in (ROWS, DEALT)}
    assert [(constant["BLOCK_N"], constant["STAGES"], constant["SLOTS"]) for constant in ends.values()] == [
        (192, 5, 1),
        (128, 6, 1),
    ]
    deeper = DEALT._replace(num_stages=7)  # 224 KiB of operands, and 16 of results: past what an SM has
    results_bytes = 2 * 64 * 64 * 2
    assert shared_bytes_at_least(Op.FORWARD, DType.BF16, deeper, 90) + results_bytes > limits(90).shared_per_block_bytes


def test_where_tiles_are_distributed_memory_takes_longer() -> None:
    """At T=1024 they took 1.02 to 1.05 x the time of others where experts have few rows, and less where many."""
    both = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
    few = Problem(Op.FORWARD, DType.BF16, 512, 1024, 2048), 10240
    many = Problem(Op.FORWARD, DType.BF16, 64, 2048, 2048), 65536
    special = CONSTANTS.hopper.specialized

    def us(problem: Problem, M: int, config: Config, share: float) -> float:
        constants = CONSTANTS._replace(
            hopper=CONSTANTS.hopper._replace(specialized=special._replace(dealt_memory=share))
        )
        return estimate_us(problem, M, Resources(config, 384, 213384, 168, 16), chip_for(90), constants)

    assert us(*few, DEALT, special.dealt_memory) > 1.01 * us(*few, both, special.dealt_memory)
    assert us(*many, DEALT, special.dealt_memory) < us(*many, both, special.dealt_memory)
    assert us(*few, DEALT, 1.5) > 1.3 * us(*few, DEALT, 1.0)
    for config in (ROWS, both):
        assert us(*few, config, 1.5) == us(*few, config, 1.0)


def test_dw_lies_as_wastes_least() -> None:
    """OLMoE, T=8192: measured 470 us with 192 columns and 402 with 192 rows in down (N=2048, K=1024)."""
    for N, K, better in ((2048, 1024, ACROSS), (1024, 2048, WEIGHT), (2048, 512, ACROSS), (2048, 768, WEIGHT)):
        us = {
            config: estimate_us(
                Problem(Op.DW, DType.BF16, 64, N, K), 65536, Resources(config, 384, 225752, 168, 16), chip_for(90)
            )
            for config in (WEIGHT, ACROSS)
        }
        assert min(us, key=lambda config: us[config]) is better, (N, K, us)


@pytest.mark.parametrize(
    "spec",
    [
        Spec(Op.FORWARD, DType.BF16, ROWS),
        Spec(Op.DX, DType.FP16, ROWS, fusion=Fusion.SCATTER),
        Spec(Op.FORWARD, DType.BF16, DEALT),
        Spec(Op.DW, DType.BF16, WEIGHT),
        Spec(Op.DW, DType.BF16, ACROSS),
    ],
)
def test_its_registers_and_buffers(spec: Spec) -> None:
    """Registers and buffers of two warpgroups and the loading warp fit 168 for each of 12 warps."""
    constants = registry.constants(spec, 90)
    assert (constants["PINGPONG"], constants["REGISTERS"], constants["SLOTS"]) == (True, 224, 1)
    other = spec._replace(config=Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.COOPERATIVE))
    assert registry.constants(other, 90)["PINGPONG"] is False


@pytest.mark.parametrize("config", [WEIGHT, ACROSS, ROWS])
def test_three_parts_leave_through_one_buffer(config: Config) -> None:
    """Through two the first part of a tile would meet the last of the tile before in the same one, under TMA's eyes."""
    for stages in range(2, config.num_stages + 1):
        for rows in (16, 32, 64) if config is not ROWS else (128,):
            other = config._replace(num_stages=stages, block_m=rows)
            op = Op.FORWARD if config is ROWS else Op.DW
            assert registry.constants(Spec(op, DType.BF16, other), 90)["SLOTS"] == 1


def test_its_estimate_is_less_where_its_columns_divide() -> None:
    """gpt-oss, gate_up, at T=8192: measured 1396 and 1519 us for dW, N=5760 and K=2880."""
    problem = Problem(Op.DW, DType.BF16, 32, 5760, 2880)
    turns, both = (
        estimate_us(problem, 32768, Resources(config, 384, 229784, 168, 16), chip_for(90))
        for config in (WEIGHT, Config(32, 128, 256, 8, 8, loads=Loads.TMA, schedule=Schedule.COOPERATIVE))
    )
    assert turns < 0.97 * both


@pytest.mark.parametrize("op", Op)
def test_the_estimate_counts_columns_past_the_last(op: Op) -> None:
    """Of six tiles each, 1024 columns take as long as 1152 but for the bytes, and more where those beyond cost more."""
    config, hopper = (WEIGHT if op is Op.DW else ROWS), CONSTANTS.hopper

    def us(columns: int, waste: float) -> float:
        N, K = (columns, 2048) if op is Op.FORWARD else (2048, columns)
        constants = CONSTANTS._replace(
            hopper=hopper._replace(specialized=hopper.specialized._replace(turns_waste=waste))
        )
        resources = Resources(config, 384, 229784, 168, 16)
        return estimate_us(Problem(op, DType.BF16, 64, N, K), 65536, resources, chip_for(90), constants)

    assert us(1152, 1.0) == us(1152, 0.0)
    assert us(1024, 1.0) > 1.05 * us(1024, 0.0)
    assert 0.9 * us(1152, 0.0) < us(1024, 0.0) <= us(1152, 0.0)


def test_it_has_nothing_of_what_half_tiles_save() -> None:
    special = CONSTANTS.hopper.specialized
    resources = Resources(ROWS, 384, 229784, 168, 16)
    for problem, M in (
        (Problem(Op.FORWARD, DType.BF16, 512, 1024, 2048), 81920),
        (Problem(Op.FORWARD, DType.BF16, 32, 2880, 2880), 32768),
        (Problem(Op.FORWARD, DType.BF16, 8, 4096, 14336), 2048),
    ):
        seen = set()
        for on in (False, True):
            narrower = special._replace(half=0.9 * on, half_columns=on, split_tail=on)
            constants = CONSTANTS._replace(hopper=CONSTANTS.hopper._replace(specialized=narrower))
            seen.add(estimate_us(problem, M, resources, chip_for(90), constants))
        assert len(seen) == 1
