"""Quantise rows of x in torch to the memory layout of ``RowOp.QUANTIZE``, and dequantise them."""

from __future__ import annotations

import torch

from ...artifacts.records import DType, Scale
from ...kernels.codes import BLOCK
from ...kernels.hopper_w8a8_block import scale_columns
from .codes import E4M3_MOST, quantise_rows
from .prepared_layout import K_ORDER

_CHUNK_ELEMENTS = 1 << 26


def codes_of_rows(x: torch.Tensor, scale: Scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [M, K] like the row kernels: e4m3 codes [M, K], and their scales in fp32.

    With a ``scale`` for 128 columns the scales are [K / 128, M], M padded to fours (kernels/rowops/quantize.py); with
    a scale for all columns [M] (kernels/rowops/quantize_rows.py).
    """
    M, K = x.shape
    group = scale.columns or K
    scales = torch.zeros(K // group, scale_columns(M), dtype=torch.float32, device=x.device)
    codes = torch.empty(M, K // BLOCK, BLOCK, dtype=torch.uint8, device=x.device)
    order = torch.tensor(K_ORDER, dtype=torch.int64, device=x.device)
    step = max(1, _CHUNK_ELEMENTS // K)
    for first in range(0, M, step):
        groups = x[first : first + step].float().view(-1, K // group, group)
        factor = groups.abs().amax(2) / E4M3_MOST
        factor = torch.where(factor > 0, factor, 1)
        scales[:, first : first + len(factor)] = factor.T
        bits = (groups / factor[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
        codes[first : first + step] = bits.view(-1, K // BLOCK, BLOCK)[..., order]
    return codes.view(M, K).view(torch.float8_e4m3fn), scales if scale.columns else scales[0, :M].clone()


def values_of_rows(codes: torch.Tensor, scales: torch.Tensor, here: slice) -> torch.Tensor:
    """Dequantise the codes of ``codes_of_rows`` to float32."""
    rows = codes[here]
    bits = rows.view(torch.uint8).view(len(rows), -1, BLOCK)
    natural = torch.empty_like(bits)
    natural[..., torch.tensor(K_ORDER, dtype=torch.int64, device=bits.device)] = bits
    groups = natural.view(torch.float8_e4m3fn).float().view(len(rows), scales.shape[0] if scales.dim() == 2 else 1, -1)
    factor = scales[:, here].T if scales.dim() == 2 else scales[here][:, None]
    return (groups * factor[..., None]).view(rows.shape)


def values_on_load(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Rows [M, K] in float32 as a kernel of a dtype sees them, if it takes plain rows and may quantise them on load."""
    scale = dtype.precision.x.scale
    return x.float() if scale is None else quantise_rows(x, scale)
