"""The one place that fills a block of arguments and calls the driver: for products and for row operations.

The hot path is what ``Launcher.repeater`` makes. Blocks are taken from a list and put back, so that threads
(ctypes gives up the GIL in the call), signal handlers and finalizers never share one.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_char
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from ...artifacts.errors import InputError
from ...artifacts.records.bundle import Variant
from ...artifacts.records.problem import RowOp
from ...kernels.contract.rowops import Block, programs, rows_at_once
from . import cuda
from .block import BlockLayout

_MOST_PROGRAMS = 2**31 - 1

# As block.Block, with its two addresses as the driver's function takes them.
_Block: TypeAlias = "tuple[bytearray, int, object, object, c_char]"
Start: TypeAlias = Callable[[bytes, int, int, int], None]  # (packed, result, m_sizes, stream)


class Repeater(Protocol):
    """Makes a function (x, w, m_sizes) that allocates a result, launches ``packed`` into it and returns it.

    It returns None, and does nothing, where ``same`` does not let the tensors through or ``still`` is false.
    ``empty`` allocates with (size, strides, dtype), as ``shape`` has them; without a shape the function
    is (x, w, m_sizes, out) and the result is ``out``.
    """

    def __call__(
        self, packed: bytes, same: Callable[..., bool], still: Callable[[], bool] | None,
        empty: Callable[..., Any], shape: tuple[Any, Any, Any] | None, stream_of: Callable[[int], int],
    ) -> Callable[..., Any]: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launcher:
    """Launches one kernel for one kind of call. It does not synchronise, and any thread may call it.

    ``pack`` takes the kernel's words that change from call to call, by their names (kernels/contract/words.py), and
    makes bytes of them; ``start(packed, result, m_sizes, stream)`` launches those. Calling it does both.
    Operands are device addresses, strides are in elements, M > 0. ``launch/gemm.py`` makes launchers and says which
    words theirs take.
    ``repeater`` makes functions that do one whole call over and over, see ``Repeater``. ``zeroes`` says that the rows
    of the result that nothing is stored to become zero.

    Raises
    ------
    InputError
        where M makes more tiles, or takes more rows, than a launch can have.
    CudaError
        where the driver refuses the launch.
    """

    pack: Callable[..., bytes]
    start: Start
    repeater: Repeater
    zeroes: bool = False

    def __call__(self, result: int, m_sizes: int, stream: int, **words: int) -> None:
        self.start(self.pack(**words), result, m_sizes, stream)


class _Driver(NamedTuple):
    """A kernel's blocks, its handle as the driver's function takes it, and what to do where that refuses a launch."""

    take: Callable[[], _Block]
    new: Callable[[], _Block]
    give: Callable[[_Block], None]
    handle: object
    refused: Callable[[int, object, object], None]


def _driver(function: cuda.Function, what: str, layout: BlockLayout) -> _Driver:
    driver_launch, argument, device = cuda.launch_kernel(), cuda.argument, function.device
    handle = argument(function.handle)

    def new() -> _Block:
        memory, offset, config, pointers, pin = layout.new()
        return memory, offset, argument(config), argument(pointers), pin

    def refused(code: int, config: object, pointers: object) -> None:
        cuda.recover(code, f"cuLaunchKernelEx({what})", device, driver_launch, config, handle, pointers, None)

    free = [new()]
    return _Driver(free.pop, new, free.append, handle, refused)


def whole_launch(function: cuda.Function, what: str, layout: BlockLayout) -> Callable[[tuple[int | bytes, ...]], None]:
    """What packs all values of ``layout.whole`` and launches them. ``what`` names the kernel in an error."""
    take, new, give, handle, refused = _driver(function, what, layout)
    driver_launch, pack = cuda.launch_kernel(), layout.whole.pack_into

    def launch(values: tuple[int | bytes, ...]) -> None:
        try:
            block = take()
        except IndexError:  # each is in use by another thread
            block = new()
        memory, offset, config, pointers, _ = block
        pack(memory, offset, *values)
        code = driver_launch(config, handle, pointers, None)
        if code:
            refused(code, config, pointers)
        give(block)

    return launch


def starter(
    function: cuda.Function, what: str, layout: BlockLayout, counter_of: Callable[[int], int] | None = None,
    map_of: Callable[[int, bytes], bytes] | None = None,
) -> tuple[Start, Repeater]:  # fmt: skip
    """What launches packed bytes; the second does all of a call around it too, without one more call in Python.

    ``layout`` has the result, m_sizes and the counter's word as those that a launch adds, and with ``map_of`` the
    result's descriptor. ``what`` names the kernel in an error; ``counter_of`` gives a kernel that counts its tiles the
    word for a launch on a stream, and ``map_of(result, packed)`` one that stores through TMA the descriptor.
    """
    take, new, give, handle, refused = _driver(function, what, layout)
    driver_launch, device, pack = cuda.launch_kernel(), function.device, layout.launch.pack_into

    def start(packed: bytes, result: int, m_sizes: int, stream: int) -> None:
        try:
            block = take()
        except IndexError:
            block = new()
        memory, offset, config, pointers, _ = block
        word = 0 if counter_of is None else counter_of(stream)
        if map_of is None:
            pack(memory, offset, packed, stream, result, m_sizes, word)
        else:
            pack(memory, offset, packed, stream, result, m_sizes, word, map_of(result, packed))
        code = driver_launch(config, handle, pointers, None)
        if code:
            refused(code, config, pointers)
        give(block)

    def repeater(
        packed: bytes, same: Callable[..., bool], still: Callable[[], bool] | None,
        empty: Callable[..., Any], shape: tuple[Any, Any, Any] | None, stream_of: Callable[[int], int],
    ) -> Callable[..., Any]:  # fmt: skip
        def into(x: Any, w: Any, m_sizes: Any, out: Any) -> Any:
            if not same(x, w, m_sizes, out) or (still is not None and not still()):
                return None
            start(packed, out.data_ptr(), m_sizes.data_ptr(), stream_of(device))
            return out

        if shape is None:
            return into
        size, strides, dtype = shape

        def counted(x: Any, w: Any, m_sizes: Any) -> Any:
            if not same(x, w, m_sizes) or (still is not None and not still()):
                return None
            y = empty(size, strides, dtype)
            start(packed, y.data_ptr(), m_sizes.data_ptr(), stream_of(device))
            return y

        def again(x: Any, w: Any, m_sizes: Any) -> Any:
            if not same(x, w, m_sizes) or (still is not None and not still()):
                return None
            y = empty(size, strides, dtype)
            try:
                block = take()
            except IndexError:
                block = new()
            memory, offset, config, pointers, _ = block
            pack(memory, offset, packed, stream_of(device), y.data_ptr(), m_sizes.data_ptr(), 0)
            code = driver_launch(config, handle, pointers, None)
            if code:
                refused(code, config, pointers)
            give(block)
            return y

        return again if counter_of is None and map_of is None else counted

    return start, repeater


class RowOpLauncher:
    """Launches one loaded pass. It does not synchronise, and any thread may call it."""

    __slots__ = ("_launch", "_op", "_rows", "_tail", "block", "most_experts")

    def __init__(self, variant: Variant, function: cuda.Function, op: RowOp) -> None:
        layout = BlockLayout(
            variant.arguments, given=variant.arguments, threads=function.threads, shared_bytes=function.shared_bytes
        )
        self._launch, self._tail = whole_launch(function, variant.entry, layout), layout.tail
        self._op, self._rows = op, rows_at_once(op)
        self.block, self.most_experts = Block.from_pairs(variant.config).block, variant.max_experts

    def __call__(
        self, rows: int, columns: int, pointers: tuple[int, ...], numbers: tuple[int, ...], stream: int
    ) -> None:
        """Launch over ``rows`` rows; ``pointers`` and ``numbers`` are the arguments.

        Raises
        ------
        InputError
            where that makes more programs than a launch can have.
        CudaError
            where the driver refuses the launch.
        """
        grid = programs(self._op, rows, columns, self.block, self._rows)
        if grid > _MOST_PROGRAMS:
            raise InputError(f"{rows} rows of {columns} columns make {grid} programs, the most is 2^31 - 1: split them")
        self._launch((*pointers, *numbers, grid, self._tail, stream))
