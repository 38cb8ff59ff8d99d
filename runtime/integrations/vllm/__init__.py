"""vLLM's door: the entry point ``vllm.general_plugins`` of this package, which every process of an engine calls.

It puts one class in vLLM's registry for classes of others, in the place of its method for MoE layers that are not
quantised, and configs of its own for those that are in vLLM's registry of quantisation configs (``configs.py``).
All else is imported when a model has such a layer: ``experts.py``, ``quantised.py``.

``PRETUNED_VLLM=0`` switches it off, and so does a ``VLLM_PLUGINS`` without ``pretuned``. ``PRETUNED_VLLM=1`` runs each
layer that pretuned can run; else it is those alone that a bundle was built for, on a GPU.
"""

from __future__ import annotations

import logging
import os
from typing import Any

_SWITCH = "PRETUNED_VLLM"
_METHOD = "UnquantizedFusedMoEMethod"
_REGISTRY = "vllm.model_executor.layers.quantization"

_log = logging.getLogger("vllm.pretuned")  # below vLLM's own, whose handlers and level it has


def register() -> None:
    """Let vLLM's MoE layers ask pretuned first. A second call does nothing.

    No device is touched. A vLLM without these registries, and a class that another plug-in has put there, are told and
    left as they are.
    """
    said = os.environ.get(_SWITCH, "").strip().lower()
    if said in ("0", "false"):
        return
    if said not in ("", "1", "true"):
        _log.warning("pretuned: %s=%r is neither 1, true, 0, false nor empty: taken as empty", _SWITCH, said)
    _register_method(everywhere=said in ("1", "true"))
    _register_configs()


def _register_method(*, everywhere: bool) -> None:
    """For MoE layers without quantisation."""
    try:
        from vllm.model_executor.custom_op import op_registry_oot
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    except ImportError as error:
        _log.warning("pretuned: this vLLM has no place for MoE layers of others (%s): it runs as without", error)
        return
    there = op_registry_oot.get(_METHOD)
    if there is not None:
        if there.__module__ != __name__:
            _log.warning("pretuned: %s.%s runs the MoE layers already", there.__module__, there.__qualname__)
        return

    @UnquantizedFusedMoEMethod.register_oot
    class PretunedMoEMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
        """vLLM's method, with another class for the experts where pretuned runs the layer."""

        def __init__(self, moe: Any) -> None:
            super().__init__(moe)
            from .experts import take

            take(self, everywhere=everywhere)

        def create_weights(
            self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
            params_dtype: Any, **attributes: Any,
        ) -> None:  # fmt: skip
            from .experts import keep

            keep(self, params_dtype)
            super().create_weights(
                layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **attributes
            )


def _register_configs() -> None:
    """For MoE layers with quantised weights."""
    try:
        from vllm.model_executor.layers import quantization

        from .configs import CONFIGS
    except ImportError as error:
        _log.info("pretuned: this vLLM has no place for quantised MoE layers of others (%s)", error)
        return
    there = getattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    warns = logging.getLogger(_REGISTRY)  # that one of its own is replaced; which layers it changes is told for each
    level = warns.level
    warns.setLevel(logging.ERROR)
    try:
        for name, config in CONFIGS.items():
            known = there.get(name)
            if known is None:
                quantization.register_quantization_config(name)(config)
            elif known is not config:
                _log.warning("pretuned: %s.%s has the config %r already", known.__module__, known.__qualname__, name)
    finally:
        warns.setLevel(level)
