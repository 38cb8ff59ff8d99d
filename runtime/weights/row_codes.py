"""Rows of x as a product that quantises x reads them: what ``RowOp.QUANTIZE`` writes, in torch, and back."""

from __future__ import annotations

import torch

from ...artifacts.records.precision import DType
from ...kernels.codes import BLOCK
from ...kernels.contract.block_scaled import GROUP, scale_columns
from .codes import E4M3_MOST, quantise_rows
from .order import K_ORDER

_CHUNK_ELEMENTS = 1 << 26


def codes_of_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] as ``RowOp.QUANTIZE`` writes it (kernels/rowops/quantize.py): e4m3 [M, K], and fp32 [K / 128, M]."""
    M, K = x.shape
    scale = torch.zeros(K // GROUP, scale_columns(M), dtype=torch.float32, device=x.device)
    codes = torch.empty(M, K // BLOCK, BLOCK, dtype=torch.uint8, device=x.device)
    order = torch.tensor(K_ORDER, device=x.device)
    step = max(1, _CHUNK_ELEMENTS // K)
    for first in range(0, M, step):
        groups = x[first : first + step].float().view(-1, K // GROUP, GROUP)
        factor = groups.abs().amax(2) / E4M3_MOST
        factor = torch.where(factor > 0, factor, 1)
        scale[:, first : first + len(factor)] = factor.T
        bits = (groups / factor[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
        codes[first : first + step] = bits.view(-1, K // BLOCK, BLOCK)[..., order]
    return codes.view(M, K).view(torch.float8_e4m3fn), scale


def values_of_rows(codes: torch.Tensor, scale: torch.Tensor, here: slice) -> torch.Tensor:
    """The rows that ``codes_of_rows`` has made codes of, float32."""
    rows = codes[here]
    bits = rows.view(torch.uint8).view(len(rows), -1, BLOCK)
    natural = torch.empty_like(bits)
    natural[..., torch.tensor(K_ORDER, device=bits.device)] = bits
    groups = natural.view(torch.float8_e4m3fn).float().view(len(rows), -1, GROUP)
    return (groups * scale[:, here].T[..., None]).view(rows.shape)


def values_on_load(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Rows [M, K] as a product of a dtype reads them that takes them as they are, and may quantise them; float32."""
    scale = dtype.precision.x.scale
    return x.float() if scale is None else quantise_rows(x, scale)
