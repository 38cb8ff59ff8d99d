"""TMA descriptors: encoded by the driver for sizes and strides; an address is filled in where that is all it takes."""

from __future__ import annotations

import functools
import struct
from ctypes import addressof, c_char
from typing import TYPE_CHECKING

from ...artifacts.errors import CudaError
from . import cuda

if TYPE_CHECKING:
    from ...artifacts.records.bundle import TensorMap, Variant

MAP_BYTES = 128
MAP_ALIGNMENT_BYTES = 64
_CACHED = 256
_OTHER_ADDRESS = 0x7FFFFFF0  # the bits in which another one differs: aligned as well
_ELEMENT_BYTES = {0: 1, 2: 4, 6: 2, 7: 4, 9: 2, 11: 4}  # of a CUtensorMapDataType (cuda.h)


class TensorMaps:
    """The descriptors of one argument, by (address, rows, row stride)."""

    @classmethod
    def of(cls, variant: Variant, argument: str, device: int) -> TensorMaps | None:
        """None where the argument is a plain pointer."""
        plans = [plan for plan in variant.tensor_maps if plan.argument == argument]
        return cls(plans[0], device) if plans else None

    def __init__(self, plan: TensorMap, device: int) -> None:
        rank = len(plan.box)
        self._plan, self._device = plan, device
        self._itemsize = _ELEMENT_BYTES[plan.element]
        self._box = struct.pack(f"={rank}I", *reversed(plan.box))
        self._ones = struct.pack(f"={rank}I", *[1] * rank)
        self._leads: bool | None = None
        self.known: dict[tuple[int, int, int], bytes] = {}

    def split(
        self, key: tuple[int, int, int], sizes: tuple[int, ...], strides: tuple[int, ...]
    ) -> tuple[int, bytes, bool]:
        """The first eight bytes of a descriptor as a number, the rest, and whether those are of any address.

        They are if the driver puts the address first and nothing else hangs on it. (PTX's tensormap.replace changes
        the address alone, too.) That is asked of the driver once, by a second descriptor.
        """
        encoded = self.known.get(key) or self.encode(key, sizes, strides)
        if self._leads is None:
            other = key[0] ^ _OTHER_ADDRESS
            moved = self._encoded(other, sizes, strides)
            self._leads = encoded == _word(key[0]) + moved[8:] and moved[:8] == _word(other)
        return int.from_bytes(encoded[:8], "little"), encoded[8:], self._leads

    def encode(self, key: tuple[int, int, int], sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        """The descriptor, 128 bytes, kept under ``key``, which begins with the address.

        ``sizes`` and ``strides`` are in elements, outermost dimension first; the last dimension's stride is 1.

        Raises
        ------
        CudaError
            where the driver refuses it.
        """
        encoded = self._encoded(key[0], sizes, strides)
        if len(self.known) >= _CACHED:
            self.known = {}
        self.known[key] = encoded
        return encoded

    def _encoded(self, address: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        rank, plan = len(sizes), self._plan
        memory = bytearray(MAP_BYTES + MAP_ALIGNMENT_BYTES)
        pin = c_char.from_buffer(memory)
        at = -addressof(pin) % MAP_ALIGNMENT_BYTES
        # cuTensorMapEncodeTiled counts dimensions from the innermost; L2 promotion 128 bytes (2), out of bounds zero.
        arguments = (
            addressof(pin) + at,
            plan.element,
            rank,
            address,
            struct.pack(f"={rank}Q", *reversed(sizes)),
            struct.pack(f"={rank - 1}Q", *(s * self._itemsize for s in reversed(strides))),
            self._box,
            self._ones,
            0,
            plan.swizzle,
            2,
            0,
        )
        encode = cuda.library().cuTensorMapEncodeTiled
        code = encode(*arguments)
        if code:
            what = f"cuTensorMapEncodeTiled({plan.argument}, sizes {sizes}, strides {strides})"
            cuda.recover(code, what, self._device, encode, *arguments)
        return bytes(memory[at : at + MAP_BYTES])


def _word(number: int) -> bytes:
    return number.to_bytes(8, "little")


@functools.cache
def repeats_rows(device: int) -> bool:
    """Whether the driver of ``cuda:device`` encodes rows with a stride of 0, each of which is the first one.

    (Its documentation asks for a multiple of 16 below 2^40. Nothing is read of the memory that this names.)
    """
    from ...artifacts.records.bundle import TensorMap  # here, as only rows of one token ask

    try:
        TensorMaps(TensorMap("x", 9, (16, 64), 3), device).encode((MAP_BYTES, 0, 0), (16, 64), (0,))
    except CudaError:
        return False
    return True
