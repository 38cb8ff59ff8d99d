"""Make the inputs of a measurement: routing, weights, activations.

Weights are N(0, 0.05), activations N(0, 1), the rows sorted by expert.
"""

from __future__ import annotations

import torch

from ...artifacts.records import DType
from ...runtime.weights.expert_weights import ExpertWeights

SKEW = 0.3
MAX_ERROR = 1e-2


def routed_rows(
    E: int, top_k: int, T: int, seed: int = 0, device: str | torch.device = "cpu", skew: float = SKEW
) -> torch.Tensor:
    """Rows of each expert, int32 [E], for T tokens: skewed by rank (exponent ``skew``), some experts empty.

    With ``skew`` 0 every expert is equally likely, and none is left out.
    """
    g = torch.Generator().manual_seed(seed * 7919 + T * 31 + E)
    rank = (torch.randperm(E, generator=g) + 1).to(device)
    if torch.device(device).type != "cpu":
        g = torch.Generator(device).manual_seed(seed * 7919 + T * 31 + E)
    logits = torch.randn(T, E, generator=g, device=device) - skew * torch.log(rank.float())
    none = (E // 32 if E >= 32 else int(E >= 16)) if skew else 0
    if none:
        logits[:, rank > E - none] = -50.0
    chosen = logits.softmax(-1).topk(top_k, -1).indices
    return torch.bincount(chosen.flatten(), minlength=E).to(torch.int32)


def measured_routings(E: int, M: int, device: str | torch.device = "cpu") -> tuple[torch.Tensor, ...]:
    """Rows of each expert, int32 [E], M in all, for each of ``records.ROUTINGS`` in order.

    Both are random. Exactly even rows are a poor model of even routing: M and E are mostly powers of two, so each
    expert would have, say, 128 rows and fill a tile of 128, while in real routing half the experts need two tiles.
    """
    top_k = top_k_of(E, M)
    return tuple(routed_rows(E, top_k, M // top_k, seed, device, skew) for seed, skew in enumerate((SKEW, 0.0)))


def top_k_of(E: int, M: int) -> int:
    """A usual number of experts a token: 8, but at most E/4, and a divisor of M."""
    k = 8
    while k > 1 and (k * 4 > E or M % k):
        k //= 2
    return k


def weights(
    E: int, N: int, K: int, dtype: torch.dtype, device: str | torch.device = "cuda", into: torch.Tensor | None = None
) -> torch.Tensor:
    """w [E, N, K] ~ N(0, 0.05), made expert by expert: DeepSeek-V3's is 15 GB. ``into`` [>= E*N*K] holds it."""
    g = torch.Generator(device).manual_seed(1)
    flat = torch.empty(E * N * K, dtype=dtype, device=device) if into is None else into[: E * N * K]
    w = flat.view(E, N, K)
    for matrix in w:
        matrix.copy_(torch.randn(N, K, generator=g, device=device) * 0.05)
    return w


def quantised_weights(
    E: int, N: int, K: int, dtype: DType, device: str | torch.device = "cuda", *, prepared: bool = True
) -> ExpertWeights:
    """Weights of a quantised format with equally likely codes, about 0.05 wide, prepared or not."""
    g = torch.Generator(device).manual_seed(1)

    def drawn(*shape: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=g)

    scale = dtype.precision.w.scale
    if scale is None:
        raise AssertionError(f"{dtype.value} has no scale")
    eight = dtype.precision.w.bits == 8
    codes = torch.empty(E, N, K if eight else K // 2, dtype=torch.uint8, device=device)
    for matrix_codes in codes:
        if eight:  # every code except the two NaNs
            matrix_codes.copy_(drawn(N, K, low=0, high=127) | drawn(N, K, low=0, high=2) << 7)
        else:
            matrix_codes.copy_(drawn(N, K // 2, low=0, high=256))
    blocks = (E, -(-N // scale.rows), -(-K // scale.columns)) if scale.columns else (E, N)
    if dtype is DType.MXFP8:
        experts_w = ExpertWeights.mxfp8(codes.view(torch.float8_e4m3fn), drawn(*blocks, low=114, high=117))
    elif eight:
        scales = torch.rand(blocks, generator=g, device=device) * 5e-4 + 2e-4
        make = ExpertWeights.fp8_block if scale.columns else ExpertWeights.fp8_channel
        experts_w = make(codes.view(torch.float8_e4m3fn), scales, quantize_x=False)
    elif dtype is DType.MXFP4:
        experts_w = ExpertWeights.mxfp4(codes, drawn(*blocks, low=119, high=124))
    elif dtype is DType.NVFP4:
        outer = torch.full((E,), 5e-3, device=device)
        experts_w = ExpertWeights.nvfp4(codes, drawn(*blocks, low=0x30, high=0x50).view(torch.float8_e4m3fn), outer)
    else:
        scales = (torch.rand(blocks, generator=g, device=device) * 1e-2 + 5e-3).to(torch.bfloat16)
        zero = drawn(*blocks, low=6, high=11) if scale.zero_bits else None
        experts_w = ExpertWeights(dtype.value, codes, scales, zero)
    return experts_w.prepare() if prepared else experts_w


def activations(M: int, K: int, dtype: torch.dtype, device: str | torch.device = "cuda") -> torch.Tensor:
    """x [M, K] ~ N(0, 1)."""
    return torch.randn(M, K, generator=torch.Generator(device).manual_seed(2), device=device).to(dtype)
