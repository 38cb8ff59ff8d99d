"""The entries of the kernels for codes of w as stored: which variants there are, and what is told of them."""

from __future__ import annotations

import pytest

from pretuned.artifacts.records import DType, Fusion, Layout, Op
from pretuned.kernels import registry
from pretuned.kernels.arch import Feature, arch_of, supported
from pretuned.kernels.portable_w4a16 import CODED, DTYPES, order_of
from pretuned.kernels.portable_w8a8 import DTYPES as OF_BOTH
from pretuned.kernels.portable_w8a8 import W8A8
from pretuned.kernels.registry import refusal
from pretuned.kernels.search import candidates, fallbacks
from pretuned.kernels.spec import Config, Schedule, Spec, takes_codes_of_x

TILE = Config(16, 64, 128, 4, 4, schedule=Schedule.TILE)
MXFP4 = Spec(Op.FORWARD, DType.MXFP4, TILE, Layout.STORED)
BOTH = pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])


def test_it_is_of_every_dtype_whose_x_is_not_quantised() -> None:
    assert (
        {dtype for dtype in DType if dtype.quantised} - DTYPES
        == OF_BOTH
        == {dtype for dtype in DType if dtype.quantises_x}
    )


@BOTH
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=lambda dtype: dtype.value))
def test_there_is_code_for_every_capability(dtype: DType, op: Op) -> None:
    for sm in supported():
        for fusion in (Fusion.NONE, Fusion.GATHER, Fusion.SCATTER):
            spec = Spec(op, dtype, TILE, Layout.STORED, fusion)
            assert refusal(spec, sm) is None
            assert registry.entry_of(spec) is CODED


def test_a_forward_of_codes_in_order_is_another_kernel_s() -> None:
    assert "w is nk, wanted stored" in str(refusal(MXFP4._replace(layout=Layout.NK), 90))
    assert refusal(MXFP4._replace(layout=Layout.NK, op=Op.DX), 90) is None
    assert "w is kn, wanted nk or stored" in str(refusal(MXFP4._replace(layout=Layout.KN, op=Op.DX), 90))
    assert "has no code of dW" in str(refusal(MXFP4._replace(op=Op.DW), 90))
    assert "its forms are " in str(refusal(MXFP4._replace(fusion=Fusion.SILU), 90))


@pytest.mark.parametrize(("knob", "value"), [("block_k", 32), ("block_n", 32)])
def test_tiles_are_whole_blocks_of_an_order(knob: str, value: int) -> None:
    reason = str(refusal(MXFP4._replace(config=TILE._replace(**{knob: value})), 90))  # type: ignore[arg-type]
    assert f"{knob} is {value}, wanted 64 or 128 or 256" in reason


def test_orders_are_those_that_weights_are_put_into() -> None:
    dx = MXFP4._replace(op=Op.DX, layout=Layout.NK)
    assert [
        order_of(dx._replace(dtype=value)) for value in (DType.MXFP4, DType.INT4_G32, DType.FP8_BLOCK_A16, DType.MXFP8)
    ] == [1, 1, 2, 2]
    assert order_of(MXFP4) == 0


def test_arguments_of_a_compiler_and_a_launcher() -> None:
    for dtype, there in (
        (DType.MXFP4, set()),
        (DType.NVFP4, {"w_outer"}),
        (DType.INT4_G64_ZP, {"w_zero"}),
        (DType.FP8_CHANNEL_A16, set()),
    ):
        kinds = dict(registry.arguments(MXFP4._replace(dtype=dtype)))
        assert {"w_outer", "w_zero"} & kinds.keys() == there
        assert set(registry.required(MXFP4._replace(dtype=dtype))) <= kinds.keys()
    assert registry.pointees(MXFP4)["w"] == "*u8"
    assert registry.pointees(MXFP4._replace(op=Op.DX, layout=Layout.NK))["w"] == "*i32"
    zero = MXFP4._replace(dtype=DType.INT4_G64_ZP)
    assert (registry.constants(zero, 80)["CODES"], registry.pointees(zero)["w_zero"]) == ("uint4", "*u8")
    zero = zero._replace(op=Op.DX, layout=Layout.NK)  # both are less 8
    assert (registry.constants(zero, 80)["CODES"], registry.pointees(zero)["w_zero"]) == ("int4", "*i8")


