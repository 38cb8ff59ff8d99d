"""SGLang's MoE layers on pretuned: the runner's core, and the conditions on which it runs a layer.

``quantised.py`` handles quantised weights. A layer with a feature that pretuned lacks stays with the runner that SGLang
chose, and the reason is logged once. Unquantised weights are used as SGLang loaded them, w13 [E, 2*I, H] and w2
[E, H, I]: nothing is copied or packed.

Imported only inside SGLang, by ``__init__.py``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.moe.moe_runner import runner as moe_runner
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLCombineInput, DeepEPNormalCombineInput
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import (
    get_deepep_mode,
    get_moe_a2a_backend,
    get_moe_runner_backend,
    is_sbo_enabled,
    resolve_moe_runner_backend,
)
from sglang.srt.runtime_context import get_flags, get_server_args

from ...artifacts.errors import InputError
from ...artifacts.records import DType
from ...kernels.activations import Activation
from ...kernels.hopper_w4a16 import SIZES, can_be_prepared
from ...runtime.api.experts import experts_mlp
from ...runtime.api.moe import moe_mlp
from ...runtime.check.tensors import DTYPES
from ...runtime.driver.device import current_device, local_gpu
from ...runtime.ops.activation import RowActivation
from ...runtime.settings import settings
from ...runtime.weights.expert_weights import ExpertWeights
from ...runtime.weights.quantized_rows import QuantizedRows
from ..served_layer import ServedLayer, choose_invariantly, expected_rows, lacks, load, received_rows
from . import NAME, PLUG_IN
from .quantised import Experts, Packing, format_of, run_by, runs_by, watch

_DEEP_GEMM, _DEEPEP_V2 = "deep_gemm", "deepep_v2"
# By all-to-all: the weight formats for which tokens arrive as pretuned reads them; None is unquantised weights.
_ALL_TO_ALLS: dict[str, tuple[str | None, ...]] = {
    "deepep": (None, "fp8_block"),
    _DEEPEP_V2: (None, "fp8_block"),
    "mooncake": ("fp8_block",),
    "nixl": ("fp8_block",),
}
_UNQUANTISED = "UnquantizedFusedMoEMethod"
# The activations of SGLang's Triton runner, with and without a gate.
_GATED, _UNGATED = ("silu", "gelu", "gelu_tanh", "situ"), ("silu", "gelu", "relu2")
_SITU_BETA = 4.0  # if gemm1_alpha is None, as in SGLang's Triton runner
_TOKENS = 8192  # most tokens of a step, if SGLang's settings do not say


def take(method: Any, layer: Any, config: Any, *, everywhere: bool) -> bool:
    """Give a layer's method pretuned's runner, if pretuned supports the layer; else log why not, once.

    Returns True if pretuned runs the layer.

    ``everywhere``: also if no bundle was built for the layer, and on the CPU, by the reference.
    """
    own = method.get_moe_runner_backend(layer)
    format = None if type(method).__name__ == _UNQUANTISED else format_of(method, layer)
    why = refusal(method, layer, config, format, everywhere=everywhere)
    if why is not None or isinstance(format, str):
        what = f"E={config.num_local_experts} H={config.hidden_size} I={config.intermediate_size_per_partition}"
        form = "" if isinstance(format, str | None) else f" {format.name}"
        runner = own.value if own is not None else "own"
        _tell(f"pretuned: leaves the MoE layers of {what}{form} to SGLang's {runner} runner: {why}")
        return False
    _register_core()
    runner = _runner(config)
    served, place = layer_of(config, None if format is None else format.dtype), runs_by(method, layer)
    if torch.cuda.is_available() and torch.version.cuda:
        done = load(served, current_device())
        _tell(f"pretuned: {done.count} kernels loaded in {done.seconds * 1e3:.1f} ms")
    notes = "" if format is None else format.note, str(settings().invariance or "")
    _tell("; ".join(text for text in (f"pretuned: runs the MoE layers of {served}", *notes) if text))
    if format is not None:
        ours = Experts(format, runner, served.width, place.runner)
        watch(ours, layer, method)
        layer.pretuned_experts = ours  # from here on nothing can fail, so no layer is half taken
    else:
        runner.runner_core.own = place.runner
    run_by(method, layer, runner)
    return True


def _runner(config: Any) -> Any:
    """SGLang's runner with pretuned's core. With DeepEP v2, SGLang only accepts a runner with DeepGEMM's name."""
    if get_moe_a2a_backend().value != _DEEPEP_V2:
        return moe_runner.MoeRunner(resolve_moe_runner_backend(NAME), config)
    runner = moe_runner.MoeRunner(resolve_moe_runner_backend(_DEEP_GEMM), config)
    runner.runner_core = PretunedRunnerCore(config)
    return runner


