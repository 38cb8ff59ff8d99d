"""vLLM's MoE layers on pretuned: the class of vLLM's modular kernel, and which layers it is for.

Those without quantisation are taken here, others in ``quantised.py``. A layer of which any part is none of pretuned's
stays with the backend that vLLM chose, and why is told once. Weights are used as vLLM loaded them, w13 [E, 2*I, H] and
w2 [E, H, I]: nothing is copied, packed or kept, so those that are loaded again, or leave the GPU while the engine
sleeps and come back, are simply read.

Imported inside vLLM alone, by ``__init__.py``, which runs vLLM's own experts if anything here fails.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform

from ...artifacts.records.precision import DType
from ...kernels.contract.activations import Activation
from ...runtime.api.moe import moe_mlp
from ...runtime.check.tensors import DTYPES
from ...runtime.driver.device import current_device, local_gpu
from ...runtime.ops.activation import RowActivation
from ...runtime.weights.expert_weights import ExpertWeights
from ..served_layer import ServedLayer, lacks, load

_log = init_logger("vllm.pretuned")

_ACTIVATIONS = {  # by vLLM's names, of which those with _no_mul have no gate
    "silu": RowActivation(Activation("silu"), True, False),
    "gelu": RowActivation(Activation("gelu"), True, False),
    "gelu_tanh": RowActivation(Activation("gelu_tanh"), True, False),
    "swigluoai": RowActivation(Activation("swiglu_oai"), True, True),
    "swigluoai_uninterleave": RowActivation(Activation("swiglu_oai"), True, False),
    "silu_no_mul": RowActivation(Activation("silu"), False, False),
    "gelu_no_mul": RowActivation(Activation("gelu"), False, False),
    "gelu_tanh_no_mul": RowActivation(Activation("gelu_tanh"), False, False),
    "relu2_no_mul": RowActivation(Activation("relu2"), False, False),
}
# The settings (limit, alpha, beta) of an activation that has these, None where vLLM's default holds.
_PLAIN = ((None,), (None, 1.0), (None, 0.0))
_OAI = ((None, 7.0), (None, 1.702), (None, 1.0))
_OAI_TOLD = ((7.0,), (1.702,), (1.0,))
_SETTINGS = {"swigluoai": _OAI, "swigluoai_uninterleave": _OAI_TOLD}
_BACKENDS = ("TRITON", "FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "CPU")  # whose weights lie as they were loaded


class _Own(NamedTuple):
    """What vLLM had chosen for a layer."""

    backend: Any
    experts_cls: Any


def take(method: Any, *, everywhere: bool) -> None:
    """Give a layer's method pretuned's experts, if pretuned has all that the layer has; else tell why not, once.

    ``everywhere``: also where no bundle was built for the layer, and by the reference where there is no GPU.
    """
    moe = method.moe
    own = _Own(method.unquantized_backend, method.experts_cls)
    why = refusal(moe, own.backend.name, everywhere=everywhere)
    if why is not None:
        _tell(moe, own, why)
        return
    tell_taken(layer_of(moe))
    method.pretuned_took_from = own  # from here on nothing can fail: a layer is taken whole or not at all
    method.experts_cls = PretunedExperts
    method.unquantized_backend = UnquantizedMoeBackend.TRITON  # its weights stay as they are


def keep(method: Any, params_dtype: torch.dtype) -> None:
    """Give a layer back whose weights turn out to be of another dtype than its tokens."""
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
    """Say, once, that layers stay with vLLM, and why."""
    _log.info_once("pretuned: leaves the MoE layers of %s to vLLM's %s backend: %s", what, backend, why)


def tell_taken(layer: ServedLayer) -> None:
    """Say, once, that layers are pretuned's."""
    _log.info_once("pretuned: runs the MoE layers of %s", str(layer))


