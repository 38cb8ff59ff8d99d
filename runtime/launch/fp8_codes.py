"""Launch a bundle's kernels for fp8 training, for ``runtime/ops/fp8_codes.py``.

Each function returns None or False, and has launched nothing, if no usable bundle has a kernel or memory is not dense
and aligned: then torch computes the result.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...artifacts.records import DType, Op, Problem, RowOp, bucket_of
from ...artifacts.tuples import NamedTuple
from ...kernels.entry import ALIGNMENT_BYTES, is_aligned
from ...kernels.hopper_w8a8_block import ADDS, FP32, GROUP, places_for
from ...kernels.rowops import (
    ALONG_K,
    ALONG_N,
    BLOCKS,
    FP32_WEIGHTS,
    MOST_SORTED_EXPERTS,
    NARROW_DWEIGHTS,
    NOTES,
    PICKED,
    WRITES_DWEIGHTS,
)
from ...kernels.spec import MAX_EXPERTS
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import local_gpu, on, platform_supported
from ..weights.expert_weights import ExpertWeights
from ..weights.fp8_codes import ColumnCodes
from . import rowops
from .product_kernels import ProductKernel, lookup, name_of, step_of
from .program import EAGER, EagerExecutor, Step
from .quantised import bytes_of_row

if TYPE_CHECKING:
    from ...kernels.activations import Activation
    from ..dispatch.snapshot import Usable
    from ..driver.rowops import RowOpLauncher

_MOST = 2**31 - 1
_FLOATS = {torch.bfloat16: 0, torch.float32: FP32_WEIGHTS}
_RESULTS = {torch.bfloat16: 0, torch.float32: FP32}


def column_codes(
    t: torch.Tensor,
    m_sizes: torch.Tensor,
    index: torch.Tensor | None,
    top_k: int,
    *,
    blocks: bool,
    executor: EagerExecutor = EAGER,
) -> ColumnCodes | None:
    """Codes along M of sorted rows t [M, C], or of rows t[index // top_k]."""
    codes = _codes(RowOp.QUANTIZE_COLUMNS, t, m_sizes, index, top_k, blocks, executor)
    return None if codes is None else codes[0]


def both_codes(
    t: torch.Tensor,
    m_sizes: torch.Tensor,
    index: torch.Tensor | None,
    top_k: int,
    *,
    blocks: bool,
    executor: EagerExecutor = EAGER,
) -> tuple[ColumnCodes, torch.Tensor] | None:
    """``column_codes``, and codes along K as ``quantised.quantize_step`` writes them: uint8 [M, ``bytes_of_row``]."""
    codes = _codes(RowOp.QUANTIZE_BOTH, t, m_sizes, index, top_k, blocks, executor)
    return None if codes is None or codes[1] is None else (codes[0], codes[1])


def _codes(
    op: RowOp,
    t: torch.Tensor,
    m_sizes: torch.Tensor,
    index: torch.Tensor | None,
    top_k: int,
    blocks: bool,
    executor: EagerExecutor,
) -> tuple[ColumnCodes, torch.Tensor | None] | None:
    M, E, C = t.shape[0] if index is None else index.shape[0], m_sizes.shape[0], t.shape[1]
    dense = t.is_contiguous() and (index is None or index.is_contiguous()) and m_sizes.is_contiguous()
    if not dense or t.dtype is not torch.bfloat16 or C % GROUP or not M or not 0 < E <= MOST_SORTED_EXPERTS:
        return None
    if not is_aligned(ALIGNMENT_BYTES, t.data_ptr()):
        return None
    launch = rowops.launcher(op, DType.BF16, t.get_device(), aligned=True)
    if launch is None:
        return None
    step = _along_m(
        launch,
        f"quantise {C} columns along M{' and K' if op is RowOp.QUANTIZE_BOTH else ''}",
        columns=C,
        E=E,
        top_k=top_k,
        index_step=1 if index is None else step_of(index),
        m_sizes_step=step_of(m_sizes),
        flags=(BLOCKS if blocks else 0) | (0 if index is None else PICKED),
    )
    with on(t.get_device()):
        columns = _room_along_m(t, C, M, E, blocks, executor)
        rows = executor.new(t, (M, bytes_of_row(C)), torch.uint8) if op is RowOp.QUANTIZE_BOTH else None
        there = {"x": t, "index": index, "m_sizes": m_sizes, "codes": rows}
        executor.run(step, M, there | {"column_codes": columns.codes, "column_scale": columns.scale})
    return columns, rows


def _room_along_m(like: torch.Tensor, C: int, M: int, E: int, blocks: bool, executor: EagerExecutor) -> ColumnCodes:
    """New, uninitialised memory for codes along M."""
    of_codes, of_scale = partial(_codes_size, C, E), partial(_scale_size, C // GROUP if blocks else C, E)
    codes = executor.new(like, of_codes(M), torch.float8_e4m3fn, per=of_codes)
    return ColumnCodes(codes, executor.new(like, of_scale(M), torch.float32, per=of_scale), M)


def _codes_size(columns: int, E: int, M: int) -> tuple[int, ...]:
    return columns, places_for(M, E)


def _scale_size(scales: int, E: int, M: int) -> tuple[int, ...]:
    return places_for(M, E) // GROUP, scales


def _along_m(launch: RowOpLauncher, name: str, *, E: int, columns: int, rows: int = 1, **numbers: Any) -> Step:
    """A launch that writes codes along M; ``places`` has an entry for each row. Scales along K follow their codes."""
    operands = tuple("codes" if operand == "scale" else operand for operand in launch.operands)
    behind = (("scale", 0, rows * columns),) if "scale" in launch.operands else ()

    def run(M: int, stream: int, *addresses: int) -> None:
        bound = launch.bind(behind=behind, E=E, columns=columns, places=places_for(M, E), **numbers)
        bound(M, stream, *addresses)

    return Step(run, name, operands)


class GradientCodes(NamedTuple):
    """dh along M, dh along K as ``both_codes`` has it, act(h) along M; dweights by index, or None."""

    dh: ColumnCodes
    rows: torch.Tensor
    a: ColumnCodes
    dweights: torch.Tensor | None


def gradient_codes(
    h: torch.Tensor,
    da: torch.Tensor,
    m_sizes: torch.Tensor,
    act: tuple[int, Activation],
    weights: torch.Tensor,
    index: torch.Tensor,
    *,
    writes_dweights: bool,
    narrow: bool,
    blocks: bool,
    executor: EagerExecutor = EAGER,
) -> GradientCodes | None:
    """``activation.gradient`` of h [M, 2*I] with a gate before up, as codes.

    With ``blocks`` 128 columns of dh share a scale along M, else of a. ``act``: (its flags, the activation).
    """
    (M, I), E, device = da.shape, m_sizes.shape[0], h.get_device()  # noqa: E741
    launch = rowops.launcher(RowOp.ACTIVATION_GRAD_CODES, DType.BF16, device, aligned=True)
    if launch is None:
        return None
    kind = weights.dtype if narrow else torch.float32
    flags = act[0] | rowops.weighing(weights) | (BLOCKS if blocks else 0)
    flags |= (WRITES_DWEIGHTS if writes_dweights else 0) | (0 if kind is torch.float32 else NARROW_DWEIGHTS)
    numbers: dict[str, Any] = {"E": E, "columns": I, "rows": 2, "index_step": step_of(index), **act[1].words}
    numbers["m_sizes_step"] = step_of(m_sizes)
    name = f"gradient of {act[1]} of {2 * I} columns, quantised"
    with on(device):
        dh, a = (_room_along_m(h, C, M, E, shared, executor) for C, shared in ((2 * I, blocks), (I, not blocks)))
        rows = executor.new(h, (M, bytes_of_row(2 * I)), torch.uint8)
        there: dict[str, torch.Tensor | None] = {"h": h, "da": da, "row_weights": weights, "index": index}
        there |= {"m_sizes": m_sizes, "codes": rows, "column_codes": dh.codes, "column_scale": dh.scale}
        there |= {"a_codes": a.codes, "a_scale": a.scale, "dots": None, "dweights": None}
        if writes_dweights:
            of_dots = partial(_dots_size, I // GROUP)
            there["dots"] = executor.new(h, of_dots(M), torch.float32, per=of_dots)
            there["dweights"] = executor.new(h, (M,), kind)
        executor.run(_along_m(launch, name, flags=flags, **numbers), M, there)
        if writes_dweights:
            executor.run(_along_m(launch, f"{name}: sums", flags=flags | NOTES, **numbers), M, there)
    return GradientCodes(dh, rows, a, there["dweights"])


def _dots_size(blocks: int, M: int) -> tuple[int, ...]:
    return blocks, M


def takes_gradients(E: int, H: int, I: int, device: int) -> bool:  # noqa: E741
    """True if kernels of a bundle make the codes of a layer's backward: ``both_codes`` and ``gradient_codes``."""
    if H % GROUP or I % GROUP or not 0 < E <= MOST_SORTED_EXPERTS:
        return False
    ops = RowOp.QUANTIZE_COLUMNS, RowOp.QUANTIZE_BOTH, RowOp.ACTIVATION_GRAD_CODES
    return all(rowops.launcher(op, DType.BF16, device, aligned=True) is not None for op in ops)


def grad_weight(
    dy: ColumnCodes,
    x: ColumnCodes,
    m_sizes: torch.Tensor,
    dw: torch.Tensor,
    *,
    accumulate: bool,
    executor: EagerExecutor = EAGER,
) -> bool:
    """Write dw [E, N, K] of these codes, or add to it."""
    E, N, K = dw.shape
    usable = dw.is_contiguous() and m_sizes.is_contiguous() and dw.dtype in _RESULTS and 0 < E <= MAX_EXPERTS
    addresses = (dw.data_ptr(), *(tensor.data_ptr() for codes in (dy, x) for tensor in codes[:2]))
    if not usable or not is_aligned(ALIGNMENT_BYTES, *addresses) or N % GROUP or K % GROUP:
        return False
    kernel = _kernel_for(E, N, K, x.M, m_sizes)
    if kernel is None:
        return False
    step = Step.of(kernel.launcher, kernel.name, dw_flags=_RESULTS[dw.dtype] | (ADDS if accumulate else 0))
    of = {"dw": dw, "m_sizes": m_sizes, "dy": dy.codes, "x": x.codes, "dy_scale": dy.scale, "x_scale": x.scale}
    with on(dw.get_device()):
        executor.run(step, x.M, of)
    return True


def _kernel_for(E: int, N: int, K: int, M: int, m_sizes: torch.Tensor) -> ProductKernel | None:
    """The kernel for dW of codes, for all calls like this one."""
    device, bucket = m_sizes.get_device(), bucket_of(M)

    def build() -> ProductKernel | None:
        from ..dispatch.decide import dW_of_codes  # here, as only a first launch needs them
        from . import gemm
        from .loader import load_first

        problem = Problem(Op.DW, DType.FP8_BLOCK, E, N, K)
        snapshot, local = dispatch_snapshot.snapshot(), local_gpu(device)

        def choose() -> tuple[Usable, int] | None:
            candidate = dW_of_codes(snapshot, problem, bucket, local)
            return None if candidate is None else (candidate.usable, candidate.index)

        kernel = load_first(snapshot, choose, local, device) if platform_supported() else None
        if kernel is None:
            return None
        launch = gemm.product_launcher(kernel, N=N, K=K, E=E, m_sizes_step=step_of(m_sizes))
        return ProductKernel(launch, name_of(problem, kernel))

    return lookup(("dW of codes", E, N, K, m_sizes.dtype, bucket, device), build)


def blocks(
    w: torch.Tensor, *, along_k: bool, along_n: bool, executor: EagerExecutor = EAGER
) -> tuple[ExpertWeights | None, ExpertWeights | None] | None:
    """Prepared fp8_block weights of w [E, N, K] and of w.transpose(1, 2), from one read of w."""
    E, N, K = w.shape
    whole = N % GROUP == 0 and K % GROUP == 0 and w.stride(2) == 1 and w.numel() > 0
    strides = all(step % 16 == 0 and 0 <= step <= _MOST for step in w.stride()[:2]) and N * w.stride(1) <= _MOST
    if not whole or not strides or w.dtype not in _FLOATS or not is_aligned(ALIGNMENT_BYTES, w.data_ptr()):
        return None
    launch = rowops.launcher(RowOp.QUANTIZE_BLOCKS, DType.BF16, w.get_device(), aligned=True)
    if launch is None:
        return None
    flags = _FLOATS[w.dtype] | (ALONG_K if along_k else 0) | (ALONG_N if along_n else 0)
    words = {"M": N, "columns": K, "step_expert": w.stride(0), "step_row": w.stride(1), "flags": flags}
    programs, operands = E * (N // GROUP) * (K // GROUP), launch.operands

    def run(_M: int, stream: int, *addresses: int) -> None:
        launch(programs, stream, words | dict(zip(operands, addresses, strict=True)))

    step = Step(run, f"quantise weights of {N} rows and {K} columns", operands, has_rows=False)
    with on(w.get_device()):
        ways = [_room(w, E, N, K, executor) if along_k else None, _room(w, E, K, N, executor) if along_n else None]
        there: dict[str, torch.Tensor | None] = {"w": w}
        for way, (codes, scale) in zip(ways, (("words", "scales"), ("across_words", "across_scales")), strict=True):
            there |= {} if way is None else {codes: way.codes, scale: way.scale}
        executor.run(step, 0, there)
    return ways[0], ways[1]


def _room(like: torch.Tensor, E: int, N: int, K: int, executor: EagerExecutor) -> ExpertWeights:
    """New prepared weights with uninitialised memory."""
    codes = executor.new(like, (E, N // 64, K // 64, 64, 4, 4), torch.int32, per=0)
    scale = executor.new(like, (E, N // GROUP, K // GROUP), torch.float32, per=0)
    return ExpertWeights("fp8_block", codes, scale)
