"""A layer without a plan: check it, cast it for autocast, run it with or without its gradient, and record a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import Layout
from ...kernels.activations import Activation, activation_of
from ..check import call as check_call
from ..check import tensors
from ..check.call import check_fusions, expected_bucket, form_of
from ..dispatch.snapshot import Snapshot
from ..driver.device import without_autocast
from ..launch.program import remember
from ..ops import layer
from ..ops.activation import RowActivation, activate
from ..ops.layer import FrozenWeights, Layer, MoeLayer, Weights, weights_of
from ..ops.low_rank import Lora, adapters_given
from ..ops.routing import Routing, sort
from ..weights.expert_weights import ExpertWeights
from ..weights.quantized_rows import QuantizedRows, checked
from .grouped_gemm import grouped_gemm
from .layer_plan import LayerPlan, plan_layer
from .lora import adapted_layer
from .quantized_rows import refusal
from .routing import check_ids

_W: TypeAlias = "torch.Tensor | ExpertWeights"

_tracing = torch.compiler.is_dynamo_compiling
_written = torch.autograd.graph.increment_version  # call it for each tensor that a launch has written


def run(
    hidden: torch.Tensor | QuantizedRows,
    parameters: tuple[_W, _W, torch.Tensor | None, torch.Tensor | None],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    act: tuple[str | Activation, bool, bool],
    *,
    weights_on: str,
    w_layout: str,
    lora: Any,
    out: torch.Tensor | None,
    expected_rows: int | None,
    key: object,
    snapshot: Snapshot | None,
    precision: str | None = None,
) -> torch.Tensor:
    """The result of ``moe_mlp``.

    ``parameters`` are the weights and biases of both products; ``act`` is (activation, gated, interleaved). If the
    layer can have a plan, it is stored in ``snapshot`` under ``key``.

    Raises
    ------
    InputError
        for tensors that can't be used, or parameters that exclude each other.
    """
    gate_up_weight, down_weight, gate_up_bias, down_bias = parameters
    activation, gated, interleaved = act
    coded = None
    if isinstance(hidden, QuantizedRows):
        coded = checked("moe_mlp", "hidden", hidden, gate_up_weight)
        if precision is not None:
            raise InputError(
                "moe_mlp: hidden is QuantizedRows with precision='fp8': pass bfloat16 rows, or no precision"
            )
        hidden = hidden.stand_in()
    asked: torch.Tensor = hidden
    own = gate_up_weight, down_weight
    biases = gate_up_bias, down_bias
    if precision is not None:
        from . import fp8  # imported here: few calls have a precision

        (hidden, gate_up_bias, down_bias), (gate_up_weight, down_weight) = fp8.checked_weights(
            "moe_mlp",
            precision,
            {"hidden": asked, "gate_up_bias": gate_up_bias, "down_bias": down_bias},
            {"gate_up_weight": gate_up_weight, "down_weight": down_weight},
            (topk_ids, topk_weights, gate_up_bias, down_bias),
            {"lora": lora is not None, "weights_on='input'": weights_on == "input"},
        )
    if TYPE_CHECKING:
        assert isinstance(hidden, torch.Tensor)  # else ``_check_tensors`` refuses it
    _check_tensors(
        {
            "hidden": hidden,
            "gate_up_weight": gate_up_weight,
            "down_weight": down_weight,
            "topk_ids": topk_ids,
            "topk_weights": topk_weights,
        },
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    function = activation_of("moe_mlp", activation, gated=gated, interleaved=interleaved)
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
    bucket = None if _tracing() else expected_bucket("moe_mlp", expected_rows, T * k, "T*k")
    how = Layer(k, Layout(w_layout), RowActivation(function, gated, interleaved), bucket)
    if gated and (wide := layer.columns(gate_up_weight, how.layout)) % 2:
        raise InputError(f"moe_mlp: gate and up have {wide} columns together, wanted an even number")
    others = [tensor for tensor in (down_weight, gate_up_bias, down_bias, topk_weights) if tensor is not None]
    adapters = adapters_given(lora)
    if out is not None:
        _check_out(out, asked, [hidden, *own, *others], adapters, topk_weights, down_bias)
        if coded is not None:
            tensors.check_apart(out, "moe_mlp", **{"hidden.codes": coded.codes, "hidden.scale": coded.scale})
    low = [tensor for pair in adapters if isinstance(pair, Lora) for tensor in pair[:2]]
    drops = any(isinstance(pair, Lora) and pair.dropout for pair in adapters)
    is_traced = tensors.is_traced(x, gate_up_weight, topk_ids, *others, *low)
    if coded is not None:
        _check_coded(is_traced, weights_on, adapters, others)
    plan: Any = None
    is_planned = key is not None and snapshot is not None and lora is None
    if precision is not None:
        if is_planned:
            masters = weights_of(*own, *biases)
            plan = plan_layer(how, asked, masters, topk_ids, topk_weights, out, kind=fp8.Fp8LayerPlan)
        result = _in_fp8(x, own, (gate_up_bias, down_bias), topk_ids, topk_weights, how, w_layout, out, plan)
    elif drops or weights_on == "input" or is_traced:
        result = _composed(
            x,
            gate_up_weight,
            down_weight,
            topk_ids,
            topk_weights,
            how,
            gate_up_bias,
            down_bias,
            weights_on,
            w_layout,
            adapters,
            expected_rows,
        )
        if out is not None:
            return out.copy_(result.view(out.shape))
    else:
        weights = weights_of(gate_up_weight, down_weight, gate_up_bias, down_bias)
        if is_planned:
            plan = plan_layer(how, hidden, weights, topk_ids, topk_weights, out)
        result = _fused(x, weights, topk_ids, topk_weights, how, w_layout, plan, out, adapters, key, coded)
    if plan is not None and snapshot is not None and plan.programs:
        remember(snapshot.plans, key, plan)
    if out is not None:
        _written(out)
        return out
    return result.to(asked.dtype).view(asked.shape)


def _check_coded(
    is_traced: bool,
    weights_on: str,
    adapters: tuple[Lora | None, Lora | None],
    others: list[torch.Tensor | ExpertWeights],
) -> None:
    """Raise InputError if a layer on ``QuantizedRows`` is traced, has an adapter or needs a gradient."""
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in others)
    for there, what in (
        (is_traced, "a call that torch traces"),
        (weights_on == "input", "weights_on='input'"),
        (any(adapters), "lora"),
        (learns, "a gradient"),
    ):
        if there:
            raise refusal("moe_mlp", "hidden", what)


def _check_out(
    out: torch.Tensor,
    hidden: torch.Tensor,
    inputs: list[torch.Tensor | ExpertWeights],
    adapters: tuple[Lora | None, Lora | None],
    topk_weights: torch.Tensor,
    down_bias: torch.Tensor | None,
) -> None:
    """Raise InputError unless the layer's result can be written to ``out``."""
    tensors.tensors("moe_mlp", out=out)
    got = f"{list(out.shape)} {out.dtype} on {out.device}"
    if out.shape != hidden.shape or out.dtype is not hidden.dtype or out.device != hidden.device:
        wanted = f"hidden's {list(hidden.shape)} {hidden.dtype} on {hidden.device}"
        tensors.bad("out", got, wanted, "moe_mlp")
    if not out.is_contiguous():
        tensors.bad("out", f"with strides {list(out.stride())}", "a contiguous tensor", "moe_mlp")
    learns = [tensor for tensor in (out, *inputs) if isinstance(tensor, torch.Tensor)]
    if torch.is_grad_enabled() and (any(adapters) or any(tensor.requires_grad for tensor in learns)):
        tensors.bad("out", "given to a call that needs a gradient", "None, or torch.no_grad()", "moe_mlp")
    if not _tracing():
        tensors.check_apart(out, "moe_mlp", topk_weights=topk_weights, down_bias=down_bias)