def refusal(moe: Any, backend: str, *, everywhere: bool) -> str | None:
    """Why a layer with this FusedMoEConfig, for which vLLM chose this backend, is none of pretuned's; None if it is."""
    if moe.moe_backend == "auto" and backend not in _BACKENDS:
        return "its weights lie in an order of its own"
    settings = tuple(getattr(moe, name, None) for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta"))
    return refusal_of(moe, settings, DTYPES.get(moe.in_dtype), everywhere=everywhere)


def refusal_of(moe: Any, settings: tuple[Any, ...], dtype: DType | None, *, everywhere: bool) -> str | None:
    """The same of what all layers have. ``settings``: limit, alpha and beta of the activation; ``dtype``: of w."""
    parallel = moe.moe_parallel_config
    if moe.moe_backend != "auto":
        return f"--moe-backend {moe.moe_backend} asks for it"
    if moe.in_dtype not in DTYPES or dtype is None:
        return f"the dtype {moe.in_dtype} is none of pretuned's (bfloat16, float16, float32)"
    act = moe.activation.value
    if act not in _ACTIVATIONS or _ACTIVATIONS[act].gated != moe.is_act_and_mul:
        return f"the activation {act} is none of pretuned's ({', '.join(_ACTIVATIONS)})"
    if not all(one in known for one, known in zip(settings, _SETTINGS.get(act, _PLAIN), strict=True)):
        return f"the activation {act} has a limit, alpha and beta of {settings}, which pretuned has not"
    if parallel.enable_eplb:
        return "expert parallel load balancing (EPLB) moves experts while it runs"
    if moe.is_lora_enabled:
        return "LoRA adapters (--enable-lora)"
    if parallel.use_batched_activation_format:
        return f"the all-to-all of {parallel.all2all_backend} hands over tokens by expert, padded"
    supported, reason = PretunedExperts.is_supported_config(
        PretunedExperts, moe, None, None, mk.FusedMoEActivationFormat.Standard
    )
    if not supported:
        return str(reason)
    if current_platform.is_cuda():
        layer, local = layer_of(moe, dtype), local_gpu(current_device())
        return lacks(layer, local, tokens=moe.max_num_tokens, any_variant=everywhere)
    where = current_platform.device_name
    return None if everywhere else f"pretuned has no kernels for the {where} (PRETUNED_VLLM=1 runs its reference there)"


def layer_of(moe: Any, dtype: DType | None = None) -> ServedLayer:
    """This rank's part of a layer, whose weights are of the tokens' dtype if None is given."""
    return ServedLayer(
        moe.num_local_experts, moe.hidden_dim, moe.intermediate_size_per_partition, moe.experts_per_token,
        dtype or DTYPES[moe.in_dtype], _ACTIVATIONS[moe.activation.value],
    )  # fmt: skip


def load_kernels(layer: ServedLayer) -> None:
    """Load all that a layer can come to on this process's GPU, if it has one, and say so once."""
    if current_platform.is_cuda():
        loaded = load(layer, current_device())
        _log.info_once("pretuned: %d kernels loaded in %.1f ms", loaded.count, loaded.seconds * 1e3)


_tried: set[tuple[Any, ...]] = set()


def try_once(experts: Any, layer: Any, w13: torch.Tensor) -> None:
    """Run one token through a layer's experts, once for each kind of layer: what fails then fails before it serves."""
    moe = experts.moe_config
    formats = tuple(one.format for one in experts.weights or ())
    kind = layer_of(moe), formats, experts.w1_bias is None
    if kind in _tried or w13.is_meta:
        return
    x = torch.zeros(1, moe.hidden_dim, dtype=moe.in_dtype, device=w13.device)
    ids = torch.zeros(1, moe.experts_per_token, dtype=torch.int32, device=w13.device)
    weights = torch.zeros(1, moe.experts_per_token, device=w13.device)
    with torch.no_grad():
        experts.apply(
            output=torch.empty_like(x), hidden_states=x, w1=w13, w2=getattr(layer, "w2_weight", w13),
            topk_weights=weights, topk_ids=ids, activation=moe.activation, global_num_experts=moe.num_experts,
            expert_map=getattr(layer, "expert_map", None), apply_router_weight_on_input=False,
        )  # fmt: skip
    _tried.add(kind)


class PretunedExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """One ``moe_mlp`` a layer: sorted, multiplied, weighted and summed over each token's experts.

    With ``weights`` these are multiplied, whatever a call is given: quantised ones have more than its two tensors.
    """

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        self._act = _ACTIVATIONS[moe_config.activation.value]
        self._map: tuple[torch.Tensor, torch.Tensor] | None = None
        self.weights: tuple[ExpertWeights, ExpertWeights] | None = None  # in place of those that a call is given
        self._load(moe_config)

    def _load(self, moe_config: Any) -> None:
        load_kernels(layer_of(moe_config))

    @staticmethod
    def activation_format() -> Any:
        """Tokens lie as the router has them."""
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

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_batched_activation_format

    def supports_expert_map(self) -> bool:
        """Whether experts may be on other ranks."""
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        """``apply`` weights and sums."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, *_: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """None but the result's, [tokens, H]: torch's allocator has the rest."""
        return (0,), (0,), (M, K)

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
        topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, global_num_experts: int,
        expert_map: torch.Tensor | None, *, apply_router_weight_on_input: bool, **_: Any,
    ) -> None:  # fmt: skip
        """output [T, H] = the layer on hidden_states [T, H], the tokens of this rank's experts alone.

        ``expert_map`` [experts of all ranks] has each one's number here, -1 of others. With
        ``apply_router_weight_on_input`` hidden_states are weighted already.
        """
        if expert_map is not None:
            topk_ids = self._with_none(expert_map)[topk_ids]
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        gate_up, down = self.weights or (w1, w2)
        moe_mlp(
            hidden_states, gate_up, down, topk_ids, topk_weights, self._act.function, gated=self._act.gated,
            interleaved=self._act.interleaved, gate_up_bias=self.w1_bias, down_bias=self.w2_bias, out=output,
        )  # fmt: skip

    def _with_none(self, expert_map: torch.Tensor) -> torch.Tensor:
        """The map with one -1 more at its end, where an id of -1 looks (of padding, and of other ranks' experts)."""
        if self._map is None or self._map[0] is not expert_map:
            self._map = expert_map, torch.cat([expert_map, expert_map.new_full((1,), -1)])
        return self._map[1]
