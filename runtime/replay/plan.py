"""Products that come again: the program that was written down of one, for others that are like it, without checks.

A plan belongs to one w, one form and one shape.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from ..check import tensors as check_tensors
from ..check.call import Call
from ..check.form import Fusions
from ..driver.device import current_stream, device_is_current
from ..launch.products import operands_of
from ..launch.program import Program, Recorder
from ..ops import autograd, gradients
from ..ops.autograd import Adapted, AdaptedGemm, GroupedGemm
from ..ops.low_rank import LowRank, as_used
from ..weights.expert_weights import ExpertWeights
from . import guard, programs
from .programs import LOW, Given, Programs, Results

_W: TypeAlias = "torch.Tensor | ExpertWeights"

# Function.apply does this and, for calls inside torch.func's transforms, more.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, GroupedGemm).apply
_apply_adapted: Callable[..., torch.Tensor] = super(torch.autograd.Function, AdaptedGemm).apply
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled
stream_of = current_stream


class ExecutionPlan(Programs):
    """One product's. Calling it does the call, or returns None and does nothing where it is another one."""

    __slots__ = ("M", "_dense", "_low", "_same", "_there", "form", "program", "sizes")

    def __init__(self, call: Call, given: Given, same: guard.Guard) -> None:
        x: torch.Tensor = given[0]  # type: ignore[assignment]
        super().__init__(x, grad=any(t is not None and t.requires_grad for t in given), varies=False)
        self._same, self._low, self._dense = same, x.data_ptr() & LOW, isinstance(call.w, torch.Tensor)
        there = [i for i, one in enumerate(given) if one is not None]
        self._there = itemgetter(*there)
        self.form, self.M, self.sizes = call.form, call.M, (call.M, call.x_rows, call.y_rows)
        self.program: Program | None = None

    def __call__(
        self,
        x: torch.Tensor,
        w: _W,
        m_sizes: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        index: torch.Tensor | None,
        lora: Any = None,
    ) -> torch.Tensor | None:
        given: Any = (x, w, m_sizes, weights, bias, index)
        if not self._dense:
            given = (x, *operands_of(w).values(), m_sizes, weights, bias, index)
        one = None
        if lora is not None:
            try:
                one = as_used(lora, x.dtype, m_sizes.shape[0])
            except check_tensors.UNUSABLE:
                return None
            given += one[:2]
            if (one.A.data_ptr() | one.B.data_ptr()) & LOW:
                return None
        if not self._same(*self._there(given)) or x.data_ptr() & LOW != self._low:
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
        self,
        x: torch.Tensor,
        w: _W,
        m_sizes: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        index: torch.Tensor | None,
        one: LowRank | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
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
        self,
        x: torch.Tensor | None,
        w: _W | None,
        m_sizes: torch.Tensor,
        dy: torch.Tensor,
        needs: autograd.Needs,
        one: LowRank,
        u: torch.Tensor | None,
        shape: torch.Size,
        index: torch.Tensor | None,
    ) -> Results | None:
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
        if type(dy) is not torch.Tensor or dy.dtype not in programs.KINDS or not dy.is_contiguous():
            return None
        w = m_sizes.new_empty((), dtype=dy.dtype).expand(shape) if w is None else w  # only its shape is read
        call = Call(form, w, m_sizes, Fusions(index, None, None), *self.sizes)
        return self._first(
            learns,
            self.M,
            given,
            len(given) - 1,
            lambda do: autograd.with_adapter(call, dy, x, needs, one, u, do),
        )

    def backward(
        self,
        x: torch.Tensor | None,
        w: torch.Tensor | None,
        m_sizes: torch.Tensor,
        dy: torch.Tensor,
        needs: tuple[bool, bool, bool, bool],
        shape: torch.Size | None,
    ) -> Results | None:
        """dx, dw and None twice, of a plain call; None where ``autograd.backward`` has to compute them."""
        known = self._gradients.get(needs)
        if known is not None:
            return self._again(known, self.M, (dy, x, w, m_sizes))
        if not self.form.plain or needs[2] or needs[3] or not self._dense or (needs[0] and w is None):
            return None
        if type(dy) is not torch.Tensor or dy.dtype not in programs.KINDS or not dy.is_contiguous():
            return None

        def compute(do: Recorder) -> Results:
            dense = m_sizes.new_empty((), dtype=dy.dtype).expand(shape) if w is None else w  # type: ignore[arg-type]
            call = Call(self.form, dense, m_sizes, Fusions(None, None, None), *self.sizes)
            return autograd.backward(call, dy, x, needs, do)

        return self._first(needs, self.M, (dy, x, w, m_sizes), 3, compute)


def plan(
    call: Call,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    index: torch.Tensor | None,
    one: LowRank | None = None,
) -> ExecutionPlan | None:
    """An empty plan for this call, or None where the next one like it needs another look.

    ``weights``, ``bias`` and ``index`` are as the caller passed them; an adapter is as the products take it.
    """
    form, fusions, w = call.form, call.fusions, call.w
    if not check_tensors.on_gpu(x) or x.dtype not in programs.KINDS or form.autotune or form.pinned:
        return None
    if fusions.weights is not weights or fusions.bias is not bias or fusions.index is not index:
        return None
    if any(t is not None and not t.is_contiguous() for t in (weights, bias)) or not (call.M and call.N and call.K):
        return None
    if isinstance(w, ExpertWeights) and not w.is_prepared:
        return None
    low = () if one is None else one[:2]
    if any(matrix.data_ptr() & LOW for matrix in low):
        return None
    given = (x, *operands_of(w).values(), call.m_sizes, weights, bias, index, *low)
    same = guard.guard(*[each for each in given if each is not None])
    return None if same is None else ExecutionPlan(call, given, same)
