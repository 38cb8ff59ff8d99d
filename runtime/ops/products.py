"""The two products under every call and gradient, without autograd: rows by expert, and dW.

On CUDA a bundle's kernel runs them, the fused parts by run-time flags; where no bundle can, torch does.
Elsewhere it is the reference.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ...artifacts.errors import ProblemNotInBundle
from ...artifacts.records import Layout
from ..check import tensors
from ..check.call import LowPart, Rows
from ..check.tensors import rows_usable
from ..driver.device import local_gpu, on
from ..launch.product_kernels import may_add_low_part
from ..launch.program import EAGER, EagerExecutor
from ..launch.steps import (
    Product,
    operands_of,
    resolve,
    resolve_activated,
    resolve_gated,
    resolve_in_place,
    resolve_low_rank,
    resolve_new,
    resolve_weight,
    resolve_wide,
)
from ..settings import BATCH_INVARIANT

if TYPE_CHECKING:
    from ..dispatch.pin import Pin
    from ..launch.program import Step
    from ..weights.dequantised import Dequantised
    from .activation import RowActivation


def rows(call: Rows, y: torch.Tensor, executor: EagerExecutor = EAGER) -> torch.Tensor:
    """Write y, and return it. Rows of y that nothing is stored to are left as they are, or zero with zero_tail.

    If the reduction is empty, stored rows have only their bias; without a bias all of y is zero.
    """
    end = call.index_end(y.shape[0])
    on_gpu = tensors.on_gpu(call.x)
    nothing = call.stores_nothing(y)
    if nothing or not call.x.shape[1] or not on_gpu:
        executor.unplanned()
    if nothing:
        return y.zero_() if call.zero_tail else y
    if not call.x.shape[1]:
        return _sums_of_nothing(call, y, end)
    if not on_gpu:
        _by_reference(call, y, end)
        return y
    if not rows_usable(call.x):
        call = call._replace(x=call.x.contiguous())
    with on(call.x.get_device()):
        _on_cuda(call, y, end, executor)
    return y


def _by_reference(call: Rows, y: torch.Tensor, end: int) -> None:
    """Run the product by the reference, on devices other than CUDA."""
    from ...kernels import reference
    from . import torch_fallback

    torch_fallback.tell_reference(call.x.device.type)
    if call.zero_tail:
        y.zero_()
    x, w, layout = _by_torch(call)
    reference.rows(
        x,
        w,
        call.m_sizes,
        y,
        M=call.M,
        layout=layout,
        index=call.index,
        index_end=end,
        gather_divisor=call.gather_divisor,
        scatter=call.scatter,
        row_weights=call.row_weights,
        bias=call.bias,
    )


def _sums_of_nothing(call: Rows, y: torch.Tensor, end: int) -> torch.Tensor:
    """Return y of an empty reduction (K = 0): zeros, or the bias."""
    if call.zero_tail or call.bias is None:
        y.zero_()
    if call.bias is not None:
        from . import torch_fallback

        torch_fallback.store(
            y.new_zeros((call.M, y.shape[1])),
            y,
            call.m_sizes,
            index=call.index,
            index_end=end,
            scatter=call.scatter,
            row_weights=call.row_weights,
            bias=call.bias,
            gathered=bool(call.gather_divisor),
        )
    return y


def new_rows(call: Rows, many: int, executor: EagerExecutor = EAGER) -> torch.Tensor:
    """``rows`` into new memory of ``many`` rows: by torch's grouped_mm, if a bundle's choice says that it is faster."""
    size, per = (many, call.columns), int(many == call.M)
    plain = not call.fusion.value and isinstance(call.w, torch.Tensor) and call.M and all(call.sizes)
    if plain and tensors.on_gpu(call.x) and rows_usable(call.x):
        with on(call.x.get_device()):
            product = resolve_new(call, size[1])
            if product is not None and product.by_torch is not None:
                from .torch_fallback import into_new  # here, as few choices are torch's

                by_torch = partial(
                    into_new, grouped=product.by_torch, layout=call.as_forward(), zero_tail=call.zero_tail
                )
                result: torch.Tensor = executor.call(by_torch, call.x, call.dense, call.m_sizes)
                return result
            if product is not None:
                y: torch.Tensor = executor.new(call.x, size, per=per)
                _run(product, call, y, executor)
                return y
    return rows(call, executor.new(call.x, size, call.dtype, per=per), executor)


def of_made_codes(step: Step, call: Rows, codes: torch.Tensor, executor: EagerExecutor = EAGER) -> torch.Tensor:
    """The product of ``resolve_made_codes`` in new memory [M, columns]; ``codes`` are those of its sorted rows."""
    with on(codes.get_device()):
        y: torch.Tensor = executor.new(codes, (call.M, call.columns), torch.bfloat16)
        executor.run(step, call.M, {"y": y, "m_sizes": call.m_sizes, "codes": codes, **operands_of(call.w)})
    return y


def wide_rows(call: Rows, executor: EagerExecutor = EAGER) -> torch.Tensor | None:
    """The product as columns of new memory whose rows are whole 16 bytes; None where ``resolve_wide`` has no kernel."""
    if not (call.M and all(call.sizes)) or not tensors.on_gpu(call.x) or not rows_usable(call.x):
        return None
    with on(call.x.get_device()):
        wide = resolve_wide(call)
        if wide is None:
            return None
        product, columns = wide
        y: torch.Tensor = executor.new(call.x, (call.M, columns))
        _run(product, call, y, executor)
        result: torch.Tensor = executor.call(partial(_columns, N=call.sizes[1]), y)
        return result


def _columns(y: torch.Tensor, N: int) -> torch.Tensor:
    return y[:, :N]


def _on_cuda(call: Rows, y: torch.Tensor, end: int, executor: EagerExecutor = EAGER) -> None:
    """Run the product by one kernel; if there is none, torch does the fusions that no kernel has, or all of it."""
    if _launch_rows(call, y, executor):
        return
    from ...kernels import reference
    from ..launch.product_kernels import rows_aligned
    from . import quantised, torch_fallback

    executor.unplanned()
    if call.zero_tail:
        _zero_rest(call, y, EAGER)
        call = call._replace(zero_tail=False)
    spares_rows = call.spares_rows
    if call.gather_divisor and call.index is not None:
        gathered = call.x.index_select(0, reference.rows_of(call.index, end, call.gather_divisor))
        call = call._replace(x=gathered, gather_divisor=0, pin=None)
        if not spares_rows and _launch_rows(call, y, EAGER):
            return
    plain, sm = not call.fusion and not spares_rows, local_gpu(call.x.get_device()).sm
    if plain or not isinstance(call.w, torch.Tensor) or call.row_weights is not None or call.bias is not None:
        _check_may_be_torchs(call)
    if not isinstance(call.w, torch.Tensor):
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
        plain_call = Rows(call.op, call.x, call.w, call.m_sizes, call.layout, call.M, expected=call.expected)
        _on_cuda(plain_call, product, 0)
    torch_fallback.store(
        product,
        y,
        call.m_sizes,
        index=call.index,
        index_end=end,
        scatter=call.scatter,
        row_weights=call.row_weights,
        bias=call.bias,
        gathered=spares_rows,
    )


def _check_may_be_torchs(call: Rows) -> None:
    """Raise ProblemNotInBundle in the batch-invariant mode: torch's sums and roundings may depend on the batch."""
    from ..dispatch.snapshot import snapshot

    if snapshot().invariance is None:
        return
    what = str(call.x.dtype).removeprefix("torch.") if isinstance(call.w, torch.Tensor) else call.w.format
    raise ProblemNotInBundle(
        f"batch-invariant mode: no kernel in a bundle runs {call.op.value} of {what} weights {list(call.sizes)} "
        f"[E, N, K] on these {call.M} rows, and torch's products may depend on the batch. Pass dense rows that are "
        "aligned to 16 bytes and prepared weights, build a bundle with aot build, or leave the mode "
        f"({BATCH_INVARIANT}=0, batch_invariant(False))"
    )


