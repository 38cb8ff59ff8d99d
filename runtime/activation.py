"""The activations of MoE layers, between the two GEMMs: plain torch, differentiable."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..artifacts.errors import InputError

GATED = ("silu", "gelu", "gelu_tanh", "swiglu_oai")
UNGATED = ("silu", "gelu", "gelu_tanh", "relu2")

_OAI_LIMIT = 7.0  # gpt-oss: openai/gpt-oss model card and its reference implementation
_OAI_ALPHA = 1.702


def activate(
    h: torch.Tensor, activation: str = "silu", *, gated: bool = True, interleaved: bool = False
) -> torch.Tensor:
    """act(gate) * up of h [M, 2*I] -> [M, I]; without a gate act(h) of h [M, I]. In h's dtype.

    Gate and up are h's halves, or with ``interleaved`` its even and odd columns.

    ``silu``: gate * sigmoid(gate). ``gelu``: exact; ``gelu_tanh``: its tanh form. ``swiglu_oai`` (gpt-oss): gate
    clamped to at most 7, up to [-7, 7], then (up + 1) * gate * sigmoid(1.702 * gate). ``relu2`` (ungated): max(h, 0)^2.
    torch computes each operation in float32; silu, gelu and relu2 round each result to h's dtype, swiglu_oai the last.

    Raises
    ------
    InputError
        for an activation that is not known, or not with (without) a gate.
    """
    check_activation(activation, gated=gated, interleaved=interleaved)
    if not gated:
        return _one(activation, h)
    if h.shape[-1] % 2:
        raise InputError(f"moe_mlp: gate and up have {h.shape[-1]} columns together, wanted an even number")
    if interleaved:
        gate, up = h[..., ::2], h[..., 1::2]
    else:
        gate, up = h.chunk(2, -1)
    if activation != "swiglu_oai":
        return _one(activation, gate) * up
    if h.dtype in (torch.bfloat16, torch.float16):
        gate, up = gate.float(), up.float()
    gate, up = gate.clamp(max=_OAI_LIMIT), up.clamp(-_OAI_LIMIT, _OAI_LIMIT)
    return ((up + 1) * (gate * torch.sigmoid(_OAI_ALPHA * gate))).to(h.dtype)


def check_activation(activation: str, *, gated: bool, interleaved: bool) -> None:
    """Raise InputError unless ``activate`` knows it."""
    known = GATED if gated else UNGATED
    if activation not in known:
        raise InputError(
            f"moe_mlp: activation is {activation!r}, wanted one of {', '.join(known)} with gated={gated}"
            + (" (relu2 has no gate: pass gated=False)" if activation == "relu2" else "")
        )
    if interleaved and not gated:
        raise InputError(
            "moe_mlp: interleaved=True with gated=False: without a gate nothing is interleaved. Leave it out"
        )


def _one(activation: str, h: torch.Tensor) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(h)
    if activation == "relu2":
        return functional.relu(h).square()
    return functional.gelu(h, approximate="tanh" if activation == "gelu_tanh" else "none")