def refusal(method: Any, layer: Any, config: Any, format: Packing | str | None, *, everywhere: bool) -> str | None:
    """Why pretuned does not run a layer with this config; None if it does. ``format`` is for quantised weights."""
    own, asked, settings = method.get_moe_runner_backend(layer), _asked(), _settings()
    if isinstance(format, str):
        return format
    if own is None:  # fp8 methods on some backends have no runner
        return "it has no runner"
    apart = not get_moe_a2a_backend().is_none()
    if own.value not in (("triton",) if format is None else format.runners) and not (apart and own.value == _DEEP_GEMM):
        return "its weights lie in an order of its own"
    if asked not in ("auto", NAME):
        return f"--moe-runner-backend {asked} asks for it"
    if apart and (why := _not_received(own.value, config, format, everywhere=everywhere)) is not None:
        return why
    if format is None and getattr(layer, "with_bias", False) and get_moe_a2a_backend().value == _DEEPEP_V2:
        return "SGLang hands over no biases with the all-to-all of deepep_v2"
    if getattr(method, "_aiter_runner", None) is not None:
        return "aiter runs it"
    if getattr(settings, "enable_lora", False):
        return "LoRA adapters (--enable-lora)"
    if getattr(settings, "enable_deterministic_inference", False) and (why := _varies()) is not None:
        return why
    if config.params_dtype not in DTYPES:
        return f"the dtype {config.params_dtype} is none of pretuned's (bfloat16, float16, float32)"
    act = activation_of(config)
    if isinstance(act, str):
        return act
    if (why := _read_by(own.value, layer, config)) is not None:
        return why
    if config.no_combine:
        return "the sum over a token's experts is made elsewhere (no_combine)"
    served = layer_of(config, None if format is None else format.dtype)
    if format is not None and (why := _unread(layer, config, format, served)) is not None:
        return why
    if torch.cuda.is_available() and torch.version.cuda:
        tokens = getattr(settings, "chunked_prefill_size", None) or _TOKENS
        return lacks(served, local_gpu(current_device()), tokens=max(tokens, 1), any_variant=everywhere)
    return None if everywhere else "pretuned has no kernels for the CPU (PRETUNED_SGLANG=1 runs its reference there)"


def _not_received(runner: str, config: Any, format: Packing | None, *, everywhere: bool) -> str | None:
    """Why tokens of this all-to-all are not in a layout that pretuned reads for the layer; None if they are."""
    name = get_moe_a2a_backend().value
    if name not in _ALL_TO_ALLS:
        return f"the all-to-all of {name} hands over tokens in its own layout"
    if (None if format is None else format.name) not in _ALL_TO_ALLS[name]:
        what = config.params_dtype if format is None else format.name
        return f"the all-to-all of {name} hands over tokens that {what} weights are not multiplied with"
    if is_sbo_enabled():
        return "--enable-single-batch-overlap: the all-to-all waits for signals of SGLang's own GEMM"
    if config.apply_router_weight_on_input:
        return "the router's weights are applied to the input"
    # DeepGEMM is up to 1.4x as fast on an H200, if x arrives as codes (benchmarks/results/padded-rows-h200.json).
    is_padded = name == _DEEPEP_V2 or get_deepep_mode().enable_low_latency()  # at least in some steps
    if format is not None and runner == _DEEP_GEMM and is_padded and not everywhere:
        return "DeepGEMM's masked kernel is faster on tokens padded by expert"
    return None


