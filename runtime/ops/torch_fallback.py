"""The products in torch, fused ones taken apart: what runs on CUDA where no bundle has a kernel."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable

import torch

from ...artifacts.errors import ProblemNotInBundle
from ...artifacts.records import Layout
from ...kernels import reference
from ..driver import cuda
from ..launch.product_kernels import grouped_mm
from ..weights.dequantised import Dequantised
from . import zero_rows

_log = logging.getLogger(__name__)


@functools.cache
def tell_reference(device: str) -> None:
    """Log once that a device is no CUDA GPU, where the reference runs as intended."""
    _log.debug("pretuned: tensors on %s: the torch reference runs", device)


def ends_of(m_sizes: torch.Tensor, M: int) -> torch.Tensor:
    """The end row of each expert, int32 [E]: ascending and in [0, M] for any m_sizes. Takes three launches."""
    narrow = m_sizes.shape[0] * M < 1 << 31
    ends = m_sizes.clamp(0, M).cumsum(0, dtype=torch.int32 if narrow else torch.int64)
    return ends.clamp_(max=M).to(torch.int32)


def into_new(
    x: torch.Tensor,
    w: torch.Tensor,
    m_sizes: torch.Tensor,
    *,
    grouped: Callable[..., torch.Tensor],
    layout: Layout,
    zero_tail: bool,
) -> torch.Tensor:
    """y [M, N] by ``grouped``, torch's ``grouped_mm``, of aligned tensors.

    Rows past the sum of m_sizes are zero with ``zero_tail``, else they hold anything.
    """
    ends = ends_of(m_sizes, x.shape[0])
    # In a capture, a first call loads torch's kernel.
    loads = cuda.relaxed(x.get_device()) if torch.cuda.is_current_stream_capturing() else contextlib.nullcontext()
    with loads:
        y = _product(grouped, x, w, ends, layout)
    return zero_rows.clear_tail(y, ends[-1:]) if zero_tail else y


def _product(
    grouped: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, layout: Layout
) -> torch.Tensor:
    M, K = x.shape
    x = x.as_strided((M, K), (x.stride(0) if M > 1 else K, 1))  # torch checks the stride even of a single row
    return grouped(x, w.transpose(1, 2) if layout is Layout.NK else w, offs=ends)


def on_cuda(
    x: torch.Tensor,
    w: torch.Tensor | Dequantised,
    m_sizes: torch.Tensor,
    y: torch.Tensor,
    layout: Layout,
    *,
    sm: int,
    aligned: bool,
) -> None:
    """Write y[g] = x[g] @ w[g].T to y [M, N] by torch; rows past the sum of m_sizes stay.

    By torch's grouped_mm, if it needs no synchronisation (bf16 on capabilities 9.x and 10.x); else by a loop over
    experts, which reads m_sizes on the host.

    Raises
    ------
    ProblemNotInBundle
        in a graph capture, where the loop can't read m_sizes.
    """
    grouped = grouped_mm(x.dtype, sm, len(w))
    if grouped is not None and aligned and isinstance(w, torch.Tensor):
        ends = ends_of(m_sizes, x.shape[0])
        written = torch.arange(x.shape[0], device=x.device) < ends[-1]
        torch.where(written[:, None], _product(grouped, x, w, ends, layout), y, out=y)
        return
    if torch.cuda.is_current_stream_capturing():
        raise ProblemNotInBundle(
            f"no bundle has a kernel for x {tuple(x.shape)} {x.dtype}, {len(w)} experts, and torch's loop over the "
            "experts has to read m_sizes on the host, which a CUDA graph capture forbids. Call it once before "
            "the capture (it tests a kernel that was never run on this GPU's capability); else build a bundle with "
            "`aot build` (pretuned.runtime.explain(x, w, m_sizes) prints the line), or capture without this call"
        )
    for g, (start, end) in enumerate(reference.expert_bounds(m_sizes, x.shape[0])):
        if end > start:
            torch.mm(x[start:end], w[g].T if layout is Layout.NK else w[g], out=y[start:end])


def store(
    product: torch.Tensor,
    y: torch.Tensor,
    m_sizes: torch.Tensor,
    *,
    index: torch.Tensor | None,
    index_end: int,
    scatter: bool,
    row_weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    gathered: bool = False,
) -> None:
    """y[to(m)] = weight(m) * (product[m] + bias[expert of m]), as ``reference.rows`` does; other rows of y stay.

    ``gathered``: x was gathered by ``index``, so a row whose index is out of range has no product.
    """
    M = product.shape[0]
    if bias is not None:
        expert = reference.expert_of_rows(m_sizes, M).clamp_(max=bias.shape[0] - 1)
        product = product + bias[expert]
    if row_weights is not None and index is not None:
        product = product * row_weights[reference.rows_of(index, index_end)][:, None]
    product = product.to(y.dtype)
    used = index if scatter or row_weights is not None or gathered else None
    part = reference.taking_part(m_sizes, used, index_end, M)
    if scatter and index is not None:
        # An extra row takes the rows without a place, so the host need not read the mask.
        target = torch.where(part, index.long(), y.shape[0])
        grown = torch.cat([y, y.new_empty((1, y.shape[1]))])
        y.copy_(grown.index_copy_(0, target, product)[:-1])
        return
    torch.where(part[:, None], product, y, out=y)


def weight(dy: torch.Tensor, x: torch.Tensor, m_sizes: torch.Tensor, *, sm: int) -> torch.Tensor:
    """dw[g] = dy[rows of g].T @ x[rows of g], [E, N, K]; an expert without rows gets zeros.

    Raises
    ------
    ProblemNotInBundle
        in a graph capture, where torch has to read m_sizes on the host.
    """
    M, N, K = x.shape[0], dy.shape[1], x.shape[1]
    grouped = grouped_mm(x.dtype, sm, m_sizes.shape[0])
    dy, x = dy.contiguous(), x.contiguous()
    if grouped is not None and N % 8 == 0 and K % 8 == 0 and (dy.data_ptr() | x.data_ptr()) % 16 == 0:
        counts = m_sizes.long().clamp(0, M)
        ends = counts.cumsum(0).clamp_(max=M)
        product: torch.Tensor = grouped(dy.t(), x, offs=ends.to(torch.int32))
        rows_here = ends - torch.cat([ends.new_zeros(1), ends[:-1]])
        return product.masked_fill_((rows_here == 0)[:, None, None], 0)
    if torch.cuda.is_current_stream_capturing():
        raise ProblemNotInBundle(
            f"no bundle has a dW kernel for dy {tuple(dy.shape)}, x {tuple(x.shape)} {x.dtype}, and torch's loop over "
            "the experts has to read m_sizes on the host, which a CUDA graph capture forbids. Call it once before "
            "the capture (it tests a kernel that was never run on this GPU's capability); else build a bundle with "
            "`aot build` (forward, dX and dW), or capture without this call"
        )
    dw = x.new_zeros((m_sizes.shape[0], N, K))
    for g, (start, end) in enumerate(reference.expert_bounds(m_sizes, M)):
        if end > start:
            torch.mm(dy[start:end].t(), x[start:end], out=dw[g])
    return dw
