"""The kernels that write and read quantised weights, of a bundle: ``runtime/weights/writing.py`` asks for them.

They take w of bf16, fp16 or fp32 with dense rows, K of whole 64s and, in the prepared layout, N of whole 64s. If no
usable bundle has a kernel, or w is another, torch does the same.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from ...artifacts.records import PRECISIONS, DType, RowOp
from ...kernels.entry import ALIGNMENT_BYTES, is_aligned
from ...kernels.rowops import (
    BACK,
    FP16_WEIGHTS,
    FP32_WEIGHTS,
    LOOKS,
    PREPARED,
    RowOpSpec,
    dtype_of,
    has_weight_kernels,
    tiles,
)
from ..driver.device import current_stream, on
from ..weights import writing
from ..weights.codes import E2M1_MOST, E4M3_MOST, Quantised, invertible, quotient
from . import rowops

if TYPE_CHECKING:
    from ..driver.rowops import RowOpLauncher

KIND_FLAGS = {torch.bfloat16: 0, torch.float16: FP16_WEIGHTS, torch.float32: FP32_WEIGHTS}
_BLOCK = 64
_STEP = 16  # strides are multiples of this, in elements
_MOST = 2**31 - 1


def bits_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a tensor with dense rows, as a kernel's argument has it."""
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


class RowKernels:
    """``writing.WriteKernels`` by row kernels."""

    def quantise(self, format: str, into: Quantised, w: torch.Tensor, *, prepared: bool) -> bool:
        """Quantise w [E, N, K] into all experts' tensors, on the current stream."""
        if not _fits(w, rows=prepared, of_codes=True) or not _are_scales(format, into.scale):
            return False
        if into.global_scale is None:
            return _launch(RowOp.QUANTIZE_WEIGHTS, format, w, prepared=prepared, **_addresses(into))
        largest = self._largest(w)
        if largest is None:
            return False
        with torch.inference_mode(into.global_scale.is_inference()), torch.no_grad():
            outer = invertible(
                quotient(largest.view(w.shape[0], -1).amax(1).view(torch.float32), E4M3_MOST * E2M1_MOST)
            )
            into.global_scale.copy_(outer)
        return _launch(RowOp.QUANTIZE_WEIGHTS, format, w, prepared=prepared, **_addresses(into))

    def dequantise(self, format: str, weights: Quantised, w: torch.Tensor, *, prepared: bool) -> bool:
        """Write the numbers of all experts' codes to w [E, N, K], which is dense."""
        if (
            not w.is_contiguous()
            or not _fits(w, rows=prepared, of_codes=True)
            or not _are_scales(format, weights.scale)
        ):
            return False
        return _launch(RowOp.DEQUANTIZE_WEIGHTS, format, w, prepared=prepared, **_addresses(weights))

    def mover(self, format: str, codes: torch.Tensor) -> writing.Mover | None:
        """A function that moves all experts' codes from the checkpoint's layout to the prepared one, or back."""
        launch = _launcher(RowOp.MOVE_CODES, format, codes)
        return None if launch is None else functools.partial(_move, launch, _spec(RowOp.MOVE_CODES, format))

    def most(self, w: torch.Tensor) -> torch.Tensor | None:
        """max |w| of all w, float32 []; NaN or infinity if there is one."""
        largest = self._largest(w)
        return None if largest is None else largest.amax().view(torch.float32)

    def _largest(self, w: torch.Tensor) -> torch.Tensor | None:
        """The bits of max |w| of some rows, int32 [programs], expert by expert."""
        if not _fits(w, rows=False, of_codes=False):
            return None
        largest = torch.empty(tiles(_LARGEST, *w.shape), dtype=torch.int32, device=w.device)
        return largest if _launch(RowOp.LARGEST_WEIGHT, "", w, prepared=False, most=largest.data_ptr()) else None


_LARGEST = RowOpSpec(RowOp.LARGEST_WEIGHT, DType.FP32)


