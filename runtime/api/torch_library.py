"""``torch.ops.pretuned``: operators for ``grouped_gemm``, with or without an adapter, and for its gradient.

This module is imported when torch.compile or torch.export traces a call. Eager calls go straight to the launcher: an
operator would cost them 7-12 us. The operators with an adapter take w as a tensor, or the parts of quantised weights.
"""

from __future__ import annotations

from typing import Any

import torch

from ...artifacts.errors import InputError
from ..check import tensors
from ..check.call import Call, Form, autocast, check, check_expected, form_of
from ..check.saved_tensors import as_kept, kinds_of
from ..driver.device import without_autocast
from ..ops import low_rank
from ..ops.autograd import backward, wanted, with_adapter
from ..ops.low_rank import Lora, LowRank
from ..weights.expert_weights import ExpertWeights
from ..weights.quantized_rows import QuantizedRows
from .lora import check_columns, low_rank_of
from .quantized_rows import refusal

_MANY = 10  # number of arguments: w, and those of ``_ARGUMENTS``
_PARTS = 6  # number of parts of quantised weights: the fields of ``ExpertWeights``
_TENSORS = "Tensor codes, Tensor scale, Tensor? zero, Tensor? global_scale, Tensor? derived"
_ARGUMENTS = (
    "Tensor m_sizes, Tensor? gather_indices, Tensor? topk_weights, Tensor? bias, int topk, "
    "bool permute_x, bool permute_y, bool fuse_mul_post, str w_layout"
)
_EXPECTED = "SymInt? expected_rows=None"  # last, so that programs that were exported without it still run
_CALL = f"Tensor w, {_ARGUMENTS}"
# The parts of quantised weights, in the order of ``ExpertWeights``' fields.
_QUANTISED = f"str format, {_TENSORS}, {_ARGUMENTS}"

