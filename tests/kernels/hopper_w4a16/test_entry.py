"""The entry of the kernel for codes of w: which variants there are, and what a compiler and a launcher are told."""

from __future__ import annotations

import pytest

from pretuned.artifacts.records import DType, Fusion, Op
from pretuned.kernels import registry
from pretuned.kernels.codes import CODES
from pretuned.kernels.entry import KernelEntry
from pretuned.kernels.hopper_w4a16 import (
    DTYPES,
    ROWS_W4A16,
    ROWS_W4A16_MX8,
    ROWS_W4A16_ZERO,
    ZERO_DTYPES,
    can_be_prepared,
    code_layout,
    padded_width,
    zero_bytes,
)
from pretuned.kernels.registry import refusal
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Config, Edge, Loads, Schedule, Spec, TileRows

OWN = [DType(name) for name in CODES]  # of rows_wna16
ZERO = [DType.INT4_G32_ZP, DType.INT4_G64_ZP, DType.INT4_G128_ZP]
QUANTISED = [*OWN, *ZERO, DType.MXFP8]
EIGHT = (DType.FP8_BLOCK_A16, DType.FP8_CHANNEL_A16, DType.MXFP8)
TWICE = (DType.INT4_G128, DType.INT4_G128_ZP)  # a scale is of two blocks
FEW = Config(16, 64, 1024, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16)
MANY = Config(128, 256, 128, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16, rows=TileRows.FITTED)
PLAIN = Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)


def spec(dtype: DType, config: Config = FEW, op: Op = Op.FORWARD, fusion: Fusion = Fusion.NONE) -> Spec:
    return Spec(op, dtype, config, fusion=fusion)


def entry(dtype: DType) -> KernelEntry:
    return ROWS_W4A16_MX8 if dtype is DType.MXFP8 else ROWS_W4A16_ZERO if dtype in ZERO else ROWS_W4A16


def test_each_entry_is_for_its_quantised_dtypes() -> None:
    assert set(OWN) == ROWS_W4A16.dtypes
    assert set(ZERO) == ROWS_W4A16_ZERO.dtypes == ZERO_DTYPES
    assert {DType.MXFP8} == ROWS_W4A16_MX8.dtypes
    assert set(QUANTISED) == DTYPES


def test_mxfp8_has_the_arguments_of_mxfp4_and_codes_of_twice_the_size() -> None:
    for op in (Op.FORWARD, Op.DX):
        config = FEW._replace(block_k=512)
        mine, other = (spec(dtype, config, op) for dtype in (DType.MXFP8, DType.MXFP4))
        boxes = registry.boxes(other)
        assert registry.boxes(mine) == boxes | {"w": (2 * boxes["w"][0], 256)}
        kinds, of_other = dict(registry.arguments(mine)), dict(registry.arguments(other))
        assert kinds == {name: kind for name, kind in of_other.items() if name != "stride_outer_e"}
        constants = registry.constants(other, 90)
        assert registry.constants(mine, 90) == {
            name: value for name, value in constants.items() if name not in ("FORMAT", "w_outer")
        }
    eight = candidates(Op.FORWARD, DType.FP8_BLOCK_A16, 90)
    assert candidates(Op.FORWARD, DType.MXFP8, 90) == eight


