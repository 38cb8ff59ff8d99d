"""Rows of experts with room between them: products that read or write rows at starts of their own.

Of expert e the rows are starts[e] + i, i < m_sizes[e]; the others are padding, which no product reads or writes. A row
kernel, or torch, lists the rows that are there, expert by expert (``Placed``). Products read rows by that index, and
store them by it. Between two products rows are packed: that is, sorted without padding.

    y[to(i)] = x[from(i)] @ w[e].T + bias[e]     from(i) = index[i] if the product ``reads`` padded rows, else i
                                                 to(i) = index[i] if it ``writes`` padded rows, else i
"""

from __future__ import annotations

from typing import Any

import torch

from ...artifacts.records import DType, Layout, Op, RowOp
from ...artifacts.tuples import NamedTuple
from ..check import tensors
from ..check.call import Rows, Starts
from ..check.saved_tensors import Frozen, Saved
from ..check.tensors import in_memory
from ..driver.device import allocator, current_stream, on, without_autocast
from ..launch import rowops
from ..launch.program import EAGER, EagerExecutor
from ..weights.expert_weights import ExpertWeights
from . import activation, gather_combine, low_rank
from .activation import RowActivation
from .autograd import differentiated_once
from .layer import GATED_IN_PRODUCT, NO_ADAPTERS, FrozenWeights, Layer, Weights
from .low_rank import Adapters, LowRank, LowRankGradients
from .products import gated_rows, of_activated, rows_in_place, weight

_MOST_ROWS = 1 << 29  # the kernel counts in int32
_STEPS = {torch.int32: 1, torch.int64: 2}
_compiling = torch.compiler.is_compiling
_traced = torch._C._get_tracing_state
_modes = torch._C._len_torch_dispatch_stack
_transformed = torch._C._are_functorch_transforms_active
_ONES = 8  # columns of a matrix of ones that sums dy's rows: 16 bytes in bf16


class Placed(NamedTuple):
    """The rows of experts among R rows: ``index`` int32 [R] lists them first, ``bounds[E]`` of them, then any rows.

    ``m_sizes`` int32 [E] are the counts, brought into range, ``bounds`` int32 [E+1] their sums.
    """

    index: torch.Tensor  # type: ignore[assignment]  # (no search in a tuple)
    m_sizes: torch.Tensor
    bounds: torch.Tensor


class How(NamedTuple):
    """The non-tensor arguments of a product; ``bucket`` is the bucket of the expected rows (``Rows.expected``)."""

    reads: bool
    writes: bool
    layout: Layout = Layout.NK
    zero_tail: bool = False
    bucket: int | None = None
    only_dx: bool = False
    only_dw: bool = False


def place(m_sizes: torch.Tensor, starts: torch.Tensor | None, room: int, R: int) -> Placed:
    """List the rows of experts among R rows, without reading anything on the host.

    Expert e's rows begin at starts[e], or without ``starts`` at e * room, and are at most ``room``. A count below zero
    is zero, and no expert's rows pass R.
    """
    E, device = m_sizes.shape[0], m_sizes.device
    placed = _by_kernel(m_sizes, starts, room, R)
    if placed is not None:
        return placed
    if not E:
        nothing = torch.zeros(R + 1, dtype=torch.int32, device=device)
        return Placed(nothing[:R], nothing[:0], nothing[R:])
    if starts is None:
        first = torch.arange(E, device=device) * room
        counts = m_sizes.long().clamp(0, room)
    else:
        first = starts.long()
        left = torch.where(first >= 0, R - first, 0).clamp(0, room)
        counts = torch.minimum(m_sizes.long().clamp(min=0), left)
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).clamp_(max=R)  # overlapping starts may add up to more
    rows = torch.arange(R, device=device)
    expert = torch.searchsorted(bounds[1:], rows, right=True).clamp_(max=E - 1)
    index = torch.where(rows < bounds[E], first[expert] + rows - bounds[expert], 0)
    bounds = bounds.to(torch.int32)
    return Placed(index.to(torch.int32), bounds[1:] - bounds[:-1], bounds)


def _by_kernel(m_sizes: torch.Tensor, starts: torch.Tensor | None, room: int, R: int) -> Placed | None:
    """``place`` in one launch; None where no bundle has the kernel, or torch traces the call."""
    if type(m_sizes) is not torch.Tensor or _compiling() or _traced() is not None or _modes() or _transformed():
        return None
    E = m_sizes.shape[0]
    if not tensors.on_gpu(m_sizes) or not E or not 0 < R < _MOST_ROWS:
        return None
    device = m_sizes.get_device()
    launch = rowops.launcher(RowOp.PLACE_ROWS, DType.FP32, device, aligned=True)
    if launch is None or launch.most_experts < E:
        return None
    with on(device):
        empty = allocator(m_sizes.device)
        index, counts = empty((R,), (1,), torch.int32), empty((E,), (1,), torch.int32)
        bounds = empty((E + 1,), (1,), torch.int32)
        words = {
            "m_sizes": m_sizes.data_ptr(),
            "starts": tensors.address_of(starts),
            "index": index.data_ptr(),
            "counts": counts.data_ptr(),
            "bounds": bounds.data_ptr(),
            "M": R,
            "E": E,
            "room": room,
            "m_sizes_step": _STEPS[m_sizes.dtype],
            "starts_step": 0 if starts is None else _STEPS[starts.dtype],
        }
        launch(E, current_stream(device), words)
    return Placed(index, counts, bounds)