_library: Any = torch.library.Library("pretuned", "DEF")  # type: ignore[no-untyped-call]
_ONLY = f"bool zero_tail, bool dX_only, bool dW_only, {_EXPECTED}"
_NEEDS = f"bool[] needs, {_EXPECTED}"
_library.define(f"grouped_gemm(Tensor x, {_CALL}, {_ONLY}) -> Tensor")
_library.define(f"grouped_gemm_backward(Tensor dy, Tensor x, {_CALL}, {_NEEDS}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(f"grouped_gemm_quantised(Tensor x, {_QUANTISED}, {_ONLY}) -> Tensor")
_library.define(
    f"grouped_gemm_quantised_backward(Tensor dy, Tensor x, {_QUANTISED}, {_NEEDS}) -> (Tensor, Tensor, Tensor)"
)
_WEIGHTS = "Tensor? w, str format, Tensor? codes, Tensor? w_scale, Tensor? zero, Tensor? global_scale, Tensor? derived"
_LORA = f"Tensor A, Tensor B, float scale, {_WEIGHTS}, {_ARGUMENTS}"
_LOW, _W = 3, 1 + _PARTS
_ALL = _LOW + _W + _MANY  # number of arguments from A to zero_tail, or of a gradient's to needs

_library.define(f"grouped_gemm_lora(Tensor x, {_LORA}, bool zero_tail, {_EXPECTED}) -> (Tensor, Tensor)")
_library.define(
    f"grouped_gemm_lora_backward(Tensor dy, Tensor x, Tensor u, {_LORA}, bool[] needs, {_EXPECTED}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def traced(
    x: torch.Tensor | QuantizedRows,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    *,
    gather_indices: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    topk: int,
    permute_x: bool,
    permute_y: bool,
    fuse_mul_post: bool,
    w_layout: str,
    zero_tail: bool,
    dX_only: bool,
    dW_only: bool,
    untraceable: bool,
    lora: Lora | None = None,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """Run the call as an operator, whose fake kernel checks shapes alone."""
    if isinstance(x, QuantizedRows):
        raise refusal("grouped_gemm", "x", "a call that torch traces")
    if untraceable:
        raise InputError(
            "grouped_gemm: out=, autotune=True and kernel_config_* can't be traced by torch.compile or "
            "torch.export: leave them out, or call outside"
        )
    if tensors.duals._current_level >= 0:  # a tensor's tangent can't be traced
        raise InputError(
            "grouped_gemm: inside a forward-mode level (torch.func.jvp, jacfwd, forward_ad) it can't be "
            "traced: there is no forward-mode derivative here, use a backward"
        )
    check_expected("grouped_gemm", expected_rows, "0 to M")
    x, w, bias = autocast(x, w, bias)
    rest = (
        m_sizes,
        gather_indices,
        topk_weights,
        bias,
        topk,
        permute_x,
        permute_y,
        fuse_mul_post,
        w_layout,
        zero_tail,
    )
    if lora is not None:
        return _with_lora(x, w, low_rank_of(lora, x, m_sizes), *rest, expected_rows)
    y: torch.Tensor
    if isinstance(w, ExpertWeights):
        y = torch.ops.pretuned.grouped_gemm_quantised(x, *_parts_of(w), *rest, dX_only, dW_only, expected_rows)
    else:
        y = torch.ops.pretuned.grouped_gemm(x, w, *rest, dX_only, dW_only, expected_rows)
    return y


def _forward(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    if tensors.duals._current_level >= 0:
        tensors.no_tangents("grouped_gemm", x, *rest)
    (*arguments, _dX_only, _dW_only), expected = _with_expected(rest, _MANY + 3)
    call, x = _call_of(x, *(*arguments, expected))
    with without_autocast(x.device.type):
        return low_rank.forward(call, x)


def _forward_fake(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    (*arguments, _dX_only, _dW_only), expected = _with_expected(rest, _MANY + 3)
    call, x = _call_of(x, *(*arguments, expected))
    return x.new_empty((call.y_rows, call.N))


def _quantised(x: torch.Tensor, *parts: Any) -> torch.Tensor:
    return _forward(x, _weights_of(*parts[:_PARTS]), *parts[_PARTS:])


def _quantised_fake(x: torch.Tensor, *parts: Any) -> torch.Tensor:
    return _forward_fake(x, _weights_of(*parts[:_PARTS]), *parts[_PARTS:])


def _backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor | ExpertWeights, *rest: Any
) -> tuple[torch.Tensor, ...]:
    (*parameters, needs), expected = _with_expected(rest, _MANY)
    call, rows = _call_of(x, w, *(*parameters, False, expected))
    with without_autocast(x.device.type):
        dx, dw, dweights, dbias = backward(call, dy, rows, tuple(needs))
    dw = None if dw is None else dw.view(w.shape)
    return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in (dx, dw, dweights, dbias))


def _quantised_backward(dy: torch.Tensor, x: torch.Tensor, *parts: Any) -> tuple[torch.Tensor, ...]:
    dx, _, dweights, dbias = _backward(dy, x, _weights_of(*parts[:_PARTS]), *parts[_PARTS:])
    return dx, dweights, dbias


def _quantised_backward_fake(dy: torch.Tensor, x: torch.Tensor, *parts: Any) -> tuple[torch.Tensor, ...]:
    dx, _, dweights, dbias = _backward_fake(dy, x, dy, *parts[_PARTS:])
    return dx, dweights, dbias


def _backward_fake(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    (_m_sizes, _index, weights, bias, *_, needs), _ = _with_expected(rest, _MANY)
    like = (x, w, weights, bias)
    return tuple(
        tensor.new_empty(tensor.shape) if need and tensor is not None else dy.new_empty(0)
        for tensor, need in zip(like, needs, strict=True)
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, m_sizes, index, weights, bias, *parameters, _zero_tail, dX_only, dW_only, ctx.expected = inputs
    ctx.save_for_backward(x, w, m_sizes, index, weights, bias)
    ctx.kinds = kinds_of((x, w, m_sizes, index, weights, bias))
    ctx.parameters, ctx.form = parameters, Form(only_dx=dX_only, only_dw=dW_only)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    asked = ctx.needs_input_grad
    needs = list(wanted((asked[0], asked[1], False, asked[4], asked[5]), ctx.form))
    saved = as_kept("grouped_gemm", "x w m_sizes gather_indices topk_weights bias", ctx.saved_tensors, ctx.kinds)
    results = torch.ops.pretuned.grouped_gemm_backward(dy, *saved, *ctx.parameters, needs, ctx.expected)
    dx, dw, dweights, dbias = (gradient if need else None for gradient, need in zip(results, needs, strict=True))
    return dx, dw, None, None, dweights, dbias, *[None] * 9


def _quantised_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, *parts = inputs
    form, *tensors_of = parts[:_PARTS]
    m_sizes, index, weights, bias, *parameters, _zero_tail, dX_only, dW_only, ctx.expected = parts[_PARTS:]
    saved = (x, *tensors_of, m_sizes, index, weights, bias)
    ctx.save_for_backward(*saved)
    ctx.kinds = kinds_of(saved)
    ctx.format = form
    ctx.parameters, ctx.form = parameters, Form(only_dx=dX_only, only_dw=dW_only)


def _quantised_gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    asked = ctx.needs_input_grad
    names = "x codes scale zero global_scale derived m_sizes gather_indices topk_weights bias"
    x, codes, scale, zero, outer, derived, *rest = as_kept("grouped_gemm", names, ctx.saved_tensors, ctx.kinds)
    weights_at = 1 + _PARTS + 2  # index of topk_weights, after x, w's parts, m_sizes and gather_indices
    needs = wanted((asked[0], False, False, asked[weights_at], asked[weights_at + 1]), ctx.form)
    results = torch.ops.pretuned.grouped_gemm_quantised_backward(
        dy, x, ctx.format, codes, scale, zero, outer, derived, *rest, *ctx.parameters, list(needs), ctx.expected
    )
    dx, dweights, dbias = (
        gradient if need else None for gradient, need in zip(results, (needs[0], *needs[2:]), strict=True)
    )
    return dx, *[None] * (_PARTS + 2), dweights, dbias, *[None] * 9


def _with_lora(x: torch.Tensor, w: torch.Tensor | ExpertWeights, adapter: LowRank, *rest: Any) -> torch.Tensor:
    """y by ``torch.ops.pretuned.grouped_gemm_lora``; ``rest`` are the operator's arguments from m_sizes on."""
    parts: tuple[Any, ...] = (w, "", None, None, None, None, None)
    if isinstance(w, ExpertWeights):
        parts = (None, *_parts_of(w))
    y, _ = torch.ops.pretuned.grouped_gemm_lora(x, *adapter, *parts, *rest)
    return y  # type: ignore[no-any-return]


def _weights(w: torch.Tensor | None, *parts: Any) -> torch.Tensor | ExpertWeights:
    return _weights_of(*parts) if w is None else w


def _lora_forward(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    (A, B, scale, *rest), expected = _with_expected(arguments, _ALL)
    call, x = _call_of(x, _weights(*rest[:_W]), *(*rest[_W:], expected))
    check_columns(B, call.N)
    with without_autocast(x.device.type):
        y, u = low_rank.with_adapter(call, x, LowRank(A, B, scale))
    if u is None:
        raise AssertionError("an adapter makes u")
    return y, u


def _lora_forward_fake(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments, expected = _with_expected(arguments, _ALL)
    call, x = _call_of(x, _weights(*arguments[_LOW : _LOW + _W]), *(*arguments[_LOW + _W :], expected))
    check_columns(arguments[1], call.N)
    return x.new_empty((call.y_rows, call.N)), x.new_empty((call.M, arguments[0].shape[1]))


def _lora_backward(dy: torch.Tensor, x: torch.Tensor, u: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    (A, B, scale, *rest, needs), expected = _with_expected(arguments, _ALL)
    w = _weights(*rest[:_W])
    call, rows = _call_of(x, w, *(*rest[_W:], False, expected))
    with without_autocast(x.device.type):
        kept = u if needs[4] else None
        dx, dw, *others = with_adapter(call, dy, rows, tuple(needs[:4]), LowRank(A, B, scale), kept)
    dw = None if dw is None else dw.view(w.shape)
    return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in (dx, dw, *others))


def _lora_backward_fake(
    dy: torch.Tensor, x: torch.Tensor, u: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    arguments, _ = _with_expected(arguments, _ALL)
    A, B, _scale, w, *_ = arguments
    _m_sizes, _index, weights, bias, *_ = arguments[_LOW + _W :]
    needs = [*arguments[-1], arguments[-1][4]]
    like = (x, w, weights, bias, A, B)
    return tuple(
        tensor.new_empty(tensor.shape) if need and tensor is not None else dy.new_empty(0)
        for tensor, need in zip(like, needs, strict=True)
    )


def _lora_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, A, B, scale, w, form, *parts_and_rest = inputs
    parts = parts_and_rest[: _PARTS - 1]
    m_sizes, index, weights, bias, *parameters, _zero_tail, ctx.expected = parts_and_rest[_PARTS - 1 :]
    saved = (x, output[1], A, B, w, *parts, m_sizes, index, weights, bias)
    ctx.save_for_backward(*saved)
    ctx.kinds = kinds_of(saved)
    ctx.scale, ctx.format, ctx.parameters = scale, form, parameters


def _lora_gradients(ctx: Any, dy: torch.Tensor, _du: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    asked = ctx.needs_input_grad
    at = 1 + _LOW + _W + 2  # index of topk_weights, after m_sizes and gather_indices
    needs = [*wanted((asked[0], asked[1 + _LOW], False, asked[at], asked[at + 1]), Form()), asked[1] or asked[2]]
    names = (
        "x x@lora.A.T lora.A lora.B w codes scale zero global_scale derived m_sizes gather_indices topk_weights bias"
    )
    saved = as_kept("grouped_gemm", names, ctx.saved_tensors, ctx.kinds)
    x, u, A, B, w, *parts, m_sizes, index, weights, bias = saved
    results = torch.ops.pretuned.grouped_gemm_lora_backward(
        dy,
        x,
        u,
        A,
        B,
        ctx.scale,
        w,
        ctx.format,
        *parts,
        m_sizes,
        index,
        weights,
        bias,
        *ctx.parameters,
        needs,
        ctx.expected,
    )
    dx, dw, dweights, dbias, dA, dB = (
        gradient if need else None for gradient, need in zip(results, (*needs, needs[4]), strict=True)
    )
    none = [None] * _PARTS
    return dx, dA, dB, None, dw, *none, None, None, dweights, dbias, *[None] * (len(ctx.parameters) + 2)


def _call_of(
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    index: torch.Tensor | None,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    topk: int,
    permute_x: bool,
    permute_y: bool,
    fuse: bool,
    w_layout: str,
    zero_tail: bool = False,
    expected_rows: int | None = None,
) -> tuple[Call, torch.Tensor]:
    """The checked call of an operator's arguments, and x with usable rows."""
    form = form_of(w_layout=w_layout, topk=topk, permute_x=permute_x, permute_y=permute_y, zero_tail=zero_tail)
    return check(x, w, m_sizes, form, index, weights, fuse, bias, expected_rows=expected_rows)


def _with_expected(arguments: tuple[Any, ...], many: int) -> tuple[tuple[Any, ...], int | None]:
    """The first ``many`` arguments of an operator, and ``expected_rows``, which torch leaves out if it is None."""
    return arguments[:many], arguments[many] if len(arguments) > many else None


def _weights_of(*parts: Any) -> ExpertWeights:
    """The quantised weights with these parts: the inverse of ``_parts_of``."""
    return ExpertWeights(*parts)


def _parts_of(w: ExpertWeights) -> tuple[Any, ...]:
    """An operator's arguments for quantised weights. Derived scales are computed in the graph, from the scales."""
    return w.format, w.codes, w.scale, w.zero, w.global_scale, w.derived_now()


def _no_second(_ctx: Any, *_: Any) -> None:
    """Raise RuntimeError: the operator of a gradient has no gradient of its own."""
    raise RuntimeError("pretuned: a gradient of grouped_gemm has no gradient itself: it can't be differentiated again")


torch.library.impl(_library, "grouped_gemm", "CompositeExplicitAutograd")(_forward)
torch.library.impl(_library, "grouped_gemm_backward", "CompositeExplicitAutograd")(_backward)
torch.library.impl(_library, "grouped_gemm_quantised", "CompositeExplicitAutograd")(_quantised)
torch.library.impl(_library, "grouped_gemm_quantised_backward", "CompositeExplicitAutograd")(_quantised_backward)
torch.library.register_fake("pretuned::grouped_gemm", _forward_fake, lib=_library)
torch.library.register_fake("pretuned::grouped_gemm_backward", _backward_fake, lib=_library)
torch.library.register_autograd("pretuned::grouped_gemm_backward", _no_second, lib=_library)
torch.library.register_autograd("pretuned::grouped_gemm", _gradients, setup_context=_setup, lib=_library)
torch.library.register_fake("pretuned::grouped_gemm_quantised", _quantised_fake, lib=_library)
torch.library.register_fake("pretuned::grouped_gemm_quantised_backward", _quantised_backward_fake, lib=_library)
torch.library.register_autograd("pretuned::grouped_gemm_quantised_backward", _no_second, lib=_library)
torch.library.register_autograd(
    "pretuned::grouped_gemm_quantised", _quantised_gradients, setup_context=_quantised_setup, lib=_library
)
torch.library.impl(_library, "grouped_gemm_lora", "CompositeExplicitAutograd")(_lora_forward)
torch.library.impl(_library, "grouped_gemm_lora_backward", "CompositeExplicitAutograd")(_lora_backward)
torch.library.register_fake("pretuned::grouped_gemm_lora", _lora_forward_fake, lib=_library)
torch.library.register_fake("pretuned::grouped_gemm_lora_backward", _lora_backward_fake, lib=_library)
torch.library.register_autograd("pretuned::grouped_gemm_lora_backward", _no_second, lib=_library)
torch.library.register_autograd("pretuned::grouped_gemm_lora", _lora_gradients, setup_context=_lora_setup, lib=_library)
