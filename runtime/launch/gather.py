"""Rows of x gathered by a row operation: alone, or for the plain product of them. The bundles' plans say when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...artifacts.records import Fusion, Problem
from ...kernels.rowops import BY_TOKEN, NOTED_ROWS, NOTES, by_token
from ..driver.device import allocator, local_gpu
from .program import Step

if TYPE_CHECKING:
    from ..dispatch.snapshot import Snapshot, Usable
    from ..driver.rowops import RowOpLauncher
    from .gemm import LoadedKernel


def in_range(index: torch.Tensor, x: torch.Tensor, divisor: int) -> torch.Tensor:
    """The index with out-of-range entries replaced, so that the row kernel can read it; their rows are not used."""
    return index.clamp(0, x.shape[0] * divisor - 1)


def kernel(
    snapshot: Snapshot,
    problem: Problem,
    M: int,
    device: int,
    *,
    top_k: int,
    fusion: Fusion = Fusion.GATHER,
    aligned: bool = True,
    checks: bool = False,
) -> LoadedKernel | None:
    """The variant after a row kernel that gathers, loaded on ``cuda:device``; None if a gathering variant shall run."""
    from ..dispatch.plans import rows_first  # here, as only a first launch needs them
    from .loader import load_first

    local = local_gpu(device)

    def choose() -> tuple[Usable, int] | None:
        return rows_first(snapshot, problem, M, local, top_k=top_k, fusion=fusion, aligned=aligned, checks=checks)

    return load_first(snapshot, choose, local, device)


def step(
    launch: RowOpLauncher,
    x: torch.Tensor,
    *,
    top_k: int,
    M: int,
    index_step: int,
    used: tuple[int, int],
    index: str = "index",
    expected: int | None = None,
) -> Step:
    """rows[i] = x[index[i] // top_k] for dense x [T, columns], index [M] within [0, T*top_k) and rows [M, columns].

    ``used`` is ``rowops.used`` of the step's bounds; ``index`` names the operand that is read. About ``expected`` rows
    belong to an expert; None: all. A launch by tokens takes memory from torch, so the step must run on torch's current
    stream; in a graph capture the memory is from the graph's pool.
    """
    (T, columns), itemsize, empty = x.shape, x.element_size(), allocator(x.device)
    slots, (behind, flags) = T * top_k, used
    scales, sizes = slots == M, {"columns": columns, "index_step": index_step}
    plain = launch.bind(behind=(("used", behind, 0),), top_k=top_k, flags=flags, **sizes)

    def run(M: int, stream: int, *addresses: int) -> None:
        many = M if scales else slots
        if not by_token(M if expected is None else min(M, expected), columns * itemsize, many, top_k):
            plain(M, stream, *addresses)
            return
        words = dict(zip(launch.operands, addresses, strict=True))
        noted = empty((1 + many,), (1,), torch.int32)
        notes, looks = noted.data_ptr(), -(-M // NOTED_ROWS)
        marked = words | sizes | {"M": M, "top_k": many, "flags": flags | NOTES, "out": notes}
        launch(looks, stream, marked | {"used": words["used"] + behind})
        stored = words | sizes | {"M": M, "top_k": top_k, "flags": BY_TOKEN, "used": notes}
        launch(many // top_k + looks, stream, stored)

    operands = {"index": index, "used": "bounds", "out": "rows"}
    names = tuple([operands.get(operand, operand) for operand in launch.operands])
    return Step(run, f"gather rows of {columns} columns, {top_k} of each", names, scales)
