"""Programs: the launches of a call, one after another, which run at once, or are recorded to run again.

The arithmetic of a call, in the folders above, uses an ``EagerExecutor``: it makes memory, runs steps, and calls torch
where a call needs it. A ``Recorder`` does the same and writes it down, in the terms of the tensors that the call was
given, as a ``Program``: a later call that is like it runs that, and none of the arithmetic above.

A plan (runtime/api/product_plan.py) has ``Programs``. It takes a call only if its tensors pass one guard (``guard``)
and begin as well aligned as the first ones. Any other call goes the long way, which checks everything.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ...artifacts.tuples import NamedTuple
from ...kernels.entry import ALIGNMENT_BYTES
from .. import hooks
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import allocator, capturing, current_stream, device_is_current, only_device, without_autocast

if TYPE_CHECKING:
    from ..driver.launcher import Launcher

stream_of = current_stream

Given: TypeAlias = "Sequence[torch.Tensor | None]"
Per: TypeAlias = "int | Callable[[int], tuple[int, ...]]"  # rows or shape of new memory (``EagerExecutor.new``)
Results: TypeAlias = "Sequence[torch.Tensor | None]"

MOST_PLANS = 4096  # plans, of about 2 KB; a layer's with its gradient has 17 KB, with adapters 33 KB
KINDS = (torch.bfloat16, torch.float16)  # not float32: tf32 and autocast change what a layer or a gradient does
MOST_ROWS = 1 << 29  # rows of a plan for any M: all row numbers of a bucket fit int32
LOW = ALIGNMENT_BYTES - 1

Guard: TypeAlias = Callable[..., bool]

_TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def replays(dtype: torch.dtype) -> bool:
    """True if layers and gradients of a dtype have plans."""
    return dtype in KINDS


class Step(NamedTuple):
    """One launch, prepared except for its addresses and its number of rows.

    ``run(M, stream, *addresses)`` launches it for M sorted rows. ``operands`` names the tensors at these addresses, 0
    is none. ``name`` is for people. Without ``scales`` it depends on sizes of its call other than M. Without
    ``has_rows`` it reads no rows, and M does not matter: it quantises weights.
    """

    run: Callable[..., None]
    name: str
    operands: tuple[str, ...]
    scales: bool = True
    has_rows: bool = True

    @classmethod
    def of(
        cls,
        launcher: Launcher,
        name: str,
        operands: Mapping[str, str] | None = None,
        *,
        scales: bool = True,
        absent: tuple[str, ...] = (),
        **how: Any,
    ) -> Step:
        """A launch of one kernel; ``absent`` and ``how`` are as ``Launcher.bind`` has them.

        ``operands`` maps arguments of the kernel to operands of another name.
        """
        names = launcher.operands
        if absent:
            names, how["absent"] = tuple([operand for operand in names if operand not in absent]), absent
        if operands:
            names = tuple([operands.get(operand, operand) for operand in names])
        return cls(launcher.bind(**how), name, names, scales)


class EagerExecutor:
    """Runs each step at once."""

    def new(self, like: torch.Tensor, size: tuple[int, ...], dtype: torch.dtype | None = None, *, per: Per = 1) -> Any:
        """Memory on like's device, in its dtype.

        The size begins with M // ``per``; with 0 it is always the same; with a function it is ``per(M)``.
        """
        return like.new_empty(size, dtype=dtype)

    def run(self, step: Step, M: int, operands: Mapping[str, torch.Tensor | None]) -> None:
        """Launch a step over M sorted rows, on torch's current stream. Its first operand is always there."""
        first = operands[step.operands[0]]
        if first is None:
            raise AssertionError(f"{step.name}: no {step.operands[0]}")
        tensors = map(operands.get, step.operands)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        step.run(M, stream_of(first.get_device()), *addresses)

    def call(self, function: Callable[..., Any], *tensors: torch.Tensor, scales: bool = True) -> Any:
        """Return the result of a torch function of these tensors: new memory, or one of them.

        The function holds no tensor. Without ``scales`` it holds sizes of this call, so the call can't be recorded.
        """
        return function(*tensors)

    def unplanned(self) -> None:
        """Note that a part of the call is not run through this executor: the call can't be recorded."""


