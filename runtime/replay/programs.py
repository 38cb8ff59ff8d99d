"""Programs of calls that come again, and the guards that a gradient passes before it is run by one.

A plan (``product_plan.py``, ``layer_plan.py``) takes a call only if its tensors pass one guard (``guard``) and begin
as well aligned as the first ones. Any other call goes the long way, which checks everything. ``launch/program.py``
writes down what runs, the arithmetic is in ``ops``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from ...artifacts.tuples import NamedTuple
from ...kernels.contract.launch_abi import ALIGNMENT_BYTES
from .. import hooks
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import capturing, current_stream, device_is_current, only_device, without_autocast
from ..launch.program import Program, Recorder

Given: TypeAlias = "Sequence[torch.Tensor | None]"
Results: TypeAlias = "Sequence[torch.Tensor | None]"

MOST_PLANS = 4096  # of some 2 KB, a layer's with its gradient 17 KB, with adapters 33 KB
KINDS = (torch.bfloat16, torch.float16)  # not float32: tf32 and autocast change what a layer or a gradient does
MOST_ROWS = 1 << 29  # of a plan for any number of rows: all of a bucket fit int32
LOW = ALIGNMENT_BYTES - 1

stream_of = current_stream
Guard: TypeAlias = Callable[..., bool]

_TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def guard(*tensors: torch.Tensor, loose: Collection[int] = ()) -> Guard | None:
    """A check that these tensors pass, and others only if they differ from them in address and content.

    Those whose place is in ``loose`` may have any number of rows. Of more than two dimensions the last one counts.
    """
    if _TensorGuards is None:
        return None
    sizes = strides = None
    if loose:
        sizes = [_any_rows(one.shape) if i in loose else list(one.shape) for i, one in enumerate(tensors)]
        strides = [
            _last(one.stride()) if i in loose and one.dim() > 2 else list(one.stride()) for i, one in enumerate(tensors)
        ]
    try:
        check: Guard = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None
    except (TypeError, ValueError, RuntimeError):  # another torch
        return None


def _any_rows(shape: Sequence[int]) -> list[int | None]:
    return _last(shape) if len(shape) > 1 else [None]


def _last(given: Sequence[int]) -> list[int | None]:
    return [*(None for _ in given[1:]), given[-1]]


class _Gradient(NamedTuple):
    """The program of a gradient; of its first tensors which were there, what they have in common, how aligned."""

    program: Program
    same: Guard
    there: Callable[[Given], Any]
    absent: list[int]
    low: list[int]


class Programs:
    """Programs of calls on one GPU. No tensor is kept: a plan would hold a model's weights."""

    __slots__ = ("_alone", "_device", "_gradients", "_snapshot", "_varies", "grad")

    def __init__(self, x: torch.Tensor, *, grad: bool, varies: bool) -> None:
        self._device, self._alone, self._varies, self.grad = x.get_device(), only_device(), varies, grad
        self._snapshot = weakref.ref(dispatch_snapshot.snapshot())  # (which keeps the plan)
        self._gradients: dict[tuple[bool, ...], _Gradient | None] = {}

    def _recorded(self, M: int, given: Given, compute: Callable[[Recorder], Results]) -> tuple[Results, Program | None]:
        snapshot = dispatch_snapshot.snapshot()
        before, recorder = snapshot.put_off, Recorder(M, given, varies=self._varies)
        found = compute(recorder)
        return found, recorder.program(*found) if snapshot.put_off == before else None

    def _again(self, known: _Gradient, M: int, given: Given, loose: int = 0) -> Results | None:
        """A gradient by its program; None where its tensors are not as the first ones were.

        (Hooks on saved tensors may have made others of them.) The first ``loose`` have any number of rows.
        """
        program, same, there, absent, low = known
        some = there(given)
        if not same(*some) or (absent and any(given[i] is not None for i in absent)):  # (a None is not the same)
            return None
        if [one.data_ptr() & LOW for one in some] != low:
            return None
        if loose and not all(one is None or one.is_contiguous() for one in given[:loose]):
            return None
        now = (
            hooks.current() if hooks.blocks else hooks.snapshot
        )  # none just after a reload, when the plan's own may be gone, too
        if now is None or now is not self._snapshot() or not (self._alone or device_is_current(self._device)):
            return None
        return program.run(M, stream_of(self._device), given)

    def _first(
        self,
        needs: tuple[bool, ...],
        M: int,
        given: Given,
        guarded: int,
        compute: Callable[[Recorder], Results],
        loose: int = 0,
    ) -> Results | None:
        """What ``compute`` makes of ``given``, written down; None where it was tried, or can't be.

        A later call is like it where the first ``guarded`` are, of which the first ``loose`` have any number of rows.
        """
        if needs in self._gradients or dispatch_snapshot.snapshot() is not self._snapshot():
            return None
        there = [i for i, one in enumerate(given[:guarded]) if one is not None]
        some = [one for one in given[:guarded] if one is not None]
        same = guard(*some, loose=[n for n, i in enumerate(there) if i < loose])
        here = self._alone or device_is_current(self._device)
        if same is None or not here or not all(one.is_contiguous() for one in given[:loose] if one is not None):
            return None
        with without_autocast(some[0].device.type):
            found, program = self._recorded(M, given, compute)
        if program is not None:
            absent, low = [i for i in range(guarded) if i not in there], [one.data_ptr() & LOW for one in some]
            self._gradients[needs] = _Gradient(program, same, itemgetter(*there), absent, low)  # (dy and others)
        elif not hooks.jit_allowed() and not capturing():  # else the next call asks again
            self._gradients[needs] = None
        return found


def remember(table: dict[object, Any], key: object, made: Programs) -> None:
    """Put a plan in; a full table begins anew."""
    if key not in table and len(table) >= MOST_PLANS:
        table.clear()
    table[key] = made