def product(
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    placed: Placed,
    how: How,
    bias: torch.Tensor | None,
    adapter: LowRank | None,
    out: torch.Tensor | None = None,
    executor: EagerExecutor = EAGER,
    x_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y [R, N] of x [R, K], and an adapter's x @ A.T; padding of ``out`` stays as it is.

    x are codes with ``x_scale`` (``Rows``).
    """
    u = None
    if adapter is not None:
        index = placed.index if how.reads else None
        u = low_rank.narrowed(adapter, x, placed.m_sizes, index, int(how.reads), placed.bounds, executor, how.bucket)
    call = _rows(Op.FORWARD, x, w, placed, how, bias)._replace(loose=out is None, x_scale=x_scale)
    return low_rank.product(call, adapter, u, executor, out, x.shape[0]), u


def in_place(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    starts: Starts,
    how: How,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
    executor: EagerExecutor = EAGER,
    bounds: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """y [R, N] of codes x [R, K], read in place; None where no kernel pays.

    With ``bounds`` (``Placed``) rows of y are packed, else they are where x's are.
    """
    if bias is not None or how.zero_tail:
        return None
    call = Rows(Op.FORWARD, x, w, m_sizes, how.layout, x.shape[0], expected=how.bucket, x_scale=x_scale)
    call = call._replace(starts=starts, bounds=bounds)
    return rows_in_place(call, executor, out)


def _rows(
    op: Op,
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    placed: Placed,
    how: How,
    bias: torch.Tensor | None = None,
) -> Rows:
    index, m_sizes, bounds = placed
    bias = None if bias is None else bias.detach().contiguous()
    return Rows(
        op,
        x,
        w,
        m_sizes,
        how.layout,
        x.shape[0],
        index if how.reads or how.writes else None,
        int(how.reads),
        how.writes,
        bias=bias,
        zero_tail=how.zero_tail,
        bounds=bounds,
        expected=how.bucket,
    )


class Gradients(NamedTuple):
    """The results of ``gradients``, None where not needed."""

    x: torch.Tensor | None
    w: torch.Tensor | None
    bias: torch.Tensor | None
    low: LowRankGradients | None


def gradients(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    w: torch.Tensor | ExpertWeights,
    placed: Placed,
    how: How,
    needs: tuple[bool, bool, bool],
    adapter: LowRank | None,
    u: torch.Tensor | None,
) -> Gradients:
    """Return the gradients of x, w and bias that ``needs`` asks for, and with ``u`` the adapter's.

    Padding rows of dy are not read; padding rows of dx are zero.
    """
    index, m_sizes, bounds = placed
    needs_x, needs_w, needs_bias = needs
    layout, bucket = how.layout, how.bucket
    dy = gather_combine.gather(dy, index, 1, bounds) if how.writes else dy.contiguous()
    dx = dw = dbias = v = low = packed = None
    if adapter is not None and (needs_x or u is not None):
        v = low_rank.narrowed_gradient(adapter, dy, m_sizes, bucket=bucket)
    if needs_x:
        back = How(False, how.reads, layout, True, bucket)
        dx = low_rank.product(_rows(Op.DX, dy, w, placed, back), adapter, v, many=dy.shape[0])
    if x is not None and (needs_w or u is not None):
        packed = gather_combine.gather(x, index, 1, bounds) if how.reads else x
    if needs_w and packed is not None:
        dw = weight(dy, packed, m_sizes, layout=layout, bucket=bucket)
    if needs_bias:
        ones = dy.new_ones((dy.shape[0], _ONES))
        dbias = weight(dy, ones, m_sizes, strict=False, bucket=bucket)[:, :, 0].contiguous()
    if u is not None and v is not None and packed is not None:
        low = LowRankGradients(weight(v, packed, m_sizes, bucket=bucket), weight(dy, u, m_sizes, bucket=bucket))
    return Gradients(dx, dw, dbias, low)


class PaddedGemm(torch.autograd.Function):
    """A product of padded rows: y [R, N] of x [R, K], and the gradients of x, w, bias and an adapter's A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor | ExpertWeights,
        bias: torch.Tensor | None,
        A: torch.Tensor | None,
        B: torch.Tensor | None,
        placed: Placed,
        how: How,
        scale: float,
    ) -> torch.Tensor:
        """Run the product, and save the tensors that its gradient needs."""
        adapter = None if A is None or B is None else LowRank(A, B, scale)
        y, u = product(x, w, placed, how, bias, adapter)
        needs_x, needs_w, _, *low = ctx.needs_input_grad[:5]
        learns = any(low)
        ctx.frozen = None if isinstance(w, torch.Tensor) else Frozen.of(w)
        ctx.save_for_backward(
            x if needs_w or learns else None,
            w if needs_x and ctx.frozen is None else None,
            A,
            B,
            u if learns else None,
        )
        ctx.call = placed, how, scale, w.shape, x.shape  # new tensors of this call: hooks don't get them
        return y

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that are needed, None for the others."""
        x, w, A, B, u = ctx.saved_tensors
        placed, how, scale, w_shape, x_shape = ctx.call
        dy = in_memory("dy", dy)
        saved = Saved.beside("grouped_gemm", dy)
        needs = _wanted(ctx.needs_input_grad[:3], how)
        E, wide, K, r = w_shape[0], dy.shape[1], x_shape[1], 0
        x = None if x is None else saved.rows("x", x, tuple(x_shape))
        if w is not None:
            w = saved.weights("w", w, tuple(w_shape))
        adapter = None
        if A is not None and B is not None:
            A = saved.weights("lora.A", A, (E, -1, K))
            r = A.shape[1]
            adapter = LowRank(A, saved.weights("lora.B", B, (E, wide, r)), scale)
            u = None if u is None else saved.whole("x @ lora.A.T", u, (x_shape[0], r))
        w = ctx.frozen.unchanged() if w is None and ctx.frozen is not None else w
        w = dy.new_empty(()).expand(w_shape) if w is None else w  # only its shape is read
        with without_autocast(dy.device.type):
            results = gradients(dy, x, w, placed, how, needs, adapter, u)
        return results.x, results.w, results.bias, *(results.low or (None, None)), None, None, None


def _wanted(needs: tuple[bool, bool, bool], how: How) -> tuple[bool, bool, bool]:
    x, w, bias = needs
    if how.only_dx:
        return x, False, False
    if how.only_dw:
        return False, w, False
    return x, w, bias


class PackedActivation(torch.autograd.Function):
    """a [R, I] of packed rows h [R, 2*I] or [R, I], and dh: rows after the packed ones hold anything."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, act: RowActivation, bounds: torch.Tensor) -> torch.Tensor:
        """Run the activation on the packed rows."""
        ctx.save_for_backward(h)
        ctx.call = act, bounds, h.shape
        return activation.forward(h, act, bounds)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, da: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        """dh = act'(h) * da."""
        (h,), (act, bounds, shape) = ctx.saved_tensors, ctx.call
        da = in_memory("da", da, "experts_mlp")
        h = Saved.beside("experts_mlp", da).whole("h", h, tuple(shape))
        with without_autocast(da.device.type):
            dh, _, _ = activation.gradient(h, da, act, activation.Needs(), bounds=bounds)
        return dh, None, None