@pytest.mark.parametrize("dtype", ZERO)
def test_zero_points_lie_beside_the_codes_and_scales_of_the_format_without(dtype: DType) -> None:
    plain = DType(dtype.value.removesuffix("_zp"))
    assert code_layout(dtype) is code_layout(plain) is CODES[plain.value]
    assert (zero_bytes(dtype), zero_bytes(plain)) == (code_layout(dtype).scale_bytes // 2, 0)
    for op in (Op.FORWARD, Op.DX):
        with_zero, without = (candidates(op, kind, 90) for kind in (dtype, plain))
        assert with_zero == without
    first, other = spec(dtype), spec(plain)
    assert registry.boxes(first) == {
        name: box if name == "x" else (1, 1, *box) for name, box in registry.boxes(other).items()
    } | {"w_zero": (1, 1, 16 // code_layout(dtype).blocks_per_scale, zero_bytes(dtype))}
    assert registry.constants(first, 90) == {
        name: value for name, value in registry.constants(other, 90).items() if name not in ("w_outer", "w_scale")
    }
    kinds = dict(registry.arguments(first))
    assert {name: kinds[name] for name in ("w", "w_scale", "w_zero")} == dict.fromkeys(
        ("w", "w_scale", "w_zero"), "desc4"
    )
    assert {"w_outer", "stride_outer_e"}.isdisjoint(kinds)
    assert set(registry.required(first)) == set(registry.required(other)) | {"w_zero"}


@pytest.mark.parametrize(
    ("dtype", "rows", "columns"),
    [
        (DType.MXFP4, 64, 64),
        (DType.NVFP4, 64, 64),
        (DType.INT4_G32, 64, 64),
        (DType.INT4_G64, 64, 64),
        (DType.INT4_G128, 64, 128),
        (DType.FP8_BLOCK_A16, 128, 128),
        (DType.FP8_CHANNEL_A16, 64, 64),
        (DType.INT4_G32_ZP, 64, 64),
        (DType.INT4_G128_ZP, 64, 128),
        (DType.MXFP8, 64, 64),
    ],
)
def test_only_whole_blocks_are_prepared(dtype: DType, rows: int, columns: int) -> None:
    for N in range(16, 400, 16):
        for K in range(16, 400, 16):
            assert can_be_prepared(dtype, N, K) is (N % rows == 0 and K % columns == 0)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_every_candidate_is_accepted_comes_back_and_is_this_kernel_s(dtype: DType) -> None:
    configs = [config for config in candidates(Op.FORWARD, dtype, 90) if config.schedule is Schedule.W4A16]
    assert configs
    for config in configs:
        for fusion in (Fusion.NONE, Fusion.SCATTER):
            variant_spec = spec(dtype, config, fusion=fusion)
            assert refusal(variant_spec, 90) is None
            assert registry.entry_of(variant_spec) is entry(dtype)
        assert Config.from_pairs(config.pairs()) == config
        assert registry.limits_of(Op.FORWARD, config).steps == 2**20 - 1
        assert registry.clears(Fusion.SCATTER, config)


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_m": 128}, "block_m is 128, wanted 16 or 32 or 64"),
        ({"block_n": 32}, "block_n is 32, wanted 64 or 128 or 256"),
        ({"block_k": 64}, "block_k is 64, wanted 128 or 256 or 512 or 1024"),
        ({"block_k": 2048}, "block_k is 2048, wanted"),
        ({"num_warps": 4}, "num_warps is 4, wanted 8"),
        ({"num_stages": 1}, "num_stages is 1, wanted 2 to 12"),
        ({"num_stages": 13}, "num_stages is 13, wanted 2 to 12"),
        ({"loads": Loads.POINTER}, "loads is POINTER, wanted TMA"),
        ({"edge": Edge.HALF}, "edge is HALF, wanted WHOLE"),
    ],
)
def test_tiles_that_there_are_not(dtype: DType, changes: dict[str, int], message: str) -> None:
    assert refusal(spec(dtype), 90) is None
    assert message in str(refusal(spec(dtype, FEW._replace(**changes)), 90))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_fitted_tiles_that_there_are_not(dtype: DType) -> None:
    assert refusal(spec(dtype, MANY), 90) is None
    for changes in ({"block_m": 32}, {"block_n": 64}, {"block_k": 512}):
        assert refusal(spec(dtype, MANY._replace(**changes)), 90) is not None
        assert registry.tiles_of(Op.FORWARD, MANY._replace(**changes)) is None


def test_a_group_of_128_is_one_step_at_least() -> None:
    shallow = MANY._replace(block_k=64)
    for dtype in QUANTISED:
        reason = refusal(spec(dtype, shallow), 90)
        if dtype in TWICE:
            assert "block_k is 64, wanted 128 or 256" in str(reason)
        else:
            assert reason is None
    assert all(shallow not in candidates(Op.FORWARD, value, 90) for value in TWICE)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_there_is_no_code_for(dtype: DType) -> None:
    assert "no kernel of dW has such a schedule" in str(refusal(spec(dtype, op=Op.DW), 90))
    for fusion in (Fusion.GATHER, Fusion.SILU, Fusion.GATHER | Fusion.SILU):
        assert "its forms are " in str(refusal(spec(dtype, fusion=fusion), 90))
    for sm in (80, 89):
        reason = str(refusal(spec(dtype), sm))
        assert "has no tma" in reason
        assert "has no wgmma" in reason
    for sm in (100, 120):
        assert "has no wgmma" in str(refusal(spec(dtype), sm))
    for config in (PLAIN, Config(64, 64, 64, 4, 3), PLAIN._replace(block_m=256, rows=TileRows.FITTED)):
        assert "its dtypes are " in str(refusal(spec(dtype, config), 90))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_dx_turns_blocks_round(dtype: DType) -> None:
    """Its tile's columns are w's, whose scales of two blocks have to be in one tile, and no sum can have a row's."""
    turned = [config for config in candidates(Op.DX, dtype, 90) if config.schedule is Schedule.W4A16]
    if dtype is DType.FP8_CHANNEL_A16:
        assert not turned
        assert "rows_wna16 has no code of dX" in str(refusal(spec(dtype, op=Op.DX), 90))
        return
    assert {config.rows for config in turned} == set(TileRows)
    for config in turned:
        for fusion in (Fusion.NONE, Fusion.LOW_RANK):
            assert refusal(spec(dtype, config, Op.DX, fusion), 90) is None
        for fusion in (Fusion.SCATTER, Fusion.GATHER):
            assert refusal(spec(dtype, config, Op.DX, fusion), 90) is not None
        boxes, of_forward = (registry.boxes(spec(dtype, config, op)) for op in (Op.DX, Op.FORWARD))
        wide = 2 if dtype in EIGHT else 1
        assert boxes["x"] == of_forward["x"]
        assert boxes["w"][-2:] == (2 * wide * config.block_n // 64, 256)
        assert of_forward["w"][-2:] == (2 * wide * config.block_k // 64, 256)
    narrow = str(refusal(spec(dtype, FEW._replace(block_k=512), Op.DX), 90))
    shallow = refusal(spec(dtype, MANY._replace(block_k=64), Op.DX), 90)
    assert shallow is None
    assert ("block_n is 64, wanted 128 or 256" in narrow) is (dtype in TWICE)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_code_that_adds_a_low_rank_part_has_its_operands(dtype: DType) -> None:
    for op in (Op.FORWARD, Op.DX):
        if op is Op.DX and dtype is DType.FP8_CHANNEL_A16:
            continue
        plain, low = spec(dtype, MANY, op), spec(dtype, MANY, op, Fusion.LOW_RANK)
        added = {"low_x": "desc2", "low_w": "desc3", "R": "i32"}
        assert dict(registry.arguments(low)) == dict(registry.arguments(plain)) | added
        assert registry.boxes(low) == registry.boxes(plain) | {"low_x": (64, 64), "low_w": (1, 64, 64)}
        assert set(registry.required(low)) == set(registry.required(plain)) | set(added)
        assert registry.constants(low, 90)["INDEXED"] is False


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if not dtype.quantised])
def test_other_dtypes_have_no_such_config(dtype: DType) -> None:
    for config in (FEW, MANY):
        assert f"its dtypes are {', '.join(sorted(value.value for value in OWN))}" in str(
            refusal(spec(dtype, config), 90)
        )


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER])
def test_arguments_of_a_launcher(dtype: DType, fusion: Fusion) -> None:
    variant_spec = spec(dtype, fusion=fusion)
    kinds, boxes = dict(registry.arguments(variant_spec)), registry.boxes(variant_spec)
    block_scales = dtype is not DType.FP8_CHANNEL_A16
    outer = dtype in (DType.NVFP4, DType.FP8_CHANNEL_A16)
    lines = "desc4" if dtype in ZERO else "desc2"
    assert kinds.get("w_scale") == (lines if block_scales else None)
    assert kinds.get("w_zero") == (lines if dtype in ZERO else None)
    assert kinds.get("w_outer") == ("ptr" if outer else None)
    assert (kinds["x"], kinds["w"], kinds["y"]) == ("desc2", lines, "ptr")
    assert kinds.get("stride_outer_e") == (None if entry(dtype) is not ROWS_W4A16 else "i64")
    assert {name for name, kind in kinds.items() if kind.startswith("desc")} == set(boxes)
    assert set(registry.required(variant_spec)) <= set(kinds)
    assert registry.threads(variant_spec) == 32 * 12
    wide = 2 if dtype in EIGHT else 1
    assert boxes["x"] == (16, 64)
    assert boxes["w"][-2:] == (2 * 16 * wide, 256)
    assert registry.boxes(spec(dtype, MANY))["x"] == (64, 64)
    constants = registry.constants(variant_spec, 90)
    format = None if dtype is DType.MXFP8 else dtype.value.removesuffix("_zp")
    assert (constants.get("FORMAT"), constants["INDEXED"], constants["FITTED"]) == (format, bool(fusion), False)
    assert registry.constants(spec(dtype, MANY), 90)["FITTED"] is True