EAGER = EagerExecutor()


class Recorder(EagerExecutor):
    """Runs each step at once, and records it.

    ``inputs`` are the call's tensors, with ``M`` sorted rows. With ``varies`` the program is for any number of rows. A
    tensor is identified by its address while it lives.
    """

    def __init__(self, M: int, inputs: Sequence[torch.Tensor | None], *, varies: bool) -> None:
        self._M, self._varies, self._inputs = M, varies, len(inputs)
        self._slots: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}
        self._written: list[_Noted] = []
        self._whole, self._many = True, 1  # slot 0 is no tensor
        for tensor in inputs:
            if tensor is not None:
                self._whole &= tensor.data_ptr() not in self._slots  # else an address would mean two slots
                self._name(tensor, self._many)
            self._many += 1

    def new(self, like: torch.Tensor, size: tuple[int, ...], dtype: torch.dtype | None = None, *, per: Per = 1) -> Any:
        memory = super().new(like, size, dtype, per=per)
        self._whole &= per(self._M) == size if callable(per) else not per or size[0] == self._M // per
        self._written.append(_New(self._fresh(memory), per, tuple(size), memory.dtype, like.device))
        return memory

    def run(self, step: Step, M: int, operands: Mapping[str, torch.Tensor | None]) -> None:
        self._whole &= (M == self._M or not step.has_rows) and (step.scales or not self._varies)
        self._written.append(_Run(step, tuple(self._slot(operands.get(name)) for name in step.operands)))
        super().run(step, M, operands)

    def call(self, function: Callable[..., Any], *tensors: torch.Tensor, scales: bool = True) -> Any:
        self._whole &= scales or not self._varies
        slots = tuple(map(self._slot, tensors))
        for tensor in tensors:  # the function gets whole tensors, so a view is not recorded
            entry = self._slots.get(tensor.data_ptr())
            of = None if entry is None else entry[1]()
            self._whole &= of is not None and (of.shape, of.stride(), of.dtype) == (
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
        result = function(*tensors)
        entry = self._slots.get(result.data_ptr())
        there = entry is not None and entry[1]() is not None
        if there and result.data_ptr() not in [tensor.data_ptr() for tensor in tensors]:
            self._whole = False
        slot = entry[0] if there and entry is not None else self._fresh(result)
        self._name(result, slot)
        self._written.append(_Apply(slot, function, slots))
        return result

    def unplanned(self) -> None:
        self._whole = False

    def program(self, *results: torch.Tensor | None) -> Program | None:
        """The recorded program with its results; None if a step could not be recorded."""
        slots = tuple(map(self._slot, results))
        touched = {slot for noted in self._written for slot in noted.reads}
        filled = all(
            noted.slot in touched for noted in self._written if isinstance(noted, _New)
        )  # else others filled it
        return Program(self._written, self._inputs, slots) if self._whole and filled else None

    def _name(self, tensor: torch.Tensor, slot: int) -> None:
        self._slots[tensor.data_ptr()] = slot, weakref.ref(tensor)

    def _fresh(self, tensor: torch.Tensor) -> int:
        slot, self._many = self._many, self._many + 1
        self._name(tensor, slot)
        return slot

    def _slot(self, tensor: torch.Tensor | None) -> int:
        if tensor is None:
            return 0
        slot, ref = self._slots.get(tensor.data_ptr(), (0, None))
        if ref is None or ref() is None:
            self._whole = False
        return slot


class _New(NamedTuple):
    slot: int
    per: Per
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    reads: tuple[int, ...] = ()


class _Run(NamedTuple):
    step: Step
    reads: tuple[int, ...]


class _Apply(NamedTuple):
    slot: int
    function: Callable[..., torch.Tensor]
    reads: tuple[int, ...]


_Noted: TypeAlias = "_New | _Run | _Apply"


class Program:
    """The recorded steps of a call, for calls like it. It keeps no tensor, and any thread may run it.

    ``run(M, stream, inputs)`` runs the steps on ``inputs``, tensors in the order of the recorded call's, and returns
    the results, None where that call had none. Memory is freed after the last step that reads it is launched.

    The steps are compiled to one Python function: a loop over them makes a layer's call an eighth longer
    (docs/inside/trials.md, programs).
    """

    __slots__ = ("run", "single", "steps")

    def __init__(self, written: Sequence[_Noted], inputs: int, results: tuple[int, ...]) -> None:
        self.steps = tuple(noted.step for noted in written if isinstance(noted, _Run))
        self.single = _single_launch(written)
        names: dict[str, Any] = {}
        scope: dict[str, Any] = {}
        source = _source(written, inputs, results, names)
        exec(_compiled(source), names, scope)  # noqa: S102  (of numbers of slots, sizes and names from here alone)
        self.run: Callable[[int, int, Sequence[torch.Tensor | None]], tuple[torch.Tensor | None, ...]] = scope["run"]


class SingleLaunch(NamedTuple):
    """A program of one launch: the slots that it reads (inputs are 1, 2, ...), and the memory that it allocates."""

    run: Callable[..., None]
    reads: tuple[int, ...]
    new: _New | None


def _single_launch(written: Sequence[_Noted]) -> SingleLaunch | None:
    """The program as ``SingleLaunch``; None if it has several launches or calls torch."""
    *before, last = written or (None,)
    if not isinstance(last, _Run) or len(before) > 1 or not all(isinstance(each, _New) for each in before):
        return None
    return SingleLaunch(last.step.run, last.reads, before[0] if before else None)  # type: ignore[arg-type]


@functools.lru_cache(256)
def _compiled(source: str) -> Any:
    return compile(source, "<a program of pretuned>", "exec")


def _source(written: Sequence[_Noted], inputs: int, results: tuple[int, ...], names: dict[str, Any]) -> str:
    """The source of ``run``, a line for each recorded step: ``t3`` is the tensor of slot 3, ``a3`` its address.

    ``names`` gets the functions that the lines call.
    """
    last = {slot: at for at, noted in enumerate(written) for slot in noted.reads if slot > inputs}
    lines = [", ".join(f"t{slot}" for slot in range(1, inputs + 1)) + ", = inputs"]
    there = {0: "0"}  # the addresses that are known

    def address(slot: int) -> str:
        if slot not in there:
            lines.append(f"a{slot} = t{slot}.data_ptr()")
            there[slot] = f"a{slot}"
        return there[slot]

    for at, noted in enumerate(written):
        if isinstance(noted, _New):
            names[f"empty{at}"], names[f"dtype{at}"] = allocator(noted.device), noted.dtype
            if callable(noted.per):
                names[f"size{at}"] = _with_strides(noted.per)
                lines.append(f"t{noted.slot} = empty{at}(*size{at}(M), dtype{at})")
                continue
            rows = str(noted.size[0]) if not noted.per else "M" if noted.per == 1 else f"M // {noted.per}"
            size = "".join(f"{part}, " for part in (rows, *noted.size[1:]))
            lines.append(f"t{noted.slot} = empty{at}(({size}), {_strides(noted.size)}, dtype{at})")
        elif isinstance(noted, _Run):
            names[f"run{at}"] = noted.step.run
            lines.append(f"run{at}(M, stream, {', '.join(map(address, noted.reads))})")
        else:
            names[f"call{at}"] = noted.function
            lines.append(f"t{noted.slot} = call{at}({', '.join(f't{slot}' for slot in noted.reads)})")
            there.pop(noted.slot, None)
        done = [slot for slot, end in last.items() if end == at and slot not in results]
        lines += [f"del t{slot}" for slot in done]
    lines.append("return " + "".join(f"t{slot}, " if slot else "None, " for slot in results))
    return "def run(M, stream, inputs):\n    " + "\n    ".join(lines)


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(size, dtype=torch.uint8, device="meta").stride())