def layer(
    how: Layer,
    x: torch.Tensor,
    parameters: Weights | FrozenWeights,
    placed: Placed,
    *,
    zero_tail: bool,
    into: torch.Tensor | None = None,
    adapters: Adapters = NO_ADAPTERS,
    executor: EagerExecutor = EAGER,
    x_scale: torch.Tensor | None = None,
    starts: Starts | None = None,
) -> torch.Tensor:
    """y [R, H] = act(x @ gate_up[e].T) @ down[e].T of padded rows x [R, H]; ``how.top_k`` is 1.

    y is ``into`` if it is given, whose padding stays as it is without ``zero_tail``. For calls without a gradient.
    x are codes with ``x_scale`` (``Rows``), which begin at ``starts``.
    """
    _, layout, act, bucket = how
    first_how, second_how = How(True, False, layout, False, bucket), How(False, True, layout, zero_tail, bucket)
    first = _rows(Op.FORWARD, x, parameters.gate_up, placed, first_how, parameters.gate_up_bias)._replace(loose=True)
    a = gated_rows(first, executor) if x_scale is None and act == GATED_IN_PRODUCT and adapters.first is None else None
    if a is None:
        up = parameters.gate_up, placed, first_how, parameters.gate_up_bias, adapters.first
        h = None
        if x_scale is not None and starts is not None:
            h = in_place(
                x, x_scale, up[0], placed.m_sizes, starts, first_how, up[3], executor=executor, bounds=placed.bounds
            )
        if h is None:
            h, _ = product(x, *up, executor=executor, x_scale=x_scale)
        if adapters.second is None:
            of_h = _rows(Op.FORWARD, h, parameters.down, placed, second_how, parameters.down_bias)
            y = of_activated(of_h._replace(loose=into is None), act, executor, into)
            if y is not None:
                return y
        a = activation.forward(h, act, placed.bounds, executor)
    return product(a, parameters.down, placed, second_how, parameters.down_bias, adapters.second, into, executor)[0]