def _by_torch(call: Rows) -> tuple[torch.Tensor, torch.Tensor | Dequantised, Layout]:
    """x, w and w's layout of the product as a forward, for torch."""
    if not isinstance(call.w, torch.Tensor):
        from . import quantised

        return *quantised.operands(call, call.w), Layout.NK
    return call.x, call.w, call.as_forward()


def weight(
    dy: torch.Tensor,
    x: torch.Tensor,
    m_sizes: torch.Tensor,
    *,
    layout: Layout = Layout.NK,
    pin: Pin | None = None,
    strict: bool | None = None,
    bucket: int | None = None,
    executor: EagerExecutor = EAGER,
) -> torch.Tensor:
    """dw[g] = dy[rows of g].T @ x[rows of g], [E, N, K] or [E, K, N] in x's dtype; zeros for an expert without rows.

    dy [M, N] and x [M, K] in the sorted order. ``strict`` overrides PRETUNED_STRICT.
    ``bucket`` is the bucket of rows that a kernel is chosen for, if it is not M's.
    """
    if layout is Layout.KN:  # dw[g].T: the operands change places
        return weight(x, dy, m_sizes, pin=pin, strict=strict, bucket=bucket, executor=executor)
    (M, N), K, E = dy.shape, x.shape[1], m_sizes.shape[0]
    if not (M and E and N and K) or not tensors.on_gpu(x):
        executor.unplanned()
    if not (M and E and N and K):
        return x.new_zeros((E, N, K))
    if not tensors.on_gpu(x):
        from ...kernels import reference
        from . import torch_fallback

        torch_fallback.tell_reference(x.device.type)
        return reference.grad_weight(dy, x, m_sizes)
    dy, x = (tensor if rows_usable(tensor) else tensor.contiguous() for tensor in (dy, x))
    with on(x.get_device()):
        dw: torch.Tensor = executor.new(x, (E, N, K), per=0)
        step = resolve_weight(dy, x, dw, m_sizes, pin, strict, bucket)
        if step is not None:
            executor.run(step, M, {"dy": dy, "x": x, "dw": dw, "m_sizes": m_sizes})
            return dw
        from . import torch_fallback

        executor.unplanned()
        return torch_fallback.weight(dy, x, m_sizes, sm=local_gpu(x.get_device()).sm)


