"""Whether tensors are like those of an earlier call: one call into torch, the guard of its own compiled code.

It compares types, dtypes, devices, layouts, shapes, strides and ``requires_grad``. A torch without it keeps no plans.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import torch

from ..weights.expert_weights import ExpertWeights

Guard: TypeAlias = Callable[..., bool]

_TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def key_of(w: torch.Tensor | ExpertWeights) -> tuple[object, ...]:
    """By what a plan is found for these weights: where they begin; of quantised ones what they are, too."""
    return (w.codes.data_ptr(), w.format) if isinstance(w, ExpertWeights) else (w.data_ptr(),)


def guard(*tensors: torch.Tensor, loose: Collection[int] = ()) -> Guard | None:
    """A check that these tensors pass, and others only if they differ from them in address and content.

    Those whose place is in ``loose`` may have any number of rows, anywhere: of the sizes of a row, and of the strides,
    the last counts.
    """
    if _TensorGuards is None:
        return None
    sizes = strides = None
    if loose:
        sizes = [_any_rows(one.shape) if i in loose else list(one.shape) for i, one in enumerate(tensors)]
        strides = [_last(one.stride()) if i in loose else list(one.stride()) for i, one in enumerate(tensors)]
    try:
        check: Guard = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None
    except (TypeError, ValueError, RuntimeError):  # another torch
        return None


def _any_rows(shape: Sequence[int]) -> list[int | None]:
    return _last(shape) if len(shape) > 1 else [None]


def _last(given: Sequence[int]) -> list[int | None]:
    return [*(None for _ in given[1:]), given[-1]]
