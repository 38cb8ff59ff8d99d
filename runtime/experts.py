"""The experts of transformers' models: ``experts_implementation="pretuned"``.

    from pretuned.runtime.experts import experts_forward
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register("pretuned", experts_forward)
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", experts_implementation="pretuned")

transformers, from 5.8 on, hands a function so registered the experts' module, with how its weights lie as attributes,
the tokens and their routing. Nothing here imports it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .activation import GATED, UNGATED, Activation, by_torch
from .moe import moe_mlp, sort_routing
from .ops import grouped_gemm

# By module: whether it was in training, its act_fn, and what was found then.
_Tried = tuple[bool, Callable[[], Any], Activation | None]
_activations: weakref.WeakKeyDictionary[torch.nn.Module, _Tried] = weakref.WeakKeyDictionary()
_transformed = torch._C._are_functorch_transforms_active


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """out[t] = sum over slots s of weight[t, s] * expert[t, s](hidden[t]); an id past the last expert takes no part.

    ``self`` is the experts' module: gate_up_proj (up_proj without a gate) and down_proj, [E, N, K] or, with
    ``is_transposed``, [E, K, N]. hidden_states is [T, H], top_k_index and top_k_weights are [T, k].

    One ``moe_mlp`` where what the module does between its products is an activation that it knows, and has no
    parameters, buffers or hooks of its own; else, and where torch.compile traces it, two grouped GEMMs around the
    module's own code.
    """
    gated, normed = getattr(self, "has_gate", True), getattr(self, "has_post_expert_norm", False)  # later ones have it
    first, first_bias = ("gate_up_proj", "gate_up_proj_bias") if gated else ("up_proj", "up_proj_bias")
    w1, w2 = getattr(self, first), self.down_proj
    b1, b2 = (getattr(self, first_bias), self.down_proj_bias) if self.has_bias else (None, None)
    layout = "kn" if self.is_transposed else "nk"
    hidden = hidden_states.to(w1.dtype)
    own = torch.compiler.is_compiling() or normed or _has_state(self, (first, first_bias))
    act = None if own else _activation(self, gated)
    if act is not None:
        out = moe_mlp(
            hidden, w1, w2, top_k_index, top_k_weights, act.name, gated=gated, interleaved=act.interleaved,
            gate_up_bias=b1, down_bias=b2, w_layout=layout,
        )  # fmt: skip
        return out.to(hidden_states.dtype)
    (T, k), E = top_k_index.shape, w1.shape[0]
    routing = sort_routing(top_k_index, E)
    rows, m_sizes = routing.gather_indices, routing.m_sizes
    # Zeros in rows of no expert: nothing reads them, but a gradient of the module's own code may not make them NaN.
    h = grouped_gemm(hidden, w1, m_sizes, k, rows, permute_x=True, w_layout=layout, bias=b1, zero_tail=True)
    a = self._apply_gate(h) if gated else self.act_fn(h)
    y = grouped_gemm(a, w2, m_sizes, k, rows, permute_y=True, is_first_gemm=False, w_layout=layout, bias=b2)
    y = self.post_expert_norm(y) if normed else y
    wide = torch.promote_types(y.dtype, torch.float32)
    weights = top_k_weights.masked_fill(top_k_index >= E, 0)[..., None].to(wide)
    return (y.view(T, k, -1).to(wide) * weights).sum(1).to(hidden_states.dtype)


def _has_state(experts: Any, first: tuple[str, str]) -> bool:
    """Whether what is between the products may change or be looked at: by parameters, buffers or hooks of its own."""
    weights = {*first, "down_proj", "down_proj_bias"}
    if experts._buffers or not experts._parameters.keys() <= weights:
        return True
    for name, child in experts._modules.items():
        if child is None or (name == "parametrizations" and child._modules.keys() <= weights):  # the weights' own
            continue
        for one in () if name == "post_expert_norm" else child.modules():
            if (
                one._parameters or one._buffers or one._forward_hooks or one._forward_pre_hooks
                or one._backward_hooks or one._backward_pre_hooks
            ):  # fmt: skip
                return True
    return False


def _activation(experts: Any, gated: bool) -> Activation | None:
    """What ``activate`` has that does what the module does between its products, found by trying it; or None.

    It is tried again where the module has changed between training and not, or its ``act_fn`` has.
    """
    training, act_fn = experts.training, getattr(experts, "act_fn", None)
    act_fn = getattr(act_fn, "__func__", act_fn)  # of the class: each look at it makes another method
    tried = _activations.get(experts)
    if tried is not None and tried[0] is training and tried[1]() is act_fn:
        return tried[2]
    if _transformed():
        return None
    h = 4 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)
    h = torch.cat([h, 64 * h, 4096 * h])  # large ones, too: a module may clamp what is above some limit
    if type(h) is not torch.Tensor:
        return None  # nothing but shapes is computed now: it is tried with the first numbers
    known = [Activation(name, True, turned) for name in GATED for turned in (False, True)]
    known = known if gated else [Activation(name, False, False) for name in UNGATED]
    with torch.no_grad():
        try:
            does = experts._apply_gate(h) if gated else experts.act_fn(h)
            same = [act for act in known if torch.allclose(does, by_torch(h, act), rtol=1e-5, atol=1e-6)]
        except Exception:  # code of somebody else: it may want the module's own device or number of columns
            same = []
    found = same[0] if same else None
    try:
        then: Callable[[], Any] = weakref.ref(act_fn)  # it may hold the module
    except TypeError:
        then = functools.partial(_itself, act_fn)
    _activations[experts] = training, then, found
    return found


def _itself(one: object) -> object:
    return one
