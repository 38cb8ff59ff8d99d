"""Writes quantised weights: quantises floating-point w into them, and moves codes between the two layouts.

torch does it expert by expert, with memory for one expert beside the result. If ``kernels`` are set and a bundle has
some for it, these write weights on a GPU. The bits are the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from ...artifacts.records import PRECISIONS
from .codes import Quantised, quantise
from .prepared_layout import ORDERS, PREPARED_DIMS, ZERO
from .validate import bad, described, nan_among, repeated

_SCALES = {"fp32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
_FP16_SCALE = 65504.0 * 7  # the largest |w| of int4 whose scale fp16 can hold
_MOST_OF_A_RANGE = 2.0**127  # the difference of two numbers below it is finite


class Mover(Protocol):
    """A kernel that moves all experts' codes to memory in the other layout; False if it does not take them."""

    def __call__(self, codes: torch.Tensor, to: torch.Tensor, nan: list[torch.Tensor] | None = None) -> bool:
        """Move e4m3 codes, and append to ``nan``, if it is a list, a tensor that is 0 where none is NaN."""


class WriteKernels(Protocol):
    """Kernels for the work that this module does in torch. Each method returns False, or None, if no kernel does it."""

    def quantise(self, format: str, into: Quantised, w: torch.Tensor, *, prepared: bool) -> bool:
        """Quantise w [E, N, K] into all experts' tensors."""

    def mover(self, format: str, codes: torch.Tensor) -> Mover | None:
        """A function that moves all experts' codes from the checkpoint's layout to the prepared one, or back."""

    def dequantise(self, format: str, weights: Quantised, w: torch.Tensor, *, prepared: bool) -> bool:
        """Write the numbers of all experts' codes to w [E, N, K]."""

    def most(self, w: torch.Tensor) -> torch.Tensor | None:
        """max |w| of all w, float32 []; NaN or infinity if there is one."""


kernels: WriteKernels | None = None  # runtime/api/expert_weights.py sets them


_thread = threading.local()


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Have torch write and read weights in this thread: a self-test of a kernel compares it with torch's results."""
    _thread.by_torch = True
    try:
        yield
    finally:
        _thread.by_torch = False


def _kernels() -> WriteKernels | None:
    return None if getattr(_thread, "by_torch", False) else kernels


