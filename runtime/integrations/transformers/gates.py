"""What the experts of a model of transformers do between their two products, where that is transformers' own code.

Code is recognised by what it is: a function of transformers (or torch) itself whose instructions are those of a copy
(``copies.py``), an act_fn of exactly one of the classes here with nothing hung on it, and names that still mean what
they meant. All of that that can change is looked at in every call, in 2 to 4 us. Of what is not recognised nothing is
held: its own code runs.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as modules

from ...runtime.ops.activation import GATED, OAI_ALPHA, OAI_LIMIT, UNGATED, Activation
from . import copies

# A name in a namespace, and what it meant when the code that reads it was recognised.
_Read: TypeAlias = tuple[Mapping[str, Any], str, object]


class _Own(NamedTuple):
    """A function that was recognised, with all that it reads by name."""

    code: CodeType
    copy: Callable[..., Any]
    reads: tuple[_Read, ...]


class _Class(NamedTuple):
    """A class that was recognised, as it was then."""

    forward: FunctionType
    call: object
    own: _Own


_functions: dict[FunctionType, _Own] = {}
_classes: dict[type, _Class] = {}


def recognise(experts: Any, gated: bool) -> Activation | None:
    """The activation of ``activate`` that a module's own code between its products is; None where it may be another."""
    if not gated:
        return _among(UNGATED, _name_of(getattr(experts, "act_fn", None)), False, False)
    method = getattr(experts, "_apply_gate", None)
    own = _own(method.__func__, _GATES) if type(method) is MethodType and method.__self__ is experts else None
    if own is None:
        return None
    interleaved, alpha, limit = _GATES[own.copy]
    if own.copy is copies.fp8:
        if getattr(experts, "gate_softcap", None) is not None:
            return None
        if getattr(experts, alpha, None) is None:
            alpha = limit = ""
            if getattr(experts, "limit", None) is not None:
                return None
    if not limit:
        return _among(GATED, _name_of(getattr(experts, "act_fn", None)), True, interleaved)
    known = _is(getattr(experts, alpha, None), OAI_ALPHA) and _is(getattr(experts, limit, None), OAI_LIMIT)
    return Activation("swiglu_oai", True, interleaved) if known else None


def _among(known: tuple[str, ...], name: str | None, gated: bool, interleaved: bool) -> Activation | None:
    return Activation(name, gated, interleaved) if name in known and name is not None else None


def _is(given: object, wanted: float) -> bool:
    """Whether a setting is a plain number, and this one. (A tensor's value may change, and be learnt.)"""
    return type(given) in (int, float) and given == wanted


def _name_of(act: Any) -> str | None:
    """The activation that a module's act_fn is, a function or a module without hooks."""
    kind = type(act)
    if kind in (FunctionType, BuiltinFunctionType, functools.partial):
        return _name_of_function(act)
    known = _classes.get(kind) or _recognise_class(kind)
    if known is None or kind.__call__ is not known.call or kind.forward is not known.forward:
        return None
    if "forward" in act.__dict__ or getattr(act, "_compiled_call_impl", None) is not None:
        return None
    if (
        act._forward_hooks or act._forward_pre_hooks or act._backward_hooks or act._backward_pre_hooks
        or modules._global_forward_hooks or modules._global_forward_pre_hooks
        or modules._global_backward_hooks or modules._global_backward_pre_hooks
    ):  # fmt: skip
        return None
    return _CLASSES[kind.__module__, kind.__name__][1](act) if _holds(known.own, known.forward) else None


def _name_of_function(act: Any) -> str | None:
    """The activation that one of torch's functions is."""
    if act is functional.silu:
        return "silu" if _is_torch_s("silu", act) else None
    settings: Any = {}
    if type(act) is functools.partial:
        act, args, settings = act.func, act.args, act.keywords
        if args or settings.keys() - {"approximate"}:
            return None
    if act is functional.gelu and _is_torch_s("gelu", act):
        return _GELUS.get(settings.get("approximate", "none"))
    return None


def _recognise_class(kind: type) -> _Class | None:
    copy = _CLASSES.get((kind.__module__, kind.__qualname__))
    home = sys.modules.get(kind.__module__)
    if copy is None or home is None or vars(home).get(kind.__qualname__) is not kind:
        return None
    forward, call = vars(kind).get("forward"), kind.__call__
    if not isinstance(call, FunctionType) or call.__globals__ is not vars(modules):
        return None
    own = _own(forward, (copy[0],))
    if own is None or not isinstance(forward, FunctionType):
        return None
    known = _classes[kind] = _Class(forward, call, own)
    return known


