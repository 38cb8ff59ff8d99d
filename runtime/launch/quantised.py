"""The kernels of products with quantised weights, and rows of x quantised for those of them that read codes of both.

The bundles' plans say when x is quantised.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import DType, Fusion, Layout, Op, Problem, RowOp
from ...kernels.activations import Activation
from ...kernels.entry import ALIGNMENT_BYTES, is_aligned
from ...kernels.hopper_w4a16 import can_be_prepared
from ...kernels.rowops import ANY_ROWS, CODE_OPS, PICKED
from ...kernels.spec import reads_in_place
from ..check.tensors import address_of, row_stride
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import capturing, local_gpu, platform_supported
from ..settings import settings
from ..weights.expert_weights import ExpertWeights
from . import rowops
from .product_kernels import (
    ProductKernel,
    after_gather,
    index_step,
    kernel_for,
    kernel_of_rows,
    lookup,
    low_rank_kernel,
    may_clear,
    of_rows,
    problem_of,
)
from .program import Step

if TYPE_CHECKING:
    from ..check.call import Rows, Starts
    from ..dispatch.snapshot import Usable
    from ..driver.rowops import RowOpLauncher
    from .gemm import Fused, LoadedKernel

_MADE = {"used": "bounds", "scale": "codes"}  # operands of a row kernel that makes codes; scales follow codes in memory

_MOST_APART = (1 << 31) - 1

_log = logging.getLogger(__name__)


def kernel_for_quantised(call: Rows, w: ExpertWeights, y: torch.Tensor) -> ProductKernel | None:
    """The kernel for this product of w into y, for all calls like it and for w's layout; None if no bundle has one."""
    if call.x_scale is not None:
        return kernel_for_codes(call, w, y)
    if not w.kernel_dtypes or call.x.dtype is not torch.bfloat16:
        return None
    if not w.is_prepared:
        _advise(w, call.x.get_device())
    elif call.op is Op.FORWARD:
        kernel = _of_prepared(call, w, y)
        if kernel is not None:
            return kernel
    return None if w.always_quantises else _of_codes_as_they_are(call, w, y)


_advised: set[tuple[str, int]] = set()  # format and device


def _advise(w: ExpertWeights, device: int) -> None:
    """Log once for each format and GPU that prepared weights have a faster kernel."""
    if (w.format, device) not in _advised and not capturing():
        _advised.add((w.format, device))
        if wants_order(w, device) and w.can_be_prepared:
            _log.warning(
                "pretuned: %s weights run on the portable kernel; w = w.prepare(), once after loading, has a "
                "faster one",
                w.format,
            )


def low_rank_of_quantised(call: Rows, w: ExpertWeights) -> ProductKernel | None:
    """The kernel for a product of prepared w and a low-rank part (``product_kernels.may_add_low_part``); or None.

    Rows are gathered beforehand. A forward that may quantise x gets None, because quantised x is faster.
    """
    if not w.is_prepared:
        return None
    low, dtypes, device = call.low, w.kernel_dtypes, call.x.get_device()
    if low is None:
        raise AssertionError("a product without a low-rank part")
    (E, N, K), first = w.shape, bool(call.gather_divisor)
    if not dtypes or (call.op is Op.FORWARD and dtypes[0] in CODE_OPS) or (first and not call.may_gather_first(True)):
        return None
    fused, zeroes = call.fusion & ~Fusion.GATHER, call.zero_tail and not call.uses_index
    fixed = (w.format, E, N, K, low.x.shape[1], call.gather_divisor, fused.value, call.m_sizes.dtype, zeroes)
    key = ("low rank of codes", call.op.value, *fixed, call.bucket, device)

    def build() -> ProductKernel | None:
        problem = problem_of(call.op, call.x, E, N, K, Layout.NK, Fusion.LOW_RANK, dtypes[-1])
        kernel = low_rank_kernel(problem, call.bucket, device)
        if kernel is None:
            return None
        from .gemm import Fused

        how = Fused(fused, index_step(call) if call.uses_index else 1, call.gather_divisor or 1, zeroes)
        return after_gather(kernel, problem, call, how) if first else of_rows(kernel, problem, call, how)

    return lookup(key, build)


