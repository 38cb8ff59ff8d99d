"""Calls that come again with the same operands: what to launch, and whether they are the same indeed.

A table holds, by address of x and w (and out), a call's launch in readiness, and a guard: one call into torch
that compares the tensors' types, dtypes, devices, layouts, shapes, strides and ``requires_grad`` with those of
the first time. It is the guard of torch's own compiled code; a torch without it does without the table.
Where calls of several sizes share an address, the last of them is tried first, then the one of as many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import torch

from ..weights.expert_weights import ExpertWeights

Guard: TypeAlias = Callable[..., bool]

# (x, w, m_sizes[, out]) -> y, or None where they are not the same: see launcher.Repeater
Entry: TypeAlias = "Callable[..., torch.Tensor | None]"
Key: TypeAlias = "tuple[object, ...]"
Table: TypeAlias = "dict[Key, Entry]"

_MOST_ENTRIES = 8192  # two of each call, of about 1 KB

_TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def remember(table: Table, key: Key, rows: int, entry: Entry) -> None:
    """Put an entry in, under ``key`` and under ``(key, rows)``; a full table begins anew."""
    if len(table) >= _MOST_ENTRIES:
        table.clear()
    table[key] = table[key, rows] = entry


def key_of(w: torch.Tensor | ExpertWeights) -> tuple[object, ...]:
    """By what a plan is found for these weights: where they begin; of quantised ones what they are, too."""
    return (w.codes.data_ptr(), w.format) if isinstance(w, ExpertWeights) else (w.data_ptr(),)


def guard(*tensors: torch.Tensor, loose: Collection[int] = ()) -> Guard | None:
    """A check that these tensors pass, and others only if they differ from them in address and content.

    Those whose place is in ``loose`` may have any number of rows, anywhere: of their sizes and strides the last counts.
    """
    if _TensorGuards is None:
        return None
    sizes, strides = (
        [_last(given) if i in loose else list(given) for i, given in enumerate(every)] if loose else None
        for every in ([one.shape for one in tensors], [one.stride() for one in tensors])
    )
    try:
        check: Guard = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None
    except (TypeError, ValueError, RuntimeError):  # another torch
        return None


def _last(given: Sequence[int]) -> list[int | None]:
    return [*(None for _ in given[1:]), given[-1]]
