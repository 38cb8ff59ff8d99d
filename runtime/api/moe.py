"""A whole MoE layer: sort the routing, gather, two grouped GEMMs with an activation between, weigh, sum over k."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from ...artifacts.errors import InputError
from ...artifacts.limits import MAX_EXPERTS
from ...artifacts.records.problem import Layout, bucket_of
from ..check import call as check_call
from ..check import tensors
from ..check.form import check_fusions, form_of
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import without_autocast
from ..ops import layer
from ..ops import routing as ops_routing
from ..ops.activation import Activation, activate, check_activation
from ..ops.layer import NO_ADAPTERS, FrozenWeights, Layer, MoeLayer, Routing, Weights, weights_of
from ..replay import plan as replay_plan
from ..weights.expert_weights import ExpertWeights
from . import call as api_call
from .grouped_gemm import grouped_gemm
from .lora import Lora, adapted_layer, adapters_given, as_used, by_plan, scales_of

_tracing = torch.compiler.is_dynamo_compiling
_transformed = torch._C._are_functorch_transforms_active
_written = torch.autograd.graph.increment_version  # a launch that autograd doesn't see changed this tensor
# Function.apply does this and, for calls inside torch.func's transforms, more.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, MoeLayer).apply


def sort_routing(topk_ids: torch.Tensor, E: int) -> Routing:
    """Sort the (token, slot) pairs by expert, stably. Nothing is read on the host, so it can be captured.

    topk_ids [T, k], any integer type: an id outside [0, E) (an expert on another rank) is sorted past the
    last expert and takes no part. E, the number of experts, is 1 to 65536.

    Raises
    ------
    InputError
        for anything else.
    """
    if not isinstance(E, (int, torch.SymInt)) or isinstance(E, bool) or not 1 <= E <= MAX_EXPERTS:
        tensors.bad("E", repr(E), f"the number of experts, an int of 1 to {MAX_EXPERTS}", "sort_routing")
    tensors.tensors("sort_routing", topk_ids=topk_ids)
    _check_ids(topk_ids, "sort_routing")
    return _sorted(topk_ids, E)


def _check_ids(topk_ids: torch.Tensor, call: str) -> None:
    """Raise InputError for ids that are no whole numbers."""
    dtype = topk_ids.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        tensors.bad("topk_ids", f"{dtype}", "an integer type", call)


def _sorted(topk_ids: torch.Tensor, E: int) -> Routing:
    """As ``sort_routing``, of what was checked; E may be 0."""
    found = ops_routing.sort_slots(topk_ids, E)
    if found is not None:
        return Routing(*found)
    flat = topk_ids.reshape(-1).to(torch.int64)
    # int32 sorts in half the passes of int64.
    flat = torch.where((flat >= 0) & (flat < E), flat, E).to(torch.int32)
    experts, order = torch.sort(flat, stable=True)
    steps = torch.arange(E + 1, dtype=torch.int32, device=flat.device)
    bounds = torch.searchsorted(experts, steps, out_int32=True)
    rows = torch.arange(flat.shape[0], dtype=torch.int32, device=flat.device)
    places = torch.where(flat < E, torch.zeros_like(flat).scatter(0, order, rows), -1)
    return Routing(order, bounds[1:] - bounds[:-1], bounds, flat, places)


def moe_mlp(
    hidden: torch.Tensor,
    gate_up_weight: torch.Tensor | ExpertWeights,
    down_weight: torch.Tensor | ExpertWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: str = "silu",
    *,
    gated: bool = True,
    interleaved: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    weights_on: str = "output",
    w_layout: str = "nk",
    lora: tuple[Lora | None, Lora | None] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = sum over slots s of weight[t, s] * (act(hidden[t] @ gate_up[e].T) @ down[e].T), e = topk_ids[t, s].

    Parameters
    ----------
    hidden
        [T, H] (or [..., H], flattened) bfloat16, float16 or float32; float64 on the CPU.
    gate_up_weight, down_weight
        [E, 2*I, H] and [E, H, I] in hidden's dtype; [E, I, H] for the first with ``gated=False``. With
        ``w_layout="kn"`` they are [E, H, 2*I] and [E, I, H]. Or ``ExpertWeights`` of the first shapes: frozen.
    topk_ids
        [T, k] integer: the experts of each token. An id outside [0, E) takes no part.
    topk_weights
        [T, k] floating point, multiplied in float32; differentiable.
    activation, gated, interleaved
        ``silu gelu gelu_tanh swiglu_oai`` with a gate, ``silu gelu gelu_tanh relu2`` without. Gate and up are the
        first and second half of the columns, or with ``interleaved`` the even and odd ones.
    gate_up_bias, down_bias
        [E, 2*I] and [E, H] in hidden's dtype, or None.
    weights_on
        ``"output"``: the expert's result is weighted, as above. ``"input"``: what it reads is (Llama-4),
        act((weight[t, s] * hidden[t]) @ ...).
    lora
        The adapters of the two products, (gate_up, down), either of which may be None: A [E, r, H] and B [E, 2*I, r]
        of the first, A [E, r, I] and B [E, H, r] of the second, whatever ``w_layout`` is.
    out
        Contiguous, in hidden's shape and dtype: written and returned, without a gradient. It may be hidden itself.

    Returns
    -------
    torch.Tensor
        [T, H] in hidden's dtype, in hidden's shape. Slots are summed in their order, in fp32, and rounded once.

    Notes
    -----
    An expert's result is rounded to hidden's dtype before it is weighted: in float16 one over 65504 is infinite. Where
    torch traces the call, and with ``weights_on="input"``, the second product stores rows by an
    index, weighted before they are rounded.

    Where nothing needs a gradient, silu(gate) * up of halves without a bias is computed in the first product's epilogue
    if a bundle's times say that this is faster (``runtime/dispatch/epilogue.py`` has the rule); then the product is
    not rounded
    in between. A call that needs a gradient, and any other activation, runs the product and a pass over its rows.

    Raises
    ------
    InputError
        for tensors that can't be used, or parameters that exclude each other.
    """
    key: object = None
    snapshot = dispatch_snapshot.current  # first: what is chosen before a ``reload`` is not kept in a table from after
    if not _tracing():
        if tensors.duals._current_level >= 0:
            low = [one for pair in adapters_given(lora) if isinstance(pair, Lora) for one in pair[:2]]
            tensors.no_tangents(
                "moe_mlp", hidden, gate_up_weight, down_weight, topk_weights, gate_up_bias, down_bias, *low
            )  # fmt: skip
        plan = None
        try:
            T, k = topk_ids.shape
            dense = type(gate_up_weight) is not ExpertWeights and type(down_weight) is not ExpertWeights
            at: tuple[object, ...]
            if dense:
                at = gate_up_weight.data_ptr(), down_weight.data_ptr()  # type: ignore[union-attr]
            else:
                at = (*replay_plan.key_of(gate_up_weight), *replay_plan.key_of(down_weight))
            if type(T) is int:  # (else it is traced, and what looks at it fixes it)
                key = (
                    *at, k, bucket_of(T * k), activation, gated, interleaved, gate_up_bias is None, down_bias is None,
                    weights_on, w_layout, hidden.dim(), hidden.requires_grad, out is None,
                    None if lora is None else scales_of(lora),
                )  # fmt: skip
                if snapshot is None and tensors.on_gpu(hidden):
                    snapshot = dispatch_snapshot.snapshot()
                plan = None if snapshot is None else snapshot.layers.get(key)
        except (AttributeError, TypeError, ValueError, RuntimeError):  # no usable tensor: the checks will say
            key = None
        if plan is not None:
            given = (Weights if dense else FrozenWeights)(gate_up_weight, down_weight, gate_up_bias, down_bias)  # type: ignore[arg-type]
            found = _again(plan, hidden, given, topk_ids, topk_weights, out, lora)
            if found is not None:
                return found if out is not None or hidden.dim() == 2 else found.view(hidden.shape)
    _check_tensors(
        {"hidden": hidden, "gate_up_weight": gate_up_weight, "down_weight": down_weight, "topk_ids": topk_ids,
         "topk_weights": topk_weights}, gate_up_bias=gate_up_bias, down_bias=down_bias,
    )  # fmt: skip
    check_activation("moe_mlp", activation, gated=gated, interleaved=interleaved)
    if w_layout not in ("nk", "kn"):
        raise InputError(f"moe_mlp: w_layout is {w_layout!r}, wanted 'nk' (E matrices [out, in]) or 'kn' ([in, out])")
    if weights_on not in ("output", "input"):
        raise InputError(f"moe_mlp: weights_on is {weights_on!r}, wanted 'output' or 'input'")
    x = hidden.reshape(-1, hidden.shape[-1])
    T, k = topk_ids.shape if topk_ids.dim() == 2 else (-1, -1)
    if x.shape[0] != T or not k or topk_weights.shape != topk_ids.shape:
        raise InputError(
            f"moe_mlp: topk_ids is {list(topk_ids.shape)} and topk_weights {list(topk_weights.shape)}, "
            f"wanted both [T, k] with T={x.shape[0]}, the tokens of hidden, and k of at least 1"
        )
    if len(gate_up_weight.shape) != 3 or len(down_weight.shape) != 3 or gate_up_weight.shape[0] != down_weight.shape[0]:
        raise InputError(
            f"moe_mlp: gate_up_weight is {list(gate_up_weight.shape)} and down_weight {list(down_weight.shape)}, "
            "wanted three dimensions with the same number of experts first"
        )
    how = Layer(k, Layout(w_layout), Activation(activation, gated, interleaved))
    if gated and (wide := layer.columns(gate_up_weight, how.layout)) % 2:
        raise InputError(f"moe_mlp: gate and up have {wide} columns together, wanted an even number")
    others = [one for one in (down_weight, gate_up_bias, down_bias, topk_weights) if one is not None]
    adapters = adapters_given(lora)
    if out is not None:
        _check_out(out, hidden, [hidden, gate_up_weight, *others], adapters, topk_weights, down_bias)
    low = [one for pair in adapters if isinstance(pair, Lora) for one in pair[:2]]
    drops = any(isinstance(pair, Lora) and pair.dropout for pair in adapters)
    if drops or weights_on == "input" or api_call.is_traced(x, gate_up_weight, topk_ids, *others, *low):
        found = _composed(
            x, gate_up_weight, down_weight, topk_ids, topk_weights, how, gate_up_bias, down_bias, weights_on, w_layout,
            adapters,
        )  # fmt: skip
        if out is not None:
            return out.copy_(found.view(out.shape))
    else:
        weights = weights_of(gate_up_weight, down_weight, gate_up_bias, down_bias)
        plan = None
        if key is not None and snapshot is not None and lora is None:
            plan = replay_plan.plan_layer(how, hidden, weights, topk_ids, topk_weights, out)
        found = _fused(x, weights, topk_ids, topk_weights, how, w_layout, plan, out, adapters, key)
        if plan is not None and snapshot is not None and plan.programs:
            replay_plan.remember(snapshot.layers, key, plan)
    if out is not None:
        _written(out)
        return out
    return found.to(hidden.dtype).view(hidden.shape)


