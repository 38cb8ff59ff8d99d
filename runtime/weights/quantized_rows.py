"""Rows of x that arrive quantised, for products whose format multiplies codes by codes."""

from __future__ import annotations

from typing import NoReturn

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import Scale
from ...artifacts.tuples import NamedTuple
from .expert_weights import ExpertWeights

_SCALES = (Scale("fp32", 1, 128), Scale("fp32", 1, 0))  # scales of x that these rows can have


class QuantizedRows(NamedTuple):
    """x[m, k] = codes[m, k] * scale[m, k // 128], or codes[m, k] * scale[m]: rows that an all-to-all has quantised.

    ``fp8_block`` weights take a scale for each row and 128 of K, ``fp8_channel`` weights a scale for each row.

    Parameters
    ----------
    codes
        [M, K] float8_e4m3fn (of ``moe_mlp`` [T, H] or [..., H]; padded [E, M_max, K]), contiguous.
    scale
        float32 on codes' device, with any strides (row-major, column-major): [M, K/128]; or [M, 1] or [M]. Padded
        [E, M_max, K/128]; or [E, M_max, 1] or [E, M_max].
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def ndim(self) -> int:
        """The dimensions of codes; 2 if they are no tensor."""
        return getattr(self.codes, "ndim", 2)

    def stand_in(self) -> torch.Tensor:
        """A bfloat16 tensor of codes' shape without memory for its rows, for a call's checks."""
        row = self.codes.new_empty(self.codes.shape[-1:], dtype=torch.bfloat16)
        return row.expand(self.codes.shape)


def values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The rows [M, K] in float32 that codes [M, K] with scale [M, groups], or [E, M / E, groups], encode."""
    scale = scale.reshape(-1, scale.shape[-1])
    return codes.float() * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)


def checked(call: str, name: str, x: QuantizedRows, w: object) -> QuantizedRows:
    """x with codes [M, K] and scale [M, groups], views of its tensors; w is what it is multiplied with.

    Rows of [E, M_max] whose scales have no common stride keep scale [E, M_max, groups].

    Raises
    ------
    InputError
        for tensors that can't be used, and for weights whose products do not read x as such codes.
    """

    def bad(part: str, got: str, wanted: str) -> NoReturn:
        raise InputError(f"{call}: {name}.{part} is {got}, wanted {wanted}")

    codes, scale = x
    for part, tensor in (("codes", codes), ("scale", scale)):
        if not isinstance(tensor, torch.Tensor):
            bad(part, f"a {type(tensor).__name__}", "a torch.Tensor")
    of_x = w.precision.x.scale if isinstance(w, ExpertWeights) else None
    if not isinstance(w, ExpertWeights) or of_x not in _SCALES:
        what = f"{w.format} weights" if isinstance(w, ExpertWeights) else f"w a {type(w).__name__}"
        raise InputError(
            f"{call}: {name} is QuantizedRows beside {what}, whose products do not read x as codes. Wanted "
            "ExpertWeights of fp8_block or fp8_channel with quantize_x=True; else pass bfloat16 rows"
        )
    columns = 0 if of_x is None else of_x.columns
    if codes.dtype is not torch.float8_e4m3fn:
        bad("codes", f"{codes.dtype}", "torch.float8_e4m3fn")
    if codes.dim() < 2 or not codes.shape[-1]:
        bad("codes", f"of shape {list(codes.shape)}", "[M, K] with K of at least 1")
    if not codes.is_contiguous():
        bad("codes", f"with strides {list(codes.stride())}", "a contiguous tensor")
    if scale.dtype is not torch.float32:
        bad("scale", f"{scale.dtype}", "torch.float32")
    if scale.device != codes.device:
        bad("scale", f"on {scale.device}", f"codes' device, {codes.device}")
    rows, K = list(codes.shape[:-1]), codes.shape[-1]
    if columns and K % columns:
        bad("codes", f"of shape {list(codes.shape)}", f"rows of whole {columns} columns, each of which have a scale")
    groups = K // columns if columns else 1
    if list(scale.shape) != [*rows, groups] and (columns or list(scale.shape) != rows):
        bad("scale", f"of shape {list(scale.shape)}", f"{[*rows, groups]}, beside {w.format} weights")
    for part, tensor in (("codes", codes), ("scale", scale)):
        if tensor.requires_grad:
            bad(part, "a tensor that requires grad", "one that does not: detach it")
    try:
        flat = scale.view(-1, groups) if scale.numel() else scale.new_empty((0, groups))
    except RuntimeError:
        if codes.dim() == 3:
            return QuantizedRows(codes.view(-1, K), scale if scale.dim() == 3 else scale.unsqueeze(-1))
        bad("scale", f"with strides {list(scale.stride())}", "rows that a view can flatten: pass scale.contiguous()")
    return QuantizedRows(codes.view(-1, K), flat)
