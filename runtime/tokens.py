"""Rows of tokens: copied into the sorted order, and each token's added up again. By a bundle's kernel, or by torch."""

from __future__ import annotations

import torch

from ..artifacts.types import Pass
from . import passes, rowgather
from .device import allocator, on


def gather(x: torch.Tensor, index: torch.Tensor, top_k: int, bounds: torch.Tensor | None = None) -> torch.Tensor:
    """x[index[i] // top_k] of x [T, H], [M, H]; ``index`` [M] int32 or int64 is within [0, T*top_k).

    With ``bounds`` (``layer.Routing``) rows of no expert hold anything.
    """
    M, H = index.shape[0], x.shape[1]
    x = x.contiguous()
    launch = passes.for_rows(Pass.GATHER, H, M, x)
    if launch is None:
        return x.index_select(0, index // top_k if top_k > 1 else index)
    with on(x.get_device()):
        out = x.new_empty((M, H))
        rowgather.gather(
            launch, allocator(x.device), x.data_ptr(), index.data_ptr(), passes.used(bounds)[0], out.data_ptr(),
            M=M, columns=H, itemsize=x.element_size(), slots=x.shape[0] * top_k, top_k=top_k,
            index_step=2 if index.dtype is torch.int64 else 1,
        )  # fmt: skip
    return out


def fresh(like: torch.Tensor, rows: int, columns: int, top_k: int) -> tuple[torch.Tensor, passes.PassLauncher | None]:
    """A y [rows, columns] to be stored to, and who will ``combine`` it: unwritten for a kernel, zeros for torch."""
    launch = passes.for_rows(Pass.COMBINE, columns, rows // top_k, like=like)
    return (like.new_zeros if launch is None else like.new_empty)((rows, columns)), launch


def combine(
    y: torch.Tensor, experts: torch.Tensor, top_k: int, E: int, launch: passes.PassLauncher | None
) -> torch.Tensor:
    """out[t] = sum over slots s, in their order, of y[t*top_k + s], summed in float32 (or wider) and rounded once.

    y [T*top_k, H] and ``launch`` are as ``fresh`` made them: of slots whose ``experts`` (int32 [T*top_k]) are not in
    [0, E) a kernel reads nothing, and torch the zeros that stand there.
    """
    T, H = y.shape[0] // top_k, y.shape[1]
    if launch is None:
        return y.view(T, top_k, H).sum(1)
    with on(y.get_device()):
        out = y.new_empty((T, H))
        launch(T, H, (y.data_ptr(), experts.data_ptr(), out.data_ptr()), (T, H, top_k, E))
    return out
