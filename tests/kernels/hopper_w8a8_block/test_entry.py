"""The entry of the kernel for codes of x and of w: which variants there are, what compiler and launcher are told."""

from __future__ import annotations

import pytest

from pretuned.artifacts.records import DType, Fusion, Op
from pretuned.kernels import registry
from pretuned.kernels.arch import arch_of
from pretuned.kernels.hopper_w8a8_block import ROWS_W8A8_BLOCK, scale_columns, stage_bytes
from pretuned.kernels.registry import refusal
from pretuned.kernels.search import candidates, shared_bytes_at_least
from pretuned.kernels.spec import Config, Edge, Loads, Schedule, Spec, TileRows

CONFIG = Config(128, 256, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W8A8_BLOCK)


def spec(config: Config = CONFIG, op: Op = Op.FORWARD, fusion: Fusion = Fusion.NONE) -> Spec:
    return Spec(op, DType.FP8_BLOCK, config, fusion=fusion)


def test_the_entry_is_for_scales_of_blocks() -> None:
    assert ROWS_W8A8_BLOCK.dtypes == {DType.FP8_BLOCK}


def test_every_candidate_is_accepted_comes_back_and_is_this_kernel_s() -> None:
    configs = candidates(Op.FORWARD, DType.FP8_BLOCK, 90)
    assert configs
    for config in configs:
        for fusion in (Fusion.NONE, Fusion.SCATTER):
            assert refusal(spec(config, fusion=fusion), 90) is None
            assert registry.entry_of(spec(config, fusion=fusion)) is ROWS_W8A8_BLOCK
        assert Config.from_pairs(config.pairs()) == config
        assert registry.limits_of(Op.FORWARD, config, DType.FP8_BLOCK).steps == 2**20 - 1
        assert registry.clears(Fusion.SCATTER, config)
        room = arch_of(90).limits.shared_per_block_bytes
        assert (
            shared_bytes_at_least(Op.FORWARD, DType.FP8_BLOCK, config, 90) <= config.num_stages * stage_bytes() < room
        )


@pytest.mark.parametrize("op", [Op.DX, Op.DW])
def test_gradients_have_none(op: Op) -> None:
    assert candidates(op, DType.FP8_BLOCK, 90) == ()
    assert refusal(spec(op=op), 90) is not None


@pytest.mark.parametrize("sm", [80, 86, 89, 100, 103, 120, 121])
def test_other_capabilities_have_none(sm: int) -> None:
    assert CONFIG.schedule not in {config.schedule for config in candidates(Op.FORWARD, DType.FP8_BLOCK, sm)}
    assert "has no " in str(refusal(spec(), sm))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_m": 64}, "block_m is 64, wanted 128"),
        ({"block_n": 128}, "block_n is 128, wanted 256"),
        ({"block_k": 64}, "block_k is 64, wanted 128"),
        ({"num_stages": 5}, "num_stages is 5, wanted 2 to 4"),
        ({"num_warps": 4}, "num_warps is 4, wanted 8"),
        ({"loads": Loads.POINTER}, "loads is POINTER, wanted TMA"),
        ({"edge": Edge.HALF}, "edge is HALF, wanted WHOLE"),
    ],
)
def test_tiles_that_there_are_not(changes: dict[str, int], message: str) -> None:
    assert message in str(refusal(spec(CONFIG._replace(**changes)), 90))  # type: ignore[arg-type]


def test_no_tile_is_fitted() -> None:
    assert refusal(spec(CONFIG._replace(rows=TileRows.FITTED)), 90) is not None


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if not dtype.quantises_x])
def test_other_dtypes_have_no_such_config(dtype: DType) -> None:
    assert "its dtypes are fp8_block" in str(refusal(spec()._replace(dtype=dtype), 90)) or "no code" in str(
        refusal(spec()._replace(dtype=dtype), 90)
    )


@pytest.mark.parametrize("wrong", ["mixed_input", "pingpong", "row_scaled"])
def test_a_config_says_one_schedule(wrong: str) -> None:
    pairs = dict(CONFIG.pairs())
    assert pairs["block_scaled"] == 1
    with pytest.raises(
        ValueError, match="block_scaled config is specialized, and none of mixed_input, pingpong, row_scaled"
    ):
        Config.from_pairs(tuple((pairs | {wrong: 1}).items()))
    with pytest.raises(ValueError, match="block_scaled"):
        Config.from_pairs(tuple((pairs | {"specialized": 0}).items()))


@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER])
def test_arguments_of_a_launcher(fusion: Fusion) -> None:
    arguments = dict(registry.arguments(spec(fusion=fusion)))
    assert (arguments["x"], arguments["w"], arguments["x_scale"]) == ("desc2", "desc4", "desc2")
    assert arguments["w_scale"] == arguments["y"] == arguments["counter"] == "ptr"
    assert ("y_map" in arguments) is (fusion is Fusion.NONE)
    assert set(registry.required(spec(fusion=fusion))) <= set(arguments)
    boxes = registry.boxes(spec(fusion=fusion))
    assert (boxes["x"], boxes["w"], boxes["x_scale"]) == ((64, 128), (2, 2, 4, 256), (1, 256))
    assert registry.constants(spec(fusion=fusion), 90)["INDEXED"] is bool(fusion)
    assert registry.threads(spec()) == 384


def test_scales_of_rows_lie_in_whole_16_bytes() -> None:
    assert [scale_columns(M) for M in (1, 4, 5, 128)] == [4, 4, 8, 128]


def test_two_buffers_of_results_where_there_is_room() -> None:
    slots = {stages: registry.constants(spec(CONFIG._replace(num_stages=stages)), 90)["SLOTS"] for stages in (2, 3, 4)}
    assert slots == {2: 2, 3: 2, 4: 1}
