"""dW of a backward in fp8: of codes along M, quantised and gathered by one row kernel, if that beats bf16."""

from __future__ import annotations

from functools import partial

import torch

from ...artifacts.records import Layout
from ...artifacts.tuples import NamedTuple
from ..launch.program import EAGER, EagerExecutor
from . import gather_combine
from .fp8_codes import column_codes, dW_of_codes
from .products import weight

# Least N K / (N + K) for codes: making codes costs M (N + K), and they save M N K. dW with its row kernels against bf16
# with gathers on an H200, 32,768 tokens: Qwen3-30B 1.07x at 560 and 1.13x at 880, DeepSeek-V3 1.27x at 1,590.
LEAST = 500


class Picked(NamedTuple):
    """Sorted rows [M, C]; with ``index`` [M] rows[index // top_k]. ``bounds``: see ``gather_combine.gather``."""

    rows: torch.Tensor
    index: torch.Tensor | None = None  # type: ignore[assignment]  # (no search in a tuple)
    top_k: int = 1
    bounds: torch.Tensor | None = None

    def gathered(self, executor: EagerExecutor = EAGER) -> torch.Tensor:
        """Return the sorted rows in new memory."""
        rows, index = self.rows, self.index
        return rows if index is None else gather_combine.gather(rows, index, self.top_k, self.bounds, executor)


def multiplies_codes(N: int, K: int) -> bool:
    """True if dW of [N, K] is computed from codes."""
    return N * K >= LEAST * (N + K)


def grad_weight(
    dy: Picked,
    x: Picked,
    m_sizes: torch.Tensor,
    layout: Layout,
    dtype: torch.dtype,
    bucket: int | None = None,
    executor: EagerExecutor = EAGER,
) -> torch.Tensor:
    """dw[e] = q(dy).T @ q(x) of expert e's rows: [E, N, K], or [E, K, N] with ``Layout.KN``; zeros without rows.

    q(t) are t's e4m3 codes times their scales: for 128 rows and a column of the operand of dw's first dimension, for
    128 rows and 128 columns of the other. For small N and K q(t) is t. Sums are fp32.
    """
    N, K = dy.rows.shape[1], x.rows.shape[1]
    if not multiplies_codes(N, K):
        dw = weight(
            dy.gathered(executor), x.gathered(executor), m_sizes, layout=layout, bucket=bucket, executor=executor
        )
        return dw if dw.dtype is dtype else executor.call(partial(torch.Tensor.to, dtype=dtype), dw)
    if layout is Layout.KN:  # dw[e].T: the operands change places
        dy, x = x, dy
    left = column_codes(dy.rows.contiguous(), m_sizes, dy.index, dy.top_k, executor=executor)
    right = column_codes(x.rows.contiguous(), m_sizes, x.index, x.top_k, blocks=True, executor=executor)
    return dW_of_codes(left, right, m_sizes, dtype=dtype, executor=executor)