def _check_tensors(arguments: dict[str, torch.Tensor | ExpertWeights], **biases: torch.Tensor | None) -> None:
    """Raise InputError, with the caller's names, for tensors of a wrong type, dtype or device."""
    quantised: dict[str, ExpertWeights] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, value in arguments.items():
        if name.endswith("_weight") and isinstance(value, ExpertWeights):
            quantised[name] = value
        else:
            plain[name] = value  # type: ignore[assignment]
    tensors.tensors("moe_mlp", **plain)
    tensors.tensors_or_none("moe_mlp", **biases)
    hidden, ids = plain["hidden"], plain["topk_ids"]
    if not hidden.dim() or not hidden.shape[-1]:
        tensors.bad("hidden", f"of shape {list(hidden.shape)}", "[T, H] (or [..., H]) with H of at least 1", "moe_mlp")
    tensors.check_dtype("hidden", hidden, "moe_mlp")
    check_ids(ids, "moe_mlp")
    cast = check_call.casts(hidden.device.type)
    there = {name: value for name, value in (*plain.items(), *biases.items()) if value is not None}
    devices = {name: value.device for name, value in there.items()} | {name: w.device for name, w in quantised.items()}
    for name, device in devices.items():
        if device != hidden.device:
            tensors.bad(name, f"on {device}", f"hidden's device, {hidden.device}", "moe_mlp")
    for name, value in there.items():
        if value is not ids and not value.dtype.is_floating_point:
            tensors.bad(name, f"{value.dtype}", "a floating-point type", "moe_mlp")
        if not (cast or name in ("topk_ids", "topk_weights") or value.dtype is hidden.dtype):
            tensors.bad(name, f"{value.dtype}", f"hidden's dtype, {hidden.dtype}", "moe_mlp")


