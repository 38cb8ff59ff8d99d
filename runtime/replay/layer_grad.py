"""The gradient of a layer that comes again: its launches in readiness. As ``layer``, for ``layer.gradients``.

Those of biases it does not compute. A gradient whose tensors do not lie as the first ones did goes the long way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from ...artifacts.records.problem import Layout, Op, RowOp
from ...kernels.contract import rowops
from ...kernels.contract.words import ALIGNMENT_BYTES
from ..check.operands import Rows
from ..check.tensors import address_of
from ..driver.device import allocator
from ..launch import gather as launch_gather
from ..launch import products as launch_products
from ..launch import rowops as launch_rowops
from ..launch.gather import Launch
from ..ops import products
from ..ops.layer import Layer, Routing, with_bias

if TYPE_CHECKING:
    from ..driver.launcher import Launcher

Gradients: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]"

_INDEX_STEP = 2  # Routing's index is int64


class Sizes(NamedTuple):
    """Of a layer: slots of a token, experts, columns of hidden, of the first product, and of the second's x."""

    k: int
    E: int
    H: int
    wide: int
    I: int  # noqa: E741


class Wanted(NamedTuple):
    """Whose gradients are wanted."""

    x: bool
    gate_up: bool
    down: bool
    weights: bool

    @property
    def inner(self) -> bool:
        """Whether that of the first product's result is."""
        return self.x or self.gate_up


class _Launches(NamedTuple):
    """What sorts rows, dX of down, and the activation's gradient; the rest is there where it is wanted."""

    gather: launch_rowops.RowOpLauncher
    through: Launch
    activation: launch_rowops.RowOpLauncher
    ddown: Launcher | None
    each: Launch | None
    combine: launch_rowops.RowOpLauncher | None
    dup: Launcher | None


class GradientPlan:
    """One layer's gradients."""

    __slots__ = (
        "_device", "_dtype", "_empty", "_flags", "_launches", "_lies", "_sizes", "_stream", "_swapped", "_wanted",
    )  # fmt: skip

    def __init__(
        self, how: Layer, sizes: Sizes, wanted: Wanted, like: torch.Tensor, lies: tuple[object, object],
        launches: _Launches,
    ) -> None:  # fmt: skip
        self._sizes, self._wanted, self._lies, self._launches = sizes, wanted, lies, launches
        self._dtype, self._device, self._empty = like.dtype, like.get_device(), allocator(like.device)
        self._stream, self._swapped = products.stream_of, how.layout is Layout.KN
        self._flags = how.act.flags | (rowops.WRITES_DH if wanted.inner else 0)
        self._flags |= (rowops.WRITES_A if wanted.down else 0) | (rowops.WRITES_DWEIGHTS if wanted.weights else 0)

    def __call__(
        self, dout: torch.Tensor, x: torch.Tensor | None, gate_up: torch.Tensor | None, down: torch.Tensor,
        down_bias: torch.Tensor | None, weights: torch.Tensor, h: torch.Tensor, routing: Routing,
    ) -> Gradients | None:  # fmt: skip
        """The gradients of x, gate_up, down and weights that are wanted; None where it is another call."""
        if not self._takes(dout, x, gate_up, down, weights, h):
            return None
        k, E, H, wide, I = self._sizes  # noqa: E741
        T = dout.shape[0]
        M, dtype, empty, stream = T * k, self._dtype, self._empty, self._stream(self._device)
        wanted, launches = self._wanted, self._launches
        index, m_sizes, bounds, experts, places = routing
        at_index, at_sizes, (used, flag) = index.data_ptr(), m_sizes.data_ptr(), launch_rowops.used(bounds)
        read = weights.detach() if self._reads(weights) else weights.detach().to(torch.float32)
        flag |= launch_rowops.weighing(read)
        kind = torch.float32 if down_bias is not None else read.dtype  # (a bias adds to it, in float32)
        flag |= 0 if kind is torch.float32 else rowops.NARROW_DWEIGHTS
        dx = dup = ddown = None
        dy = self._sorted(dout, at_index, used)
        da = empty((M, I), (I, 1), dtype)
        packed = launches.through.pack(x=dy.data_ptr(), w=down.data_ptr(), stride_x_m=H, stride_y_m=I, M=M)
        launches.through.start(packed, da.data_ptr(), at_sizes, stream)
        dh = empty((M, wide), (wide, 1), dtype) if wanted.inner else None
        a = empty((M, I), (I, 1), dtype) if wanted.down else None
        dweights = empty((M,), (1,), kind) if wanted.weights else None
        launches.activation(
            M, I,
            (h.data_ptr(), da.data_ptr(), read.data_ptr(), at_index, used, address_of(dh),
             address_of(a), address_of(dweights)),
            (M, I, _INDEX_STEP, self._flags | flag),
        )  # fmt: skip
        del da
        if a is not None and launches.ddown is not None:
            ddown = self._weight(launches.ddown, dy, a, (E, H, I), at_sizes, stream)
        if dweights is not None:
            dweights = with_bias(dweights.view(weights.shape), dout, down_bias, experts, E).to(weights.dtype)
        del a, dy  # half of what the gradient takes beside its results
        if dh is not None and gate_up is not None and launches.each is not None and launches.combine is not None:
            each = empty((M, H), (H, 1), dtype)
            packed = launches.each.pack(x=dh.data_ptr(), w=gate_up.data_ptr(), stride_x_m=wide, stride_y_m=H, M=M)
            launches.each.start(packed, each.data_ptr(), at_sizes, stream)
            dx = empty((T, H), (H, 1), dtype)
            launches.combine(
                T, H, (each.data_ptr(), places.data_ptr(), 0, 0, 0, dx.data_ptr()), (T, H, k, 0)
            )  # fmt: skip
            del each
        if dh is not None and x is not None and launches.dup is not None:
            dup = self._weight(launches.dup, dh, self._sorted(x, at_index, used), (E, wide, H), at_sizes, stream)
        return dx, dup, ddown, dweights

    def _takes(
        self, dout: torch.Tensor, x: torch.Tensor | None, gate_up: torch.Tensor | None, down: torch.Tensor,
        weights: torch.Tensor, h: torch.Tensor,
    ) -> bool:  # fmt: skip
        """Whether they are as the first ones were. (Hooks on saved tensors may have made others of them.)"""
        k, _, H, wide, _ = self._sizes
        T = dout.shape[0]
        if type(dout) is not torch.Tensor or not weights.is_contiguous() or weights.shape != (T, k):
            return False
        if weights.get_device() != self._device or h.shape != (T * k, wide) or (x is not None and x.shape != (T, H)):
            return False
        for one in (dout, h) if x is None else (dout, h, x):
            if one.dtype is not self._dtype or one.get_device() != self._device:
                return False
            if not one.is_contiguous() or one.data_ptr() & ALIGNMENT_BYTES - 1:
                return False
        lies_up, lies_down = self._lies
        return _lying(down) == lies_down and (gate_up is None or _lying(gate_up) == lies_up)

    def _reads(self, weights: torch.Tensor) -> bool:
        """Whether the kernel reads routing weights as they are."""
        return weights.dtype in (torch.float32, self._dtype)

    def _sorted(self, rows: torch.Tensor, at_index: int, used: int) -> torch.Tensor:
        """A row for each slot of rows' tokens [T, H], in the sorted order."""
        T, (k, _, H, *_) = rows.shape[0], self._sizes
        out = self._empty((T * k, H), (H, 1), self._dtype)
        launch_gather.gather(
            self._launches.gather, self._empty, rows.data_ptr(), at_index, used, out.data_ptr(), M=T * k, columns=H,
            itemsize=rows.element_size(), slots=T * k, top_k=k, index_step=_INDEX_STEP,
        )  # fmt: skip
        return out

    def _weight(
        self, launch: Launcher, left: torch.Tensor, right: torch.Tensor, sizes: tuple[int, int, int], at_sizes: int,
        stream: int,
    ) -> torch.Tensor:  # fmt: skip
        """left[rows of g].T @ right[rows of g] of every expert; with weights [E, K, N] its transpose."""
        E, N, K = sizes
        if self._swapped:
            left, right, N, K = right, left, K, N
        dw = self._empty((E, N, K), (N * K, K, 1), self._dtype)
        packed = launch.pack(dy=left.data_ptr(), x=right.data_ptr(), stride_dy_m=N, stride_x_m=K, M=left.shape[0])
        launch.start(packed, dw.data_ptr(), at_sizes, stream)
        return dw