def _with_strides(size_of: Callable[[int], tuple[int, ...]]) -> Callable[[int], tuple[tuple[int, ...], ...]]:
    """A function of M that returns the size and the strides of dense memory."""

    @functools.lru_cache(16)
    def both(M: int) -> tuple[tuple[int, ...], ...]:
        size = size_of(M)
        return size, _strides(size)

    return both


def guard(*tensors: torch.Tensor, loose: Collection[int] = ()) -> Guard | None:
    """A check that tensors have these tensors' dtypes, shapes, strides and devices; None if torch has no such check.

    Tensors whose index is in ``loose`` may have any number of rows; with more than two dimensions only the last
    counts.
    """
    if _TensorGuards is None:
        return None
    sizes = strides = None
    if loose:
        sizes = [_any_rows(tensor.shape) if i in loose else list(tensor.shape) for i, tensor in enumerate(tensors)]
        strides = [
            _last(tensor.stride()) if i in loose and tensor.dim() > 2 else list(tensor.stride())
            for i, tensor in enumerate(tensors)
        ]
    try:
        check: Guard = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None
    except (TypeError, ValueError, RuntimeError):  # another torch
        return None


def _any_rows(shape: Sequence[int]) -> list[int | None]:
    return _last(shape) if len(shape) > 1 else [None]