def _fused(
    x: torch.Tensor,
    parameters: Weights | FrozenWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    how: Layer,
    w_layout: str,
    plan: LayerPlan | None,
    into: torch.Tensor | None,
    lora: tuple[Lora | None, Lora | None],
    key: object,
    coded: QuantizedRows | None,
) -> torch.Tensor:
    """The layer as one function with its own gradient. ``plan`` records it; with adapters, the plan of ``key`` does.

    The result is written to ``into``, if that is not None. With ``coded``, the layer reads these codes instead of x.
    """
    x, gate_up, gate_up_bias = check_call.autocast(x, parameters.gate_up, parameters.gate_up_bias)
    _, down, down_bias = check_call.autocast(x, parameters.down, parameters.down_bias)
    own = gate_up is parameters.gate_up and down is parameters.down
    parameters = weights_of(gate_up, down, gate_up_bias, down_bias)
    routing = sort(ids, gate_up.shape[0])
    x = _checked(x, parameters, weights, how, routing, w_layout, copies=coded is None)
    if any(lora):
        result = adapted_layer(
            x, parameters, ids, weights, how, routing, lora, comes_again=own, known_as=None if into is not None else key
        )
        return result if into is None else into.view(result.shape).copy_(result)
    with without_autocast(x.device.type):
        if torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in (x, weights, *parameters)
        ):
            out: torch.Tensor = MoeLayer.apply(x, *parameters, weights, routing, how, plan)  # type: ignore[no-untyped-call]
            return out
        into = None if into is None else into.view(-1, into.shape[-1])
        if coded is not None:
            codes, scale = coded
            return layer.forward(how, codes, parameters, routing, weights, keeps_h=False, into=into, x_scale=scale)[0]
        run = layer.forward if plan is None else plan.forward
        if into is None or into.dtype is x.dtype:
            return run(how, x, parameters, routing, weights, keeps_h=False, into=into)[0]
        return into.copy_(run(how, x, parameters, routing, weights, keeps_h=False)[0])  # autocast: x has another dtype


