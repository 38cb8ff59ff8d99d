"""The layouts of codes and scales that the fastest kernels read: prepared weights.

Prepared codes are int32 [E, N/64, K/64, 64, 4, words], a dtype and shape that no checkpoint has, so they say themselves
what they are: what writes a checkpoint's tensor into them fails by its shape.

Order 1 is that of the warp-specialised kernel for 9.0 (kernels/hopper_w4a16/rows.py): blocks of 64 rows and 64 of K, in
each the 16 bytes (8 of codes of 4 bits) that one thread of a tensor core's operand turns into bf16, one after another.
 Written R = 64 rows, c the thread of four that share a row, and K = 16 s + 8 h + 2 c + p in it, a block is

    int32 [R, c, W]     W = 2 words of codes of 4 bits, s = 2 word + (0 or 1); W = 4 of 8 bits, s = word

with the codes of p = 0 in the low half of a word and those of p = 1 in the high one. ``_PLACES`` has the places of a
half's codes of 4 bits: most become bf16 by an instruction or two. Of 8 bits, h = 1 is the low byte of a half. Scales
lie by the same blocks: [R, groups of 64 of K]. Zero points lie as scales do, int8, less 8: a portable kernel reads
codes of int4 less 8, too, and no checkpoint has zero points of this type.

Order 2, of codes of 8 bits, is the same with a row's 16 bytes exchanged: those of c lie where c ^ R / 2 % 4 would. So a
block is also an operand of the tensor core in shared memory as TMA's swizzle of 64 bytes would have laid it, for a
kernel that multiplies the codes themselves (kernels/hopper_w8a8_block/rows.py). A row's K is then that of ``K_ORDER``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch

from ...artifacts.records import PRECISIONS, Elements
from ...artifacts.tuples import NamedTuple
from .codes import E4M3_MOST, Quantised, pack, unpack

BLOCK = 64  # rows of w, and elements of K, in a block
_Move: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
# For each code of a half-word: (mask of bits, their shift to the left) of each group of bits.
_Places = tuple[tuple[tuple[int, int], ...], ...]
_PLACES: dict[str, _Places] = {
    "e2m1": (
        ((8, 12), (7, 6)),  # sign at 15, the rest at 8 to 6
        ((8, 9), (7, 3)),
        ((8, 6), (7, 0)),
        ((8, 11), (4, 11), (3, 10)),  # sign at 14, then 13, then 11 and 10
    ),
    "int4": tuple(((15, 4 * i),) for i in range(4)),
}
# Largest e8m0 codes of scales: kernels multiply scales by 2^126 or 2^120 in bf16, as their codes are too small by this.
_MOST_E8M0 = {"e2m1": 128, "e4m3": 134}
ZERO = 8  # the zero point of int4 formats that store none
_MOST_ZERO = 15  # kernels read zero points of four bits
_MOST_INT4 = 1024.0  # kernels multiply scales by 2^117 in bf16; with a margin for rounding
_E4M3_NAN = 0x7F
_E4M3_SHIFT = 120  # kernels' bf16 of e4m3 codes is too small by 2^120
_CHUNK_BYTES = 32 << 20  # bytes moved at once, or one expert if it is larger
PREPARED_DIMS = 6  # dimensions of codes [E, N/64, K/64, 64, 4, words]; scales have one less


# 8-bit codes: byte i of a block's row holds element K_ORDER[i] of its 64 of K, before the words change places.
K_ORDER = tuple(16 * s + 8 * h + 2 * c + p for c in range(4) for s in range(4) for p in range(2) for h in (1, 0))


class CodeOrder(NamedTuple):
    """A prepared layout of codes and scales. ``number`` is what bundles and a saved state call it.

    ``misfits(weights)`` are tensors on their device that are true where weights can't be prepared; None for sizes that
    can't. ``room(scale)`` says whether kernels have room for these scales, and waits for their device.
    ``quantise`` (codes.py) makes scales that have room of every w below ``most``.
    ``prepared(codes)`` maps the codes of one expert to int32 [N/64, K/64, 64, 4, words], and ``stored(blocks)`` maps
    them back, bit for bit. ``prepared_scale`` and ``stored_scale`` do this with scales of ``scale_dtype``: [N, groups]
    to [N/64, blocks of K, 64, groups of a block]. ``derived(scale)`` makes the scales that kernels read, where scales
    of the checkpoint's layout stay beside prepared codes. ``prepared_zero`` and ``stored_zero`` map zero points of one
    expert, uint8 [N, groups], to int8 [N/64, blocks of K, 64, groups of a block], less 8, and back.
    """

    number: int
    misfits: Callable[[Quantised], list[torch.Tensor] | None]
    room: Callable[[torch.Tensor], bool]
    most: float
    prepared: _Move
    stored: _Move
    prepared_scale: _Move | None = None
    stored_scale: _Move | None = None
    scale_dtype: torch.dtype | None = None
    derived: _Move | None = None
    prepared_zero: _Move | None = None
    stored_zero: _Move | None = None

    def moves(self, scale: torch.Tensor) -> bool:
        """True if scales of this dtype are moved with the codes."""
        return scale.dtype is self.scale_dtype


@contextlib.contextmanager
def rewriting() -> Iterator[
    Callable[[torch.Tensor, _Move, Callable[[torch.Tensor, torch.Tensor], None]], torch.Tensor]
]:
    """Yield f(tensor, room, move), which writes a tensor in its other layout over itself, some experts at a time.

    room(part) is new memory for the part of some experts in the other layout; move(part, to) writes it there, and back.
    f returns the memory of ``tensor`` in its new shape. If this context fails anywhere, all tensors are as they were.
    """
    done: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Callable[[torch.Tensor, torch.Tensor], None]]] = []

    def rewrite(tensor: torch.Tensor, room: _Move, move: Callable[[torch.Tensor, torch.Tensor], None]) -> torch.Tensor:
        many = max(1, _CHUNK_BYTES // (tensor[0].numel() * tensor.element_size()))
        scratch = room(tensor[:many])
        whole = _in_shape_of(scratch, tensor)
        for first in range(0, len(tensor), many):
            before, after = tensor[first : first + many], whole[first : first + many]
            to = scratch[: len(before)]
            move(before, to)
            done.append((before, after, scratch, move))
            after.copy_(to)
        return whole

    try:
        yield rewrite
    except BaseException:
        for before, after, scratch, move in done:
            to = _in_shape_of(before, scratch)[: len(before)]
            move(after, to)
            before.copy_(to)
        raise


def _in_shape_of(part: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """New memory for some experts, in dtype and shape like a part of another tensor."""
    return memory.flatten(1).view(torch.uint8).view(part.dtype).view(memory.shape[0], *part.shape[1:])


def _four_bits(name: str) -> tuple[_Move, _Move]:
    """Return ``CodeOrder.prepared`` and ``CodeOrder.stored`` for codes of four bits of this name."""
    places = _PLACES[name]
    per_half = len(places)
    words = 2  # s = (word, first of a code's numbers in a half), h the second

    def prepared(codes: torch.Tensor) -> torch.Tensor:
        flat = unpack(codes)
        rows, K = flat.shape
        split = flat.reshape(rows // BLOCK, BLOCK, K // BLOCK, words, per_half, 4, 2).permute(0, 2, 1, 5, 3, 6, 4)
        halves = torch.zeros(split.shape[:-1], dtype=torch.int32, device=codes.device)
        for i, parts in enumerate(places):
            code = split[..., i].to(torch.int32)
            for mask, shift in parts:
                halves |= (code & mask) << shift
        return halves.to(torch.int16).contiguous().view(torch.int32).squeeze(-1)

    def stored(blocks: torch.Tensor) -> torch.Tensor:
        rows, K = blocks.shape[0] * BLOCK, blocks.shape[1] * BLOCK
        wide = blocks.contiguous().unsqueeze(-1).view(torch.int16).to(torch.int32)
        numbers = torch.zeros((*wide.shape, per_half), dtype=torch.uint8, device=blocks.device)
        for i, parts in enumerate(places):
            for mask, shift in parts:
                numbers[..., i] |= ((wide >> shift) & mask).to(torch.uint8)
        # [nb, kb, row, c, word, p, i] -> [nb, row, kb, word, i, c, p]
        return pack(numbers.permute(0, 2, 1, 4, 6, 3, 5).reshape(rows, K))

    return prepared, stored


def _eight_bits() -> tuple[_Move, _Move]:
    """Return ``CodeOrder.prepared`` and ``CodeOrder.stored`` for codes of eight bits: a block's bytes change places."""
    row, byte = torch.arange(BLOCK, device="cpu")[:, None], torch.arange(BLOCK, device="cpu")
    words = (byte // 16 ^ row // 2 % 4) * 16 + byte % 16  # byte i of row R holds byte words[R, i] of K_ORDER
    source = (row * BLOCK + torch.tensor(K_ORDER, dtype=torch.int64, device="cpu")[words]).flatten()
    target = source.argsort()

    def moved(blocks: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return blocks.gather(1, of.to(blocks.device).expand(len(blocks), -1))

    def prepared(codes: torch.Tensor) -> torch.Tensor:
        rows, columns = codes.shape[0] // BLOCK, codes.shape[1] // BLOCK
        split = codes.view(torch.uint8).reshape(rows, BLOCK, columns, BLOCK).transpose(1, 2)
        moves = moved(split.reshape(rows * columns, BLOCK * BLOCK), source)
        return moves.view(torch.int32).view(rows, columns, BLOCK, 4, 4)

    def stored(blocks: torch.Tensor) -> torch.Tensor:
        rows, columns = blocks.shape[:2]
        flat = blocks.contiguous().view(torch.uint8).view(rows * columns, BLOCK * BLOCK)
        split = moved(flat, target).view(rows, columns, BLOCK, BLOCK).transpose(1, 2)
        return split.reshape(rows * BLOCK, columns * BLOCK).view(torch.float8_e4m3fn)

    return prepared, stored


def _scale(group: int) -> tuple[_Move, _Move]:
    """Return ``CodeOrder.prepared_scale`` and ``CodeOrder.stored_scale`` for groups of so many elements of K."""
    groups = max(1, BLOCK // group)  # of a block

    def prepared(scale: torch.Tensor) -> torch.Tensor:
        rows, width = scale.shape
        split = _raw(scale).reshape(rows // BLOCK, BLOCK, width // groups, groups)
        return split.transpose(1, 2).contiguous().view(scale.dtype)

    def stored(blocks: torch.Tensor) -> torch.Tensor:
        row_blocks, column_blocks = blocks.shape[:2]
        split = _raw(blocks).transpose(1, 2)
        return split.reshape(row_blocks * BLOCK, column_blocks * groups).view(blocks.dtype)

    return prepared, stored


def _zero(group: int) -> tuple[_Move, _Move]:
    """``CodeOrder.prepared_zero`` and ``CodeOrder.stored_zero`` of groups of so many of K."""
    move, back = _scale(group)

    def prepared(zero: torch.Tensor) -> torch.Tensor:
        return (move(zero).to(torch.int16) - ZERO).to(torch.int8)

    def stored(blocks: torch.Tensor) -> torch.Tensor:
        return back((blocks.to(torch.int16) + ZERO).to(torch.uint8))

    return prepared, stored


def zero_without_room(zero: torch.Tensor) -> torch.Tensor:
    """True, on its device, if kernels can't read a zero point: they read 0 to 15, or the prepared form of these."""
    least, most = zero.aminmax()
    less = ZERO if zero.dtype is torch.int8 else 0
    return (least < -less) | (most > _MOST_ZERO - less)


def zero_has_room(zero: torch.Tensor | None) -> bool:
    """True if kernels can read these zero points."""
    return zero is None or zero.is_meta or not zero_without_room(zero)


def _raw(scale: torch.Tensor) -> torch.Tensor:
    """One-byte scales as uint8: some versions of torch can't move float8."""
    return scale.view(torch.uint8) if scale.element_size() == 1 else scale


def _in_bf16(prepared: _Move) -> _Move:
    """Scales [E, N, groups] of another dtype, in bf16 and prepared; or prepared ones that were cast."""

    def derived(scale: torch.Tensor) -> torch.Tensor:
        near = scale.to(torch.bfloat16)
        return near if scale.dim() == PREPARED_DIMS - 1 else torch.stack([prepared(of_expert) for of_expert in near])

    return derived


def _of_blocks(scale: torch.Tensor) -> torch.Tensor:
    """Return a scale of 128 x 128 for each block of 64 x 64, as two bf16 numbers (rounded, rest), each stored twice.

    They are stored twice because TMA moves at least 16 bytes. The forward reads the first copy.
    """
    wide = scale.float() * 2.0**_E4M3_SHIFT  # exact for scales that kernels support, and so is ``rest``
    near = wide.to(torch.bfloat16)
    rest = (wide - near).to(torch.bfloat16)
    E, rows, columns = scale.shape
    eight = near.new_empty(E, rows, 2, columns, 2, 2, 2, 2)
    for i, part in enumerate((near, rest)):
        eight[..., i, :] = part[:, :, None, :, None, None, None]
    return eight.view(E, 2 * rows, 2 * columns, 8)


def _whole(weights: Quantised, rows: int, columns: int) -> bool:
    N, width = weights.codes.shape[-2:]
    K = width * 2 if weights.codes.dtype is torch.uint8 else width
    return N % rows == 0 and K % columns == 0


def _without_room(elements: Elements, scale: torch.Tensor) -> torch.Tensor | None:
    """True, on its device, if a scale is too large or NaN; None if no scale is."""
    if elements.name == "int4":
        least, most = scale.aminmax()
        return ~((least > -_MOST_INT4) & (most < _MOST_INT4))
    if elements.scale is not None and elements.scale.name == "e8m0":
        return scale.amax() > _MOST_E8M0[elements.name]
    if elements.name == "e2m1":
        return scale.view(torch.uint8).amax() >= _E4M3_NAN  # the kernel ignores the sign, and reads NaN as a number
    rows = 1 if elements.scale is None else elements.scale.rows
    return None if rows == 1 else ~(scale.abs().amax() < 2.0 ** (127 - _E4M3_SHIFT))


def _room(elements: Elements, scale: torch.Tensor) -> bool:
    wrong = _without_room(elements, scale)
    return wrong is None or not wrong


def _most(elements: Elements) -> float:
    """The limit of |w| below which ``quantise`` makes no scale that is too large for kernels."""
    scale = elements.scale
    if elements.name == "int4":
        steps = 7.5 if scale is not None and scale.zero_bits else 7.0
        return steps * (_MOST_INT4 - 4)  # bf16's next smaller number
    if scale is not None and scale.name == "e8m0":
        return 2.0 ** (_MOST_E8M0[elements.name] - 127 + (2 if elements.name == "e2m1" else 8) + 1)
    blocks = scale is not None and scale.rows > 1
    return E4M3_MOST * 2.0 ** (127 - _E4M3_SHIFT) if blocks else math.inf


def _order(format: str) -> CodeOrder:
    elements = PRECISIONS[format].w
    scale, most = elements.scale, _most(elements)
    codes = _four_bits(elements.name) if elements.bits == 4 else _eight_bits()
    if scale is None:
        raise AssertionError(f"{format} has no scale")
    blocks, room = (max(BLOCK, scale.rows), max(BLOCK, scale.columns)), partial(_room, elements)

    def misfits(weights: Quantised) -> list[torch.Tensor] | None:
        if not _whole(weights, *blocks):
            return None
        zero = None if weights.zero is None else zero_without_room(weights.zero)
        return [wrong for wrong in (_without_room(elements, weights.scale), zero) if wrong is not None]

    if scale.name == "fp32":
        return CodeOrder(2, misfits, room, most, *codes, derived=None if scale.rows == 1 else _of_blocks)
    scales = _scale(scale.columns)
    if scale.name != "bf16":
        dtype = torch.uint8 if scale.name == "e8m0" else torch.float8_e4m3fn
        return CodeOrder(1 if elements.bits == 4 else 2, misfits, room, most, *codes, *scales, dtype)
    zeros = _zero(scale.columns) if scale.zero_bits else (None, None)
    return CodeOrder(1, misfits, room, most, *codes, *scales, torch.bfloat16, _in_bf16(scales[0]), *zeros)


# By format. Weights of other formats are read in the checkpoint's layout.
ORDERS: dict[str, CodeOrder] = {
    name: _order(name)
    for name in (
        "mxfp4",
        "mxfp8",
        "nvfp4",
        "int4_g32",
        "int4_g64",
        "int4_g128",
        "int4_g32_zp",
        "int4_g64_zp",
        "int4_g128_zp",
        "fp8_block",
        "fp8_block_a16",
        "fp8_channel",
        "fp8_channel_a16",
    )
}
