"""The argument block of a launch: one piece of memory that a launch fills with a single ``struct.pack_into``.

What stays the same from call to call on the same operands is packed once, into ``PREPARED`` bytes; a launch
copies those and adds its stream, its result and its m_sizes. A block is taken by one launch at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from ctypes import addressof, c_char

from .descriptors import MAP_ALIGNMENT_BYTES, MAP_BYTES

# Two maps; operands; row strides; [expert and row stride of w or dw, one]; index, row_weights, bias; M, index_end;
# [N K E m_sizes_step index_step x_divisor flags, null]; grid; [the rest of CUlaunchConfig up to its stream].
PREPARED = struct.Struct(f"={MAP_BYTES}s{MAP_BYTES}sQQqq24sQQQii40sI28s")
STRIDE_B = struct.Struct("=280xq")  # the result's row stride, of PREPARED bytes of a row-grouped product
STRIDES = struct.Struct("=qqq")
SIZES = struct.Struct("=iiiiiii4xQ")
_TAIL = struct.Struct("=6I4x")
# The rest of CUlaunchConfig: the stream, no attributes; then the result, m_sizes and the counter.
LAUNCH = struct.Struct(f"={PREPARED.size}sQ16xQQQ")
# The same for a kernel that stores through a map of its result.
_RESULT_MAP = 512
MAPPED_LAUNCH = struct.Struct(f"{LAUNCH.format}{_RESULT_MAP - LAUNCH.size}x{MAP_BYTES}s")

_OFFSETS = {
    "stride_a": 272, "stride_b": 280, "stride_e": 288, "stride_row": 296, "one": 304,
    "index": 312, "row_weights": 320, "bias": 328, "M": 336, "index_end": 340,
    "N": 344, "K": 348, "E": 352, "m_sizes_step": 356, "index_step": 360, "x_divisor": 364, "flags": 368, "null": 376,
    "m_sizes": 448, "counter": 456,
}  # fmt: skip
_FIRST, _SECOND, _CONFIG, _RESULT = 256, 264, 384, 440
ROWS = _OFFSETS | {
    "x": _FIRST, "w": _SECOND, "y": _RESULT, "stride_x_m": 272, "stride_y_m": 280, "stride_w_e": 288,
    "stride_w_row": 296,
}  # fmt: skip
WEIGHT = _OFFSETS | {
    "dy": _FIRST, "x": _SECOND, "dw": _RESULT, "dy_at": _FIRST, "x_at": _SECOND,
    "stride_dy_m": 272, "stride_x_m": 280, "stride_dw_e": 288,
    "stride_dw_row": 296,
}  # fmt: skip

# (memory to pack into, the offset in it, addresses of the launch configuration and of the pointers, what pins it all)
Block = tuple[bytearray, int, int, int, c_char]


def config_tail(threads: int, shared_bytes: int) -> bytes:
    """CUlaunchConfig between its first number, the programs, and its stream."""
    return _TAIL.pack(1, 1, threads, 1, 1, shared_bytes)


class Blocks:
    """Makes blocks for one variant. ``offsets`` says where each named value lies; ``maps`` are the descriptors, the
    two operands' and the result's, each with the names of the sizes and strides that follow it."""

    def __init__(
        self,
        arguments: tuple[tuple[str, str], ...],
        offsets: Mapping[str, int],
        maps: Mapping[str, tuple[str, ...]],
    ) -> None:
        places: list[int] = []
        map_at = dict(zip(maps, (0, MAP_BYTES, _RESULT_MAP), strict=True))
        for name, kind in arguments:
            if kind.startswith("desc"):
                places.append(map_at[name])
                places += [offsets[part] for part in maps[name]]
            else:
                places.append(offsets[name])
        self._places = [*places, offsets["null"], offsets["null"]]

    def new(self) -> Block:
        """A block of its own memory."""
        places = self._places
        memory = bytearray(MAPPED_LAUNCH.size + 8 * len(places) + MAP_ALIGNMENT_BYTES)
        pin = c_char.from_buffer(memory)
        offset = -addressof(pin) % MAP_ALIGNMENT_BYTES
        base = addressof(pin) + offset
        # (No array of ctypes: to make its type costs more than all the rest here.)
        struct.pack_into(f"={len(places)}Q", memory, offset + MAPPED_LAUNCH.size, *(base + place for place in places))
        return memory, offset, base + _CONFIG, base + MAPPED_LAUNCH.size, pin
