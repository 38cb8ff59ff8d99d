"""PEFT's adapters on experts: A and B are multiplied apart from W, which does not change. Nothing here imports PEFT.

PEFT's ``target_parameters`` adapts plain weights. While an adapted module runs, PEFT parametrises its parameter: each
read computes W + scaling * lhs @ rhs of every expert. If the parametrization is exactly PEFT's own code (recognised by
its source), W and the two factors are read instead. Any other parametrization is read as it is, and the reason is
logged once. PEFT registers its parametrization anew in each forward, and torch then computes W + scaling * lhs @ rhs
once, to check its shape and dtype, which are W's. Once PEFT's class was recognised, torch's check gets W itself
(``_spare``).

Quantised experts have the adapters of their weights as an attribute while a call with adapters runs: A and B are
multiplied apart from the codes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList

from ...artifacts.errors import InputError
from ...runtime.check.call import MAX_RANK
from ...runtime.check.tensors import PLAIN
from ...runtime.ops.low_rank import Lora
from .gates import source_digest
from .quantised import ENDS, quantised

NAME = "pretuned"
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_HELD = "_pretuned_adapters"  # attribute of an experts' module during a call: the adapter of each weight
_PEFT = "peft.tuners.lora.layer"
_SPARED = "_pretuned_spared"  # attribute of the patched function: PEFT's own function
_CHECK = ParametrizationList.__init__.__code__
_NEAR = 12  # most callers to search for ``_CHECK``: six are between it and a parametrization's forward

_log = logging.getLogger(__name__)
_logged: set[str] = set()


def adapted(experts: Any, name: str) -> tuple[torch.Tensor, Lora | None]:
    """A parameter of the experts' module, and its adapter; the parameter as read and None if none is recognised."""
    lists = experts.__dict__.get("_modules", {}).get("parametrizations")
    if lists is not None and name in lists:
        parametrizations = lists[name]
        why = _unknown(parametrizations)
        if why is None:
            _spare(type(parametrizations[0]))
            return parametrizations.original, _lora(parametrizations[0], experts.is_transposed)
        if why not in _logged:
            _logged.add(why)
            _log.warning("pretuned: the whole weight %s is computed in each step, not its adapter alone: %s", name, why)
    weight: torch.Tensor = getattr(experts, name)
    return weight, None


def _lora(proxy: Any, transposed: bool) -> Lora:
    """Return A and B of PEFT's factors: lhs @ rhs has W's shape, so it is B A, or (B A).T for W [E, K, N]."""
    A, B = (proxy.lhs.transpose(1, 2), proxy.rhs.transpose(1, 2)) if transposed else (proxy.rhs, proxy.lhs)
    return Lora(A, B, float(proxy.scaling))


def _unknown(parametrizations: Any) -> str | None:
    """Why a parameter's parametrizations are not exactly one adapter of PEFT's known code; None if they are."""
    if len(parametrizations) != 1:
        return f"it has {len(parametrizations)} parametrizations"
    proxy, original = parametrizations[0], getattr(parametrizations, "original", None)
    kind = type(proxy)
    layer = sys.modules.get(_PEFT)
    if layer is None or kind.__module__ != _PEFT or getattr(layer, kind.__name__, None) is not kind:
        return f"a {kind.__module__}.{kind.__qualname__} is no adapter of PEFT's"
    if kind.__name__ != "_LoraFactorsProxy":
        because = "several active adapters, one expert, 8-bit weights, or a peft before 0.21"
        return f"PEFT's {kind.__name__} has no factors ({because})"
    forward = vars(kind).get("forward")
    forward = getattr(forward, _SPARED, forward)
    if not isinstance(forward, FunctionType) or not _is_known(forward.__code__) or "forward" in proxy.__dict__:
        return "this peft's code for it is not the one that is known here"
    if (
        proxy._forward_hooks
        or proxy._forward_pre_hooks
        or parametrizations._forward_hooks
        or parametrizations._forward_pre_hooks
    ):
        return "it has hooks"
    factors = proxy.lhs, proxy.rhs
    if original is None or type(original) not in PLAIN or any(type(tensor) not in PLAIN for tensor in factors):
        return f"its tensors are {', '.join(type(tensor).__name__ for tensor in (original, *factors))}"
    if not isinstance(proxy.scaling, (int, float)) or any(tensor.dim() != 3 for tensor in (original, *factors)):
        return "its factors are no matrices of each expert"
    rank = proxy.lhs.shape[2]
    if not 1 <= rank <= MAX_RANK:
        return f"its rank is {rank}, more than {MAX_RANK}"
    return None


