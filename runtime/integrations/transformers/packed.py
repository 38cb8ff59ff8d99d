"""Loaders that keep quantised experts of transformers' checkpoints packed: codes and scales as parameters.

``quantised.py`` reads these parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..loaded_format import GROUPS, order_refusal


def keep_mxfp4() -> None:
    """Have transformers keep gpt-oss's experts packed as in the checkpoint, if "pretuned" runs them.

    The package ``kernels`` and a GPU are not needed. A second call does nothing.
    """
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer

    if auto.AUTO_QUANTIZER_MAPPING["mxfp4"].__module__ == __name__:
        return

    class PackedMxfp4Quantizer(HfQuantizer):
        """Loads experts' packed tensors, as parameters with the checkpoint's names."""

        def validate_environment(self, *_: Any, **__: Any) -> None:
            """Do nothing: loading needs no package and no GPU."""

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            for module in model.modules():
                if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj") and hasattr(module, "num_experts"):
                    _pack(module)

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            """True, as transformers' Trainer requires: adapters are trained, the packed weights are not."""
            return True

    auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = PackedMxfp4Quantizer


def _pack(experts: Any) -> None:
    """Replace the weights of a gpt-oss experts' module by parameters for codes and scales."""
    E, H, I = experts.num_experts, experts.hidden_size, experts.intermediate_size  # noqa: E741
    for name, N, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        device = getattr(experts, name).device
        delattr(experts, name)
        for end, shape in (("_blocks", (E, N, K // 32, 16)), ("_scales", (E, N, K // 32))):
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=device), requires_grad=False)
            experts.register_parameter(name + end, parameter)
    experts.is_transposed = False
    experts._is_hf_initialized = True  # else transformers' random initialisation would look for weights


def keep_compressed_tensors() -> None:
    """Have transformers load compressed-tensors' experts as the checkpoint has them, where "pretuned" runs them.

    This applies to int4 in symmetric groups, mxfp4, and fp8 with a scale for each 128 x 128 or each row. transformers
    loads all other experts dequantised, and before 5.23 all experts. A second call does nothing.
    """
    from transformers.quantizers import auto

    quantizer: Any = auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"]
    if quantizer.__module__ == __name__ or not hasattr(quantizer, "serialized_names"):
        return

    class PackedExpertsQuantizer(quantizer):  # type: ignore[misc]
        """Gives experts parameters for codes and scales, which transformers then stacks as it stacks weights."""

        def _process_model_before_weight_loading(self, model: Any, **more: Any) -> None:
            super()._process_model_before_weight_loading(model, **more)
            for name, module in model.named_modules():
                run = getattr(getattr(module, "config", None), "_experts_implementation", None)
                if run == "pretuned" and hasattr(module, "is_transposed") and not self.quantization_config.dequantize:
                    _pack_compressed(module, _codes_of(self.compressor.quantization_config, name))

        def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
            """Scales of experts keep their dtype."""
            if str(getattr(converter, "target_patterns", [""])[0]).endswith("_proj_scale"):
                return None
            return super().get_new_dtype(converter, param, dtype)

    auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"] = PackedExpertsQuantizer  # type: ignore[assignment]


class _StoredCodes(NamedTuple):
    """Experts in a checkpoint: name end, dtype and weights per element (``many``) of codes, scales' dtype and block."""

    end: str
    dtype: torch.dtype
    many: int
    scale: torch.dtype
    block: tuple[int, int]  # rows and columns that share a scale; 0: all


def _codes_of(config: Any, name: str) -> _StoredCodes | None:
    """The layout of the codes of the experts of this name; None if transformers dequantises them."""
    from compressed_tensors.utils.match import match_name
    from transformers.integrations.compressed_tensors import get_experts_scheme

    if any(
        match_name(f"{name}.0.{part}_proj", pattern)
        for pattern in config.ignore or ()
        for part in ("gate", "up", "down")
    ):
        return None
    scheme = get_experts_scheme(config)  # type: ignore[no-untyped-call]
    weights = scheme.weights
    packing, kind, strategy = (
        str(getattr(setting, "value", setting))
        for setting in (scheme.format or config.format, weights.type, weights.strategy)
    )
    if packing == "pack-quantized" and (weights.num_bits, kind, strategy) == (4, "int", "group"):
        if weights.symmetric and weights.group_size in GROUPS and order_refusal(weights.actorder) is None:
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
        if codes.dtype is torch.int32:  # the checkpoint has this tensor; nothing here reads it
            parts.append(("_shape", (E, 4 if name == "gate_up_proj" else 2), torch.int64))
        for end, shape, dtype in parts:
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=w.device), requires_grad=False)
            experts.register_parameter(name + end, parameter)
    experts._is_hf_initialized = True  # else transformers' random initialisation would look for weights
