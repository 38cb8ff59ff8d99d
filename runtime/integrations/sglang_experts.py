"""SGLang's MoE layers on pretuned, without quantisation and in fp8 blocks: the runner's core, and which it is for.

A layer of which any part is none of pretuned's stays with the runner that SGLang chose, and why is told once. Weights
are used as SGLang loaded them, w13 [E, 2*I, H] and w2 [E, H, I]: nothing is copied or packed; codes are put into the
kernels' order in place.

Imported inside SGLang alone, by ``sglang.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner import runner as moe_runner
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend, resolve_moe_runner_backend
from sglang.srt.runtime_context import get_server_args

from ..artifacts.records.precision import DType
from ..kernels.contract.mixed_input import SIZES, prepares
from ..runtime.api.moe import moe_mlp
from ..runtime.check.tensors import DTYPES
from ..runtime.driver.device import current_device, local_gpu
from ..runtime.ops.activation import OAI_ALPHA, OAI_LIMIT, Activation
from ..runtime.weights.expert_weights import ExpertWeights
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
    served = layer_of(config, dtype_of(method, config))
    _tell(f"pretuned: runs the MoE layers of {served}")
    if torch.cuda.is_available() and torch.version.cuda:
        done = load(served, current_device())
        _tell(f"pretuned: {done.count} kernels loaded in {done.seconds * 1e3:.1f} ms")


def refusal(method: Any, config: Any, *, everywhere: bool) -> str | None:
    """Why a layer with this MoeRunnerConfig is none of pretuned's; None if it is."""
    if getattr(method, "runner", None) is None:  # of fp8 on backends that have none
        return "it has no runner"
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
    if (why := _unread(method, config)) is not None:
        return why
    if torch.cuda.is_available() and torch.version.cuda:
        tokens = getattr(_settings(), "chunked_prefill_size", None) or _TOKENS
        local = local_gpu(current_device())
        return lacks(layer_of(config, dtype_of(method, config)), local, tokens=max(tokens, 1), any_variant=everywhere)
    return None if everywhere else "pretuned has no kernels for the CPU (PRETUNED_SGLANG=1 runs its reference there)"


def _is_fp8(method: Any) -> bool:
    return hasattr(method, "block_quant")


def dtype_of(method: Any, config: Any) -> DType:
    """Of the weights of a layer, as their checkpoint has them."""
    return DType.FP8_BLOCK if _is_fp8(method) else DTYPES[config.params_dtype]


def _unread(method: Any, config: Any) -> str | None:
    """Why quantised weights are none that pretuned reads; None if they are, or are not quantised."""
    if not _is_fp8(method):
        return None
    how = method.quant_config
    if method.use_mxfp8 or method.is_fp4_expert or list(method.weight_block_size or ()) != [128, 128]:
        return f"its fp8 weights have no scale for each 128 x 128 (blocks of {method.weight_block_size})"
    if not how.is_checkpoint_fp8_serialized or how.activation_scheme != "dynamic":
        return "its weights are quantised at load, or its tokens with static scales"
    if torch.cuda.is_available() and config.params_dtype is not torch.bfloat16:
        return f"tokens are {config.params_dtype}: beside quantised weights kernels read bfloat16"
    for problem in layer_of(config, DType.FP8_BLOCK).problems:
        if not prepares(problem.dtype, problem.N, problem.K):
            return f"no kernel is for {problem}: {SIZES}"
    return None


def prepare(layer: Any) -> None:
    """Read a layer's codes as SGLang has just loaded them, and put them into the kernels' order, in place."""
    layer._pretuned_weights = [
        ExpertWeights.fp8_block(codes.data, scale.data).prepare()
        for codes, scale in (
            (layer.w13_weight, layer.w13_weight_scale_inv), (layer.w2_weight, layer.w2_weight_scale_inv),
        )
    ]  # fmt: skip


def run(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """The layer of a dispatch's tokens, by the weights that were prepared."""
    w13, w2 = layer._pretuned_weights
    info = dataclasses.replace(method.get_triton_quant_info(layer), w13_weight=w13, w2_weight=w2)
    return method.runner.run(dispatch_output, info)


def activation_of(config: Any) -> Activation | None:
    """The activation of ``moe_mlp`` that a layer has."""
    limits = config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit
    if limits == (OAI_ALPHA, OAI_LIMIT, None) and config.activation == "silu" and config.is_gated:
        return Activation("swiglu_oai", True, bool(config.gate_up_interleaved))
    known = ("silu", "gelu", "gelu_tanh") if config.is_gated else ("silu", "gelu", "relu2")
    if limits != (None, None, None) or config.activation not in known:
        return None
    return Activation(config.activation, bool(config.is_gated), False)


def layer_of(config: Any, dtype: DType | None = None) -> ServedLayer:
    """This rank's part of a layer, whose weights are of ``dtype``; of the tokens' where None."""
    act = activation_of(config)
    if act is None:
        raise AssertionError(f"{config.activation} was refused")
    return ServedLayer(
        config.num_local_experts, config.hidden_size, config.intermediate_size_per_partition, config.top_k,
        dtype or DTYPES[config.params_dtype], act,
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
