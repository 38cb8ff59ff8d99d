"""The entry of the kernel for codes of w on every GPU: which variants there are, and what is told of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Layout, Op
from pretuned.kernels.contract import registry
from pretuned.kernels.contract.coded import CODED, DTYPES, order_of
from pretuned.kernels.contract.config import Config, Schedule
from pretuned.kernels.contract.registry import refusal
from pretuned.kernels.contract.spec import Spec
from pretuned.kernels.hardware.arch import supported

TILE = Config(16, 64, 128, 4, 4, schedule=Schedule.TILE)
MXFP4 = Spec(Op.FORWARD, DType.MXFP4, TILE, Layout.STORED)
BOTH = pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])


def test_it_is_of_every_dtype_whose_x_is_not_quantised() -> None:
    assert {one for one in DType if one.quantised} - DTYPES == {DType.FP8_BLOCK}


@BOTH
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=lambda one: one.value))
def test_there_is_code_for_every_capability(dtype: DType, op: Op) -> None:
    for sm in supported():
        for fusion in (Fusion.NONE, Fusion.GATHER, Fusion.SCATTER):
            spec = Spec(op, dtype, TILE, Layout.STORED, fusion)
            assert refusal(spec, sm) is None
            assert registry.entry_of(spec) is CODED


def test_a_forward_of_codes_in_order_is_another_kernel_s() -> None:
    assert "w is nk, wanted stored" in str(refusal(replace(MXFP4, layout=Layout.NK), 90))
    assert refusal(replace(MXFP4, layout=Layout.NK, op=Op.DX), 90) is None
    assert "w is kn, wanted nk or stored" in str(refusal(replace(MXFP4, layout=Layout.KN, op=Op.DX), 90))
    assert "has no code of dW" in str(refusal(replace(MXFP4, op=Op.DW), 90))
    assert "its forms are " in str(refusal(replace(MXFP4, fusion=Fusion.SILU), 90))


@pytest.mark.parametrize(("knob", "value"), [("block_k", 32), ("block_n", 32)])
def test_tiles_are_whole_blocks_of_an_order(knob: str, value: int) -> None:
    told = str(refusal(replace(MXFP4, config=replace(TILE, **{knob: value})), 90))  # type: ignore[arg-type]
    assert f"{knob} is {value}, wanted 64 or 128 or 256" in told


def test_orders_are_those_that_weights_are_put_into() -> None:
    dx = replace(MXFP4, op=Op.DX, layout=Layout.NK)
    assert [order_of(replace(dx, dtype=one)) for one in (DType.MXFP4, DType.INT4_G32, DType.FP8_BLOCK_A16)] == [1, 1, 2]
    assert order_of(MXFP4) == 0


def test_what_a_compiler_and_a_launcher_are_told() -> None:
    for dtype, there in (
        (DType.MXFP4, set()), (DType.NVFP4, {"w_outer"}), (DType.INT4_G64_ZP, {"w_zero"}),
        (DType.FP8_CHANNEL_A16, set()),
    ):  # fmt: skip
        kinds = dict(registry.arguments(replace(MXFP4, dtype=dtype)))
        assert {"w_outer", "w_zero"} & kinds.keys() == there
        assert set(registry.required(replace(MXFP4, dtype=dtype))) <= kinds.keys()
    assert registry.pointees(MXFP4)["w"] == "*u8"
    assert registry.pointees(replace(MXFP4, op=Op.DX, layout=Layout.NK))["w"] == "*i32"
    assert registry.constants(replace(MXFP4, dtype=DType.INT4_G64_ZP), 80)["CODES"] == "uint4"


def test_aligned_code_has_whole_lines_of_codes() -> None:
    """16 bytes are 32 codes of 4 bits, and 16 of 8; of dX they lie along N."""
    told = registry.divisibility(replace(MXFP4, alignment=16))
    assert (told["K"], told["N"], told["w"], told["x"], told["w_scale"]) == (32, 8, 16, 16, 16)
    told = registry.divisibility(replace(MXFP4, alignment=16, op=Op.DX, dtype=DType.FP8_CHANNEL_A16))
    assert (told["N"], told["K"]) == (16, 8)
    assert registry.divisibility(replace(MXFP4, alignment=1)) == {}
