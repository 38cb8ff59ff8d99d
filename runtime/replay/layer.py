"""Layers that come again: what was checked and chosen the first time, in readiness. As ``plans``, for ``moe_mlp``.

A plan belongs to the weights of one layer and to a bucket of rows, for which all its launches were chosen. It takes a
call, of any number of tokens in there, only if its tensors pass one guard (``guard.py``) and hidden begins as well
aligned as the first; any other goes the long way, which checks everything.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from ...artifacts.records.problem import Op, RowOp
from ...kernels.contract.rowops import BIASED
from ...kernels.contract.words import ALIGNMENT_BYTES
from .. import hooks
from ..check import tensors as check_tensors
from ..check.operands import Rows
from ..check.tensors import row_stride
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import allocator, device_is_current, only_device
from ..launch import products as launch_products
from ..launch import rowops
from ..launch.gather import GatherFirst, Launch
from ..ops import products
from ..ops.layer import GATED_IN_PRODUCT, Layer, Routing, Weights, columns, slot_weights
from . import guard

if TYPE_CHECKING:
    from . import layer_grad
    from .layer_grad import Sizes

_KINDS = (torch.bfloat16, torch.float16)  # not float32: tf32 and autocast change what a call of it does


_NOTHING: dict[str, int] = {}
_LOOSE = (0, 3, 4)  # of a guard's tensors: hidden, the ids and the routing weights, a row a token
_MOST_ROWS = 1 << 29  # so that all of its bucket fit int32


class LayerPlan:
    """One layer's forward. No tensor is kept: a plan would hold a model's weights."""

    __slots__ = (
        "_act", "_activation", "_alone", "_combine", "_device", "_dtype", "_empty", "_first", "_gated", "_gathers",
        "_low", "_planned", "_same", "_second", "_sizes", "_snapshot", "_stream", "_stride_x", "_weighs", "_widens",
        "grad", "how",
    )  # fmt: skip

    def __init__(
        self, how: Layer, x: torch.Tensor, given: Weights, sizes: Sizes,
        launches: tuple[Launch, Launch], passing: tuple[rowops.RowOpLauncher, rowops.RowOpLauncher],
        same: guard.Guard, grad: bool, gated: Launch | None, snapshot: dispatch_snapshot.Snapshot, read: torch.Tensor,
        widens: bool,
    ) -> None:  # fmt: skip
        self.how, self.grad = how, grad
        self._same, self._low, self._sizes = same, x.data_ptr() & ALIGNMENT_BYTES - 1, sizes
        self._first, self._second = launches
        self._gated = gated
        self._gathers = isinstance(launches[0], GatherFirst), isinstance(gated, GatherFirst)
        self._activation, self._combine = passing
        self._act, self._device, self._dtype = how.act.flags, x.get_device(), x.dtype
        self._alone = only_device()
        self._snapshot = weakref.ref(snapshot)  # (which keeps the plan)
        self._empty, self._stream = allocator(x.device), products.stream_of
        self._stride_x = row_stride(x, x.shape[1])
        self._weighs = rowops.weighing(read) | (0 if given.down_bias is None else BIASED)
        self._widens = widens
        self._planned: dict[layer_grad.Wanted, layer_grad.GradientPlan | None] = {}

    def takes(
        self, hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
        *biases: torch.Tensor,
    ) -> bool:  # fmt: skip
        """Whether a call on these tensors, of as many rows by bucket, is like the first."""
        if not self._same(hidden, gate_up, down, ids, weights, *biases):
            return False
        T = ids.shape[0]
        return (
            0 < T == weights.shape[0]
            and hidden.numel() == T * self._sizes.H
            and hidden.is_contiguous()
            and weights.is_contiguous()
            and hidden.data_ptr() & ALIGNMENT_BYTES - 1 == self._low
            and all(not one.data_ptr() & ALIGNMENT_BYTES - 1 for one in biases)
            and (self._alone or device_is_current(self._device))
        )

    def gradients(
        self, dout: torch.Tensor, x: torch.Tensor | None, gate_up: torch.Tensor | None, down: torch.Tensor | None,
        down_bias: torch.Tensor | None, weights: torch.Tensor, h: torch.Tensor, routing: Routing,
        needs: tuple[bool, ...],
    ) -> layer_grad.Gradients | None:  # fmt: skip
        """Those of x, gate_up, down and weights that are needed; None where ``layer.gradients`` has to compute them."""
        needs_x, needs_up, needs_down, needs_up_bias, needs_down_bias, needs_weights = needs
        if needs_up_bias or needs_down_bias or dispatch_snapshot.snapshot() is not self._snapshot() or down is None:
            return None
        if not (self._alone or device_is_current(self._device)):
            return None
        from . import layer_grad  # here, as inference has none

        wanted = layer_grad.Wanted(needs_x, needs_up, needs_down, needs_weights)
        planned = self._planned.get(wanted)
        if wanted not in self._planned:
            planned = layer_grad.plan(self.how, self._sizes, wanted, dout, gate_up, down, routing)
            if planned is not None or not hooks.jit_allowed():  # else the next call asks again
                self._planned[wanted] = planned
        return None if planned is None else planned(dout, x, gate_up, down, down_bias, weights, h, routing)

    def forward(
        self, x: torch.Tensor, given: Weights, routing: Routing, weights: torch.Tensor, *, keeps_h: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out [T, H] and, with ``keeps_h``, h, without a look at the tensors: ``takes`` had one."""
        k, _, H, wide, I = self._sizes  # noqa: E741
        T = x.shape[0]
        M, dtype, empty = T * k, self._dtype, self._empty
        gate_up, down, gate_up_bias, down_bias = given
        index, m_sizes, bounds, experts, places = routing
        at_index, at_sizes, stream = index.data_ptr(), m_sizes.data_ptr(), self._stream(self._device)
        h, a = None, empty((M, I), (I, 1), dtype)
        if self._gated is not None and not keeps_h:
            gated = self._gated
            gated.start(gated.pack(
                x=x.data_ptr(), w=gate_up.data_ptr(), stride_x_m=self._stride_x, stride_y_m=I, M=M, index=at_index,
                index_end=M, **({"used": rowops.used(bounds)[0], "slots": M} if self._gathers[1] else _NOTHING),
            ), a.data_ptr(), at_sizes, stream)  # fmt: skip
        else:
            h = empty((M, wide), (wide, 1), dtype)
            used, flag = rowops.used(bounds)
            first = self._first
            first.start(first.pack(  # (no name for it: it may hold as much memory as h)
                x=x.data_ptr(), w=gate_up.data_ptr(), stride_x_m=self._stride_x, stride_y_m=wide, M=M, index=at_index,
                bias=0 if gate_up_bias is None else gate_up_bias.data_ptr(), index_end=M,
                **({"used": used, "slots": M} if self._gathers[0] else _NOTHING),
            ), h.data_ptr(), at_sizes, stream)  # fmt: skip
            self._activation(M, I, (h.data_ptr(), a.data_ptr(), used), (M, I, self._act | flag))
        y = empty((M, H), (H, 1), dtype)
        packed = self._second.pack(x=a.data_ptr(), w=down.data_ptr(), stride_x_m=I, stride_y_m=H, M=M)
        self._second.start(packed, y.data_ptr(), at_sizes, stream)
        out = empty((T, H), (H, 1), dtype)
        if self._widens:
            weights = weights.to(torch.float32)
        self._combine(
            T, H,
            (y.data_ptr(), places.data_ptr(), weights.data_ptr(), experts.data_ptr(),
             0 if down_bias is None else down_bias.data_ptr(), out.data_ptr()),
            (T, H, k, self._weighs),
        )  # fmt: skip
        return out, h if keeps_h else None