def _check_out(
    out: torch.Tensor, hidden: torch.Tensor, every: list[torch.Tensor | ExpertWeights],
    adapters: tuple[Lora | None, Lora | None], topk_weights: torch.Tensor, down_bias: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise InputError unless ``out`` can take what a layer comes to."""
    tensors.tensors("moe_mlp", out=out)
    told = f"{list(out.shape)} {out.dtype} on {out.device}"
    if out.shape != hidden.shape or out.dtype is not hidden.dtype or out.device != hidden.device:
        wanted = f"hidden's {list(hidden.shape)} {hidden.dtype} on {hidden.device}"
        tensors.bad("out", told, wanted, "moe_mlp")
    if not out.is_contiguous():
        tensors.bad("out", f"with strides {list(out.stride())}", "a contiguous tensor", "moe_mlp")
    learns = [one for one in (out, *every) if isinstance(one, torch.Tensor)]
    if torch.is_grad_enabled() and (any(adapters) or any(one.requires_grad for one in learns)):
        tensors.bad("out", "given to a call that needs a gradient", "None, or torch.no_grad()", "moe_mlp")
    if not _tracing():
        tensors.check_apart(out, "moe_mlp", topk_weights=topk_weights, down_bias=down_bias)


def _check_tensors(every: dict[str, torch.Tensor | ExpertWeights], **biases: torch.Tensor | None) -> None:
    """Raise InputError, by the caller's names, for tensors that are of no use by their types, dtypes and devices."""
    quantised: dict[str, ExpertWeights] = {}
    given: dict[str, torch.Tensor] = {}
    for name, one in every.items():
        if name.endswith("_weight") and isinstance(one, ExpertWeights):
            quantised[name] = one
        else:
            given[name] = one  # type: ignore[assignment]
    tensors.tensors("moe_mlp", **given)
    tensors.tensors_or_none("moe_mlp", **biases)
    hidden, ids = given["hidden"], given["topk_ids"]
    if not hidden.dim() or not hidden.shape[-1]:
        tensors.bad("hidden", f"of shape {list(hidden.shape)}", "[T, H] (or [..., H]) with H of at least 1", "moe_mlp")
    tensors.check_dtype("hidden", hidden, "moe_mlp")
    _check_ids(ids, "moe_mlp")
    cast = check_call.casts(hidden.device.type)
    there = {name: one for name, one in (*given.items(), *biases.items()) if one is not None}
    devices = {name: one.device for name, one in there.items()} | {name: w.device for name, w in quantised.items()}
    for name, device in devices.items():
        if device != hidden.device:
            tensors.bad(name, f"on {device}", f"hidden's device, {hidden.device}", "moe_mlp")
    for name, one in there.items():
        if one is not ids and not one.dtype.is_floating_point:
            tensors.bad(name, f"{one.dtype}", "a floating-point type", "moe_mlp")
        if not (cast or name in ("topk_ids", "topk_weights") or one.dtype is hidden.dtype):
            tensors.bad(name, f"{one.dtype}", f"hidden's dtype, {hidden.dtype}", "moe_mlp")


def _again(
    plan: replay_plan.LayerPlan, hidden: torch.Tensor, given: Weights | FrozenWeights, ids: torch.Tensor,
    weights: torch.Tensor, out: torch.Tensor | None, lora: tuple[Lora | None, Lora | None] | None,
) -> torch.Tensor | None:  # fmt: skip
    """The call by a plan; None where it is another one."""
    adapters = NO_ADAPTERS
    if lora is not None:
        adapters = as_used(lora, hidden.dtype, plan.E)
        hidden = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])  # as when it was written down
    if not plan.takes(hidden, given, ids, weights, out, adapters):
        return None
    grad = (plan.grad or (out is not None and out.requires_grad)) and torch.is_grad_enabled()
    if (grad or lora is not None) and (out is not None or _transformed()):
        return None
    x = hidden if hidden.dim() == 2 else hidden.view(-1, hidden.shape[-1])
    routing = _sorted(ids, plan.E)
    if out is not None:
        plan.forward(plan.how, x, given, routing, weights, keeps_h=False, into=out.view(x.shape))
        _written(out)
        return out
    if lora is not None:
        found = by_plan(plan, x, given, routing, weights, adapters, grad=grad)
    elif grad:
        found = _apply(x, *given, weights, routing, plan.how, plan)
    else:
        found, *_ = plan.forward(plan.how, x, given, routing, weights, keeps_h=False)
    return found


