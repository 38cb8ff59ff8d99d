"""The order in which kernels read codes and scales, where it is not the checkpoint's own.

Order 1 is that of the warp-specialised kernel for 9.0 (kernels/gemm/hopper/wna16.py): blocks of 64 rows and 64 of K, in
each the 16 bytes (8 of codes of 4 bits) that one thread of a tensor core's operand turns into bf16, one after another.
 Written R = 64 rows, c the thread of four that share a row, and K = 16 s + 8 h + 2 c + p in it, a block is

    int32 [R, c, W]     W = 2 words of codes of 4 bits, s = 2 word + (0 or 1); W = 4 of 8 bits, s = word

with the codes of p = 0 in the low half of a word and those of p = 1 in the high one. Where in its half each code's bits
lie says ``_PLACES``: most become bf16 by an instruction or two. Scales lie by the same blocks: [R, groups of 64 of K].

Order 2, of codes of 8 bits, is the same with a row's 16 bytes exchanged: those of c lie where c ^ R / 2 % 4 would. So a
block is also an operand of the tensor core in shared memory as TMA's swizzle of 64 bytes would have laid it, for a
kernel that multiplies the codes themselves (kernels/gemm/hopper/w8a8.py). A row's K is then that of ``K_ORDER``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ...artifacts.records.precision import PRECISIONS, Elements
from .codes import Quantised, pack, unpack

BLOCK = 64  # rows of w, and of K
# Of each code of a half: (mask of its bits, where they go to, as shifts to the left).
_Places = tuple[tuple[tuple[int, int], ...], ...]
_PLACES: dict[str, _Places] = {
    "e2m1": (
        ((8, 12), (7, 6)),  # sign at 15, the rest at 8 to 6
        ((8, 9), (7, 3)),
        ((8, 6), (7, 0)),
        ((8, 11), (4, 11), (3, 10)),  # sign at 14, then 13, then 11 and 10
    ),
    "int4": tuple(((15, 4 * i),) for i in range(4)),
    "e4m3": (((0xFF, 8),), ((0xFF, 0),)),  # whole, as the tensor core reads them
}
_MOST_E8M0 = 128  # a larger scale, 4 or more, has no room in bf16 beside the 2^126 that codes are made too small by
_MOST_INT4 = 1024.0  # scales are made 2^117 of theirs in bf16: room to spare for what rounding to bf16 adds
_E4M3_SHIFT = 120  # log2 of what e4m3 codes are made too small by


# Which of a block's 64 of K each byte of a row holds, of codes of 8 bits, before the exchange.
K_ORDER = tuple(16 * s + 8 * h + 2 * c + p for c in range(4) for s in range(4) for p in range(2) for h in (1, 0))


class CodeOrder(NamedTuple):
    """An order of codes and scales. ``number`` is what bundles and ``ExpertWeights.order`` say; 0 is the checkpoint's.

    ``fits(weights)`` says whether weights can be in it, ``room(weights)`` whether kernels have room for their scales.
    ``codes(one, undo)`` maps codes of one expert, ``ExpertWeights.codes[e]``, to this order, and with ``undo`` back,
    bit for bit, in the shape and dtype that they have; ``scale`` its scales likewise, if they are of ``scale_dtype``.
    Both leave the tensor that they are given as it is. ``derived(scale)`` are other scales [E, ...] that kernels read
    then; with neither they read none in blocks.
    """

    number: int
    fits: Callable[[Quantised], bool]
    room: Callable[[Quantised], bool]
    codes: Callable[[torch.Tensor, bool], torch.Tensor]
    scale: Callable[[torch.Tensor, bool], torch.Tensor] | None = None
    scale_dtype: torch.dtype | None = None
    derived: Callable[[torch.Tensor], torch.Tensor] | None = None

    def undone(self, codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and scales of one expert as the checkpoint has them."""
        moved = self.scale is not None and self.moves(scale)
        return self.codes(codes, True), self.scale(scale, True) if self.scale is not None and moved else scale

    def moves(self, scale: torch.Tensor) -> bool:
        """Whether scales change their order with the codes."""
        return self.scale is not None and scale.dtype is self.scale_dtype


def reorder(one: Quantised, order: CodeOrder, *, undo: bool) -> None:
    """Put codes and scales [E, ...] into the order, or with ``undo`` back, in place and expert by expert.

    Where that fails (no memory for one expert more) all of them are as they were.
    """
    todo = [(one.codes, order.codes)]
    if order.scale is not None and order.moves(one.scale):
        todo.append((one.scale, order.scale))
    done: list[tuple[torch.Tensor, Callable[[torch.Tensor, bool], torch.Tensor]]] = []
    try:
        for tensor, move in todo:
            for expert in range(tensor.shape[0]):
                tensor[expert].copy_(move(tensor[expert], undo))
                done.append((tensor[expert], move))
    except BaseException:
        for moved, move in done:
            moved.copy_(move(moved, not undo))
        raise


