"""A whole MoE layer and its gradient as one autograd function, made of the products and the passes over rows.

With index g[i] of sorted row i, its token g[i] // k, its expert e and its weight t = weights[g[i]]:

    h[i] = x[token] @ gate_up[e].T + gate_up_bias[e]        a[i] = act(h[i])
    y[i] = a[i] @ down[e].T + down_bias[e]                  out[token] = sum over its slots of t * y[i]

    da[i] = dout[token] @ down[e]                           dh[i] = act'(h[i]) * (t * da[i])
    dt[g[i]] = dot(da[i], a[i]) + dot(dout[token], down_bias[e])
    ddown[e] = sum of outer(dout[token], t * a[i])          ddown_bias[e] = sum of t * dout[token]
    dgate_up[e] = sum of outer(dh[i], x[token])             dgate_up_bias[e] = sum of dh[i]
    dx[token] = sum over its slots of dh[i] @ gate_up[e]

h is kept for the gradient and a is not: the pass that computes dh has it at hand. Where nothing needs a gradient the
first product may store a itself, and there is no h. Every sum has a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ...artifacts.records.problem import Layout, Op
from ..check.call import flat
from ..check.operands import Rows
from ..check.tensors import in_memory
from ..driver.device import without_autocast
from ..weights.expert_weights import ExpertWeights
from . import activation, tokens
from .activation import Activation, Needs
from .products import gated_rows, rows, weight

GATED_IN_PRODUCT = Activation("silu", gated=True, interleaved=False)  # what a product's epilogue can do
_ONES = 8  # columns that sum dh's rows, or weigh dout's: 16 bytes of a 16-bit type


class Routing(NamedTuple):
    """The slots of T tokens sorted by expert, E of them.

    ``gather_indices`` [T*k]: the flat token*k + slot of each sorted row; ``m_sizes`` int32 [E]: each expert's rows;
    ``bounds`` int32 [E+1]: where each expert's rows begin, and where the last one's end; ``experts`` int32 [T*k]: each
    slot's expert, not in [0, E) for one that takes no part; ``places`` int32 [T*k]: each slot's sorted row, -1 for one
    that takes no part.
    """

    gather_indices: torch.Tensor
    m_sizes: torch.Tensor
    bounds: torch.Tensor
    experts: torch.Tensor
    places: torch.Tensor


class Layer(NamedTuple):
    """All of a layer that is no tensor."""

    top_k: int
    layout: Layout
    act: Activation


class Weights(NamedTuple):
    """A layer's tensors: gate_up [E, 2*I, H] and down [E, H, I] in the layout, biases [E, 2*I] and [E, H] or None."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


