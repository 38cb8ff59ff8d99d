"""Products and layers in fp8 with gradients: forward and dX of quantised rows and weights.

With q(t) the numbers of t's e4m3 codes times their scales, in groups of 128 of the reduction (x, dy) and blocks of
128 x 128 (w):

    y[i] = q(x[from(i)]) @ q(w[e]).T        dx[i] = q(dy[i]) @ q(w[e])

dW is that of ``fp8_products.py``. Sums are fp32. w is bfloat16 or float32, and dw of its dtype. All else is as in
``autograd.py`` and ``layer.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...artifacts.records import Layout, Op
from ...artifacts.tuples import NamedTuple
from ..check.call import Call, Form, Fusions, Rows, TransposedWeights
from ..check.saved_tensors import Saved
from ..check.tensors import in_memory
from ..driver.device import without_autocast
from ..launch.program import EAGER, EagerExecutor
from ..launch.steps import resolve_made_codes
from ..weights.expert_weights import ExpertWeights
from . import activation, autograd, gather_combine, layer, low_rank
from .activation import Needs
from .autograd import differentiated_once, note_mode, wanted
from .fp8_codes import both_codes, column_codes, dW_of_codes, gradient_codes, takes_gradients
from .fp8_products import Picked, grad_weight, multiplies_codes
from .fp8_weights import Fp8Weights, of_dx, of_forward
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
    zeros,
)
from .products import new_rows, of_made_codes, weight
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
        plan: Any = None,
    ) -> torch.Tensor:
        """Run the product, and save the tensors that its gradient needs.

        ``fp8`` has w's codes that a ``reuse_fp8_weights`` block keeps, ``plan`` is an ``api.fp8.Fp8ProductPlan``.
        """
        note_mode(ctx)
        needs_x, needs_w, needs_weights, _ = wanted(ctx.needs_input_grad, form)
        inner = needs_x or needs_weights
        keeps_w = inner and fp8.of_dx is None
        ctx.save_for_backward(
            x if needs_w or needs_weights else None, w if keeps_w else None, m_sizes, weights, bias, index
        )
        kind = None if weights is None else weights.dtype
        ctx.call = form, sizes, fp8.of_dx if inner else None, w.shape, w.dtype, kind, plan
        if plan is not None:
            y: torch.Tensor = plan.product(x, w, m_sizes, weights, bias, index, sizes, fp8)
            return y
        return product(Call(form, w, m_sizes, Fusions(index, weights, bias), *sizes), x, fp8)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that are needed, None for the others."""
        x, w, m_sizes, weights, bias, index = ctx.saved_tensors
        form, sizes, kept, w_shape, w_dtype, kind, plan = ctx.call
        m_sizes = autograd.counts_as_saved(dy, None, w_shape, m_sizes, weights, kind)
        saved, needs = SavedWeights("w", w, kept, w_shape, w_dtype), wanted(ctx.needs_input_grad, form)
        results = None
        if plan is not None and weights is None:
            results = plan.gradients(dy, x, saved, m_sizes, index, needs, sizes)
        if results is None:
            dy = in_memory("dy", dy)
            with without_autocast(dy.device.type):
                fusions = Fusions(index, weights, bias)
                results = product_gradients(form, sizes, dy, x, saved, m_sizes, fusions, needs)
        dx, dw, dweights, dbias = results
        return dx, dw, None, dweights, dbias, None, None, None, None, None


def product(
    call: Call, x: torch.Tensor, fp8: Fp8Weights, out: torch.Tensor | None = None, executor: EagerExecutor = EAGER
) -> torch.Tensor:
    """y of a call, without a gradient; ``fp8`` has w's codes, if a ``reuse_fp8_weights`` block keeps them."""
    layout = call.form.layout
    w = of_forward(call.dense, layout, executor) if fp8.of_forward is None else fp8.of_forward
    call = call._replace(form=call.form._replace(layout=Layout.NK), w=w)
    return low_rank.forward(call, x.contiguous(), out, executor)


