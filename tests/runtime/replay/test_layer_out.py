"""A layer that writes to memory of the caller's: its program, and which calls may run it."""

from __future__ import annotations

import pytest
import torch

from pretuned.artifacts.records.problem import Layout, RowOp
from pretuned.runtime import sort_routing
from pretuned.runtime.check import tensors
from pretuned.runtime.launch import program
from pretuned.runtime.launch import rowops as launch_rowops
from pretuned.runtime.launch.products import Product
from pretuned.runtime.launch.program import Step
from pretuned.runtime.ops import activation, layer, products
from pretuned.runtime.ops import routing as ops_routing
from pretuned.runtime.replay import layer_plan

T, TOPK, E, H, I = 4, 2, 3, 16, 8  # noqa: E741
HOW = layer.Layer(TOPK, Layout.NK, activation.RowActivation(activation.Activation("silu"), True, False))


@pytest.fixture
def outs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where sums over slots were written to, on a GPU whose kernels do nothing."""
    found: list[int] = []

    def launcher(op: RowOp, *_: object, **__: object) -> object:
        def launch(rows: int, columns: int, pointers: tuple[int, ...], *_: object) -> None:
            if op is RowOp.COMBINE:
                found.append(pointers[-1])

        return launch

    monkeypatch.setattr(program, "stream_of", lambda _device: 0)
    monkeypatch.setattr(layer_plan, "stream_of", lambda _device: 0)
    monkeypatch.setattr(tensors, "on_gpu", lambda _tensor: True)
    monkeypatch.setattr(ops_routing, "sort_slots", lambda *_: None)  # torch sorts
    monkeypatch.setattr(launch_rowops, "for_rows", launcher)
    product = Product((Step(lambda *_: None, "nothing", ("x", "w", "y", "m_sizes")),), False)
    monkeypatch.setattr(products, "resolve", lambda *_: product)
    monkeypatch.setattr(products, "ready_for", lambda *_: None)
    monkeypatch.setattr(products, "resolve_gated", lambda *_: None)
    monkeypatch.setattr(layer_plan, "device_is_current", lambda _device: True)
    return found


def test_later_calls_write_where_they_are_told(outs: list[int]) -> None:
    x, out = torch.randn(T, H).bfloat16(), torch.empty(T, H).bfloat16()
    weights = torch.rand(T, TOPK)
    ids = torch.randint(0, E, (T, TOPK))
    given = layer.Weights(torch.randn(E, 2 * I, H).bfloat16(), torch.randn(E, H, I).bfloat16(), None, None)
    plan = layer_plan.plan_layer(HOW, x, given, ids, weights, out)
    assert plan is not None
    for into in (out, torch.empty_like(out), torch.empty_like(out)):
        assert plan.takes(x, given, ids, weights, into)
        found, *_ = plan.forward(HOW, x, given, sort_routing(ids, E), weights, keeps_h=False, into=into)
        assert found is into
        assert outs.pop() == into.data_ptr()
    (known,) = plan.programs.values()
    assert len(known.steps) == 4  # both products, the activation, the sum: they ran by it
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
        assert not plan.takes(x, given, ids, some, other)
        assert other.shape != x.shape or layer_plan.plan_layer(HOW, x, given, ids, some, other) is None or (
            other.dtype is torch.float32
        )  # fmt: skip
