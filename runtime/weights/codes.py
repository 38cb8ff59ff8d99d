"""Converts codes and scales, e4m3, e2m1, int4 and e8m0, to float32 and back: of one matrix, or of several stacked.

Sources: OCP Microscaling Formats 1.0 for e2m1, e8m0, mxfp4 and mxfp8; e4m3 is torch.float8_e4m3fn.
"""

from __future__ import annotations

import torch

from ...artifacts.records import PRECISIONS, Elements, Scale
from ...artifacts.tuples import NamedTuple

E4M3_MOST, E2M1_MOST = 448.0, 6.0
E8M0: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)  # torch 2.7 and later
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MOST_LOG2 = {"e2m1": 2, "e4m3": 8}  # floor(log2(largest number)): 6 and 448
_INT4_ZERO = 8  # without zero points
_RULES = {("int4", "bf16"), ("e4m3", "e8m0"), ("e2m1", "e8m0"), ("e4m3", "fp32"), ("e2m1", "e4m3")}  # of ``quantise``
_LEAST = 2.0**-126  # least scale: a smaller one's inverse is infinite


class Quantised(NamedTuple):
    """Codes and what belongs to them, in the dtypes and shapes of ``ExpertWeights``, E in front or not."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """The nibbles of bytes, the low one first: [..., n] uint8 to [..., 2n]."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def pack(nibbles: torch.Tensor) -> torch.Tensor:
    """``unpack`` undone: [..., 2n] uint8 below 16 to [..., n]."""
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def cat(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """torch.cat; float8 as bytes, because some versions of torch can't concatenate it."""
    if parts[0].dtype is not torch.float8_e4m3fn:
        return torch.cat(parts, dim)
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(torch.float8_e4m3fn)


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    """2**(code - 127) of uint8 codes, in float32; 255 is NaN."""
    bits = scale.to(torch.int32)
    value = torch.where(bits > 0, bits << 23, 1 << 22)  # 2**-127 is subnormal
    return value.view(torch.float32).masked_fill(bits == 255, float("nan"))


def values(format: str, matrix: Quantised) -> torch.Tensor:
    """(code - zero) * (scale * global_scale) of one matrix, [N, K] in float32: each operation is rounded to it."""
    elements = PRECISIONS[format].w
    scale = elements.scale
    if scale is None:
        raise AssertionError(f"{format} has no scale")
    numbers = _numbers(elements, matrix)
    factor = e8m0(matrix.scale) if scale.name == "e8m0" else matrix.scale.float()
    if matrix.global_scale is not None:
        factor = factor * matrix.global_scale
    return numbers.mul_(spread(factor, scale, *numbers.shape[-2:]))


def _numbers(elements: Elements, matrix: Quantised) -> torch.Tensor:
    """The numbers of codes before they are scaled, in float32."""
    codes, zero = matrix.codes, matrix.zero
    if elements.bits == 8:
        return codes.float()
    if elements.name == "e2m1":
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=codes.device)
        pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), 1)  # the two numbers of each byte
        return torch.nn.functional.embedding(codes.int(), pairs).flatten(-2)
    numbers = unpack(codes).float()
    if zero is None or elements.scale is None:
        return numbers.sub_(_INT4_ZERO)
    return numbers.sub_(spread(zero.float(), elements.scale, *numbers.shape[-2:]))


def spread(factor: torch.Tensor, scale: Scale, N: int, K: int) -> torch.Tensor:
    """A scale for each of [N, K] elements, or a tensor that broadcasts to this."""
    if not scale.columns:  # a scale for each row
        return factor[..., None]
    wide = factor.repeat_interleave(scale.columns, -1)[..., :K]
    return wide if scale.rows == 1 else wide.repeat_interleave(scale.rows, -2)[..., :N, :]