def _varies() -> str | None:
    """Why results would depend on the batch despite --enable-deterministic-inference; None if they do not."""
    if choose_invariantly() is None:
        return "PRETUNED_BATCH_INVARIANT=0 beside --enable-deterministic-inference"
    on_gpu = torch.cuda.is_available() and torch.version.cuda
    return None if on_gpu else "--enable-deterministic-inference: sums of pretuned's reference depend on the batch"


def _unread(layer: Any, config: Any, format: Packing, served: ServedLayer) -> str | None:
    """Why pretuned can't read a layer's quantised weights; None if it can."""
    if torch.cuda.is_available() and config.params_dtype is not torch.bfloat16:
        return f"tokens are {config.params_dtype}: with quantised weights, kernels read bfloat16"
    loads = [(product.N, product.K) for product in served.products(served.I)]
    rooms = format.shapes(layer)
    for problem in served.problems:
        if not can_be_prepared(problem.dtype, problem.N, problem.K):
            return f"no kernel is for {problem}: {SIZES}"
    wide = [(product.N, product.K) for product in served.problems]
    if rooms not in (loads, wide):  # SGLang pads some layers to ``wide``
        return f"its parameters have an N and K of {rooms}, pretuned reads {loads}"
    for option in ("enable_eplb", "cpu_offload_gb"):  # these move parameters, but not kernels' other tensors
        if getattr(_settings(), option, None):
            return f"--{option.replace('_', '-')} moves its weights while it runs"
    return None


def _asked() -> Any:
    """The value of --moe-runner-backend. (SGLang itself chooses one for some models, such as gpt-oss.)"""
    chosen = get_moe_runner_backend().value
    return chosen if get_flags().moe.in_speculative_scope else getattr(_settings(), "moe_runner_backend", chosen)


class ActivationSettings(NamedTuple):
    """A MoeRunnerConfig's settings of its activation; a limit of 0 is None."""

    activation: str
    is_gated: bool
    alpha: float | None
    beta: float | None
    clamp_limit: float | None
    swiglu_limit: float | None
    interleaved: bool

    @classmethod
    def of(cls, config: Any) -> ActivationSettings:
        """Read a config's settings, anew for each use: a model may set its limit after making layers (GigaChat-3.5)."""
        return cls(
            config.activation,
            bool(config.is_gated),
            config.gemm1_alpha,
            config.gemm1_beta,
            config.gemm1_clamp_limit or None,
            config.swiglu_limit or None,
            bool(config.gate_up_interleaved),
        )

    def __str__(self) -> str:
        numbers = {
            "gemm1_alpha": self.alpha,
            "gemm1_beta": self.beta,
            "gemm1_clamp_limit": self.clamp_limit,
            "swiglu_limit": self.swiglu_limit,
        }
        said = [f"{name}={value:g}" for name, value in numbers.items() if value is not None]
        return f"{self.activation} {'with' if self.is_gated else 'without'} a gate" + "".join(
            f", {number}" for number in said
        )


def activation_of(config: Any) -> RowActivation | str:
    """The activation of ``moe_mlp`` that a layer has, or why pretuned has none that computes what SGLang does.

    By the rules of SGLang's Triton runner: silu comes after the clamp of swiglu_limit, and before that of clamp_limit.
    """
    settings = ActivationSettings.of(config)
    name, is_gated, alpha, beta, clamp_limit, swiglu_limit, interleaved = settings
    unread: tuple[float | None, ...] = (swiglu_limit,)
    is_interleaved = False
    if name == "situ" and is_gated:
        situ_beta = _SITU_BETA if alpha is None else alpha
        if situ_beta <= 0:
            return f"the activation {settings}: situ needs a gemm1_alpha above 0"
        function = Activation("situ", beta=situ_beta, linear_beta=clamp_limit)
    elif name == "silu" and is_gated and alpha is not None:
        if clamp_limit is None:
            return f"the activation {settings}, without gemm1_clamp_limit"
        function, is_interleaved = Activation("swiglu", limit=clamp_limit, alpha=alpha, beta=1.0), interleaved
    elif name == "silu" and is_gated and clamp_limit is not None:
        function = Activation("swiglustep", limit=clamp_limit)
    elif name == "silu" and is_gated:
        function, unread = Activation("swiglu", limit=swiglu_limit).plain, ()
    elif name in (_GATED if is_gated else _UNGATED):
        function, unread = Activation(name), (alpha, clamp_limit, swiglu_limit)
    else:
        return f"the activation {settings} is none of pretuned's ({', '.join(_GATED if is_gated else _UNGATED)})"
    if any(number is not None for number in unread) or beta not in (None, 1.0):
        return f"the activation {settings}: SGLang's runners do not all read these numbers"
    return RowActivation(function, is_gated, is_interleaved)


