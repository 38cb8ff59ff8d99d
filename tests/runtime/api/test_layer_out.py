"""A layer that writes to memory of the caller's: its program, and which calls may run it."""

from __future__ import annotations

import pytest
import torch
from host_gpu import PERSISTENT, Device

from pretuned.artifacts.records import DType, Layout
from pretuned.runtime import sort_routing
from pretuned.runtime.api import layer_plan
from pretuned.runtime.ops import activation, layer

T, TOPK, E, H, I = 4, 2, 3, 16, 8  # noqa: E741
HOW = layer.Layer(TOPK, Layout.NK, activation.RowActivation(activation.Activation("silu"), True, False))


@pytest.fixture
def gpu(device: Device) -> Device:
    """A GPU with kernels of bf16."""
    device.has(PERSISTENT, DType.BF16)
    return device


def test_later_calls_write_where_out_says(gpu: Device) -> None:
    x, out = torch.randn(T, H).bfloat16(), torch.empty(T, H).bfloat16()
    weights = torch.rand(T, TOPK)
    ids = torch.randint(0, E, (T, TOPK))
    layer_weights = layer.Weights(torch.randn(E, 2 * I, H).bfloat16(), torch.randn(E, H, I).bfloat16(), None, None)
    plan = layer_plan.plan_layer(HOW, x, layer_weights, ids, weights, out)
    assert plan is not None
    for into in (out, torch.empty_like(out), torch.empty_like(out)):
        assert plan.takes(x, layer_weights, ids, weights, into)
        result, *_ = plan.forward(HOW, x, layer_weights, sort_routing(ids, E), weights, keeps_h=False, into=into)
        assert result is into
        assert gpu.passes[-1].words["out"] == into.data_ptr()
    (program,) = plan.programs.values()
    assert len(program.steps) == 4  # both products, the activation, the sum: they ran by it
    wide, more = torch.empty(T, 2 * H).bfloat16(), torch.empty(T * H + 8).bfloat16()
    held = torch.empty(T * H // 2 + T * TOPK)
    own = held[T * H // 2 - 8 : T * H // 2].view(T, TOPK).copy_(weights)
    for other, some in (
        (x, weights),
        (wide[:, :H], weights),
        (more[1 : T * H + 1].view(T, H), weights),
        (out[:-1], weights),
        (out.float(), weights),
        (held[: T * H // 2].view(torch.bfloat16).view(T, H), own),
    ):
        assert not plan.takes(x, layer_weights, ids, some, other)
        assert (
            other.shape != x.shape
            or layer_plan.plan_layer(HOW, x, layer_weights, ids, some, other) is None
            or (other.dtype is torch.float32)
        )