def _launch_rows(call: Rows, y: torch.Tensor, executor: EagerExecutor) -> bool:
    """Launch a bundle's kernel; False where there is none."""
    product = resolve(call, y)
    if product is None:
        return False
    _run(product, call, y, executor)
    return True


def _run(product: Product, call: Rows, y: torch.Tensor, executor: EagerExecutor) -> None:
    if call.zero_tail and not product.zeroes:
        _zero_rest(call, y, executor)
    operands = {
        "x": call.x,
        "x_scale": call.x_scale,
        "y": y,
        "m_sizes": call.m_sizes,
        "index": call.index,
        "row_weights": call.row_weights,
        "bias": call.bias,
        "bounds": call.bounds,
        **operands_of(call.w),
    }
    if call.starts is not None:
        operands["starts"] = call.starts.first
    if call.low is not None:
        operands |= {"low_x": call.low.x, "low_w": call.low.w}
    if product.in_range is not None and call.index is not None:
        operands["in_range"] = executor.call(product.in_range, call.index, call.x)
    for scratch in product.scratch:
        operands[scratch.name] = executor.new(call.x, (call.M, scratch.columns), scratch.dtype)
    for step in product.steps:
        executor.run(step, call.M, operands)


def with_low_part(
    call: Rows, narrow: torch.Tensor, second: torch.Tensor, y: torch.Tensor, executor: EagerExecutor = EAGER
) -> bool:
    """Write x @ w.T + narrow @ second.T, with each row's expert, to y by one kernel.

    False, and nothing is written, where there is no code for it. ``narrow`` is [M, r]; ``second`` has the layout of w
    with ``Layout.NK``: [E, N, r] in the forward, [E, r, K] in dX.
    """
    if not (call.M and call.x.numel() and all(call.sizes)) or not tensors.on_gpu(call.x):
        return False
    if not may_add_low_part(call, narrow, second, y):
        return False
    with on(call.x.get_device()):
        product = resolve_low_rank(call._replace(low=LowPart(narrow, second)), y)
        if product is None:
            return False
        if call.layout is Layout.KN:
            second = executor.call(_turned, second)
        elif not second.is_contiguous():  # one adapter for all experts
            second = executor.call(_dense, second)
        call = call._replace(low=LowPart(narrow, second))
        _run(product, call, y, executor)
    return True


