"""The form of a call: everything about it that is no tensor, and the checks of what goes together."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NoReturn

import torch

from ...artifacts.errors import InputError
from ...artifacts.records.problem import Layout, bucket_of
from ...artifacts.tuples import NamedTuple
from .tensors import bad, tensors_or_none

if TYPE_CHECKING:
    from ..dispatch.pin import Pin

_MOST_INDEX = 2**31 - 1


class Form(NamedTuple):
    """How a call moves rows and what it wants; T*topk flat indices number the (token, slot) pairs.

    ``bucket`` is that of the rows that the caller expects, which kernels are chosen for; None: that of all rows.
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
        """Whether the caller names a kernel."""
        return any(pin is not None for pin in (self.pin_forward, self.pin_dx, self.pin_dw))

    @property
    def names_kernels(self) -> bool:
        """True if the call names a kernel that it must have, and not only preferences."""
        if not self.pinned:
            return False
        from ..dispatch.pin import Preference  # here, as few calls name a kernel

        pins = (self.pin_forward, self.pin_dx, self.pin_dw)
        return any(pin is not None and not isinstance(pin, Preference) for pin in pins)

    @property
    def plain(self) -> bool:
        """Whether rows stay where they are."""
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
        for those that make no sense together.
    """
    try:
        return _form(
            w_layout,
            topk,
            permute_x,
            permute_y,
            zero_tail,
            is_first_gemm,
            dX_only,
            dW_only,
            autotune,
            kernel_config_fwd,
            kernel_config_bwd_dX,
            kernel_config_bwd_dW,
        )
    except TypeError:  # something that has no hash: the checks will say what
        return _form.__wrapped__(
            w_layout,
            topk,
            permute_x,
            permute_y,
            zero_tail,
            is_first_gemm,
            dX_only,
            dW_only,
            autotune,
            kernel_config_fwd,
            kernel_config_bwd_dX,
            kernel_config_bwd_dW,
        )


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
        from ..dispatch.pin import check_pin  # here, as few calls name a kernel

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
    """The bucket of ``expected_rows``; None for None, and for numbers that are traced.

    Raises
    ------
    InputError
        unless it is an int of 0 to ``most``, which the caller knows as ``what``.
    """
    check_expected(call, expected_rows, f"0 to {what}={most}")
    if not isinstance(expected_rows, int) or not isinstance(most, int):
        return None
    if not 0 <= expected_rows <= most:
        bad("expected_rows", f"{expected_rows}", f"an int of 0 to {what}={most}, or None", call)
    return bucket_of(expected_rows)


def check_expected(call: str, expected_rows: object, numbers: str) -> None:
    """Raise InputError for what is no number of rows, nor None."""
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
        saying which doesn't fit, and why.
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
        where x, gather_indices, topk_weights and out don't fit each other.
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
    if isinstance(T, int) and T * form.topk > _MOST_INDEX:  # traced, T may be no number yet, and gets no bound
        bad("gather_indices", f"indices up to {T * form.topk}", f"at most {_MOST_INDEX}: split the call")
    return M, (T * form.topk if form.permute_y else M)


def _same_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        bad(name, f"on {tensor.device}", f"x's device, {device}")


def _refuse(text: str) -> NoReturn:
    raise InputError(f"grouped_gemm: {text}")
