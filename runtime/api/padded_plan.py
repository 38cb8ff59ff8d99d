"""Plans of repeated products and layers on padded rows: recorded programs, for calls that differ in addresses alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from ...artifacts.errors import InputError
from ..check import tensors as check_tensors
from ..driver.device import current_stream, device_is_current
from ..launch.program import LOW, MOST_ROWS, EagerExecutor, Guard, Program, Programs, guard, replays
from ..ops.padded_rows import Placed, place

# (x as [R, K], out as [R, N] or None, the experts' rows, executor) -> y
Compute: TypeAlias = "Callable[[Any, torch.Tensor | None, Placed, EagerExecutor], torch.Tensor]"
_written = torch.autograd.graph.increment_version  # call it for each tensor that a launch has written
_transformed = torch._C._are_functorch_transforms_active
stream_of = current_stream


class PaddedPlan(Programs):
    """The program of one call, whose ``inputs`` are x, m_sizes, m_starts, the other tensors, and out last."""

    __slots__ = ("_in_place", "_lows", "_same", "_there", "program")

    def __init__(self, inputs: Sequence[torch.Tensor | None], there: Sequence[int], same: Guard) -> None:
        x, *_, out = inputs
        if x is None:
            raise AssertionError("a call without x")
        super().__init__(x, grad=any(tensor is not None and tensor.requires_grad for tensor in inputs), varies=True)
        self._same, self._there, self._in_place = same, itemgetter(*there), out is x
        self._lows = [tensor.data_ptr() & LOW for tensor in self._there(inputs)]
        self.program: Program | None = None

    def call(self, inputs: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return y [R, N], which may be ``out``, for tensors like the recorded call's; None for other tensors."""
        some = self._there(inputs)
        if not self._same(*some) or [tensor.data_ptr() & LOW for tensor in some] != self._lows:
            return None
        x, m_sizes, m_starts, *_, out = inputs
        if x is None or m_sizes is None or self.program is None or not takes_rows(x, m_sizes, out):
            return None
        if (m_starts is None) != (x.dim() == 3) or self._in_place != (out is x):  # the checks will report it
            return None
        grad = torch.is_grad_enabled()
        if (self.grad and grad) or not (self._alone or device_is_current(self._device)):
            return None
        if out is not None:
            if (out.requires_grad and grad) or _transformed():
                return None
            read = inputs[1:-1] if self._in_place else inputs[:-1]
            try:
                check_tensors.check_apart(out, **{str(i): tensor for i, tensor in enumerate(read)})
            except InputError:  # the checks will name the tensor that out overlaps
                return None
        placed = placed_of(x, m_sizes, m_starts)
        y = self.program.run(placed.index.shape[0], stream_of(self._device), (*_flat(inputs), *placed))[0]
        if out is not None:
            _written(out)
        return y

    def first(self, inputs: Sequence[torch.Tensor | None], placed: Placed, compute: Compute) -> torch.Tensor:
        """Run and record the call that the plan is made for, and return its y.

        ``compute`` gets x and out as [R, columns], and must read and write these.
        """
        flat = _flat(inputs)
        results, self.program = self._recorded(
            placed.index.shape[0], (*flat, *placed), lambda executor: (compute(flat[0], flat[-1], placed, executor),)
        )
        return results[0]  # type: ignore[return-value]


def _flat(inputs: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The tensors with x and out as rows."""
    x, *rest, out = inputs
    return as_rows(x), *rest, as_rows(out)


def as_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return x or out as [R, columns]; a view if it is contiguous."""
    return tensor if tensor is None or tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])


def takes_rows(x: torch.Tensor, m_sizes: torch.Tensor | None, out: torch.Tensor | None) -> bool:
    """True if the plan can read x [E, M_max, K] or [M, K] and write ``out``. Checks what the plan's guard can't."""
    rows = x.shape[:-1]
    if not x.is_contiguous() or m_sizes is None or not 0 < rows.numel() < MOST_ROWS:
        return False
    if x.dim() == 3 and x.shape[0] != m_sizes.shape[0]:
        return False
    return out is None or (out.is_contiguous() and out.shape[:-1] == rows)


def placed_of(x: torch.Tensor, m_sizes: torch.Tensor, m_starts: torch.Tensor | None) -> Placed:
    """The rows of x [E, M_max, K], or of x [M, K] with starts, that belong to experts."""
    return place(m_sizes, m_starts, x.shape[-2], x.shape[:-1].numel())


def plan(inputs: Sequence[torch.Tensor | None]) -> PaddedPlan | None:
    """Return an empty plan for a call; None if the next call like it must be checked again."""
    x, m_sizes, *_, out = inputs
    if (
        x is None
        or _transformed()
        or not check_tensors.on_gpu(x)
        or not replays(x.dtype)
        or not takes_rows(x, m_sizes, out)
    ):
        return None
    there = [i for i, tensor in enumerate(inputs) if tensor is not None]
    some: Any = [inputs[i] for i in there]
    loose = [0, *([len(some) - 1] if out is not None else [])]
    same = guard(*some, loose=loose)
    return None if same is None else PaddedPlan(inputs, there, same)