def plan(
    how: Layer, sizes: Sizes, wanted: Wanted, dout: torch.Tensor, gate_up: torch.Tensor | None,
    down: torch.Tensor | None, routing: Routing,
) -> GradientPlan | None:  # fmt: skip
    """A plan for what is ``wanted`` of a layer of these sizes; None where there is none, or a kernel is missing."""
    if down is None or not (wanted.inner or wanted.weights) or (wanted.x and gate_up is None):
        return None
    k, E, H, wide, I = sizes  # noqa: E741
    T, m_sizes = dout.shape[0], routing.m_sizes
    M = T * k
    # (A row each: a launcher asks how its operands are aligned, and nothing else of them.)
    dy, da, dh = (dout.new_empty((1, length)).expand(M, length) for length in (H, I, wide))

    def weight(left: torch.Tensor, right: torch.Tensor) -> Launcher | None:
        if how.layout is Layout.KN:
            left, right = right, left
        dw = dout.new_empty((1, 1, 1)).expand(E, left.shape[1], right.shape[1])
        return launch_products.weight_launch(left, right, dw, m_sizes)

    gather = launch_rowops.for_rows(RowOp.GATHER, H, M, like=dout)
    through = launch_products.row_launch(Rows(Op.DX, dy, down, m_sizes, how.layout, M), da)
    activation = launch_rowops.for_rows(RowOp.ACTIVATION_GRAD, I, M, like=dout)
    if gather is None or through is None or activation is None:
        return None
    ddown = weight(dy, da) if wanted.down else None
    each = combine = None
    if wanted.x and gate_up is not None:
        product = Rows(Op.DX, dh, gate_up, m_sizes, how.layout, M)
        each, combine = launch_products.row_launch(product, dy), launch_rowops.for_rows(RowOp.COMBINE, H, T, like=dout)
    dup = weight(dh, dy) if wanted.gate_up else None
    if (wanted.down and ddown is None) or (wanted.gate_up and dup is None):
        return None
    if wanted.x and (each is None or combine is None):
        return None
    lies = None if gate_up is None else _lying(gate_up), _lying(down)
    return GradientPlan(
        how, sizes, wanted, dout, lies, _Launches(gather, through, activation, ddown, each, combine, dup)
    )  # fmt: skip


def _lying(w: torch.Tensor) -> tuple[object, ...]:
    """What a tensor is but for its values, and how it lies in memory but for where: how far from alignment."""
    return w.dtype, w.get_device(), w.shape, w.stride(), w.data_ptr() & ALIGNMENT_BYTES - 1
