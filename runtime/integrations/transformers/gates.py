"""Recognises the activation of a transformers model's experts, if transformers' own code computes it.

Code is recognised by its source: a function of transformers or torch whose digest is listed here, an act_fn that is an
instance of exactly one of the classes here and has no hooks, and names that still refer to the same objects. A
function's source is read once; all that can change later is compared in every call, in 3 to 15 us (Inkling2's
softcaps). For all other code, pretuned runs the module's own code. If transformers changes a function, its new digest
must be added here.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as modules

from ...artifacts.errors import InputError
from ...artifacts.syntax import function_sha256
from ...kernels.activations import UNGATED, Activation
from ...runtime.ops.activation import RowActivation

# (namespace, name, the object that the name referred to when the code that reads it was recognised)
_Read: TypeAlias = tuple[Mapping[str, Any], str, object]


class _Own(NamedTuple):
    """A recognised function, with the objects that its names referred to."""

    code: CodeType
    digest: str
    reads: tuple[_Read, ...]


class _Class(NamedTuple):
    """A recognised class, with the state to compare in later calls."""

    forward: FunctionType
    call: object
    own: _Own


_SILU, _RELU2 = Activation("silu"), Activation("relu2")
_functions: dict[FunctionType, _Own] = {}
_classes: dict[type, _Class] = {}


def recognise(experts: Any, gated: bool) -> RowActivation | None:
    """The activation of ``activate`` that equals a module's code between its products; None if that is not certain."""
    if not gated:
        function = _of_act_fn(experts)
        return RowActivation(function, False, False) if function is not None and function.name in UNGATED else None
    method = getattr(experts, "_apply_gate", None)
    own = _own(method.__func__, _GATES) if type(method) is MethodType and method.__self__ is experts else None
    if own is None:
        return None
    interleaved, read = _GATES[own.digest]
    function = read(experts)
    return None if function is None else RowActivation(function, True, interleaved)


def _by_act_fn(experts: Any) -> Activation | None:
    """act_fn(gate) * up."""
    function = _of_act_fn(experts)
    return function if function is not None and function.name in UNGATED else None


def _softcapped(experts: Any) -> Activation | None:
    """act_fn(gate, up)."""
    function = _of_act_fn(experts)
    return function if function is not None and function.name == "situ" else None


def _silu_of_act_fn(experts: Any, name: str, **numbers: str) -> Activation | None:
    """The activation ``name`` with ``numbers``, whose silu is act_fn; None if act_fn is another function."""
    return _with_numbers(experts, name, **numbers) if _of_act_fn(experts) == _SILU else None


def _of_fp8(experts: Any) -> Activation | None:
    """The activation of transformers' own fp8 experts, which is one for all models."""
    if getattr(experts, "gate_softcap", None) is not None:
        return _with_numbers(experts, "situ", beta="gate_softcap", linear_beta="up_softcap")
    if getattr(experts, "swiglu_alpha", None) is not None:
        return _with_numbers(experts, "swiglu", 1.0, limit="swiglu_limit", alpha="swiglu_alpha")
    if getattr(experts, "limit", None) is not None:
        return _silu_of_act_fn(experts, "swiglu", limit="limit")
    return _by_act_fn(experts)


def _with_numbers(experts: Any, name: str, beta: float = 0.0, /, **numbers: str) -> Activation | None:
    """An activation whose numbers are the module's attributes ``numbers``; None if one is not a usable plain number.

    A tensor is not usable: its value may change or be trained.
    """
    values = tuple((number, getattr(experts, attribute, None)) for number, attribute in numbers.items())
    return _made(name, beta, values) if all(type(value) in (int, float) for _, value in values) else None


@functools.lru_cache(64)
def _made(name: str, beta: float, values: tuple[tuple[str, float], ...]) -> Activation | None:
    try:
        return Activation(name, **({"beta": beta} if beta else {}) | dict(values))
    except InputError:
        return None


def _of_act_fn(experts: Any) -> Activation | None:
    """The activation that equals a module's act_fn, which is a function or a module without hooks; None if unknown."""
    act = getattr(experts, "act_fn", None)
    if type(act) in (FunctionType, BuiltinFunctionType, functools.partial):
        return _of_function(act)
    return _CLASSES[_place(act)][1](act) if _is_own_module(act) else None


