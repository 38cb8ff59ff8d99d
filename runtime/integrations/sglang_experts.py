"""SGLang's MoE layers without quantisation on pretuned: the runner's core, and which layers it is for.

A layer of which any part is none of pretuned's stays with the runner that SGLang chose, and why is told once. Weights
are used as SGLang loaded them, w13 [E, 2*I, H] and w2 [E, H, I]: nothing is copied, packed or kept.

Imported inside SGLang alone, by ``sglang.py``.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner import runner as moe_runner
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend, resolve_moe_runner_backend
from sglang.srt.runtime_context import get_server_args

from ..runtime.api.moe import moe_mlp
from ..runtime.check.tensors import DTYPES
from ..runtime.driver.device import current_device, local_gpu
from ..runtime.ops.activation import OAI_ALPHA, OAI_LIMIT, Activation
from .served_layer import ServedLayer, lacks, load

NAME = "pretuned"
_TOKENS = 8192  # of a step, where SGLang's settings say nothing

_log = logging.getLogger("sglang.pretuned")


def take(method: Any, config: Any, *, everywhere: bool) -> None:
    """Give a layer's method pretuned's runner, if pretuned has all that the layer has; else tell why not, once.

    ``everywhere``: also where no bundle was built for the layer, and by the reference where there is no GPU.
    """
    own = method.runner.runner_backend
    why = refusal(method, config, everywhere=everywhere)
    if why is not None:
        what = f"E={config.num_local_experts} H={config.hidden_size} I={config.intermediate_size_per_partition}"
        _tell(f"pretuned: leaves the MoE layers of {what} to SGLang's {own.value} runner: {why}")
        return
    _register_core()
    method.runner = moe_runner.MoeRunner(resolve_moe_runner_backend(NAME), config)
    _tell(f"pretuned: runs the MoE layers of {layer_of(config)}")


def refusal(method: Any, config: Any, *, everywhere: bool) -> str | None:
    """Why a layer with this MoeRunnerConfig is none of pretuned's; None if it is."""
    own, asked = method.runner.runner_backend, get_moe_runner_backend()
    if not own.is_triton():
        return "its weights lie in an order of its own"
    if not (asked.is_auto() or asked.value == NAME):
        return f"--moe-runner-backend {asked.value} asks for it"
    if not get_moe_a2a_backend().is_none():
        return f"the all-to-all of {get_moe_a2a_backend().value} hands over tokens in a form of its own"
    if getattr(method, "_aiter_runner", None) is not None:
        return "aiter runs it"
    if getattr(_settings(), "enable_lora", False):
        return "LoRA adapters (--enable-lora)"
    if config.params_dtype not in DTYPES:
        return f"the dtype {config.params_dtype} is none of pretuned's (bfloat16, float16, float32)"
    if activation_of(config) is None:
        settings = config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit
        return f"the activation {config.activation} with alpha and limits of {settings} is none of pretuned's"
    if config.no_combine:
        return "the sum over a token's experts is made elsewhere (no_combine)"
    if torch.cuda.is_available() and torch.version.cuda:
        tokens = getattr(_settings(), "chunked_prefill_size", None) or _TOKENS
        local = local_gpu(current_device())
        return lacks(layer_of(config), local, tokens=max(tokens, 1), any_variant=everywhere)
    return None if everywhere else "pretuned has no kernels for the CPU (PRETUNED_SGLANG=1 runs its reference there)"


def activation_of(config: Any) -> Activation | None:
    """The activation of ``moe_mlp`` that a layer has."""
    limits = config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit
    if limits == (OAI_ALPHA, OAI_LIMIT, None) and config.activation == "silu" and config.is_gated:
        return Activation("swiglu_oai", True, bool(config.gate_up_interleaved))
    known = ("silu", "gelu", "gelu_tanh") if config.is_gated else ("silu", "gelu", "relu2")
    if limits != (None, None, None) or config.activation not in known:
        return None
    return Activation(config.activation, bool(config.is_gated), False)


def layer_of(config: Any) -> ServedLayer:
    """This rank's part of a layer."""
    act = activation_of(config)
    if act is None:
        raise AssertionError(f"{config.activation} was refused")
    return ServedLayer(
        config.num_local_experts, config.hidden_size, config.intermediate_size_per_partition, config.top_k,
        DTYPES[config.params_dtype], act,
    )  # fmt: skip


def _settings() -> Any:
    """SGLang's arguments, or None where a layer is made without an engine."""
    try:
        return get_server_args()
    except (AttributeError, LookupError, RuntimeError, ValueError):
        return None


@functools.cache
def _tell(line: str) -> None:
    _log.info("%s", line)


@functools.cache
def _register_core() -> None:
    moe_runner.register_moe_runner_core(NAME, PretunedRunnerCore)


class PretunedRunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
    """One ``moe_mlp`` a layer: sorted, multiplied, weighted and summed over each token's experts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._act = layer_of(config).act
        if torch.cuda.is_available() and torch.version.cuda:
            loaded = load(layer_of(config), current_device())
            _tell(f"pretuned: {loaded.count} kernels loaded in {loaded.seconds * 1e3:.1f} ms")

    @property
    def runner_backend(self) -> Any:
        """Its name in SGLang's registry."""
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None) -> Any:
        """The layer on the tokens [T, H] of a dispatch; an id of -1, of another rank's expert, takes no part."""
        x, (weights, ids, *_) = dispatch_output.hidden_states, dispatch_output.topk_output
        out = moe_mlp(
            x, quant_info.w13_weight, quant_info.w2_weight, ids, weights, self._act.name, gated=self._act.gated,
            interleaved=self._act.interleaved or quant_info.fuse_swiglu_interleaved,
            gate_up_bias=_in(quant_info.b13, x), down_bias=_in(quant_info.b2, x),
            weights_on="input" if runner_config.apply_router_weight_on_input else "output",
        )  # fmt: skip
        factor = runner_config.routed_scaling_factor
        return StandardCombineInput(hidden_states=out if factor in (None, 1.0) else out.mul_(factor))


def _in(bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    return None if bias is None else bias.to(x.dtype)
