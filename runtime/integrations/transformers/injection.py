"""While PEFT puts adapters on a model, its experts that stay quantised and run on pretuned are shown as weights.

PEFT looks for a parameter by its name, makes A and B for its shape, and adds scaling * B A to what it reads. Codes have
another name or another shape, and are no numbers to add to. So each weight is a parameter [E, N, K] in the model's
dtype meanwhile, which takes no memory; and the layer that PEFT would wrap around it is ours (``param_wrapper.py``). All
names and shapes are those of the same model in bf16: a saved adapter is an adapter of that model, too. Nothing here
imports PEFT, but what makes such a layer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...runtime.check.tensors import bad
from .adapters import view
from .quantised import ENDS

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def watch(parent: Any, model: Any) -> None:
    """Where ``parent``, which gets ``model``, is one of PEFT's tuners: its class shows experts from now on."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is not None and isinstance(parent, tuners.BaseTuner) and isinstance(model, torch.nn.Module):
        _shows(tuners.BaseTuner)


@functools.cache
def _shows(tuner: Any) -> None:
    own, own_check = tuner.inject_adapter, tuner._check_merge_allowed

    @functools.wraps(own)
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **more: Any) -> Any:
        with shown(model, self.peft_config[adapter_name]):
            return own(self, model, adapter_name, *args, **more)

    @functools.wraps(own_check)
    def check_merge_allowed(self: Any) -> None:
        own_check(self)
        for module in self.model.modules():  # before any is merged
            if getattr(type(module), "unmergeable", False):
                module.merge()

    tuner.inject_adapter, tuner._check_merge_allowed = inject_adapter, check_merge_allowed


@contextlib.contextmanager
def shown(model: Any, config: Any) -> Iterator[None]:
    """The weights of a model's quantised experts are parameters [E, N, K], and ``config`` makes our layer of them."""
    if not getattr(config, "target_parameters", None):
        yield
        return
    kinds: dict[type, Callable[..., Any]] = {}
    given: list[tuple[Any, str]] = []
    known = config._custom_modules
    try:
        for experts in model.modules():
            for name in _WEIGHTS:
                one = view(experts, name)
                if one is None:
                    continue
                kinds[type(experts)] = _wrapped
                if name not in experts._parameters:
                    experts.register_parameter(name, torch.nn.Parameter(one, requires_grad=False))
                    given.append((experts, name))
        if kinds:
            config._register_custom_module(kinds | (known or {}))
        yield
    finally:
        config._custom_modules = known
        for experts, name in given:
            del experts._parameters[name]


def _wrapped(target: Any, adapter_name: str, *, config: Any, parameter_name: str | None = None, **more: Any) -> Any:
    """PEFT's layer around a parameter of experts; None where PEFT's own is right."""
    experts = target.get_base_layer() if hasattr(target, "get_base_layer") else target
    if parameter_name is None:
        return None
    if view(experts, parameter_name) is not None:
        from .param_wrapper import ParamWrapper

        return ParamWrapper(target, adapter_name, parameter_name=parameter_name, config=config, **more)
    for name in _WEIGHTS:
        if parameter_name in {name + end for ends in ENDS for end in ends} and view(experts, name) is not None:
            bad("target_parameters", f"[..., '{parameter_name}'], a part of quantised weights",
                f"'{name}', as of the model in bf16", "get_peft_model")  # fmt: skip
    return None