def kernel_for_activated(call: Rows, w: ExpertWeights, y: torch.Tensor | None = None) -> ProductKernel | None:
    """The kernel for a product of act(h), where x is h: its row kernel makes codes of act(h) in new memory.

    y is dense [M, N], or new memory. None where there is no such row kernel, or x is not to be quantised.
    """
    h, device, (_, N, K) = call.x, call.x.get_device(), w.shape
    if CODE_OPS.keys().isdisjoint(w.kernel_dtypes) or not is_aligned(ALIGNMENT_BYTES, h.data_ptr()):
        return None
    # Use the unfused call's key, so that both share one entry of the table.
    call = call._replace(x=h.new_empty((1, K)), zero_tail=False)
    kernel = kernel_for_quantised(call, w, h.new_empty((1, N)) if y is None else y)
    if kernel is None or kernel.quantize is None:
        return None
    activate = rowops.launcher(CODE_OPS[w.kernel_dtypes[0]].activation, DType.BF16, device, aligned=True)
    return None if activate is None else kernel._replace(quantize=activate)


def kernel_for_codes(call: Rows, w: ExpertWeights, y: torch.Tensor) -> ProductKernel:
    """The kernel for a product of x that arrives as codes; its ``quantize`` is the row kernel that orders them.

    Raises
    ------
    InputError
        where no kernel here reads x as codes.
    """
    x, dtypes, (E, N, K), device = call.x, w.kernel_dtypes, w.shape, call.x.get_device()
    pointers = (x.data_ptr(), y.data_ptr(), w.codes.data_ptr(), w.scale.data_ptr())
    lengths = (K, row_stride(y, N) * y.element_size(), N * y.element_size())
    first, fusion = bool(call.gather_divisor), call.fusion & ~Fusion.GATHER
    if not w.is_prepared:
        raise _no_codes("w is in the checkpoint's layout. Prepare it once after loading: w = w.prepare()")
    if not dtypes or dtypes[0] not in CODE_OPS:
        raise _no_codes(f"no kernel for {w.format} weights does")
    if not is_aligned(ALIGNMENT_BYTES, *pointers, *lengths):
        raise _no_codes("x, y or w, or a row of them, does not begin at a multiple of 16 bytes")
    if first and not call.may_gather_first(True):
        raise _no_codes(
            "rows of an index out of range would be written, which out and zero_tail forbid. Leave both out, or "
            "permute the codes beforehand"
        )
    step = index_step(call) if call.uses_index else 1
    few, beside = may_clear(call, y) if call.zero_tail and call.uses_index else (True, True)
    zeroes = call.zero_tail and (few or beside)
    fixed = (w.format, E, N, K, call.gather_divisor, fusion.value, step, call.m_sizes.dtype, zeroes, few, beside)
    key = ("rows of codes", *fixed, call.bucket, device, call.pin)
    problem = problem_of(call.op, x, E, N, K, Layout.NK, fusion, dtypes[0])

    def build() -> ProductKernel | None:
        from ..dispatch.plans import of_codes  # here, as only a first launch needs them
        from .gemm import Fused
        from .loader import load_first, pinned_kernel

        snapshot, local = dispatch_snapshot.snapshot(), local_gpu(device)

        def choose() -> tuple[Usable, int] | None:
            return of_codes(snapshot, problem, dtypes[-1], call.bucket, local, top_k=call.gather_divisor)

        kernel = load_first(snapshot, choose, local, device) if platform_supported() else None
        order = rowops.launcher(RowOp.ORDER_CODES, DType.BF16, device, aligned=True)
        if kernel is None or order is None:
            return None
        if call.pin is not None:
            kernel = pinned_kernel(call.pin, problem, device, aligned=True) or kernel
        fused = Fused(fusion, step, call.gather_divisor or 1, zeroes, few, beside)
        return of_rows(kernel, problem, call, fused)._replace(quantize=order)

    kernel = lookup(key, build)
    if kernel is None:
        from ..dispatch.plans import lacks_for_codes  # here, as only an error needs it

        lacking = lacks_for_codes(dispatch_snapshot.snapshot(), problem, local_gpu(device), RowOp.ORDER_CODES)
        raise _no_codes((lacking or "no usable bundle has the GEMM").removeprefix("x stays bf16: "))
    return kernel


