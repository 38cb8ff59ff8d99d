"""vLLM's MoE layers on pretuned: the experts class for vLLM's modular kernel, and the conditions on which it runs.

Layers without quantisation are handled here, others in ``quantised.py``. A layer with a feature that pretuned lacks
stays with the backend that vLLM chose, and the reason is logged once. Weights are used as vLLM loaded them, w13
[E, 2*I, H] and w2 [E, H, I]: nothing is copied, packed or cached. So weights may be loaded again, or leave the GPU
while the engine sleeps and come back.

Imported only inside vLLM, by ``__init__.py``, which runs vLLM's own experts if anything here fails.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.platforms import current_platform

from ...artifacts.errors import InputError
from ...artifacts.records import DType
from ...kernels.activations import Activation
from ...runtime.api.experts import experts_mlp
from ...runtime.api.moe import moe_mlp
from ...runtime.check.tensors import DTYPES
from ...runtime.driver.device import current_device, local_gpu
from ...runtime.ops.activation import RowActivation
from ...runtime.settings import settings
from ...runtime.weights.expert_weights import ExpertWeights
from ..served_layer import ServedLayer, choose_invariantly, expected_rows, lacks, load

_log = init_logger("vllm.pretuned")

# vLLM's backends that leave weights as they were loaded.
_BACKENDS = ("TRITON", "BATCHED_TRITON", "FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "CPU")


class ActivationNumbers(NamedTuple):
    """The numbers that vLLM has for a layer's activation. None means no number, or a limit or linear_beta of 0."""

    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None

    @classmethod
    def of(cls, *holders: Any) -> ActivationNumbers:
        """Take each number from the first holder that has it: a FusedMoEConfig, or the layer (in 0.21)."""
        numbers: dict[str, float | None] = {}
        for name in cls._fields:
            values = (getattr(holder, name, None) for holder in holders)
            numbers[name] = next((float(value) for value in values if value is not None), None)
        for name in ("swiglu_limit", "activation_situ_linear_beta"):
            if (numbers[name] or 0.0) <= 0:
                numbers[name] = None
        return cls(**numbers)


class _Named(NamedTuple):
    """One of vLLM's activations: pretuned's function, the constants in vLLM's code, and the settings that it reads."""

    function: Activation | None  # None: made from the layer's numbers
    code: ActivationNumbers = ActivationNumbers(swiglu_alpha=1.0, swiglu_beta=0.0)
    reads: tuple[str, ...] = ()
    is_gated: bool = True
    is_interleaved: bool = False

    def of(self, settings: ActivationNumbers) -> Activation | str:
        """The function with a layer's settings, or why pretuned has none that computes what vLLM does."""
        for setting, value in settings._asdict().items():
            if value is not None and setting not in self.reads and value != getattr(self.code, setting):
                return f"a {setting} of {value:g}, which vLLM's backends do not all read"
        limit, alpha, beta, situ_beta, situ_linear_beta = settings
        if "activation_situ_beta" in self.reads:
            if situ_beta is None or situ_beta <= 0:
                return "no activation_situ_beta above 0"
            return Activation("situ", beta=situ_beta, linear_beta=situ_linear_beta)
        if "swiglu_alpha" in self.reads:
            if limit is None:
                return "no swiglu_limit"
            return Activation("swiglu", limit=limit, alpha=_or(alpha, 1.0), beta=_or(beta, 0.0))
        if "swiglu_limit" in self.reads and limit is not None:
            return Activation("swiglu", limit=limit)
        return self.function or "numbers that pretuned does not know"


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


_SWIGLU = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
_SITU = ("activation_situ_beta", "activation_situ_linear_beta")
_ACTIVATIONS = {  # by vLLM's names
    "silu": _Named(Activation("silu"), reads=("swiglu_limit",)),
    "gelu": _Named(Activation("gelu")),
    "gelu_tanh": _Named(Activation("gelu_tanh")),
    "relu2": _Named(Activation("relu2")),
    "swigluoai": _Named(Activation("swiglu_oai"), code=ActivationNumbers(7.0, 1.702, 1.0), is_interleaved=True),
    "swigluoai_uninterleave": _Named(None, reads=_SWIGLU),
    "swiglustep": _Named(Activation("swiglustep", limit=7.0), code=ActivationNumbers(7.0, 1.0, 0.0)),
    "situ": _Named(None, reads=_SITU),
    "silu_no_mul": _Named(Activation("silu"), is_gated=False),
    "gelu_no_mul": _Named(Activation("gelu"), is_gated=False),
    "gelu_tanh_no_mul": _Named(Activation("gelu_tanh"), is_gated=False),
    "relu2_no_mul": _Named(Activation("relu2"), is_gated=False),
}