def quantise(format: str, w: torch.Tensor, scale_dtype: torch.dtype = torch.bfloat16) -> Quantised:
    """The codes nearest to one matrix w [N, K], with the scales that use a format's whole range.

    int4's scales are numbers that bf16 has, in ``scale_dtype``.

    A scale of e8m0 is 2**(floor(log2(m)) - e) of a block whose largest magnitude is m, e being 2 for e2m1 and 8 for
    e4m3; codes saturate (OCP Microscaling Formats 1.0, 6.3). Other scales are a quotient in float32, and w is
    multiplied by their inverse, rounded to float32: kernels/rowops/weights.py does so bit for bit.

    Raises
    ------
    NotImplementedError
        for a format whose elements and scales have no such rule.
    """
    elements, w = PRECISIONS[format].w, w.float()
    scale = elements.scale
    if scale is None or (elements.name, scale.name) not in _RULES:
        raise NotImplementedError(f"no rule quantises to {format}: {elements.name} with scales {scale}")
    low, high = _bounds(w, scale)
    most = torch.maximum(high, -low).abs()  # 0 for zeros, not -0: nvfp4's kernels read no sign
    if elements.name == "int4":
        return _int4(w, scale, low, high, scale_dtype)
    if scale.name == "e8m0":
        exponent = torch.frexp(most).exponent - 1 - _MOST_LOG2[elements.name]
        code = torch.where(most > 0, exponent + 127, 127).clamp(0, 254).to(torch.uint8)
        inverse = spread(e8m0(254 - code), scale, *w.shape)
        return Quantised(_e4m3(w * inverse) if elements.name == "e4m3" else _e2m1(w, inverse), code)
    if elements.name == "e4m3":
        factor = invertible(quotient(most, E4M3_MOST))
        return Quantised(_e4m3(w * spread(factor.reciprocal(), scale, *w.shape)), factor)
    outer = invertible(quotient(most.amax(), E4M3_MOST * E2M1_MOST))
    inner = (quotient(most, E2M1_MOST) / outer).clamp(max=E4M3_MOST).to(torch.float8_e4m3fn)
    factor = inner.float() * outer
    inverse = torch.where(factor > 0, factor.clamp(min=_LEAST).reciprocal(), 0)
    return Quantised(_e2m1(w, spread(inverse, scale, *w.shape)), inner, None, outer)


def quantise_rows(x: torch.Tensor, scale: Scale) -> torch.Tensor:
    """x [M, K] as an fp8 product reads it: quantised to e4m3, times the scale again, in float32.

    The scale of each row and ``scale.columns`` of K is their largest magnitude / 448, as in DeepSeek-V3.
    """
    x = x.float()
    low, high = _bounds(x, scale)
    factor = spread(_usable(torch.maximum(high, -low) / E4M3_MOST), scale, *x.shape)
    return _e4m3(x / factor).float().mul_(factor)


def _bounds(w: torch.Tensor, scale: Scale) -> tuple[torch.Tensor, torch.Tensor]:
    """The least element of each block, or 0, and the largest, or 0."""
    N, K = w.shape
    if not scale.columns:
        w = torch.nn.functional.pad(w, (0, 1))
        return w.amin(1), w.amax(1)
    w = torch.nn.functional.pad(w, (0, -K % scale.columns, 0, -N % scale.rows))
    blocks = w.view(w.shape[0] // scale.rows, scale.rows, w.shape[1] // scale.columns, scale.columns)
    return blocks.amin((1, 3)).clamp_(max=0), blocks.amax((1, 3)).clamp_(min=0)


def _usable(factor: torch.Tensor) -> torch.Tensor:
    """Return the scale, or 1 for a block of zeros."""
    return torch.where(factor > 0, factor, 1)


def quotient(numbers: torch.Tensor, by: float) -> torch.Tensor:
    """numbers / by, rounded once. (On a GPU torch divides by a Python number as a product with its inverse.)"""
    return numbers / numbers.new_full((), by)


def invertible(factor: torch.Tensor) -> torch.Tensor:
    """The scale, large enough for its inverse to be finite, or 1 for a block of zeros."""
    return torch.where(factor > 0, factor.clamp(min=_LEAST), 1)


def _e4m3(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp_(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn)


def _e2m1(w: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Packed codes nearest to w * inverse; on a tie the even code; numbers past 6 become 6."""
    size = (w * inverse).abs().clamp_(max=E2M1_MOST)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    nearest = torch.round(size / step).mul_(step).contiguous()
    code = torch.bucketize(nearest, torch.tensor(_E2M1, dtype=torch.float32, device=w.device), out_int32=True)
    return pack((code | (w.signbit().int() << 3)).to(torch.uint8))


def _int4(w: torch.Tensor, scale: Scale, low: torch.Tensor, high: torch.Tensor, scale_dtype: torch.dtype) -> Quantised:
    factor = quotient(high - low, 15) if scale.zero_bits else torch.maximum(quotient(high, 7), low * (-1 / 8))
    factor = invertible(factor.to(torch.bfloat16).to(scale_dtype))
    inverse = factor.float().reciprocal()
    zero = torch.round(-low * inverse).clamp_(0, 15) if scale.zero_bits else torch.full_like(low, _INT4_ZERO)
    shift, each = (spread(block, scale, *w.shape) for block in (zero, inverse))
    code = (torch.round(w * each) + shift).clamp_(0, 15).to(torch.uint8)
    return Quantised(pack(code), factor, zero.to(torch.uint8) if scale.zero_bits else None)
