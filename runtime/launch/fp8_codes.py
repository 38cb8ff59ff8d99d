"""The kernels of fp8 training, of a bundle: ``runtime/ops/fp8_codes.py`` asks for them.

Each function returns None or False, and has launched nothing, if no usable bundle has a kernel or memory is not dense
and aligned: torch does the same then.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ...artifacts.records import DType, Op, Problem, RowOp, bucket_of
from ...kernels.entry import ALIGNMENT_BYTES, is_aligned
from ...kernels.hopper_w8a8_block import ADDS, FP32, GROUP, places_for
from ...kernels.rowops import ALONG_K, ALONG_N, BLOCKS, FP32_WEIGHTS, MOST_SORTED_EXPERTS, PICKED
from ...kernels.spec import MAX_EXPERTS
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import local_gpu, on, platform_supported
from ..weights.expert_weights import ExpertWeights
from ..weights.fp8_codes import ColumnCodes
from . import rowops
from .product_kernels import ProductKernel, lookup, name_of, step_of
from .program import EAGER, EagerExecutor, Step

if TYPE_CHECKING:
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
    M, E, C = t.shape[0] if index is None else index.shape[0], m_sizes.shape[0], t.shape[1]
    dense = t.is_contiguous() and (index is None or index.is_contiguous()) and m_sizes.is_contiguous()
    if not dense or t.dtype is not torch.bfloat16 or C % GROUP or not M or not 0 < E <= MOST_SORTED_EXPERTS:
        return None
    if not is_aligned(ALIGNMENT_BYTES, t.data_ptr()):
        return None
    launch = rowops.launcher(RowOp.QUANTIZE_COLUMNS, DType.BF16, t.get_device(), aligned=True)
    if launch is None:
        return None
    step = _columns_step(
        launch,
        columns=C,
        E=E,
        top_k=top_k,
        index_step=1 if index is None else step_of(index),
        m_sizes_step=step_of(m_sizes),
        flags=(BLOCKS if blocks else 0) | (0 if index is None else PICKED),
    )
    of_codes, of_scale = partial(_codes_size, C, E), partial(_scale_size, C // GROUP if blocks else C, E)
    with on(t.get_device()):
        codes = executor.new(t, of_codes(M), torch.float8_e4m3fn, per=of_codes)
        scale = executor.new(t, of_scale(M), torch.float32, per=of_scale)
        there = {"x": t, "index": index, "m_sizes": m_sizes, "column_codes": codes, "column_scale": scale}
        executor.run(step, M, there)
    return ColumnCodes(codes, scale, M)


def _codes_size(columns: int, E: int, M: int) -> tuple[int, ...]:
    return columns, places_for(M, E)


def _scale_size(scales: int, E: int, M: int) -> tuple[int, ...]:
    return places_for(M, E) // GROUP, scales


def _columns_step(launch: RowOpLauncher, *, E: int, **numbers: int) -> Step:
    """The launch of codes along M; it reads ``places``, a number of M."""

    def run(M: int, stream: int, *addresses: int) -> None:
        launch.bind(E=E, places=places_for(M, E), **numbers)(M, stream, *addresses)

    return Step(run, f"quantise {numbers['columns']} columns along M", launch.operands)


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
    """The kernel for dW of codes, and all like it."""
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
    """Prepared fp8_block weights of w [E, N, K], and of w.transpose(1, 2), of one read of w."""
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
    """New prepared weights, whose memory nothing is written to."""
    codes = executor.new(like, (E, N // 64, K // 64, 64, 4, 4), torch.int32, per=0)
    scale = executor.new(like, (E, N // GROUP, K // GROUP), torch.float32, per=0)
    return ExpertWeights("fp8_block", codes, scale)