class _Own(NamedTuple):
    """The backend and experts class that vLLM had chosen for a layer."""

    backend: Any
    experts_cls: Any


def take(method: Any, *, everywhere: bool) -> None:
    """Give a layer's method pretuned's experts, if pretuned supports the layer; else log why not, once.

    ``everywhere``: also if no bundle was built for the layer, and on the CPU, by the reference.
    """
    moe = method.moe
    own = _Own(method.unquantized_backend, method.experts_cls)
    act = activation_of(moe, ActivationNumbers.of(moe))
    why = refusal(moe, act, own.backend.name, everywhere=everywhere)
    if why is not None or isinstance(act, str):
        _tell(moe, own, str(why))
        return
    tell_taken(layer_of(moe, act))
    method.pretuned_took_from = own  # from here on nothing can fail, so no layer is half taken
    method.experts_cls = PretunedBatchedExperts if is_batched(moe) else PretunedExperts
    method.unquantized_backend = UnquantizedMoeBackend.TRITON  # its weights stay as they are


def keep(method: Any, params_dtype: torch.dtype) -> None:
    """Give a layer back to vLLM if its weights have another dtype than its tokens."""
    if params_dtype is not method.moe.in_dtype:
        own = give_back(method)
        _tell(method.moe, own, f"the weights are {params_dtype}, the tokens {method.moe.in_dtype}")


def give_back(method: Any) -> _Own:
    """Undo ``take``: vLLM's backend and experts class, which are returned."""
    own: _Own = method.pretuned_took_from
    method.unquantized_backend, method.experts_cls = own
    method.moe_kernel = None
    del method.pretuned_took_from
    return own


def _tell(moe: Any, own: _Own, why: str) -> None:
    what = f"E={moe.num_local_experts} H={moe.hidden_dim} I={moe.intermediate_size_per_partition}"
    tell_left(what, own.backend.value, why)


def tell_left(what: str, backend: str, why: str) -> None:
    """Log, once, that layers stay with vLLM, and why."""
    _log.info_once("pretuned: leaves the MoE layers of %s to vLLM's %s backend: %s", what, backend, why)


def tell_taken(layer: ServedLayer, note: str = "") -> None:
    """Log, once, that pretuned runs layers, how results differ from vLLM's, and the batch-invariant mode."""
    mode = settings().invariance
    note = "; ".join(text for text in (note, "" if mode is None else str(mode)) if text)
    _log.info_once("pretuned: runs the MoE layers of %s", f"{layer}; {note}" if note else str(layer))


def refusal(moe: Any, act: RowActivation | str, backend: str, *, everywhere: bool) -> str | None:
    """Return why pretuned does not run a layer with this FusedMoEConfig and vLLM backend; None if it does."""
    if moe.moe_backend == "auto" and backend not in _BACKENDS:
        return "its weights lie in an order of its own"
    return refusal_of(moe, act, DTYPES.get(moe.in_dtype), everywhere=everywhere)


def activation_of(moe: Any, settings: ActivationNumbers) -> RowActivation | str:
    """The activation of a layer with this FusedMoEConfig, or why pretuned has none that computes what vLLM does."""
    name = moe.activation.value
    named = _ACTIVATIONS.get(name)
    if named is None:
        return f"the activation {name} is none of pretuned's ({', '.join(_ACTIVATIONS)})"
    if named.is_gated != moe.is_act_and_mul:
        return f"the activation {name} in a layer {'with' if moe.is_act_and_mul else 'without'} a gate"
    function = named.of(settings)
    if isinstance(function, str):
        return f"the activation {name} has {function}"
    return RowActivation(function, named.is_gated, named.is_interleaved)


