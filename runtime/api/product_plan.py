"""Plans of repeated products: a program recorded in one call runs later calls like it, without checks.

A plan belongs to one w, one form and a bucket of rows, for which its kernels were chosen, whatever the number of rows.
If a call's sorted rows are not exactly its tokens' slots, or its rows are not contiguous, its plan is for its sizes
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from ...artifacts.records import Layout
from ..check import tensors as check_tensors
from ..check.call import Call, Fusions
from ..check.tensors import address_of
from ..driver.device import current_stream, device_is_current, empty, tf32_allowed
from ..launch.program import (
    LOW,
    MOST_ROWS,
    Given,
    Guard,
    Program,
    Programs,
    Recorder,
    Results,
    SingleLaunch,
    guard,
    replays,
)
from ..launch.steps import operands_of
from ..ops import low_rank
from ..ops.low_rank import LowRank, as_used

if TYPE_CHECKING:
    from ..ops import autograd
    from ..weights.expert_weights import ExpertWeights

_W: TypeAlias = "torch.Tensor | ExpertWeights"
_Plan = TypeVar("_Plan", bound="ProductPlan")
_Sizes: TypeAlias = "tuple[int, int, int]"  # M, the rows of x, the rows of y

_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_written = torch.autograd.graph.increment_version  # call it for each tensor that a launch has written
_grad_enabled = torch.is_grad_enabled
_casts = torch.is_autocast_enabled
_FLOAT32 = torch.float32
stream_of = current_stream


class ProductPlan(Programs):
    """The plan of one product. ``call`` runs a call, or returns None if the plan does not serve it."""

    __slots__ = (
        "_counts",
        "_dense",
        "_flat",
        "_low",
        "_lows",
        "_out_low",
        "_own_sizes",
        "_same",
        "_shape",
        "_tf32",
        "_there",
        "autograd",
        "form",
        "program",
    )

    def __init__(self, call: Call, inputs: Given, same: Guard, out: torch.Tensor | None, *, varies: bool) -> None:
        x: torch.Tensor = inputs[0]  # type: ignore[assignment]
        super().__init__(x, grad=any(t is not None and t.requires_grad for t in inputs), varies=varies)
        self._same, self._low, self.form = same, x.data_ptr() & LOW, call.form
        self._dense, self._shape = isinstance(call.w, torch.Tensor), call.w.shape
        self._flat = self._dense and inputs[1].dim() != 3  # type: ignore[union-attr]
        self._there = itemgetter(*[i for i, tensor in enumerate(inputs) if tensor is not None])
        self._own_sizes: _Sizes | None = None if varies else (call.M, call.x_rows, call.y_rows)
        self._counts, self._lows = call.m_sizes.dtype, _lows(call.w)
        self._out_low = 0 if out is None else out.data_ptr() & LOW
        self._tf32 = tf32_allowed(_FLOAT32) if x.dtype is _FLOAT32 else None
        self.program: Program | None = None
        if self.grad:
            from ..ops import autograd  # imported here: a call without a gradient needs none

            self.autograd = autograd

    def call(
        self,
        M: int,
        x: torch.Tensor,
        w: _W,
        m_sizes: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        index: torch.Tensor | None,
        out: torch.Tensor | None,
        lora: Any,
    ) -> torch.Tensor | None:
        """Return y of a call with M sorted rows and this plan's form."""
        inputs: Any = (x, w, m_sizes, weights, bias, index, out)
        if not self._dense:
            inputs = (x, *operands_of(w).values(), m_sizes, weights, bias, index, out)
        adapter = None
        if lora is not None:
            try:
                adapter = as_used(lora, x.dtype, m_sizes.shape[0])
            except check_tensors.UNUSABLE:
                return None
            inputs += adapter[:2]
            if (adapter.A.data_ptr() | adapter.B.data_ptr()) & LOW:
                return None
        if not self._same(*self._there(inputs)) or x.data_ptr() & LOW != self._low:
            return None
        sizes = self._own_sizes
        if sizes is not None:
            M = sizes[0]
        elif not (
            x.is_contiguous()
            and (index is None or index.shape[0] == M)
            and (weights is None or (weights.numel() == M and weights.is_contiguous()))
            and (out is None or (out.shape[0] == M and out.is_contiguous()))
            and not (self.form.permute_y and M % self.form.topk)
        ):
            return None
        if not (self._alone or device_is_current(self._device)) or not (self._tf32 is None or _as_single(self._tf32)):
            return None
        if self._flat:
            w = w.view(self._shape)
            inputs = (x, w, *inputs[2:])
        elif not self._dense and _lows(w) != self._lows:
            return None
        grad = self.grad and _grad_enabled()
        if out is not None:
            if grad or out.data_ptr() & LOW != self._out_low:
                return None
            read = {"x": x, "m_sizes": m_sizes, "topk_weights": weights, "bias": bias, "gather_indices": index}
            tensors = {"w": w} if self._dense else w.tensors()  # type: ignore[union-attr]
            low = {} if adapter is None else {"lora.A": adapter.A, "lora.B": adapter.B}
            check_tensors.check_apart(out, **read, **tensors, **low)
        if grad:
            if _transformed():
                return None
            sizes = sizes or (M, x.shape[0], M)
            if adapter is not None:
                how = self.autograd.Adapted(self.form, sizes, adapter.scale, self)
                return self.autograd.apply_adapted(x, w, m_sizes, weights, bias, adapter.A, adapter.B, index, how)
            return self.learn(x, w, m_sizes, weights, bias, index, sizes)
        program = self.program
        if program is None:
            return self.forward(x, w, m_sizes, weights, bias, index, sizes or (M, x.shape[0], M), adapter, out)[0]
        y = program.run(M, stream_of(self._device), inputs)[0]
        if out is not None:
            _written(out)
        return y

    def learn(
        self,
        x: torch.Tensor,
        w: _W,
        m_sizes: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        index: torch.Tensor | None,
        sizes: _Sizes,
    ) -> torch.Tensor:
        """Run a call that needs a gradient, with autograd, and return y."""
        y: torch.Tensor = self.autograd.apply(x, w, m_sizes, weights, bias, index, self.form, sizes, self)
        return y

    def forward(
        self,
        x: torch.Tensor,
        w: _W,
        m_sizes: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        index: torch.Tensor | None,
        sizes: _Sizes,
        adapter: LowRank | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run ``low_rank.with_adapter`` without checks: ``call``, or a first call's checks, accepted the tensors."""
        inputs: Any = (x, w, m_sizes, weights, bias, index, out)
        if not self._dense:
            inputs = (x, *operands_of(w).values(), m_sizes, weights, bias, index, out)
        inputs += () if adapter is None else adapter[:2]
        program = self.program
        if program is not None:
            return program.run(sizes[0], stream_of(self._device), inputs)  # type: ignore[return-value]
        call = Call(self.form, w, m_sizes, Fusions(index, weights, bias), *sizes)
        results, self.program = self._recorded(
            call.M, inputs, lambda executor: low_rank.with_adapter(call, x, adapter, out, executor)
        )
        return results  # type: ignore[return-value]

    def adapted(
        self,
        x: torch.Tensor | None,
        w: _W | None,
        m_sizes: torch.Tensor,
        dy: torch.Tensor,
        needs: autograd.Needs,
        adapter: LowRank,
        u: torch.Tensor | None,
        shape: torch.Size,
        index: torch.Tensor | None,
        sizes: _Sizes,
    ) -> Results | None:
        """Return gradients of ``autograd.with_adapter`` by a program, for a frozen w and no fusion but the gather of x.

        Return None if ``with_adapter`` must compute them itself.
        """
        form, M = self.form, sizes[0]
        learns = (*needs, u is not None)
        operands: Any = (w,) if self._dense else operands_of(w).values()  # type: ignore[arg-type]
        index = index if form.permute_x else None
        inputs = (dy, x, u, index, adapter.A, adapter.B, *operands, m_sizes)
        if m_sizes.dtype is not self._counts or not has_rows(M, dy, u, index):
            return None
        if x is not None and x.shape[0] != sizes[1]:
            return None
        gradient, loose = self._gradients.get(learns), 0 if self._own_sizes else 4
        if gradient is not None:
            return self._again(gradient, M, inputs, loose)
        if form.permute_y or not (form.plain or form.permute_x) or any(needs[1:]):
            return None
        if type(dy) is not torch.Tensor or not replays(dy.dtype) or not dy.is_contiguous():
            return None
        w = m_sizes.new_empty((), dtype=dy.dtype).expand(shape) if w is None else w  # only its shape is read
        call = Call(form, w, m_sizes, Fusions(index, None, None), *sizes)
        return self._first(
            learns,
            M,
            inputs,
            len(inputs) - 1,
            lambda executor: self.autograd.with_adapter(call, dy, x, needs, adapter, u, executor),
            loose,
        )

    def backward(
        self,
        x: torch.Tensor | None,
        w: torch.Tensor | None,
        m_sizes: torch.Tensor,
        dy: torch.Tensor,
        needs: tuple[bool, bool, bool, bool],
        shape: torch.Size | None,
        sizes: _Sizes,
    ) -> Results | None:
        """Return (dx, dw, None, None) of a plain call; None if ``autograd.backward`` must compute them."""
        M = sizes[0]
        if m_sizes.dtype is not self._counts or not has_rows(M, dy, x):
            return None
        gradient, loose = self._gradients.get(needs), 0 if self._own_sizes else 2
        if gradient is not None:
            return self._again(gradient, M, (dy, x, w, m_sizes), loose)
        if not self.form.plain or not any(needs) or needs[2] or needs[3]:
            return None
        if not self._dense or (needs[0] and w is None):
            return None
        if type(dy) is not torch.Tensor or not replays(dy.dtype) or not dy.is_contiguous():
            return None

        def compute(executor: Recorder) -> Results:
            dense = m_sizes.new_empty((), dtype=dy.dtype).expand(shape) if w is None else w  # type: ignore[arg-type]
            call = Call(self.form, dense, m_sizes, Fusions(None, None, None), *sizes)
            results: Results = self.autograd.backward(call, dy, x, needs, executor)
            return results

        return self._first(needs, M, (dy, x, w, m_sizes), 3, compute, loose)


_INTO, _NEW = (7, 3, 1, 2), (8, 3, 1, 2)  # indices of y, m_sizes, x and w in the arguments; y is out, or new memory


class PlainPlan(ProductPlan):
    """A plan for x, dense w, m_sizes and perhaps out, without fusions or gradient, for any number of rows."""

    __slots__ = ("call",)

    def __init__(self, call: Call, inputs: Given, same: Guard, out: torch.Tensor | None) -> None:
        super().__init__(call, inputs, same, out, varies=True)
        self.call = super().call  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor, w: _W, m_sizes: torch.Tensor, *others: Any, **more: Any) -> Any:
        results = super().forward(x, w, m_sizes, *others, **more)
        single = None if self.program is None else self.program.single
        whole = single is not None and (single.new is None or single.new.per == 1)
        if single is not None and whole and single.reads in (_INTO, _NEW):
            self.call = (self._into if single.new is None else self._new)(single, w, m_sizes)  # type: ignore[arg-type,method-assign]
        return results

    def _new(self, single: SingleLaunch, w: torch.Tensor, m_sizes: torch.Tensor) -> Callable[..., torch.Tensor | None]:
        """A fast ``call`` for plans of one launch into a new y. The key compares w's address, the guard x's stride."""
        same, low, device, holds = self._same, self._low, self._device, self._condition()
        launch, allocate, w_at = single.run, empty, w.data_ptr()
        new: Any = single.new
        columns, dtype = new.size[1], new.dtype

        def again(
            M: int, x: Any, w: Any, m_sizes: Any, _weights: Any, _bias: Any, _index: Any, _out: Any, _lora: Any
        ) -> torch.Tensor | None:
            x_at = x.data_ptr()
            if not same(x, w, m_sizes) or x_at & LOW != low or (holds is not None and not holds()):
                return None
            y = allocate((M, columns), (columns, 1), dtype)
            launch(M, stream_of(device), y.data_ptr(), m_sizes.data_ptr(), x_at, w_at)
            return y

        return again

    def _into(self, single: SingleLaunch, w: torch.Tensor, m_sizes: torch.Tensor) -> Callable[..., torch.Tensor | None]:
        """A fast ``call`` for plans of one launch into ``out``, which overlaps nothing that is read."""
        same, low, out_low, device, holds = self._same, self._low, self._out_low, self._device, self._condition()
        launch, size, w_at = single.run, w.itemsize, w.data_ptr()
        N, K = w.shape[1:] if self.form.layout is Layout.NK else (w.shape[2], w.shape[1])
        x_row, out_row = size * K, size * N
        w_end, counts_bytes = w_at + check_tensors.extent(w), check_tensors.extent(m_sizes)

        def again(
            M: int, x: Any, w: Any, m_sizes: Any, _weights: Any, _bias: Any, _index: Any, out: torch.Tensor, _lora: Any
        ) -> torch.Tensor | None:
            if not same(x, w, m_sizes, out) or out.numel() != M * N:
                return None
            x_at, counts_at, y_at = x.data_ptr(), m_sizes.data_ptr(), out.data_ptr()
            end = y_at + M * out_row
            if (
                x_at & LOW != low
                or y_at & LOW != out_low
                or (y_at < x_at + M * x_row and x_at < end)
                or (y_at < w_end and w_at < end)
                or (y_at < counts_at + counts_bytes and counts_at < end)
                or (holds is not None and not holds())
            ):  # the checks will name the tensor that out overlaps
                return None
            launch(M, stream_of(device), y_at, counts_at, x_at, w_at)
            _written(out)
            return out

        return again

    def _condition(self) -> Callable[[], bool] | None:
        """Return a check of the plan's conditions other than the tensors; None if no such condition can change."""
        alone, tf32, device = self._alone, self._tf32, self._device
        if alone and tf32 is None:
            return None
        return lambda: (alone or device_is_current(device)) and (tf32 is None or _as_single(tf32))


