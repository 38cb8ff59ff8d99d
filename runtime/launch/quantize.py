"""Rows of x quantised by a row operation, for a product of codes. ``dispatch/activations.py`` says when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Problem
from ...kernels.contract.rowops import PICKED
from ..driver.device import local_gpu
from .program import Step

if TYPE_CHECKING:
    from ..dispatch.snapshot import Snapshot, Usable
    from ..driver.launcher import RowOpLauncher
    from .gemm import LoadedKernel


def kernel(
    snapshot: Snapshot, problem: Problem, other: DType, M: int, device: int, *, top_k: int
) -> LoadedKernel | None:  # fmt: skip
    """The variant that ``verdict`` names, loaded on ``cuda:device``; None where x stays as it is."""
    from ..dispatch.activations import verdict  # here, as only a first launch needs them
    from .loader import load_first

    local = local_gpu(device)

    def choose() -> tuple[Usable, int] | None:
        chosen = verdict(snapshot, problem, other, M, local, top_k=top_k).chosen
        return None if chosen is None else (chosen.usable, chosen.index)

    return load_first(snapshot, choose, local, device)


def bytes_of_row(K: int) -> int:
    """Of the memory of M rows of codes, and then of their scales, which take a row of whole fours for each 128 of K."""
    return K + K // 8


def step(
    launch: RowOpLauncher, x: torch.Tensor, *, top_k: int, index_step: int, used: tuple[int, int], index: str
) -> Step:
    """codes[i], scale[:, i] = quantised x[i], or with ``top_k`` x[index[i] // top_k], of dense x [T, columns].

    The codes are e4m3 [M, columns], and the scales fp32 [columns / 128, M] right behind them (``bytes_of_row``).
    ``used`` is as ``rowops.used`` has it of the bounds that the step is given; ``index`` names the operand that is
    read, each entry within [0, T * top_k).
    """
    columns, (behind, flags) = x.shape[1], used
    flags |= PICKED if top_k else 0
    divisor = top_k or 1

    def run(M: int, stream: int, x: int, index: int, bounds: int, codes: int) -> None:
        launch(
            M, columns, (x, index, bounds + behind, codes, codes + M * columns),
            (M, columns, divisor, index_step, flags), stream,
        )  # fmt: skip

    picked = f", {top_k} of each" if top_k else ""
    return Step(run, f"quantise rows of {columns} columns{picked}", ("x", index, "bounds", "codes"))