def test_boxes_of_scales_are_those_of_a_step() -> None:
    """TMA moves 256 of each dimension at most, and multiples of 16 bytes."""
    scale_boxes = {dtype: registry.boxes(spec(dtype)).get("w_scale") for dtype in QUANTISED}
    assert scale_boxes == {
        DType.MXFP4: (16, 128),
        DType.MXFP8: (16, 128),
        DType.NVFP4: (16, 256),
        DType.INT4_G32: (16, 256),
        DType.INT4_G64: (16, 128),
        DType.INT4_G128: (8, 128),
        DType.FP8_BLOCK_A16: (16, 16),
        DType.FP8_CHANNEL_A16: None,
        DType.INT4_G32_ZP: (1, 1, 16, 256),
        DType.INT4_G64_ZP: (1, 1, 16, 128),
        DType.INT4_G128_ZP: (1, 1, 8, 128),
    }
    for dtype in QUANTISED:
        for config in candidates(Op.FORWARD, dtype, 90):
            boxes = registry.boxes(spec(dtype, config))
            assert all(1 <= size <= 256 for box in boxes.values() for size in box)


@pytest.mark.parametrize("dtype", DType)
def test_a_padded_width_is_the_least_that_can_be_prepared(dtype: DType) -> None:
    H = 256
    scale = dtype.precision.w.scale
    for width in (64, 96, 100, 128, 176, 192, 352, 720, 768):
        wide = padded_width(dtype, width)
        if not dtype.quantised:
            assert wide == width
            continue
        able = [
            columns
            for columns in range(width, 2 * width + 128)
            if can_be_prepared(dtype, columns, H) and can_be_prepared(dtype, H, columns)
        ]
        splits = scale is not None and scale.columns and width % scale.columns
        if splits and dtype not in (DType.MXFP4, DType.FP8_BLOCK, DType.FP8_BLOCK_A16):
            assert wide == width
        else:
            assert wide == able[0]
