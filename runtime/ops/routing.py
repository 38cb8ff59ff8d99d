"""Sort the slots of tokens by expert, by a bundle's kernel; benchmarks/speed/sorting.py times it."""

from __future__ import annotations

import torch

from ...artifacts.records import DType, RowOp
from ...artifacts.tuples import NamedTuple
from ...kernels.rowops import ADDS, COUNTS, PLACES, SORTED_EXPERTS
from ..check import tensors
from ..driver.device import allocator, current_stream, on
from ..launch import rowops

_MOST_SLOTS = 2**29  # the kernel counts in int32
_STEPS = {torch.int32: 1, torch.int64: 2}
_compiling = torch.compiler.is_compiling
_traced = torch._C._get_tracing_state
_modes = torch._C._len_torch_dispatch_stack
_transformed = torch._C._are_functorch_transforms_active


class Routing(NamedTuple):
    """The slots of T tokens sorted by expert, E of them.

    ``gather_indices`` [T*k]: the flat token*k + slot of each sorted row; ``m_sizes`` int32 [E]: each expert's rows;
    ``bounds`` int32 [E+1]: where each expert's rows begin, and where the last one's end; ``experts`` int32 [T*k]: each
    slot's expert, not in [0, E) for a slot that takes no part; ``places`` int32 [T*k]: each slot's sorted row, -1 for
    a slot that takes no part.
    """

    gather_indices: torch.Tensor
    m_sizes: torch.Tensor
    bounds: torch.Tensor
    experts: torch.Tensor
    places: torch.Tensor


def sort(topk_ids: torch.Tensor, E: int) -> Routing:
    """The slots of ``topk_ids`` [T, k] sorted by expert, stably. Nothing is checked; E may be 0."""
    slots = sort_slots(topk_ids, E)
    if slots is not None:
        return Routing(*slots)
    flat = topk_ids.reshape(-1).to(torch.int64)
    # int32 sorts in half the passes of int64.
    flat = torch.where((flat >= 0) & (flat < E), flat, E).to(torch.int32)
    experts, order = torch.sort(flat, stable=True)
    steps = torch.arange(E + 1, dtype=torch.int32, device=flat.device)
    bounds = torch.searchsorted(experts, steps, out_int32=True)
    rows = torch.arange(flat.shape[0], dtype=torch.int32, device=flat.device)
    places = torch.where(flat < E, torch.zeros_like(flat).scatter(0, order, rows), -1)
    return Routing(order, bounds[1:] - bounds[:-1], bounds, flat, places)


def sort_slots(ids: torch.Tensor, E: int) -> tuple[torch.Tensor, ...] | None:
    """(order int64 [M], m_sizes int32 [E], bounds int32 [E + 1], experts, places int32 [M]) of ``ids``, M of any shape.

    As ``Routing`` has them; a slot whose id is not in [0, E) comes after all others, and its expert is E. The
    order is stable. None if no kernel does it, so that torch sorts.
    """
    # First check that this is a call and no trace: a trace must not even read sizes.
    if type(ids) is not torch.Tensor or _compiling() or _traced() is not None or _modes() or _transformed():
        return None
    step, M = _STEPS.get(ids.dtype), ids.numel()
    if step is None or not 0 < M < _MOST_SLOTS or E < 1 or not tensors.on_gpu(ids):
        return None
    device = ids.get_device()
    launch = rowops.launcher(RowOp.SORT_SLOTS, DType.FP32, device, aligned=True)
    if launch is None or launch.most_experts < E:
        return None
    with on(device):
        ids = ids.contiguous()
        chunks = -(-M // launch.block)
        empty = allocator(ids.device)
        order, places = empty((M,), (1,), torch.int64), empty((M,), (1,), torch.int32)
        experts, m_sizes = empty((chunks * launch.block,), (1,), torch.int32), empty((E,), (1,), torch.int32)
        bounds = empty((E + 1,), (1,), torch.int32)
        counts = empty((chunks * (E + 1),), (1,), torch.int32) if chunks > 1 else None
        words = {
            "ids": ids.data_ptr(),
            "experts": experts.data_ptr(),
            "order": order.data_ptr(),
            "places": places.data_ptr(),
            "bounds": bounds.data_ptr(),
            "m_sizes": m_sizes.data_ptr(),
            "counts": tensors.address_of(counts),
            "M": M,
            "E": E,
            "ids_step": step,
            "flags": COUNTS | PLACES if counts is None else COUNTS,
        }
        stream = current_stream(device)
        if counts is None:
            launch(1, stream, words)
        else:
            launch(chunks, stream, words)
            launch(-(-(E + 1) // SORTED_EXPERTS), stream, words | {"flags": ADDS})
            launch(chunks, stream, words | {"flags": PLACES})
    return order, m_sizes, bounds, experts.narrow(0, 0, M), places