def _is_own_module(module: Any) -> bool:
    """True if a module is of a recognised class itself, without hooks and with its class's own forward."""
    kind = type(module)
    recognised = _classes.get(kind) or _recognise_class(kind)
    if recognised is None or kind.__call__ is not recognised.call or kind.forward is not recognised.forward:
        return False
    if "forward" in module.__dict__ or getattr(module, "_compiled_call_impl", None) is not None:
        return False
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
    ):
        return False
    return _holds(recognised.own, recognised.forward)


def _of_softcaps(act: Any) -> Activation | None:
    """softcap(gate) * sigmoid(gate) * softcap(up), if ``act`` has a recognised softcap module for each; else None."""
    caps = [getattr(act, name, None) for name in ("gate_softcap", "up_softcap")]
    if not all(_is_own_module(cap) and _CLASSES[_place(cap)][0] == _SOFTCAP for cap in caps):
        return None
    values = [getattr(cap, "softcap", None) for cap in caps]
    if not all(type(cap) in (int, float) for cap in values):
        return None
    return _made("situ", 0.0, tuple(zip(("beta", "linear_beta"), values, strict=True)))


def _place(module: Any) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def _of_function(act: Any) -> Activation | None:
    """The activation that equals a function of torch; None if there is none."""
    if act is functional.silu:
        return _SILU if _is_torch_s("silu", act) else None
    settings: Any = {}
    if type(act) is functools.partial:
        act, args, settings = act.func, act.args, act.keywords
        if args or settings.keys() - {"approximate"}:
            return None
    if act is functional.gelu and _is_torch_s("gelu", act):
        return _GELUS.get(settings.get("approximate", "none"))
    return None


def _recognise_class(kind: type) -> _Class | None:
    entry = _CLASSES.get((kind.__module__, kind.__qualname__))
    home = sys.modules.get(kind.__module__)
    if entry is None or home is None or vars(home).get(kind.__qualname__) is not kind:
        return None
    forward, call = vars(kind).get("forward"), kind.__call__
    if not isinstance(call, FunctionType) or call.__globals__ is not vars(modules):
        return None
    own = _own(forward, (entry[0],))
    if own is None or not isinstance(forward, FunctionType):
        return None
    recognised = _classes[kind] = _Class(forward, call, own)
    return recognised


def _own(function: Any, digests: Collection[str]) -> _Own | None:
    """The record of a function of transformers or torch with one of these digests; None for any other."""
    if type(function) is not FunctionType:
        return None
    recognised = _functions.get(function)
    if recognised is not None:
        return recognised if recognised.digest in digests and _holds(recognised, function) else None
    place = function.__module__ or ""
    home = sys.modules.get(place)
    if place.partition(".")[0] not in ("transformers", "torch") or function.__closure__ is not None:
        return None
    if home is None or function.__globals__ is not vars(home) or function.__defaults__ or function.__kwdefaults__:
        return None
    digest = source_digest(function.__code__)
    reads = _reads(function) if digest in digests else None
    if digest is None or reads is None:
        return None
    recognised = _functions[function] = _Own(function.__code__, digest, reads)
    return recognised


def _holds(own: _Own, function: FunctionType) -> bool:
    """True if the function's code, and the objects that it reads, are still the recognised ones."""
    if function.__code__ is not own.code:
        return False
    return all([space.get(name) is meant for space, name, meant in own.reads])  # noqa: C419 (of a generator it is slow)


def source_digest(code: CodeType) -> str | None:
    """A digest, 16 hex digits, of a function's arguments and statements; None if its source is not available."""
    try:  # the code object's source: for a function, inspect follows __wrapped__
        return function_sha256(textwrap.dedent(inspect.getsource(code))).hex()[:16]
    except (OSError, TypeError, ValueError, SyntaxError):
        return None