def refusal_of(moe: Any, act: RowActivation | str, dtype: DType | None, *, everywhere: bool) -> str | None:
    """Why pretuned does not run a layer, quantised or not; None if nothing forbids it. ``dtype`` is w's."""
    parallel = moe.moe_parallel_config
    if moe.moe_backend != "auto":
        return f"--moe-backend {moe.moe_backend} asks for it"
    if moe.in_dtype not in DTYPES or dtype is None:
        return f"the dtype {moe.in_dtype} is none of pretuned's (bfloat16, float16, float32)"
    if isinstance(act, str):
        return act
    if parallel.enable_eplb:
        return "expert parallel load balancing (EPLB) moves experts while it runs"
    if moe.is_lora_enabled:
        return "LoRA adapters (--enable-lora)"
    if getattr(envs, "VLLM_BATCH_INVARIANT", False):
        choose_invariantly()
    kind = PretunedBatchedExperts if is_batched(moe) else PretunedExperts
    supported, reason = kind.is_supported_config(kind, moe, None, None, kind.activation_format())
    if not supported:
        return str(reason)
    if current_platform.is_cuda():
        layer, local = layer_of(moe, act, dtype), local_gpu(current_device())
        return lacks(layer, local, tokens=moe.max_num_tokens * parallel.dp_size, any_variant=everywhere)
    where = current_platform.device_name
    return None if everywhere else f"pretuned has no kernels for the {where} (PRETUNED_VLLM=1 runs its reference there)"


def layer_of(moe: Any, act: RowActivation, dtype: DType | None = None) -> ServedLayer:
    """This rank's part of a layer with weights of ``dtype``; None means the tokens' dtype."""
    return ServedLayer(
        moe.num_local_experts,
        moe.hidden_dim,
        moe.intermediate_size_per_partition,
        moe.experts_per_token,
        dtype or DTYPES[moe.in_dtype],
        act,
        moe.num_experts,
    )


def is_batched(moe: Any) -> bool:
    """True if the layer's all-to-all returns tokens grouped by expert and padded: deepep_low_latency, nixl_ep."""
    return bool(moe.moe_parallel_config.use_batched_activation_format)


def load_kernels(layer: ServedLayer) -> None:
    """Load all kernels that a layer can need on this process's GPU, if there is one, and log that once."""
    if current_platform.is_cuda():
        loaded = load(layer, current_device())
        _log.info_once("pretuned: %d kernels loaded in %.1f ms", loaded.count, loaded.seconds * 1e3)


_tried: set[tuple[Any, ...]] = set()


def try_once(experts: Any, layer: Any, w13: torch.Tensor) -> None:
    """Run one token through a layer's experts, once for each kind of layer, so that errors come before serving."""
    moe = experts.moe_config
    formats = tuple(weights.format for weights in experts.weights or ())
    kind = layer_of(moe, experts.act), formats, experts.w1_bias is None
    if kind in _tried or w13.is_meta:
        return
    batched = isinstance(experts, PretunedBatchedExperts)
    shape = (moe.num_local_experts, 1, moe.hidden_dim) if batched else (1, moe.hidden_dim)
    x = torch.zeros(*shape, dtype=moe.in_dtype, device=w13.device)
    counts = torch.ones(moe.num_local_experts, dtype=torch.int32, device=w13.device)
    ids = torch.zeros(1, moe.experts_per_token, dtype=torch.int32, device=w13.device)
    weights = torch.zeros(1, moe.experts_per_token, dtype=torch.float32, device=w13.device)
    with torch.no_grad():
        experts.apply(
            output=torch.empty_like(x),
            hidden_states=x,
            w1=w13,
            w2=getattr(layer, "w2_weight", w13),
            topk_weights=weights,
            topk_ids=ids,
            activation=moe.activation,
            global_num_experts=moe.num_experts,
            expert_map=getattr(layer, "expert_map", None),
            apply_router_weight_on_input=False,
            expert_tokens_meta=mk.ExpertTokensMetadata(counts, None) if batched else None,
        )
    _tried.add(kind)


class PretunedExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """Runs ``moe_mlp``: sort, multiply, weigh and sum over each token's experts.

    ``weights``, if set, replaces the two tensors of a call: quantised weights have more tensors.
    """

    def __init__(self, moe_config: Any, quant_config: Any, **batched: Any) -> None:
        super().__init__(moe_config, quant_config, **batched)
        self.act: RowActivation | None = None  # set by ``_load``, or by the method for quantised weights
        self._map: tuple[torch.Tensor, torch.Tensor] | None = None
        self.weights: tuple[ExpertWeights, ExpertWeights] | None = None  # these replace the weights of a call
        self._load(moe_config)

    def _load(self, moe_config: Any) -> None:
        act = activation_of(moe_config, ActivationNumbers.of(moe_config))
        if isinstance(act, str):
            raise InputError(f"pretuned: {act}")
        self.act = act
        load_kernels(layer_of(moe_config, act))

    @staticmethod
    def activation_format() -> Any:
        """Standard: tokens are in the router's order, [T, H]."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda() or current_platform.is_cpu())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value in _ACTIVATIONS

    @classmethod
    def _supports_parallel_config(cls, moe_parallel_config: Any) -> bool:
        batched = cls.activation_format() is mk.FusedMoEActivationFormat.BatchedExperts
        return bool(moe_parallel_config.use_batched_activation_format) is batched

    @staticmethod
    def _supports_batch_invariance() -> bool:
        """True on a GPU, where all calls' kernels then sum in one order; the CPU's reference has no such mode."""
        return settings().invariance is not None and bool(current_platform.is_cuda())

    def supports_expert_map(self) -> bool:
        """True: experts may be on other ranks."""
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        """No further step: ``apply`` weights and sums."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, *_: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspaces except the result, [tokens, H]: pretuned allocates the rest by torch."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *,
        apply_router_weight_on_input: bool,
        expert_tokens_meta: Any = None,
        **_: Any,
    ) -> None:
        """output [T, H] = the layer on hidden_states [T, H], by this rank's experts alone.

        ``expert_map`` [experts of all ranks] has each expert's number on this rank, or -1. With
        ``apply_router_weight_on_input`` hidden_states are weighted already. ``expert_tokens_meta`` may have the rows of
        each expert on the host.
        """
        if expert_map is not None:
            topk_ids = self._with_none(expert_map)[topk_ids]
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        (gate_up, down), act = self.weights or (w1, w2), self.act
        if act is None:
            raise AssertionError("a layer is called before its weights were loaded")
        moe_mlp(
            hidden_states,
            gate_up,
            down,
            topk_ids,
            topk_weights,
            act.function,
            gated=act.gated,
            interleaved=act.interleaved,
            gate_up_bias=self.w1_bias,
            down_bias=self.w2_bias,
            out=output,
            expected_rows=self._expected(topk_ids, global_num_experts, expert_tokens_meta),
        )

    def _expected(self, ids: torch.Tensor, experts: int, counts: Any) -> int | None:
        """The number of ids for this rank's experts: the all-to-all's count, or expected if all are equally likely."""
        tokens, top_k = ids.shape
        counted = getattr(counts, "expert_num_tokens_cpu", None)
        if counted is not None:
            return min(int(counted.sum()), tokens * top_k)
        return expected_rows(tokens, top_k, self.moe_config.num_local_experts, experts)

    def _with_none(self, expert_map: torch.Tensor) -> torch.Tensor:
        """``expert_map`` with one more -1 at its end, so that id -1 (padding, other ranks' experts) maps to -1."""
        if self._map is None or self._map[0] is not expert_map:
            self._map = expert_map, torch.cat([expert_map, expert_map.new_full((1,), -1)])
        return self._map[1]


class PretunedBatchedExperts(PretunedExperts):
    """Runs ``experts_mlp`` on tokens that an all-to-all groups by expert; the all-to-all's combine weights and sums."""

    @staticmethod
    def activation_format() -> Any:
        """Batched: tokens are grouped by expert, [E, M_max, H]."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    def supports_expert_map(self) -> bool:
        """False: the all-to-all has applied the map already."""
        return False

    def finalize_weight_and_reduce_impl(self) -> Any:
        """No step here: the all-to-all weights and sums."""
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, *_: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspaces except the result, [E, M_max, H]: pretuned allocates the rest by torch."""
        if self.max_num_tokens is None or self.num_dispatchers is None:
            raise AssertionError("experts of padded tokens without their number")
        return (0,), (0,), (local_num_experts, self.max_num_tokens * self.num_dispatchers, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *,
        apply_router_weight_on_input: bool,
        expert_tokens_meta: Any = None,
        **_: Any,
    ) -> None:
        """output [E, M_max, H] = the experts on hidden_states [E, M_max, H]; ``expert_tokens_meta`` has the counts.

        ``topk_ids`` has the ids of this rank's own tokens. Its size gives the expected rows, if each rank has as many.
        """
        (gate_up, down), act = self.weights or (w1, w2), self.act
        if act is None or expert_tokens_meta is None:
            raise AssertionError("a layer is called before its weights were loaded, or without counts")
        E, most, _H = hidden_states.shape
        rows = topk_ids.numel() * (self.num_dispatchers or 1) * E // max(1, global_num_experts)
        experts_mlp(
            hidden_states,
            gate_up,
            down,
            expert_tokens_meta.expert_num_tokens[:E],  # some all-to-alls give counts for the experts of all ranks
            act.function,
            gated=act.gated,
            interleaved=act.interleaved,
            gate_up_bias=self.w1_bias,
            down_bias=self.w2_bias,
            out=output,
            expected_rows=min(rows, E * most),
        )