def empty(format: str, E: int, N: int, K: int, device: torch.device) -> Quantised:
    """New, uninitialised tensors for E matrices [N, K] in the checkpoint's layout."""
    elements = PRECISIONS[format].w
    scale = elements.scale
    if scale is None:
        raise AssertionError(f"{format} has no scale")
    shape = (E, -(-N // scale.rows), -(-K // scale.columns)) if scale.columns else (E, N)
    eight = elements.bits == 8
    return Quantised(
        torch.empty((E, N, K if eight else K // 2), dtype=torch.float8_e4m3fn if eight else torch.uint8, device=device),
        torch.empty(shape, dtype=_SCALES[scale.name], device=device),
        torch.empty(shape, dtype=torch.uint8, device=device) if scale.zero_bits else None,
        None if scale.outer is None else torch.empty(E, dtype=torch.float32, device=device),
    )


def check_plain(format: str, w: object, shape: torch.Size | None = None) -> torch.Tensor:
    """w [E, N, K], detached, if it can be quantised; its numbers are not read.

    Raises
    ------
    InputError
        for another ``shape``, a dtype that is no floating-point type, a wrapper of tensors, a meta tensor, and expanded
        memory.
    """
    if not isinstance(w, torch.Tensor) or w.dim() != 3 or not w.is_floating_point() or not w.numel():
        raise bad("w", described(w), "[E, N, K] of a floating-point type, E, N and K of at least 1")
    if hasattr(type(w), "__tensor_flatten__"):
        raise bad("w", f"a {type(w).__name__}", "a tensor with memory of its own: of a DTensor pass full_tensor()")
    if shape is not None and w.shape != shape:
        raise bad("w", described(w), f"{list(shape)}, as the weights that are written have it")
    if shape is not None and w.is_meta:
        raise bad("w", "on meta, without numbers", "a tensor on a device")
    if w.layout is torch.strided and repeated(w):
        raise bad("w", f"with strides {list(w.stride())}, which repeats elements", "memory for each of them")
    if PRECISIONS[format].w.bits == 4 and w.shape[2] % 2:
        raise bad("w", described(w), "an even K: two codes share a byte")
    return w.detach()


def check_numbers(format: str, w: torch.Tensor, scale_dtype: torch.dtype, *, prepared: bool) -> None:
    """Read w once, and wait for its device.

    Raises
    ------
    InputError
        for NaN, infinity, and a number whose scale would be too large for kernels of prepared weights or for fp16.
    """
    with torch.no_grad():
        able = _kernels()
        largest = able.most(w) if able is not None and w.is_cuda else None
        if largest is None:
            largest = torch.stack([torch.stack(of_expert.aminmax()).abs().amax() for of_expert in w]).amax()
    most = float(largest.float())  # w may be float64
    if not most < float("inf"):
        raise bad("w", "NaN or infinite in places", "finite numbers")
    scale = PRECISIONS[format].w.scale
    room = ORDERS[format].most if prepared else float("inf")
    if scale is not None and scale.zero_bits:
        room = min(room, _MOST_OF_A_RANGE)
    if scale_dtype is torch.float16:
        room = min(room, _FP16_SCALE)
    if most >= room:
        layout = " prepared" if prepared else ""
        raise bad("w", f"as large as {most:g}", f"below {room:g}, what{layout} {format} weights have room for")


def quantise_into(format: str, into: Quantised, w: torch.Tensor, *, prepared: bool, by_torch: bool = False) -> None:
    """Quantise w [E, N, K] into the tensors of weights in either layout; ``by_torch`` with no kernel."""
    on_gpu, able = w.is_cuda and w.device == into.codes.device and not by_torch, _kernels()
    if able is not None and on_gpu and able.quantise(format, into, w, prepared=prepared):
        for tensor in into:
            _written(tensor)
        return
    moves: list[Callable[[torch.Tensor], torch.Tensor] | None] = [None] * len(into)
    if prepared:
        order = ORDERS[format]
        of_scale = order.prepared_scale if into.scale.dim() == PREPARED_DIMS - 1 else None  # other scales stay
        moves = [order.prepared, of_scale, order.prepared_zero, None]
    for expert, of_expert in enumerate(w):
        quantised = quantise(format, of_expert.to(into.codes.device), into.scale.dtype)
        for to, part, move in zip(into, quantised, moves, strict=True):
            if to is not None and part is not None:
                with torch.inference_mode(to.is_inference()), torch.no_grad():
                    to[expert].copy_(part if move is None else move(part))


def _written(tensor: torch.Tensor | None) -> None:
    """Count a write that torch does not see, so that a backward pass that saved the tensor fails."""
    if tensor is not None and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def by_kernel(format: str, weights: Quantised, w: torch.Tensor, *, prepared: bool) -> bool:
    """Dequantise the weights to w [E, N, K] by a kernel; False if there is none."""
    able = _kernels()
    return able is not None and w.is_cuda and able.dequantise(format, weights, w, prepared=prepared)


def mover(format: str, codes: torch.Tensor | None) -> Mover | None:
    """The kernel that moves codes, if there is one. Finding it may load and test code: hold no lock meanwhile."""
    able = _kernels()
    return None if able is None or codes is None or not codes.is_cuda else able.mover(format, codes)


def move_codes(
    format: str, codes: torch.Tensor, to: torch.Tensor, by: Mover | None = None, nan: list[torch.Tensor] | None = None
) -> None:
    """Copy codes to memory in either layout, on any device; on one by a kernel, if there is one.

    ``nan`` is as in ``Mover``, for codes that are moved to the prepared layout.
    """
    order = ORDERS.get(format)
    back = to.dim() < codes.dim()
    move = None if order is None or to.dim() == codes.dim() else order.stored if back else order.prepared
    if move is not None and by is not None and codes.device == to.device and by(codes, to, nan):
        _written(to)
        return
    with torch.inference_mode(to.is_inference()), torch.no_grad():
        if move is None:
            to.copy_(codes)
            return
        for expert in range(to.shape[0]):
            to[expert].copy_(move(codes[expert].to(to.device)))
        if nan is not None and codes.dtype is torch.float8_e4m3fn:
            nan.append(nan_among(codes).to(to.device))


def move_scale(format: str, scale: torch.Tensor, to: torch.Tensor) -> None:
    """Copy scales or zero points to memory in either layout, on any device: in one permuted copy."""
    with torch.inference_mode(to.is_inference()), torch.no_grad():
        if to.dim() == scale.dim() or to.dim() < 3:
            to.copy_(scale)
        elif to.device != scale.device:
            for expert in range(to.shape[0]):
                move_scale(format, scale[expert : expert + 1].to(to.device), to[expert : expert + 1])
        elif to.dim() == PREPARED_DIMS - 1:
            bytes_of(to).copy_(_by_blocks(scale, to))
            if to.dtype is torch.int8:
                to.sub_(ZERO)
        else:
            _by_blocks(to, scale).copy_(bytes_of(scale + ZERO if scale.dtype is torch.int8 else scale))


def bytes_of(scale: torch.Tensor) -> torch.Tensor:
    """Return one-byte scales and zero points as uint8, because some versions of torch can't move float8."""
    return scale.view(torch.uint8) if scale.element_size() == 1 else scale


def _by_blocks(scale: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Scales [E, N, groups] as a view in the order of prepared scales."""
    E, row_blocks, column_blocks, rows, groups = blocks.shape
    return bytes_of(scale).view(E, row_blocks, rows, column_blocks, groups).transpose(2, 3)


def scale_room(format: str, scale: torch.Tensor) -> torch.Tensor:
    """New memory for scales or zero points in the other layout."""
    of = PRECISIONS[format].w.scale
    if scale.dim() == PREPARED_DIMS - 1:
        E, row_blocks, column_blocks, rows, groups = scale.shape
        dtype = torch.uint8 if scale.dtype is torch.int8 else scale.dtype
        return scale.new_empty((E, row_blocks * rows, column_blocks * groups), dtype=dtype)
    E, N, width = scale.shape
    groups = max(1, 64 // (of.columns if of is not None else 64))
    dtype = torch.int8 if of is not None and of.zero_bits and scale.dtype is torch.uint8 else scale.dtype
    return scale.new_empty((E, N // 64, width // groups, 64, groups), dtype=dtype)


def moved_scale(format: str, scale: torch.Tensor) -> torch.Tensor:
    """Scales or zero points in the other layout, in new memory."""
    out = scale_room(format, scale)
    move_scale(format, scale, out)
    return out


def codes_room(format: str, codes: torch.Tensor) -> torch.Tensor:
    """New memory for codes in the other layout."""
    bits = PRECISIONS[format].w.bits
    if codes.dim() == PREPARED_DIMS:
        E, row_blocks, blocks = codes.shape[:3]
        dtype = torch.uint8 if bits == 4 else torch.float8_e4m3fn
        return codes.new_empty((E, row_blocks * 64, blocks * 64 * bits // 8), dtype=dtype)
    E, N, last = codes.shape
    return codes.new_empty((E, N // 64, last * 8 // bits // 64, 64, 4, 2 if bits == 4 else 4), dtype=torch.int32)


def moved_codes(
    format: str, codes: torch.Tensor, by: Mover | None = None, nan: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Codes in the other layout, in new memory; ``nan`` is as in ``move_codes``."""
    out = codes_room(format, codes)
    move_codes(format, codes, out, by, nan)
    return out