def _codes(name: str) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    places = _PLACES[name]
    per_half = len(places)
    four = name != "e4m3"
    row = torch.arange(BLOCK)[:, None]
    exchanged = torch.arange(4) ^ row // 2 % 4  # [R, c], its own inverse

    def move(codes: torch.Tensor, undo: bool) -> torch.Tensor:
        given = codes.view(torch.uint8)
        rows, width = given.shape
        K = width * 2 if four else width
        # s = (word, first of a code's numbers in a half), h the second; of e4m3 a word has one s.
        outer, inner = (2, per_half) if four else (4, per_half)
        if undo:
            halves = given.contiguous().view(torch.int16).view(rows // BLOCK, K // BLOCK, BLOCK, 4, outer, 2)
            if not four:
                halves = halves[:, :, row, exchanged]
            wide = halves.to(torch.int32)
            found = torch.zeros((*wide.shape, per_half), dtype=torch.uint8, device=given.device)
            for i, parts in enumerate(places):
                for mask, shift in parts:
                    found[..., i] |= ((wide >> shift) & mask).to(torch.uint8)
            # [nb, kb, row, c, word, p, i] -> [nb, row, kb, word, i, c, p]
            flat = found.permute(0, 2, 1, 4, 6, 3, 5).reshape(rows, K)
            return (pack(flat) if four else flat).view(codes.dtype)
        flat = unpack(given) if four else given
        split = flat.reshape(rows // BLOCK, BLOCK, K // BLOCK, outer, inner, 4, 2).permute(0, 2, 1, 5, 3, 6, 4)
        halves = torch.zeros(split.shape[:-1], dtype=torch.int32, device=given.device)
        for i, parts in enumerate(places):
            one = split[..., i].to(torch.int32)
            for mask, shift in parts:
                halves |= (one & mask) << shift
        if not four:
            halves = halves[:, :, row, exchanged]
        return halves.to(torch.int16).view(torch.uint8).reshape(rows, width).view(codes.dtype)

    return move


def _scale(group: int) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    groups = max(1, BLOCK // group)  # of a block

    def move(scale: torch.Tensor, undo: bool) -> torch.Tensor:
        rows, width = scale.shape
        raw = scale.view(torch.uint8) if scale.element_size() == 1 else scale
        if undo:
            split = raw.reshape(rows // BLOCK, width // groups, BLOCK, groups)
        else:
            split = raw.reshape(rows // BLOCK, BLOCK, width // groups, groups)
        return split.transpose(1, 2).reshape(rows, width).view(scale.dtype)

    return move


def _in_bf16(move: Callable[[torch.Tensor, bool], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Scales of another type: the same in bf16."""

    def derived(scale: torch.Tensor) -> torch.Tensor:
        return torch.stack([move(one.to(torch.bfloat16), False) for one in scale])

    return derived


def _of_blocks(scale: torch.Tensor) -> torch.Tensor:
    """A scale of 128 x 128 of e4m3 as bf16, for each block of 64 x 64, twice, and twice what bf16 leaves of it.

    These two times: TMA moves 16 bytes at least. The forward reads the first.
    """
    wide = scale.double() * 2.0**_E4M3_SHIFT
    near = wide.to(torch.bfloat16)
    rest = (wide - near.double()).to(torch.bfloat16)
    eight = torch.stack([near, near, rest, rest] * 2, -1)
    return eight.repeat_interleave(2, 1).repeat_interleave(2, 2).contiguous()


def _whole(one: Quantised, rows: int, columns: int) -> bool:
    N, width = one.codes.shape[-2:]
    K = width * 2 if one.codes.dtype is torch.uint8 else width
    return N % rows == 0 and K % columns == 0


def _room(elements: Elements, one: Quantised) -> bool:
    if elements.name == "int4":
        return all(abs(float(end)) < _MOST_INT4 for end in one.scale.aminmax())
    if elements.name == "e2m1":
        if elements.scale is not None and elements.scale.name == "e8m0":
            return int(one.scale.max()) <= _MOST_E8M0
        return not bool((one.scale.view(torch.uint8) & 0x80).any())  # the kernel reads no sign
    rows = 1 if elements.scale is None else elements.scale.rows
    return rows == 1 or float(one.scale.abs().max()) < 2.0 ** (127 - _E4M3_SHIFT)


def _order(format: str) -> CodeOrder:
    elements = PRECISIONS[format].w
    codes, scale = _codes(elements.name), elements.scale
    if scale is None:
        raise AssertionError(f"{format} has no scale")
    blocks, room = (max(BLOCK, scale.rows), max(BLOCK, scale.columns)), partial(_room, elements)

    def fits(one: Quantised) -> bool:
        return _whole(one, *blocks) and room(one)

    if elements.name == "e4m3":
        return CodeOrder(2, fits, room, codes, derived=None if scale.rows == 1 else _of_blocks)
    move = _scale(scale.columns)
    if elements.name == "e2m1":
        return CodeOrder(1, fits, room, codes, move, torch.uint8 if scale.name == "e8m0" else torch.float8_e4m3fn)
    return CodeOrder(1, fits, room, codes, move, torch.bfloat16, _in_bf16(move))


# By format. One without an entry is read as the checkpoint has it.
ORDERS: dict[str, CodeOrder] = {
    name: _order(name)
    for name in (
        "mxfp4", "nvfp4", "int4_g32", "int4_g64", "int4_g128", "fp8_block", "fp8_block_a16", "fp8_channel",
        "fp8_channel_a16",
    )
}  # fmt: skip
