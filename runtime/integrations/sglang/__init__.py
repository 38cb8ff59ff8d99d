"""SGLang's door: the entry point ``sglang.srt.plugins`` of this package, which every process of an engine calls.

It puts hooks of SGLang's own registry around the places where a method for MoE layers makes its runner and, of those of
quantised weights, where these were loaded, where they are put back to be loaded again, and where the layer is called.
All else is imported when a model has such a layer: ``experts.py``, ``quantised.py``.

``PRETUNED_SGLANG=0`` switches it off, and so does a ``SGLANG_PLUGINS`` without ``pretuned``. ``PRETUNED_SGLANG=1`` runs
each layer that pretuned can run; else it is those alone that a bundle was built for, on a GPU.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

_SWITCH = "PRETUNED_SGLANG"
_METHODS = "sglang.srt.layers.quantization."
_QUANTISED = (
    "fp8.Fp8MoEMethod", "mxfp4.Mxfp4MoEMethod", "moe_wna16.MoeWNA16Method", "gptq.gptq.GPTQMarlinMoEMethod",
    "compressed_tensors.compressed_tensors.CompressedTensorsFusedMoEMethod",
)  # fmt: skip

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
        _without(str(error))
        return
    for place, hook in PLACES.items():
        if not any(known is hook for _, known, *_ in HookRegistry._hooks.get(place, ())):
            HookRegistry.register(place, hook, HookType.AROUND)


@functools.cache
def _without(why: str) -> None:
    _log.warning("pretuned: this SGLang has no place for MoE layers of others (%s): it runs as without", why)


def around(create: Callable[..., Any], method: Any, layer: Any, config: Any) -> Any:
    """SGLang's ``create_moe_runner``, and pretuned's runner in the place of its own where it runs the layer."""
    made = create(method, layer, config)
    try:
        from .experts import take
    except ImportError as error:
        _without(str(error))
        return made
    take(method, layer, config, everywhere=os.environ.get(_SWITCH, "").strip().lower() in ("1", "true"))
    return made


def loaded(process: Callable[..., Any], method: Any, layer: Any) -> Any:
    """SGLang's ``process_weights_after_loading``; of a layer of pretuned's they are put into its kernels' order."""
    ours = _experts(layer)
    return process(method, layer) if ours is None else ours.prepare(layer)


def restored(restore: Callable[..., Any], method: Any, layer: Any) -> Any:
    """SGLang's ``restore_weights_before_loading``, and pretuned's."""
    ours = _experts(layer)
    return restore(method, layer) if ours is None else ours.restore(layer)


def called(apply: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """SGLang's ``apply``, and pretuned's."""
    ours = _experts(layer)
    return apply(method, layer, dispatch_output) if ours is None else ours.run(layer, dispatch_output)


def _experts(layer: Any) -> Any:
    """What a layer with quantised weights that is pretuned's has: quantised.Experts; None of others."""
    return getattr(layer, "pretuned_experts", None)


_AROUND = {
    "create_moe_runner": around, "process_weights_after_loading": loaded, "restore_weights_before_loading": restored,
    "apply": called,
}  # fmt: skip
PLACES = {
    _METHODS + "unquant.UnquantizedFusedMoEMethod.create_moe_runner": around,
    **{f"{_METHODS}{one}.{name}": hook for one in _QUANTISED for name, hook in _AROUND.items()},
}
