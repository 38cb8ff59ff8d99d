"""Sorts a layer's routing once, for all calls that read it."""

from __future__ import annotations

import torch

from ...artifacts.limits import MAX_EXPERTS
from ..check import tensors
from ..ops.routing import Routing, sort


def sort_routing(topk_ids: torch.Tensor, E: int) -> Routing:
    """Sort the (token, slot) pairs by expert, stably. Nothing is read on the host, so a CUDA graph can capture it.

    Parameters
    ----------
    topk_ids
        [T, k] of any integer type: the experts of each token. An id outside [0, E) (an expert on another rank) is
        sorted past the last expert and takes no part.
    E
        The number of experts, 1 to 65536.

    Returns
    -------
    Routing
        A named tuple of tensors. ``gather_indices`` [T*k]: the flat token*k + slot of each sorted row. ``m_sizes``
        int32 [E]: the rows of each expert. ``bounds`` int32 [E+1]: each expert's first row, and the last expert's end.
        ``experts`` int32 [T*k]: the expert of each slot. ``places`` int32 [T*k]: the sorted row of each slot, or -1.

    Raises
    ------
    InputError
        if ``topk_ids`` is not an integer tensor [T, k], or E is out of range.
    """
    if not isinstance(E, (int, torch.SymInt)) or isinstance(E, bool) or not 1 <= E <= MAX_EXPERTS:
        tensors.bad("E", repr(E), f"the number of experts, an int of 1 to {MAX_EXPERTS}", "sort_routing")
    tensors.tensors("sort_routing", topk_ids=topk_ids)
    check_ids(topk_ids, "sort_routing")
    return sort(topk_ids, E)


def check_ids(topk_ids: torch.Tensor, call: str) -> None:
    """Raise InputError unless the dtype of ``topk_ids`` is an integer type."""
    dtype = topk_ids.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        tensors.bad("topk_ids", f"{dtype}", "an integer type", call)
