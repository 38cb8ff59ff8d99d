"""The block of a launch: one piece of memory with all that the driver reads of it, where its kernel's words say.

First the words that a call gives, then CUlaunchConfig, the words that a launch adds, the words that stay as they are,
and an address for each parameter. A block is taken by one launch at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from ctypes import addressof, c_char
from typing import TypeAlias

from .descriptors import MAP_ALIGNMENT_BYTES, MAP_BYTES

Words: TypeAlias = "tuple[tuple[str, str], ...]"  # (name, kind): ptr, i32, i64, desc2, desc3, desc4

# (memory to pack into, the offset in it, addresses of the launch configuration and of the pointers, what pins it all)
Block: TypeAlias = "tuple[bytearray, int, int, int, c_char]"

_WORD_BYTES = 8  # of any word but a descriptor
_CODES = {"ptr": "Q", "i64": "q", "i32": "i4x"}
_MAP = f"Q{MAP_BYTES - _WORD_BYTES}s"  # a descriptor's address, and the rest of it
_PROGRAMS = "I28s"  # CUlaunchConfig up to its stream
_STREAM = "Q16x"  # and the rest of it: no attributes
_TAIL = struct.Struct("=6I4x")


class BlockLayout:
    """Where each word of one kernel lies in the block of a launch, and what packs them.

    ``words`` are the kernel's arguments in its order. A call gives the values of ``given``, a launch those of ``late``,
    and ``fixed`` is the same in every launch; a word that the kernel does not have takes up room and is not read. Of a
    word that both name, the kernel's kind counts: a descriptor has two values, its first
    eight bytes and the rest, and ``maps`` names the sizes and strides that follow it.

    ``whole`` packs ``given``, programs, ``tail``, the stream and ``late`` into a block; ``head`` packs what comes
    before the stream into bytes, which ``launch`` takes in place of those.
    """

    __slots__ = ("_base", "_config", "_fixed", "_offsets", "_places", "_size", "head", "launch", "tail", "whole")

    def __init__(
        self,
        words: Words,
        *,
        given: Words,
        late: Words = (),
        fixed: Mapping[str, int] | None = None,
        maps: Mapping[str, tuple[str, ...]] | None = None,
        threads: int,
        shared_bytes: int,
    ) -> None:
        kinds, maps = dict(words), maps or {}
        self._offsets: dict[str, int] = {}
        call, self._config = self._place(((name, kinds.get(name, kind)) for name, kind in given), 0)
        self.tail = _TAIL.pack(1, 1, threads, 1, 1, shared_bytes)
        before = struct.calcsize(f"={call}{_PROGRAMS}{_STREAM}")
        added, end = self._place(((name, kinds.get(name, kind)) for name, kind in late), before)
        self.whole = struct.Struct(f"={call}{_PROGRAMS}{_STREAM}{added}")
        self.head = struct.Struct(f"={call}{_PROGRAMS}")
        self.launch = struct.Struct(f"={self.head.size}s{_STREAM}{added}")
        constants = {"null": 0, "one": 1, **(fixed or {})}
        rest, self._base = self._place(((name, kinds.get(name, "i64")) for name in constants), end)
        self._fixed = struct.pack(f"={rest}", *constants.values())
        parts = ((name, *(maps[name] if kind.startswith("desc") else ())) for name, kind in words)
        places = [self._offsets[part] for every in parts for part in every]
        self._places = [*places, *[self._offsets["null"]] * 2]  # two scratch pointers that every kernel takes: none
        self._size = self._base + _WORD_BYTES * len(self._places)

    def new(self) -> Block:
        """A block of its own memory."""
        places = self._places
        memory = bytearray(self._size + MAP_ALIGNMENT_BYTES)
        pin = c_char.from_buffer(memory)
        offset = -addressof(pin) % MAP_ALIGNMENT_BYTES
        base = addressof(pin) + offset
        fixed = offset + self._base - len(self._fixed)
        memory[fixed : fixed + len(self._fixed)] = self._fixed
        # (No array of ctypes: to make its type costs more than all the rest here.)
        struct.pack_into(f"={len(places)}Q", memory, offset + self._base, *(base + place for place in places))
        return memory, offset, base + self._config, base + self._base, pin

    def _place(self, words: Iterable[tuple[str, str]], at: int) -> tuple[str, int]:
        """The format of these words from ``at`` on, and where they end; each one's place is kept."""
        codes = []
        for name, kind in words:
            is_map = kind.startswith("desc")
            before = -at % (MAP_ALIGNMENT_BYTES if is_map else _WORD_BYTES)
            self._offsets[name] = at + before
            codes.append(f"{before}x{_MAP if is_map else _CODES[kind]}")
            at += before + (MAP_BYTES if is_map else _WORD_BYTES)
        return "".join(codes), at