def _read_by(runner: str, layer: Any, config: Any) -> str | None:
    """Why SGLang's ``runner`` computes another activation than its Triton runner, for quantised weights; or None."""
    settings = ActivationSettings.of(config)
    if runner == "marlin" and settings.activation in ("silu", "situ") and settings.is_gated:
        if settings.alpha is None and settings.clamp_limit is not None:
            return "its Marlin runner ignores gemm1_clamp_limit without gemm1_alpha"
        if settings.alpha is not None and settings.activation == "silu" and settings.interleaved:
            return "its Marlin runner has gate and up in halves, where the model says alternating rows"
    has_numbers = any(number is not None for number in (settings.alpha, settings.clamp_limit, settings.swiglu_limit))
    if runner == "triton_kernel" and has_numbers and not getattr(layer, "with_bias", False):
        return "its triton_kernel runner ignores the activation's numbers without biases"
    return None


def layer_of(config: Any, dtype: DType | None = None) -> ServedLayer:
    """Return this rank's part of a layer with weights of ``dtype``; None means the tokens' dtype."""
    act = activation_of(config)
    if isinstance(act, str):
        raise InputError(f"pretuned: {act}")
    return ServedLayer(
        config.num_local_experts,
        config.hidden_size,
        config.intermediate_size_per_partition,
        config.top_k,
        dtype or DTYPES[config.params_dtype],
        act,
        *_experts_of_all(config),
    )


def _experts_of_all(config: Any) -> tuple[int, int]:
    """(experts of all ranks, shared experts on each rank); 0 for a number that SGLang does not give."""
    return getattr(config, "num_experts", None) or 0, getattr(config, "num_fused_shared_experts", None) or 0


def _settings() -> Any:
    """SGLang's server arguments; None if there is no engine."""
    try:
        return get_server_args()
    except (AttributeError, LookupError, RuntimeError, ValueError):
        return None


@functools.cache
def _tell(line: str) -> None:
    PLUG_IN.log.info("%s", line)


@functools.cache
def _register_core() -> None:
    moe_runner.register_moe_runner_core(NAME, PretunedRunnerCore)


class PretunedRunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
    """Runs a layer as one ``moe_mlp``: sort the routing, multiply, weigh, and sum over each token's experts.

    ``own`` is SGLang's runner, which runs a layer with unquantised weights if pretuned fails; None for quantised ones.
    """

    own: Any = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._settings, self._act = ActivationSettings.of(config), layer_of(config).act

    def activation(self) -> RowActivation:
        """The layer's current activation.

        Raises
        ------
        InputError
            if the model has since set numbers that pretuned does not support.
        """
        settings = ActivationSettings.of(self.config)
        if settings != self._settings:
            self._act, self._settings = layer_of(self.config).act, settings
            _tell(f"pretuned: the model has set another activation: it runs the MoE layers of {layer_of(self.config)}")
        return self._act

    @property
    def runner_backend(self) -> Any:
        """The runner's name in SGLang's registry."""
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None) -> Any:
        """Run the layer on the tokens of ``dispatch_output``.

        These are [T, H], with id -1 for an expert of another rank; or tokens grouped by expert, [E, M_max, H], or
        [M, H] with DeepEP v2.
        """
        if self.own is None:
            return self._run(dispatch_output, quant_info, runner_config)
        try:
            return self._run(dispatch_output, quant_info, runner_config)
        except Exception as error:
            PLUG_IN.failed("run a layer", error)
            return self.own.run(dispatch_output, _own_info(self.own, quant_info))

    def _run(self, dispatch_output: Any, quant_info: Any, runner_config: Any) -> Any:
        format, act, here = dispatch_output.format, self.activation(), self.config.num_local_experts
        weighs = "input" if runner_config.apply_router_weight_on_input else "output"
        x = dispatch_output.hidden_states if format.is_standard() else _received(dispatch_output)
        dtype = torch.bfloat16 if isinstance(x, QuantizedRows) else x.dtype
        arguments: dict[str, Any] = {
            "activation": act.function,
            "gated": act.gated,
            "interleaved": act.interleaved or getattr(quant_info, "fuse_swiglu_interleaved", False),
            "gate_up_bias": _in(getattr(quant_info, "b13", None), dtype),  # DeepGEMM's quant_info has no biases
            "down_bias": _in(getattr(quant_info, "b2", None), dtype),
        }
        both = quant_info.w13_weight, quant_info.w2_weight
        if format.is_deepep_ll():
            room = dispatch_output.hidden_states.shape[:2].numel()
            arguments["expected_rows"] = min(dispatch_output.expected_m * here, room)
            y = experts_mlp(x, *both, dispatch_output.masked_m, **arguments)
            return DeepEPLLCombineInput(y, dispatch_output.topk_ids, dispatch_output.topk_weights)
        if format.value == _DEEPEP_V2 and dispatch_output.is_expanded:
            return self._run_expanded(dispatch_output, x, both, arguments)
        if (
            format.is_deepep_normal() or format.value == _DEEPEP_V2
        ):  # SGLang's models multiply by routed_scaling_factor themselves
            ids, weights = dispatch_output.topk_ids, dispatch_output.topk_weights
            tokens, top_k = ids.shape
            arguments["expected_rows"] = received_rows(tokens, top_k, here, *_experts_of_all(self.config))
            out = moe_mlp(x, *both, ids, weights, **arguments)
            if format.value == _DEEPEP_V2:
                return _second_result(out, weights)
            return DeepEPNormalCombineInput(out, ids, weights)
        weights, ids, *_ = dispatch_output.topk_output
        tokens, top_k = ids.shape
        arguments["expected_rows"] = expected_rows(tokens, top_k, here, *_experts_of_all(self.config))
        out = moe_mlp(x, *both, ids, weights, weights_on=weighs, **arguments)
        factor = runner_config.routed_scaling_factor
        return StandardCombineInput(hidden_states=out if factor in (None, 1.0) else out.mul_(factor))

    def _run_expanded(
        self,
        dispatch_output: Any,
        x: torch.Tensor | QuantizedRows,
        both: tuple[torch.Tensor | ExpertWeights, torch.Tensor | ExpertWeights],
        arguments: dict[str, Any],
    ) -> Any:
        """Run rows of DeepEP v2, sorted by expert; each expert's first row is at a multiple of ``expert_alignment``."""
        ends, align = dispatch_output.psum_num_recv_tokens_per_expert, dispatch_output.expert_alignment
        starts = torch.zeros_like(ends)
        starts[1:] = (ends[:-1] + align - 1) // align * align
        if dispatch_output.use_masked_gemm:
            rows = dispatch_output.hidden_states.shape[0]
            arguments["expected_rows"] = min(dispatch_output.expected_m * len(ends), rows)
        y = experts_mlp(x, *both, ends - starts, m_starts=starts, **arguments)
        return _second_result(y.mul_(dispatch_output.topk_weights.unsqueeze(-1)), None)


def _second_result(y: torch.Tensor, weights: torch.Tensor | None) -> Any:
    """The input of DeepEP v2's combine step. Its class is imported here, as older versions of SGLang lack it."""
    from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2CombineInput

    return DeepEPv2CombineInput(y, weights)


def _received(dispatch_output: Any) -> torch.Tensor | QuantizedRows:
    """The tokens that an all-to-all has brought, with their scales if they are quantised."""
    x, scale = dispatch_output.hidden_states, dispatch_output.hidden_states_scale
    return x if scale is None else QuantizedRows(x, scale)


def _own_info(own: Any, quant_info: Any) -> Any:
    """The quant_info that SGLang's own runner of unquantised weights expects."""
    if own.runner_backend.value != _DEEP_GEMM:
        return quant_info
    from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmMoeQuantInfo

    return DeepGemmMoeQuantInfo(quant_info.w13_weight, quant_info.w2_weight, use_fp8=False)


def _in(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias.to(dtype)
