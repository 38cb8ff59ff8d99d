"""SGLang's door: the entry point ``sglang.srt.plugins`` of this package, which every process of an engine calls.

It puts hooks of SGLang's own registry around the places where a method for MoE layers makes its runner, without
quantisation and in fp8, and of fp8 around those where its weights were loaded and where it is called. All else is
imported when a model has such a layer: ``sglang_experts.py``.

``PRETUNED_SGLANG=0`` switches it off, and so does a ``SGLANG_PLUGINS`` without ``pretuned``. ``PRETUNED_SGLANG=1`` runs
each layer that pretuned can run; else it is those alone that a bundle was built for, on a GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

_SWITCH = "PRETUNED_SGLANG"
_METHODS = "sglang.srt.layers.quantization."
_FP8 = _METHODS + "fp8.Fp8MoEMethod."

_log = logging.getLogger("sglang.pretuned")  # below SGLang's own, whose handlers and level it has


def register() -> None:
    """Let SGLang's MoE layers ask pretuned once their runner is chosen. A second call does nothing.

    No device is touched. An SGLang without this registry is told, and runs as without.
    """
    said = os.environ.get(_SWITCH, "").strip().lower()
    if said in ("0", "false"):
        return
    if said not in ("", "1", "true"):
        _log.warning("pretuned: %s=%r is neither 1, true, 0, false nor empty: taken as empty", _SWITCH, said)
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        _log.warning("pretuned: this SGLang has no place for MoE layers of others (%s): it runs as without", error)
        return
    for place, hook in PLACES.items():
        if not any(known is hook for _, known, *_ in HookRegistry._hooks.get(place, ())):
            HookRegistry.register(place, hook, HookType.AROUND)


def around(create: Callable[..., Any], method: Any, layer: Any, config: Any) -> Any:
    """SGLang's ``create_moe_runner``, and pretuned's runner in the place of its Triton's where it runs the layer."""
    made = create(method, layer, config)
    from .sglang_experts import take

    take(method, config, everywhere=os.environ.get(_SWITCH, "").strip().lower() in ("1", "true"))
    return made


def loaded(process: Callable[..., Any], method: Any, layer: Any) -> Any:
    """SGLang's ``process_weights_after_loading``, and then codes are put into the order of pretuned's kernels."""
    made = process(method, layer)
    if _is_ours(method):
        from .sglang_experts import prepare

        prepare(layer)
    return made


def called(apply: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """SGLang's ``apply`` of fp8 layers, which knows no runner of others; pretuned's where it is that."""
    if not _is_ours(method):
        return apply(method, layer, dispatch_output)
    from .sglang_experts import run

    return run(method, layer, dispatch_output)


def _is_ours(method: Any) -> bool:
    return getattr(getattr(getattr(method, "runner", None), "runner_backend", None), "value", None) == "pretuned"


PLACES = {
    _METHODS + "unquant.UnquantizedFusedMoEMethod.create_moe_runner": around,
    _FP8 + "create_moe_runner": around,
    _FP8 + "process_weights_after_loading": loaded,
    _FP8 + "apply": called,
}
