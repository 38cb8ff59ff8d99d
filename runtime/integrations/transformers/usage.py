"""Log, once for each model of transformers, which experts pretuned runs."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

import torch

from ...artifacts.errors import InputError, PretunedError
from ...runtime.check.tensors import DTYPES
from ...runtime.settings import settings
from .adapters import NAME, WEIGHTS
from .gates import recognise
from .quantised import quantised

_LOGGED = "_pretuned_logged"  # attribute of a model that was logged, and of patched methods
_log = logging.getLogger(__name__)
_thread = threading.local()


def watch_models(pretrained_model: Any) -> None:
    """Log a model at the end of ``from_pretrained``, which calls ``train``, and of ``set_experts_implementation``."""
    for name in ("train", "set_experts_implementation"):
        own = getattr(pretrained_model, name)
        if not hasattr(own, _LOGGED):
            setattr(pretrained_model, name, _then_log(own, asks=name != "train"))


def _then_log(own: Any, *, asks: bool) -> Any:
    @functools.wraps(own)
    def call(self: Any, *args: Any, **more: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(_thread, "inside", False):  # logged with the outer model
            return own(self, *args, **more)
        _thread.inside = True
        try:
            done = own(self, *args, **more)
        finally:
            _thread.inside = False
        asked = asks and any(_names_it(argument) for argument in (*args, *more.values()))
        if asked or not getattr(self, _LOGGED, False):
            log_model(self, asked=asked)
        return done

    setattr(call, _LOGGED, True)
    return call


def _names_it(argument: Any) -> bool:
    return argument == NAME or (isinstance(argument, dict) and NAME in argument.values())


def log_model(model: Any, *, asked: bool = False) -> None:
    """Log which experts of a model pretuned runs, or warn if ``experts_implementation="pretuned"`` changes nothing.

    Parameters
    ----------
    model
        A model of transformers. Nothing is logged if its config does not name pretuned and ``asked`` is False.
    asked
        Whether the caller has asked for pretuned, by an argument of ``set_experts_implementation``.

    Raises
    ------
    InputError
        with ``PRETUNED_STRICT=1``, in place of the warning.
    """
    alike: dict[Any, list[Any]] = {}
    for module in model.modules():
        if _is_experts(module):
            alike.setdefault((type(module), *((w.shape, w.dtype) for w in module.parameters())), []).append(module)
    if alike:
        setattr(model, _LOGGED, True)
        for some in alike.values():
            layers = f"{len(some)} layer{'s' if len(some) > 1 else ''} of {type(model).__name__}"
            try:
                _log.info("pretuned: runs the experts of %s: %s", layers, _described(some[0]))
            except PretunedError as error:
                _log.warning("pretuned: leaves the experts of %s to their own code: %s", layers, error)
    elif asked or getattr(model.config, "_experts_implementation", None) == NAME:
        setattr(model, _LOGGED, True)
        kind = type(model).__name__
        line = (
            f"experts_implementation='pretuned' changes nothing in {kind}: transformers hands no experts "
            "of this model to other implementations, its own code runs. Load the model without the argument"
        )
        if settings().strict:
            raise InputError(line)
        _log.warning("pretuned: %s", line)


def _is_experts(module: Any) -> bool:
    running = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return "is_transposed" in module.__dict__ and running == NAME


def _described(experts: Any) -> str:
    """The experts' sizes, weights and activation, as in ``E=128 H=2048 I=768 bf16 silu``."""
    gated = getattr(experts, "has_gate", True)
    if any(
        parameter.is_meta for parameter in experts.parameters(recurse=False)
    ):  # offloaded: there are no parameters to describe
        return type(experts).__name__
    w1, w2 = (_weight(experts, name) for name in (WEIGHTS[0] if gated else WEIGHTS[1], WEIGHTS[2]))
    act = recognise(experts, gated)
    (E, H, I), (dtype, other) = w1[:2] + w2[1:2], (w1[2], w2[2])  # noqa: E741
    name = "its own activation" if act is None else str(act.function)
    return f"{E=} {H=} {I=} {dtype if dtype == other else f'{dtype} and {other}'} {name}"


def _weight(experts: Any, name: str) -> tuple[int, int, str]:
    """E, K and the format of a weight."""
    codes = quantised(experts, name)
    if codes is not None:
        return codes.shape[0], codes.shape[2], codes.format
    lists = experts._modules.get("parametrizations") or {}
    w = lists[name].original if name in lists else getattr(experts, name)
    dtype = DTYPES[w.dtype].value if w.dtype in DTYPES else str(w.dtype)
    return w.shape[0], w.shape[1 if experts.is_transposed else 2], dtype