def _own(function: Any, these: Any) -> _Own | None:
    """What is known of a function that is transformers' or torch's own and one of these copies; None of any other."""
    if type(function) is not FunctionType:
        return None
    known = _functions.get(function)
    if known is not None:
        return known if known.copy in these and _holds(known, function) else None
    place = function.__module__ or ""
    home = sys.modules.get(place)
    if place.partition(".")[0] not in ("transformers", "torch") or function.__closure__ is not None:
        return None
    if home is None or function.__globals__ is not vars(home) or function.__defaults__ or function.__kwdefaults__:
        return None
    for copy in these:
        if instructions(function.__code__) == instructions(copy.__code__):
            reads = _reads(function)
            if reads is None:
                return None
            known = _functions[function] = _Own(function.__code__, copy, reads)
            return known
    return None


def _holds(own: _Own, function: FunctionType) -> bool:
    """Whether neither the function's code nor what it reads was replaced."""
    if function.__code__ is not own.code:
        return False
    return all([space.get(name) is meant for space, name, meant in own.reads])  # noqa: C419 (of a generator it is slow)


def instructions(code: CodeType) -> object:
    """All that a function does, without its lines and its docstring."""
    does = [(one.opname, one.argval) for one in dis.get_instructions(code)]
    return code.co_argcount, code.co_kwonlyargcount, code.co_varnames, code.co_flags & 12, does  # *args, **kwargs


def _reads(function: FunctionType) -> tuple[_Read, ...] | None:
    """What a function's names mean in its module, torch and Tensor; None where something else than torch's is meant."""
    found: list[_Read] = []
    for one in dis.get_instructions(function):
        name = one.argval
        if one.opname == "LOAD_GLOBAL":
            spaces: tuple[Mapping[str, Any], ...] = (function.__globals__,)
        elif name in function.__code__.co_names:  # of some object: of one of these, if it is no setting of self
            spaces = vars(torch), vars(nn), vars(functional)
        else:
            continue
        for space in spaces:
            if name in space:
                if not _is_torch_s(name, space[name]):
                    return None
                found.append((space, name, space[name]))
        if hasattr(torch.Tensor, name):  # C's: a method of the class itself would hide it
            if name in vars(torch.Tensor):
                return None
            found.append((vars(torch.Tensor), name, None))
    return tuple(found)


def _is_torch_s(name: str, one: object) -> bool:
    """Whether a function is torch's own of this name, or a module, type or dtype torch's."""
    if isinstance(one, FunctionType):
        return one.__globals__ is vars(functional) and one.__code__.co_name == name
    if isinstance(one, ModuleType):
        return one.__name__.partition(".")[0] == "torch"
    if isinstance(one, type):
        return one.__module__.partition(".")[0] == "torch"
    return isinstance(one, torch.dtype) or (isinstance(one, BuiltinFunctionType) and one.__name__ == name)


_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
# Of a gate: whether gate and up lie interleaved, and its attributes with alpha and limit where it reads no act_fn.
_GATES: dict[Callable[..., Any], tuple[bool, str, str]] = {
    copies.default_apply_gate: (False, "", ""),
    copies.beam: (False, "", ""),
    copies.gpt_oss: (True, "alpha", "limit"),
    copies.openai_privacy_filter: (False, "alpha", "limit"),
    copies.minimax_m3_vl: (False, "swiglu_alpha", "swiglu_limit"),
    copies.fp8: (False, "swiglu_alpha", "swiglu_limit"),
}
# Of a class: its forward, and which activation an instance is.
_CLASSES: dict[tuple[str, str], tuple[Callable[..., Any], Callable[[Any], str | None]]] = {
    ("transformers.activations", "SiLUActivation"): (copies.silu, lambda act: "silu"),
    ("transformers.activations", "GELUActivation"): (
        copies.its_act,
        lambda act: _name_of_function(act.__dict__.get("act")),
    ),
    ("transformers.activations", "GELUTanh"): (
        copies.its_act,
        lambda act: _name_of_function(act.__dict__.get("act")),
    ),
    ("transformers.activations", "ReLUSquaredActivation"): (copies.relu_squared, lambda act: "relu2"),
    ("torch.nn.modules.activation", "SiLU"): (
        copies.torch_s_silu,
        lambda act: None if act.inplace else "silu",
    ),
    ("torch.nn.modules.activation", "GELU"): (
        copies.torch_s_gelu,
        lambda act: _GELUS.get(act.approximate),
    ),
}
