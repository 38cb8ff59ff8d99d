"""The entry of the kernel for codes with a scale a row: its variants, what compiler and launcher are told."""

from __future__ import annotations

import pytest

from pretuned.artifacts.records import DType, Fusion, Op, Problem
from pretuned.kernels import registry
from pretuned.kernels.codes import BLOCK
from pretuned.kernels.hopper_w8a8_channel import PART, ROWS_W8A8_CHANNEL
from pretuned.kernels.registry import refusal
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Config, Edge, Loads, Schedule, Spec, TileRows

MANY = Config(256, 128, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W8A8_CHANNEL, rows=TileRows.FITTED)
FEW = Config(16, 64, 512, 8, 3, loads=Loads.TMA, schedule=Schedule.W8A8_CHANNEL)


def spec(config: Config = MANY, op: Op = Op.FORWARD, fusion: Fusion = Fusion.NONE) -> Spec:
    return Spec(op, DType.FP8_CHANNEL, config, fusion=fusion)


def test_the_entry_is_for_a_scale_a_row() -> None:
    assert ROWS_W8A8_CHANNEL.dtypes == {DType.FP8_CHANNEL}


def test_every_candidate_is_accepted_comes_back_and_is_this_kernel_s() -> None:
    configs = candidates(Op.FORWARD, DType.FP8_CHANNEL, 90)
    assert {MANY, FEW} <= set(configs)
    for config in configs:
        for fusion in (Fusion.NONE, Fusion.SCATTER):
            assert refusal(spec(config, fusion=fusion), 90) is None
            assert registry.entry_of(spec(config, fusion=fusion)) is ROWS_W8A8_CHANNEL
        assert Config.from_pairs(config.pairs()) == config
        assert registry.clears(Fusion.SCATTER, config)
        assert PART % config.block_k == 0


@pytest.mark.parametrize("config", [MANY, FEW])
def test_sums_in_fp16_have_room_for_the_longest_reduction(config: Config) -> None:
    """448 x 448 x K, times 2^-17."""
    longest = registry.limits_of(Op.FORWARD, config, DType.FP8_CHANNEL).steps
    assert longest is not None
    assert 448.0 * 448.0 * longest * config.block_k / 2**17 < 65504
    K = longest * config.block_k
    assert registry.too_large(Op.FORWARD, 4096, K, config) is None
    assert f"is {K}, this is {K + BLOCK}" in str(registry.too_large(Op.FORWARD, 4096, K + BLOCK, config))
    assert registry.beyond(Problem(Op.FORWARD, DType.FP8_CHANNEL, 8, 4096, K + BLOCK), config) is not None


@pytest.mark.parametrize("op", [Op.DX, Op.DW])
def test_gradients_have_none(op: Op) -> None:
    assert candidates(op, DType.FP8_CHANNEL, 90) == ()
    assert refusal(spec(op=op), 90) is not None


@pytest.mark.parametrize("sm", [80, 86, 89, 100, 103, 120, 121])
def test_other_capabilities_have_none(sm: int) -> None:
    assert Schedule.W8A8_CHANNEL not in {config.schedule for config in candidates(Op.FORWARD, DType.FP8_CHANNEL, sm)}
    assert "has no " in str(refusal(spec(), sm))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (MANY, {"block_n": 256}, "is 256, wanted"),
        (MANY, {"block_k": 64}, "block_k is 64, wanted"),
        (MANY, {"num_stages": 13}, "num_stages is 13, wanted 2 to 12"),
        (FEW, {"block_m": 128}, "is 128, wanted"),
        (MANY, {"num_warps": 4}, "num_warps is 4, wanted 8"),
        (MANY, {"loads": Loads.POINTER}, "wanted TMA"),
        (MANY, {"edge": Edge.HALF}, "edge is HALF, wanted WHOLE"),
        (FEW, {"rows": TileRows.FITTED}, "wanted"),
    ],
)
def test_tiles_that_there_are_not(config: Config, changes: dict[str, int], message: str) -> None:
    assert message in str(refusal(spec(config._replace(**changes)), 90))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.FP8_CHANNEL])
def test_other_dtypes_have_no_such_config(dtype: DType) -> None:
    assert "no code" in str(refusal(spec()._replace(dtype=dtype), 90))


@pytest.mark.parametrize("wrong", ["mixed_input", "pingpong", "block_scaled"])
def test_a_config_says_one_schedule(wrong: str) -> None:
    pairs = dict(MANY.pairs())
    assert (pairs["row_scaled"], pairs["fitted"]) == (1, 1)
    assert str(MANY).endswith("tma w8a8_channel fitted")
    with pytest.raises(ValueError, match="config is specialized, and none of"):
        Config.from_pairs(tuple((pairs | {wrong: 1}).items()))
    with pytest.raises(ValueError, match="row_scaled config is specialized"):
        Config.from_pairs(tuple((pairs | {"specialized": 0}).items()))


@pytest.mark.parametrize("config", [MANY, FEW])
@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER])
def test_arguments_of_a_launcher(config: Config, fusion: Fusion) -> None:
    """Results leave through a descriptor in boxes of 64 rows, where no index says where they go."""
    arguments = dict(registry.arguments(spec(config, fusion=fusion)))
    assert (arguments["x"], arguments["w"]) == ("desc2", "desc3")
    assert all(arguments[name] == "ptr" for name in ("x_scale", "w_scale", "y", "counter"))
    assert ("y_map" in arguments) is (fusion is Fusion.NONE and config is MANY)
    assert set(registry.required(spec(config, fusion=fusion))) <= set(arguments)
    boxes = registry.boxes(spec(config, fusion=fusion))
    wanted = ((64, 128), (2, 8, 256)) if config is MANY else ((16, 128), (1, 32, 256))
    assert (boxes["x"], boxes["w"]) == wanted
    constants = registry.constants(spec(config, fusion=fusion), 90)
    assert (constants["INDEXED"], constants["FITTED"], constants["PART"]) == (bool(fusion), config is MANY, PART)
    assert registry.threads(spec(config)) == 384


def test_two_buffers_of_results_where_there_is_room() -> None:
    slots = {fusion: registry.constants(spec(fusion=fusion), 90)["SLOTS"] for fusion in (Fusion.NONE, Fusion.SCATTER)}
    assert slots == {Fusion.NONE: 2, Fusion.SCATTER: 1}  # an index has tables of its own
    assert registry.constants(spec(MANY._replace(num_stages=3), fusion=Fusion.SCATTER), 90)["SLOTS"] == 2