def _fused(
    x: torch.Tensor, given: Weights | FrozenWeights, ids: torch.Tensor, weights: torch.Tensor, how: Layer,
    w_layout: str, plan: replay_plan.LayerPlan | None, into: torch.Tensor | None,
    lora: tuple[Lora | None, Lora | None], key: object,
) -> torch.Tensor:  # fmt: skip
    """The layer as one function, with its own gradient; ``plan``, or with adapters one by ``key``, writes it down.

    ``into`` takes what it comes to.
    """
    x, gate_up, gate_up_bias = check_call.autocast(x, given.gate_up, given.gate_up_bias)
    _, down, down_bias = check_call.autocast(x, given.down, given.down_bias)
    own = gate_up is given.gate_up and down is given.down
    given = weights_of(gate_up, down, gate_up_bias, down_bias)
    routing = _sorted(ids, gate_up.shape[0])
    x = _checked(x, given, weights, how, routing, w_layout)
    if any(lora):
        found = adapted_layer(
            x, given, ids, weights, how, routing, lora, comes_again=own, known_as=None if into is not None else key
        )
        return found if into is None else into.view(found.shape).copy_(found)
    with without_autocast(x.device.type):
        if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weights, *given)):
            out: torch.Tensor = MoeLayer.apply(x, *given, weights, routing, how, plan)  # type: ignore[no-untyped-call]
            return out
        run = layer.forward if plan is None else plan.forward
        into = None if into is None else into.view(-1, into.shape[-1])
        if into is None or into.dtype is x.dtype:
            return run(how, x, given, routing, weights, keeps_h=False, into=into)[0]
        return into.copy_(run(how, x, given, routing, weights, keeps_h=False)[0])  # autocast: x has another dtype


