"""The fused products taken apart, in torch on CUDA: what runs where no bundle has a kernel."""

from __future__ import annotations

import torch

from ..artifacts.errors import ProblemNotInBundle
from ..kernels import reference
from .fallback import grouped_mm


def store(
    product: torch.Tensor, y: torch.Tensor, m_sizes: torch.Tensor, *, index: torch.Tensor | None, index_end: int,
    scatter: bool, row_weights: torch.Tensor | None, bias: torch.Tensor | None, gathered: bool = False,
) -> None:  # fmt: skip
    """y[to(m)] = weight(m) * (product[m] + bias[expert of m]), as ``reference.rows`` does; other rows of y stay.

    ``gathered``: the product's rows were found by ``index``, so one out of range has none.
    """
    M = product.shape[0]
    if bias is not None:
        expert = reference.expert_of_rows(m_sizes, M).clamp_(max=bias.shape[0] - 1)
        product = product + bias[expert]
    if row_weights is not None and index is not None:
        product = (product * row_weights[reference.rows_of(index, index_end)][:, None]).to(y.dtype)
    used = index if scatter or row_weights is not None or gathered else None
    part = reference.taking_part(m_sizes, used, index_end, M)
    if scatter and index is not None:
        # One row more takes those that have no place: no look at the mask from the host.
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
            "the experts has to read m_sizes on the host, which a CUDA graph capture forbids. Build a bundle with "
            "`aot build` (forward, dX and dW), or capture without this call"
        )
    dw = x.new_zeros((m_sizes.shape[0], N, K))
    for g, (start, end) in enumerate(reference.expert_bounds(m_sizes, M)):
        if end > start:
            torch.mm(dy[start:end].t(), x[start:end], out=dw[g])
    return dw
