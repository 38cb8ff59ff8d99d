"""The two products under every call and gradient, without autograd: rows by expert, and dW.

On CUDA a bundle's kernel runs them, the fused parts by run-time flags; where no bundle can, torch does.
Elsewhere it is the reference.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from ...artifacts.records.problem import Layout
from ...kernels import reference
from ..check import tensors
from ..check.operands import Rows
from ..check.tensors import address_of, row_stride, rows_usable
from ..driver.device import current_stream, local_gpu, on
from ..launch import gather, rowops
from ..launch.gather import GatherFirst, Launch
from ..launch.products import gated_launch, row_launch, rows_aligned, weight_launch
from ..weights.dequantised import Dequantised
from ..weights.expert_weights import ExpertWeights
from . import quantised, torch_fallback, zero_rows

if TYPE_CHECKING:
    from ..dispatch.pin import Pin

stream_of = current_stream


def rows(call: Rows, y: torch.Tensor) -> torch.Tensor:
    """Write y, and return it. Rows of y that nothing is stored to are left as they are, or zero with zero_tail.

    Where the reduction is empty the others have their bias alone; without a bias all of y is zero.
    """
    if call.stores_nothing(y):
        return y.zero_() if call.zero_tail else y
    end = call.index_end(y.shape[0])
    if not call.x.shape[1]:
        return _sums_of_nothing(call, y, end)
    if not tensors.on_gpu(call.x):
        torch_fallback.tell_reference(call.x.device.type)
        if call.zero_tail:
            y.zero_()
        x, w, layout = _by_torch(call)
        reference.rows(
            x, w, call.m_sizes, y, M=call.M, layout=layout, index=call.index, index_end=end,
            gather_divisor=call.gather_divisor, scatter=call.scatter, row_weights=call.row_weights, bias=call.bias,
        )  # fmt: skip
        return y
    if not rows_usable(call.x):
        call = dataclasses.replace(call, x=call.x.contiguous())
    with on(call.x.get_device()):
        _on_cuda(call, y, end)
    return y


def _sums_of_nothing(call: Rows, y: torch.Tensor, end: int) -> torch.Tensor:
    """y where the reduction is empty: a bias is all that is added."""
    if call.zero_tail or call.bias is None:
        y.zero_()
    if call.bias is not None:
        torch_fallback.store(
            y.new_zeros((call.M, y.shape[1])), y, call.m_sizes, index=call.index, index_end=end, scatter=call.scatter,
            row_weights=call.row_weights, bias=call.bias, gathered=bool(call.gather_divisor),
        )  # fmt: skip
    return y


def _on_cuda(call: Rows, y: torch.Tensor, end: int) -> None:
    """By one kernel, or with what no kernel here does taken out of it and done by torch."""
    if _launch_rows(call, y, end):
        return
    if call.zero_tail:
        zero_rest(call, y, end)
        call = dataclasses.replace(call, zero_tail=False)
    spares_rows = call.spares_rows
    if call.gather_divisor and call.index is not None:
        gathered = call.x.index_select(0, reference.rows_of(call.index, end, call.gather_divisor))
        call = dataclasses.replace(call, x=gathered, gather_divisor=0, pin=None)
        if not spares_rows and _launch_rows(call, y, end):
            return
    plain, sm = not call.fusion and not spares_rows, local_gpu(call.x.get_device()).sm
    if isinstance(call.w, ExpertWeights):
        quantised.no_kernel(call.w.format)
        x, w, layout = _by_torch(call)
        product = y if plain and x.dtype is y.dtype else x.new_empty((call.M, y.shape[1]))
        torch_fallback.on_cuda(x, w, call.m_sizes, product, layout, sm=sm, aligned=False)
        if product is y:
            return
    elif plain:
        aligned = rows_aligned(call, y)
        torch_fallback.on_cuda(call.x, call.w, call.m_sizes, y, call.as_forward(), sm=sm, aligned=aligned)
        return
    else:
        product = call.x.new_empty((call.M, y.shape[1]))
        _on_cuda(Rows(call.op, call.x, call.w, call.m_sizes, call.layout, call.M), product, 0)
    torch_fallback.store(
        product, y, call.m_sizes, index=call.index, index_end=end, scatter=call.scatter, row_weights=call.row_weights,
        bias=call.bias, gathered=spares_rows,
    )  # fmt: skip


def _by_torch(call: Rows) -> tuple[torch.Tensor, torch.Tensor | Dequantised, Layout]:
    """x, w and w's layout of the product as a forward, for torch."""
    if isinstance(call.w, ExpertWeights):
        return *quantised.operands(call, call.w), Layout.NK
    return call.x, call.w, call.as_forward()


