"""The two products under every call and gradient, without autograd: rows by expert, and dW.

On CUDA a bundle's kernel runs them, the fused parts by run-time flags; where no bundle can, torch does.
Elsewhere it is the reference.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ..artifacts.records.problem import Fusion, Layout, Op
from ..kernels import reference
from . import apart, clearing, fallback, gathered, inputs, passlaunchers
from .device import current_stream, local_gpu, on
from .gathered import GatherFirst, Launch
from .inputs import address_of, row_stride, rows_usable
from .pinned import Pin
from .productlaunchers import gated_launch, row_launch, rows_aligned, weight_launch

_FUSIONS = tuple(map(Fusion, range(16)))  # by value: enum arithmetic costs more than the rest of a launch
stream_of = current_stream
_INDEXED = (Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT).value


@dataclass(frozen=True, slots=True)
class Rows:
    """y[to(m)] = weight(m) * (x[from(m)] @ w[g].T + bias[g]): the forward, or dX with x = dy and y = dx.

    ``w`` is 3-D in ``layout``; ``M`` counts the sorted rows. from(m) = index[m] // ``gather_divisor`` (m where that
    is 0), to(m) = index[m] with ``scatter``; ``row_weights`` float32 by index, ``bias`` [E, columns of y].
    ``zero_tail`` zeroes the rows of y that nothing is stored to.
    ``bounds`` (``layer.Routing``) may be given where every index has its row, also in x; ``loose`` says that rows of y
    whose index has none may hold anything.
    """

    op: Op
    x: torch.Tensor
    w: torch.Tensor
    m_sizes: torch.Tensor
    layout: Layout
    M: int
    index: torch.Tensor | None = None
    gather_divisor: int = 0
    scatter: bool = False
    row_weights: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    pin: Pin | None = None
    zero_tail: bool = False
    bounds: torch.Tensor | None = None
    loose: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, and N and K of w."""
        E, first, second = self.w.shape
        return (E, first, second) if self.layout is Layout.NK else (E, second, first)

    @property
    def fusion(self) -> Fusion:
        """What the kernel's flags say."""
        value = (1 if self.gather_divisor else 0) | (2 if self.scatter else 0)
        return _FUSIONS[value | (4 if self.row_weights is not None else 0) | (8 if self.bias is not None else 0)]

    @property
    def uses_index(self) -> bool:
        """Whether the kernel reads ``index``."""
        return bool(self.fusion.value & _INDEXED)

    def index_end(self, y_rows: int) -> int:
        """The first index that something here has no row for."""
        ends = [self.x.shape[0] * self.gather_divisor] if self.gather_divisor else []
        ends += [y_rows] if self.scatter else []
        ends += [self.row_weights.numel()] if self.row_weights is not None else []
        return min(ends, default=0)

    def stores_nothing(self, y: torch.Tensor) -> bool:
        """Whether no row of y is stored to.

        (Without a row to gather, or a weight, no index is within range; a kernel reads some row of x all the same.)
        """
        there = self.M and y.numel() and self.w.shape[0]
        return not there or (self.uses_index and not self.index_end(y.shape[0]))

    def as_forward(self) -> Layout:
        """The layout that makes this the forward's equation: dX reads w the other way round."""
        other = Layout.KN if self.layout is Layout.NK else Layout.NK
        return self.layout if self.op is Op.FORWARD else other

    def may_gather_first(self, aligned: bool) -> bool:
        """Whether the plain product of rows gathered beforehand would do the same: ``gathered.py`` says when it is to.

        Where nothing else reads the index, that writes the rows of an index out of range, too.
        """
        if not self.gather_divisor or self.pin is not None or not aligned or not self.x.shape[0]:
            return False
        return not self.spares_rows and row_stride(self.x, self.x.shape[1]) == self.x.shape[1]

    @property
    def spares_rows(self) -> bool:
        """Whether rows of an index out of range, which the gather alone reads, have to stay as they are."""
        read = self.scatter or self.row_weights is not None
        return bool(self.gather_divisor) and not read and self.bounds is None and not self.loose


def rows(call: Rows, y: torch.Tensor) -> torch.Tensor:
    """Write y, and return it. Rows of y that nothing is stored to are left as they are, or zero with zero_tail.

    Where the reduction is empty the others have their bias alone; without a bias all of y is zero.
    """
    if call.stores_nothing(y):
        return y.zero_() if call.zero_tail else y
    end = call.index_end(y.shape[0])
    if not call.x.shape[1]:
        return _sums_of_nothing(call, y, end)
    if not inputs.on_gpu(call.x):
        fallback.tell_reference(call.x.device.type)
        if call.zero_tail:
            y.zero_()
        reference.rows(
            call.x, call.w, call.m_sizes, y, M=call.M, layout=call.as_forward(), index=call.index, index_end=end,
            gather_divisor=call.gather_divisor, scatter=call.scatter, row_weights=call.row_weights, bias=call.bias,
        )  # fmt: skip
        return y
    if not rows_usable(call.x):
        call = dataclasses.replace(call, x=call.x.contiguous())
    with on(call.x.get_device()):
        _on_cuda(call, y, end)
    return y


def _sums_of_nothing(call: Rows, y: torch.Tensor, end: int) -> torch.Tensor:
    """y where the reduction is empty: a bias is all that is added."""
    if call.zero_tail or call.bias is None:
        y.zero_()
    if call.bias is not None:
        apart.store(
            y.new_zeros((call.M, y.shape[1])), y, call.m_sizes, index=call.index, index_end=end, scatter=call.scatter,
            row_weights=call.row_weights, bias=call.bias, gathered=bool(call.gather_divisor),
        )  # fmt: skip
    return y