def _spare(kind: Any) -> None:
    """Patch PEFT's parametrization so that torch's check of it gets W, and not newly computed matrices of all experts.

    The check's matrices would have W's shape and dtype, and be thrown away. All other calls of the parametrization run
    PEFT's own function.
    """
    forward = vars(kind)["forward"]
    if hasattr(forward, _SPARED):
        return

    @functools.wraps(forward)
    def spared(self: Any, W: torch.Tensor) -> Any:
        return W if not torch.compiler.is_compiling() and _checked() else forward(self, W)

    setattr(spared, _SPARED, forward)
    kind.forward = spared


def _checked() -> bool:
    """True if torch's ``ParametrizationList.__init__``, which tries a new parametrization, is among the callers."""
    frame = sys._getframe(2)
    for _ in range(_NEAR):
        if frame is None:
            return False
        if frame.f_code is _CHECK:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@functools.lru_cache(maxsize=16)
def _is_known(code: CodeType) -> bool:
    """True if the code is PEFT's forward: torch.baddbmm(W, self.lhs, self.rhs, alpha=self.scaling) without autocast."""
    return source_digest(code) == "4b545d603f1f6049"


def codes_name(experts: Any, name: str) -> str | None:
    """The name of a weight's codes in a module, whoever runs the module; None if the weight is not quantised."""
    if "is_transposed" not in getattr(experts, "__dict__", ()):
        return None
    for codes_end, scale_end in ENDS:
        codes, scale = (experts._parameters.get(name + end) for end in (codes_end, scale_end))
        if isinstance(codes, torch.Tensor) and isinstance(scale, torch.Tensor) and not _is_weight(codes):
            return name + codes_end
    return None


def _is_weight(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.element_size() > 1


def view(experts: Any, name: str) -> torch.Tensor | None:
    """A tensor that PEFT sees for a weight whose codes pretuned runs: it has the weight's shape, no values, no memory.

    None for any other module or name, and for codes that pretuned does not run.
    """
    running = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return view_anywhere(experts, name) if running == NAME else None


def view_anywhere(experts: Any, name: str) -> torch.Tensor | None:
    """``view`` of a weight, whoever runs the experts."""
    if "is_transposed" not in getattr(experts, "__dict__", ()):
        return None
    try:
        w = quantised(experts, name)
    except InputError:
        return None  # the module's forward reports the reason
    if w is None:
        return None
    E, N, K = w.shape
    dtype = getattr(getattr(experts, "config", None), "dtype", None)
    placeholder = torch.empty(
        (), dtype=dtype if dtype in (torch.float16, torch.float32) else torch.bfloat16, device=w.device
    )
    return placeholder.expand((E, K, N) if experts.is_transposed else (E, N, K))


def adds_to_codes(experts: Any) -> bool:
    """True if a parametrization adds an adapter to quantised codes: nothing can compute that correctly."""
    lists = experts.__dict__.get("_modules", {}).get("parametrizations", ())
    return any(
        name + codes_end in lists and isinstance(getattr(experts, name + scale_end, None), torch.Tensor)
        for name in WEIGHTS
        for codes_end, scale_end in ENDS
    )


@contextlib.contextmanager
def held(experts: Any, name: str, lora: Lora) -> Iterator[None]:
    """A block in which calls of the experts use the adapter ``lora`` for the weight ``name``."""
    adapters: dict[str, Lora] | None = getattr(experts, _HELD, None)
    if adapters is None:  # torch 2.11's compiler can't trace __dict__.setdefault
        adapters = {}
        setattr(experts, _HELD, adapters)
    adapters[name] = lora
    try:
        yield
    finally:
        adapters.pop(name, None)


def held_by(experts: Any, name: str) -> Lora | None:
    """The LoRA adapter of a weight, by its parameter's name, in the running call; None if it has none."""
    adapters: dict[str, Lora] = experts.__dict__.get(_HELD, {})
    return adapters.get(name)


def any_held(experts: Any) -> bool:
    """True if this call has an adapter."""
    return bool(experts.__dict__.get(_HELD))
