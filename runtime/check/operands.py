"""The operands of a product of rows, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ...artifacts.records.problem import Fusion, Layout, Op
from ..weights.expert_weights import ExpertWeights
from .tensors import row_stride

if TYPE_CHECKING:
    from ..dispatch.pin import Pin

MAX_RANK = 256  # columns of a low-rank part
_FUSIONS = tuple(map(Fusion, range(64)))  # by value: enum arithmetic costs more than the rest of a launch
_INDEXED = (Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT).value


class LowPart(NamedTuple):
    """What is added to a product: y[m] += x[m] @ w[g].T before a bias and a weight, of sorted rows.

    ``x`` is [M, r], and ``w`` [E, columns of y, r] or, where the product's w has y's columns contiguous, [E, r, columns
    of y]. Both are dense.
    """

    x: torch.Tensor
    w: torch.Tensor


class Rows(NamedTuple):
    """y[to(m)] = weight(m) * (x[from(m)] @ w[g].T + bias[g]): the forward, or dX with x = dy and y = dx.

    ``w`` is 3-D in ``layout``; ``M`` counts the sorted rows. from(m) = index[m] // ``gather_divisor`` (m where that
    is 0), to(m) = index[m] with ``scatter``; ``row_weights`` float32 by index, ``bias`` [E, columns of y].
    ``zero_tail`` zeroes the rows of y that nothing is stored to.
    ``bounds`` (``routing.Routing``) may be given where every index has its row, also in x; ``loose`` says that rows of
    y whose index has none may hold anything. ``low`` is added by ``products.with_low_part`` alone.
    """

    op: Op
    x: torch.Tensor
    w: torch.Tensor | ExpertWeights
    m_sizes: torch.Tensor
    layout: Layout
    M: int
    index: torch.Tensor | None = None  # type: ignore[assignment]  # (no search in a tuple)
    gather_divisor: int = 0
    scatter: bool = False
    row_weights: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    pin: Pin | None = None
    zero_tail: bool = False
    bounds: torch.Tensor | None = None
    loose: bool = False
    low: LowPart | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, and N and K of w."""
        E, first, second = self.w.shape
        return (E, first, second) if self.layout is Layout.NK else (E, second, first)

    @property
    def columns(self) -> int:
        """Columns of y."""
        _, N, K = self.sizes
        return N if self.op is Op.FORWARD else K

    @property
    def dense(self) -> torch.Tensor:
        """w of a product whose w is a tensor."""
        if not isinstance(self.w, torch.Tensor):
            raise AssertionError(f"{self.w} is no tensor")
        return self.w

    @property
    def fusion(self) -> Fusion:
        """What the kernel's flags say."""
        value = (1 if self.gather_divisor else 0) | (2 if self.scatter else 0)
        value |= (4 if self.row_weights is not None else 0) | (8 if self.bias is not None else 0)
        return _FUSIONS[value | (32 if self.low is not None else 0)]

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
        """Whether the plain product of rows gathered beforehand would do the same: a bundle's plan says when it is to.

        Where nothing else reads the index, that writes the rows of an index out of range, too.
        """
        pinned = self.pin is not None and isinstance(self.w, torch.Tensor)  # quantised w: no kernel in order gathers
        if not self.gather_divisor or pinned or not aligned or not self.x.shape[0]:
            return False
        return not self.spares_rows and row_stride(self.x, self.x.shape[1]) == self.x.shape[1]

    @property
    def spares_rows(self) -> bool:
        """Whether rows of an index out of range, which the gather alone reads, have to stay as they are."""
        read = self.scatter or self.row_weights is not None
        return bool(self.gather_divisor) and not read and self.bounds is None and not self.loose