def _last(strides: Sequence[int]) -> list[int | None]:
    return [*(None for _ in strides[1:]), strides[-1]]


class _Gradient(NamedTuple):
    """The program of a gradient, and the presence, common properties and alignment of its recorded tensors."""

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

    def _recorded(
        self, M: int, inputs: Given, compute: Callable[[Recorder], Results]
    ) -> tuple[Results, Program | None]:
        snapshot = dispatch_snapshot.snapshot()
        before, recorder = snapshot.put_off, Recorder(M, inputs, varies=self._varies)
        results = compute(recorder)
        return results, recorder.program(*results) if snapshot.put_off == before else None

    def _again(self, gradient: _Gradient, M: int, inputs: Given, loose: int = 0) -> Results | None:
        """Run a gradient's recorded program; None if its tensors differ from the recorded ones.

        Hooks on saved tensors may have replaced them. The first ``loose`` tensors have any number of rows.
        """
        program, same, there, absent, low = gradient
        some = there(inputs)
        if not same(*some) or (absent and any(inputs[i] is not None for i in absent)):  # None counts as different
            return None
        if [tensor.data_ptr() & LOW for tensor in some] != low:
            return None
        if loose and not all(tensor is None or tensor.is_contiguous() for tensor in inputs[:loose]):
            return None
        now = (
            hooks.current() if hooks.blocks else hooks.snapshot
        )  # none just after a reload, when the plan's own may be gone, too
        if now is None or now is not self._snapshot() or not (self._alone or device_is_current(self._device)):
            return None
        return program.run(M, stream_of(self._device), inputs)

    def _first(
        self,
        needs: tuple[bool, ...],
        M: int,
        inputs: Given,
        guarded: int,
        compute: Callable[[Recorder], Results],
        loose: int = 0,
    ) -> Results | None:
        """The results of ``compute`` on ``inputs``, recorded; None if that was tried before, or can't be.

        A later call matches if its first ``guarded`` tensors do; the first ``loose`` of them have any number of rows.
        """
        if needs in self._gradients or dispatch_snapshot.snapshot() is not self._snapshot():
            return None
        there = [i for i, tensor in enumerate(inputs[:guarded]) if tensor is not None]
        some = [tensor for tensor in inputs[:guarded] if tensor is not None]
        same = guard(*some, loose=[n for n, i in enumerate(there) if i < loose])
        here = self._alone or device_is_current(self._device)
        if (
            same is None
            or not here
            or not all(tensor.is_contiguous() for tensor in inputs[:loose] if tensor is not None)
        ):
            return None
        with without_autocast(some[0].device.type):
            results, program = self._recorded(M, inputs, compute)
        if program is not None:
            absent, low = [i for i in range(guarded) if i not in there], [tensor.data_ptr() & LOW for tensor in some]
            self._gradients[needs] = _Gradient(program, same, itemgetter(*there), absent, low)  # dy and other tensors
        elif not hooks.jit_allowed() and not capturing():  # else the next call asks again
            self._gradients[needs] = None
        return results


def remember(table: dict[object, Any], key: object, plan: Programs) -> None:
    """Add a plan to the table; a full table is cleared first."""
    if key not in table and len(table) >= MOST_PLANS:
        table.clear()
    table[key] = plan
