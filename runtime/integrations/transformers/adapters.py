"""Adapters of experts that stay quantised: A and B run beside the codes.

An experts' module holds the adapters of its weights while a call with them runs. Nothing here imports PEFT.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ...artifacts.errors import InputError
from ...runtime.ops.low_rank import Lora
from .quantised import ENDS, quantised

NAME = "pretuned"
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_HELD = "_pretuned_adapters"  # in an experts' module while a call with adapters runs: each weight's


def codes_name(experts: Any, name: str) -> str | None:
    """The name under which the codes of a weight are in a module, whatever runs it; None if it is not quantised."""
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
    """A weight that lies as codes in a module on pretuned, as PEFT is to see it: its shape, no numbers, no memory.

    None for any other module or name, and for codes that don't run here.
    """
    running = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return view_anywhere(experts, name) if running == NAME else None


def view_anywhere(experts: Any, name: str) -> torch.Tensor | None:
    """``view`` of a weight, whatever runs the experts."""
    if "is_transposed" not in getattr(experts, "__dict__", ()):
        return None
    try:
        w = quantised(experts, name)
    except InputError:
        return None  # its forward says why
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
    """Within the block, calls of the experts use this adapter for the weight ``name``."""
    adapters: dict[str, Lora] | None = getattr(experts, _HELD, None)
    if adapters is None:  # (torch 2.11's compiler traces no setdefault of __dict__)
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
