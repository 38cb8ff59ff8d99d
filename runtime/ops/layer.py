"""A whole MoE layer and its gradient as one autograd function, built of products and row kernels.

With index g[i] of sorted row i, its token g[i] // k, its expert e and its weight t = weights[g[i]]:

    h[i] = x[token] @ gate_up[e].T + gate_up_bias[e]        a[i] = act(h[i])
    y[i] = a[i] @ down[e].T + down_bias[e]                  out[token] = sum over its slots of t * y[i]

    da[i] = dout[token] @ down[e]                           dh[i] = act'(h[i]) * (t * da[i])
    dt[g[i]] = dot(da[i], a[i]) + dot(dout[token], down_bias[e])
    ddown[e] = sum of outer(dout[token], t * a[i])          ddown_bias[e] = sum of t * dout[token]
    dgate_up[e] = sum of outer(dh[i], x[token])             dgate_up_bias[e] = sum of dh[i]
    dx[token] = sum over its slots of dh[i] @ gate_up[e]

h is kept for the gradient and a is not: the pass that computes dh has it at hand. Where nothing needs a gradient the
first product may store a itself, and there is no h. Where the second reads codes of a, one pass makes them of h, and
there is no a. Every sum has a fixed order.

With adapters each of the two products has a low-rank part more (``low_rank.py``), in h, y, da and dx; A's and B's
gradients are those of sorted rows: of the second product dout[token] and t * a[i], of the first dh[i] and x[token].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from ...artifacts.records import Layout, Op
from ...artifacts.tuples import NamedTuple
from ...kernels.activations import Activation
from ..check.call import Rows, flat, wide_of
from ..check.saved_tensors import FLOATS, Frozen, Saved
from ..check.tensors import in_memory
from ..driver.device import without_autocast
from ..launch.program import EAGER, EagerExecutor
from ..weights.expert_weights import ExpertWeights
from . import activation, gather_combine, low_rank
from .activation import Needs, RowActivation
from .autograd import differentiated_once, note_mode
from .low_rank import Adapters, LowRank, LowRankGradients
from .products import gated_rows, of_activated, weight
from .routing import Routing

GATED_IN_PRODUCT = RowActivation(
    Activation("silu"), gated=True, interleaved=False
)  # the activation that a product's epilogue supports
NO_ADAPTERS = Adapters(None, None)
# The results of ``forward``.
Forward: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]"
_H = "x @ gate_up_weight.T"  # the name of h in errors
_ONES = 8  # columns that sum dh's rows, or weigh dout's: 16 bytes of a 16-bit type


class Layer(NamedTuple):
    """The arguments of a layer except tensors; ``bucket`` is the bucket of the expected rows (``Rows.expected``)."""

    top_k: int
    layout: Layout
    act: RowActivation
    bucket: int | None = None


class Weights(NamedTuple):
    """A layer's tensors: gate_up [E, 2*I, H] and down [E, H, I] in the layout, biases [E, 2*I] and [E, H] or None."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


class Narrow(NamedTuple):
    """The rows that a forward keeps of adapters: s * x[token] @ A.T, and s * a @ A.T of the second product, [T*k, r].

    None in a gradient where neither A nor B of the product needs one.
    """

    x: torch.Tensor | None
    a: torch.Tensor | None


NOTHING_NARROW = Narrow(None, None)


class Kept(NamedTuple):
    """Facts that no other tensor of a backward tells: the routing weights' dtype, and the columns of h."""

    dtype: torch.dtype
    columns: int

    @classmethod
    def of(cls, weights: torch.Tensor, h: torch.Tensor | None) -> Kept:
        return cls(weights.dtype, 0 if h is None else h.shape[1])

    def check(
        self, dout: torch.Tensor, weights: torch.Tensor, h: torch.Tensor | None, narrow: Narrow = NOTHING_NARROW
    ) -> None:
        """Raise InputError if a hook on saved tensors replaced these, or the rows of ``narrow``.

        A program of the gradient takes any number of rows, and does not compare these.
        """
        if weights.dtype is not self.dtype:
            Saved.beside("moe_mlp", dout).of_dtype("topk_weights", weights, self.dtype)
        if h is not None and h.shape[-1] != self.columns:
            Saved.beside("moe_mlp", dout).whole(_H, h, (h.shape[0], self.columns))
        for rows in narrow:
            if rows is not None and h is not None and rows.shape[0] != h.shape[0]:
                Saved.beside("moe_mlp", dout).whole("rows @ lora.A.T", rows, (h.shape[0], -1))


