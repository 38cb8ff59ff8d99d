"""Copies of transformers' and torch's own code, for ``gates.py`` to compare with. None is ever run.

The instructions of each are those of the function that it is named after, names of locals and all. A function that
transformers changes is no longer recognised: its own code runs between two products, until the copy is changed, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)


def default_apply_gate(self: Any, gate_up_out: torch.Tensor) -> Any:
    gate, up = gate_up_out.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def beam(self: Any, gate_up: torch.Tensor) -> Any:
    gate, up = gate_up.chunk(2, dim=-1)
    return (self.act_fn(gate.float()) * up.float()).to(gate.dtype)


def gpt_oss(self: Any, gate_up: torch.Tensor) -> Any:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(min=None, max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    glu = gate * torch.sigmoid(gate * self.alpha)
    gated_output = (up + 1) * glu
    return gated_output  # noqa: RET504


def openai_privacy_filter(self: Any, gate_up: torch.Tensor) -> Any:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(min=None, max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    glu = gate * torch.sigmoid(gate * self.alpha)
    gated_output = (up + 1) * glu
    return gated_output  # noqa: RET504


def minimax_m3_vl(self: Any, gate_up: torch.Tensor) -> Any:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=self.swiglu_limit)
    up = up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
    glu = gate * torch.sigmoid(gate * self.swiglu_alpha)
    return (up + 1.0) * glu


def deepseek_v4(self: Any, gate_up: torch.Tensor) -> Any:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    return self.act_fn(gate) * up


def hy_v4(self: Any, gate_up: torch.Tensor) -> Any:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(min=None, max=self.swiglu_limit)
    up = up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
    return F.silu(gate) * up


def step3p7(self: Any, gate_up: torch.Tensor) -> Any:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = self.act_fn(gate).clamp(max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    return gate * up


def inkling2(self: Any, gate_up: torch.Tensor) -> Any:
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate, up)


def fp8(self: Any, gate_up: torch.Tensor) -> Any:
    gate, up = gate_up.chunk(2, dim=-1)
    if self.gate_softcap is not None:
        input_dtype = gate.dtype
        gate, up = gate.float(), up.float()
        gate_factor = torch.tanh(gate / self.gate_softcap) * self.gate_softcap
        up = torch.tanh(up / self.up_softcap) * self.up_softcap
        return (gate_factor * torch.sigmoid(gate) * up).to(input_dtype)
    if self.swiglu_alpha is not None:
        gate = gate.clamp(max=self.swiglu_limit)
        up = up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
        glu = gate * torch.sigmoid(gate * self.swiglu_alpha)
        return (up + 1.0) * glu
    elif self.limit is not None:  # noqa: RET505 (the instructions are transformers')
        gate = gate.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
    return self.act_fn(gate) * up


def silu(self: Any, input: torch.Tensor) -> Any:
    return nn.functional.silu(input)


def softcap(self: Any, hidden_states: torch.Tensor) -> Any:
    return torch.tanh(hidden_states / self.softcap) * self.softcap


def softcapped(self: Any, gate: torch.Tensor, up: torch.Tensor) -> Any:
    input_dtype = gate.dtype
    gate, up = gate.float(), up.float()
    return (self.gate_softcap(gate) * torch.sigmoid(gate) * self.up_softcap(up)).to(input_dtype)


def its_act(self: Any, input: torch.Tensor) -> Any:
    return self.act(input)


def relu_squared(self: Any, input: torch.Tensor) -> Any:
    relu_applied = nn.functional.relu(input)
    squared = torch.square(relu_applied)
    return squared  # noqa: RET504


def torch_s_silu(self: Any, input: torch.Tensor) -> Any:
    return F.silu(input, inplace=self.inplace)


def torch_s_gelu(self: Any, input: torch.Tensor) -> Any:
    return F.gelu(input, approximate=self.approximate)


def peft_factors(self: Any, W: Any) -> Any:
    """PEFT's parameter with one adapter."""
    with torch.autocast(device_type=W.device.type, enabled=False):
        return torch.baddbmm(W, self.lhs, self.rhs, alpha=self.scaling)
