"""``torch.ops.pretuned.grouped_gemm_lora``: a product with an adapter, and its gradient, for what traces.

Imported only then, by ``torch_library.py``. w is a tensor, or there are the parts of quantised ones in its place.
"""

from __future__ import annotations

from typing import Any

import torch

from ..check.call import Form
from ..check.saved import as_kept, kinds_of
from ..driver.device import without_autocast
from ..ops import low_rank
from ..ops.autograd import wanted, with_adapter
from ..ops.low_rank import LowRank
from ..weights.expert_weights import ExpertWeights
from .adapted import check_columns
from .operator_call import CALL, EXPECTED, PARTS, REST, call_of, no_second, parts_of, weights_of, with_expected

_WEIGHTS = "Tensor? w, str format, Tensor? codes, Tensor? w_scale, Tensor? zero, Tensor? global_scale, Tensor? derived"
_CALL = f"Tensor A, Tensor B, float scale, {_WEIGHTS}, {REST}"
_LOW, _W = 3, 1 + PARTS
_ALL = _LOW + _W + CALL  # arguments from A on, with zero_tail or needs as the last

_library: Any = torch.library.Library("pretuned", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"grouped_gemm_lora(Tensor x, {_CALL}, bool zero_tail, {EXPECTED}) -> (Tensor, Tensor)")
_library.define(
    f"grouped_gemm_lora_backward(Tensor dy, Tensor x, Tensor u, {_CALL}, bool[] needs, {EXPECTED}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def operator(x: torch.Tensor, w: torch.Tensor | ExpertWeights, adapter: LowRank, *rest: Any) -> torch.Tensor:
    """y by the operator; ``rest`` are its arguments from m_sizes on."""
    parts: tuple[Any, ...] = (w, "", None, None, None, None, None)
    if isinstance(w, ExpertWeights):
        parts = (None, *parts_of(w))
    y, _ = torch.ops.pretuned.grouped_gemm_lora(x, *adapter, *parts, *rest)
    return y  # type: ignore[no-any-return]


def _weights(w: torch.Tensor | None, *parts: Any) -> torch.Tensor | ExpertWeights:
    return weights_of(*parts) if w is None else w


def _forward(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    (A, B, scale, *rest), expected = with_expected(arguments, _ALL)
    call, x = call_of(x, _weights(*rest[:_W]), *(*rest[_W:], expected))
    check_columns(B, call.N)
    with without_autocast(x.device.type):
        y, u = low_rank.with_adapter(call, x, LowRank(A, B, scale))
    if u is None:
        raise AssertionError("an adapter makes u")
    return y, u


def _forward_fake(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments, expected = with_expected(arguments, _ALL)
    call, x = call_of(x, _weights(*arguments[_LOW : _LOW + _W]), *(*arguments[_LOW + _W :], expected))
    check_columns(arguments[1], call.N)
    return x.new_empty((call.y_rows, call.N)), x.new_empty((call.M, arguments[0].shape[1]))


def _backward(dy: torch.Tensor, x: torch.Tensor, u: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    (A, B, scale, *rest, needs), expected = with_expected(arguments, _ALL)
    w = _weights(*rest[:_W])
    call, rows = call_of(x, w, *(*rest[_W:], False, expected))
    with without_autocast(x.device.type):
        kept = u if needs[4] else None
        dx, dw, *others = with_adapter(call, dy, rows, tuple(needs[:4]), LowRank(A, B, scale), kept)
    dw = None if dw is None else dw.view(w.shape)
    return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in (dx, dw, *others))


def _backward_fake(dy: torch.Tensor, x: torch.Tensor, u: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    arguments, _ = with_expected(arguments, _ALL)
    A, B, _scale, w, *_ = arguments
    _m_sizes, _index, weights, bias, *_ = arguments[_LOW + _W :]
    needs = [*arguments[-1], arguments[-1][4]]
    like = (x, w, weights, bias, A, B)
    return tuple(
        tensor.new_empty(tensor.shape) if need and tensor is not None else dy.new_empty(0)
        for tensor, need in zip(like, needs, strict=True)
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, A, B, scale, w, form, *parts_and_rest = inputs
    parts = parts_and_rest[: PARTS - 1]
    m_sizes, index, weights, bias, *parameters, _zero_tail, ctx.expected = parts_and_rest[PARTS - 1 :]
    saved = (x, output[1], A, B, w, *parts, m_sizes, index, weights, bias)
    ctx.save_for_backward(*saved)
    ctx.kinds = kinds_of(saved)
    ctx.scale, ctx.format, ctx.parameters = scale, form, parameters


def _gradients(ctx: Any, dy: torch.Tensor, _du: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    asked = ctx.needs_input_grad
    at = 1 + _LOW + _W + 2  # topk_weights, after m_sizes and gather_indices
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
    none = [None] * PARTS
    return dx, dA, dB, None, dw, *none, None, None, dweights, dbias, *[None] * (len(ctx.parameters) + 2)


torch.library.impl(_library, "grouped_gemm_lora", "CompositeExplicitAutograd")(_forward)
torch.library.impl(_library, "grouped_gemm_lora_backward", "CompositeExplicitAutograd")(_backward)
torch.library.register_fake("pretuned::grouped_gemm_lora", _forward_fake, lib=_library)
torch.library.register_fake("pretuned::grouped_gemm_lora_backward", _backward_fake, lib=_library)
torch.library.register_autograd("pretuned::grouped_gemm_lora_backward", no_second, lib=_library)
torch.library.register_autograd("pretuned::grouped_gemm_lora", _gradients, setup_context=_setup, lib=_library)
