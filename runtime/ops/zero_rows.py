"""Zero the rows of a result that no kernel stored to, by a bundle's kernel; torch zeroes the whole result instead."""

from __future__ import annotations

import torch

from ...artifacts.records import DType, RowOp
from ...kernels.entry import ALIGNMENT_BYTES, is_aligned
from ...kernels.rowops import CLEARED_ROWS, NAMES
from ..driver.device import current_stream, on
from ..launch import rowops

_WORD_BYTES = 4
_MOST_ROWS = 2**30  # the kernel counts in int32
# Finding the unnamed rows takes as long as clearing so many bytes (9.4 us on an H200, Mixtral at 1024 tokens
# in benchmarks/results/passes-h200.json).
LEAST_BYTES = 16 << 20


def clear(y: torch.Tensor, index: torch.Tensor, m_sizes: torch.Tensor, index_end: int | None = None) -> torch.Tensor:
    """y[r] = 0, on a GPU, for each r that is no index[i] with i < M and i < sum(m_sizes), index[i] in [0, index_end).

    ``index`` [M] int32 or int64; without ``index_end`` each row of y has its index. All rows become zero if the
    result is small, or if no kernel can clear it.
    """
    (rows, columns), M = y.shape, index.shape[0]
    index_end = rows if index_end is None else index_end
    row_bytes = columns * y.element_size()
    dense = y.is_contiguous() and index.is_contiguous() and m_sizes.is_contiguous()
    few = rows * row_bytes < LEAST_BYTES or not (M and index_end and m_sizes.numel())
    if few or not dense or max(rows, M) > _MOST_ROWS:
        return y.zero_()
    device, aligned = y.get_device(), is_aligned(ALIGNMENT_BYTES, row_bytes, y.data_ptr())
    launch = rowops.launcher(RowOp.CLEAR, DType.FP32, device, aligned=True) if aligned else None
    if launch is None or launch.most_experts < m_sizes.shape[0]:
        return y.zero_()
    with on(device):
        named = torch.zeros(rows, dtype=torch.int8, device=y.device)
        words = {
            "y": y.data_ptr(),
            "index": index.data_ptr(),
            "m_sizes": m_sizes.data_ptr(),
            "named": named.data_ptr(),
            "M": M,
            "rows": rows,
            "columns": row_bytes // _WORD_BYTES,
            "E": m_sizes.shape[0],
            "index_end": index_end,
            "m_sizes_step": 2 if m_sizes.dtype is torch.int64 else 1,
            "index_step": 2 if index.dtype is torch.int64 else 1,
        }
        stream = current_stream(device)
        launch(-(-M // launch.block), stream, words | {"flags": NAMES})
        launch(-(-rows // CLEARED_ROWS), stream, words | {"flags": 0})
    return y


def clear_tail(y: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """y[r] = 0, on a GPU, for each row r from ``used``, an int32 [1], on. y is dense."""
    rows, columns = y.shape
    row_bytes, device = columns * y.element_size(), y.get_device()
    there = torch.arange(rows, dtype=torch.int32, device=y.device) < used  # bool takes one byte a row
    aligned = rows <= _MOST_ROWS and y.is_contiguous() and is_aligned(ALIGNMENT_BYTES, row_bytes, y.data_ptr())
    launch = rowops.launcher(RowOp.CLEAR, DType.FP32, device, aligned=True) if aligned else None
    if launch is None:
        return y.masked_fill_(~there[:, None], 0)
    words = {
        "y": y.data_ptr(),
        "index": there.data_ptr(),
        "m_sizes": used.data_ptr(),
        "named": there.data_ptr(),
        "M": rows,
        "rows": rows,
        "columns": row_bytes // _WORD_BYTES,
        "E": 1,
        "index_end": rows,
        "m_sizes_step": 1,
        "index_step": 1,
        "flags": 0,
    }
    launch(-(-rows // CLEARED_ROWS), current_stream(device), words)
    return y
