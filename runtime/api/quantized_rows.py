"""``grouped_gemm`` on x that arrives as codes. Checks use a tensor without values in place of x; no gradient."""

from __future__ import annotations

import torch

from ...artifacts.errors import InputError
from ..check import tensors
from ..check.call import Form, check
from ..driver.device import without_autocast
from ..ops import low_rank
from ..weights.expert_weights import ExpertWeights
from ..weights.quantized_rows import QuantizedRows, checked


def run(
    coded: QuantizedRows,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    form: Form,
    *,
    gather_indices: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    fuse_mul_post: bool,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    lora: object,
    expected_rows: int | None,
) -> torch.Tensor:
    """y of ``grouped_gemm``, in bfloat16.

    Raises
    ------
    InputError
        for a tensor that can't be used, for a gradient or an adapter, and if no kernel reads x as codes.
    """
    (codes, scale), x = checked("grouped_gemm", "x", coded, w), coded.stand_in()
    if tensors.is_traced(x, codes, scale, m_sizes, gather_indices, topk_weights, bias):
        raise refusal("grouped_gemm", "x", "a call that torch traces")
    if lora is not None:
        raise refusal("grouped_gemm", "x", "lora")
    parts = gather_indices, topk_weights, fuse_mul_post, bias, out, expected_rows
    call, _ = check(x, w, m_sizes, form, *parts, copies=False)
    if out is not None:
        tensors.check_apart(out, **{"x.codes": codes, "x.scale": scale})
    learns = any(tensor is not None and tensor.requires_grad for tensor in (topk_weights, bias))
    if torch.is_grad_enabled() and learns:
        raise refusal("grouped_gemm", "x", "a gradient")
    with without_autocast(codes.device.type):
        y = low_rank.forward(call, codes, out, x_scale=scale)
    if out is not None:
        torch.autograd.graph.increment_version(out)
    return y


def refusal(call: str, name: str, what: str) -> InputError:
    """The InputError of a call that has QuantizedRows as argument ``name``, and ``what``, which excludes them."""
    return InputError(f"{call}: {name} is QuantizedRows, and there is {what}: pass bfloat16 rows, or leave it out")