def kernel_for_starts(call: Rows, w: ExpertWeights, y: torch.Tensor | None, stride_y: int) -> ProductKernel | None:
    """The kernel for a product of codes in place; None if a row kernel must order the codes first.

    It has no bias and zeroes nothing, and counts elements of x's scales in int32.
    """
    dtypes, (E, N, K), device, starts, scale = w.kernel_dtypes, w.shape, call.x.get_device(), call.starts, call.x_scale
    if starts is None or scale is None or not dtypes or not w.is_prepared:
        return None
    problem = Problem(call.op, dtypes[0], E, N, K, Layout.NK, call.fusion)
    if not reads_in_place(problem):
        return None
    if call.fusion is not Fusion.STARTS or call.zero_tail or call.pin is not None or K % CODE_OPS[dtypes[0]].columns:
        return None
    pointers = (call.x.data_ptr(), 0 if y is None else y.data_ptr(), w.codes.data_ptr(), w.scale.data_ptr())
    least = min(scale.stride(), default=0) >= 0
    apart = sum((size - 1) * step for size, step in zip(scale.shape, scale.stride(), strict=True))
    if not is_aligned(ALIGNMENT_BYTES, *pointers, 2 * stride_y, 2 * N, K) or not least:
        return None
    if apart + 128 * scale.stride(-2) > _MOST_APART or E * starts.room * -(-N // 128) > _MOST_APART:
        return None
    key = ("in place", w.format, E, N, K, call.m_sizes.dtype, call.bucket, device)

    def build() -> ProductKernel | None:
        from ..dispatch.decide import in_place  # here, as only a first launch needs them
        from .loader import load_first

        snapshot, local = dispatch_snapshot.snapshot(), local_gpu(device)

        def choose() -> tuple[Usable, int] | None:
            candidate = in_place(snapshot, problem, call.bucket, local, strict=settings().strict)
            return None if candidate is None else (candidate.usable, candidate.index)

        kernel = load_first(snapshot, choose, local, device) if platform_supported() else None
        return None if kernel is None else of_rows(kernel, problem, call, Fused(Fusion.STARTS))

    from .gemm import Fused

    return lookup(key, build)


def starts_words(starts: Starts, scale: torch.Tensor) -> dict[str, int]:
    """The numbers of a launch that reads codes in place."""
    step = 0 if starts.first is None else 2 if starts.first.dtype is torch.int64 else 1
    apart = scale.stride(0) if scale.dim() == 3 else starts.room * scale.stride(0)
    return {
        "stride_scale_m": scale.stride(-2),
        "stride_scale_k": scale.stride(-1),
        "stride_scale_e": 0 if step else apart,
        "starts_step": step,
        "room": starts.room,
        "packs": int(starts.packs),
    }


def _no_codes(why: str) -> InputError:
    return InputError(f"x is QuantizedRows, and no kernel here reads it as codes: {why}; or pass bfloat16 rows")


def wants_order(w: ExpertWeights, device: int) -> bool:
    """True if ``cuda:device`` has a forward kernel for these weights after ``ExpertWeights.prepare``."""
    if not w.kernel_dtypes:
        return False
    (E, N, K), local = w.shape, local_gpu(device)
    dtype = w.kernel_dtypes[-1]
    forward = Problem(Op.FORWARD, dtype, E, N, K)
    return can_be_prepared(dtype, N, K) and platform_supported() and dispatch_snapshot.snapshot().serves(forward, local)


def problems_of(w: ExpertWeights, x: torch.Tensor, forward: Fusion, dx: Fusion) -> tuple[Problem, ...]:
    """The problems of a forward with w and of its dX, in every dtype for which x's GPU has a kernel.

    With prepared weights the forward's problem has no gather: a row kernel gathers before it.
    """
    from ...kernels.registry import refusal  # here, as only tuning asks
    from ...kernels.search import candidates
    from ...kernels.spec import Spec, code_of

    if not w.kernel_dtypes or x.dtype is not torch.bfloat16:
        return ()
    (E, N, K), device = w.shape, x.get_device()
    sm, layout = local_gpu(device).sm, Layout.NK if w.is_prepared else Layout.STORED
    form = code_of(Op.FORWARD, forward & ~Fusion.GATHER if w.is_prepared else forward)
    problems = (
        *(Problem(Op.FORWARD, dtype, E, N, K, layout, form) for dtype in w.kernel_dtypes),
        Problem(Op.DX, w.kernel_dtypes[-1], E, N, K, layout, dx),
    )
    return tuple(
        problem
        for problem in problems
        if any(
            not refusal(Spec(problem.op, problem.dtype, config, layout, problem.fusion), sm)
            for config in candidates(problem.op, problem.dtype, sm)
        )
    )


def _of_codes_as_they_are(call: Rows, w: ExpertWeights, y: torch.Tensor) -> ProductKernel | None:
    """A portable kernel for codes in their present layout; it gathers rows itself."""
    x, m_sizes, fusion, (E, N, K), device = call.x, call.m_sizes, call.fusion, w.shape, call.x.get_device()
    size, layout = x.element_size(), Layout.NK if w.is_prepared else Layout.STORED
    lengths = (row_stride(x, x.shape[1]), row_stride(y, y.shape[1]), N, K)
    zero = address_of(w.zero) if w.is_prepared else 0  # in the checkpoint's layout kernels read single bytes
    pointers = (x.data_ptr(), y.data_ptr(), w.codes.data_ptr(), address_of(w.plain_scale), zero)
    line = K * w.precision.w.bits // 8
    aligned = is_aligned(ALIGNMENT_BYTES, *pointers, line, *(length * size for length in lengths))
    step = index_step(call) if call.uses_index else 1
    few, beside = may_clear(call, y) if call.zero_tail and call.uses_index else (True, True)
    zeroes = call.zero_tail and (few or beside)
    fixed = (w.format, E, N, K, call.gather_divisor, fusion.value, step, m_sizes.dtype, zeroes, few, beside)
    key = ("codes", call.op.value, layout.value, *fixed, call.bucket, call.spread, device, aligned, call.pin)

    def build() -> ProductKernel | None:
        problem = problem_of(call.op, x, E, N, K, layout, fusion, w.kernel_dtypes[-1])
        if platform_supported() and (both := _by_codes(problem, w.kernel_dtypes)) is not None:
            kernel = _kernel_for_codes(both, problem.dtype, call, device, 0, aligned=aligned)
            if kernel is not None:
                from .gemm import Fused

                return of_rows(kernel, both, call, Fused(fusion, step, call.gather_divisor or 1, zeroes, few, beside))
        if not dispatch_snapshot.snapshot().serves(
            problem, local_gpu(device)
        ):  # then torch runs, and its warning names the format
            return None
        kernel = kernel_of_rows(problem, call, device, aligned=aligned)
        if kernel is None:
            return None
        from .gemm import Fused

        return of_rows(kernel, problem, call, Fused(fusion, step, call.gather_divisor or 1, zeroes, few, beside))

    return lookup(key, build)


def _by_codes(problem: Problem, dtypes: tuple[DType, ...]) -> Problem | None:
    """The problem of a kernel that quantises x itself; None if there is no kernel."""
    quantises = problem.op is Op.FORWARD and problem.layout is Layout.STORED and dtypes[0].quantises_x
    return problem._replace(dtype=dtypes[0]) if quantises else None


def _of_prepared(call: Rows, w: ExpertWeights, y: torch.Tensor) -> ProductKernel | None:
    """Return a forward's kernel for prepared weights.

    Rows are gathered beforehand, as no such kernel gathers. If the checkpoint asks for quantised x, ``kernel_dtypes``
    has two dtypes, and the first is with quantised x.
    """
    x, m_sizes, dtypes = call.x, call.m_sizes, w.kernel_dtypes
    (E, N, K), device = w.shape, x.get_device()
    fusion, size = call.fusion & ~Fusion.GATHER, x.element_size()
    lengths = (row_stride(x, K) * size, row_stride(y, N) * size, N * size, K * size)
    pointers = (x.data_ptr(), y.data_ptr(), w.codes.data_ptr(), w.scale.data_ptr(), address_of(w.zero))
    if not is_aligned(ALIGNMENT_BYTES, *pointers, *lengths):
        return None
    first = bool(call.gather_divisor)
    if first and not call.may_gather_first(True):
        return None
    step = index_step(call) if call.uses_index else 1
    few, beside = may_clear(call, y) if call.zero_tail and call.uses_index else (True, True)
    zeroes = call.zero_tail and (few or beside)
    quantises, dense = dtypes[0] in CODE_OPS, first or row_stride(x, K) == K
    if quantises and not dense and _always_quantises():
        raise InputError("grouped_gemm: x has rows that lie apart, which can't be quantised: pass x.contiguous()")
    codes = dtypes[0] if quantises and dense else None
    fixed = (w.format, E, N, K, call.gather_divisor, fusion.value, step, m_sizes.dtype, zeroes, few, beside)
    key = ("prepared", *fixed, call.bucket, device, first, codes is None, w.always_quantises, call.pin)

    def build() -> ProductKernel | None:
        problem = problem_of(call.op, x, E, N, K, Layout.NK, fusion, dtypes[-1])
        if codes is not None and platform_supported():
            from .gemm import Fused

            fused = Fused(fusion, step, call.gather_divisor or 1, zeroes, few, beside)
            of_codes = _of_codes(problem._replace(dtype=codes), dtypes[-1], call, fused, always=w.always_quantises)
            if of_codes is not None:
                return of_codes
        # (torch's warning names the format.)
        if w.always_quantises or not dispatch_snapshot.snapshot().serves(problem, local_gpu(device)):
            return None
        kernel = kernel_for(problem, call.bucket, device, aligned=True, pin=call.pin)
        if kernel is None:
            return None
        from .gemm import Fused

        fused = Fused(call.fusion, step, call.gather_divisor or 1, zeroes, few, beside)
        return after_gather(kernel, problem, call, fused) if first else of_rows(kernel, problem, call, fused)

    return lookup(key, build)


def _always_quantises() -> bool:
    """True if the batch-invariant mode quantises x in every call (``quantize_x``)."""
    invariance = dispatch_snapshot.snapshot().invariance
    return invariance is not None and invariance.quantize_x


def _of_codes(problem: Problem, other: DType, call: Rows, fused: Fused, *, always: bool) -> ProductKernel | None:
    """A GEMM with quantised x, after a row kernel that quantises it; None if the kernel with bf16 x shall run."""
    device = call.x.get_device()
    kernel = _kernel_for_codes(problem, other, call, device, call.gather_divisor, always=always)
    if kernel is None:
        return None
    quantize = rowops.launcher(CODE_OPS[problem.dtype].quantize, DType.BF16, device, aligned=True)
    if quantize is None:
        return None
    return of_rows(kernel, problem, call, fused)._replace(quantize=quantize)


def _kernel_for_codes(
    problem: Problem,
    other: DType,
    call: Rows,
    device: int,
    top_k: int,
    *,
    aligned: bool = True,
    always: bool = False,
) -> LoadedKernel | None:
    """The variant for quantised x, loaded on ``cuda:device``; None where x stays as it is.

    If x is quantised, ``always`` or by the plan, a variant that the call prefers precedes the plan's.
    """
    from ..dispatch.plans import of_codes, quantised_x  # here, as only a first launch needs them
    from .loader import load_first, pinned_kernel

    snapshot, local = dispatch_snapshot.snapshot(), local_gpu(device)

    def choose() -> tuple[Usable, int] | None:
        if always:
            return of_codes(snapshot, problem, other, call.bucket, local, top_k=top_k, op=None)
        return quantised_x(snapshot, problem, other, call.bucket, local, top_k=top_k, aligned=aligned)

    kernel = load_first(snapshot, choose, local, device)
    if kernel is None or call.pin is None:
        return kernel
    return pinned_kernel(call.pin, problem, device, aligned=aligned) or kernel


def bytes_of_row(K: int) -> int:
    """Bytes for each of M rows of e4m3 codes and, after all codes, their fp32 scales.

    Scales are padded to rows of four for each 128 of K, so K / 8 bytes are enough; one scale a row takes less.
    """
    return K + K // 8


def quantize_step(
    launch: RowOpLauncher, x: torch.Tensor, *, top_k: int, index_step: int, used: tuple[int, int], index: str
) -> Step:
    """codes[i], scale[:, i] = quantised x[i], or with ``top_k`` x[index[i] // top_k], of dense x [T, columns].

    The codes are e4m3 [M, columns]. After them in memory (``bytes_of_row``) are the scales, fp32 [columns / 128, M], or
    [M] with one scale a row. ``used``: ``rowops.used`` of the step's bounds. ``index`` names the operand of indices,
    each in [0, T * top_k).
    """
    columns, (behind, flags) = x.shape[1], used
    picked = f", {top_k} of each" if top_k else ""
    return Step.of(
        launch,
        f"quantise rows of {columns} columns{picked}",
        _MADE | {"index": index},
        behind=(("used", behind, 0), ("scale", 0, columns)),
        columns=columns,
        top_k=top_k or 1,
        index_step=index_step,
        flags=flags | (PICKED if top_k else 0),
    )


def order_step(
    launch: RowOpLauncher,
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    top_k: int,
    index_step: int,
    used: tuple[int, int],
    index: str,
) -> Step:
    """``quantize_step`` for x that arrives as dense codes [T, columns] with ``scale``, whose strides are free.

    ``scale`` is [T, groups], or [E, T / E, groups].
    """
    columns, (behind, flags) = x.shape[1], used
    picked = f", {top_k} of each" if top_k else ""
    by_row = scale.dim() == 2 and (scale.stride(1) == 1 or scale.shape[1] == 1)
    apart, room = (scale.stride(0), scale.shape[1]) if scale.dim() == 3 else (0, ANY_ROWS)
    return Step.of(
        launch,
        f"order the codes of rows of {columns} columns{picked}",
        _MADE | {"x_codes": "x", "index": index},
        scales=by_row,  # else a column's stride depends on the number of rows
        behind=(("used", behind, 0), ("scale", 0, columns)),
        columns=columns,
        groups=scale.shape[-1],
        stride_scale_m=scale.stride(-2),
        stride_scale_k=scale.stride(-1),
        stride_scale_e=apart,
        room=room,
        top_k=top_k or 1,
        index_step=index_step,
        flags=flags | (PICKED if top_k else 0),
    )


def activation_step(launch: RowOpLauncher, columns: int, act: tuple[int, Activation], used: tuple[int, int]) -> Step:
    """codes[i], scale[:, i] = quantised act(x[i]), of dense x [M, columns], with a gate [M, 2 * columns].

    ``act`` is (the activation's flags, the activation); ``used`` and the codes are as in ``quantize_step``.
    """
    (behind, flags), (kind, function) = used, act
    numbers: dict[str, Any] = {"columns": columns, "flags": flags | kind, **function.words}
    return Step.of(
        launch,
        f"{function} to {columns} columns, quantised",
        {**_MADE, "h": "x"},
        behind=(("used", behind, 0), ("scale", 0, columns)),
        **numbers,
    )