def _as_single(tf32: bool) -> bool:
    """True if torch still allows tf32 as when the plan was made (``tf32``), and autocast does not cast float32."""
    return tf32_allowed(_FLOAT32) is tf32 and not _casts("cuda")


def _lows(w: _W) -> list[int]:
    """The low bits of quantised weights' addresses, by which kernels were chosen. A tensor's address is in the key."""
    return [] if isinstance(w, torch.Tensor) else [address_of(tensor) & LOW for tensor in operands_of(w).values()]


def has_rows(M: int, *tensors: torch.Tensor | None) -> bool:
    """True if all tensors have M rows. (The guard of a plan for any M does not compare rows.)"""
    return all(tensor is None or tensor.shape[0] == M for tensor in tensors)


def takes_any_rows(
    M: int,
    slots: int,
    x: torch.Tensor,
    index: torch.Tensor | None,
    weights: torch.Tensor | None,
    out: torch.Tensor | None,
) -> bool:
    """True if the plan of a call of M sorted rows is for all M of its bucket, False if it is for these sizes alone.

    M must be a multiple of ``slots``, which is topk with permute_y, else 1.
    """
    return (
        M > 0
        and x.is_contiguous()
        and not M % slots
        and (index is None or index.shape[0] == M)
        and (weights is None or (weights.numel() == M and weights.is_contiguous()))
        and (out is None or (out.shape[0] == M and out.is_contiguous()))
    )


