"""Launchers: bytes that are ready are copied into a block of arguments and given to the driver.

The hot path is what ``Launcher.repeater`` makes. Blocks are taken from a list and put back, so that threads
(ctypes gives up the GIL in the call), signal handlers and finalizers never share one.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_char
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from . import cuda
from .block import LAUNCH, MAPPED_LAUNCH, Blocks

# As block.Block, with its two addresses as the driver's function takes them.
_Block: TypeAlias = "tuple[bytearray, int, object, object, c_char]"
Start: TypeAlias = Callable[[bytes, int, int, int], None]  # (prepared, result, m_sizes, stream)


class Repeater(Protocol):
    """Makes a function (x, w, m_sizes) that allocates a result, launches ``prepared`` into it and returns it.

    It returns None, and does nothing, where ``same`` does not let the tensors through or ``still`` is false.
    ``empty`` allocates with (size, strides, dtype), as ``shape`` has them; without a shape the function
    is (x, w, m_sizes, out) and the result is ``out``.
    """

    def __call__(
        self, prepared: bytes, same: Callable[..., bool], still: Callable[[], bool] | None,
        empty: Callable[..., Any], shape: tuple[Any, Any, Any] | None, stream_of: Callable[[int], int],
    ) -> Callable[..., Any]: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launcher:
    """Launches one kernel for one kind of call. It does not synchronise, and any thread may call it.

    ``prepare(first, second, stride_a, stride_b, M[, index, row_weights, bias, index_end])`` packs all that
    hangs on the operands; ``start(prepared, result, m_sizes, stream)`` launches it. Calling it does both.
    Operands are device addresses, strides are in elements, M > 0. ``launch/gemm.py`` makes them.
    ``repeater`` makes functions that do one whole call over and over, see ``Repeater``. ``zeroes`` says that the rows
    of the result that nothing is stored to become zero.

    Raises
    ------
    InputError
        where M makes more tiles, or takes more rows, than a launch can have.
    CudaError
        where the driver refuses the launch.
    """

    prepare: Callable[..., bytes]
    start: Start
    repeater: Repeater
    zeroes: bool = False

    def __call__(
        self, first: int, second: int, result: int, m_sizes: int, stride_a: int, stride_b: int, M: int, stream: int,
        *rows: int,
    ) -> None:  # fmt: skip
        self.start(self.prepare(first, second, stride_a, stride_b, M, *rows), result, m_sizes, stream)


def starter(
    function: cuda.Function, what: str, blocks: Blocks, counter_of: Callable[[int], int] | None = None,
    map_of: Callable[[int, bytes], bytes] | None = None,
) -> tuple[Start, Repeater]:  # fmt: skip
    """What makes the driver call; the second does all of a call around it too, without one more call in Python.

    ``what`` names the kernel in an error; ``counter_of`` gives a kernel that counts its tiles the word for a
    launch on a stream, and ``map_of(result, prepared)`` one that stores through TMA the result's descriptor.
    """
    driver_launch, argument = cuda.launch_kernel(), cuda.argument
    handle, device = argument(function.handle), function.device
    pack, pack_mapped = LAUNCH.pack_into, MAPPED_LAUNCH.pack_into

    def new() -> _Block:
        memory, offset, config, pointers, pin = blocks.new()
        return memory, offset, argument(config), argument(pointers), pin

    free = [new()]
    take, give = free.pop, free.append

    def start(prepared: bytes, result: int, m_sizes: int, stream: int) -> None:
        try:
            block = take()
        except IndexError:  # each is in use by another thread
            block = new()
        memory, offset, config, pointers, _ = block
        word = 0 if counter_of is None else counter_of(stream)
        if map_of is None:
            pack(memory, offset, prepared, stream, result, m_sizes, word)
        else:
            pack_mapped(memory, offset, prepared, stream, result, m_sizes, word, map_of(result, prepared))
        code = driver_launch(config, handle, pointers, None)
        if code:
            recover(code, config, pointers)
        give(block)

    def recover(code: int, config: object, pointers: object) -> None:
        if code == cuda.INVALID_CONTEXT:  # a thread that has not touched CUDA yet
            cuda.make_current(device)
            code = driver_launch(config, handle, pointers, None)
        cuda.check(code, f"cuLaunchKernelEx({what})")

    def repeater(
        prepared: bytes, same: Callable[..., bool], still: Callable[[], bool] | None,
        empty: Callable[..., Any], shape: tuple[Any, Any, Any] | None, stream_of: Callable[[int], int],
    ) -> Callable[..., Any]:  # fmt: skip
        def into(x: Any, w: Any, m_sizes: Any, out: Any) -> Any:
            if not same(x, w, m_sizes, out) or (still is not None and not still()):
                return None
            start(prepared, out.data_ptr(), m_sizes.data_ptr(), stream_of(device))
            return out

        if shape is None:
            return into
        size, strides, dtype = shape

        def counted(x: Any, w: Any, m_sizes: Any) -> Any:
            if not same(x, w, m_sizes) or (still is not None and not still()):
                return None
            y = empty(size, strides, dtype)
            start(prepared, y.data_ptr(), m_sizes.data_ptr(), stream_of(device))
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
            pack(memory, offset, prepared, stream_of(device), y.data_ptr(), m_sizes.data_ptr(), 0)
            code = driver_launch(config, handle, pointers, None)
            if code:
                recover(code, config, pointers)
            give(block)
            return y

        return again if counter_of is None and map_of is None else counted

    return start, repeater