def _spec(op: RowOp, format: str) -> RowOpSpec:
    return RowOpSpec(op, dtype_of(DType(format), op)) if format else _LARGEST


def _launcher(op: RowOp, format: str, like: torch.Tensor) -> RowOpLauncher | None:
    return rowops.launcher(op, _spec(op, format).dtype, like.get_device(), aligned=True)


def _launch(op: RowOp, format: str, w: torch.Tensor, *, prepared: bool, **addresses: int) -> bool:
    """Launch a kernel over w; False where there is none, or memory is not aligned."""
    aligned = is_aligned(ALIGNMENT_BYTES, w.data_ptr(), *addresses.values())
    launch = _launcher(op, format, w) if aligned else None
    if launch is None:
        return False
    E, N, K = w.shape
    flags = KIND_FLAGS[w.dtype] | (PREPARED if prepared else 0)
    numbers = {"M": N, "columns": K, "step_expert": w.stride(0), "step_row": w.stride(1), "flags": flags}
    arguments = {"w": w.data_ptr(), "zeros": 0, "outer": 0} | addresses | numbers
    with on(w.get_device()):
        launch(tiles(_spec(op, format), E, N, K), current_stream(w.get_device()), arguments)
    return True


def _move(
    launch: RowOpLauncher,
    spec: RowOpSpec,
    codes: torch.Tensor,
    to: torch.Tensor,
    nan: list[torch.Tensor] | None = None,
) -> bool:
    """Move codes, as ``writing.Mover`` describes; return False if memory is not dense or not aligned."""
    back = to.dim() < codes.dim()
    words, stored = (codes, to) if back else (to, codes)
    aligned = is_aligned(ALIGNMENT_BYTES, codes.data_ptr(), to.data_ptr())
    if not aligned or not codes.is_contiguous() or not to.is_contiguous():
        return False
    E, row_blocks, blocks = words.shape[:3]
    N, K = row_blocks * _BLOCK, blocks * _BLOCK
    addresses = {"stored": stored.data_ptr(), "words": words.data_ptr()}
    count, flags, most = tiles(spec, E, N, K), BACK if back else 0, 0
    if nan is not None and codes.dtype is torch.float8_e4m3fn:
        nan.append(torch.empty(count, dtype=torch.int32, device=codes.device))
        flags, most = flags | LOOKS, nan[-1].data_ptr()
    numbers = {"M": N, "columns": K, "flags": flags, "most": most}
    with on(codes.get_device()):
        launch(count, current_stream(codes.get_device()), addresses | numbers)
    return True


def _fits(w: torch.Tensor, *, rows: bool, of_codes: bool) -> bool:
    """True if the row kernels support w. With ``rows`` N must be a multiple of 64, with ``of_codes`` K."""
    _, N, K = w.shape
    whole = K % (_BLOCK if of_codes else _STEP) == 0 and (not rows or N % _BLOCK == 0)
    strides = all(step % _STEP == 0 and 0 <= step <= _MOST for step in w.stride()[:2])
    small = N * max(K, w.stride(1)) <= _MOST  # offsets in an expert are int32
    return w.dtype in KIND_FLAGS and whole and w.stride(2) == 1 and strides and small


def _are_scales(format: str, scale: torch.Tensor) -> bool:
    """True if row kernels have a rule for the format, and write scales of this dtype: for int4 only bf16."""
    of = PRECISIONS[format].w.scale
    can_write = has_weight_kernels(DType(format))
    return can_write and (of is None or of.name != "bf16" or scale.dtype is torch.bfloat16)


def _addresses(of: Quantised) -> dict[str, int]:
    """The addresses of quantised weights' tensors, by the row kernels' argument names."""
    names = ("words", "scales", "zeros", "outer")
    return {name: tensor.data_ptr() for name, tensor in zip(names, of, strict=True) if tensor is not None}
