"""While PEFT adds adapters to a model, quantised experts that pretuned runs look like plain weights to PEFT.

PEFT looks up a parameter by name, makes A and B for its shape, and adds scaling * B A to the parameter. Codes have
another name or shape, and can't be added to. So during that time each weight is a parameter [E, N, K] in the model's
dtype that takes no memory, and the layer that PEFT wraps around it is pretuned's (``param_wrapper.py``). Names and
shapes equal the bf16 model's, so a saved adapter fits that model, too.

Only PEFT's ``inject_adapter`` knows which weights get an adapter: it converts ``target_modules`` ("all-linear", a
regular expression, gate_proj, up_proj, down_proj) to ``target_parameters``. So every quantised weight gets such a
parameter, whatever the config says. PEFT is imported only to make a layer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...artifacts.errors import InputError
from ...runtime.check.tensors import bad
from .adapters import NAME, WEIGHTS, codes_name, view, view_anywhere
from .quantised import ENDS, quantised

_TUNERS = "peft.tuners.tuners_utils"


def watch(parent: Any, model: Any) -> None:
    """If ``parent``, which wraps ``model``, is a PEFT tuner, patch its class so that PEFT finds experts' weights."""
    tuners = sys.modules.get(_TUNERS)
    if tuners is not None and isinstance(parent, tuners.BaseTuner) and isinstance(model, torch.nn.Module):
        _shows(tuners.BaseTuner)


def watch_loaded() -> None:
    """If PEFT is imported, patch its tuner class, also for models that already have a tuner."""
    tuners = sys.modules.get(_TUNERS)
    if tuners is not None:
        _shows(tuners.BaseTuner)


@functools.cache
def _shows(tuner: Any) -> None:
    own, own_check, own_check_merge = tuner.inject_adapter, tuner._check_new_adapter_config, tuner._check_merge_allowed

    @functools.wraps(own)
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **more: Any) -> Any:
        with shown(model, self.peft_config[adapter_name]):
            return own(self, model, adapter_name, *args, **more)

    @functools.wraps(own_check)
    def check_new_adapter_config(self: Any, config: Any) -> None:
        own_check(self, config)
        check(self.model, config)  # PEFT calls this once target_parameters are known, before it changes the model

    @functools.wraps(own_check_merge)
    def check_merge_allowed(self: Any) -> None:
        own_check_merge(self)
        for module in self.model.modules():  # raise before any layer is merged
            if getattr(type(module), "unmergeable", False):
                module.merge()

    tuner.inject_adapter, tuner._check_new_adapter_config = inject_adapter, check_new_adapter_config
    tuner._check_merge_allowed = check_merge_allowed


@contextlib.contextmanager
def shown(model: Any, config: Any) -> Iterator[None]:
    """A block in which quantised weights are parameters [E, N, K], for which ``config`` makes pretuned's layer."""
    if not hasattr(config, "_register_custom_module"):  # only LoRA has it, and only LoRA adapts parameters
        yield
        return
    kinds: dict[type, Callable[..., Any]] = {}
    added: set[int] = set()
    registered = config._custom_modules
    try:
        for experts in model.modules():
            for name in WEIGHTS:
                # If codes have another name than the weight, whoever runs them: ``check`` must see the weight.
                see = view if name in getattr(experts, "_parameters", ()) else view_anywhere
                weight = see(experts, name)
                if weight is None:
                    continue
                kinds[type(experts)] = _wrapped
                if name not in experts._parameters:
                    experts.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
                    added.add(id(experts._parameters[name]))
        if kinds:
            config._register_custom_module(kinds | (registered or {}))
        yield
    finally:
        config._custom_modules = registered
        for experts in model.modules():  # PEFT's layer_replication copies modules, which share parameters
            for name in WEIGHTS:
                if id(getattr(experts, "_parameters", {}).get(name)) in added:
                    del experts._parameters[name]


def check(model: Any, config: Any) -> None:
    """Refuse a config whose wishes for quantised experts PEFT would ignore, or would not train.

    Raises
    ------
    InputError
        for ``modules_to_save`` with such experts, for a rank above 256, and for weights that can't have an adapter as
        the experts run now.
    """
    saved = tuple(getattr(config, "modules_to_save", None) or ())
    wanted = tuple(getattr(config, "target_parameters", None) or ())
    for path, experts in model.named_modules() if saved or wanted else ():
        names = [name for name in WEIGHTS if codes_name(experts, name) is not None]
        if not names:
            continue
        parts = path.split(".")
        above = [".".join(parts[: i + 1]) for i in range(len(parts))]
        for suffix in saved:
            if any(each.endswith(suffix) for each in above):
                bad(
                    "modules_to_save",
                    f"[..., '{suffix}'], of which {path} has quantised weights, which are not trained",
                    "modules without quantised experts: give these adapters (target_modules='all-linear'), or train "
                    "the model in bf16",
                    "get_peft_model",
                )
        for name in names:
            key = f"{path.replace('.base_layer', '')}.{name}"
            if any(key == target or key.endswith(f".{target}") for target in wanted):
                _check_target(experts, path, name, config, key)


def _check_target(experts: Any, path: str, name: str, config: Any, key: str) -> None:
    from .param_wrapper import check_rank

    running = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if running == NAME:
        try:
            quantised(experts, name)
        except InputError as error:
            raise InputError(f"get_peft_model: {path}.{name} can't have an adapter: {error}") from error
        check_rank(config, key)
    elif codes_name(experts, name) != name:  # (PEFT itself adapts fp8 codes, which have the weight's name)
        raise InputError(
            f"get_peft_model: {path}.{name} is quantised and runs on {running!r}, wanted 'pretuned', the only one "
            "with adapters on these weights: call model.set_experts_implementation('pretuned') before get_peft_model"
        )


def _wrapped(target: Any, adapter_name: str, *, config: Any, parameter_name: str | None = None, **more: Any) -> Any:
    """pretuned's layer around a quantised parameter of experts; None if PEFT's own layer is right."""
    experts = target.get_base_layer() if hasattr(target, "get_base_layer") else target
    if parameter_name is None:
        return None
    if view(experts, parameter_name) is not None:
        from .param_wrapper import ParamWrapper

        return ParamWrapper(target, adapter_name, parameter_name=parameter_name, config=config, **more)
    for name in WEIGHTS:
        if parameter_name in {name + end for ends in ENDS for end in ends} and view(experts, name) is not None:
            bad(
                "target_parameters",
                f"[..., '{parameter_name}'], a part of quantised weights",
                f"'{name}', as of the model in bf16",
                "get_peft_model",
            )
    return None
