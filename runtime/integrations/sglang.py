"""SGLang's door: the entry point ``sglang.srt.plugins`` of this package, which every process of an engine calls.

It puts a hook of SGLang's own registry around the place where a method for MoE layers without quantisation makes its
runner. All else is imported when a model has such a layer: ``sglang_experts.py``.

``PRETUNED_SGLANG=0`` switches it off, and so does a ``SGLANG_PLUGINS`` without ``pretuned``. ``PRETUNED_SGLANG=1`` runs
each layer that pretuned can run; else it is those alone that a bundle was built for, on a GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

_SWITCH = "PRETUNED_SGLANG"
_PLACE = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.create_moe_runner"

_log = logging.getLogger("sglang.pretuned")  # below SGLang's own, whose handlers and level it has


def register() -> None:
    """Let SGLang's unquantised MoE layers ask pretuned once their runner is chosen. A second call does nothing.

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
    if any(hook is around for _, hook, *_ in HookRegistry._hooks.get(_PLACE, ())):
        return
    HookRegistry.register(_PLACE, around, HookType.AROUND)


def around(create: Callable[..., Any], method: Any, layer: Any, config: Any) -> Any:
    """SGLang's ``create_moe_runner``, and pretuned's runner in the place of its Triton's where it runs the layer."""
    made = create(method, layer, config)
    from .sglang_experts import take

    take(method, config, everywhere=os.environ.get(_SWITCH, "").strip().lower() in ("1", "true"))
    return made
