"""Rows of x picked by an index: how the pass that copies them is launched."""

from __future__ import annotations

from typing import Protocol

import torch

from ..kernels.contract.rowops import BY_TOKEN, NOTED_ROWS, NOTES, USED
from .device import Allocator

# Of the result: with 117 MB two launches take as long as one on an H200, with 134 MB less, with 42 MB longer
# (benchmarks/results/trials/gather-by-token.json).
LEAST_BYTES = 128 << 20


class Gather(Protocol):
    """A ``passlaunchers.PassLauncher`` of Pass.GATHER."""

    def __call__(self, rows: int, columns: int, pointers: tuple[int, ...], numbers: tuple[int, ...]) -> None: ...


def by_token(M: int, row_bytes: int, slots: int, top_k: int) -> bool:
    """Whether each row of x is to be read once, for all rows that it goes to, which takes a launch more.

    Not where most of the ``slots``, ``top_k`` of each row of x, are not in the index.
    """
    return top_k > 1 and M * row_bytes >= LEAST_BYTES and 0 < slots <= 2 * M


def gather(
    launch: Gather, empty: Allocator, x: int, index: int, used: int, out: int, *, M: int, columns: int, itemsize: int,
    slots: int, top_k: int, index_step: int,
) -> None:  # fmt: skip
    """out[i] = x[index[i] // top_k] for the addresses of dense x [slots // top_k, columns], index [M] and out.

    Each index is within [0, slots). At ``used`` stands how many of the rows count, 0 for all. ``empty`` makes scratch
    memory on the current stream.
    """
    flags = USED if used else 0
    if not by_token(M, columns * itemsize, slots, top_k):
        launch(M, columns, (x, index, used, out), (M, columns, top_k, index_step, flags))
        return
    noted = empty((1 + slots,), (1,), torch.int32)
    words, looks = noted.data_ptr(), -(-M // NOTED_ROWS)
    launch(looks, columns, (x, index, used, words), (M, columns, slots, index_step, flags | NOTES))
    tokens = slots // top_k
    launch(tokens + looks, columns, (x, index, words, out), (M, columns, top_k, index_step, BY_TOKEN))
