"""Products and layers in fp8 with gradients: forward and dX of quantised rows and weights.

With q(t) the numbers of t's e4m3 codes times their scales, in groups of 128 of the reduction (x, dy) and blocks of
128 x 128 (w):

    y[i] = q(x[from(i)]) @ q(w[e]).T        dx[i] = q(dy[i]) @ q(w[e])

dW is that of ``fp8_products.py``. Sums are fp32. w is bfloat16 or float32, and dw of its dtype. All else is as in
``autograd.py`` and ``layer.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from ...artifacts.records import Layout, Op
from ...artifacts.tuples import NamedTuple
from ..check.call import Call, Form, Fusions, Rows, TransposedWeights
from ..check.saved import Saved
from ..check.tensors import in_memory
from ..driver.device import without_autocast
from ..weights.expert_weights import ExpertWeights
from . import activation, autograd, layer, low_rank, tokens
from .activation import Needs
from .autograd import differentiated_once, note_mode, wanted
from .fp8_products import Picked, grad_weight
from .fp8_weights import Fp8Weights, of_dx
from .layer import (
    NO_ADAPTERS,
    NOTHING_NARROW,
    FrozenWeights,
    Kept,
    Layer,
    Weights,
    as_saved,
    first_column,
    of_weights,
    ones,
    row_scales,
    slot_weights,
)
from .products import new_rows, weight
from .routing import Routing


class Fp8Gemm(torch.autograd.Function):
    """y, and the gradients of x, w, topk_weights and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        m_sizes: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        index: torch.Tensor | None,
        form: Form,
        sizes: tuple[int, int, int],
        fp8: Fp8Weights,
    ) -> torch.Tensor:
        """The product; what a gradient needs is saved."""
        note_mode(ctx)
        needs_x, needs_w, needs_weights, _ = wanted(ctx.needs_input_grad, form)
        inner = needs_x or needs_weights
        keeps_w = inner and fp8.of_dx is None
        ctx.save_for_backward(
            x if needs_w or needs_weights else None, w if keeps_w else None, m_sizes, weights, bias, index
        )
        kind = None if weights is None else weights.dtype
        ctx.call = form, sizes, fp8.of_dx if inner else None, w.shape, w.dtype, kind
        return product(Call(form, fp8.of_forward, m_sizes, Fusions(index, weights, bias), *sizes), x)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that are needed, None for the others."""
        x, w, m_sizes, weights, bias, index = ctx.saved_tensors
        form, sizes, of_weights, w_shape, w_dtype, kind = ctx.call
        m_sizes = autograd.counts_as_saved(dy, None, w_shape, m_sizes, weights, kind)
        dy = in_memory("dy", dy)
        with without_autocast(dy.device.type):
            if w is not None:
                w = Saved("grouped_gemm", w_dtype, dy.device).weights("w", w, w_shape)
            call = Call(
                form, dy.new_empty(w_shape[-1:]).expand(w_shape), m_sizes, Fusions(index, weights, bias), *sizes
            )
            call = call._replace(of_dx=_transposed(w, of_weights, form.layout, w_dtype))
            dx, dw, dweights, dbias = autograd.backward(call, dy, x, wanted(ctx.needs_input_grad, form))
        return dx, dw, None, dweights, dbias, None, None, None, None


def product(call: Call, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """y of a call whose w is quantised, without a gradient."""
    return low_rank.forward(call._replace(form=call.form._replace(layout=Layout.NK)), x.contiguous(), out)


class Fp8Layer(torch.autograd.Function):
    """out [T, H], and the gradients of x, the weights, the biases and the routing weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        weights: torch.Tensor,
        routing: Routing,
        how: Layer,
        fp8: tuple[Fp8Weights, Fp8Weights],
    ) -> torch.Tensor:
        """The layer; what a gradient needs is saved."""
        note_mode(ctx)
        out, h = layer_forward(how, x, fp8, (gate_up_bias, down_bias), routing, weights, keeps_h=True)
        needs_x, needs_up, needs_down, needs_up_bias, _, needs_weights = ctx.needs_input_grad[:6]
        inner = needs_x or needs_up or needs_up_bias  # dh is needed
        needed = needs_x, inner or needs_weights
        products = tuple(zip((gate_up, down), fp8, needed, strict=True))
        ctx.of_dx = [pair.of_dx if there else None for _, pair, there in products]
        ctx.save_for_backward(
            x if needs_up else None,
            *(w if there and pair.of_dx is None else None for w, pair, there in products),
            down_bias,
            weights,
            h if inner or needs_down or needs_weights else None,
        )
        ctx.how, ctx.routing, ctx.kept = how, routing, Kept.of(weights, h)
        ctx.kinds = (gate_up.shape, gate_up.dtype), (down.shape, down.dtype)
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that are needed, None for the others."""
        x, gate_up, down, down_bias, weights, h = ctx.saved_tensors
        ctx.kept.check(dout, weights, h)
        dout = in_memory("dout", dout, "moe_mlp")
        with without_autocast(dout.device.type):
            transposed = []
            names = ("gate_up_weight", "down_weight")
            for name, w, kept, (shape, dtype) in zip(names, (gate_up, down), ctx.of_dx, ctx.kinds, strict=True):
                if w is not None:
                    w = Saved("moe_mlp", dtype, dout.device).weights(name, w, shape)
                transposed.append(_transposed(w, kept, ctx.how.layout, dtype))
            parameters = _Backward(transposed[0], transposed[1], down_bias)
            results = gradients(ctx.how, dout, x, parameters, weights, h, ctx.routing, ctx.needs_input_grad[:6])
        return (*results, None, None, None)


class _Backward(NamedTuple):
    """The weights of a layer's backward, and its second bias."""

    gate_up: TransposedWeights
    down: TransposedWeights
    down_bias: torch.Tensor | None


