"""The grouped GEMM as an autograd function: each gradient is computed only where it is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from ...artifacts.records import Layout
from ...artifacts.tuples import NamedTuple
from .. import hooks
from ..check.call import Call, Form, Fusions
from ..check.saved_tensors import FLOATS, INDICES, Frozen, Saved
from ..check.tensors import in_memory
from ..driver.device import without_autocast
from ..launch.program import EAGER, EagerExecutor
from ..weights.expert_weights import ExpertWeights
from . import gradients, low_rank
from .low_rank import LowRank, narrowed_gradient

Needs: TypeAlias = "tuple[bool, bool, bool, bool]"  # of x, w, topk_weights, bias

# x, w, m_sizes, topk_weights, bias, gather_indices, form, (M, x_rows, y_rows), the plan of a repeated call
_ARGUMENTS = 9
_REST = (None,) * (_ARGUMENTS - 5)
_grad_enabled = torch.is_grad_enabled


def differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Like ``once_differentiable``, but skipped if the backward makes no graph, to save the host's time.

    Kernels are chosen as in the forward, which ``note_mode`` noted: a backward on CUDA runs in a thread of its own.
    """
    within_a_graph = once_differentiable(backward)

    @functools.wraps(backward)
    def chosen(ctx: Any, *grads: torch.Tensor) -> Any:
        if hooks.blocks:
            with hooks.within(getattr(ctx, "mode", hooks.UNSAID)):
                return within_a_graph(ctx, *grads) if _grad_enabled() else backward(ctx, *grads)
        return within_a_graph(ctx, *grads) if _grad_enabled() else backward(ctx, *grads)

    return chosen


def note_mode(ctx: Any) -> None:
    """Note the batch-invariant mode of a forward for its backward, if any block has one."""
    if hooks.blocks:
        ctx.mode = hooks.said()