def _reads(function: FunctionType) -> tuple[_Read, ...] | None:
    """The objects that a function's names refer to; None if a name is neither its module's nor torch's own."""
    reads: list[_Read] = []
    for instruction in dis.get_instructions(function):
        name = instruction.argval
        if instruction.opname == "LOAD_GLOBAL":
            spaces: tuple[Mapping[str, Any], ...] = (function.__globals__,)
        elif name in function.__code__.co_names:  # an attribute: torch's, or self's
            spaces = vars(torch), vars(nn), vars(functional)
        else:
            continue
        for space in spaces:
            if name in space:
                if not _is_torch_s(name, space[name]):
                    return None
                reads.append((space, name, space[name]))
        if hasattr(torch.Tensor, name):  # must be inherited from the C base class, not overridden
            if name in vars(torch.Tensor):
                return None
            reads.append((vars(torch.Tensor), name, None))
    return tuple(reads)


def _is_torch_s(name: str, value: object) -> bool:
    """True if a value is torch's own function of this name, or a module, type or dtype of torch."""
    if isinstance(value, FunctionType):
        return value.__globals__ is vars(functional) and value.__code__.co_name == name
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] == "torch"
    if isinstance(value, type):
        return value.__module__.partition(".")[0] == "torch"
    return isinstance(value, torch.dtype) or (isinstance(value, BuiltinFunctionType) and value.__name__ == name)


_SOFTCAP = "070361357aa863b5"
_GELUS = {"none": Activation("gelu"), "tanh": Activation("gelu_tanh")}
_Reads: TypeAlias = Callable[[Any], "Activation | None"]
# By the digest of the source of ``_apply_gate``: whether gate and up alternate, and how to read a module's activation.
_GATES: dict[str, tuple[bool, _Reads]] = {
    # integrations.moe
    "8e53074c735221d3": (False, _by_act_fn),
    # beam
    "ea5d5b8addec6805": (False, _by_act_fn),
    # gpt_oss
    "3298db7bcf29356c": (True, lambda experts: _with_numbers(experts, "swiglu", 1.0, limit="limit", alpha="alpha")),
    # openai_privacy_filter
    "f858b041c931610d": (
        False,
        lambda experts: _with_numbers(experts, "swiglu", 1.0, limit="limit", alpha="alpha"),
    ),
    # minimax_m3_vl
    "3bb20b3fb85bb47c": (
        False,
        lambda experts: _with_numbers(experts, "swiglu", 1.0, limit="swiglu_limit", alpha="swiglu_alpha"),
    ),
    # deepseek_v4
    "63ba0985de32603d": (False, lambda experts: _silu_of_act_fn(experts, "swiglu", limit="limit")),
    # hy_v4, hy_v4_vl, glm5_next
    "be7c7503b8ed94c2": (False, lambda experts: _with_numbers(experts, "swiglu", limit="swiglu_limit")),
    # step3p7
    "6b431fcd94ceb313": (False, lambda experts: _silu_of_act_fn(experts, "swiglustep", limit="limit")),
    # inkling2, inkling2_loop
    "1dc156fdf8b63d47": (False, _softcapped),
    # integrations.finegrained_fp8
    "f32bdd6b60bb5466": (False, _of_fp8),
}
_MODELS = "transformers.models"
# By class: the digest of its forward, and how to read an instance's activation.
_CLASSES: dict[tuple[str, str], tuple[str, _Reads]] = {
    ("transformers.activations", "SiLUActivation"): ("d4b942074f7d07d8", lambda act: _SILU),
    ("transformers.activations", "GELUActivation"): (
        "4320d0ae3e2ff651",
        lambda act: _of_function(act.__dict__.get("act")),
    ),
    ("transformers.activations", "GELUTanh"): ("4320d0ae3e2ff651", lambda act: _of_function(act.__dict__.get("act"))),
    ("transformers.activations", "ReLUSquaredActivation"): ("48a538c7ba814f18", lambda act: _RELU2),
    ("torch.nn.modules.activation", "SiLU"): (
        "4bfc8c5714be43fe",
        lambda act: None if act.inplace else _SILU,
    ),
    ("torch.nn.modules.activation", "GELU"): ("c9a0a4d8cd9b997a", lambda act: _GELUS.get(act.approximate)),
}
for _family, _class in (("inkling2", "Inkling2"), ("inkling2_loop", "Inkling2Loop")):
    _home = f"{_MODELS}.{_family}.modeling_{_family}"
    _CLASSES[_home, f"{_class}SoftcappedSwiGLU"] = "9e46fafae0057451", _of_softcaps
    _CLASSES[_home, f"{_class}Softcap"] = _SOFTCAP, lambda act: None