def _in_fp8(
    x: torch.Tensor,
    own: tuple[Any, Any],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    ids: torch.Tensor,
    weights: torch.Tensor,
    how: Layer,
    w_layout: str,
    into: torch.Tensor | None,
    plan: Any,
) -> torch.Tensor:
    """Check a layer on outlines of the caller's ``own`` weights, and run it in fp8; ``plan``, if any, records it."""
    from . import fp8

    routing = sort(ids, own[0].shape[0])
    up, down = (x.new_empty(w.shape[-1:]).expand(w.shape) for w in own)
    outlines = Weights(up, down, *biases)
    x = _checked(x, outlines, weights, how, routing, w_layout)
    wide = layer.columns(own[0], how.layout)
    fp8.check_whole("moe_mlp", H=x.shape[1], I=wide // 2 if how.act.gated else wide, **{"gate_up's columns": wide})
    into = None if into is None else into.view(-1, into.shape[-1])
    return fp8.layer(x, Weights(*own, *biases), routing, weights, how, into, plan)


def _checked(
    x: torch.Tensor,
    parameters: Weights | FrozenWeights,
    weights: torch.Tensor,
    how: Layer,
    routing: Routing,
    w_layout: str,
    *,
    copies: bool = True,
) -> torch.Tensor:
    """Return x, copied with ``copies`` if kernels can't read its rows; InputError if the GEMMs can't run on these."""
    gate_up, down, gate_up_bias, down_bias = parameters
    index, m_sizes, *_ = routing
    with _product("gate_up"):
        first = tensors.check(x, gate_up, m_sizes, w_layout, copies=copies)
    form = form_of(w_layout=w_layout, topk=how.top_k, permute_x=True, permute_y=True)
    I = first.N // 2 if how.act.gated else first.N  # noqa: E741
    with _product("down"):
        second = tensors.check(x.new_empty((0, I)), down, m_sizes, w_layout)
    for product, bias, name in ((first, gate_up_bias, "gate_up"), (second, down_bias, "down")):
        with _product(name):
            check_fusions(
                form,
                m_sizes,
                x.dtype,
                product.N,
                gather_indices=index,
                topk_weights=weights,
                fuse_mul_post=True,
                bias=bias,
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
    """Have errors of a product's check name the caller's arguments instead of w and bias."""
    try:
        yield
    except InputError as error:
        raise InputError(f"moe_mlp: of the product with {name}_weight as w and {name}_bias as bias, {error}") from None


def _composed(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor | ExpertWeights,
    down_weight: torch.Tensor | ExpertWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    how: Layer,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    weights_on: str,
    w_layout: str,
    lora: tuple[Lora | None, Lora | None] = (None, None),
    expected_rows: int | None = None,
) -> torch.Tensor:
    """Run the layer by calls that torch can trace."""
    T, k = topk_ids.shape
    function, gated, interleaved = how.act
    index, m_sizes, *_ = sort(topk_ids, gate_up_weight.shape[0])
    # torch differentiates the activation of rows without an expert, too: NaN would stop torch's anomaly mode.
    zeroes = torch.is_grad_enabled()
    if (
        weights_on == "output" or gate_up_bias is None
    ):  # without a bias the product is linear, so its result may be weighted instead
        first = weights_on == "input"
        h = grouped_gemm(
            x,
            gate_up_weight,
            m_sizes,
            k,
            index,
            permute_x=True,
            topk_weights=topk_weights if first else None,
            fuse_mul_post=first,
            w_layout=w_layout,
            bias=gate_up_bias,
            lora=lora[0],
            zero_tail=zeroes,
            expected_rows=expected_rows,
        )
    else:
        wide = torch.promote_types(x.dtype, torch.float32)
        weighted = (x[:, None, :].to(wide) * topk_weights[:, :, None].to(wide)).to(x.dtype)
        h = grouped_gemm(
            weighted.reshape(T * k, x.shape[1]),
            gate_up_weight,
            m_sizes,
            1,
            index,
            permute_x=True,
            w_layout=w_layout,
            bias=gate_up_bias,
            lora=lora[0],
            zero_tail=zeroes,
            expected_rows=expected_rows,
        )
    h = activate(h, function, gated=gated, interleaved=interleaved)
    last = weights_on == "output"
    # Without topk_weights, ``grouped_gemm`` takes T from the rows of y, which has a row for each index: T*k.
    y = grouped_gemm(
        h,
        down_weight,
        m_sizes,
        k,
        index,
        permute_y=True,
        topk_weights=topk_weights if last else None,
        fuse_mul_post=last,
        is_first_gemm=False,
        w_layout=w_layout,
        bias=down_bias,
        lora=lora[1],
        expected_rows=expected_rows,
    )
    return y.view(T, k, y.shape[-1]).sum(1)