def gradients(
    how: Layer,
    dout: torch.Tensor,
    x: torch.Tensor | None,
    parameters: _Backward,
    weights: torch.Tensor,
    h: torch.Tensor | None,
    routing: Routing,
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, gate_up, down, gate_up_bias, down_bias and weights that ``needs`` asks for.

    Rows of dout and x are gathered by the row kernels that quantise them.
    """
    saved = Weights(None, None, None, parameters.down_bias)  # type: ignore[arg-type]  # (weights were checked)
    x, biases, weights, h, *_ = as_saved(how, dout, x, saved, weights, h, routing, NO_ADAPTERS, NOTHING_NARROW)
    up, down, down_bias = parameters.gate_up, parameters.down, biases.down_bias
    needs_x, needs_up, needs_down, needs_up_bias, needs_down_bias, needs_weights = needs
    k, layout, act, bucket = how
    index, m_sizes, bounds, experts, places = routing
    E, M = m_sizes.shape[0], index.shape[0]
    inner = needs_x or needs_up or needs_up_bias
    dout = dout.contiguous()
    dx = dup = ddown = dup_bias = ddown_bias = dweights = dh = a = None
    if h is not None:
        if inner or needs_weights:
            da = new_rows(
                Rows(Op.FORWARD, dout, down.weights(), m_sizes, Layout.NK, M, index, k, bounds=bounds, expected=bucket),
                M,
            )
        else:
            da = h.new_zeros((M, act.columns(h)))
        dh, a, dweights = activation.gradient(
            h,
            da,
            act,
            Needs(inner, needs_down, needs_weights),
            weights=slot_weights(weights, dout),
            index=index,
            bounds=bounds,
            narrow=down_bias is None,
        )
        del da
    if a is not None and needs_down:
        ddown = grad_weight(Picked(dout, index, k, bounds), Picked(a), m_sizes, layout, down.dtype, bucket)
    del a
    if needs_down_bias:
        dy = tokens.gather(dout, index, k, bounds)
        ddown_bias = first_column(
            weight(dy, row_scales(weights, index, dy.dtype), m_sizes, strict=False, bucket=bucket)
        )
        del dy
    if dweights is not None:
        more = () if down_bias is None else (dout, down_bias, experts)
        dweights = of_weights(dweights, *more, top_k=k, E=E, dtype=weights.dtype)
    if dh is not None:
        if needs_x:
            dx = new_rows(Rows(Op.FORWARD, dh, up.weights(), m_sizes, Layout.NK, M, expected=bucket), M)
            dx = tokens.combine(dx, places, k)
        if needs_up and x is not None:
            dup = grad_weight(Picked(dh), Picked(x, index, k, bounds), m_sizes, layout, up.dtype, bucket)
        if needs_up_bias:
            dup_bias = first_column(weight(dh, ones(dh), m_sizes, strict=False, bucket=bucket))
    return dx, dup, ddown, dup_bias, ddown_bias, dweights


def layer_forward(
    how: Layer,
    x: torch.Tensor,
    fp8: tuple[Fp8Weights, Fp8Weights],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    routing: Routing,
    weights: torch.Tensor,
    *,
    keeps_h: bool,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [T, H] and, with ``keeps_h``, h."""
    parameters = FrozenWeights(fp8[0].of_forward, fp8[1].of_forward, *biases)
    nk = how._replace(layout=Layout.NK)
    return layer.forward(nk, x.contiguous(), parameters, routing, weights, keeps_h=keeps_h, into=into)[:2]


def _transposed(
    w: torch.Tensor | None, kept: ExpertWeights | None, layout: Layout, dtype: torch.dtype
) -> TransposedWeights:
    """The weights of a backward: kept ones, or w, quantised for the time of its product."""

    def weights() -> ExpertWeights:
        if kept is not None:
            return kept
        if w is None:
            raise AssertionError("no dx is needed")
        return of_dx(w, layout)

    return TransposedWeights(weights, dtype)
