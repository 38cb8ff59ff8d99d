"""The quantised weights of experts of transformers' models, as they lie in a module.

A module's codes are put into the kernels' order in place, by the first call on a GPU that has a kernel for them. What
reads them otherwise finds them as the checkpoint has them: they are put back before the module's state is read or
loaded, and before another implementation of the experts runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...runtime.check.tensors import bad
from ...runtime.weights.expert_weights import ExpertWeights
from ...runtime.weights.packings import fp8_scale

_NAME = "_pretuned_weights"
# Of codes and scales: of transformers' fp8, of gpt-oss, and of compressed-tensors' packed and other codes.
ENDS = (("", "_scale_inv"), ("_blocks", "_scales"), ("_packed", "_scale"), ("", "_scale"))
_GROUPS = (32, 64, 128)  # of int4


class _Held(NamedTuple):
    """The weights of one product, and the parameters that they lie in."""

    codes: torch.Tensor
    scale: torch.Tensor
    weights: ExpertWeights

    def is_of(self, codes: torch.Tensor, scale: torch.Tensor) -> bool:
        """Whether these are the parameters."""
        return codes is self.codes and scale is self.scale

    def holds(self, codes: torch.Tensor, scale: torch.Tensor) -> bool:
        """Whether these are the parameters, and nothing has moved them."""
        return self.is_of(codes, scale) and codes.data_ptr() == self.weights.codes.data_ptr()


def quantised(experts: Any, name: str) -> ExpertWeights | None:
    """A module's weights of a product, if they are quantised: fp8, mxfp4 or int4.

    Raises
    ------
    InputError
        for scales of other blocks, and what ``ExpertWeights`` refuses.
    """
    for codes_end, scale_end in ENDS:  # the scale first: to read w that has an adapter of PEFT's makes W + s B A
        scale = getattr(experts, name + scale_end, None)
        codes = None if scale is None else getattr(experts, name + codes_end, None)
        if codes is not None:
            break
    else:
        return None
    if not isinstance(codes, torch.Tensor) or not isinstance(scale, torch.Tensor):
        return None
    if codes.element_size() != 1 and codes.dtype is not torch.int32:
        return None
    if name + codes_end in experts.__dict__.get("_modules", {}).get("parametrizations", ()):
        bad(name, "codes that a parametrization adds to (PEFT's, as adapters are put on while experts don't run on "
            "pretuned)", "adapters put on by get_peft_model after register(), of a model with "
            "experts_implementation='pretuned'", "experts_forward")  # fmt: skip
    if torch.compiler.is_compiling():
        known = experts.__dict__.get(_NAME, {}).get(name)
        if known is not None and known.is_of(codes, scale) and known.weights.device == codes.device:
            return known.weights  # type: ignore[no-any-return]  # (a graph can't look at addresses)
        return torch.compiler.disable(quantised)(experts, name)  # type: ignore[no-untyped-call,no-any-return]
    every: dict[str, _Held] = experts.__dict__.setdefault(_NAME, {})
    known = every.get(name)
    if known is not None and known.holds(codes, scale):
        return known.weights
    # One that was moved is in the order in which it was.
    order = known.weights.order if known is not None and codes is known.codes else 0
    if not every:
        _watch(experts)
    weights = _made(codes.detach(), scale.detach(), order)
    every[name] = _Held(codes, scale, weights)
    return weights


def _made(codes: torch.Tensor, scale: torch.Tensor, order: int) -> ExpertWeights:
    if codes.dtype is torch.int32:  # eight codes each, the lowest bits first
        made = ExpertWeights.int4(codes.view(torch.uint8), scale)
    elif codes.dtype is torch.float8_e4m3fn and scale.shape[1:] == (codes.shape[1], 1):
        made = ExpertWeights.fp8_channel(codes, fp8_scale(scale[..., 0]), quantize_x=False)
    elif codes.dtype is torch.float8_e4m3fn:
        made = ExpertWeights.fp8_block(codes, fp8_scale(scale), quantize_x=False)
    else:
        made = ExpertWeights.mxfp4(codes.view(torch.uint8), scale.view(torch.uint8))
    if order:
        made = ExpertWeights.from_state_dict(made.format, made.state_dict() | {"order": torch.tensor(order)})
    return made


def follow(experts: Any) -> None:
    """Hold a module's codes where they lie now: after a move, which a traced call can't see."""
    for name, one in list(experts.__dict__.get(_NAME, {}).items()):
        if not one.codes.is_meta:
            quantised(experts, name)


def restore(experts: Any) -> None:
    """Put a module's codes back into the checkpoint's order."""
    for one in experts.__dict__.get(_NAME, {}).values():
        if one.holds(one.codes, one.scale):
            one.weights.restore()


def _watch(experts: Any) -> None:
    """Have the codes put back before something else reads them."""
    experts.register_state_dict_pre_hook(_before_state)
    experts.register_load_state_dict_pre_hook(_before_load)
    experts.register_forward_pre_hook(_before_forward)


def _before_state(experts: Any, prefix: str, keep_vars: bool) -> None:
    restore(experts)


def _before_load(experts: Any, *_: Any) -> None:
    restore(experts)


def _before_forward(experts: Any, _: Any) -> None:
    if getattr(experts.config, "_experts_implementation", None) != "pretuned":
        restore(experts)


def keep_mxfp4() -> None:
    """Have transformers load gpt-oss with its experts as the checkpoint has them, for "pretuned" alone.

    It needs no package ``kernels``, and no GPU. A second call does nothing.
    """
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer

    if auto.AUTO_QUANTIZER_MAPPING["mxfp4"].__module__ == __name__:
        return

    class PackedMxfp4Quantizer(HfQuantizer):
        """Loads the tensors of experts by their own names."""

        def validate_environment(self, *_: Any, **__: Any) -> None:
            """Nothing is needed."""

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            for module in model.modules():
                if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj") and hasattr(module, "num_experts"):
                    _pack(module)

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            """Adapters beside it are: transformers' Trainer asks."""
            return True

    auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = PackedMxfp4Quantizer


