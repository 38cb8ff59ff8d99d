"""vLLM's quantisation configs with one thing more: pretuned is asked for each MoE layer, after vLLM's own method.

They are registered in place of vLLM's by ``__init__.py``, and copied to the engine's other processes with the rest of
its settings, so they stand here by name. Imported inside vLLM alone; what runs a layer is imported when there is one.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config


class _Asks:
    """What a config has before vLLM's own of its kind."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """vLLM's method for a layer, or pretuned's in its place."""
        own = super().get_quant_method(layer, prefix)  # type: ignore[misc]
        if not hasattr(own, "moe"):  # no MoE layer's
            return own
        from .quantised import take

        everywhere = os.environ.get("PRETUNED_VLLM", "").strip().lower() in ("1", "true")  # as __init__.py has it
        return take(own, layer, everywhere=everywhere)


class PretunedFp8Config(_Asks, Fp8Config):  # type: ignore[misc]
    """Of ``fp8``: DeepSeek-V3, Qwen3-*-FP8."""


class PretunedCompressedTensorsConfig(_Asks, CompressedTensorsConfig):  # type: ignore[misc]
    """Of ``compressed-tensors``: Kimi-K2, RedHatAI's."""


class PretunedMxfp4Config(_Asks, Mxfp4Config):  # type: ignore[misc]
    """Of ``mxfp4``."""


class PretunedGptOssConfig(_Asks, GptOssMxfp4Config):  # type: ignore[misc]
    """Of gpt-oss's ``mxfp4``."""


CONFIGS: dict[str, type] = {
    "fp8": PretunedFp8Config,
    "compressed-tensors": PretunedCompressedTensorsConfig,
    "mxfp4": PretunedMxfp4Config,
    "gpt_oss_mxfp4": PretunedGptOssConfig,
}
