"""SGLang's plug-in: the entry point ``sglang.srt.plugins`` of this package, which every process of an engine calls.

It registers hooks with SGLang: around the function of an MoE method that makes the runner and, for quantised weights,
around those that process loaded weights, restore them before a reload, and run the layer. ``experts.py`` and
``quantised.py`` are imported when a model has such a layer. If anything fails in them, SGLang's own runner runs.

``PRETUNED_SGLANG=0`` switches the plug-in off, and so does a ``SGLANG_PLUGINS`` without ``pretuned``. With
``PRETUNED_SGLANG=1`` pretuned runs each layer that it can run, by default only layers that a bundle was built for, on a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..plug_in import PlugIn

PLUG_IN = PlugIn(
    "SGLang",
    "sglang",
    "PRETUNED_SGLANG",
    first=(0, 5, 23),  # tests/engines makes layers of the real modules of these versions
    last=(0, 5, 23),
    group="sglang.srt.plugins",
    listed="SGLANG_PLUGINS",
)
NAME = "pretuned"  # name of the runner's backend
_METHODS = "sglang.srt.layers.quantization."
_QUANTISED = (
    "fp8.Fp8MoEMethod",
    "w8a8_fp8.W8A8FP8MoEMethod",
    "modelopt_quant.ModelOptFp8MoEMethod",
    "modelopt_quant.ModelOptNvFp4FusedMoEMethod",
    "mxfp4.Mxfp4MoEMethod",
    "moe_wna16.MoeWNA16Method",
    "awq.awq.AWQMoEMethod",
    "gptq.gptq.GPTQMarlinMoEMethod",
    "compressed_tensors.compressed_tensors.CompressedTensorsFusedMoEMethod",
)


def register() -> None:
    """Let SGLang's MoE layers ask pretuned once their runner is chosen. A second call does nothing.

    No device is touched. With an SGLang version that pretuned was not tested with, only a line is logged.
    """
    PLUG_IN.attempt("register", _register)


def _register() -> None:
    if not PLUG_IN.begin():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for place, hook in PLACES.items():
        if not any(registered is hook for _, registered, *_ in HookRegistry._hooks.get(place, ())):
            HookRegistry.register(place, hook, HookType.AROUND)


def around(create: Callable[..., Any], method: Any, layer: Any, config: Any) -> Any:
    """Run SGLang's ``create_moe_runner``, then replace the runner if pretuned runs the layer."""
    runner = create(method, layer, config)
    if not PLUG_IN.is_off:
        PLUG_IN.count(taken=bool(PLUG_IN.attempt("take a layer", _take, method, layer, config)))
    return runner


def _take(method: Any, layer: Any, config: Any) -> bool:
    PLUG_IN.say_active(PLUG_IN.log.info)
    from .experts import take

    return take(method, layer, config, everywhere=PLUG_IN.everywhere)


def loaded(process: Callable[..., Any], method: Any, layer: Any) -> Any:
    """SGLang's ``process_weights_after_loading``; for layers that pretuned runs, prepare the weights instead.

    If preparing fails the first time, SGLang's own runner takes the layer.
    """
    ours = _experts(layer)
    if ours is None:
        return process(method, layer)
    is_first = ours.weights is None
    try:
        return ours.prepare(layer)
    except Exception as error:
        if not is_first:  # a captured graph may read the first weights
            raise
        ours.give_back(method, layer)
        PLUG_IN.failed("prepare a layer's weights", error)
        PLUG_IN.count_given_back()
        return process(method, layer)


def built(create: Callable[..., Any], layer: Any, *arguments: Any, **named: Any) -> None:
    """Run SGLang's ``DeepEPMoE.__init__``; for layers that pretuned runs, set the flag by which it calls its method.

    SGLang sets the flag by the name of its own runner.
    """
    create(layer, *arguments, **named)
    backend = getattr(getattr(getattr(layer, "quant_method", None), "runner", None), "runner_backend", None)
    if getattr(backend, "value", None) == NAME:
        layer.deprecate_flag = True


def restored(restore: Callable[..., Any], method: Any, layer: Any) -> Any:
    """SGLang's ``restore_weights_before_loading``, or pretuned's for layers that pretuned runs."""
    ours = _experts(layer)
    return restore(method, layer) if ours is None else ours.restore(layer)


def called(apply: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """SGLang's ``apply``, or pretuned's for layers that pretuned runs."""
    ours = _experts(layer)
    return apply(method, layer, dispatch_output) if ours is None else ours.run(layer, dispatch_output)


def _experts(layer: Any) -> Any:
    """The ``quantised.Experts`` of a layer with quantised weights that pretuned runs; None for other layers."""
    return getattr(layer, "pretuned_experts", None)


_AROUND = {
    "create_moe_runner": around,
    "process_weights_after_loading": loaded,
    "restore_weights_before_loading": restored,
    "apply": called,
}
PLACES = {
    "sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.__init__": built,
    _METHODS + "unquant.UnquantizedFusedMoEMethod.create_moe_runner": around,
    **{f"{_METHODS}{method}.{name}": hook for method in _QUANTISED for name, hook in _AROUND.items()},
}