def _turned(w: torch.Tensor) -> torch.Tensor:
    return w.transpose(1, 2).contiguous()


def _dense(w: torch.Tensor) -> torch.Tensor:
    return w.contiguous()


def _zero_rest(call: Rows, y: torch.Tensor, executor: EagerExecutor) -> None:
    """Zero the rows of y that the product will not store to, and perhaps others, before it runs."""
    if not call.scatter or call.index is None:
        executor.call(_zero, y)
        return
    from . import zero_rows

    end = call.index_end(y.shape[0])
    clear = partial(zero_rows.clear, index_end=None if end == y.shape[0] else end)
    executor.call(clear, y, call.index, call.m_sizes, scales=end == y.shape[0])


def _zero(y: torch.Tensor) -> torch.Tensor:
    return y.zero_()


def rows_in_place(call: Rows, executor: EagerExecutor = EAGER, y: torch.Tensor | None = None) -> torch.Tensor | None:
    """y [M, N] of codes at ``starts``, by one kernel that reads them there; None where no bundle has one that pays.

    Other rows of y are left as they are, or hold anything in new memory.
    """
    if isinstance(call.w, torch.Tensor) or not (call.M and all(call.sizes)) or not tensors.on_gpu(call.x):
        return None
    with on(call.x.get_device()):
        product = resolve_in_place(call, y)
        if product is None:
            return None
        y = executor.new(call.x, (call.M, call.columns), call.dtype) if y is None else y
        _run(product, call, y, executor)
    return y


def gated_rows(call: Rows, executor: EagerExecutor = EAGER) -> torch.Tensor | None:
    """silu(gate) * up of this product, [M, N/2], by one kernel; None if ``resolve_gated`` returns None.

    Rows of no expert hold anything, and so do rows with an index out of range.
    """
    if not (call.M and call.x.numel() and all(call.sizes)) or not tensors.on_gpu(call.x):
        return None
    if not rows_usable(call.x):
        call = call._replace(x=call.x.contiguous())
    x = call.x
    with on(x.get_device()):
        product = resolve_gated(call)
        if product is None:
            return None
        a: torch.Tensor = executor.new(x, (call.M, call.sizes[1] // 2))
        _run(product, call, a, executor)
    return a


def of_activated(
    call: Rows, act: RowActivation, executor: EagerExecutor = EAGER, into: torch.Tensor | None = None
) -> torch.Tensor | None:
    """act(x) @ w.T of x [M, 2*K] or [M, K]: one row kernel makes codes of act(x), then the product of these codes.

    None where w's product takes x as it is, or no bundle has that row kernel. y [M, N] is ``into`` if it is given.
    Without ``zero_tail`` rows of a new y that nothing is stored to hold anything.
    """
    if isinstance(call.w, torch.Tensor) or not call.x.numel() or not tensors.on_gpu(call.x):
        return None
    with on(call.x.get_device()):
        product = resolve_activated(call, (act.flags, act.function), into)
        if product is None:
            return None
        y: torch.Tensor = executor.new(call.x, (call.M, call.sizes[1])) if into is None else into
        _run(product, call, y, executor)
    return y