def _checked(
    x: torch.Tensor, given: Weights | FrozenWeights, weights: torch.Tensor, how: Layer, routing: Routing, w_layout: str
) -> torch.Tensor:
    """x with rows that can be used; InputError for what the GEMMs can't take."""
    gate_up, down, gate_up_bias, down_bias = given
    index, m_sizes, *_ = routing
    with _product("gate_up"):
        first = tensors.check(x, tensors.outline(gate_up, x, w_layout), m_sizes, w_layout)
    form = form_of(w_layout=w_layout, topk=how.top_k, permute_x=True, permute_y=True)
    I = first.N // 2 if how.act.gated else first.N  # noqa: E741
    with _product("down"):
        second = tensors.check(x.new_empty((0, I)), tensors.outline(down, x, w_layout), m_sizes, w_layout)
    for one, bias, name in ((first, gate_up_bias, "gate_up"), (second, down_bias, "down")):
        with _product(name):
            check_fusions(
                form, m_sizes, x.dtype, one.N, gather_indices=index, topk_weights=weights, fuse_mul_post=True, bias=bias
            )
    if second.N != first.K:
        raise InputError(
            f"moe_mlp: down_weight is {list(down.shape)}, wanted H={first.K} rows of an expert, hidden's columns"
        )
    if x.is_cuda:
        tensors.check_cuda_dtype(x, "hidden", "moe_mlp")
    return first.x


