"""Adapters by PEFT's ``target_parameters`` on experts that stay quantised: A and B run beside the codes.

PEFT looks for a parameter by its name, makes A and B for its shape, and adds scaling * B A to what it reads. Codes have
another name or another shape, and are no numbers to add to. So while PEFT puts adapters on a model, its experts that
run on pretuned show each weight as [E, N, K] in the model's dtype, which takes no memory; and the layer that PEFT would
wrap around them is ours (``param_wrapper.py``), which hands A and B to the experts. All names and shapes are those of
the same model in bf16: a saved adapter is an adapter of that model, too. Nothing here imports PEFT.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...artifacts.errors import InputError
from ...runtime.api.lora import Lora
from ...runtime.check.tensors import bad
from .quantised import ENDS, quantised

NAME = "pretuned"
_HELD = "_pretuned_adapters"  # in an experts' module while a call with adapters runs: each weight's
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


def view(experts: Any, name: str) -> torch.Tensor | None:
    """A weight that lies as codes in a module on pretuned, as PEFT is to see it: its shape, no numbers, no memory.

    None for any other module or name, and for codes that don't run here.
    """
    config = getattr(experts, "config", None)
    if "is_transposed" not in experts.__dict__ or getattr(config, "_experts_implementation", None) != NAME:
        return None
    try:
        w = quantised(experts, name)
    except InputError:
        return None  # its forward says why
    if w is None:
        return None
    E, N, K = w.shape
    dtype = getattr(config, "dtype", None)
    one = torch.empty((), dtype=dtype if dtype in (torch.float16, torch.float32) else torch.bfloat16, device=w.device)
    return one.expand((E, K, N) if experts.is_transposed else (E, N, K))


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


@contextlib.contextmanager
def held(experts: Any, name: str, lora: Lora) -> Iterator[None]:
    """Calls of the experts have this adapter of a weight."""
    every: dict[str, Lora] = experts.__dict__.setdefault(_HELD, {})
    every[name] = lora
    try:
        yield
    finally:
        every.pop(name, None)


def held_by(experts: Any, name: str) -> Lora | None:
    """The adapter that this call has of a weight."""
    every: dict[str, Lora] = experts.__dict__.get(_HELD, {})
    return every.get(name)


def any_held(experts: Any) -> bool:
    """Whether this call has one."""
    return bool(experts.__dict__.get(_HELD))
