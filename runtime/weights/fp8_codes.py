"""Codes of fp8 training in torch: rows quantised along M, dW of such codes, weights quantised both ways.

dw[e, n, k] = sum over the rows m of e of dy[m, n] * x[m, k]. Tensor cores multiply e4m3 codes whose reduction is
contiguous, so both operands are stored transposed: ``ColumnCodes``. Kernels write the same bits
(kernels/rowops/quantize_columns.py, quantize_blocks.py), and the same sums (kernels/hopper_w8a8_block/weight.py).
"""

from __future__ import annotations

import torch

from ...artifacts.tuples import NamedTuple
from ...kernels.hopper_w8a8_block import GROUP, places_for
from .codes import E4M3_MOST
from .prepared_layout import BLOCK, ORDERS

_LEAST = 2.0**-126  # least scale: a smaller one's inverse is infinite
_FORMAT = "fp8_block"


class ColumnCodes(NamedTuple):
    """Rows t [M, C] of experts: t[m, c] = codes[c, p(m)] * scale[p(m) // 128, c], or scale[.., c // 128].

    Each expert's rows begin at a multiple of 128 of P, in their order; p(m) is the place of row m. The last group of
    an expert is filled with zeros. After the last group, codes and scales may hold anything.

    Parameters
    ----------
    codes
        [C, P] float8_e4m3fn, P of ``places_for``.
    scale
        [P / 128, C], or with a scale for 128 columns [P / 128, C / 128], float32: max |t| / 448, at least 2^-126; 1 of
        zeros. NaN counts as 0.
    M
        Rows of t, of which sum(m_sizes) belong to experts.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    M: int


def column_codes(
    t: torch.Tensor, m_sizes: torch.Tensor, index: torch.Tensor | None = None, top_k: int = 1, *, blocks: bool = False
) -> ColumnCodes:
    """Quantise sorted rows t [M, C] along M; with ``index`` [M] the rows t[index // top_k].

    m_sizes [E] int32 or int64 are the rows of each expert; rows past their sum are not read. C is a multiple of 128.
    With ``blocks`` 128 columns share a scale.
    """
    M, E, C = t.shape[0] if index is None else index.shape[0], m_sizes.shape[0], t.shape[1]
    P, (place, _) = places_for(M, E), _places(m_sizes, M)
    rows = t if index is None else t.index_select(0, (index.long() // top_k).clamp(0, max(0, t.shape[0] - 1)))
    # Row P takes the rows of no expert.
    padded = torch.zeros((P + 1, C), dtype=torch.float32, device=t.device)
    padded.index_copy_(0, torch.where(place < 0, P, place), rows.float())
    groups = padded[:P].view(P // GROUP, GROUP, C // GROUP, GROUP)
    size = torch.where(groups == groups, groups.abs(), 0)
    factor = size.amax((1, 3) if blocks else 1) * torch.tensor(1 / E4M3_MOST, dtype=torch.float32, device=t.device)
    factor = torch.where(factor > 0, factor.clamp(min=_LEAST), 1)
    inverse = factor.reciprocal().view(P // GROUP, 1, C // GROUP, 1 if blocks else GROUP)
    codes = (groups * inverse).clamp_(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).view(P, C)
    across = codes.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)
    return ColumnCodes(across, factor.view(P // GROUP, C // GROUP if blocks else C), M)


def grad_weight(
    dy: ColumnCodes, x: ColumnCodes, m_sizes: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False
) -> None:
    """Write dy8.T @ x8 of each expert's rows to ``out`` [E, N, K], or add it; zeros of an expert without rows.

    dy is of [M, N] and x of [M, K], with a scale for 128 columns, of the same m_sizes [E]. Each product is summed in
    float32 and rounded once.
    """
    _, (first, counts) = _places(m_sizes, x.M)
    left, right = values(dy), values(x)
    for e, (begin, rows) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        dw = left[:, begin : begin + rows] @ right[:, begin : begin + rows].T
        out[e] = out[e].float() + dw if accumulate else dw


def blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prepared codes and scales of w [E, N, K] in the format fp8_block; N and K are multiples of 128.

    A block with NaN or infinity has the scale NaN, and zeros as codes.
    """
    E, N, K = w.shape
    scale, order = _scale_of_blocks(w), ORDERS[_FORMAT]
    codes = torch.empty((E, N // BLOCK, K // BLOCK, BLOCK, 4, 4), dtype=torch.int32, device=w.device)
    for e in range(E):
        factor = scale[e].repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        numbers = (w[e].float() * factor.reciprocal()).masked_fill_(factor.isnan(), 0)
        codes[e] = order.prepared(numbers.clamp_(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn))
    return codes, scale


def _scale_of_blocks(w: torch.Tensor) -> torch.Tensor:
    """[E, N / 128, K / 128] float32: max |w| / 448 of a block, as ``codes.quantise``; NaN of one that is not finite."""
    E, N, K = w.shape
    parts = w.reshape(E, N // GROUP, GROUP, K // GROUP, GROUP)
    most = parts.abs().amax((2, 4)).float()
    factor = most / most.new_full((), E4M3_MOST)
    factor = torch.where(factor > 0, factor.clamp(min=_LEAST), 1)
    return torch.where(most < torch.inf, factor, torch.nan)


def _places(m_sizes: torch.Tensor, M: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The place of each of M rows, [M] int64, -1 for rows of no expert; each expert's first place and row count."""
    ends = m_sizes.detach().long().clamp(0, M).cumsum(0).clamp(max=M)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts = ends - starts
    groups = (counts + GROUP - 1) // GROUP
    first = (groups.cumsum(0) - groups) * GROUP
    row = torch.arange(M, device=m_sizes.device)
    expert = torch.searchsorted(ends, row, right=True)
    safe = expert.clamp(max=max(0, m_sizes.shape[0] - 1))
    place = first[safe] + row - starts[safe] if m_sizes.shape[0] else row
    return torch.where(expert < m_sizes.shape[0], place, -1), (first, counts)


def places(m_sizes: torch.Tensor, M: int) -> torch.Tensor:
    """The place p(m) of each of M rows in codes along M, [M] int64; -1 for rows of no expert."""
    return _places(m_sizes, M)[0]


def values(codes: ColumnCodes) -> torch.Tensor:
    """The numbers of codes, [C, P] float32."""
    C, groups = codes.codes.shape[0], codes.scale.shape[1]
    factor = codes.scale.T.repeat_interleave(C // max(1, groups), 0)
    return codes.codes.float() * factor.repeat_interleave(GROUP, 1)
