"""A checked call of ``grouped_gemm``, and a product of rows: tensors in the shapes and dtypes that kernels want.

The form of a call is everything about it that is no tensor. ``tensors.py`` has the checks of single tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import Fusion, Layout, Op, bucket_of
from ...artifacts.tuples import NamedTuple
from . import tensors
from .tensors import bad, row_stride, tensors_or_none

if TYPE_CHECKING:
    from ..dispatch.pin import Pin
    from ..weights.expert_weights import ExpertWeights

    _W = TypeVar("_W", torch.Tensor, ExpertWeights, "torch.Tensor | ExpertWeights")

MAX_RANK = 256  # limit of a LoRA adapter's rank
_MOST_INDEX = 2**31 - 1


class Form(NamedTuple):
    """The non-tensor arguments of a call: how rows move, which gradients and kernels are wanted.

    ``bucket`` is the bucket of ``expected_rows``, for which kernels are chosen; None means the bucket of M.
    """

    layout: Layout = Layout.NK
    topk: int = 1
    permute_x: bool = False
    permute_y: bool = False
    zero_tail: bool = False
    only_dx: bool = False
    only_dw: bool = False
    pin_forward: Pin | None = None
    pin_dx: Pin | None = None
    pin_dw: Pin | None = None
    autotune: bool = False
    bucket: int | None = None

    @property
    def pinned(self) -> bool:
        """True if the caller names a kernel."""
        return any(pin is not None for pin in (self.pin_forward, self.pin_dx, self.pin_dw))

    @property
    def names_kernels(self) -> bool:
        """True if the call names a kernel that it must have, and not only preferences."""
        if not self.pinned:
            return False
        from ..dispatch.pin import Preference  # imported here: few calls name a kernel

        pins = (self.pin_forward, self.pin_dx, self.pin_dw)
        return any(pin is not None and not isinstance(pin, Preference) for pin in pins)

    @property
    def plain(self) -> bool:
        """True if the call neither gathers rows of x nor scatters rows of y."""
        return not (self.permute_x or self.permute_y)


class Fusions(NamedTuple):
    """The tensors of a fused call, checked: ``index`` [M], ``weights`` [T, topk], ``bias`` [E, N]."""

    index: torch.Tensor | None = None  # type: ignore[assignment]  # (no search in a tuple)
    weights: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def form_of(
    *,
    w_layout: str,
    topk: int,
    permute_x: bool,
    permute_y: bool,
    zero_tail: bool = False,
    is_first_gemm: bool = True,
    dX_only: bool = False,
    dW_only: bool = False,
    autotune: bool = False,
    kernel_config_fwd: object = None,
    kernel_config_bwd_dX: object = None,
    kernel_config_bwd_dW: object = None,
) -> Form:
    """The form of a call's parameters.

    Raises
    ------
    InputError
        for parameters that exclude each other.
    """
    moves = w_layout, topk, permute_x, permute_y, zero_tail, is_first_gemm, dX_only, dW_only, autotune
    pins = kernel_config_fwd, kernel_config_bwd_dX, kernel_config_bwd_dW
    try:
        return _form(*moves, *pins)
    except TypeError:  # an unhashable value: the checks will report it
        return _form.__wrapped__(*moves, *pins)


@functools.lru_cache(maxsize=1024, typed=True)
def _form(
    w_layout: str,
    topk: int,
    permute_x: bool,
    permute_y: bool,
    zero_tail: bool,
    is_first_gemm: bool,
    dX_only: bool,
    dW_only: bool,
    autotune: bool,
    kernel_config_fwd: object,
    kernel_config_bwd_dX: object,
    kernel_config_bwd_dW: object,
) -> Form:
    if not isinstance(w_layout, str) or w_layout not in ("nk", "kn"):
        bad("w_layout", repr(w_layout), "'nk' (w is [E, N, K]) or 'kn' (w is [E, K, N])")
    if not isinstance(topk, int) or isinstance(topk, bool) or topk < 1:
        bad("topk", repr(topk), "the number of experts of each token, at least 1")
    if dX_only and dW_only:
        _refuse("dX_only and dW_only exclude each other: each wants one gradient alone. Leave both out for both")
    if permute_x and not is_first_gemm:
        _refuse(
            "permute_x with is_first_gemm=False: the second GEMM's rows are the first one's result, sorted already. "
            "Leave permute_x out, or is_first_gemm"
        )
    forward = dx = dw = None
    if any(config is not None for config in (kernel_config_fwd, kernel_config_bwd_dX, kernel_config_bwd_dW)):
        from ..dispatch.pin import check_pin  # imported here: few calls name a kernel

        forward = check_pin("kernel_config_fwd", kernel_config_fwd, is_first_gemm=is_first_gemm)
        dx = check_pin("kernel_config_bwd_dX", kernel_config_bwd_dX, is_first_gemm=is_first_gemm)
        dw = check_pin("kernel_config_bwd_dW", kernel_config_bwd_dW, is_first_gemm=is_first_gemm)
    form = Form(
        Layout(w_layout),
        topk,
        bool(permute_x),
        bool(permute_y),
        bool(zero_tail),
        bool(dX_only),
        bool(dW_only),
        forward,
        dx,
        dw,
        bool(autotune),
    )
    if autotune and form.pinned:
        _refuse("autotune with a kernel_config: one asks for the best kernel, the other names one. Leave one out")
    return form


def expected_bucket(call: str, expected_rows: object, most: int, what: str) -> int | None:
    """The bucket of ``expected_rows``; None if that is None, or a traced number.

    Raises
    ------
    InputError
        unless ``expected_rows`` is None or an int from 0 to ``most``, a limit that the message calls ``what``.
    """
    check_expected(call, expected_rows, f"0 to {what}={most}")
    if not isinstance(expected_rows, int) or not isinstance(most, int):
        return None
    if not 0 <= expected_rows <= most:
        bad("expected_rows", f"{expected_rows}", f"an int of 0 to {what}={most}, or None", call)
    return bucket_of(expected_rows)


def check_expected(call: str, expected_rows: object, numbers: str) -> None:
    """Raise InputError unless ``expected_rows`` is a number of rows or None."""
    if expected_rows is None or (
        isinstance(expected_rows, (int, torch.SymInt)) and not isinstance(expected_rows, bool)
    ):
        return
    got = f"{expected_rows!r}, a {type(expected_rows).__name__}"
    bad("expected_rows", got, f"an int of {numbers}, or None", call)


def check_fusions(
    form: Form,
    m_sizes: torch.Tensor,
    dtype: torch.dtype,
    N: int,
    *,
    gather_indices: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    fuse_mul_post: bool,
    bias: torch.Tensor | None = None,
) -> Fusions:
    """The fused tensors in the shapes that the products want.

    Raises
    ------
    InputError
        for a tensor that doesn't fit the call; the message names it, and says why.
    """
    device = m_sizes.device
    tensors_or_none(gather_indices=gather_indices, topk_weights=topk_weights, bias=bias)
    for flag, name in (
        (form.permute_x, "permute_x"),
        (form.permute_y, "permute_y"),
        (fuse_mul_post, "fuse_mul_post"),
    ):
        if flag and gather_indices is None:
            _refuse(f"{name} without gather_indices: they say which token and slot each sorted row is")
    if topk_weights is not None and not fuse_mul_post:
        _refuse("topk_weights without fuse_mul_post=True: nothing would be multiplied. Pass both or neither")
    if fuse_mul_post and topk_weights is None:
        _refuse("fuse_mul_post=True without topk_weights [T, topk]: there is nothing to multiply with")
    if gather_indices is not None:
        if gather_indices.dim() != 1 or gather_indices.dtype not in (torch.int32, torch.int64):
            bad(
                "gather_indices",
                f"{gather_indices.dtype} of shape {list(gather_indices.shape)}",
                "int32 or int64 [M], the flat token*topk + slot of each sorted row",
            )
        _same_device("gather_indices", gather_indices, device)
        gather_indices = gather_indices.contiguous()
    if topk_weights is not None:
        if topk_weights.dim() != 2 or topk_weights.shape[1] != form.topk:
            hint = f" with topk={form.topk}; pass topk={topk_weights.shape[-1]}?" if topk_weights.dim() == 2 else ""
            bad("topk_weights", f"of shape {list(topk_weights.shape)}", f"[T, topk]{hint}")
        if not topk_weights.dtype.is_floating_point:
            bad("topk_weights", f"{topk_weights.dtype}", "a floating-point type (multiplied in float32)")
        _same_device("topk_weights", topk_weights, device)
    if bias is not None:
        if tuple(bias.shape) != (m_sizes.shape[0], N):
            bad("bias", f"of shape {list(bias.shape)}", f"[E, N] = [{m_sizes.shape[0]}, {N}]")
        if bias.dtype is not dtype:
            bad("bias", f"{bias.dtype}", f"x's dtype, {dtype}")
        _same_device("bias", bias, device)
    return Fusions(gather_indices if fuse_mul_post or not form.plain else None, topk_weights, bias)


def token_rows(form: Form, given_rows: int, fusions: Fusions, out_rows: int | None) -> tuple[int, int]:
    """(rows in the sorted order M, rows of y) of a forward whose x has ``given_rows`` rows.

    Raises
    ------
    InputError
        if x, gather_indices, topk_weights and out don't fit each other.
    """
    index, weights = fusions.index, fusions.weights
    if index is None:
        return given_rows, given_rows
    M = index.shape[0]
    if not form.permute_x and given_rows != M:
        bad(
            "x",
            f"of {given_rows} rows",
            f"[M, K], a row for each of the M={M} gather_indices (or permute_x=True and x [T, K] in token order)",
        )
    if form.permute_x:
        T = given_rows
    elif weights is not None:
        T = weights.shape[0]
    else:
        rows = out_rows if out_rows is not None and form.permute_y else M
        T = -(-rows // form.topk)
        if form.permute_y and rows % form.topk:
            bad(
                "gather_indices",
                f"of length {M}",
                f"T*topk of them (topk={form.topk}), or an out [T*topk, N] or topk_weights that tell T",
            )
    if weights is not None and weights.shape[0] != T:
        bad("topk_weights", f"of shape {list(weights.shape)}", f"[T, topk] with T={T}, x's rows")
    if isinstance(T, int) and T * form.topk > _MOST_INDEX:  # a symbolic T of a traced call is not limited
        bad("gather_indices", f"indices up to {T * form.topk}", f"at most {_MOST_INDEX}: split the call")
    return M, (T * form.topk if form.permute_y else M)


def _same_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        bad(name, f"on {tensor.device}", f"x's device, {device}")


def _refuse(text: str) -> NoReturn:
    raise InputError(f"grouped_gemm: {text}")


class Call(NamedTuple):
    """A checked call: its tensors, ``M`` (the sorted rows), and the rows of x and y; w is 3-D.

    In a backward in fp8 w is an ``outline`` (a tensor without values), and ``of_dx`` has the weights.
    """

    form: Form
    w: torch.Tensor | ExpertWeights
    m_sizes: torch.Tensor
    fusions: Fusions
    M: int
    x_rows: int
    y_rows: int
    of_dx: TransposedWeights | None = None

    @property
    def x_divisor(self) -> int:
        """``Rows.gather_divisor`` for this call: the index of a row of x is index // divisor."""
        return self.form.topk if self.form.permute_x else 0

    @property
    def dense(self) -> torch.Tensor:
        """w of a call whose w is a tensor."""
        if not isinstance(self.w, torch.Tensor):
            raise AssertionError(f"{self.w} is no tensor")
        return self.w

    @property
    def N(self) -> int:
        """The number of columns of y."""
        return self.w.shape[1 if self.form.layout is Layout.NK else 2]

    @property
    def K(self) -> int:
        """The number of columns of x."""
        return self.w.shape[2 if self.form.layout is Layout.NK else 1]

    def flat_weights(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return the routing weights flattened, as ``flat`` does; None if the call has none."""
        return None if self.fusions.weights is None else flat(self.fusions.weights, wide_of(like))


def wide_of(like: torch.Tensor) -> torch.dtype:
    """The dtype in which routing weights are multiplied: float64 if ``like`` is float64, else float32."""
    return torch.float64 if like.dtype is torch.float64 else torch.float32


def flat(weights: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Return the routing weights [T, topk] as [T*topk], indexed by token*topk + slot, in the dtype ``wide``."""
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
    """Return the checked call, and x. If kernels can't read its rows, x is copied with ``copies``, else refused."""
    layout = form.layout.value
    rows = tensors.check(x, w, m_sizes, layout, copies=copies)
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
            **({} if isinstance(w, torch.Tensor) else w.tensors()),
        )
    return call if isinstance(w, torch.Tensor) else call._replace(w=w), rows.x


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
    """Return x, w and bias, cast as torch.autocast does if its region is open and one of them is float32.

    Quantised weights are not cast.
    """
    kind = x.device.type
    if not casts(kind):
        return x, w, bias
    if all(tensor.dtype is not torch.float32 for tensor in (x, w, bias) if isinstance(tensor, torch.Tensor)):
        return x, w, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype) if isinstance(w, torch.Tensor) else w, None if bias is None else bias.to(dtype)


