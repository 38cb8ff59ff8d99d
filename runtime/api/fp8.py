"""``precision="fp8"`` of ``grouped_gemm`` and ``moe_mlp``: what it takes, and the calls once their tensors are checked.

Checks look at outlines of the weights: tensors of their shape in x's dtype, without memory for their numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import DType, Layout, Op
from ...kernels.hopper_w8a8_block import GROUP
from ...kernels.registry import has_code
from ..check import tensors
from ..check.call import Form, casts, check
from ..driver.device import local_gpu, without_autocast
from ..ops import fp8_training, fp8_weights
from ..ops.layer import Layer, Weights
from ..ops.routing import Routing
from ..weights.expert_weights import ExpertWeights

_OF_WEIGHTS = (torch.bfloat16, torch.float32)


def checked_weights(
    call: str,
    precision: object,
    rows: dict[str, Any],
    weights: dict[str, Any],
    others: tuple[Any, ...],
    refused: dict[str, bool],
) -> tuple[list[Any], list[torch.Tensor]]:
    """x and biases, cast in a torch.autocast region, and an outline of each weight.

    ``rows`` are x and the biases, ``weights`` the weights, each by the caller's name; ``others`` the other tensors.

    Raises
    ------
    InputError
        for another precision, ``refused`` arguments that are there, and tensors that fp8 does not take.
    """
    if precision != "fp8":
        raise InputError(f"{call}: precision is {precision!r}, wanted 'fp8', or None for the precision of x and w")
    for name, there in refused.items():
        if there:
            raise InputError(f"{call}: precision='fp8' with {name}. Leave one of them out")
    (of_x, x), *_ = rows.items()
    if not isinstance(x, torch.Tensor):
        tensors.bad(of_x, f"a {type(x).__name__}, with precision='fp8'", "a bfloat16 tensor, or no precision", call)
    for name, w in weights.items():
        if isinstance(w, ExpertWeights):
            raise InputError(f"{call}: {name} is ExpertWeights, quantised already: leave precision out")
        tensors.tensors(call, **{name: w})
    if tensors.is_traced(x, *weights.values(), *others):
        raise InputError(
            f"{call}: precision='fp8' on a tensor that torch traces or that wraps others. Call it outside of "
            "torch.compile (torch.compiler.disable), on plain tensors (DTensor: to_local()), or leave precision out"
        )
    if casts(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        rows = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value
            for name, value in rows.items()
        }
        x = rows[of_x]
    if x.dtype is not torch.bfloat16:
        tensors.bad(of_x, f"{x.dtype}, with precision='fp8'", "torch.bfloat16, or float32 in torch.autocast", call)
    for name, w in weights.items():
        if w.dtype not in _OF_WEIGHTS:
            tensors.bad(name, f"{w.dtype}, with precision='fp8'", "torch.bfloat16 or torch.float32", call)
    local = local_gpu(x.get_device()) if tensors.on_gpu(x) else None
    if local is not None and not has_code(Op.FORWARD, DType.FP8_BLOCK, local.sm, Layout.NK):
        raise InputError(f"{call}: precision='fp8' on {local}, for which there are no kernels. Leave precision out")
    return list(rows.values()), [_outline(w, x.dtype) for w in weights.values()]


def check_whole(call: str, **sizes: int) -> None:
    """Raise InputError unless each size is a multiple of 128."""
    for name, size in sizes.items():
        if size % GROUP:
            raise InputError(
                f"{call}: {name}={size} with precision='fp8', wanted a multiple of {GROUP}: that many numbers share a "
                "scale. Leave precision out"
            )


def product(
    precision: str,
    x: torch.Tensor,
    w: torch.Tensor,
    m_sizes: torch.Tensor,
    form: Form,
    *,
    gather_indices: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    fuse_mul_post: bool,
    bias: torch.Tensor | None,
    lora: object,
    expected_rows: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """y of ``grouped_gemm`` with ``precision="fp8"``.

    Raises
    ------
    InputError
        for tensors that can't be used, and arguments that fp8 does not take.
    """
    tensors.tensors(m_sizes=m_sizes)
    refused = {"lora": lora is not None, "a kernel_config": form.pinned, "autotune": form.autotune}
    of_x, of_w, others = {"x": x, "bias": bias}, {"w": w}, (m_sizes, gather_indices, topk_weights, bias)
    (x, bias), (outline,) = checked_weights("grouped_gemm", precision, of_x, of_w, others, refused)
    fused = gather_indices, topk_weights, fuse_mul_post, bias, out, expected_rows
    call, x = check(x, outline, m_sizes, form, *fused)
    check_whole("grouped_gemm", N=call.N, K=call.K)
    index, weights, bias = call.fusions.index, call.fusions.weights, call.fusions.bias
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, weights, bias))
    if out is not None:
        tensors.check_apart(out, w=w)
        if learns:
            raise InputError(
                "grouped_gemm: out with an input that requires grad has no gradient. Leave out away, or use "
                "torch.no_grad()"
            )
    w3 = tensors.three_dimensional(w, m_sizes.shape[0], form.layout)
    with without_autocast(x.device.type):
        fp8 = fp8_weights.of_forward(w, w3, form.layout, learns=learns)
        if learns:
            how = call.form, (call.M, call.x_rows, call.y_rows), fp8
            y: torch.Tensor = fp8_training.Fp8Gemm.apply(x, w3, call.m_sizes, weights, bias, index, *how)  # type: ignore[no-untyped-call]
            return y
        y = fp8_training.product(call._replace(w=fp8.of_forward), x, out)
    if out is not None:  # a launch changes it unseen
        torch.autograd.graph.increment_version(out)
    return y


def layer(
    x: torch.Tensor,
    parameters: Weights,
    routing: Routing,
    topk_weights: torch.Tensor,
    how: Layer,
    into: torch.Tensor | None,
) -> torch.Tensor:
    """The result [T, H] of a checked layer, whose weights are the caller's own."""
    gate_up, down, *_ = parameters
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, topk_weights, *parameters))
    with without_autocast(x.device.type):
        first, second = (fp8_weights.of_forward(w, w, how.layout, learns=learns) for w in (gate_up, down))
        fp8, biases = (first, second), (parameters.gate_up_bias, parameters.down_bias)
        if learns:
            out: torch.Tensor = fp8_training.Fp8Layer.apply(x, *parameters, topk_weights, routing, how, fp8)  # type: ignore[no-untyped-call]
            return out
        same = into is not None and into.dtype is x.dtype
        run = fp8_training.layer_forward
        result, _ = run(how, x, fp8, biases, routing, topk_weights, keeps_h=False, into=into if same else None)
    return result if into is None or same else into.copy_(result)


def _outline(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(w.shape[-1:], dtype=dtype, device=w.device).expand(w.shape)
