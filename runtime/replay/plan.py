"""Calls that come again: the programs that were written down of one, for others that are like it, without checks.

A plan takes a call only if its tensors pass one guard (``guard.py``) and begin as well aligned as the first ones; any
other goes the long way, which checks everything. That of a product belongs to one w, one form and one shape. That of a
layer belongs to its weights and to a bucket of rows, for which all its kernels were chosen, whatever the number of
tokens. What is written down while it runs is in ``launch/program.py``, the arithmetic in ``ops``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from ...kernels.contract.words import ALIGNMENT_BYTES
from .. import hooks
from ..check import tensors as check_tensors
from ..check.call import Call
from ..check.form import Fusions
from ..check.tensors import in_memory
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import capturing, current_stream, device_is_current, only_device, without_autocast
from ..launch.products import operands_of
from ..launch.program import Program, Recorder
from ..ops import autograd, gradients, layer
from ..ops.autograd import Adapted, AdaptedGemm, GroupedGemm
from ..ops.layer import NO_ADAPTERS, NOTHING_NARROW, FrozenWeights, Layer, Narrow, Routing, Weights, columns
from ..ops.low_rank import Adapters, LowRank
from ..weights.expert_weights import ExpertWeights
from . import guard

_W: TypeAlias = "torch.Tensor | ExpertWeights"
_Given: TypeAlias = "Sequence[torch.Tensor | None]"
_Results: TypeAlias = "Sequence[torch.Tensor | None]"

_MOST_PLANS = 4096  # of some 2 KB, a layer's with its gradient 17 KB, with adapters 33 KB
_MOST_ROWS = 1 << 29  # so that all of a bucket fit int32
_KINDS = (torch.bfloat16, torch.float16)  # not float32: tf32 and autocast change what a call of it does
_LOW = ALIGNMENT_BYTES - 1

# Function.apply does this and, for calls inside torch.func's transforms, more.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, GroupedGemm).apply
_apply_adapted: Callable[..., torch.Tensor] = super(torch.autograd.Function, AdaptedGemm).apply
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled
stream_of = current_stream


class _Gradient(NamedTuple):
    """The program of a gradient; of its first tensors which were there, what they have in common, how aligned."""

    program: Program
    same: guard.Guard
    there: Callable[[_Given], Any]
    absent: list[int]
    low: list[int]


class _Plan:
    """Programs of calls on one GPU. No tensor is kept: a plan would hold a model's weights."""

    __slots__ = ("_alone", "_device", "_gradients", "_snapshot", "_varies", "grad")

    def __init__(self, x: torch.Tensor, *, grad: bool, varies: bool) -> None:
        self._device, self._alone, self._varies, self.grad = x.get_device(), only_device(), varies, grad
        self._snapshot = weakref.ref(dispatch_snapshot.snapshot())  # (which keeps the plan)
        self._gradients: dict[tuple[bool, ...], _Gradient | None] = {}

    def _recorded(
        self, M: int, given: _Given, compute: Callable[[Recorder], _Results]
    ) -> tuple[_Results, Program | None]:
        snapshot = dispatch_snapshot.snapshot()
        before, recorder = snapshot.put_off, Recorder(M, given, varies=self._varies)
        found = compute(recorder)
        return found, recorder.program(*found) if snapshot.put_off == before else None

    def _again(self, known: _Gradient, M: int, given: _Given, loose: int = 0) -> _Results | None:
        """A gradient by its program; None where its tensors are not as the first ones were.

        (Hooks on saved tensors may have made others of them.) The first ``loose`` have any number of rows.
        """
        program, same, there, absent, low = known
        some = there(given)
        if not same(*some) or (absent and any(given[i] is not None for i in absent)):  # (a None is not the same)
            return None
        if [one.data_ptr() & _LOW for one in some] != low:
            return None
        if loose and not all(one is None or one.is_contiguous() for one in given[:loose]):
            return None
        now = dispatch_snapshot.current  # none just after a reload, when the plan's own may be gone, too
        if now is None or now is not self._snapshot() or not (self._alone or device_is_current(self._device)):
            return None
        return program.run(M, stream_of(self._device), given)

    def _first(
        self, needs: tuple[bool, ...], M: int, given: _Given, guarded: int, compute: Callable[[Recorder], _Results],
        loose: int = 0,
    ) -> _Results | None:  # fmt: skip
        """What ``compute`` makes of ``given``, written down; None where it was tried, or can't be.

        A later call is like it where the first ``guarded`` are, of which the first ``loose`` have any number of rows.
        """
        if needs in self._gradients or dispatch_snapshot.snapshot() is not self._snapshot():
            return None
        there = [i for i, one in enumerate(given[:guarded]) if one is not None]
        some = [one for one in given[:guarded] if one is not None]
        same = guard.guard(*some, loose=[n for n, i in enumerate(there) if i < loose])
        here = self._alone or device_is_current(self._device)
        if same is None or not here or not all(one.is_contiguous() for one in given[:loose] if one is not None):
            return None
        with without_autocast(some[0].device.type):
            found, program = self._recorded(M, given, compute)
        if program is not None:
            absent, low = [i for i in range(guarded) if i not in there], [one.data_ptr() & _LOW for one in some]
            self._gradients[needs] = _Gradient(program, same, itemgetter(*there), absent, low)  # (dy and others)
        elif not hooks.jit_allowed() and not capturing():  # else the next call asks again
            self._gradients[needs] = None
        return found