def weight(
    dy: torch.Tensor, x: torch.Tensor, m_sizes: torch.Tensor, *, layout: Layout = Layout.NK, pin: Pin | None = None,
    strict: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """dw[g] = dy[rows of g].T @ x[rows of g], [E, N, K] or [E, K, N] in x's dtype; zeros for an expert without rows.

    dy [M, N] and x [M, K] in the sorted order. ``strict`` overrides PRETUNED_STRICT.
    """
    if layout is Layout.KN:  # dw[g].T: the operands change places
        return weight(x, dy, m_sizes, pin=pin, strict=strict)
    (M, N), K, E = dy.shape, x.shape[1], m_sizes.shape[0]
    if not (M and E and N and K):
        return x.new_zeros((E, N, K))
    if not tensors.on_gpu(x):
        torch_fallback.tell_reference(x.device.type)
        return reference.grad_weight(dy, x, m_sizes)
    dy, x = (tensor if rows_usable(tensor) else tensor.contiguous() for tensor in (dy, x))
    with on(x.get_device()):
        dw = x.new_empty((E, N, K))
        launch = weight_launch(dy, x, dw, m_sizes, pin, strict)
        if launch is not None:
            launch(
                dw.data_ptr(), m_sizes.data_ptr(), stream_of(x.get_device()), dy=dy.data_ptr(), x=x.data_ptr(),
                stride_dy_m=row_stride(dy, N), stride_x_m=row_stride(x, K), M=M,
            )  # fmt: skip
            return dw
        return torch_fallback.weight(dy, x, m_sizes, sm=local_gpu(x.get_device()).sm)


def _launch_rows(call: Rows, y: torch.Tensor, index_end: int) -> bool:
    """Launch a bundle's kernel; False where there is none."""
    launch = row_launch(call, y)
    if launch is None:
        return False
    if call.zero_tail and not launch.zeroes:
        zero_rest(call, y, index_end)
    _launch(launch, call, y, index_end)
    return True


def _launch(launch: Launch, call: Rows, y: torch.Tensor, index_end: int) -> None:
    x, checked = call.x, None
    words: dict[str, int] = {}
    if call.fusion:
        words = {"index": address_of(call.index) if call.uses_index else 0, "index_end": index_end,
                 "row_weights": address_of(call.row_weights), "bias": address_of(call.bias)}  # fmt: skip
    if isinstance(launch, GatherFirst):
        checked = index_in_range(call)
        words |= {"index_in_range": address_of(checked), "used": rowops.used(call.bounds)[0],
                  "slots": x.shape[0] * call.gather_divisor}  # fmt: skip
    launch(
        y.data_ptr(), call.m_sizes.data_ptr(), stream_of(x.get_device()), x=x.data_ptr(), **_w_words(call.w),
        stride_x_m=row_stride(x, x.shape[1]), stride_y_m=row_stride(y, y.shape[1]), M=call.M, **words,
    )  # fmt: skip


def _w_words(w: torch.Tensor | ExpertWeights) -> dict[str, int]:
    if isinstance(w, ExpertWeights):
        return {"w": w.codes.data_ptr(), "w_scale": address_of(w.kernel_scale), "w_outer": address_of(w.outer_scale)}
    return {"w": w.data_ptr()}


def zero_rest(call: Rows, y: torch.Tensor, index_end: int) -> None:
    """Set the rows of y that the product does not store to zero, and others maybe: before it."""
    if call.scatter and call.index is not None:
        zero_rows.clear(y, call.index, call.m_sizes, call.M, index_end)
    else:
        y.zero_()


def index_in_range(call: Rows) -> torch.Tensor | None:
    """The index that a ``GatherFirst`` reads, to be kept until it is launched; None where the call's own will do."""
    if call.index is None or call.bounds is not None:
        return None
    return gather.in_range(call.index, call.x.shape[0], call.gather_divisor)


def gated_rows(call: Rows) -> torch.Tensor | None:
    """silu(gate) * up of this product, [M, N/2], by one kernel; None where ``gated_launch`` has none.

    Rows of no expert hold anything, and so do those of an index out of range.
    """
    if not (call.M and call.x.numel() and call.w.shape[0]) or not tensors.on_gpu(call.x):
        return None
    if not rows_usable(call.x):
        call = dataclasses.replace(call, x=call.x.contiguous())
    x = call.x
    with on(x.get_device()):
        I = call.sizes[1] // 2  # noqa: E741
        # (A row is enough to ask: a launcher asks how its operands are aligned, and nothing else of them.)
        launch = gated_launch(call, x.new_empty((1, I)).expand(call.M, I)) if I else None
        if launch is None:
            return None
        a = x.new_empty((call.M, I))
        _launch(launch, call, a, call.index_end(0))
    return a
