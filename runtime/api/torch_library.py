"""``torch.ops.pretuned``: the call and its gradient as operators, for torch.compile and torch.export to trace.

Imported only while something traces: an eager call goes straight to the launcher, an operator costs it 7-12 us.
"""

from __future__ import annotations

from typing import Any

import torch

from ...artifacts.errors import InputError
from ..check import tensors
from ..check.call import Form, autocast, check_expected
from ..check.saved import as_kept, kinds_of
from ..driver.device import without_autocast
from ..ops import low_rank
from ..ops.autograd import backward, wanted
from ..ops.low_rank import Lora
from ..weights.expert_weights import ExpertWeights
from ..weights.quantized_rows import QuantizedRows
from . import lora_library
from .adapted import low_rank_of
from .coded_rows import refusal
from .operator_call import CALL, EXPECTED, PARTS, REST, TENSORS, call_of, no_second, parts_of, weights_of, with_expected

_CALL = f"Tensor w, {REST}"
# Quantised weights by their parts, in the order of ``ExpertWeights``' fields.
_QUANTISED = f"str format, {TENSORS}, {REST}"

_library: Any = torch.library.Library("pretuned", "DEF")  # type: ignore[no-untyped-call]
_ONLY = f"bool zero_tail, bool dX_only, bool dW_only, {EXPECTED}"
_NEEDS = f"bool[] needs, {EXPECTED}"
_library.define(f"grouped_gemm(Tensor x, {_CALL}, {_ONLY}) -> Tensor")
_library.define(f"grouped_gemm_backward(Tensor dy, Tensor x, {_CALL}, {_NEEDS}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(f"grouped_gemm_quantised(Tensor x, {_QUANTISED}, {_ONLY}) -> Tensor")
_library.define(
    f"grouped_gemm_quantised_backward(Tensor dy, Tensor x, {_QUANTISED}, {_NEEDS}) -> (Tensor, Tensor, Tensor)"
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
    """The call as an operator. The checks run in its fake kernel, on shapes alone."""
    if isinstance(x, QuantizedRows):
        raise refusal("grouped_gemm", "x", "a call that torch traces")
    if untraceable:
        raise InputError(
            "grouped_gemm: out=, autotune=True and kernel_config_* can't be traced by torch.compile or "
            "torch.export: leave them out, or call outside"
        )
    if tensors.duals._current_level >= 0:  # (whether a tensor has a tangent can't be traced)
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
        return lora_library.operator(x, w, low_rank_of(lora, x, m_sizes), *rest, expected_rows)
    y: torch.Tensor
    if isinstance(w, ExpertWeights):
        y = torch.ops.pretuned.grouped_gemm_quantised(x, *parts_of(w), *rest, dX_only, dW_only, expected_rows)
    else:
        y = torch.ops.pretuned.grouped_gemm(x, w, *rest, dX_only, dW_only, expected_rows)
    return y


def _forward(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    if tensors.duals._current_level >= 0:
        tensors.no_tangents("grouped_gemm", x, *rest)
    (*arguments, _dX_only, _dW_only), expected = with_expected(rest, CALL + 3)
    call, x = call_of(x, *(*arguments, expected))
    with without_autocast(x.device.type):
        return low_rank.forward(call, x)


def _forward_fake(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    (*arguments, _dX_only, _dW_only), expected = with_expected(rest, CALL + 3)
    call, x = call_of(x, *(*arguments, expected))
    return x.new_empty((call.y_rows, call.N))


def _quantised(x: torch.Tensor, *parts: Any) -> torch.Tensor:
    return _forward(x, weights_of(*parts[:PARTS]), *parts[PARTS:])


def _quantised_fake(x: torch.Tensor, *parts: Any) -> torch.Tensor:
    return _forward_fake(x, weights_of(*parts[:PARTS]), *parts[PARTS:])


def _backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor | ExpertWeights, *rest: Any
) -> tuple[torch.Tensor, ...]:
    (*parameters, needs), expected = with_expected(rest, CALL)
    call, rows = call_of(x, w, *(*parameters, False, expected))
    with without_autocast(x.device.type):
        dx, dw, dweights, dbias = backward(call, dy, rows, tuple(needs))
    dw = None if dw is None else dw.view(w.shape)
    return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in (dx, dw, dweights, dbias))


def _quantised_backward(dy: torch.Tensor, x: torch.Tensor, *parts: Any) -> tuple[torch.Tensor, ...]:
    dx, _, dweights, dbias = _backward(dy, x, weights_of(*parts[:PARTS]), *parts[PARTS:])
    return dx, dweights, dbias


def _quantised_backward_fake(dy: torch.Tensor, x: torch.Tensor, *parts: Any) -> tuple[torch.Tensor, ...]:
    dx, _, dweights, dbias = _backward_fake(dy, x, dy, *parts[PARTS:])
    return dx, dweights, dbias


def _backward_fake(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    (_m_sizes, _index, weights, bias, *_, needs), _ = with_expected(rest, CALL)
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
    form, *tensors_of = parts[:PARTS]
    m_sizes, index, weights, bias, *parameters, _zero_tail, dX_only, dW_only, ctx.expected = parts[PARTS:]
    saved = (x, *tensors_of, m_sizes, index, weights, bias)
    ctx.save_for_backward(*saved)
    ctx.kinds = kinds_of(saved)
    ctx.format = form
    ctx.parameters, ctx.form = parameters, Form(only_dx=dX_only, only_dw=dW_only)


def _quantised_gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    asked = ctx.needs_input_grad
    names = "x codes scale zero global_scale derived m_sizes gather_indices topk_weights bias"
    x, codes, scale, zero, outer, derived, *rest = as_kept("grouped_gemm", names, ctx.saved_tensors, ctx.kinds)
    weights_at = 1 + PARTS + 2  # x, w's parts, m_sizes, gather_indices
    needs = wanted((asked[0], False, False, asked[weights_at], asked[weights_at + 1]), ctx.form)
    results = torch.ops.pretuned.grouped_gemm_quantised_backward(
        dy, x, ctx.format, codes, scale, zero, outer, derived, *rest, *ctx.parameters, list(needs), ctx.expected
    )
    dx, dweights, dbias = (
        gradient if need else None for gradient, need in zip(results, (needs[0], *needs[2:]), strict=True)
    )
    return dx, *[None] * (PARTS + 2), dweights, dbias, *[None] * 9


torch.library.impl(_library, "grouped_gemm", "CompositeExplicitAutograd")(_forward)
torch.library.impl(_library, "grouped_gemm_backward", "CompositeExplicitAutograd")(_backward)
torch.library.impl(_library, "grouped_gemm_quantised", "CompositeExplicitAutograd")(_quantised)
torch.library.impl(_library, "grouped_gemm_quantised_backward", "CompositeExplicitAutograd")(_quantised_backward)
torch.library.register_fake("pretuned::grouped_gemm", _forward_fake, lib=_library)
torch.library.register_fake("pretuned::grouped_gemm_backward", _backward_fake, lib=_library)
torch.library.register_autograd("pretuned::grouped_gemm_backward", no_second, lib=_library)
torch.library.register_autograd("pretuned::grouped_gemm", _gradients, setup_context=_setup, lib=_library)
torch.library.register_fake("pretuned::grouped_gemm_quantised", _quantised_fake, lib=_library)
torch.library.register_fake("pretuned::grouped_gemm_quantised_backward", _quantised_backward_fake, lib=_library)
torch.library.register_autograd("pretuned::grouped_gemm_quantised_backward", no_second, lib=_library)
torch.library.register_autograd(
    "pretuned::grouped_gemm_quantised", _quantised_gradients, setup_context=_quantised_setup, lib=_library
)