class FrozenWeights(NamedTuple):
    """A layer's tensors if gate_up or down, or both, are quantised."""

    gate_up: torch.Tensor | ExpertWeights
    down: torch.Tensor | ExpertWeights
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def weights_of(
    gate_up: torch.Tensor | ExpertWeights,
    down: torch.Tensor | ExpertWeights,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> Weights | FrozenWeights:
    """Return a layer's weights as one record."""
    if isinstance(gate_up, ExpertWeights) or isinstance(down, ExpertWeights):
        return FrozenWeights(gate_up, down, gate_up_bias, down_bias)
    return Weights(gate_up, down, gate_up_bias, down_bias)


def forward(
    layer: Layer,
    x: torch.Tensor,
    parameters: Weights | FrozenWeights,
    routing: Routing,
    weights: torch.Tensor,
    *,
    keeps_h: bool,
    executor: EagerExecutor = EAGER,
    into: torch.Tensor | None = None,
    adapters: Adapters = NO_ADAPTERS,
    x_scale: torch.Tensor | None = None,
) -> Forward:
    """Compute out [T, H], h [T*k, 2*I] and the adapters' ``Narrow`` rows of x [T, H] and the routing weights [T, k].

    out is ``into`` if it is given; x are codes with ``x_scale`` (``Rows``). Without ``keeps_h`` only out is returned,
    and silu(gate) * up may be in the first product's epilogue (``dispatch/plans.py``).
    """
    k, layout, act, bucket = layer
    index, m_sizes, bounds, experts, places = routing
    M = index.shape[0]
    # (Kernels read a bias as dense.)
    up_bias, down_bias = (None if bias is None else bias.detach().contiguous() for bias in parameters[2:])
    first = Rows(
        Op.FORWARD,
        x,
        parameters.gate_up,
        m_sizes,
        layout,
        M,
        index,
        k,
        bias=up_bias,
        bounds=bounds,
        expected=bucket,
        x_scale=x_scale,
    )
    h = narrow_x = narrow_a = None
    y: torch.Tensor | None
    second = partial(_second, parameters.down, m_sizes, layer, adapters.second, executor)
    whole = act == GATED_IN_PRODUCT and not keeps_h and adapters.first is None
    a = gated_rows(first, executor) if whole else None
    if a is not None:
        y, narrow_a = second(a)
    else:
        if adapters.first is not None:
            narrow_x = low_rank.narrowed(adapters.first, x, m_sizes, index, k, bounds, executor, bucket)
        h = low_rank.product(first, adapters.first, narrow_x, executor)
        of_h = Rows(Op.FORWARD, h, parameters.down, m_sizes, layout, M, bounds=bounds, expected=bucket)
        y = of_activated(of_h, act, executor) if adapters.second is None else None
        if y is None:
            y, narrow_a = second(activation.forward(h, act, bounds, executor))
    out = gather_combine.combine(
        y, places, k, slot_weights(weights, y, executor), experts, down_bias, executor, into=into
    )
    return (out, h, narrow_x, narrow_a) if keeps_h else (out, None, None, None)


def _second(
    down: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    layer: Layer,
    adapter: LowRank | None,
    executor: EagerExecutor,
    a: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute y [T*k, H] of a, and the rows that an adapter keeps."""
    layout, bucket = layer.layout, layer.bucket
    narrow = None if adapter is None else low_rank.narrowed(adapter, a, m_sizes, executor=executor, bucket=bucket)
    call = Rows(Op.FORWARD, a, down, m_sizes, layout, a.shape[0], expected=bucket)
    return low_rank.product(call, adapter, narrow, executor), narrow


class MoeLayer(torch.autograd.Function):
    """A layer: out [T, H], and the needed gradients of x, the weights, the biases and the routing weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_up: torch.Tensor | ExpertWeights,
        down: torch.Tensor | ExpertWeights,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        weights: torch.Tensor,
        routing: Routing,
        layer: Layer,
        plan: Any = None,
    ) -> torch.Tensor:
        """Run the layer, and save its gradient's tensors. ``plan`` is a ``api.layer_plan.LayerPlan``."""
        note_mode(ctx)
        parameters = weights_of(gate_up, down, gate_up_bias, down_bias)
        run = forward if plan is None else plan.forward
        out, h, *_ = run(layer, x, parameters, routing, weights, keeps_h=True)
        needs_x, needs_up, needs_down, needs_up_bias, _, needs_weights = ctx.needs_input_grad[:6]
        inner = needs_x or needs_up or needs_up_bias  # dh is needed
        products = gate_up if needs_x else None, down if inner or needs_weights else None
        ctx.frozen = [Frozen.of(w) if isinstance(w, ExpertWeights) else None for w in products]
        tensors = [w if isinstance(w, torch.Tensor) else None for w in products]
        ctx.save_for_backward(
            x if needs_up else None,
            *tensors,
            down_bias,
            weights,
            h if inner or needs_down or needs_weights else None,
        )
        ctx.layer, ctx.plan, ctx.kept = layer, plan, Kept.of(weights, h)
        ctx.routing = routing  # new tensors of this call: no hook gets them, so nothing has to be checked
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that are needed, None for the others."""
        x, gate_up, down, down_bias, weights, h = ctx.saved_tensors
        gate_up, down = _as_kept(ctx.frozen, gate_up, down)
        parameters, needs = weights_of(gate_up, down, None, down_bias), ctx.needs_input_grad[:6]
        ctx.kept.check(dout, weights, h)
        results = None
        if ctx.plan is not None and h is not None:
            results = ctx.plan.gradients(ctx.layer, dout, x, parameters, weights, h, ctx.routing, needs)
        if results is None:
            dout = in_memory("dout", dout, "moe_mlp")
            with without_autocast(dout.device.type):
                results = gradients(ctx.layer, dout, x, parameters, weights, h, ctx.routing, needs)
        return (*results[:6], None, None, None)


class AdaptedLayer(torch.autograd.Function):
    """A layer with low-rank adapters, whose A and B have gradients: (A, B) of the first product, then of the second.

    If a product has no adapter, both are None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_up: torch.Tensor | ExpertWeights,
        down: torch.Tensor | ExpertWeights,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        weights: torch.Tensor,
        routing: Routing,
        layer: Layer,
        scales: tuple[float, float],
        plan: Any = None,
        *low: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the layer, and save its gradient's tensors. ``plan`` is a ``api.layer_plan.LayerPlan``."""
        note_mode(ctx)
        parameters = weights_of(gate_up, down, gate_up_bias, down_bias)
        run = forward if plan is None else plan.forward
        out, *kept = run(layer, x, parameters, routing, weights, keeps_h=True, adapters=adapters_of(low, scales))
        both = gate_up, down
        ctx.frozen = [Frozen.of(w) if isinstance(w, ExpertWeights) else None for w in both]
        tensors = [w if isinstance(w, torch.Tensor) else None for w in both]
        ctx.save_for_backward(x, *tensors, down_bias, weights, *kept, *low)
        ctx.layer, ctx.scales, ctx.plan, ctx.kept = layer, scales, plan, Kept.of(weights, kept[0])
        ctx.routing = routing
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients; if A's or B's is needed, both are."""
        x, gate_up, down, down_bias, weights, h, *rest = ctx.saved_tensors
        low, routing, learns = rest[2:], ctx.routing, ctx.needs_input_grad[10:]
        narrow = Narrow(*(tensor if any(learns[2 * i : 2 * i + 2]) else None for i, tensor in enumerate(rest[:2])))
        gate_up, down = _as_kept(ctx.frozen, gate_up, down)
        parameters, needs = weights_of(gate_up, down, None, down_bias), ctx.needs_input_grad[:6]
        ctx.kept.check(dout, weights, h, narrow)
        adapters, results = adapters_of(low, ctx.scales), None
        if ctx.plan is not None:
            results = ctx.plan.gradients(ctx.layer, dout, x, parameters, weights, h, routing, needs, adapters, narrow)
        if results is None:
            dout = in_memory("dout", dout, "moe_mlp")
            with without_autocast(dout.device.type):
                results = all_gradients(ctx.layer, dout, x, parameters, weights, h, routing, needs, adapters, narrow)
        return (*results[:6], None, None, None, None, *results[6:])


def _as_kept(frozen: Sequence[Frozen | None], *saved: torch.Tensor | None) -> tuple[Any, ...]:
    """Weights that a forward kept: saved tensors, or quantised weights that were not written to since."""
    return tuple(tensor if w is None else w.unchanged() for w, tensor in zip(frozen, saved, strict=True))


def adapters_of(low: Sequence[torch.Tensor | None], scales: tuple[float, float]) -> Adapters:
    pairs = zip(low[::2], low[1::2], scales, strict=True)
    first, second = (None if A is None or B is None else LowRank(A, B, scale) for A, B, scale in pairs)
    return Adapters(first, second)


def all_gradients(
    layer: Layer,
    dout: torch.Tensor,
    x: torch.Tensor | None,
    parameters: Weights | FrozenWeights,
    weights: torch.Tensor,
    h: torch.Tensor | None,
    routing: Routing,
    needs: tuple[bool, ...],
    adapters: Adapters,
    narrow: Narrow,
    executor: EagerExecutor = EAGER,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of ``with_adapters`` in one tuple: the six, then A's and B's of both products."""
    six, low = with_adapters(layer, dout, x, parameters, weights, h, routing, needs, adapters, narrow, executor)
    return (*six, *(each for pair in low for each in (pair or (None, None))))


def gradients(
    layer: Layer,
    dout: torch.Tensor,
    x: torch.Tensor | None,
    parameters: Weights | FrozenWeights,
    weights: torch.Tensor,
    h: torch.Tensor | None,
    routing: Routing,
    needs: tuple[bool, ...],
    executor: EagerExecutor = EAGER,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, gate_up, down, gate_up_bias, down_bias and weights: those that ``needs`` asks for."""
    return with_adapters(layer, dout, x, parameters, weights, h, routing, needs, NO_ADAPTERS, NOTHING_NARROW, executor)[
        0
    ]


def with_adapters(
    layer: Layer,
    dout: torch.Tensor,
    x: torch.Tensor | None,
    parameters: Weights | FrozenWeights,
    weights: torch.Tensor,
    h: torch.Tensor | None,
    routing: Routing,
    needs: tuple[bool, ...],
    adapters: Adapters,
    narrow: Narrow,
    executor: EagerExecutor = EAGER,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[LowRankGradients | None, LowRankGradients | None]]:
    """The gradients, and those of the adapters whose forward results are in ``narrow``."""
    x, parameters, weights, h, adapters, narrow = as_saved(
        layer, dout, x, parameters, weights, h, routing, adapters, narrow
    )
    first, second = adapters
    of_first = of_second = None
    needs_x, needs_up, needs_down, needs_up_bias, needs_down_bias, needs_weights = needs
    k, layout, act, bucket = layer
    index, m_sizes, bounds, experts, places = routing
    E, M = m_sizes.shape[0], index.shape[0]
    inner = needs_x or needs_up or needs_up_bias or narrow.x is not None
    dout = dout.contiguous()
    row_weights = slot_weights(weights, dout, executor)
    dy = gather_combine.gather(dout, index, k, bounds, executor)
    dx = dup = ddown = dup_bias = ddown_bias = dweights = None
    a = dh = None
    frees = narrow.a is not None and not (needs_down or needs_down_bias)  # free dy before dh and a are allocated
    if h is not None and (inner or needs_down or needs_weights or narrow.a is not None):
        # If only t * act(h) is needed, da is not read.
        whole = inner or needs_weights
        v = None if second is None else low_rank.narrowed_gradient(second, dy, m_sizes, executor, bucket)
        if whole:
            of_dy = Rows(Op.DX, dy, parameters.down, m_sizes, layout, M, expected=bucket)
            da = low_rank.product(of_dy, second, v, executor)
        else:
            da = executor.call(partial(zeros, act=act), h)
        dB = None
        if narrow.a is not None:
            dB = weight(
                dy, executor.call(_weighted, narrow.a, weights, index), m_sizes, bucket=bucket, executor=executor
            )
            if frees:
                del dy
        wanted = Needs(inner, needs_down or narrow.a is not None, needs_weights)
        dh, a, dweights = activation.gradient(
            h,
            da,
            act,
            wanted,
            weights=row_weights,
            index=index,
            bounds=bounds,
            narrow=parameters.down_bias is None,
            executor=executor,
        )
        del da
        if dB is not None and v is not None and a is not None:
            of_second = LowRankGradients(weight(v, a, m_sizes, bucket=bucket, executor=executor), dB)
    if a is not None and needs_down:
        ddown = weight(dy, a, m_sizes, layout=layout, bucket=bucket, executor=executor)
    if needs_down_bias:
        scale = executor.call(partial(row_scales, dtype=dy.dtype), weights, index)
        ddown_bias = executor.call(
            first_column, weight(dy, scale, m_sizes, strict=False, bucket=bucket, executor=executor)
        )
    if needs_weights and dweights is not None:
        more = () if parameters.down_bias is None else (dout, parameters.down_bias, experts)
        dweights = executor.call(partial(of_weights, top_k=k, E=E, dtype=weights.dtype), dweights, *more)
    del a  # a and dy are half of the gradient's temporary memory
    if not frees:
        del dy
    if dh is not None:
        v = None if first is None else low_rank.narrowed_gradient(first, dh, m_sizes, executor, bucket)
        if needs_x:
            of_dh = Rows(Op.DX, dh, parameters.gate_up, m_sizes, layout, M, expected=bucket)
            dx = low_rank.product(of_dh, first, v, executor)
            dx = gather_combine.combine(dx, places, k, executor=executor)
        if x is not None and (needs_up or narrow.x is not None):
            sorted_x = gather_combine.gather(x, index, k, bounds, executor)
            if v is not None and narrow.x is not None:
                dA, dB = (
                    weight(v, sorted_x, m_sizes, bucket=bucket, executor=executor),
                    weight(dh, narrow.x, m_sizes, bucket=bucket, executor=executor),
                )
                of_first = LowRankGradients(dA, dB)
            if needs_up:
                dup = weight(dh, sorted_x, m_sizes, layout=layout, bucket=bucket, executor=executor)
            del sorted_x
        if needs_up_bias:
            dup_bias = executor.call(
                first_column,
                weight(dh, executor.call(ones, dh), m_sizes, strict=False, bucket=bucket, executor=executor),
            )
    return (dx, dup, ddown, dup_bias, ddown_bias, dweights), (of_first, of_second)


def as_saved(
    layer: Layer,
    dout: torch.Tensor,
    x: torch.Tensor | None,
    parameters: Weights | FrozenWeights,
    weights: torch.Tensor,
    h: torch.Tensor | None,
    routing: Routing,
    adapters: Adapters,
    narrow: Narrow,
) -> tuple[torch.Tensor | None, Weights | FrozenWeights, torch.Tensor, torch.Tensor | None, Adapters, Narrow]:
    """The tensors that the forward saved, as kernels read them; InputError if a hook replaced any of them."""
    saved, (T, H) = Saved.beside("moe_mlp", dout), dout.shape
    M, E, layout = routing.gather_indices.shape[0], routing.m_sizes.shape[0], layer.layout
    weights = saved.whole("topk_weights", weights, (T, layer.top_k), FLOATS)
    x = None if x is None else saved.rows("hidden", x, (T, H))
    h = None if h is None else saved.whole(_H, h, (M, -1))
    wide, I = (-1, -1) if h is None else (h.shape[1], layer.act.columns(h))  # noqa: E741
    up, down, up_bias, down_bias = parameters
    if isinstance(up, torch.Tensor):
        up = saved.weights("gate_up_weight", up, _shape(E, wide, H, layout))
    if isinstance(down, torch.Tensor):
        down = saved.weights("down_weight", down, _shape(E, H, I, layout))
    if down_bias is not None:
        down_bias = saved.whole("down_bias", down_bias, (E, H))
    first = _adapter_as_saved(saved, "gate_up_lora", adapters.first, narrow.x, (M, E, wide, H))
    second = _adapter_as_saved(saved, "down_lora", adapters.second, narrow.a, (M, E, H, I))
    adapters, narrow = Adapters(first[0], second[0]), Narrow(first[1], second[1])
    return x, weights_of(up, down, up_bias, down_bias), weights, h, adapters, narrow


def _adapter_as_saved(
    saved: Saved, name: str, adapter: LowRank | None, u: torch.Tensor | None, sizes: tuple[int, int, int, int]
) -> tuple[LowRank | None, torch.Tensor | None]:
    """An adapter's A and B, and x @ A.T of its product's rows, for M, E, N, K."""
    M, E, N, K = sizes
    if adapter is None:
        return None, None
    A = saved.weights(f"{name}.A", adapter.A, (E, -1, K))
    B = saved.weights(f"{name}.B", adapter.B, (E, N, A.shape[1]))
    return adapter._replace(A=A, B=B), None if u is None else saved.whole(f"rows @ {name}.A.T", u, (M, A.shape[1]))


def _shape(E: int, N: int, K: int, layout: Layout) -> tuple[int, int, int]:
    return (E, N, K) if layout is Layout.NK else (E, K, N)


def slot_weights(weights: torch.Tensor, like: torch.Tensor, executor: EagerExecutor = EAGER) -> torch.Tensor:
    """The routing weights by slot, [T*k]: unchanged in float32 or like's dtype, which kernels read; else widened."""
    if weights.dtype in (like.dtype, torch.float32):
        return weights.detach().reshape(-1).contiguous()
    return executor.call(partial(flat, wide=wide_of(like)), weights)  # type: ignore[no-any-return]


def columns(w: torch.Tensor | ExpertWeights, layout: Layout) -> int:
    """Return the number of columns of a product with w."""
    return w.shape[1 if layout is Layout.NK else 2]


# Torch's part of a gradient (``EagerExecutor.call``): functions of their arguments only, for any number of rows.


def _weighted(u: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.mul(u, torch.take(weights.detach(), index)[:, None], out=torch.empty_like(u))


def zeros(h: torch.Tensor, act: RowActivation) -> torch.Tensor:
    return h.new_zeros((h.shape[0], act.columns(h)))


def ones(dh: torch.Tensor) -> torch.Tensor:
    return dh.new_ones((dh.shape[0], _ONES))


def row_scales(weights: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    by_row = weights.detach().reshape(-1)[index]
    if by_row.dtype not in (dtype, torch.float32):
        by_row = by_row.to(torch.float32 if dtype is not torch.float64 else dtype)  # as in ``slot_weights``
    return by_row.to(dtype)[:, None].expand(-1, _ONES).contiguous()


def first_column(dbias: torch.Tensor) -> torch.Tensor:
    return dbias[:, :, 0].contiguous()


def of_weights(
    dweights: torch.Tensor,
    dout: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
    *,
    top_k: int,
    E: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """dweights [T, k], plus dot(dout[t], bias[expert of t's slot s]) for slots that take part; without autocast."""
    dweights = dweights.view(-1, top_k)
    if bias is None or dout is None or experts is None or not E:
        return dweights.to(dtype)
    experts = experts.view(dweights.shape)
    wide = torch.promote_types(dout.dtype, torch.float32)
    with without_autocast(dout.device.type):
        dots = dout.to(wide) @ bias.detach().to(wide).T
    here = (experts >= 0) & (experts < E)
    return (dweights + torch.where(here, dots.gather(1, torch.where(here, experts, 0).long()), 0)).to(dtype)