def plan(
    how: Layer, hidden: torch.Tensor, given: Weights, ids: torch.Tensor, weights: torch.Tensor, routing: Routing
) -> LayerPlan | None:
    """A plan of the call on these tensors, as the caller passed them; None where the next one needs another look."""
    x = hidden.reshape(-1, hidden.shape[-1])
    (T, H), k, (M,) = x.shape, how.top_k, routing.gather_indices.shape
    wide = columns(given.gate_up, how.layout)
    I = wide // 2 if how.act.gated else wide  # noqa: E741
    if not check_tensors.on_gpu(x) or x.dtype not in _KINDS or not (M and H and I) or not hidden.is_contiguous():
        return None
    if M >= _MOST_ROWS:
        return None
    if any(one is not None and (one.dtype is not x.dtype or not one.is_contiguous()) for one in given[2:]):
        return None
    if {given.gate_up.dtype, given.down.dtype} != {x.dtype}:
        return None
    if not weights.is_contiguous():
        return None
    if any(one is not None and one.data_ptr() & ALIGNMENT_BYTES - 1 for one in given[2:]):
        return None
    snapshot = dispatch_snapshot.snapshot()  # first: what another thread's ``reload`` lets be chosen is not of this one
    index, m_sizes, bounds, *_ = routing
    read = slot_weights(weights, x)
    # (A row each: a launcher asks how its operands are aligned, and nothing else of them.)
    h, a, y = (x.new_empty((1, length)).expand(M, length) for length in (wide, I, H))
    first = Rows(
        Op.FORWARD, x, given.gate_up, m_sizes, how.layout, M, index, k, bias=given.gate_up_bias, bounds=bounds
    )  # fmt: skip
    second = Rows(Op.FORWARD, a, given.down, m_sizes, how.layout, M)
    launches = launch_products.row_launch(first, h), launch_products.row_launch(second, y)
    passing = rowops.for_rows(RowOp.ACTIVATION, I, M, like=x), rowops.for_rows(RowOp.COMBINE, H, T, like=x)
    tensors = [one for one in (hidden, *given[:2], ids, weights, *given[2:]) if one is not None]
    same = guard.guard(*tensors, loose=_LOOSE)
    if same is None or None in launches or None in passing:
        return None
    grad = any(one.requires_grad for one in tensors)
    gated = launch_products.gated_launch(first, a) if how.act == GATED_IN_PRODUCT else None
    from .layer_grad import Sizes

    sizes = Sizes(k, m_sizes.shape[0], H, wide, I)
    widens = read.dtype is not weights.dtype
    return LayerPlan(how, x, given, sizes, launches, passing, same, grad, gated, snapshot, read, widens)  # type: ignore[arg-type]
