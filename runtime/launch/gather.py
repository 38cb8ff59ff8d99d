"""Rows of x gathered by a row operation: alone, or for the plain product of them. ``dispatch/gather.py`` says when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from ...artifacts.records.problem import Fusion, Problem
from ...kernels.contract.rowops import BY_TOKEN, NOTED_ROWS, NOTES, by_token
from ..driver.device import allocator, local_gpu
from .program import Step

if TYPE_CHECKING:
    from ..dispatch.snapshot import Snapshot, Usable
    from .gemm import LoadedKernel


def in_range(index: torch.Tensor, rows: int, divisor: int) -> torch.Tensor:
    """The index as the pass may read it: one that x [rows, K] has no row for becomes another, whose row is not used."""
    return index.clamp(0, rows * divisor - 1)


def kernel(
    snapshot: Snapshot, problem: Problem, M: int, device: int, *, top_k: int, fusion: Fusion = Fusion.GATHER,
    aligned: bool = True, checks: bool = False,
) -> LoadedKernel | None:  # fmt: skip
    """The variant that ``verdict`` names, loaded on ``cuda:device``; None where the code that gathers is to run."""
    from ..dispatch.gather import verdict  # here, as only a first launch needs them
    from .loader import load_first

    local = local_gpu(device)

    def choose() -> tuple[Usable, int] | None:
        chosen = verdict(snapshot, problem, M, local, top_k=top_k, fusion=fusion, aligned=aligned, checks=checks).chosen
        return None if chosen is None else (chosen.usable, chosen.index)

    return load_first(snapshot, choose, local, device)


class Gather(Protocol):
    """A ``RowOpLauncher`` of RowOp.GATHER."""

    def __call__(
        self, rows: int, columns: int, pointers: tuple[int, ...], numbers: tuple[int, ...], stream: int
    ) -> None: ...


def step(
    launch: Gather, x: torch.Tensor, *, top_k: int, M: int, index_step: int, used: tuple[int, int], index: str = "index"
) -> Step:
    """out[i] = x[index[i] // top_k] for dense x [T, columns], index [M] within [0, T*top_k) and out [M, columns].

    ``used`` is as ``rowops.used`` has it of the bounds that the step is given; ``index`` names the operand that is
    read. (The words in memory that a launch by tokens needs are torch's, of its current stream, which the step's has
    to be: in a graph capture, of the graph's pool.)
    """
    (T, columns), itemsize, empty = x.shape, x.element_size(), allocator(x.device)
    slots, (behind, flags) = T * top_k, used
    scales = slots == M

    def run(M: int, stream: int, x: int, index: int, bounds: int, out: int) -> None:
        many, count = M if scales else slots, bounds + behind
        if not by_token(M, columns * itemsize, many, top_k):
            launch(M, columns, (x, index, count, out), (M, columns, top_k, index_step, flags), stream)
            return
        noted = empty((1 + many,), (1,), torch.int32)
        words, looks = noted.data_ptr(), -(-M // NOTED_ROWS)
        launch(looks, columns, (x, index, count, words), (M, columns, many, index_step, flags | NOTES), stream)
        tokens = many // top_k
        launch(tokens + looks, columns, (x, index, words, out), (M, columns, top_k, index_step, BY_TOKEN), stream)

    return Step(run, f"gather rows of {columns} columns, {top_k} of each", ("x", index, "bounds", "rows"), scales)