class ExecutionPlan(_Plan):
    """One product's. Calling it does the call, or returns None and does nothing where it is another one."""

    __slots__ = ("M", "_dense", "_low", "_same", "_there", "form", "program", "sizes")

    def __init__(self, call: Call, given: _Given, same: guard.Guard) -> None:
        x: torch.Tensor = given[0]  # type: ignore[assignment]
        super().__init__(x, grad=any(t is not None and t.requires_grad for t in given), varies=False)
        self._same, self._low, self._dense = same, x.data_ptr() & _LOW, isinstance(call.w, torch.Tensor)
        there = [i for i, one in enumerate(given) if one is not None]
        self._there = itemgetter(*there)
        self.form, self.M, self.sizes = call.form, call.M, (call.M, call.x_rows, call.y_rows)
        self.program: Program | None = None

    def __call__(
        self, x: torch.Tensor, w: _W, m_sizes: torch.Tensor, weights: torch.Tensor | None, bias: torch.Tensor | None,
        index: torch.Tensor | None, one: LowRank | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        given: Any = (x, w, m_sizes, weights, bias, index)
        if not self._dense:
            given = (x, *operands_of(w).values(), m_sizes, weights, bias, index)
        if one is not None:
            given += one[:2]
            if (one.A.data_ptr() | one.B.data_ptr()) & _LOW:
                return None
        if not self._same(*self._there(given)) or x.data_ptr() & _LOW != self._low:
            return None
        if not (self._alone or device_is_current(self._device)):
            return None
        if self.grad and _grad_enabled():
            if _transformed():
                return None
            if one is not None:
                how = Adapted(self.form, self.sizes, one.scale, self)
                return _apply_adapted(x, w, m_sizes, weights, bias, one.A, one.B, index, how)
            return _apply(x, w, m_sizes, weights, bias, index, self.form, self.sizes, self)
        program = self.program
        if program is None:
            return self.forward(x, w, m_sizes, weights, bias, index, one)[0]
        return program.run(self.M, stream_of(self._device), given)[0]

    def forward(
        self, x: torch.Tensor, w: _W, m_sizes: torch.Tensor, weights: torch.Tensor | None, bias: torch.Tensor | None,
        index: torch.Tensor | None, one: LowRank | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """``gradients.with_adapter``, without a look at the tensors: ``__call__``, or every check, had one."""
        given: Any = (x, w, m_sizes, weights, bias, index)
        if not self._dense:
            given = (x, *operands_of(w).values(), m_sizes, weights, bias, index)
        given += () if one is None else one[:2]
        program = self.program
        if program is not None:
            return program.run(self.M, stream_of(self._device), given)  # type: ignore[return-value]
        call = Call(self.form, w, m_sizes, Fusions(index, weights, bias), *self.sizes)
        found, self.program = self._recorded(call.M, given, lambda do: gradients.with_adapter(call, x, one, do=do))
        return found  # type: ignore[return-value]

    def adapted(
        self, x: torch.Tensor | None, w: _W | None, m_sizes: torch.Tensor, dy: torch.Tensor, needs: autograd.Needs,
        one: LowRank, u: torch.Tensor | None, shape: torch.Size, index: torch.Tensor | None,
    ) -> _Results | None:  # fmt: skip
        """As ``autograd.with_adapter``, of a call with a frozen w that is plain, or whose rows of x are gathered.

        None where that has to compute them.
        """
        learns = (*needs, u is not None)
        operands: Any = (w,) if self._dense else operands_of(w).values()  # type: ignore[arg-type]
        index = index if self.form.permute_x else None
        given = (dy, x, u, one.A, one.B, *operands, index, m_sizes)
        known = self._gradients.get(learns)
        if known is not None:
            return self._again(known, self.M, given)
        form = self.form
        if form.permute_y or not (form.plain or form.permute_x) or any(needs[1:]):
            return None
        if type(dy) is not torch.Tensor or dy.dtype not in _KINDS or not dy.is_contiguous():
            return None
        w = m_sizes.new_empty((), dtype=dy.dtype).expand(shape) if w is None else w  # only its shape is read
        call = Call(form, w, m_sizes, Fusions(index, None, None), *self.sizes)
        return self._first(
            learns, self.M, given, len(given) - 1,
            lambda do: autograd.with_adapter(call, dy, x, needs, one, u, do),
        )  # fmt: skip

    def backward(
        self, x: torch.Tensor | None, w: torch.Tensor | None, m_sizes: torch.Tensor, dy: torch.Tensor,
        needs: tuple[bool, bool, bool, bool], shape: torch.Size | None,
    ) -> _Results | None:  # fmt: skip
        """dx, dw and None twice, of a plain call; None where ``autograd.backward`` has to compute them."""
        known = self._gradients.get(needs)
        if known is not None:
            return self._again(known, self.M, (dy, x, w, m_sizes))
        if not self.form.plain or needs[2] or needs[3] or not self._dense or (needs[0] and w is None):
            return None
        if type(dy) is not torch.Tensor or dy.dtype not in _KINDS or not dy.is_contiguous():
            return None

        def compute(do: Recorder) -> _Results:
            dense = m_sizes.new_empty((), dtype=dy.dtype).expand(shape) if w is None else w  # type: ignore[arg-type]
            call = Call(self.form, dense, m_sizes, Fusions(None, None, None), *self.sizes)
            return autograd.backward(call, dy, x, needs, do)

        return self._first(needs, self.M, (dy, x, w, m_sizes), 3, compute)


class LayerPlan(_Plan):
    """One layer's."""

    __slots__ = ("E", "_behind", "_dense", "_low", "_same", "_sizes", "_there", "how", "programs")

    def __init__(
        self, how: Layer, hidden: torch.Tensor, given: Weights | FrozenWeights, there: Sequence[int], behind: int,
        same: guard.Guard, grad: bool,
    ) -> None:  # fmt: skip
        super().__init__(hidden, grad=grad, varies=True)
        self.how, self._same, self._low = how, same, hidden.data_ptr() & _LOW
        self.E, self._sizes, self._dense = given.gate_up.shape[0], (how.top_k, hidden.shape[-1]), type(given) is Weights
        self._there, self._behind = itemgetter(*there), behind  # where biases and adapters begin
        self.programs: dict[bool, Program] = {}  # by whether h is kept

    def takes(
        self, hidden: torch.Tensor, given: Weights | FrozenWeights, ids: torch.Tensor, weights: torch.Tensor,
        out: torch.Tensor | None = None, adapters: Adapters = NO_ADAPTERS,
    ) -> bool:  # fmt: skip
        """Whether a call on these tensors, of as many rows by bucket, is like the first."""
        every: Any = (hidden, ids, weights, *(given if self._dense else _operands(given)))
        some = self._there(every if adapters is NO_ADAPTERS else every + _low(adapters))
        biases = some[self._behind :]
        if out is None:
            if not self._same(*some):
                return False
        elif (
            out.shape != hidden.shape
            or not self._same(*some, out)
            or not _takes_results(out, (hidden, weights, *biases))
        ):
            return False
        M, (k, H) = ids.numel(), self._sizes
        return (
            0 < M == weights.numel()
            and hidden.numel() * k == M * H
            and hidden.is_contiguous()
            and weights.is_contiguous()
            and hidden.data_ptr() & _LOW == self._low
            and not (biases and any(one.data_ptr() & _LOW for one in biases))
            and (self._alone or device_is_current(self._device))
        )

    def forward(
        self, how: Layer, x: torch.Tensor, given: Weights | FrozenWeights, routing: Routing, weights: torch.Tensor, *,
        keeps_h: bool, into: torch.Tensor | None = None, adapters: Adapters = NO_ADAPTERS,
    ) -> layer.Forward:  # fmt: skip
        """As ``layer.forward``, without a look at the tensors: ``takes``, or every check, had one."""
        M = routing.gather_indices.numel()
        every: Any = (x, *(given if self._dense else _operands(given)), weights, *routing, into)
        if adapters is not NO_ADAPTERS:
            every += _low(adapters)
        program = self.programs.get(keeps_h)
        if program is not None:
            return program.run(M, stream_of(self._device), every)  # type: ignore[return-value]
        found, program = self._recorded(
            M, every,
            lambda do: layer.forward(
                how, x, given, routing, weights, keeps_h=keeps_h, do=do, into=into, adapters=adapters
            ),
        )  # fmt: skip
        if program is not None:
            self.programs[keeps_h] = program
        return found  # type: ignore[return-value]

    def gradients(
        self, how: Layer, dout: torch.Tensor, x: torch.Tensor | None, given: Weights | FrozenWeights,
        weights: torch.Tensor, h: torch.Tensor, routing: Routing, needs: tuple[bool, ...],
        adapters: Adapters = NO_ADAPTERS, narrow: Narrow = NOTHING_NARROW,
    ) -> _Results | None:  # fmt: skip
        """As ``layer.all_gradients``; None where that has to compute them."""
        T, M = dout.shape[0], routing.gather_indices.shape[0]
        if T * how.top_k != M or h.shape[0] != M or weights.shape[0] != T or (x is not None and x.shape[0] != T):
            return None
        dout = in_memory("dout", dout, "moe_mlp")
        every: Any = (dout, h, x, weights, *narrow, *(given if self._dense else _operands(given)))
        every += routing if adapters is NO_ADAPTERS else (*_low(adapters), *routing)
        known = self._gradients.get(needs)
        if known is not None:
            return self._again(known, M, every, loose=6)
        return self._first(
            needs, M, every, len(every) - len(routing),
            lambda do: layer.all_gradients(how, dout, x, given, weights, h, routing, needs, adapters, narrow, do),
            loose=6,
        )  # fmt: skip


def plan(
    call: Call, x: torch.Tensor, weights: torch.Tensor | None, bias: torch.Tensor | None, index: torch.Tensor | None,
    one: LowRank | None = None,
) -> ExecutionPlan | None:  # fmt: skip
    """An empty plan for this call, or None where the next one like it needs another look.

    ``weights``, ``bias`` and ``index`` are as the caller passed them; an adapter is as the products take it.
    """
    form, fusions, w = call.form, call.fusions, call.w
    if not check_tensors.on_gpu(x) or x.dtype not in _KINDS or form.autotune or form.pinned:
        return None
    if fusions.weights is not weights or fusions.bias is not bias or fusions.index is not index:
        return None
    if any(t is not None and not t.is_contiguous() for t in (weights, bias)) or not (call.M and call.N and call.K):
        return None
    if isinstance(w, ExpertWeights) and not w.order:
        return None
    low = () if one is None else one[:2]
    if any(matrix.data_ptr() & _LOW for matrix in low):
        return None
    given = (x, *operands_of(w).values(), call.m_sizes, weights, bias, index, *low)
    same = guard.guard(*[each for each in given if each is not None])
    return None if same is None else ExecutionPlan(call, given, same)


def plan_layer(
    how: Layer, hidden: torch.Tensor, given: Weights | FrozenWeights, ids: torch.Tensor, weights: torch.Tensor,
    out: torch.Tensor | None = None, adapters: Adapters = NO_ADAPTERS,
) -> LayerPlan | None:  # fmt: skip
    """The same for a layer, on the tensors that the caller passed; adapters are as the products take them."""
    T, H, M = ids.shape[0], hidden.shape[-1], ids.numel()
    wide = columns(given.gate_up, how.layout)
    if not check_tensors.on_gpu(hidden) or hidden.dtype not in _KINDS or not (M and H and wide > 1):
        return None
    if M >= _MOST_ROWS or hidden.numel() != T * H or not (hidden.is_contiguous() and weights.is_contiguous()):
        return None
    if any(one is not None and (one.dtype is not hidden.dtype or not one.is_contiguous()) for one in given[2:]):
        return None
    for one in given[:2]:
        if not (one.order if isinstance(one, ExpertWeights) else one.dtype is hidden.dtype):
            return None
    operands = _operands(given)
    every = (hidden, ids, weights, *operands, *(() if adapters is NO_ADAPTERS else _low(adapters)))
    there = [i for i, one in enumerate(every) if one is not None]
    tensors, behind = [one for one in every if one is not None], 3 + sum(one is not None for one in operands[:-2])
    if any(one.data_ptr() & _LOW for one in tensors[behind:]):
        return None
    grad, loose = any(one.requires_grad for one in tensors), [0, 1, 2]  # a row a token
    if out is not None:
        if not _takes_results(out, (hidden, weights, *tensors[behind:])):
            return None
        loose.append(len(tensors))
        tensors.append(out)
    same = guard.guard(*tensors, loose=loose)
    return None if same is None else LayerPlan(how, hidden, given, there, behind, same, grad)


def key_of(w: torch.Tensor | ExpertWeights) -> tuple[object, ...]:
    """By what a plan is found for these weights: where they begin; of quantised ones what and how ordered they are."""
    return (w.codes.data_ptr(), w.order, w.format) if isinstance(w, ExpertWeights) else (w.data_ptr(),)


def remember(table: dict[object, Any], key: object, made: _Plan) -> None:
    """Put a plan in; a full table begins anew."""
    if key not in table and len(table) >= _MOST_PLANS:
        table.clear()
    table[key] = made


def _takes_results(out: torch.Tensor, read: Sequence[torch.Tensor]) -> bool:
    """Whether a program may write a layer's result there: as new memory lies, apart from these contiguous tensors."""
    at = out.data_ptr()
    end = at + out.nbytes
    apart = all(end <= one.data_ptr() or one.data_ptr() + one.nbytes <= at for one in read)
    return apart and not at & _LOW and out.is_contiguous()


def _low(adapters: Adapters) -> tuple[torch.Tensor | None, ...]:
    """A and B of the first product, then of the second."""
    return tuple(each for one in adapters for each in (one or (None, None))[:2])


def _operands(given: Weights | FrozenWeights) -> tuple[torch.Tensor | None, ...]:
    """What kernels read of both matrices, none where there is none, and the biases; of dense ones that is ``given``."""
    return (*(one for w in given[:2] for one in ((None,) if w is None else operands_of(w).values())), *given[2:])