class FrozenWeights(NamedTuple):
    """The same where gate_up or down, or both, are quantised."""

    gate_up: torch.Tensor | ExpertWeights
    down: torch.Tensor | ExpertWeights
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def weights_of(
    gate_up: torch.Tensor | ExpertWeights, down: torch.Tensor | ExpertWeights, gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> Weights | FrozenWeights:  # fmt: skip
    """A layer's weights as one."""
    if isinstance(gate_up, ExpertWeights) or isinstance(down, ExpertWeights):
        return FrozenWeights(gate_up, down, gate_up_bias, down_bias)
    return Weights(gate_up, down, gate_up_bias, down_bias)


def forward(
    layer: Layer,
    x: torch.Tensor,
    given: Weights | FrozenWeights,
    routing: Routing,
    weights: torch.Tensor,
    *,
    keeps_h: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [T, H] and h [T*k, 2*I] of x [T, H] and the routing weights [T, k].

    Without ``keeps_h`` there is none, and silu(gate) * up may be the first product's own work (``epilogue.py``).
    """
    k, layout, act = layer
    index, m_sizes, bounds, experts, places = routing
    M = index.shape[0]
    # (Kernels read a bias as dense.)
    up_bias, down_bias = (None if bias is None else bias.detach().contiguous() for bias in given[2:])
    first = Rows(Op.FORWARD, x, given.gate_up, m_sizes, layout, M, index, k, bias=up_bias, bounds=bounds)
    h = None
    a = gated_rows(first) if act == GATED_IN_PRODUCT and not keeps_h else None
    if a is None:
        h = rows(first, x.new_empty((M, columns(given.gate_up, layout))))
        a = activation.forward(h, act, bounds)
    y = rows(Rows(Op.FORWARD, a, given.down, m_sizes, layout, M), x.new_empty((M, columns(given.down, layout))))
    out = tokens.combine(y, places, k, slot_weights(weights, x), experts, down_bias)
    return out, h if keeps_h else None


class MoeLayer(torch.autograd.Function):
    """out [T, H], and the gradients of x, the weights, the biases and the routing weights that are asked for."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate_up: torch.Tensor | ExpertWeights, down: torch.Tensor | ExpertWeights,
        gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, weights: torch.Tensor, routing: Routing,
        layer: Layer, plan: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """The layer; what a gradient needs is saved. ``plan`` is a ``replay.layer.LayerPlan``."""
        given = weights_of(gate_up, down, gate_up_bias, down_bias)
        if plan is None:
            out, h = forward(layer, x, given, routing, weights, keeps_h=True)
        else:
            out, h = plan.forward(x, given, routing, weights, keeps_h=True)
        needs_x, needs_up, needs_down, needs_up_bias, _, needs_weights = ctx.needs_input_grad[:6]
        inner = needs_x or needs_up or needs_up_bias  # dh is needed
        products = gate_up if needs_x else None, down if inner or needs_weights else None
        ctx.frozen = [one if isinstance(one, ExpertWeights) else None for one in products]
        tensors = [one if isinstance(one, torch.Tensor) else None for one in products]
        ctx.save_for_backward(
            x if needs_up else None, *tensors, down_bias, weights,
            h if inner or needs_down or needs_weights else None, *routing,
        )  # fmt: skip
        ctx.layer, ctx.plan = layer, plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that are needed, None for the others."""
        x, gate_up, down, down_bias, weights, h, *routing = ctx.saved_tensors
        if ctx.plan is not None and h is not None:
            planned = ctx.plan.gradients(
                dout, x, gate_up, down, down_bias, weights, h, Routing(*routing), ctx.needs_input_grad[:6]
            )  # fmt: skip
            if planned is not None:
                dx, dup, ddown, dweights = planned
                return dx, dup, ddown, None, None, dweights, None, None, None
        dout = in_memory("dout", dout, "moe_mlp")
        gate_up, down = (ctx.frozen[i] if one is None else one for i, one in enumerate((gate_up, down)))
        with without_autocast(dout.device.type):
            found = gradients(
                ctx.layer, dout, x, weights_of(gate_up, down, None, down_bias), weights, h, Routing(*routing),
                ctx.needs_input_grad[:6],
            )  # fmt: skip
        return (*found, None, None, None)


def gradients(
    layer: Layer, dout: torch.Tensor, x: torch.Tensor | None, given: Weights | FrozenWeights, weights: torch.Tensor,
    h: torch.Tensor | None, routing: Routing, needs: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The gradients of x, gate_up, down, gate_up_bias, down_bias and weights: those that ``needs`` asks for."""
    needs_x, needs_up, needs_down, needs_up_bias, needs_down_bias, needs_weights = needs
    k, layout, act = layer
    index, m_sizes, bounds, experts, places = routing
    M, E = index.shape[0], m_sizes.shape[0]
    inner = needs_x or needs_up or needs_up_bias
    dout = dout.contiguous()
    row_weights = slot_weights(weights, dout)
    dy = tokens.gather(dout, index, k, bounds)
    dx = dup = ddown = dup_bias = ddown_bias = dweights = None
    a = dh = None
    if h is not None and (inner or needs_down or needs_weights):
        # (Where only t * act(h) is wanted, da is of no account.)
        whole = inner or needs_weights
        da = _times(dy, given.down, m_sizes, layout) if whole else h.new_zeros((M, act.columns(h)))
        dh, a, dweights = activation.gradient(
            h, da, act, Needs(inner, needs_down, needs_weights), weights=row_weights, index=index, bounds=bounds,
            narrow=given.down_bias is None,
        )  # fmt: skip
        del da
    if a is not None:
        ddown = weight(dy, a, m_sizes, layout=layout)
    if needs_down_bias:
        scale = row_weights[index].to(dy.dtype)[:, None].expand(M, _ONES).contiguous()
        ddown_bias = weight(dy, scale, m_sizes, strict=False)[:, :, 0].contiguous()
    if needs_weights and dweights is not None:
        dweights = with_bias(dweights.view(weights.shape), dout, given.down_bias, experts, E).to(weights.dtype)
    del a, dy  # half of what the gradient takes beside its results
    if dh is not None:
        if needs_x:
            dx = tokens.combine(_times(dh, given.gate_up, m_sizes, layout), places, k)
        if needs_up and x is not None:
            dup = weight(dh, tokens.gather(x, index, k, bounds), m_sizes, layout=layout)
        if needs_up_bias:
            dup_bias = weight(dh, dh.new_ones((M, _ONES)), m_sizes, strict=False)[:, :, 0].contiguous()
    return dx, dup, ddown, dup_bias, ddown_bias, dweights


def slot_weights(weights: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The routing weights by slot, [T*k]: float32 or in like's dtype as they are, which kernels read; else widened."""
    if weights.dtype in (like.dtype, torch.float32):
        return weights.detach().reshape(-1).contiguous()
    return flat(weights, like)


def columns(w: torch.Tensor | ExpertWeights, layout: Layout) -> int:
    """The columns of a product with w."""
    return w.shape[1 if layout is Layout.NK else 2]


def _times(dy: torch.Tensor, w: torch.Tensor | ExpertWeights, m_sizes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """dy @ w row by row, in the sorted order; rows of no expert hold anything."""
    M, K = dy.shape[0], w.shape[2 if layout is Layout.NK else 1]
    return rows(Rows(Op.DX, dy, w, m_sizes, layout, M), dy.new_empty((M, K)))


def with_bias(
    dweights: torch.Tensor, dout: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor, E: int
) -> torch.Tensor:
    """dweights [T, k], and dot(dout[t], bias[expert of t's slot s]) of every slot that takes part; not by autocast."""
    if bias is None or not E:
        return dweights
    experts = experts.view(dweights.shape)
    wide = torch.promote_types(dout.dtype, torch.float32)
    with without_autocast(dout.device.type):
        every = dout.to(wide) @ bias.detach().to(wide).T
    here = (experts >= 0) & (experts < E)
    return dweights + torch.where(here, every.gather(1, torch.where(here, experts, 0).long()), 0)
