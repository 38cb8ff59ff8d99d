"""Codes of fp8 training: rows quantised along M, dW of such codes, weights quantised both ways.

On CUDA a bundle's kernels compute them. Where no usable bundle has a kernel, and elsewhere, torch does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...kernels.entry import ALIGNMENT_BYTES, is_aligned
from ..check import tensors
from ..launch.program import EAGER, EagerExecutor
from ..weights import fp8_codes
from ..weights.expert_weights import ExpertWeights
from ..weights.fp8_codes import ColumnCodes

if TYPE_CHECKING:
    from ..launch.fp8_codes import GradientCodes
    from .activation import RowActivation

__all__ = ["ColumnCodes", "column_codes", "dW_of_codes", "quantise_weights"]


def column_codes(
    t: torch.Tensor,
    m_sizes: torch.Tensor,
    index: torch.Tensor | None = None,
    top_k: int = 1,
    *,
    blocks: bool = False,
    executor: EagerExecutor = EAGER,
) -> ColumnCodes:
    """Quantise sorted rows t [M, C] along M; with ``index`` [M] the rows t[index

    top_k].

    m_sizes [E] int32 or int64 are the rows of each expert; rows past their sum are not read. C is a multiple of 128.
    With ``blocks`` 128 columns share a scale: dW reads x's codes with ``blocks``, and dy's with a scale for each
    column.
    """
    if tensors.on_gpu(t):
        from ..launch import fp8_codes as launch

        codes = launch.column_codes(t, m_sizes, index, top_k, blocks=blocks, executor=executor)
        if codes is not None:
            return codes
    executor.unplanned()
    return fp8_codes.column_codes(t, m_sizes, index, top_k, blocks=blocks)


def takes_gradients(dout: torch.Tensor, x: torch.Tensor, h: torch.Tensor, E: int, I: int) -> bool:  # noqa: E741
    """True if ``both_codes`` and ``gradient_codes`` can run for a layer's backward; they have kernels only."""
    tensors_of = dout, x, h
    if not all(tensors.on_gpu(t) and t.dtype is torch.bfloat16 and t.is_contiguous() for t in tensors_of):
        return False
    from ..launch import fp8_codes as launch

    return launch.takes_gradients(E, x.shape[1], I, x.get_device()) and is_aligned(
        ALIGNMENT_BYTES, *(t.data_ptr() for t in tensors_of)
    )


def both_codes(
    t: torch.Tensor,
    m_sizes: torch.Tensor,
    index: torch.Tensor,
    top_k: int,
    *,
    blocks: bool,
    executor: EagerExecutor = EAGER,
) -> tuple[ColumnCodes, torch.Tensor]:
    """``column_codes`` of rows t[index // top_k], and their codes along K for ``products.of_made_codes``."""
    from ..launch import fp8_codes as launch

    both = launch.both_codes(t, m_sizes, index, top_k, blocks=blocks, executor=executor)
    if both is None:
        raise AssertionError("takes_gradients said that there is a kernel")
    return both


def gradient_codes(
    h: torch.Tensor,
    da: torch.Tensor,
    m_sizes: torch.Tensor,
    act: RowActivation,
    weights: torch.Tensor,
    index: torch.Tensor,
    *,
    writes_dweights: bool,
    blocks: bool,
    executor: EagerExecutor = EAGER,
) -> GradientCodes:
    """``activation.gradient`` of h [M, 2*I], gate before up, as codes; with ``blocks`` dh's share scales, else a's."""
    from ..launch import fp8_codes as launch

    results = launch.gradient_codes(
        h,
        da,
        m_sizes,
        (act.flags, act.function),
        weights,
        index,
        writes_dweights=writes_dweights,
        narrow=True,
        blocks=blocks,
        executor=executor,
    )
    if results is None:
        raise AssertionError("takes_gradients said that there is a kernel")
    return results


def dW_of_codes(
    dy: ColumnCodes,
    x: ColumnCodes,
    m_sizes: torch.Tensor,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    executor: EagerExecutor = EAGER,
) -> torch.Tensor:
    """Return dw [E, N, K] = dy8.T @ x8 of each expert's rows, summed in float32; zeros for an expert without rows.

    dy8 is the codes of [M, N], x8 the codes of [M, K] with ``blocks``, both with the same m_sizes [E]. The result is
    written to ``out``, or added to it with ``accumulate``: dense, bfloat16 or float32. Without ``out`` new memory of
    ``dtype`` is returned.
    """
    E, N, K = m_sizes.shape[0], dy.codes.shape[0], x.codes.shape[0]
    writes, dw = out is not None, executor.new(x.codes, (E, N, K), dtype, per=0) if out is None else out
    if writes or not x.M:
        executor.unplanned()
    if not x.M:
        return dw if accumulate else dw.zero_()
    if tensors.on_gpu(dw):
        from ..launch import fp8_codes as launch

        if launch.grad_weight(dy, x, m_sizes, dw, accumulate=accumulate, executor=executor):
            if writes:
                torch.autograd.graph.increment_version(dw)
            return dw
    executor.unplanned()
    fp8_codes.grad_weight(dy, x, m_sizes, dw, accumulate=accumulate)
    return dw


def quantise_weights(
    w: torch.Tensor, *, rows: bool = True, columns: bool = True, executor: EagerExecutor = EAGER
) -> tuple[ExpertWeights | None, ExpertWeights | None]:
    """Return prepared fp8_block weights of w [E, N, K] (``rows``) and of w.transpose(1, 2) (``columns``).

    N and K are multiples of 128, so both have the same scales, transposed. The scale of a block with NaN or infinity
    is NaN: its products are NaN. Nothing synchronises.
    """
    with torch.no_grad():
        if tensors.on_gpu(w):
            from ..launch import fp8_codes as launch

            both = launch.blocks(w, along_k=rows, along_n=columns, executor=executor)
            if both is not None:
                return both
        executor.unplanned()
        return (
            ExpertWeights("fp8_block", *fp8_codes.blocks(w)) if rows else None,
            ExpertWeights("fp8_block", *fp8_codes.blocks(w.transpose(1, 2))) if columns else None,
        )