class GroupedGemm(torch.autograd.Function):
    """y, and the gradients of x, w, topk_weights and bias. See ``gradients`` for the equations."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor | ExpertWeights,
        m_sizes: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        index: torch.Tensor | None,
        form: Form,
        sizes: tuple[int, int, int],
        plan: Any = None,
    ) -> torch.Tensor:
        """Run the product, and save its gradient's tensors. ``plan`` is a ``api.product_plan.ProductPlan``."""
        note_mode(ctx)
        needs_x, needs_w, needs_weights, _ = wanted(ctx.needs_input_grad, form)
        keeps_x = needs_w or needs_weights
        keeps_w = needs_x or needs_weights
        frozen = None if isinstance(w, torch.Tensor) else Frozen.of(w)
        kept = w if keeps_w and frozen is None else None
        ctx.save_for_backward(x if keeps_x else None, kept, m_sizes, weights, bias, index)
        # A single attribute, as each costs a part of a microsecond.
        kind = None if weights is None else weights.dtype
        ctx.call = form, sizes, plan, frozen if keeps_w else None, w.shape, kind
        if plan is not None:
            y: torch.Tensor = plan.forward(x, w, m_sizes, weights, bias, index, sizes)[0]
            return y
        return low_rank.forward(Call(form, w, m_sizes, Fusions(index, weights, bias), *sizes), x)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that are needed, None for the others."""
        x, w, m_sizes, weights, bias, index = ctx.saved_tensors
        form, sizes, plan, frozen, w_shape, kind = ctx.call
        unchanged = None if frozen is None else frozen.unchanged()
        needs = wanted(ctx.needs_input_grad, form)
        m_sizes = counts_as_saved(dy, w, w_shape, m_sizes, weights, kind)
        if plan is not None and weights is None:
            planned = plan.backward(x, w, m_sizes, dy, needs, w_shape, sizes)
            if planned is not None:
                return (planned[0], planned[1], None, planned[2], planned[3], *_REST)
        dy = in_memory("dy", dy)
        w = unchanged if w is None else w
        # If w was not saved, only its shape is read.
        w = m_sizes.new_empty((), dtype=dy.dtype).expand(w_shape) if w is None else w
        call = Call(form, w, m_sizes, Fusions(index, weights, bias), *sizes)
        with without_autocast(dy.device.type):
            results = backward(call, dy, x, needs)
        return (results[0], results[1], None, results[2], results[3], *_REST)


class Adapted(NamedTuple):
    """The non-tensor arguments of a call with an adapter: ``sizes`` is (M, x_rows, y_rows), ``scale`` the adapter's.

    ``plan`` is a ``api.product_plan.ProductPlan``, or None.
    """

    form: Form
    sizes: tuple[int, int, int]
    scale: float
    plan: Any = None


class AdaptedGemm(torch.autograd.Function):
    """y with an adapter, and its gradients; those of A and B are computed together, if either is needed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor | ExpertWeights,
        m_sizes: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        A: torch.Tensor,
        B: torch.Tensor,
        index: torch.Tensor | None,
        how: Adapted,
    ) -> torch.Tensor:
        """Run the product, and save the tensors that its gradient needs."""
        note_mode(ctx)
        form, sizes, scale, plan = how
        adapter = LowRank(A, B, scale)
        if plan is not None:
            y, u = plan.forward(x, w, m_sizes, weights, bias, index, sizes, adapter)
        else:
            call = Call(form, w, m_sizes, Fusions(index, weights, bias), *sizes)
            y, u = low_rank.with_adapter(call, x, adapter)
        needs_x, needs_w, needs_weights, _ = wanted(ctx.needs_input_grad, form)
        learns, inner = any(ctx.needs_input_grad[5:7]), needs_x or needs_weights
        ctx.frozen = None if isinstance(w, torch.Tensor) else Frozen.of(w)
        ctx.save_for_backward(
            x if needs_w or needs_weights or learns else None,
            w if inner and ctx.frozen is None else None,
            m_sizes,
            weights,
            bias,
            A,
            B,
            u if learns else None,
            index,
        )
        ctx.call = how, w.shape, None if weights is None else weights.dtype
        return y  # type: ignore[no-any-return]

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that are needed, None for the others."""
        x, w, m_sizes, weights, bias, A, B, u, index = ctx.saved_tensors
        (form, sizes, scale, plan), w_shape, kind = ctx.call
        needs, adapter = wanted(ctx.needs_input_grad, form), LowRank(A, B, scale)
        m_sizes = counts_as_saved(dy, w, w_shape, m_sizes, weights, kind)
        w = ctx.frozen.unchanged() if w is None and ctx.frozen is not None else w
        if plan is not None and weights is None:
            results = plan.adapted(x, w, m_sizes, dy, needs, adapter, u, w_shape, index, sizes)
            if results is not None:
                return results[0], results[1], None, *results[2:6], None, None
        dy = in_memory("dy", dy)
        w = m_sizes.new_empty((), dtype=dy.dtype).expand(w_shape) if w is None else w  # only its shape is read
        call = Call(form, w, m_sizes, Fusions(index, weights, bias), *sizes)
        with without_autocast(dy.device.type):
            dx, dw, dweights, dbias, dA, dB = with_adapter(call, dy, x, needs, adapter, u)
        return dx, dw, None, dweights, dbias, dA, dB, None, None


# Function.apply does this and, for calls inside torch.func's transforms, more.
apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, GroupedGemm).apply
apply_adapted: Callable[..., torch.Tensor] = super(torch.autograd.Function, AdaptedGemm).apply


def wanted(needs_input_grad: tuple[bool, ...], form: Form) -> Needs:
    """True for each gradient to compute: x, w, topk_weights, bias. dX_only and dW_only leave only one."""
    x, w, _, weights, bias = needs_input_grad[:5]
    if form.only_dx:
        return x, False, False, False
    if form.only_dw:
        return False, w, False, False
    return x, w, weights, bias


def backward(
    call: Call, dy: torch.Tensor, x: torch.Tensor | None, needs: Needs, executor: EagerExecutor = EAGER
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, w, topk_weights and bias that ``needs`` asks for. x may be None if only dx is needed."""
    return with_adapter(call, dy, x, needs, None, None, executor)[:4]


