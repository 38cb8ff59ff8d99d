"""Weights with zero rows and columns after their own, for kernels that read whole blocks of 64.

An expert layer whose width I is no multiple of 64 has the same outputs when it is padded: the rows that are added to
gate_up give zeros, every activation maps them to 0, and the columns that are added to down are zeros.
"""

from __future__ import annotations

import torch

from ...artifacts.records import Elements, Scale
from .codes import pack
from .expert_weights import ExpertWeights
from .validate import bad

_ZERO = 8  # the zero point of int4 formats that store none
_ONE = {"e8m0": 127}  # the scale 1, as its code


def padded(weights: ExpertWeights, N: int, K: int, *, parts: int = 1) -> ExpertWeights:
    """The weights with zero rows and columns after their own, as new tensors [E, N, K]; unchanged if they fit."""
    _, rows, columns = weights.shape
    if (rows, columns) == (N, K):
        return weights
    elements = weights.precision.w
    scale = elements.scale
    if scale is None:
        raise AssertionError(f"{weights.format} has no scale")
    whole = N % parts == rows % parts == 0 and (elements.bits == 8 or K % 2 == 0)
    if weights.is_prepared or not whole or rows > N or columns > K:
        raise bad(
            "what is padded",
            f"{weights!r}, to N={N}, K={K} in {parts} parts",
            "sizes that are not smaller, parts of whole rows, and the checkpoint's layout (restore() has it)",
        )
    for each in (rows // parts, N // parts) if scale.rows > 1 and parts > 1 else ():
        if each % scale.rows:
            raise bad("what is padded", f"of parts of {each} rows", f"multiples of {scale.rows}")
    if not scale.columns:  # a scale a row
        factor = _filled(weights.scale[..., None], N // parts, 1, parts, 1).squeeze(-1)
        return ExpertWeights(weights.format, _codes(elements, scale, weights, None, N, K, parts), factor)
    blocks = -(-(N // parts) // scale.rows), -(-K // scale.columns)
    zero = None if weights.zero is None else _filled(weights.zero, *blocks, parts, _ZERO)
    codes = _codes(elements, scale, weights, zero, N, K, parts)
    factor = _filled(weights.scale, *blocks, parts, _ONE.get(scale.name, 1))
    return ExpertWeights(weights.format, codes, factor, zero, weights.global_scale)


def narrowed(weights: ExpertWeights, N: int, K: int, *, parts: int = 1) -> ExpertWeights:
    """Undo ``padded``: return the first N / parts rows of each part, and the first K columns."""
    elements = weights.precision.w
    scale = elements.scale
    if scale is None:
        raise AssertionError(f"{weights.format} has no scale")

    def kept(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        of_parts = tensor.view(tensor.shape[0], parts, -1, tensor.shape[2])
        return of_parts[:, :, : N // parts // rows, :columns].flatten(1, 2).contiguous()

    codes = kept(weights.codes, 1, K * elements.bits // 8)
    if not scale.columns:  # a scale a row
        return ExpertWeights(weights.format, codes, kept(weights.scale[..., None], 1, 1).squeeze(-1))
    groups = -(-K // scale.columns)
    factor = kept(weights.scale, scale.rows, groups)
    zero = None if weights.zero is None else kept(weights.zero, 1, groups)
    return ExpertWeights(weights.format, codes, factor, zero, weights.global_scale)


def _codes(
    elements: Elements, scale: Scale, weights: ExpertWeights, zero: torch.Tensor | None, N: int, K: int, parts: int
) -> torch.Tensor:
    """The codes, padded with codes of the value 0: a group's zero point, if there are zero points."""
    if elements.bits == 8:
        return _filled(weights.codes, N // parts, K, parts, 0)
    codes = _filled(weights.codes, N // parts, K // 2, parts, _ZERO << 4 | _ZERO if elements.name == "int4" else 0)
    before = weights.codes.shape[-1]
    if zero is not None and before < K // 2:
        group, skipped = divmod(2 * before, scale.columns)  # the weights may end within a group
        points = zero[..., group:].repeat_interleave(scale.columns, -1)[..., skipped : skipped + K - 2 * before]
        codes[..., before:] = pack(points)
    return codes


def _filled(tensor: torch.Tensor, rows: int, columns: int, parts: int, value: int) -> torch.Tensor:
    """[E, N, C] as [E, parts * rows, columns]; new elements are ``value``."""
    E, N, C = tensor.shape
    if tensor.dtype is torch.float8_e4m3fn:  # as bytes: some torch versions can't fill e4m3
        e4m3_one = 0x38  # the bits of 1.0
        return _filled(tensor.view(torch.uint8), rows, columns, parts, e4m3_one if value else 0).view(tensor.dtype)
    filled = tensor.new_full((E, parts, rows, columns), value)
    filled[:, :, : N // parts, :C] = tensor.view(E, parts, N // parts, C)
    return filled.flatten(1, 2)
