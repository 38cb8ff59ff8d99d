"""A checked call of ``grouped_gemm``, and a product of rows: tensors in the shapes and dtypes that kernels want."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from ...artifacts.records.problem import Fusion, Layout, Op, bucket_of
from ...artifacts.tuples import NamedTuple
from ..weights.expert_weights import ExpertWeights
from . import tensors
from .form import Form, Fusions, check_fusions, expected_bucket, token_rows
from .tensors import row_stride

if TYPE_CHECKING:
    from ..dispatch.pin import Pin

MAX_RANK = 256  # columns of a low-rank part
_FUSIONS = tuple(map(Fusion, range(64)))  # by value: enum arithmetic costs more than the rest of a launch
_INDEXED = (Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT).value
_W = TypeVar("_W", torch.Tensor, ExpertWeights, "torch.Tensor | ExpertWeights")


class Call(NamedTuple):
    """A checked call: ``M`` sorted rows, and the rows of x and y; w is 3-D."""

    form: Form
    w: torch.Tensor | ExpertWeights
    m_sizes: torch.Tensor
    fusions: Fusions
    M: int
    x_rows: int
    y_rows: int

    @property
    def x_divisor(self) -> int:
        """``Rows.gather_divisor`` of this call."""
        return self.form.topk if self.form.permute_x else 0

    @property
    def dense(self) -> torch.Tensor:
        """w of a call whose w is a tensor."""
        if not isinstance(self.w, torch.Tensor):
            raise AssertionError(f"{self.w} is no tensor")
        return self.w

    @property
    def N(self) -> int:
        """Columns of y."""
        return self.w.shape[1 if self.form.layout is Layout.NK else 2]

    @property
    def K(self) -> int:
        """Columns of x."""
        return self.w.shape[2 if self.form.layout is Layout.NK else 1]

    def flat_weights(self, like: torch.Tensor) -> torch.Tensor | None:
        """The routing weights as ``flat`` has them, where there are any."""
        return None if self.fusions.weights is None else flat(self.fusions.weights, wide_of(like))


def wide_of(like: torch.Tensor) -> torch.dtype:
    """The dtype in which routing weights are multiplied: float64 with a float64 tensor, else float32."""
    return torch.float64 if like.dtype is torch.float64 else torch.float32


def flat(weights: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """The routing weights by flat index, in this dtype."""
    return weights.detach().to(wide).reshape(-1).contiguous()


def check(
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    form: Form,
    gather_indices: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    fuse_mul_post: bool,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    expected_rows: int | None = None,
    *,
    copies: bool = True,
) -> tuple[Call, torch.Tensor]:
    """The call, and x with usable rows, or without ``copies`` as it is; InputError for what can't be."""
    layout = form.layout.value
    rows = tensors.check(x, tensors.outline(w, x, layout), m_sizes, layout, copies=copies)
    call = fit(
        rows,
        rows.M,
        form,
        gather_indices,
        topk_weights,
        fuse_mul_post,
        bias,
        known_y_rows=None if out is None or not form.permute_y else out.shape[0],
    )
    if (bucket := expected_bucket("grouped_gemm", expected_rows, call.M, "M")) is not None:
        call = call._replace(form=form._replace(bucket=bucket))
    if out is not None:
        tensors.check_out(
            out,
            rows._replace(M=call.y_rows),
            gather_indices=gather_indices,
            topk_weights=topk_weights,
            bias=bias,
            **(w.tensors() if isinstance(w, ExpertWeights) else {}),
        )
    return call._replace(w=w) if isinstance(w, ExpertWeights) else call, rows.x


def fit(
    rows: tensors.RowGemm,
    x_rows: int,
    form: Form,
    gather_indices: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    fuse_mul_post: bool,
    bias: torch.Tensor | None = None,
    *,
    known_y_rows: int | None = None,
) -> Call:
    """The call of a checked GEMM whose x has ``x_rows`` rows; InputError where the fused tensors don't fit."""
    fusions = check_fusions(
        form,
        rows.m_sizes,
        rows.x.dtype,
        rows.N,
        gather_indices=gather_indices,
        topk_weights=topk_weights,
        fuse_mul_post=fuse_mul_post,
        bias=bias,
    )
    M, y_rows = token_rows(form, x_rows, fusions, known_y_rows)
    if rows.x.is_cuda:
        tensors.check_cuda_dtype(rows.x)
    return Call(form, rows.w, rows.m_sizes, fusions, M, x_rows, y_rows)


def autocast(x: torch.Tensor, w: _W, bias: torch.Tensor | None) -> tuple[torch.Tensor, _W, torch.Tensor | None]:
    """In a torch.autocast region, x, w and bias in its dtype if any of them is float32; quantised weights stay."""
    kind = x.device.type
    if not casts(kind):
        return x, w, bias
    if all(tensor.dtype is not torch.float32 for tensor in (x, w, bias) if isinstance(tensor, torch.Tensor)):
        return x, w, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype) if isinstance(w, torch.Tensor) else w, None if bias is None else bias.to(dtype)


def casts(kind: str) -> bool:
    """Whether this is a torch.autocast region of a kind of device."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


class LowPart(NamedTuple):
    """A low-rank part, added to a product of sorted rows before bias and weight: y[m] += x[m] @ w[g].T.

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
    y whose index has none may hold anything. ``low`` is added by ``products.with_low_part`` alone. ``expected`` is the
    bucket of rows that a kernel is chosen for, if it is not M's; memory and grids are of M rows. With ``x_scale``
    [rows of x, groups], or [E, rows of x / E, groups], x is e4m3 codes, and row x[r, k] * x_scale[r, group of k].
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
    expected: int | None = None
    x_scale: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """y's dtype."""
        return self.x.dtype if self.x_scale is None else torch.bfloat16

    @property
    def bucket(self) -> int:
        """The bucket of rows that the kernel is chosen for."""
        return bucket_of(self.M) if self.expected is None else self.expected

    @property
    def spread(self) -> int:
        """How many times the expected rows there may be, in buckets; 1 for fewer, or where nothing is expected."""
        return 1 if self.expected is None else max(1, bucket_of(self.M) // max(1, self.expected))

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
        """The fusions that the kernel has to have."""
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
        """True if a plain product of rows gathered beforehand gives an equal result; a bundle's plan chooses.

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
