"""The order in which kernels read a format's codes, where it is not the checkpoint's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class CodeOrder(NamedTuple):
    """An order of codes. ``number`` is what bundles and ``ExpertWeights.order`` say; 0 is the checkpoint's own.

    ``reorder(codes, undo)`` maps the codes of one expert, ``ExpertWeights.codes[e]``, to this order, and with ``undo``
    back, bit for bit, in the shape and dtype that they have. It leaves the tensor that it is given as it is.
    """

    number: int
    reorder: Callable[[torch.Tensor, bool], torch.Tensor]


# By format. One without an entry is read as the checkpoint has it.
ORDERS: dict[str, CodeOrder] = {}


def reorder(codes: torch.Tensor, order: CodeOrder, *, undo: bool) -> None:
    """Put codes [E, ...] into the order, or with ``undo`` back, in place and expert by expert.

    Where that fails (no memory for one expert more) all of them are as they were.
    """
    for expert in range(codes.shape[0]):
        try:
            moved = order.reorder(codes[expert], undo)
        except BaseException:
            for done in range(expert):
                codes[done].copy_(order.reorder(codes[done], not undo))
            raise
        codes[expert].copy_(moved)