def casts(kind: str) -> bool:
    """True in a torch.autocast region for devices of this ``kind``, such as ``cuda``."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


class LowPart(NamedTuple):
    """A low-rank part, added to a product of sorted rows before bias and weight: y[m] += x[m] @ w[g].T.

    ``x`` is [M, r], and ``w`` [E, columns of y, r] or, where the product's w has y's columns contiguous, [E, r, columns
    of y]. Both are dense.
    """

    x: torch.Tensor
    w: torch.Tensor


class Starts(NamedTuple):
    """The first row of each expert e: ``first[e]``, int32 or int64 [E], or e * ``room`` if ``first`` is None.

    ``room`` is the most rows of an expert. With ``packs`` rows of y are sorted without padding, as ``Rows.bounds``
    says; else each row of y is where its row of x is.
    """

    first: torch.Tensor | None
    room: int
    packs: bool


class TransposedWeights(NamedTuple):
    """The weights of a backward in fp8. ``weights(executor)`` returns E matrices [K, N].

    dx = dy @ w is then a forward on quantised dy. ``dtype`` is the dtype of dw.
    """

    weights: Callable[[Any], ExpertWeights]
    dtype: torch.dtype


class Rows:
    """y[to(m)] = weight(m) * (x[from(m)] @ w[g].T + bias[g]): the forward, or dX with x = dy and y = dx.

    ``w`` is 3-D in ``layout``; ``M`` counts the sorted rows. from(m) = index[m] // ``gather_divisor`` (m where that
    is 0), to(m) = index[m] with ``scatter``; ``row_weights`` float32 by index, ``bias`` [E, columns of y].
    ``zero_tail`` zeroes the rows of y that nothing is stored to.
    ``bounds`` (``routing.Routing``) may be set if every index is in range, also for x; ``loose`` says that rows of y
    that no index names may hold anything. Only ``products.with_low_part`` adds ``low``. ``expected`` is the bucket of
    rows that a kernel is chosen for, if it is not M's; memory and grids are for M rows. With ``x_scale``
    [rows of x, groups], or [E, rows of x / E, groups], x is e4m3 codes: x[r, k] means x[r, k] * x_scale[r, group of k].
    With ``starts`` an expert's rows of x begin where ``Starts`` says, and ``packs`` says where rows of y are.

    Derived attributes: ``sizes`` (E, and N and K of w), ``columns`` and ``dtype`` of y, ``bucket`` (of rows, that the
    kernel is chosen for), ``spread`` (M's bucket over the expected one, at least 1; 1 without ``expected``), ``fusion``
    (the kernel's flags), and ``uses_index``: whether the kernel reads ``index``.
    Nothing is assigned later: ``_replace`` returns a changed copy.
    """

    _FIELDS = (
        "op",
        "x",
        "w",
        "m_sizes",
        "layout",
        "M",
        "index",
        "gather_divisor",
        "scatter",
        "row_weights",
        "bias",
        "pin",
        "zero_tail",
        "bounds",
        "loose",
        "low",
        "expected",
        "x_scale",
        "starts",
    )
    __slots__ = (*_FIELDS, "bucket", "columns", "dtype", "fusion", "sizes", "spread", "uses_index")

    def __init__(
        self,
        op: Op,
        x: torch.Tensor,
        w: torch.Tensor | ExpertWeights,
        m_sizes: torch.Tensor,
        layout: Layout,
        M: int,
        index: torch.Tensor | None = None,
        gather_divisor: int = 0,
        scatter: bool = False,
        row_weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        pin: Pin | None = None,
        zero_tail: bool = False,
        bounds: torch.Tensor | None = None,
        loose: bool = False,
        low: LowPart | None = None,
        expected: int | None = None,
        x_scale: torch.Tensor | None = None,
        starts: Starts | None = None,
    ) -> None:
        self.op, self.x, self.w, self.m_sizes, self.layout, self.M = op, x, w, m_sizes, layout, M
        self.index, self.gather_divisor, self.scatter = index, gather_divisor, scatter
        self.row_weights, self.bias, self.low = row_weights, bias, low
        self.x_scale, self.starts = x_scale, starts
        self.pin, self.zero_tail, self.bounds, self.loose, self.expected = pin, zero_tail, bounds, loose, expected
        E, N, K = w.shape
        if layout is not Layout.NK:
            N, K = K, N
        self.sizes: tuple[int, int, int] = E, N, K
        self.columns = N if op is Op.FORWARD else K
        self.dtype = x.dtype if x_scale is None else torch.bfloat16
        self.bucket, self.spread = bucket_of(M), 1
        if expected is not None:
            self.bucket, self.spread = expected, max(1, self.bucket // max(1, expected))
        flags = (1 if gather_divisor else 0) | (2 if scatter else 0) | (4 if row_weights is not None else 0)
        self.uses_index = bool(flags)
        flags |= (8 if bias is not None else 0) | (32 if low is not None else 0) | (64 if starts is not None else 0)
        self.fusion = Fusion(flags)

    def _replace(self, **changed: Any) -> Rows:
        return Rows(**{name: getattr(self, name) for name in self._FIELDS} | changed)

    @property
    def dense(self) -> torch.Tensor:
        """w, which must be a tensor."""
        if not isinstance(self.w, torch.Tensor):
            raise AssertionError(f"{self.w} is no tensor")
        return self.w

    def index_end(self, y_rows: int) -> int:
        """Return the first value of ``index`` that is past the end of x, of y [``y_rows``, N], or of the weights."""
        ends = [self.x.shape[0] * self.gather_divisor] if self.gather_divisor else []
        ends += [y_rows] if self.scatter else []
        ends += [self.row_weights.numel()] if self.row_weights is not None else []
        return min(ends, default=0)

    def stores_nothing(self, y: torch.Tensor) -> bool:
        """True if the call writes no row of y: then no kernel may be launched.

        If x or the routing weights have no rows, no index is in range, but a kernel would still read a row of x.
        """
        there = self.M and y.numel() and self.w.shape[0]
        return not there or (self.uses_index and not self.index_end(y.shape[0]))

    def as_forward(self) -> Layout:
        """Return the layout of w in the forward's equation: dX reads w transposed."""
        other = Layout.KN if self.layout is Layout.NK else Layout.NK
        return self.layout if self.op is Op.FORWARD else other

    def may_gather_first(self, aligned: bool) -> bool:
        """True if gathering x first and then a plain product give an equal result; a bundle's plan chooses.

        If only the gather reads the index, gathering first also writes rows of y whose index is out of range.
        """
        pinned = self.pin is not None and isinstance(
            self.w, torch.Tensor
        )  # a pin on quantised w still allows a gather first: its kernels can't gather on load
        if not self.gather_divisor or pinned or not aligned or not self.x.shape[0]:
            return False
        return not self.spares_rows and row_stride(self.x, self.x.shape[1]) == self.x.shape[1]

    @property
    def spares_rows(self) -> bool:
        """True if rows of y whose index is out of range must not be written, and only the gather reads the index."""
        read = self.scatter or self.row_weights is not None
        return bool(self.gather_divisor) and not read and self.bounds is None and not self.loose