@contextlib.contextmanager
def _product(name: str) -> Iterator[None]:
    """What a product's check says of w and bias is told of the caller's own arguments."""
    try:
        yield
    except InputError as error:
        raise InputError(f"moe_mlp: of the product with {name}_weight as w and {name}_bias as bias, {error}") from None


def _composed(
    x: torch.Tensor, gate_up_weight: torch.Tensor | ExpertWeights, down_weight: torch.Tensor | ExpertWeights,
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, how: Layer, gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None, weights_on: str, w_layout: str,
    lora: tuple[Lora | None, Lora | None] = (None, None),
) -> torch.Tensor:  # fmt: skip
    """The layer out of calls that torch can trace."""
    T, k = topk_ids.shape
    activation, gated, interleaved = how.act
    index, m_sizes, *_ = _sorted(topk_ids, gate_up_weight.shape[0])
    if weights_on == "output" or gate_up_bias is None:  # a product without a bias is linear: weighting it is the same
        first = weights_on == "input"
        h = grouped_gemm(
            x, gate_up_weight, m_sizes, k, index, permute_x=True, topk_weights=topk_weights if first else None,
            fuse_mul_post=first, w_layout=w_layout, bias=gate_up_bias, lora=lora[0],
        )  # fmt: skip
    else:
        wide = torch.promote_types(x.dtype, torch.float32)
        weighted = (x[:, None, :].to(wide) * topk_weights[:, :, None].to(wide)).to(x.dtype)
        h = grouped_gemm(
            weighted.reshape(T * k, x.shape[1]), gate_up_weight, m_sizes, 1, index, permute_x=True, w_layout=w_layout,
            bias=gate_up_bias, lora=lora[0],
        )  # fmt: skip
    h = activate(h, activation, gated=gated, interleaved=interleaved)
    last = weights_on == "output"
    # Without weights T is told by y's rows alone, which are those of the index: T*k.
    y = grouped_gemm(
        h, down_weight, m_sizes, k, index, permute_y=True, topk_weights=topk_weights if last else None,
        fuse_mul_post=last, is_first_gemm=False, w_layout=w_layout, bias=down_bias, lora=lora[1],
    )  # fmt: skip
    return y.view(T, k, y.shape[-1]).sum(1)
