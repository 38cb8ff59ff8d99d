"""Calls that come again with the same operands: what to launch, and whether they are the same indeed.

A table holds, by (address of x, address of w, M, w_layout), a call's launch in readiness, and a guard: one call
into torch that compares the tensors' types, dtypes, devices, layouts, shapes, strides and ``requires_grad`` with
those of the first time. It is the guard of torch's own compiled code; a torch without it does without the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Guard: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]

# (x, w, m_sizes) -> y, or None where they are not the same: see launcher.Repeater
Entry: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]"
Table: TypeAlias = "dict[tuple[int, int, int, str], Entry]"

_MOST_ENTRIES = 4096  # of about 1.5 KB
_MOST_GUARDS = 8

_TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def remember(table: Table, key: tuple[int, int, int, str], entry: Entry) -> None:
    """Put an entry in; a full table begins anew."""
    if len(table) >= _MOST_ENTRIES:
        table.clear()
    table[key] = entry


class Guards:
    """The guards of one kind of call: in inference mode, of a Parameter, or of another row stride it has others."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: list[Guard] = []

    def of(self, x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor) -> Guard | None:
        """A guard that these tensors pass, and others only if they differ from them in x's rows and in addresses."""
        for guard in self._known:
            if guard(x, w, m_sizes):
                return guard
        made = _guard(x, w, m_sizes)
        if made is None or not made(x, w, m_sizes):
            return None
        self._known = [made, *self._known[: _MOST_GUARDS - 1]]
        return made


def _guard(x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor) -> Guard | None:
    if _TensorGuards is None:
        return None
    tensors = (x, w, m_sizes)
    sizes: list[list[int | None]] = [list(tensor.shape) for tensor in tensors]
    sizes[0][0] = None
    try:
        check: Guard = _TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors]
        ).check
    except (TypeError, ValueError, RuntimeError):  # another torch
        return None
    return check