def _pack(experts: Any) -> None:
    """Give a module of gpt-oss's experts parameters for codes and scales in the place of its weights."""
    E, H, I = experts.num_experts, experts.hidden_size, experts.intermediate_size  # noqa: E741
    for name, N, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        device = getattr(experts, name).device
        delattr(experts, name)
        for end, shape in (("_blocks", (E, N, K // 32, 16)), ("_scales", (E, N, K // 32))):
            one = torch.nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=device), requires_grad=False)
            experts.register_parameter(name + end, one)
    experts.is_transposed = False
    experts._is_hf_initialized = True  # all of it is in the checkpoint, and what would draw it looks for the weights


def keep_compressed_tensors() -> None:
    """Have transformers load compressed-tensors' experts as the checkpoint has them, where "pretuned" runs them.

    These are int4 in symmetric groups, mxfp4, and fp8 with a scale for each 128 x 128 or each row. All else is loaded
    as transformers does it: experts dequantised; so is all by a transformers before 5.23. A second call does nothing.
    """
    from transformers.quantizers import auto

    known: Any = auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"]
    if known.__module__ == __name__ or not hasattr(known, "serialized_names"):
        return

    class PackedExpertsQuantizer(known):  # type: ignore[misc]
        """Gives experts parameters for codes and scales; transformers then merges these as it merges weights."""

        def _process_model_before_weight_loading(self, model: Any, **more: Any) -> None:
            super()._process_model_before_weight_loading(model, **more)
            for name, module in model.named_modules():
                run = getattr(getattr(module, "config", None), "_experts_implementation", None)
                if run == "pretuned" and hasattr(module, "is_transposed") and not self.quantization_config.dequantize:
                    _pack_compressed(module, _codes_of(self.compressor.quantization_config, name))

        def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
            """Scales of experts stay in their type."""
            if str(getattr(converter, "target_patterns", [""])[0]).endswith("_proj_scale"):
                return None
            return super().get_new_dtype(converter, param, dtype)

    auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"] = PackedExpertsQuantizer  # type: ignore[assignment]


class _StoredCodes(NamedTuple):
    """How experts lie in a checkpoint: the name's end and type of codes, how many one holds, and a scale's block."""

    end: str
    dtype: torch.dtype
    many: int
    scale: torch.dtype
    block: tuple[int, int]  # of rows and columns; 0: all


def _codes_of(config: Any, name: str) -> _StoredCodes | None:
    """Those of the experts of this name, or None where they are not kept."""
    from compressed_tensors.utils.match import match_name
    from transformers.integrations.compressed_tensors import get_experts_scheme

    if any(match_name(f"{name}.0.{part}_proj", one) for one in config.ignore or () for part in ("gate", "up", "down")):
        return None
    scheme = get_experts_scheme(config)  # type: ignore[no-untyped-call]
    weights = scheme.weights
    packing, kind, strategy = (
        str(getattr(one, "value", one)) for one in (scheme.format or config.format, weights.type, weights.strategy)
    )
    if packing == "pack-quantized" and (weights.num_bits, kind, strategy) == (4, "int", "group"):
        if weights.symmetric and weights.group_size in _GROUPS and not weights.actorder:
            return _StoredCodes("_packed", torch.int32, 8, torch.bfloat16, (1, weights.group_size))
    elif packing == "mxfp4-pack-quantized":
        return _StoredCodes("_packed", torch.uint8, 2, torch.uint8, (1, 32))
    elif packing == "float-quantized" and (weights.num_bits, kind) == (8, "float"):
        if strategy == "channel":
            return _StoredCodes("", torch.float8_e4m3fn, 1, torch.float32, (1, 0))
        if strategy == "block" and list(weights.block_structure) == [128, 128]:
            return _StoredCodes("", torch.float8_e4m3fn, 1, torch.float32, (128, 128))
    return None


def _pack_compressed(experts: Any, codes: _StoredCodes | None) -> None:
    names = [name for name in ("gate_up_proj", "up_proj", "down_proj") if hasattr(experts, name)]
    if codes is None or experts.is_transposed or "down_proj" not in names:
        return
    for name in names:
        w = getattr(experts, name)
        delattr(experts, name)
        E, N, K = w.shape
        rows, columns = codes.block
        parts: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            (codes.end, (E, N, K // codes.many), codes.dtype),
            ("_scale", (E, -(-N // rows), -(-K // (columns or K))), codes.scale),
        ]
        if codes.dtype is torch.int32:  # beside them, of each matrix: nothing here reads it
            parts.append(("_shape", (E, 4 if name == "gate_up_proj" else 2), torch.int64))
        for end, shape, dtype in parts:
            one = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=w.device), requires_grad=False)
            experts.register_parameter(name + end, one)
    experts._is_hf_initialized = True  # all of it is in the checkpoint, and what would draw it looks for the weights