def with_adapter(
    call: Call,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    needs: Needs,
    adapter: LowRank | None,
    u: torch.Tensor | None,
    executor: EagerExecutor = EAGER,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients with an adapter, and its dA and dB if the forward's ``u`` is passed; else None for them."""
    call, x, adapter, u = _as_saved(call, dy, x, needs, adapter, u)
    needs_x, needs_w, needs_weights, needs_bias = needs
    dx = dw = dweights = dbias = beside = rows_x = None
    low: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    grad_y = gradients.GradY.of(call, dy, gathers=needs_w or needs_bias or adapter is not None)
    if adapter is not None and (needs_x or needs_weights or u is not None):
        beside = gradients.Beside(
            adapter, narrowed_gradient(adapter, grad_y.gathered, call.m_sizes, executor, call.form.bucket)
        )
    if needs_weights and x is not None:
        dx, dweights = gradients.grad_x_and_weights(call, grad_y, x, beside)
        dx = dx if needs_x else None
    elif needs_x:
        dx = gradients.grad_x(call, grad_y, executor, beside)
    if x is not None and (needs_w or u is not None):
        rows_x = gradients.sorted_x(call, x, executor)
    if needs_w or needs_bias:
        dw, dbias = gradients.grad_w_and_bias(
            call, grad_y, rows_x if needs_w else None, bias=needs_bias, executor=executor
        )
    if beside is not None and u is not None and rows_x is not None:
        low = gradients.grad_adapter(call, grad_y, rows_x, beside, u, executor)
    return dx, dw, dweights, dbias, *low


def counts_as_saved(
    dy: torch.Tensor,
    w: torch.Tensor | None,
    w_shape: torch.Size,
    m_sizes: torch.Tensor,
    weights: torch.Tensor | None,
    kind: torch.dtype | None,
) -> torch.Tensor:
    """m_sizes, contiguous; InputError if a hook on saved tensors replaced w, m_sizes or the routing weights.

    A program of the gradient compares all tensors but m_sizes with the recorded ones, and ``_as_saved`` does not know
    the shape of w and the dtype of the routing weights.
    """
    if w is not None and w.shape != w_shape:
        Saved.beside("grouped_gemm", dy).whole("w", w, w_shape)
    if weights is not None and kind is not None and weights.dtype is not kind:
        Saved.beside("grouped_gemm", dy).of_dtype("topk_weights", weights, kind)
    if m_sizes.dtype in INDICES and m_sizes.shape == w_shape[:1] and m_sizes.device == dy.device:
        return m_sizes.contiguous()
    return Saved.beside("grouped_gemm", dy).whole("m_sizes", m_sizes, w_shape[:1], INDICES)


def _as_saved(
    call: Call, dy: torch.Tensor, x: torch.Tensor | None, needs: Needs, adapter: LowRank | None, u: torch.Tensor | None
) -> tuple[Call, torch.Tensor | None, LowRank | None, torch.Tensor | None]:
    """The tensors that the forward saved, as kernels read them; InputError if a hook replaced any of them."""
    saved, fusions, w = Saved.beside("grouped_gemm", dy), call.fusions, call.w
    E, N, K = w.shape[0], call.N, call.K
    if isinstance(w, torch.Tensor) and (needs[0] or needs[2]):
        w = saved.weights("w", w, (E, N, K) if call.form.layout is Layout.NK else (E, K, N))
    x = None if x is None else saved.rows("x", x, (call.x_rows, K))
    index, weights, bias = fusions.index, fusions.weights, fusions.bias
    if index is not None:
        index = saved.whole("gather_indices", index, (call.M,), INDICES)
    if weights is not None:
        T = call.x_rows if call.form.permute_x else -1
        weights = saved.whole("topk_weights", weights, (T, call.form.topk), FLOATS)
    if bias is not None:
        bias = saved.whole("bias", bias, (E, N))
    if adapter is not None:
        A = saved.weights("lora.A", adapter.A, (E, -1, K))
        B = saved.weights("lora.B", adapter.B, (E, N, A.shape[1]))
        adapter = adapter._replace(A=A, B=B)
        u = None if u is None else saved.whole("x @ lora.A.T", u, (call.M, A.shape[1]))
    return call._replace(w=w, fusions=Fusions(index, weights, bias)), x, adapter, u