def _on_cuda(call: Rows, y: torch.Tensor, end: int) -> None:
    """By one kernel, or with what no kernel here does taken out of it and done by torch."""
    if _launch_rows(call, y, end):
        return
    if call.zero_tail:
        zero_rest(call, y, end)
        call = dataclasses.replace(call, zero_tail=False)
    spares_rows = call.spares_rows
    if call.gather_divisor and call.index is not None:
        gathered = call.x.index_select(0, reference.rows_of(call.index, end, call.gather_divisor))
        call = dataclasses.replace(call, x=gathered, gather_divisor=0, pin=None)
        if not spares_rows and _launch_rows(call, y, end):
            return
    if not call.fusion and not spares_rows:
        sm = local_gpu(call.x.get_device()).sm
        aligned = rows_aligned(call, y)
        fallback.on_cuda(call.x, call.w, call.m_sizes, y, call.as_forward(), sm=sm, aligned=aligned)
        return
    product = call.x.new_empty((call.M, y.shape[1]))
    _on_cuda(Rows(call.op, call.x, call.w, call.m_sizes, call.layout, call.M), product, 0)
    apart.store(
        product, y, call.m_sizes, index=call.index, index_end=end, scatter=call.scatter, row_weights=call.row_weights,
        bias=call.bias, gathered=spares_rows,
    )  # fmt: skip


def weight(
    dy: torch.Tensor, x: torch.Tensor, m_sizes: torch.Tensor, *, layout: Layout = Layout.NK, pin: Pin | None = None,
    strict: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """dw[g] = dy[rows of g].T @ x[rows of g], [E, N, K] or [E, K, N] in x's dtype; zeros for an expert without rows.

    dy [M, N] and x [M, K] in the sorted order. ``strict`` overrides PRETUNED_STRICT.
    """
    if layout is Layout.KN:  # dw[g].T: the operands change places
        return weight(x, dy, m_sizes, pin=pin, strict=strict)
    (M, N), K, E = dy.shape, x.shape[1], m_sizes.shape[0]
    if not (M and E and N and K):
        return x.new_zeros((E, N, K))
    if not inputs.on_gpu(x):
        fallback.tell_reference(x.device.type)
        return reference.grad_weight(dy, x, m_sizes)
    dy, x = (tensor if rows_usable(tensor) else tensor.contiguous() for tensor in (dy, x))
    with on(x.get_device()):
        dw = x.new_empty((E, N, K))
        launch = weight_launch(dy, x, dw, m_sizes, pin, strict)
        if launch is not None:
            launch(dy.data_ptr(), x.data_ptr(), dw.data_ptr(), m_sizes.data_ptr(), row_stride(dy, N), row_stride(x, K),
                   M, stream_of(x.get_device()))  # fmt: skip
            return dw
        return apart.weight(dy, x, m_sizes, sm=local_gpu(x.get_device()).sm)


def _launch_rows(call: Rows, y: torch.Tensor, index_end: int) -> bool:
    """Launch a bundle's kernel; False where there is none."""
    launch = row_launch(call, y)
    if launch is None:
        return False
    if call.zero_tail and not launch.zeroes:
        zero_rest(call, y, index_end)
    moved: tuple[int, ...] = ()
    if call.fusion:
        index = address_of(call.index) if call.uses_index else 0
        moved = (index, address_of(call.row_weights), address_of(call.bias), index_end)
    _launch(launch, call, y, moved)
    return True


def _launch(launch: Launch, call: Rows, y: torch.Tensor, moved: tuple[int, ...]) -> None:
    x, checked = call.x, None
    if isinstance(launch, GatherFirst):
        checked = index_in_range(call)
        moved += (address_of(checked), passlaunchers.used(call.bounds)[0], x.shape[0] * call.gather_divisor)
    launch(
        x.data_ptr(), call.w.data_ptr(), y.data_ptr(), call.m_sizes.data_ptr(),
        row_stride(x, x.shape[1]), row_stride(y, y.shape[1]), call.M, stream_of(x.get_device()), *moved,
    )  # fmt: skip


def zero_rest(call: Rows, y: torch.Tensor, index_end: int) -> None:
    """Set the rows of y that the product does not store to zero, and others maybe: before it."""
    if call.scatter and call.index is not None:
        clearing.clear(y, call.index, call.m_sizes, call.M, index_end)
    else:
        y.zero_()


def index_in_range(call: Rows) -> torch.Tensor | None:
    """The index that a ``GatherFirst`` reads, to be kept until it is launched; None where the call's own will do."""
    if call.index is None or call.bounds is not None:
        return None
    return gathered.in_range(call.index, call.x.shape[0], call.gather_divisor)


def gated_rows(call: Rows) -> torch.Tensor | None:
    """silu(gate) * up of this product, [M, N/2], by one kernel; None where ``gated_launch`` has none.

    Rows of no expert hold anything, and so do those of an index out of range.
    """
    if not (call.M and call.x.numel() and call.w.shape[0]) or not inputs.on_gpu(call.x):
        return None
    if not rows_usable(call.x):
        call = dataclasses.replace(call, x=call.x.contiguous())
    x = call.x
    with on(x.get_device()):
        I = call.sizes[1] // 2  # noqa: E741
        # (A row is enough to ask: a launcher asks how its operands are aligned, and nothing else of them.)
        launch = gated_launch(call, x.new_empty((1, I)).expand(call.M, I)) if I else None
        if launch is None:
            return None
        a = x.new_empty((call.M, I))
        _launch(launch, call, a, (address_of(call.index), 0, 0, call.index_end(0)))
    return a
