"""Calls with a gradient or a fused part that come again: what was checked and chosen the first time, in readiness.

A plan belongs to one w, one form and one shape. It takes a call only if its tensors pass one guard (``guard.py``)
and x begins as well aligned as the first; any other call goes the long way, which checks everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

from ...artifacts.records.problem import Layout, Op
from ...kernels.contract.words import ALIGNMENT_BYTES
from ..check import tensors as check_tensors
from ..check.call import Call
from ..check.operands import Rows
from ..check.tensors import row_stride
from ..driver.device import allocator, device_is_current, only_device
from ..launch import products as launch_products
from ..launch.gather import GatherFirst, Launch, in_range
from ..ops import products
from ..ops.autograd import GroupedGemm
from ..ops.gradients import forward_rows
from ..ops.zero_rows import clear
from . import guard

if TYPE_CHECKING:
    from ..driver.launcher import Launcher

Key: TypeAlias = "tuple[object, ...]"

_MOST_PLANS = 4096  # of about 2 KB
_KINDS = (torch.bfloat16, torch.float16)  # not float32: tf32 and autocast change what a call of it does

# Function.apply does this and, for calls inside torch.func's transforms, more.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, GroupedGemm).apply
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled


class ExecutionPlan:
    """One call's launches. Calling it does the call, or returns None and does nothing where it is another one."""

    __slots__ = (
        "_alone", "_clear_first", "_device", "_dtype", "_dw", "_dx", "_empty", "_gathers", "_grad", "_launch", "_low",
        "_moved", "_plain", "_same", "_saved", "_stream", "_strides", "_tensors", "_widens", "_x_columns", "_y",
        "_zero_first",
        "form", "sizes",
    )  # fmt: skip

    def __init__(self, call: Call, x: torch.Tensor, launch: Launch, same: guard.Guard) -> None:
        # (No tensor is kept: a plan would hold a model's weights.)
        fusions, rows = call.fusions, forward_rows(call, x)
        self.form, self.sizes = call.form, (call.M, call.x_rows, call.y_rows)
        self._device, self._dtype = x.get_device(), x.dtype
        self._alone = only_device()
        self._launch, self._same, self._low = launch, same, x.data_ptr() & ALIGNMENT_BYTES - 1
        self._empty, self._stream = allocator(x.device), products.stream_of
        self._y = (call.y_rows, call.N), (call.N, 1), x.dtype
        self._clear_first = rows.scatter and rows.zero_tail and not launch.zeroes
        self._zero_first = rows.zero_tail and not rows.scatter and not launch.zeroes
        self._strides, self._x_columns = (row_stride(x, call.K), call.N, call.M), call.K
        self._moved = (rows.uses_index, rows.index_end(call.y_rows)) if rows.fusion else None
        tensors = (fusions.weights, fusions.bias, fusions.index)
        self._tensors = tuple(i for i, one in enumerate(tensors) if one is not None)
        self._grad = any(t is not None and t.requires_grad for t in (x, call.w, fusions.weights, fusions.bias))
        self._widens = fusions.weights is not None and fusions.weights.dtype is not torch.float32
        self._gathers = (x.shape[0], rows.gather_divisor) if isinstance(launch, GatherFirst) else None
        # dX and dW of a plain call are launched from here too, once a backward asked for them.
        self._plain = call.form.plain and not self._tensors
        self._saved = x.stride(), call.dense.stride(), call.dense.data_ptr() & ALIGNMENT_BYTES - 1
        self._dx: Launch | None = None
        self._dw: Launcher | None = None

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor, weights: torch.Tensor | None,
        bias: torch.Tensor | None, index: torch.Tensor | None,
    ) -> torch.Tensor | None:  # fmt: skip
        if self._tensors:
            given = (weights, bias, index)
            same = self._same(x, w, m_sizes, *[given[i] for i in self._tensors])
        else:
            same = self._same(x, w, m_sizes)
        if not same or x.data_ptr() & ALIGNMENT_BYTES - 1 != self._low:
            return None
        if not (self._alone or device_is_current(self._device)):
            return None
        if self._grad and _grad_enabled():
            if _transformed():
                return None
            return _apply(x, w, m_sizes, weights, bias, index, self.form, self.sizes, self)
        return self.forward(x, w, m_sizes, weights, bias, index)

    def forward(
        self, x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor, weights: torch.Tensor | None,
        bias: torch.Tensor | None, index: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """y, without a look at the tensors: ``__call__`` had one."""
        y = self._empty(*self._y)
        if self._clear_first and index is not None and self._moved is not None:
            clear(y, index, m_sizes, self._strides[2], self._moved[1])
        elif self._zero_first:
            y.zero_()
        launch, (stride_x_m, stride_y_m, M) = self._launch, self._strides
        if self._moved is None:
            packed = launch.pack(x=x.data_ptr(), w=w.data_ptr(), stride_x_m=stride_x_m, stride_y_m=stride_y_m, M=M)
        else:
            uses_index, index_end = self._moved
            if self._widens and weights is not None:
                weights = weights.to(torch.float32)  # (kept until it is launched)
            more: dict[str, int] = {}
            if self._gathers is not None and index is not None:
                checked = in_range(index, *self._gathers)  # (kept until it is launched)
                more = {"index_in_range": checked.data_ptr(), "slots": self._gathers[0] * self._gathers[1]}
            packed = launch.pack(
                x=x.data_ptr(), w=w.data_ptr(), stride_x_m=stride_x_m, stride_y_m=stride_y_m, M=M,
                index=index.data_ptr() if uses_index and index is not None else 0,
                row_weights=0 if weights is None else weights.data_ptr(), bias=0 if bias is None else bias.data_ptr(),
                index_end=index_end, **more,
            )  # fmt: skip
        launch.start(packed, y.data_ptr(), m_sizes.data_ptr(), self._stream(self._device))
        return y

    def backward(
        self, x: torch.Tensor | None, w: torch.Tensor | None, m_sizes: torch.Tensor, dy: torch.Tensor,
        needs: tuple[bool, ...],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:  # fmt: skip
        """dx and dw of a plain call; None where ``autograd.backward`` has to compute them."""
        if not self._plain or type(dy) is not torch.Tensor or dy.dtype is not self._dtype or not dy.is_contiguous():
            return None
        x_stride, w_stride, w_low = self._saved  # hooks on saved tensors may have put them elsewhere, and dense
        if w is None and needs[0]:
            return None
        if w is not None and (w.stride() != w_stride or w.data_ptr() & ALIGNMENT_BYTES - 1 != w_low):
            return None
        if x is not None and (x.stride() != x_stride or x.data_ptr() & ALIGNMENT_BYTES - 1 != self._low):
            return None
        at = dy.data_ptr()
        if at & ALIGNMENT_BYTES - 1 or not (self._alone or device_is_current(self._device)):
            return None
        (stride_x, N, M), K, form, dx, dw = self._strides, self._x_columns, self.form, None, None
        swapped, stream = form.layout is Layout.KN, self._stream(self._device)
        if needs[1] and x is not None:
            E = m_sizes.shape[0]
            size, strides = ((E, K, N), (K * N, N, 1)) if swapped else ((E, N, K), (N * K, K, 1))
            dw = self._empty(size, strides, self._dtype)
            first, second = (x, dy) if swapped else (dy, x)
            launch = self._dw
            if launch is None:
                launch = self._dw = launch_products.weight_launch(first, second, dw, m_sizes)
                if launch is None:
                    self._plain = False
                    return None
            stride_first, stride_second = (stride_x, N) if swapped else (N, stride_x)
            packed = launch.pack(
                dy=first.data_ptr(), x=second.data_ptr(), stride_dy_m=stride_first, stride_x_m=stride_second, M=M
            )
            launch.start(packed, dw.data_ptr(), m_sizes.data_ptr(), stream)
        if w is not None and needs[0]:
            dx = self._empty((M, K), (K, 1), self._dtype)
            launch_dx = self._dx
            if launch_dx is None:
                product = Rows(Op.DX, dy, w, m_sizes, form.layout, M, zero_tail=True)
                launch_dx = self._dx = launch_products.row_launch(product, dx)
                if launch_dx is None:
                    self._plain = False
                    return None
            packed = launch_dx.pack(x=at, w=w.data_ptr(), stride_x_m=N, stride_y_m=K, M=M)
            launch_dx.start(packed, dx.data_ptr(), m_sizes.data_ptr(), stream)
        return dx, dw


def plan(
    call: Call, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None, bias: torch.Tensor | None,
    index: torch.Tensor | None,
) -> ExecutionPlan | None:  # fmt: skip
    """A plan of the call that just made y, or None where the next one like it needs another look.

    ``weights``, ``bias`` and ``index`` are as the caller passed them.
    """
    form, fusions = call.form, call.fusions
    if not check_tensors.on_gpu(x) or x.dtype not in _KINDS or form.autotune or form.pinned:
        return None
    if fusions.weights is not weights or fusions.bias is not bias or fusions.index is not index:
        return None
    if any(t is not None and not t.is_contiguous() for t in (weights, bias)) or not (call.M and call.N and call.K):
        return None
    launch = launch_products.row_launch(forward_rows(call, x), y)
    same = guard.guard(x, call.dense, call.m_sizes, *[t for t in (weights, bias, index) if t is not None])
    return None if launch is None or same is None else ExecutionPlan(call, x, launch, same)


def remember(table: dict[Key, ExecutionPlan], key: Key, made: ExecutionPlan) -> None:
    """Put a plan in; a full table begins anew."""
    if len(table) >= _MOST_PLANS:
        table.clear()
    table[key] = made