def sizes_of(*operands: torch.Tensor | None) -> tuple[object, ...]:
    """The sizes and strides of the operands: part of the key of a plan for exactly these sizes."""
    return tuple([None if operand is None else (operand.shape, operand.stride()) for operand in operands])


def plan(
    call: Call,
    x: torch.Tensor,
    w: _W,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    index: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    varies: bool,
    adapter: LowRank | None = None,
    kind: type[_Plan] = ProductPlan,  # type: ignore[assignment]
) -> _Plan | None:
    """An empty plan for this call, or None if calls like it must be checked each time.

    Tensors are as the caller passed them, an adapter as ``as_used`` returns it. With ``varies`` the plan is for all M
    of the key's bucket; then every tensor with a row for each sorted row must be contiguous.
    """
    form, fusions, M = call.form, call.fusions, call.M
    if not check_tensors.on_gpu(x) or form.autotune or form.pinned:
        return None
    if not (replays(x.dtype) or x.dtype is _FLOAT32):  # the caller's key says whether tf32 is allowed
        return None
    if fusions.weights is not weights or fusions.bias is not bias or fusions.index is not index:
        return None
    if any(t is not None and not t.is_contiguous() for t in (weights, bias)) or not M or 0 in call.w.shape[1:]:
        return None
    if not (isinstance(w, torch.Tensor) or w.is_prepared):
        return None
    if varies and (M >= MOST_ROWS or (call.x_rows * (form.topk if form.permute_x else 1), call.y_rows) != (M, M)):
        return None
    low = () if adapter is None else adapter[:2]
    if any(matrix.data_ptr() & LOW for matrix in low):
        return None
    operands = (w,) if isinstance(w, torch.Tensor) else operands_of(w).values()
    inputs = (x, *operands, call.m_sizes, weights, bias, index, out, *low)
    tensors = [each for each in inputs if each is not None]
    rows = {id(each) for each in (x, weights, index, out)} if varies else set()
    loose = [i for i, each in enumerate(tensors) if id(each) in rows]
    same = guard(*tensors, loose=loose)
    if same is None:
        return None
    learns = any(each.requires_grad for each in tensors)
    alone = (
        isinstance(w, torch.Tensor)
        and w.dim() == 3
        and weights is None
        and bias is None
        and index is None
        and adapter is None
    )
    if kind is ProductPlan and varies and alone and not learns:
        return PlainPlan(call, inputs, same, out)  # type: ignore[return-value]
    return kind(call, inputs, same, out, varies=varies)
