"""The launcher of all kernels: it fills a block of memory with a kernel's declared arguments, and calls the driver.

The hot paths are the functions of ``Launcher.bind``. Blocks are taken from a list and put back, so that threads (ctypes
releases the GIL in the call), signal handlers and finalizers never share a block.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from ctypes import addressof, c_char
from operator import itemgetter
from typing import Any, TypeAlias

from ...artifacts.errors import CudaError
from ...artifacts.records import TensorMap, Variant
from ...kernels.arch import probes_far
from ...kernels.entry import TensorShape
from . import cuda
from .device import device as device_of
from .device import local_gpu

MOST_PROGRAMS = 2**30  # program_id + num_programs must fit int32
_MOST_BOUND = 256
_MOST_SIZED = 1024  # cached sizes, 0.5 KB each

# ``Memory`` with its two addresses converted to arguments of the driver's function.
_Block: TypeAlias = "tuple[bytearray, int, object, object, c_char]"
Grid: TypeAlias = Callable[[int, int], int]  # (rows, index_end) -> programs
Run: TypeAlias = "Callable[..., None]"  # (M, stream, *addresses): see Launcher.bind
Behind: TypeAlias = "tuple[tuple[str, int, int], ...]"
# The cached bytes of a launch: before the stream, after the first address, after the second, after each other address.
_Sized: TypeAlias = "tuple[bytes, bytes, bytes, tuple[bytes, ...]]"
MAP_BYTES = 128
MAP_ALIGNMENT_BYTES = 64
_CACHED = 256
# A known issue of NVIDIA's driver (release notes of 595.71.05): on Blackwell a descriptor of less than 128 KiB that is
# not a dense tensor may touch memory past its end. The notes say to clear the descriptor's bit 85: bit 5 of byte 10.
_FAR = 128 << 10
_PROBES_FAR = 1 << 5
_OTHER_ADDRESS = 0x7FFFFFF0  # XOR with it gives another aligned address
_ELEMENT_BYTES = {0: 1, 2: 4, 6: 2, 7: 4, 9: 2, 11: 4}  # bytes of each CUtensorMapDataType (cuda.h)

Words: TypeAlias = "tuple[tuple[str, str], ...]"  # (name, kind): ptr, i32, i64, desc2, desc3, desc4

# (memory to pack into, offset in it, address of the launch configuration, address of the pointers, a pin on the memory)
Memory: TypeAlias = "tuple[bytearray, int, int, int, c_char]"

_WORD_BYTES = 8  # size of an argument that is not a descriptor
_CODES = {"ptr": "Q", "i64": "q", "i32": "i4x"}
_REST = f"{MAP_BYTES - _WORD_BYTES}s"  # format of a descriptor's bytes after its first word, the address
_PROGRAMS = "I28s"  # CUlaunchConfig before its stream
_STREAM = "Q16x"  # the rest of CUlaunchConfig: a stream, no attributes
_TAIL = struct.Struct("=6I4x")


class TensorMaps:
    """The descriptors of one argument, by (address, rows, row stride)."""

    @classmethod
    def of(cls, variant: Variant, argument: str, device: int) -> TensorMaps | None:
        """The descriptors of an argument; None if it is a plain pointer."""
        plans = [plan for plan in variant.tensor_maps if plan.argument == argument]
        return cls(plans[0], device) if plans else None

    def __init__(self, plan: TensorMap, device: int) -> None:
        rank = len(plan.box)
        self._plan, self._device = plan, device
        self._itemsize = _ELEMENT_BYTES[plan.element]
        self._box = struct.pack(f"={rank}I", *reversed(plan.box))
        self._ones = struct.pack(f"={rank}I", *[1] * rank)
        self._leads: bool | None = None
        self.cached: dict[tuple[int, int, int], bytes] = {}

    def split(
        self, key: tuple[int, int, int], sizes: tuple[int, ...], strides: tuple[int, ...]
    ) -> tuple[int, bytes, bool]:
        """The first eight bytes of a descriptor as a number, its other bytes, and whether these fit any address.

        They do if the driver puts the address first and no other byte depends on it. The first call tests that, by a
        second descriptor with another address. (PTX's tensormap.replace changes the address alone, too.)
        """
        encoded = self.cached.get(key) or self.encode(key, sizes, strides)
        if self._leads is None:
            other = key[0] ^ _OTHER_ADDRESS
            moved = self._encoded(other, sizes, strides)
            self._leads = encoded == _word(key[0]) + moved[8:] and moved[:8] == _word(other)
        return int.from_bytes(encoded[:8], "little"), encoded[8:], self._leads

    def encode(self, key: tuple[int, int, int], sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        """The descriptor, 128 bytes, cached under ``key``, whose first field is the address.

        ``sizes`` and ``strides`` are in elements, outermost dimension first; the last dimension's stride is 1.

        Raises
        ------
        CudaError
            where the driver refuses it.
        """
        encoded = self._encoded(key[0], sizes, strides)
        if len(self.cached) >= _CACHED:
            self.cached = {}
        self.cached[key] = encoded
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
        extent = sum((size - 1) * stride for size, stride in zip(sizes, (*strides, 1), strict=True)) + 1
        if extent * self._itemsize < _FAR and probes_far(local_gpu(self._device).sm):
            memory[at + 10] &= ~_PROBES_FAR
        return bytes(memory[at : at + MAP_BYTES])


def _word(number: int) -> bytes:
    return number.to_bytes(8, "little")


@functools.cache
def repeats_rows(device: int) -> bool:
    """True if the driver accepts a descriptor with a row stride of 0, whose rows are all the first row.

    CUDA's documentation asks for a multiple of 16 below 2^40. The test encodes a descriptor that nothing reads.
    """
    try:
        TensorMaps(TensorMap("x", 9, (16, 64), 3), device).encode((MAP_BYTES, 0, 0), (16, 64), (0,))
    except CudaError:
        return False
    return True


class BlockLayout:
    """The offsets of a kernel's arguments in the memory block of a launch, and the structures that pack them.

    A block is a piece of memory with all that the driver reads for a launch, in this order: the words of a call,
    CUlaunchConfig, the words that a launch adds, the constant words, and an address for each parameter. One launch at
    a time uses a block.

    ``words`` are the kernel's arguments in its order. A call sets the words of ``early``, a launch those of ``late``,
    and ``fixed`` are equal in every launch. A word that the kernel does not declare takes up space and is not read. If
    ``words`` has a word, its kind there counts. A descriptor has two values, its first eight bytes and the rest;
    ``maps`` names the sizes and strides that follow it.

    ``whole`` packs ``early``, programs, ``tail``, the stream and ``late`` into a block. ``head`` packs all before the
    stream into bytes, which can be cached; the structure of ``launch`` takes these bytes.
    """

    __slots__ = ("_base", "_config", "_fixed", "_late", "_offsets", "_places", "_size", "head", "tail", "whole")

    def __init__(
        self,
        words: Words,
        *,
        early: Words,
        late: Words = (),
        fixed: Mapping[str, int] | None = None,
        maps: Mapping[str, tuple[str, ...]] | None = None,
        threads: int,
        shared_bytes: int,
    ) -> None:
        kinds, maps = dict(words), maps or {}
        self._offsets: dict[str, int] = {}
        codes, self._config = self._place(((name, kinds.get(name, kind)) for name, kind in early), 0)
        call = "".join(codes)
        self.tail = _TAIL.pack(1, 1, threads, 1, 1, shared_bytes)
        before = struct.calcsize(f"={call}{_PROGRAMS}{_STREAM}")
        self._late, end = self._place(((name, kinds.get(name, kind)) for name, kind in late), before)
        self.whole = struct.Struct(f"={call}{_PROGRAMS}{_STREAM}{''.join(self._late)}")
        self.head = struct.Struct(f"={call}{_PROGRAMS}")
        constants = {"null": 0, "one": 1, **(fixed or {})}
        codes, self._base = self._place(((name, kinds.get(name, "i64")) for name in constants), end)
        self._fixed = struct.pack(f"={''.join(codes)}", *constants.values())
        parts = ((name, *(maps[name] if kind.startswith("desc") else ())) for name, kind in words)
        places = [self._offsets[part] for group in parts for part in group]
        self._places = [*places, *[self._offsets["null"]] * 2]  # every Triton kernel takes two scratch pointers: null
        self._size = self._base + _WORD_BYTES * len(self._places)

    def launch(self, varies: Sequence[bool]) -> tuple[struct.Struct, list[struct.Struct]]:
        """The structure that packs ``head``'s bytes, the stream, and the late words that vary from launch to launch.

        Bytes follow each varying word from the fourth on: the rest of its descriptor, and the words that don't vary.
        The other structures pack these bytes.
        """
        words: list[str] = []
        behind: list[str] = []
        for code, other in zip(self._late, varies, strict=True):
            if other:
                words.append(code.removesuffix(_REST))
                behind.append(code[len(words[-1]) :])
            else:
                behind[-1] += code
        constant = [struct.Struct(f"={codes}") for codes in behind[3:]]
        words[3:] = [f"{word}{structure.size}s" for word, structure in zip(words[3:], constant, strict=True)]
        return struct.Struct(f"={self.head.size}s{_STREAM}{''.join(words)}"), constant

    def new(self) -> Memory:
        """Allocate a block."""
        places = self._places
        memory = bytearray(self._size + MAP_ALIGNMENT_BYTES)
        pin = c_char.from_buffer(memory)
        offset = -addressof(pin) % MAP_ALIGNMENT_BYTES
        base = addressof(pin) + offset
        fixed = offset + self._base - len(self._fixed)
        memory[fixed : fixed + len(self._fixed)] = self._fixed
        # Not a ctypes array: making its type takes longer than all the rest of this function.
        struct.pack_into(f"={len(places)}Q", memory, offset + self._base, *(base + place for place in places))
        return memory, offset, base + self._config, base + self._base, pin

    def _place(self, words: Iterable[tuple[str, str]], at: int) -> tuple[list[str], int]:
        """Return the struct formats of these words from ``at`` on, and their end; note each word's offset."""
        codes = []
        for name, kind in words:
            is_map = kind.startswith("desc")
            before = -at % (MAP_ALIGNMENT_BYTES if is_map else _WORD_BYTES)
            self._offsets[name] = at + before
            codes.append(f"{before}xQ{_REST}" if is_map else f"{before}x{_CODES[kind]}")
            at += before + (MAP_BYTES if is_map else _WORD_BYTES)
        return codes, at


class Blocks:
    """A kernel's argument blocks and the function that launches one."""

    __slots__ = ("free", "handle", "launch", "layout", "new", "refused")

    def __init__(self, function: cuda.Function, what: str, layout: BlockLayout) -> None:
        driver_launch, argument, device = cuda.launch_kernel(), cuda.argument, function.device
        handle = argument(function.handle)

        def new() -> _Block:
            memory, offset, config, pointers, pin = layout.new()
            return memory, offset, argument(config), argument(pointers), pin

        def refused(code: int, config: object, pointers: object) -> None:
            cuda.recover(code, f"cuLaunchKernelEx({what})", device, driver_launch, config, handle, pointers, None)

        self.launch, self.handle, self.layout = driver_launch, handle, layout
        self.new, self.refused, self.free = new, refused, [new()]

    def whole(self) -> Callable[[tuple[int | bytes, ...]], None]:
        """A function that packs all values of ``layout.whole`` into a block and launches the kernel."""
        take, new, give, handle, refused = self.free.pop, self.new, self.free.append, self.handle, self.refused
        driver_launch, pack = self.launch, self.layout.whole.pack_into

        def launch(values: tuple[int | bytes, ...]) -> None:
            try:
                block = take()
            except IndexError:  # other threads use all blocks
                block = new()
            memory, offset, config, pointers, _ = block
            pack(memory, offset, *values)
            code = driver_launch(config, handle, pointers, None)
            if code:
                refused(code, config, pointers)
            give(block)

        return launch


class Launcher:
    """Launches one loaded kernel. It does not synchronise, and any thread may call it.

    The kernel declares its arguments. A launch adds those of ``late``, and the result's descriptor (``stored``); those
    of ``fixed`` are equal in all launches; a call gives the others. ``shapes`` says which shapes descriptors have. The
    argument ``NAME_map`` is a descriptor of NAME; ``NAME_at`` is the address of NAME if NAME itself is a descriptor.
    ``operands`` names the addresses that a function of ``bind`` takes, and ``each`` the numbers that this function
    fills in itself.
    """

    __slots__ = ("_blocks", "_bound", "_fills", "_layout", "_numbers", "_pick", "operands")

    def __init__(
        self,
        variant: Variant,
        function: cuda.Function,
        what: str,
        *,
        late: Words = (),
        stored: Words = (),
        fixed: Mapping[str, int],
        shapes: Mapping[str, TensorShape],
        each: tuple[str, ...],
    ) -> None:
        kinds, added = dict(variant.arguments), {name for name, _ in (*late, *stored)}
        pointers = [(name, kind) for name, kind in kinds.items() if kind[0] != "i"]
        operands = [(name, kind) for name, kind in pointers if name not in added]
        numbers = [name for name, kind in kinds.items() if kind[0] == "i" and name not in {*fixed, *each}]
        described = {name: shapes[name] for name, kind in pointers if kind[0] == "d"}
        # Index of an operand -> its descriptors, and the first three fields of its ``TensorShape``.
        self._fills = {
            at: (TensorMaps(plan, function.device), *described[name][:3])
            for at, (name, _) in enumerate(operands)
            for plan in variant.tensor_maps
            if plan.argument == name
        }
        self._layout = BlockLayout(
            variant.arguments,
            early=(*((name, "i32") for name in each), *((name, kinds[name]) for name in numbers)),
            late=(*late, *operands, *stored),
            fixed=fixed,
            maps={name: shape.read or _unread(kinds[name]) for name, shape in described.items()},
            threads=function.threads,
            shared_bytes=function.shared_bytes,
        )
        self._blocks = Blocks(function, what, self._layout)
        self._bound: dict[object, Run] = {}
        self.operands = tuple(_operand(name) for name, _ in operands)
        self._pick, self._numbers = _picks(*self.operands), _picks(*numbers)

    def bind(self, **how: Any) -> Run:
        """A cached function (M, stream, *addresses) that launches the kernel on the addresses of ``operands``.

        ``how`` has the kernel's numbers by name, and these options. ``behind`` has (operand, bytes, bytes for each
        row): the operand begins that far past its address. ``per``: the sorted rows for each row of a row kernel's
        launch. ``all_rows``: a product's ``index_end`` is M. ``absent``: operands of a product that are null; the
        function takes no address for them.
        """
        key = tuple(how.items())
        run = self._bound.get(key)
        if run is None:
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            run = self._bound[key] = self._bind(**how)
        return run

    def _bind(self, **how: Any) -> Run:
        raise NotImplementedError


class ProductLauncher(Launcher):
    """Launches one product for one kind of call. It does not synchronise, and any thread may call it.

    ``result`` is the argument that the kernel stores to. Each launch fills in the result, its descriptor, m_sizes and
    the tile counter. ``grid(M, index_end)`` is the number of programs. Pointers that are not ``required`` may be left
    out: they are null. With ``zeroes``, rows of the result that the kernel does not store must become zero; with
    ``plain_scales`` it reads ``ExpertWeights.plain_scale``.

    A call of the launcher takes the words by name: operands are device addresses, strides are in elements, M > 0.

    Raises
    ------
    InputError
        if a launch can't have so many tiles or rows.
    CudaError
        if the driver refuses the launch.
    """

    __slots__ = ("_counter_of", "_grid", "_nulls", "_stores", "plain_scales", "zeroes")

    def __init__(
        self,
        variant: Variant,
        function: cuda.Function,
        what: str,
        *,
        result: str,
        grid: Grid,
        fixed: Mapping[str, int],
        shapes: Mapping[str, TensorShape],
        required: Collection[str],
        zeroes: bool,
        plain_scales: bool,
    ) -> None:
        stored = [(name, kind) for name, kind in variant.arguments if kind[0] == "d" and _operand(name) == result]
        address = f"{result}_at" if stored and stored[0][0] == result else result  # given in any case
        late, each = ((address, "ptr"), ("m_sizes", "ptr"), ("counter", "ptr")), ("M", "index_end")
        super().__init__(
            variant, function, what, late=late, stored=tuple(stored), fixed=fixed, shapes=shapes, each=each
        )
        self._nulls = dict.fromkeys((*(name for name in self.operands if name not in required), "index_end"), 0)
        self._grid, self.zeroes, self.plain_scales = grid, zeroes, plain_scales
        self._counter_of = None
        if any(name == "counter" for name, _ in variant.arguments):
            self._counter_of = device_of(function.device).counters.take
        self._fills |= {
            len(self.operands): (TensorMaps(plan, function.device), shapes[name].of, False, shapes[name].stride)
            for name, _ in stored
            for plan in variant.tensor_maps
            if plan.argument == name
        }
        self._stores = bool(stored)
        self.operands = (result, "m_sizes", *self.operands)

    def __call__(self, result: int, m_sizes: int, stream: int, **words: int) -> None:
        words = self._nulls | words
        numbers = {name: word for name, word in words.items() if name != "M" and name not in self.operands}
        addresses = [words[name] for name in self.operands[2:]]
        self.bind(**numbers)(words["M"], stream, result, m_sizes, *addresses)

    def _bind(
        self,
        *,
        index_end: int = 0,
        all_rows: bool = False,
        behind: Behind = (),
        absent: Sequence[str] = (),
        **numbers: int,
    ) -> Run:
        names, stores, described = self.operands[2:], self._stores, self._fills
        there = [*(name not in absent for name in names), *[True] * stores]
        shifts = shifts_of(behind, [name for name, passed in zip(names, there, strict=False) if passed])
        values, grid, layout, blocks = self._numbers(numbers), self._grid, self._layout, self._blocks
        packed, constant = layout.launch([True, True, True, *there])
        # For each address: its entry in ``_fills`` or None, and the null arguments after it.
        words: list[tuple[Any, list[int]]] = []
        for at, passed in enumerate(there):
            if passed:
                words.append((described.get(at), []))
            else:
                words[-1][1].append(0)
        many = len(words) - 2
        pick = itemgetter(*[place for n in range(many) for place in (n, many + n)]) if many else None
        pack, counter_of, driver_launch, handle = packed.pack_into, self._counter_of, blocks.launch, blocks.handle
        take, new, give, refused = blocks.free.pop, blocks.new, blocks.free.append, blocks.refused
        sized: dict[int, _Sized] = {}

        def size(M: int, addresses: list[int]) -> _Sized:
            """Pack the bytes that launches of M rows share; cached if no descriptor's rest depends on its address.

            In ``addresses``, the address of an operand with a descriptor is replaced by the descriptor's first word.
            """
            end, behind, any_address = M if all_rows else index_end, [], True
            head = layout.head.pack(M, end, *values, grid(M, end), layout.tail)
            for n, ((how, nulls), structure) in enumerate(zip(words, constant, strict=True)):
                rest: list[bytes] = []
                if how is not None:
                    maps, of, by_rows, stride = how
                    rows, step = M if by_rows else 0, numbers[stride] if stride else 0
                    addresses[n], bytes_of, leads = maps.split((addresses[n], rows, step), *of(rows, step))
                    any_address &= leads
                    rest = [bytes_of]
                behind.append(structure.pack(*rest, *nulls))
            shared = head, behind[0], behind[1], tuple(behind[2:])
            if any_address:
                if len(sized) >= _MOST_SIZED:
                    sized.clear()
                sized[M] = shared
            return shared

        def run(M: int, stream: int, result: int, m_sizes: int, first: int, second: int, *others: int) -> None:
            if stores:
                others += (result,)
            if shifts:
                first, second, *moved = moved_by((first, second, *others), shifts, M)
                others = tuple(moved)
            shared = sized.get(M)
            if shared is None:
                addresses = [first, second, *others]
                shared = size(M, addresses)
                first, second, *moved = addresses
                others = tuple(moved)
            head, behind_first, behind_second, rests = shared
            word = 0 if counter_of is None else counter_of(stream)
            try:
                block = take()
            except IndexError:
                block = new()
            memory, offset, config, pointers, _ = block
            if pick is None:
                pack(memory, offset, head, stream, result, m_sizes, word, first, behind_first, second, behind_second)
            else:
                picked = pick(others + rests)
                pack(
                    memory,
                    offset,
                    head,
                    stream,
                    result,
                    m_sizes,
                    word,
                    first,
                    behind_first,
                    second,
                    behind_second,
                    *picked,
                )
            code = driver_launch(config, handle, pointers, None)
            if code:
                refused(code, config, pointers)
            give(block)

        return run


def _picks(*names: str) -> Callable[[Mapping[str, int]], tuple[Any, ...]]:
    """Return a function that picks the values of these names from a mapping, in order."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda words: tuple([words[name] for name in names])


def _operand(argument: str) -> str:
    """The name of the operand that a pointer argument points to or describes."""
    return argument.removesuffix("_map").removesuffix("_at")


def _unread(kind: str) -> tuple[str, ...]:
    """Names for the sizes and strides that follow a descriptor of this kind, if the kernel reads none of them."""
    rank = int(kind.removeprefix("desc"))
    return ("null",) * rank + ("one",) * rank


def shifts_of(behind: Behind, operands: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return ``behind`` of ``Launcher.bind`` with indices into ``operands`` for names; drop names not in it."""
    return [(operands.index(name), once, each) for name, once, each in behind if name in operands]


def moved_by(addresses: Sequence[int], shifts: Sequence[tuple[int, int, int]], M: int) -> list[int]:
    """Return the addresses, with each operand of ``shifts`` moved to where it begins in a launch of M rows."""
    moved = list(addresses)
    for at, once, each in shifts:
        moved[at] += once + M * each
    return moved
