"""``ExpertWeights``: what it takes, what it refuses, what it is once made."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import PRECISIONS
from pretuned.runtime import ExpertWeights

E, N, K = 3, 130, 320  # blocks and groups that are cut off
FORMATS = [name for name, precision in PRECISIONS.items() if precision.quantised]
BYTE, FP8 = torch.uint8, torch.float8_e4m3fn


@pytest.mark.parametrize("format", FORMATS)
def test_quantised_and_back(format: str) -> None:
    torch.manual_seed(0)
    w = torch.randn(E, N, K)
    weights = ExpertWeights.quantize(w.to(torch.bfloat16), format)
    assert (weights.format, weights.shape, weights.device, weights.order) == (format, (E, N, K), w.device, 0)
    whole = weights.dequantize(torch.float32)
    assert (whole - w).norm() / w.norm() < (0.13 if weights.precision.w.bits == 4 else 0.04)
    for e in range(E):
        assert torch.equal(weights.dequantize(torch.float32, e), whole[e])
    assert torch.equal(weights.dequantize(), whole.to(torch.bfloat16))  # float32, rounded once
    assert sum(tensor.nbytes for tensor in weights.tensors().values()) == E * PRECISIONS[format].w_bytes(N, K)


@pytest.mark.parametrize("format", FORMATS)
def test_copied_pickled_and_saved(format: str, tmp_path: Any) -> None:
    weights = ExpertWeights.quantize(torch.randn(2, 4, 64), format)
    torch.save(weights.state_dict(), tmp_path / "w.pt")
    loaded = ExpertWeights.from_state_dict(format, torch.load(tmp_path / "w.pt", weights_only=True))
    for other in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights)), loaded):
        assert repr(other) == repr(weights)
        assert other.tensors().keys() == weights.tensors().keys()
        assert all(tensor.data_ptr() != other.tensors()[name].data_ptr() for name, tensor in weights.tensors().items())
        assert torch.equal(other.dequantize(), weights.dequantize())


def test_moved_to_a_device() -> None:
    weights = ExpertWeights.quantize(torch.randn(2, 4, 64), "nvfp4")
    assert weights.to("cpu") is weights
    moved = weights.to("meta")
    assert (moved.device.type, moved.shape, moved.format) == ("meta", weights.shape, weights.format)


def test_the_tensors_are_not_copied() -> None:
    codes, scale = torch.zeros(2, 4, 16, dtype=BYTE), torch.full((2, 4, 1), 127, dtype=BYTE)
    weights = ExpertWeights.mxfp4(codes, scale)
    assert (weights.codes.data_ptr(), weights.scale.data_ptr()) == (codes.data_ptr(), scale.data_ptr())
    blocks = ExpertWeights.mxfp4(codes.view(2, 4, 1, 16), scale.view(torch.float8_e8m0fnu))
    assert (blocks.codes.data_ptr(), blocks.scale.data_ptr()) == (codes.data_ptr(), scale.data_ptr())
    assert blocks.shape == (2, 4, 32)
    eight = ExpertWeights.mxfp8(torch.zeros(2, 4, 32).to(FP8), scale.view(torch.float8_e8m0fnu))
    assert eight.scale.data_ptr() == scale.data_ptr()
    assert eight.shape == (2, 4, 32)


def test_a_parameter_loses_its_gradient() -> None:
    codes = torch.nn.Parameter(torch.zeros(1, 2, 128).to(FP8))
    weights = ExpertWeights.fp8_channel(codes, torch.nn.Parameter(torch.ones(1, 2)))
    assert not weights.codes.requires_grad
    assert not weights.scale.requires_grad


def test_quantize_x_is_part_of_the_format() -> None:
    codes = torch.zeros(1, 128, 128).to(FP8)
    for make, scale, name in (
        (ExpertWeights.fp8_block, torch.ones(1, 1, 1), "fp8_block"),
        (ExpertWeights.fp8_channel, torch.ones(1, 128), "fp8_channel"),
    ):
        assert make(codes, scale).format == name
        assert make(codes, scale, quantize_x=False).format == f"{name}_a16"
        for wrong in (1, 0, None, "no"):
            with pytest.raises(InputError, match=r"quantize_x is .*, wanted True or False$"):
                make(codes, scale, quantize_x=wrong)
    tensors = {"weight": codes, "weight_scale_inv": torch.ones(1, 1, 1)}
    with pytest.raises(InputError, match=r"quantize_x is 'no', wanted True or False or None"):
        ExpertWeights.from_tensors(tensors, {}, "down", quantize_x="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("K", "groups", "group"),
    [(256, 8, 32), (256, 4, 64), (256, 2, 128), (300, 3, 128), (300, 5, 64), (300, 10, 32), (32, 1, 32), (80, 1, 128)],
)
def test_the_group_of_int4_is_reported_by_the_shapes(K: int, groups: int, group: int) -> None:
    codes, scale = torch.zeros(2, 4, K // 2, dtype=BYTE), torch.ones(2, 4, groups, dtype=torch.float16)
    assert ExpertWeights.int4(codes, scale).format == f"int4_g{group}"
    zero = torch.full((2, 4, groups), 8, dtype=BYTE)
    assert ExpertWeights.int4(codes, scale, zero).format == f"int4_g{group}_zp"


def _zeros(*shape: int, dtype: torch.dtype = BYTE) -> torch.Tensor:
    return torch.zeros(shape).to(dtype)


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def _with(value: float | int, tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[-1] = value
    return tensor


WRONG: list[tuple[Callable[[], object], str]] = [
    (
        lambda: ExpertWeights.fp8_block(_zeros(2, 128, 128), _ones(2, 1, 1)),
        "codes is torch.uint8 of shape [2, 128, 128], wanted torch.float8_e4m3fn",
    ),
    (
        lambda: ExpertWeights.fp8_block(_zeros(128, 128, dtype=FP8), _ones(1, 1)),
        "codes is of shape [128, 128], wanted [E, N, K]",
    ),
    (
        lambda: ExpertWeights.fp8_block(_zeros(2, 130, 300, dtype=FP8), _ones(2, 1, 2)),
        "scale is of shape [2, 1, 2], wanted [2, 2, 3] for codes of [2, 130, 300]",
    ),
    (
        lambda: ExpertWeights.fp8_block(_zeros(2, 128, 128, dtype=FP8), _ones(2, 1, 1).half()),
        "scale is torch.float16 of shape [2, 1, 1], wanted torch.float32",
    ),
    (lambda: ExpertWeights.fp8_block(_zeros(2, 128, 128, dtype=FP8), None), "scale is NoneType, wanted torch.float32"),
    (
        lambda: ExpertWeights.fp8_block(_zeros(2, 256, 128, dtype=FP8)[:, ::2], _ones(2, 1, 1)),
        "codes is with strides [32768, 256, 1], wanted contiguous",
    ),
    (
        lambda: ExpertWeights.fp8_channel(_zeros(2, 4, 8, dtype=FP8), _ones(4, 2).T),
        "scale is with strides [1, 2], wanted contiguous",
    ),
    (
        lambda: ExpertWeights.fp8_channel(_zeros(2, 4, 8, dtype=FP8), _ones(2, 4, 1)),
        "scale is of shape [2, 4, 1], wanted [2, 4]",
    ),
    (
        lambda: ExpertWeights.fp8_channel(_zeros(2, 4, 8, dtype=FP8), _with(float("nan"), _ones(2, 4))),
        "scale is nan at [1, 3], one of 1, wanted numbers",
    ),
    (
        lambda: ExpertWeights.fp8_channel(_zeros(2, 4, 8, dtype=FP8), _with(float("inf"), _ones(2, 4))),
        "scale is inf at [1, 3]",
    ),
    (
        lambda: ExpertWeights.fp8_channel(_zeros(2, 4, 8, dtype=FP8), _ones(2, 4).to("meta")),
        "scale is on meta, wanted the device of codes, cpu",
    ),
    (
        lambda: ExpertWeights.mxfp4(_zeros(2, 4, 16), _with(255, _zeros(2, 4, 1))),
        "scale is 255, which is NaN, at [1, 3, 0]",
    ),
    (
        lambda: ExpertWeights.mxfp4(_zeros(2, 4, 16), _ones(2, 4, 1)),
        "scale is torch.float32 of shape [2, 4, 1], wanted torch.uint8",
    ),
    (
        lambda: ExpertWeights.mxfp4(_zeros(2, 4, 2, 8), _zeros(2, 4, 1)),
        "codes is of shape [2, 4, 2, 8] and strides [64, 16, 8, 1], wanted [E, N, K/32, 16]",
    ),
    (
        lambda: ExpertWeights.mxfp4(_zeros(2, 4, 0), _zeros(2, 4, 0)),
        "codes is of shape [2, 4, 0], wanted [E, N, K/2], E, N and K of at least 1",
    ),
    (lambda: ExpertWeights.mxfp4([1], _zeros(2, 4, 1)), "codes is list, wanted torch.uint8"),
    (
        lambda: ExpertWeights.mxfp8(_zeros(2, 4, 32), _zeros(2, 4, 1)),
        "codes is torch.uint8 of shape [2, 4, 32], wanted torch.float8_e4m3fn",
    ),
    (
        lambda: ExpertWeights.mxfp8(_zeros(2, 4, 80, dtype=FP8), _with(255, _zeros(2, 4, 3))),
        "scale is 255, which is NaN, at [1, 3, 2]",
    ),
    (
        lambda: ExpertWeights.mxfp8(_zeros(2, 4, 80, dtype=FP8), _zeros(2, 4, 2)),
        "scale is of shape [2, 4, 2], wanted [2, 4, 3] for codes of [2, 4, 80]",
    ),
    (
        lambda: ExpertWeights.mxfp8(_zeros(2, 4, 32, dtype=FP8), _ones(2, 4, 1)),
        "scale is torch.float32 of shape [2, 4, 1], wanted torch.uint8",
    ),
    (
        lambda: ExpertWeights.int4(_zeros(2, 4, 128), _ones(2, 4, 3)),
        "scale is of shape [2, 4, 3], wanted 2 or 4 or 8 groups for K=256",
    ),
    (
        lambda: ExpertWeights.int4(_zeros(2, 4, 128), _ones(2, 4, 2), _zeros(2, 4, 4)),
        "zero is of shape [2, 4, 4], wanted [2, 4, 2]",
    ),
    (lambda: ExpertWeights.int4(_zeros(2, 4, 128), _ones(2, 4, 2), _ones(2, 4, 2)), "zero is torch.float32"),
    (lambda: ExpertWeights.int4(_zeros(2, 4, 128), 1), "scale is int"),
    (
        lambda: ExpertWeights.nvfp4(_zeros(2, 4, 8), _zeros(2, 4, 1), _ones(2)),
        "scale is torch.uint8 of shape [2, 4, 1], wanted torch.float8_e4m3fn",
    ),
    (
        lambda: ExpertWeights.nvfp4(_zeros(2, 4, 8), _with(float("nan"), _ones(2, 4, 1)).to(FP8), _ones(2)),
        "scale is nan at [1, 3, 0]",
    ),
    (
        lambda: ExpertWeights.nvfp4(_zeros(2, 4, 8), _zeros(2, 4, 1, dtype=FP8), _ones(3)),
        "global_scale is of shape [3], wanted [2]",
    ),
    (
        lambda: ExpertWeights.nvfp4(_zeros(2, 4, 8), _zeros(2, 4, 1, dtype=FP8), _with(float("nan"), _ones(2))),
        "global_scale is nan at [1]",
    ),
    (lambda: ExpertWeights.quantize(_ones(2, 4), "mxfp4"), "w is torch.float32 of shape [2, 4], wanted [E, N, K]"),
    (lambda: ExpertWeights.quantize(_ones(2, 4, 5), "mxfp4"), "wanted an even K"),
    (lambda: ExpertWeights.quantize(_with(float("nan"), _ones(2, 4, 6)), "mxfp4"), "w is NaN or infinite"),
    (lambda: ExpertWeights.quantize(_ones(2, 4, 6), "int4"), "format is 'int4', wanted one of fp8_block, "),
    (lambda: ExpertWeights.quantize(_ones(2, 4, 6), "bf16"), "format is 'bf16', wanted one of fp8_block, "),
    (
        lambda: ExpertWeights.quantize(_ones(2, 4, 6), "fp8_channel").dequantize(expert=2),
        "expert is 2, wanted one of the 2",
    ),
    (
        lambda: ExpertWeights.from_state_dict("mxfp4", {"codes": _zeros(2, 4, 16)}),
        "the state is of ['codes'], wanted codes, scale",
    ),
    (
        lambda: ExpertWeights.from_state_dict(
            "mxfp4", {"codes": _zeros(2, 4, 16), "scale": _zeros(2, 4, 1), "order": torch.tensor(True)}
        ),
        "order is torch.bool",
    ),
    (
        lambda: ExpertWeights.from_state_dict("nope", {"codes": _zeros(2, 4, 16), "scale": _zeros(2, 4, 1)}),
        "format is 'nope'",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_can_not_be_used_is_reported(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as error:
        make()
    assert str(error.value).startswith("ExpertWeights: ")


@pytest.mark.parametrize("value", [torch.float16, None, torch.zeros(1)])
def test_a_dtype_is_no_device(value: Any) -> None:
    """float16 codes would be read as bytes."""
    with pytest.raises(InputError, match=r"the argument of to\(\) is .*, wanted a device"):
        ExpertWeights.quantize(torch.randn(2, 64, 128), "fp8_channel").to(value)


def test_weights_are_not_prepared_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would read released tensors, and the new ones are not written before its replay."""
    w = ExpertWeights.quantize(torch.randn(2, 64, 128), "fp8_channel")
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[ExpertWeights.__module__], "is_captured", lambda tensor: True)
        with pytest.raises(InputError, match="call it before the capture"):
            w.prepare()
    prepared = w.prepare()
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[ExpertWeights.__module__], "is_captured", lambda tensor: True)
        assert w.prepare() is prepared
        assert prepared.prepare() is prepared


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4", "mxfp8", "nvfp4", "int4_g32"])
def test_weights_made_in_inference_mode_are_copied_to(format: str) -> None:
    """Prepared codes are no inference tensors, and the scales beside them may be."""
    with torch.inference_mode():
        w = ExpertWeights.quantize(torch.randn(2, 128, 128), format).prepare()
    other = ExpertWeights.quantize(torch.randn(2, 128, 128), format)
    w.copy_(other)
    assert torch.equal(w.dequantize(), other.dequantize())


def test_a_pickle_in_a_layout_that_this_version_does_not_know_is_refused() -> None:
    """Its codes would be read as others."""
    state = ExpertWeights.quantize(torch.randn(2, 64, 64), "mxfp4").__getstate__()
    with pytest.raises(InputError, match="order is 99 with codes"):
        ExpertWeights.__new__(ExpertWeights).__setstate__({**state, "order": 99})