def test_aligned_code_has_whole_lines_of_codes() -> None:
    """16 bytes are 32 codes of 4 bits, and 16 of 8; of dX they lie along N."""
    alignments = registry.divisibility(MXFP4._replace(alignment=16))
    assert (alignments["K"], alignments["N"], alignments["w"], alignments["x"], alignments["w_scale"]) == (
        32,
        8,
        16,
        16,
        16,
    )
    alignments = registry.divisibility(MXFP4._replace(alignment=16, op=Op.DX, dtype=DType.FP8_CHANNEL_A16))
    assert (alignments["N"], alignments["K"]) == (16, 8)
    assert registry.divisibility(MXFP4._replace(alignment=1)) == {}


CODES_BY_CODES = Spec(Op.FORWARD, DType.FP8_BLOCK, TILE, Layout.STORED)


@pytest.mark.parametrize("dtype", sorted(OF_BOTH, key=lambda dtype: dtype.value))
def test_codes_are_multiplied_by_codes_where_a_gpu_can(dtype: DType) -> None:
    able = {sm for sm in supported() if arch_of(sm).has(Feature.FP8)}
    assert able == {89, 90, 100, 103, 120, 121}
    for sm in supported():
        for fusion in (Fusion.NONE, Fusion.GATHER, Fusion.SCATTER):
            spec = CODES_BY_CODES._replace(dtype=dtype, fusion=fusion)
            assert refusal(spec, sm) is None if sm in able else "has no fp8" in str(refusal(spec, sm))
            assert registry.entry_of(spec) is W8A8
        assert registry.has_code(Op.FORWARD, dtype, sm, Layout.STORED) is (sm in able)
        assert not registry.has_code(Op.DX, dtype, sm)


@pytest.mark.parametrize("dtype", sorted(OF_BOTH, key=lambda dtype: dtype.value))
@pytest.mark.parametrize("sm", [80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_they_are_searched_where_no_other_code_does_so(sm: int, dtype: DType) -> None:
    there = arch_of(sm).has(Feature.FP8) and sm != 90
    for find in (candidates, fallbacks):
        configs = [config for config in find(Op.FORWARD, dtype, sm) if config.schedule is Schedule.TILE]
        assert bool(configs) is there
        assert all(refusal(Spec(Op.FORWARD, dtype, config, Layout.STORED), sm) is None for config in configs)
        assert find(Op.DX, dtype, sm) == find(Op.DW, dtype, sm) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": Layout.NK}, "w is nk, wanted stored"),
        ({"fusion": Fusion.SILU}, "its forms are "),
        ({"config": TILE._replace(block_k=64)}, "block_k is 64, wanted 128"),
        ({"config": TILE._replace(block_n=256)}, "block_n is 256, wanted 64 or 128"),
        ({"max_experts": 513}, "it counts 512 experts at most, not 513"),
    ],
)
def test_what_there_is_not_of_codes_by_codes(changes: dict[str, object], message: str) -> None:
    assert message in str(refusal(CODES_BY_CODES._replace(**changes), 89))  # type: ignore[arg-type]


def test_what_is_reported_codes_by_codes() -> None:
    kinds = dict(registry.arguments(CODES_BY_CODES))
    assert not {"w_zero", "w_outer", "x_scale"} & kinds.keys()
    assert set(registry.required(CODES_BY_CODES)) <= kinds.keys()
    rows = {dtype: registry.constants(CODES_BY_CODES._replace(dtype=dtype), 89)["SCALE_ROWS"] for dtype in OF_BOTH}
    assert rows == {DType.FP8_BLOCK: 128, DType.FP8_CHANNEL: 1}
    alignments = registry.divisibility(CODES_BY_CODES._replace(alignment=16))
    assert (alignments["K"], alignments["N"], alignments["w"], alignments["x"], alignments["w_scale"]) == (
        16,
        8,
        16,
        16,
        16,
    )


def test_who_has_x_quantised_for_it() -> None:
    kinds = {(dtype, layout) for dtype in DType for layout in Layout if takes_codes_of_x(dtype, layout)}
    assert kinds == {(dtype, layout) for dtype in OF_BOTH for layout in (Layout.NK, Layout.KN)}