def product_gradients(
    form: Form,
    sizes: tuple[int, int, int],
    dy: torch.Tensor,
    x: torch.Tensor | None,
    saved: SavedWeights,
    m_sizes: torch.Tensor,
    fusions: Fusions,
    needs: tuple[bool, bool, bool, bool],
    executor: EagerExecutor = EAGER,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, w, topk_weights and bias that ``needs`` asks for."""
    outline = dy.new_empty(saved.shape[-1:]).expand(saved.shape)
    of_dx = saved.transposed("grouped_gemm", dy.device, form.layout)
    call = Call(form, outline, m_sizes, fusions, *sizes, of_dx=of_dx)
    return autograd.backward(call, dy, x, needs, executor)


class Fp8Layer(torch.autograd.Function):
    """A layer in fp8: out [T, H], and the gradients of x, the weights, the biases and the routing weights."""

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
        plan: Any = None,
    ) -> torch.Tensor:
        """Run the layer, and save the tensors that its gradient needs.

        ``fp8`` has the codes that a ``reuse_fp8_weights`` block keeps, ``plan`` is an ``api.fp8.Fp8LayerPlan``.
        """
        note_mode(ctx)
        run = layer_forward if plan is None else plan.forward
        parameters = Weights(gate_up, down, gate_up_bias, down_bias)
        out, h = run(how, x, parameters, fp8, routing, weights, keeps_h=True)
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
        ctx.how, ctx.routing, ctx.kept, ctx.plan = how, routing, Kept.of(weights, h), plan
        ctx.kinds = (gate_up.shape, gate_up.dtype), (down.shape, down.dtype)
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients that are needed, None for the others."""
        x, gate_up, down, down_bias, weights, h = ctx.saved_tensors
        ctx.kept.check(dout, weights, h)
        both = zip(("gate_up_weight", "down_weight"), (gate_up, down), ctx.of_dx, ctx.kinds, strict=True)
        matrices = [SavedWeights(name, w, kept, *kind) for name, w, kept, kind in both]
        needs, results = ctx.needs_input_grad[:6], None
        if ctx.plan is not None and h is not None:
            results = ctx.plan.gradients(ctx.how, dout, x, matrices, down_bias, weights, h, ctx.routing, needs)
        if results is None:
            dout = in_memory("dout", dout, "moe_mlp")
            with without_autocast(dout.device.type):
                results = gradients(ctx.how, dout, x, matrices, down_bias, weights, h, ctx.routing, needs)
        return (*results, None, None, None, None)


class SavedWeights(NamedTuple):
    """The weights of a product as a forward saved them: w, its codes for dX from ``reuse_fp8_weights``, or neither."""

    name: str
    w: torch.Tensor | None
    kept: ExpertWeights | None
    shape: torch.Size
    dtype: torch.dtype

    def transposed(self, call: str, device: torch.device, layout: Layout) -> TransposedWeights:
        """Return the weights of dX: kept ones, or w quantised for this product alone.

        Raises
        ------
        InputError
            if a hook on saved tensors made another tensor of w.
        """
        kept, w = self.kept, self.w
        if w is not None:
            w = Saved(call, self.dtype, device).weights(self.name, w, tuple(self.shape))  # type: ignore[arg-type]

        def weights(executor: EagerExecutor) -> ExpertWeights:
            if kept is not None:
                return kept
            if w is None:
                raise AssertionError("no dx is needed")
            return of_dx(w, layout, executor)

        return TransposedWeights(weights, self.dtype)


def gradients(
    how: Layer,
    dout: torch.Tensor,
    x: torch.Tensor | None,
    matrices: Sequence[SavedWeights],
    down_bias: torch.Tensor | None,
    weights: torch.Tensor,
    h: torch.Tensor | None,
    routing: Routing,
    needs: tuple[bool, ...],
    executor: EagerExecutor = EAGER,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, gate_up, down, gate_up_bias, down_bias and weights that ``needs`` asks for.

    ``matrices`` are gate_up and down. Rows of dout and x are gathered by the row kernels that quantise them.
    """
    up, down = (saved.transposed("moe_mlp", dout.device, how.layout) for saved in matrices)
    beside = Weights(None, None, None, down_bias)  # type: ignore[arg-type]  # (weights were checked)
    x, biases, weights, h, *_ = as_saved(how, dout, x, beside, weights, h, routing, NO_ADAPTERS, NOTHING_NARROW)
    down_bias = biases.down_bias
    needs_x, needs_up, needs_down, needs_up_bias, needs_down_bias, needs_weights = needs
    k, layout, act, bucket = how
    index, m_sizes, bounds, experts, places = routing
    E, M = m_sizes.shape[0], index.shape[0]
    inner = needs_x or needs_up or needs_up_bias
    dout = dout.contiguous()
    dx = dup = ddown = dup_bias = ddown_bias = dweights = dh = a = None
    if h is not None and x is not None and all(needs[:3]) and not any(needs[3:5]) and down_bias is None:
        result = _of_codes(how, dout, x, (up, down), weights, h, routing, needs_weights, executor)
        if result is not None:
            return result
    if h is not None:
        if inner or needs_weights:
            w = down.weights(executor)
            of_dout = Rows(Op.FORWARD, dout, w, m_sizes, Layout.NK, M, index, k, bounds=bounds, expected=bucket)
            da = new_rows(of_dout, M, executor)
            del w, of_dout
        else:
            da = executor.call(partial(zeros, act=act), h)
        dh, a, dweights = activation.gradient(
            h,
            da,
            act,
            Needs(inner, needs_down, needs_weights),
            weights=slot_weights(weights, dout, executor),
            index=index,
            bounds=bounds,
            narrow=down_bias is None,
            executor=executor,
        )
        del da
    if a is not None and needs_down:
        rows = Picked(dout, index, k, bounds), Picked(a)
        ddown = grad_weight(*rows, m_sizes, layout, down.dtype, bucket, executor)
        del rows
    del a
    if needs_down_bias:
        dy = gather_combine.gather(dout, index, k, bounds, executor)
        scale = executor.call(partial(row_scales, dtype=dy.dtype), weights, index)
        ddown_bias = executor.call(
            first_column, weight(dy, scale, m_sizes, strict=False, bucket=bucket, executor=executor)
        )
        del dy, scale
    if dweights is not None:
        more = () if down_bias is None else (dout, down_bias, experts)
        dweights = executor.call(partial(of_weights, top_k=k, E=E, dtype=weights.dtype), dweights, *more)
    if dh is not None:
        if needs_x:
            of_dh = Rows(Op.FORWARD, dh, up.weights(executor), m_sizes, Layout.NK, M, expected=bucket)
            dx = new_rows(of_dh, M, executor)
            del of_dh
            dx = gather_combine.combine(dx, places, k, executor=executor)
        if needs_up and x is not None:
            rows = Picked(dh), Picked(x, index, k, bounds)
            dup = grad_weight(*rows, m_sizes, layout, up.dtype, bucket, executor)
        if needs_up_bias:
            beside_dh = executor.call(ones, dh)
            dup_bias = executor.call(
                first_column, weight(dh, beside_dh, m_sizes, strict=False, bucket=bucket, executor=executor)
            )
    return dx, dup, ddown, dup_bias, ddown_bias, dweights


def _of_codes(
    how: Layer,
    dout: torch.Tensor,
    x: torch.Tensor,
    matrices: tuple[TransposedWeights, TransposedWeights],
    weights: torch.Tensor,
    h: torch.Tensor,
    routing: Routing,
    needs_weights: bool,
    executor: EagerExecutor,
) -> tuple[torch.Tensor | None, ...] | None:
    """``gradients`` of x, both weights and the routing weights, without dh, a and rows of dout and x in bfloat16.

    None where a kernel is missing or a weight is too small (``multiplies_codes``). gate_up is quantised after ddown, so
    its codes and dout's are not in memory at the same time.
    """
    k, layout, act, bucket = how
    index, m_sizes, _, _, places = routing
    E, M, H, I = m_sizes.shape[0], index.shape[0], x.shape[1], act.columns(h)  # noqa: E741
    gates = act.gated and not act.interleaved
    if not gates or not M or not multiplies_codes(2 * I, H) or not multiplies_codes(H, I):
        return None
    if not takes_gradients(dout, x, h, E, I):
        return None
    of_up, of_down = matrices
    down = of_down.weights(executor)
    of_dout = Rows(Op.FORWARD, dout, down, m_sizes, Layout.NK, M, expected=bucket)
    step = resolve_made_codes(of_dout)
    if step is None:
        return None
    turned = layout is Layout.KN  # dw[e].T: the operands change places
    of_columns, rows = both_codes(dout, m_sizes, index, k, blocks=turned, executor=executor)
    da = of_made_codes(step, of_dout, rows, executor)
    del rows, of_dout, down
    dh, rows, a, dweights = gradient_codes(
        h,
        da,
        m_sizes,
        act,
        slot_weights(weights, dout, executor),
        index,
        writes_dweights=needs_weights,
        blocks=turned,
        executor=executor,
    )
    del da
    pair = (a, of_columns) if turned else (of_columns, a)
    ddown = dW_of_codes(*pair, m_sizes, dtype=of_down.dtype, executor=executor)
    del of_columns, a, pair
    up = of_up.weights(executor)
    of_dh = Rows(Op.FORWARD, h, up, m_sizes, Layout.NK, M, expected=bucket)
    step = resolve_made_codes(of_dh)
    if step is None:
        executor.unplanned()  # the steps so far are not needed
        return None
    dx = of_made_codes(step, of_dh, rows, executor)
    del rows, of_dh, up
    dx = gather_combine.combine(dx, places, k, executor=executor)
    of_x = column_codes(x, m_sizes, index, k, blocks=not turned, executor=executor)
    pair = (of_x, dh) if turned else (dh, of_x)
    dup = dW_of_codes(*pair, m_sizes, dtype=of_up.dtype, executor=executor)
    if dweights is not None:
        dweights = executor.call(partial(of_weights, top_k=k, E=E, dtype=weights.dtype), dweights)
    return dx, dup, ddown, None, None, dweights


def layer_forward(
    how: Layer,
    x: torch.Tensor,
    parameters: Weights,
    fp8: tuple[Fp8Weights, Fp8Weights],
    routing: Routing,
    weights: torch.Tensor,
    *,
    keeps_h: bool,
    into: torch.Tensor | None = None,
    executor: EagerExecutor = EAGER,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [T, H] and, with ``keeps_h``, h. ``fp8`` has the weights' codes that a block keeps."""
    up, down = (
        of_forward(w, how.layout, executor) if kept.of_forward is None else kept.of_forward
        for w, kept in zip(parameters[:2], fp8, strict=True)
    )
    quantised, nk = FrozenWeights(up, down, *parameters[2:]), how._replace(layout=Layout.NK)
    run = layer.forward(nk, x.contiguous(), quantised, routing, weights, keeps_h=keeps_h, executor=executor, into=into)
    return run[:2]
