"""vLLM's MoE layers with quantised weights on pretuned: which layers, and how their weights are loaded and prepared.

The checkpoint's tensors are loaded unchanged; then each GEMM's parameters become prepared weights. Weights that are
loaded again (``reload_weights``) are written into the first ones' memory, so captured graphs stay valid.

If preparing the weights or the first forward fails, vLLM's own method takes the layer over, with the loaded weights in
the checkpoint's layout.

Imported only inside vLLM, by ``__init__.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend, make_unquantized_moe_kernel
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from ...artifacts.errors import InputError
from ...artifacts.records import PRECISIONS
from ...runtime.ops.activation import RowActivation
from ...runtime.weights.checkpoints import gptq_zeros
from ...runtime.weights.expert_weights import ExpertWeights
from ..loaded_format import A4, STATIC_X, LoadedFormat, int4_name, order_refusal
from ..served_layer import pad_bias, prepared, widened
from . import PLUG_IN
from .experts import (
    ActivationNumbers,
    PretunedBatchedExperts,
    PretunedExperts,
    activation_of,
    is_batched,
    layer_of,
    load_kernels,
    refusal_of,
    tell_left,
    tell_taken,
    try_once,
)

_KERNEL_BLOCK = 64  # kernels for codes need N and K to be multiples of it
_WORD = 8  # int4 codes or zero points in an int32
_CODES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8, "int4": torch.int32}
_SCALES = {"fp32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": None}


@dataclass(frozen=True)
class Format(LoadedFormat):
    """The format of a layer's parameters, and how vLLM's loader spreads them over ranks.

    ``loaded_by``: vLLM's name for the split of scales, "tensor" or "channel" for fp8; others are split like codes.
    ``unread``: name ends of tensors that are loaded but not used: x's scales, and GPTQ's g_idx, which is ascending.
    """

    loaded_by: str = "group"
    unread: tuple[str, ...] = ()

    @property
    def is_copied(self) -> bool:
        """True if no loaded tensor can be computed from the prepared weights."""
        return self.has_zeros or bool(self.packing)

    @property
    def lost(self) -> tuple[str, ...]:
        """The name ends of loaded tensors that can't be computed from the prepared weights."""
        return self.ends if self.is_copied else self.derived

    @property
    def rows(self) -> tuple[int, int]:
        """The rows and columns of w that share one scale."""
        return max(1, self.scale.rows), max(1, self.scale.columns)

    @property
    def per_word(self) -> int:
        """The number of weights in one element of the codes' parameter."""
        bits = PRECISIONS[self.name].w.bits
        return 1 if bits == 8 else _WORD if self.dtypes[0] is torch.int32 else 8 // bits

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype | None, torch.dtype]:
        """The dtypes of codes, scales (None: the layer's dtype), and zero points or global scales."""
        more = torch.int32 if self.has_zeros or self.packing else torch.float32
        return _CODES[PRECISIONS[self.name].w.name], _SCALES[self.scale.name], more

    def shapes(self, N: int, K: int, parts: int) -> list[tuple[int, ...]]:
        """The shapes of an expert's tensors in the checkpoint. ``parts``: 2 for gate and up, 0 for down."""
        rows, columns = self.rows
        groups, of_parts = -(-K // columns), (parts,) if parts else ()
        if self.K_first:
            codes = (K, N // _WORD) if self.packing == "awq" else (K // _WORD, N)
            return [codes, (groups, N), (groups, N // _WORD)]
        scale = {"tensor": of_parts, "channel": (N, 1)}.get(self.loaded_by, (-(-N // rows), groups))
        return [(N, K // self.per_word), scale, (N // _WORD, groups) if self.has_zeros else of_parts]


def _fp8(method: Any) -> Format | str:
    config, block = getattr(method, "quant_config", None), getattr(method, "weight_block_size", None)
    scale = getattr(method, "weight_scale_name", "weight_scale")
    static = getattr(config, "activation_scheme", "dynamic") != "dynamic" or getattr(
        method, "static_input_scales", type(method).__name__ == "ModelOptFp8MoEMethod"
    )
    if block is None:
        strategy = getattr(getattr(method, "weight_quant", None), "strategy", "tensor")
        strategy = getattr(strategy, "value", strategy)
        algorithm = getattr(config, "quant_method", "FP8")
        if algorithm != "FP8":
            return f"modelopt's {algorithm}"
        if strategy not in ("tensor", "channel"):
            return f"fp8 with a scale for each {strategy}: pretuned serves tensors, rows and blocks of [128, 128]"
        format = Format("fp8_channel", ("weight", scale), loaded_by=strategy)
        return replace(format, unread=("input_scale",), note=STATIC_X) if static else format
    if list(block) != [128, 128]:
        return f"fp8 with a scale for each {block}: pretuned serves tensors, rows and blocks of [128, 128]"
    if static:
        return "static scales of the activations"
    return Format("fp8_block", ("weight", scale), loaded_by="block")


def _mxfp4(codes: str) -> Callable[[Any], Format | str]:
    return lambda _: Format("mxfp4", (codes, "weight_scale"))


def _mxfp8(_: Any) -> Format | str:
    return Format("mxfp8", ("weight", "weight_scale"))


def _nvfp4(codes: str, outer: str, x: str) -> Callable[[Any], Format | str]:
    def read(method: Any) -> Format | str:
        group = getattr(getattr(method, "quant_config", None), "group_size", 16)
        if group != 16:
            return f"nvfp4 in groups of {group}: pretuned serves groups of 16"
        note = "" if getattr(method, "use_a16", False) else A4
        ends = (codes, "weight_scale", outer)
        return Format("nvfp4", ends, divides=outer == "weight_global_scale", unread=(x,), note=note)

    return read


def _int4(method: Any) -> Format | str:
    how = method.weight_quant
    name, why = int4_name(method.num_bits, method.group_size, zeros=not how.symmetric)
    order = order_refusal(getattr(how, "actorder", None))
    if name is None or order is not None:
        return why or str(order)
    ends = ("weight_packed", "weight_scale")
    return Format(name, ends if how.symmetric else (*ends, "weight_zero_point"))


def _awq(method: Any) -> Format | str:
    how = method.quant_config
    name, why = int4_name(how.weight_bits, how.group_size, zeros=True)
    if name is None:
        return why
    return _k_first(name, "awq") if how.zero_point else "AWQ without zero points"


def _gptq(method: Any) -> Format | str:
    how = method.quant_config
    name, why = int4_name(how.weight_bits, how.group_size, zeros=not how.is_sym)
    if name is None:
        return why
    if how.desc_act:
        return "groups of another order (desc_act, g_idx)"
    return _k_first(name, "gptq") if how.is_sym else _gptq_zeros(name, how.full_config)


def _gptq_zeros(name: str, config: Any) -> Format | str:
    try:
        less_one, by_word = gptq_zeros(config)
        return _k_first(name, "gptq", less_one=less_one, by_word=by_word)
    except InputError as error:
        return str(error)


def _k_first(name: str, packing: str, **how: Any) -> Format:
    return Format(name, ("qweight", "scales", "qzeros"), packing, unread=("g_idx",) if packing == "gptq" else (), **how)


def _wna16(method: Any) -> Format | str:
    """The format of ``--quantization moe_wna16``: AWQ's or GPTQ's tensors, which vLLM's own loader would rewrite."""
    if not hasattr(method, "wna16_backend"):
        return "moe_wna16 of a vLLM before 0.32"
    how = method.quant_config
    is_awq, config = how.linear_quant_method != "gptq", how.full_config
    name, why = int4_name(how.weight_bits, how.group_size, zeros=how.has_zp)
    if name is None:
        return why
    if is_awq:
        return _k_first(name, "awq") if how.has_zp else "AWQ without zero points"
    if config.get("desc_act"):
        return "groups of another order (desc_act, g_idx)"
    return _gptq_zeros(name, config) if how.has_zp else _k_first(name, "gptq")


# By the class name of vLLM's method for such a layer, in 0.20 or later.
_FORMATS: dict[str, Callable[[Any], Format | str]] = {
    "Fp8MoEMethod": _fp8,
    "CompressedTensorsW8A8Fp8MoEMethod": _fp8,
    "ModelOptFp8MoEMethod": _fp8,
    "GptOssMxfp4MoEMethod": _mxfp4("weight"),
    "Mxfp4MoEMethod": _mxfp4("weight"),
    "CompressedTensorsW4A4Mxfp4MoEMethod": _mxfp4("weight_packed"),
    "CompressedTensorsW4A8Mxfp4MoEMethod": _mxfp4("weight_packed"),  # tokens are not quantised
    "CompressedTensorsW8A8Mxfp8MoEMethod": _mxfp8,  # tokens are not quantised
    "ModelOptMxFp8FusedMoE": _mxfp8,
    "INCMxfp4MoEMethod": _mxfp4("weight_packed"),  # tokens are not quantised
    "INCMxfp8MoEMethod": _mxfp8,  # tokens are not quantised
    "CompressedTensorsW4A4Nvfp4MoEMethod": _nvfp4("weight_packed", "weight_global_scale", "input_global_scale"),
    "ModelOptNvFp4FusedMoE": _nvfp4("weight", "weight_scale_2", "input_scale"),
    "CompressedTensorsWNA16MoEMethod": _int4,
    "CompressedTensorsWNA16MarlinMoEMethod": _int4,
    "AutoAWQMoEMethod": _awq,
    "AutoGPTQMoEMethod": _gptq,
    "MoeWNA16Method": _wna16,
}
_MASKED = "BATCHED_DEEPGEMM"  # up to 1.4x as fast on an H200, for x in codes (benchmarks/results/padded-rows-h200.json)
_INTERLEAVED = "GptOssMxfp4MoEMethod"  # only its checkpoints have swigluoai's gate and up in alternating rows


def take(own: Any, layer: Any, *, everywhere: bool) -> Any:
    """Pretuned's method for a layer, or vLLM's ``own`` if pretuned can't run the layer; the reason is logged once.

    ``everywhere`` is as in ``experts.take``.
    """
    read = _FORMATS.get(type(own).__name__)
    if read is None:
        return own
    moe, format = own.moe, read(own)
    act = activation_of(moe, ActivationNumbers.of(moe, layer))
    why = format if isinstance(format, str) else refusal(own, act, format, everywhere=everywhere)
    if why is not None or isinstance(format, str) or isinstance(act, str):
        form = "" if isinstance(format, str) else f" {format.name}"
        what = f"E={moe.num_local_experts} H={moe.hidden_dim} I={moe.intermediate_size_per_partition}{form}"
        tell_left(what, _backend(own), str(why))
        return own
    method = PretunedQuantisedMethod(moe, format, act, own)
    tell_taken(layer_of(moe, act, format.dtype), format.note)
    return method


def refusal(own: Any, act: RowActivation | str, format: Format, *, everywhere: bool) -> str | None:
    """Why pretuned does not run a layer with this activation and these weights; None if it does."""
    moe = own.moe
    H, I = moe.hidden_dim, moe.intermediate_size_per_partition  # noqa: E741
    rows, group = format.rows
    wanted = max(_KERNEL_BLOCK, group)
    if H % wanted:
        return f"the hidden size, {H}, is no multiple of {wanted}"
    # I is padded if it is a multiple of the group size. For any other I, only gpt-oss's loader splits by whole groups.
    by_groups = type(own).__name__ == _INTERLEAVED
    if I % max(rows, group) and not by_groups:
        return f"the intermediate size of a rank, {I}, is no multiple of {max(rows, group)}"
    if by_groups and not _own_width(moe, format):
        return "no part of the intermediate size is this rank's"
    if moe.activation.value == "swigluoai" and type(own).__name__ != _INTERLEAVED:
        return "swigluoai with gate and up in halves"
    if is_batched(moe) and _backend(own) == _MASKED and not everywhere:
        return "DeepGEMM's masked kernel is faster on tokens padded by expert"
    if current_platform.is_cuda() and moe.in_dtype is not torch.bfloat16:
        return f"the tokens are {moe.in_dtype}: kernels of quantised weights multiply bfloat16"
    return refusal_of(moe, act, format.dtype, everywhere=everywhere)


def _backend(own: Any) -> str:
    """The name of the backend that vLLM would use for a layer."""
    kinds = ("fp8", "mxfp4", "mxfp8", "nvfp4", "wna16", "wna16_moe", "kernel")
    for name in (f"{kind}_backend" for kind in kinds):
        backend = getattr(own, name, None)
        if backend is not None:
            return str(getattr(backend, "value", backend))
    return type(own).__name__


class PretunedQuantisedExperts(PretunedExperts):
    """pretuned's experts with quantised weights, which the method sets once they are loaded."""

    def _load(self, moe_config: Any) -> None:
        """Do nothing: kernels are loaded with the weights, as they depend on the weights' dtype."""


class PretunedQuantisedBatchedExperts(PretunedBatchedExperts):
    """pretuned's experts with quantised weights, for tokens that an all-to-all groups by expert."""

    def _load(self, moe_config: Any) -> None:
        """Do nothing: kernels are loaded with the weights, as they depend on the weights' dtype."""


class PretunedQuantisedMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """pretuned's method for a layer with quantised weights, in place of ``own``, vLLM's method for the layer."""

    def __init__(self, moe: Any, format: Format, act: RowActivation, own: Any = None) -> None:
        super().__init__(moe)
        self.format, self.act, self.own = format, act, own
        self._passed_over: list[tuple[str, torch.Tensor, tuple[Any, ...], dict[str, Any]]] = []
        self._by_groups = type(own).__name__ == _INTERLEAVED  # vLLM's loader gives each rank whole groups of I
        self.moe_kernel: Any = None  # None until weights are loaded
        self._created: tuple[dict[str, Any], dict[str, Any]] = {}, {}  # the arguments of ``create_weights``
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None  # for vLLM, which reads E and N
        self._loaded: dict[str, torch.Tensor] = {}  # loaded tensors to give back on failure

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """The sizes (H, I) of a rank's parameters. For gpt-oss I is a multiple of 32: its loader splits I by groups."""
        H, I = super().maybe_roundup_sizes(  # noqa: E741
            hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        return H, _share(I, self.format) if self._by_groups else I

    @property
    def is_monolithic(self) -> bool:
        """False: the router is vLLM's."""
        return False

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Create empty parameters with the shapes of this rank's part of the checkpoint's tensors."""
        E, H, I, format = num_experts, hidden_size, intermediate_size_per_partition, self.format  # noqa: E741
        self._created = {"num_experts": E, "params_dtype": params_dtype}, dict(attributes)
        layer.num_experts, layer.orig_dtype, layer.params_dtype = E, params_dtype, params_dtype
        if "input_scale" not in format.unread:
            layer.w13_input_scale = layer.w2_input_scale = None
        attributes.pop("intermediate_size_full", None)
        attributes |= {"is_transposed": format.K_first}
        parts = 2 if self.moe.is_act_and_mul else 1
        dtypes = [dtype or params_dtype for dtype in format.dtypes]
        of_scale = attributes | {"quant_method": format.loaded_by, "load_full_w2": False}
        of_tensor = of_scale | {"quant_method": "tensor"}
        if format.name in ("mxfp4", "mxfp8") and "weight_loader" in attributes:
            of_scale["weight_loader"] = _scale_loader(attributes["weight_loader"])
        kinds = (
            of_scale if format.packing else attributes,
            of_scale,
            of_scale if format.has_zeros or format.packing else of_tensor,
        )
        for which, N, K, halves in (("w13", parts * I, H, parts), ("w2", H, I, 0)):
            for end, shape, dtype, kind in zip(format.ends, format.shapes(N, K, halves), dtypes, kinds, strict=False):
                _parameter(layer, f"{which}_{end}", torch.zeros(E, *shape, dtype=dtype), kind)
            if format.ends[0] == "weight_packed" and format.name.startswith("int4"):
                _parameter(layer, f"{which}_weight_shape", torch.zeros(E, 2, dtype=torch.float32), of_scale)
            for name in (f"{which}_{end}" for end in format.unread if "weight_loader" in attributes):
                _parameter(
                    layer,
                    name,
                    torch.empty(0, dtype=torch.float32),
                    of_tensor | {"weight_loader": self._passing_over(name)},
                )
            if self.moe.has_bias or format.packing == "gptq":  # GPTQ checkpoints may have biases that the model lacks
                _parameter(layer, f"{which}_bias", torch.zeros(E, N, dtype=self.moe.in_dtype), attributes)

    def _passing_over(self, name: str) -> Callable[..., bool]:
        """A loader for a tensor that pretuned does not read: it is kept as long as vLLM may take the layer back."""

        def loader(param: Any, loaded_weight: torch.Tensor, *arguments: Any, **named: Any) -> bool:
            if self.own is not None:
                self._passed_over.append((name, loaded_weight.clone(), arguments, named))
            return True

        return loader

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace loaded parameters by prepared ones; the first time, also build the kernel.

        If that fails the first time, vLLM's own method takes the layer.

        Raises
        ------
        InputError
            if reloaded weights suit no kernel, or have another layout than the first.
        """
        is_first = self.moe_kernel is None and self.own is not None
        if not is_first:
            self._prepare(layer)
            return
        try:
            self._prepare(layer)
            try_once(self.moe_kernel.fused_experts, layer, getattr(layer, f"w13_{self.format.ends[0]}"))
        except Exception as error:
            PLUG_IN.failed("prepare or run a layer", error)
            PLUG_IN.count_given_back()
            self._give_back(layer)
        self.own = None
        self._loaded.clear()
        self._passed_over.clear()

    def _prepare(self, layer: Any) -> None:
        if self.format.packing == "gptq" and not self.moe.has_bias:
            names = ("w13_bias", "w2_bias")
            for name in names:
                if name not in getattr(layer, "_loaded_expert_biases", names):
                    layer.register_parameter(name, None)
        if self.moe_kernel is not None:
            self._write_again(layer, self.moe_kernel.fused_experts.weights)
            self._pad_bias(layer)
            return
        weights = tuple(self._prepared(layer, which) for which in ("w13", "w2"))
        self._pad_bias(layer)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = _kernel(self, layer)
        self.moe_kernel.fused_experts.weights, self.moe_kernel.fused_experts.act = weights, self.act
        self._rows = tuple(w.codes.view(*w.shape[:2], -1) for w in weights)  # type: ignore[assignment]
        load_kernels(layer_of(self.moe, self.act, self.format.dtype))

    def _write_again(self, layer: Any, first: tuple[ExpertWeights, ...]) -> None:
        """Write reloaded weights into the first weights' memory, where captured graphs read them.

        Raises
        ------
        InputError
            for weights that the first weights' layout can't represent; then nothing was written.
        """
        pairs = []
        for which, old in zip(("w13", "w2"), first, strict=True):
            new = self._padded(layer, which, self._tensors(layer, which))
            if old.is_prepared != new.can_be_prepared:
                raise InputError(f"pretuned: the weights loaded again are {new}, the first were {old}: start anew")
            pairs.append((which, old, new))
        for which, old, new in pairs:
            self._replace(layer, which, old.copy_(new, check=False))

    def _give_back(self, layer: Any) -> None:
        """Have vLLM's own method take the layer, with the weights that were loaded."""
        own, moe, self.moe_kernel = self.own, self.moe, None
        loaded = {
            name: parameter.data
            for name, parameter in layer.named_parameters(recurse=False)
            if name.startswith(("w13_", "w2_"))
        }
        for which in ("w13", "w2"):
            self._restore(loaded, which)
        for name in loaded:
            delattr(layer, name)
        H, I = own.maybe_roundup_sizes(  # noqa: E741
            moe.hidden_dim, moe.intermediate_size_per_partition, moe.in_dtype, moe.moe_parallel_config
        )
        first, rest = self._created
        with next(iter(loaded.values())).device:
            own.create_weights(layer, hidden_size=H, intermediate_size_per_partition=I, **first, **rest)
        halves = 2 if moe.is_act_and_mul and type(own).__name__ != _INTERLEAVED else 1
        for name, own_parameter in layer.named_parameters(recurse=False):
            if name in loaded and loaded[name].numel():
                _copy(loaded[name], own_parameter, halves if name.startswith("w13_") else 1)
        moe.hidden_dim, moe.intermediate_size_per_partition = H, I
        for name, size in (("hidden_size", H), ("intermediate_size_per_partition", I)):
            if name in vars(layer):  # in older layers these are properties that read ``moe``
                setattr(layer, name, size)
        layer._replace_quant_method(own)  # vLLM's loader reads the method from the layer
        for name, scale, arguments, named in self._passed_over:
            parameter = getattr(layer, name, None)
            if parameter is not None:
                parameter.weight_loader(parameter, scale, *arguments, **named)
        own.process_weights_after_loading(layer)

    def _prepared(self, layer: Any, which: str) -> ExpertWeights:
        """Prepare one GEMM's weights, put them into the layer's parameters, and return them."""
        loaded = self._tensors(layer, which)
        if self.own is not None:
            self._loaded |= {f"{which}_{end}": loaded[end] for end in self.format.lost}
        weights = self._padded(layer, which, loaded)
        (ready,) = prepared((weights,), "PRETUNED_VLLM", on_gpu=current_platform.is_cuda())
        self._replace(layer, which, ready)
        return ready

    def _tensors(self, layer: Any, which: str) -> dict[str, torch.Tensor]:
        """The loaded tensors of one product."""
        return {end: getattr(layer, f"{which}_{end}").data for end in self.format.ends}

    def _replace(self, layer: Any, which: str, weights: ExpertWeights) -> None:
        """Set the layer's parameters to the tensors of prepared weights."""
        for end, tensor in self.format.tensors_of(weights).items():
            name = f"{which}_{end}"
            if self.format.is_copied or tensor.shape != getattr(layer, name).shape:
                layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    @property
    def _width(self) -> int:
        """I of this rank's prepared weights."""
        return layer_of(self.moe, self.act, self.format.dtype).width

    @property
    def _own_width(self) -> int:
        """The columns of I that were loaded on this rank."""
        moe = self.moe
        return _own_width(moe, self.format) if self._by_groups else int(moe.intermediate_size_per_partition)

    def _padded(self, layer: Any, which: str, loaded: dict[str, torch.Tensor]) -> ExpertWeights:
        """The padded weights of one product. If possible, the layer's parameters then share their memory."""
        own, width, is_down = self._own_width, self._width, which == "w2"
        if own == width:
            return self.format.weights(*loaded.values())
        if self._by_groups:  # the last rank's parameters are larger than its share
            w, group = self.format.per_word, self.format.rows[1]
            sizes = (own // w, own // group) if is_down else [own * (2 if self.act.gated else 1)] * 2
            parts = zip(loaded.items(), sizes, strict=True)
            loaded = {end: tensor.narrow(2 if is_down else 1, 0, size).contiguous() for (end, tensor), size in parts}
        padded = widened(self.format.weights(*loaded.values()), width, self.act, down=is_down)
        for end, tensor in () if self.format.is_copied else self.format.tensors_of(padded).items():
            parameter = getattr(layer, f"{which}_{end}")
            parameter.data = tensor.view(parameter.dtype)
        return padded

    def _pad_bias(self, layer: Any) -> None:
        """Pad gate_up's bias as gate_up's weights are padded."""
        own, width, bias = self._own_width, self._width, getattr(layer, "w13_bias", None)
        if bias is None or own == width:
            return
        bias.data = pad_bias(bias.data, own, width, self.act)

    def _restore(self, loaded: dict[str, torch.Tensor], which: str) -> None:
        """Replace a product's prepared tensors in ``loaded`` by tensors in the checkpoint's layout."""
        codes, scale = (f"{which}_{end}" for end in self.format.ends[:2])
        if not self.format.is_copied and loaded[codes].dim() > 3:
            format = self.format
            plain = ExpertWeights(format.name, loaded[codes], loaded[scale]).restore()
            loaded[codes], loaded[scale] = plain.codes.view(format.dtypes[0]), plain.scale
        for name in (f"{which}_{end}" for end in self.format.lost):
            raw = self._loaded.get(name, loaded[name])
            loaded[name] = raw.mT if self.format.K_first else raw  # vLLM's parameter has K first, too: see ``_copy``

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """The config of unquantised tokens: the experts have the quantised weights themselves."""
        return biased_moe_quant_config(getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None))

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **shared: Any
    ) -> torch.Tensor:
        """Run the layer's routed experts. ``shared`` has vLLM's arguments for shared experts, if any."""
        out: torch.Tensor = self.moe_kernel.apply(
            x,
            *(self._rows or ()),
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            **shared,
        )
        return out


def _share(width: int, format: Format) -> int:
    """A rank's columns of I, ``width``, rounded up to whole scale groups."""
    group = format.rows[1]
    return -(-width // group) * group


def _own_width(moe: Any, format: Format) -> int:
    """This rank's columns of I, split by whole scale groups; the last rank may have fewer."""
    parallel, width = moe.moe_parallel_config, moe.intermediate_size_per_partition_unpadded
    whole: int = getattr(moe, "intermediate_size", width * parallel.tp_size)  # older vLLM has only the rank's size
    share = _share(width, format)
    own: int = max(0, min(share, whole - share * parallel.tp_rank))
    return own


def _parameter(layer: Any, name: str, data: torch.Tensor, attributes: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(data, requires_grad=False)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, attributes)


def _scale_loader(load: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's loader, which gets the bytes of e8m0 scales: a copy from e8m0 would convert the values to integers."""

    @functools.wraps(load)
    def loader(param: Any, loaded_weight: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if loaded_weight.is_floating_point():
            loaded_weight = loaded_weight.to(torch.float8_e8m0fnu).view(torch.uint8)
        return load(param, loaded_weight, *arguments, **named)

    return loader


def _copy(loaded: torch.Tensor, parameter: torch.Tensor, halves: int) -> None:
    """Copy one of a checkpoint's tensors to vLLM's parameter, whose padding may differ, and which may have K before N.

    The rows of ``loaded`` [E, N, ...] are ``halves`` parts, each padded by itself. Elements outside the parameter's
    shape are padding, and are dropped.
    """
    is_turned = getattr(parameter, "is_transposed", False) and loaded.dim() == 3
    to = parameter.data.mT if is_turned else parameter.data
    if loaded.dim() == 1 or to.shape == loaded.shape:
        to.copy_(loaded)
        return
    to.zero_()
    for part, place in zip(loaded.chunk(halves, 1), to.chunk(halves, 1), strict=True):
        both = tuple(map(slice, map(min, part.shape, place.shape)))
        place[both].copy_(part[both])


def _kernel(method: PretunedQuantisedMethod, layer: Any) -> Any:
    """vLLM's modular kernel with pretuned's experts. Some vLLM versions pass the layer's shared experts to it."""
    tables = getattr(layer, "_expert_routing_tables", None) or layer._maybe_init_expert_routing_tables
    takes = inspect.signature(make_unquantized_moe_kernel).parameters
    return make_unquantized_moe_kernel(
        quant_config=method.moe_quant_config,
        moe_config=method.moe,
        backend=UnquantizedMoeBackend.TRITON,
        experts_cls=PretunedQuantisedBatchedExperts if is_batched(method.moe) else PretunedQuantisedExperts,
        routing_tables=tables(),
        **({"shared_experts": layer.shared_experts} if "shared_experts" in takes else {}),
    )
