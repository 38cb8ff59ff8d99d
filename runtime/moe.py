"""A whole MoE layer: sort the routing, gather, two grouped GEMMs with an activation between, scatter, sum over k."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..artifacts.errors import InputError
from .activation import activate, check_activation
from .ops import grouped_gemm


@dataclass(frozen=True, slots=True)
class Routing:
    """Each expert's rows: ``gather_indices`` [T*k], the flat token*k + slot of each sorted row; ``m_sizes`` [E]."""

    gather_indices: torch.Tensor
    m_sizes: torch.Tensor


def sort_routing(topk_ids: torch.Tensor, E: int) -> Routing:
    """Sort the (token, slot) pairs by expert, stably. Nothing is read on the host, so it can be captured.

    topk_ids [T, k], any integer type: an id outside [0, E) (an expert on another rank) is sorted past the
    last expert and takes no part.
    """
    # int32 sorts in half the passes of int64.
    flat = topk_ids.reshape(-1).to(torch.int32)
    flat = torch.where((flat < 0) | (flat >= E), E, flat)
    experts, order = torch.sort(flat, stable=True)
    bounds = torch.searchsorted(experts, torch.arange(E + 1, dtype=torch.int32, device=flat.device))
    return Routing(order, (bounds[1:] - bounds[:-1]).to(torch.int32))


def moe_mlp(
    hidden: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
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
) -> torch.Tensor:
    """out[t] = sum over slots s of weight[t, s] * (act(hidden[t] @ gate_up[e].T) @ down[e].T), e = topk_ids[t, s].

    Parameters
    ----------
    hidden
        [T, H] (or [..., H], flattened) bfloat16, float16 or float32; float64 on the CPU.
    gate_up_weight, down_weight
        [E, 2*I, H] and [E, H, I] in hidden's dtype; [E, I, H] for the first with ``gated=False``. With
        ``w_layout="kn"`` they are [E, H, 2*I] and [E, I, H].
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

    Returns
    -------
    torch.Tensor
        [T, H] in hidden's dtype, in hidden's shape. Slots are summed in their order, in fp32, and rounded once.

    Raises
    ------
    InputError
        for tensors that can't be used, or parameters that exclude each other.
    """
    check_activation(activation, gated=gated, interleaved=interleaved)
    if weights_on not in ("output", "input"):
        raise InputError(f"moe_mlp: weights_on is {weights_on!r}, wanted 'output' or 'input'")
    x = hidden.reshape(-1, hidden.shape[-1])
    T, k = topk_ids.shape if topk_ids.dim() == 2 else (-1, -1)
    if x.shape[0] != T or topk_weights.shape != topk_ids.shape:
        raise InputError(
            f"moe_mlp: topk_ids is {list(topk_ids.shape)} and topk_weights {list(topk_weights.shape)}, "
            f"wanted both [T, k] with T={x.shape[0]}, the tokens of hidden"
        )
    if gate_up_weight.dim() != 3 or down_weight.dim() != 3 or gate_up_weight.shape[0] != down_weight.shape[0]:
        raise InputError(
            f"moe_mlp: gate_up_weight is {list(gate_up_weight.shape)} and down_weight {list(down_weight.shape)}, "
            "wanted three dimensions with the same number of experts first"
        )
    routing = sort_routing(topk_ids, gate_up_weight.shape[0])
    index, m_sizes = routing.gather_indices, routing.m_sizes
    if weights_on == "output" or gate_up_bias is None:  # a product without a bias is linear: weighting it is the same
        first = weights_on == "input"
        h = grouped_gemm(
            x, gate_up_weight, m_sizes, k, index, permute_x=True, topk_weights=topk_weights if first else None,
            fuse_mul_post=first, w_layout=w_layout, bias=gate_up_bias,
        )  # fmt: skip
    else:
        wide = torch.promote_types(x.dtype, torch.float32)
        weighted = (x[:, None, :].to(wide) * topk_weights[:, :, None].to(wide)).to(x.dtype)
        h = grouped_gemm(
            weighted.reshape(T * k, -1), gate_up_weight, m_sizes, 1, index, permute_x=True, w_layout=w_layout,
            bias=gate_up_bias,
        )  # fmt: skip
    h = activate(h, activation, gated=gated, interleaved=interleaved)
    last = weights_on == "output"
    # Without weights T is told by y's rows alone, which are those of the index: T*k.
    y = grouped_gemm(
        h, down_weight, m_sizes, k, index, permute_y=True, topk_weights=topk_weights if last else None,
        fuse_mul_post=last, is_first_gemm=False, w_layout=w_layout, bias=down_bias,
    )  # fmt: skip
    return y.view(T, k, y.shape[-1]).sum(1).view(hidden.shape)
