"""From a loaded variant to a launch: arguments packed in place, TMA descriptors cached, one driver call.

The hot path. Arguments live in a buffer of each thread (ctypes gives up the GIL in the call), laid
out so that what changes from call to call is one ``struct.pack_into``.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping
from ctypes import addressof, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from ..artifacts.errors import BundleCorrupt, InputError
from ..artifacts.types import Fusion, TensorMap, Variant
from ..kernels.abi import RAGGED_SIZES, ragged_strides, weight_tiles
from ..kernels.config import Config
from . import driver

# (first operand, second operand, result, m_sizes, row stride, row stride, M, stream[, index, row_weights, bias,
# index_end]): see the two factories below.
Launcher = Callable[..., None]

# What changes from call to call: three operands and m_sizes (pointers), two row strides, M ...
_DYNAMIC = struct.Struct("=QQQQqqi")
# ... and of a fused call: index, row_weights and bias (pointers), index_end.
_FUSED = struct.Struct("=QQQi")
_FUSED_OFFSET = 56
# What the launcher fixes: N K E m_sizes_step index_step x_divisor flags, two strides, one, the null of both scratches.
_STATIC = struct.Struct("=iiiiiiiqqqQ")
_STATIC_OFFSET = 84
_FIXED = {
    "m_sizes": 24, "M": 48, "index": 56, "row_weights": 64, "bias": 72, "index_end": 80, "N": 84, "K": 88, "E": 92,
    "m_sizes_step": 96, "index_step": 100, "x_divisor": 104, "flags": 108, "one": 128, "null": 136,
}  # fmt: skip
_ROWS_AT = _FIXED | {
    "x": 0,
    "w": 8,
    "y": 16,
    "stride_x_m": 32,
    "stride_y_m": 40,
    "stride_w_e": 112,
    "stride_w_row": 120,
}
_WEIGHT_AT = _FIXED | {
    "dy": 0, "x": 8, "dw": 16, "stride_dy_m": 32, "stride_x_m": 40, "stride_dw_e": 112, "stride_dw_row": 120,
}  # fmt: skip
_ARGUMENT_BYTES = 144
_MAP_BYTES = 128
_MAP_ALIGNMENT_BYTES = 64
_CACHED_MAPS = 256
_MOST_TILES = 2**31 - 1
_MOST_RAGGED_ROWS = RAGGED_SIZES[2]


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A variant on a device: its code is loaded and its persistent grid is known."""

    variant: Variant
    function: driver.Function
    config: Config
    sm_count: int


def load_kernel(variant: Variant, cubin: bytes, device: int, sm_count: int) -> LoadedKernel:
    """Load a variant's verified cubin on a device.

    Raises
    ------
    CudaError
        where the driver refuses the code.
    BundleCorrupt
        where the variant's record is not one that this launcher knows.
    """
    try:
        config = Config.from_pairs(variant.config)
    except ValueError as error:
        raise BundleCorrupt(f"variant {variant.entry}: {error}") from None
    if variant.scratch_bytes:
        raise BundleCorrupt(f"variant {variant.entry} wants {variant.scratch_bytes} bytes of scratch: ABI 1 has none")
    function = driver.load(
        cubin, variant.entry, threads=variant.threads, shared_bytes=variant.shared_bytes, device=device
    )
    return LoadedKernel(variant, function, config, sm_count)


class _Arguments(threading.local):
    """One thread's argument block: the values, the array of pointers to them, and the launch configuration.

    ``offsets`` says where each named value lies; ``shapes`` names the sizes and strides that follow
    each descriptor argument.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        offsets: dict[str, int],
        shapes: Mapping[str, tuple[str, ...]],
        static: tuple[int, ...],
    ) -> None:
        self.values = ctypes.create_string_buffer(_ARGUMENT_BYTES)
        base = addressof(self.values)
        _STATIC.pack_into(self.values, _STATIC_OFFSET, *static)
        pointers: list[int] = []
        self.map_slots: dict[str, int] = {}
        for name, kind in kernel.variant.arguments:
            if kind.startswith("desc"):
                self.map_slots[name] = len(pointers)
                pointers.append(0)
                pointers += [base + offsets[part] for part in shapes[name]]
            else:
                pointers.append(base + offsets[name])
        pointers += [base + offsets["null"]] * 2
        self.pointers = (c_void_p * len(pointers))(*pointers)
        function = kernel.function
        self.config = driver.LaunchConfig(1, 1, 1, function.threads, 1, 1, function.shared_bytes, None, None, 0)
        self.config_address = addressof(self.config)
        self.pointers_address = addressof(self.pointers)


class _TensorMaps:
    """TMA descriptors of one argument, encoded once for each (address, rows, stride)."""

    @classmethod
    def of(cls, kernel: LoadedKernel, argument: str) -> _TensorMaps | None:
        """None where the argument is a plain pointer."""
        plans = [plan for plan in kernel.variant.tensor_maps if plan.argument == argument]
        return cls(kernel, plans[0]) if plans else None

    def __init__(self, kernel: LoadedKernel, plan: TensorMap) -> None:
        self.plan = plan
        rank = len(self.plan.box)
        self.box = (c_uint * rank)(*reversed(self.plan.box))
        self.ones = (c_uint * rank)(*[1] * rank)
        self.itemsize = kernel.variant.dtype.itemsize
        self.cached: dict[Any, tuple[int, Any]] = {}

    def encode(self, key: Any, address: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, Any]:
        """(address of the 128 bytes, their owner). ``strides`` in elements, all but the last dimension's."""
        rank = len(sizes)
        owner = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT_BYTES)
        at = -(-addressof(owner) // _MAP_ALIGNMENT_BYTES) * _MAP_ALIGNMENT_BYTES
        # cuTensorMapEncodeTiled counts dimensions from the innermost; L2 promotion 128 bytes (2), out of bounds zero.
        code = driver.library().cuTensorMapEncodeTiled(
            at, self.plan.element, rank, address, (c_uint64 * rank)(*reversed(sizes)),
            (c_uint64 * max(1, rank - 1))(*(s * self.itemsize for s in reversed(strides))),
            self.box, self.ones, 0, self.plan.swizzle, 2, 0,
        )  # fmt: skip
        driver.check(code, f"cuTensorMapEncodeTiled({self.plan.argument}, sizes {sizes}, strides {strides})")
        if len(self.cached) >= _CACHED_MAPS:
            self.cached.clear()
        self.cached[key] = at, owner
        return at, owner


def _launch(kernel: LoadedKernel) -> Callable[[_Arguments, int, int], None]:
    """A function (arguments, programs, stream) that makes the driver call."""
    launch, handle, device = driver.library().cuLaunchKernelEx, kernel.function.handle, kernel.function.device

    def start(mine: _Arguments, programs: int, stream: int) -> None:
        config = mine.config
        config.grid_x = programs
        config.stream = stream
        code = launch(mine.config_address, handle, mine.pointers_address, None)
        if code:
            if code == driver.INVALID_CONTEXT:  # a thread that has not touched CUDA yet
                driver.make_current(device)
                code = launch(mine.config_address, handle, mine.pointers_address, None)
            driver.check(code, f"cuLaunchKernelEx({kernel.variant.entry}, {kernel.config}, grid {programs})")

    return start


@dataclass(frozen=True, slots=True)
class Fused:
    """What a call does beside the product; ``fusion`` is what the kernel's flags say.

    ``index_step`` is 2 for an int64 index; x's row of an index is ``index // x_divisor``.
    """

    fusion: Fusion = Fusion.NONE
    index_step: int = 1
    x_divisor: int = 1


PLAIN = Fused()


def row_launcher(
    kernel: LoadedKernel,
    *,
    columns: int,
    reduction: int,
    E: int,
    w_kn: bool,
    stride_w_e: int,
    stride_w_row: int,
    m_sizes_step: int,
    fused: Fused = PLAIN,
) -> Launcher:
    """A function (x, w, y, m_sizes, stride_x_m, stride_y_m, M, stream) that launches y[g] = x[g] @ w[g].T.

    The four operands are device addresses, strides are in elements, M > 0. It does not synchronise,
    and any thread may call it. In the kernel's words: ``columns`` of y, ``reduction``, and ``w_kn``
    where w's columns are the contiguous ones. A fused call takes four more: the addresses of index,
    row_weights and bias (0 for none), and index_end.

    Raises
    ------
    InputError
        where the tiles of M rows pass 2^31.
    CudaError
        where the driver refuses the launch.
    """
    config = kernel.config
    shapes = {
        "x": ("M", "K", "stride_x_m", "one"),
        "w": ("E", *(("K", "N") if w_kn else ("N", "K")), "stride_w_e", "stride_w_row", "one"),
    }
    static = (columns, reduction, E, m_sizes_step, fused.index_step, fused.x_divisor, fused.fusion.value,
              stride_w_e, stride_w_row, 1, 0)  # fmt: skip
    local = _Arguments(kernel, _ROWS_AT, shapes, static)
    pack, start = _DYNAMIC.pack_into, _launch(kernel)
    tiles_n, block_m = -(-columns // config.block_n), config.block_m
    most = kernel.sm_count * kernel.function.per_sm if config.persistent else _MOST_TILES
    w_sizes = (E, reduction, columns) if w_kn else (E, columns, reduction)
    x_maps, w_maps = _TensorMaps.of(kernel, "x"), _TensorMaps.of(kernel, "w")
    x_slot, w_slot = local.map_slots.get("x", 0), local.map_slots.get("w", 0)

    def launch(
        x: int, w: int, y: int, m_sizes: int, stride_x_m: int, stride_y_m: int, M: int, stream: int,
        *rows: int,
    ) -> None:  # fmt: skip
        active = E if E < M else M
        tiles = ((M - active) // block_m + active) * tiles_n  # kernels.abi.most_tiles, inlined
        if tiles > _MOST_TILES:
            raise InputError(f"M={M} rows and N={columns} columns make {tiles} tiles of {config}, the most is 2^31 - 1")
        # The maps are kept alive by these names until the driver has copied them.
        if x_maps is not None:
            key = (x, M, stride_x_m)
            x_map = x_maps.cached.get(key) or x_maps.encode(key, x, (M, reduction), (stride_x_m,))
            local.pointers[x_slot] = x_map[0]
        if w_maps is not None:
            w_map = w_maps.cached.get(w) or w_maps.encode(w, w, w_sizes, (stride_w_e, stride_w_row))
            local.pointers[w_slot] = w_map[0]
        pack(local.values, 0, x, w, y, m_sizes, stride_x_m, stride_y_m, M)
        if rows:
            _FUSED.pack_into(local.values, _FUSED_OFFSET, *rows)
        start(local, tiles if tiles < most else most, stream)

    return launch


def weight_launcher(
    kernel: LoadedKernel,
    *,
    N: int,
    K: int,
    E: int,
    stride_dw_e: int,
    stride_dw_row: int,
    m_sizes_step: int,
    fused: Fused = PLAIN,
) -> Launcher:
    """A function (dy, x, dw, m_sizes, stride_dy_m, stride_x_m, M, stream) that launches dw[g] = dy[g].T @ x[g].

    As ``row_launcher``; of the four that a fused call adds, only index and index_end count.

    Raises
    ------
    InputError
        where dw's tiles pass 2^31, or M passes 2^30 (the most that a ragged descriptor counts).
    CudaError
        where the driver refuses the launch.
    """
    config = kernel.config
    shapes = dict.fromkeys(("dy", "x"), ("null",) * 4 + ("one",) * 4)  # no kernel reads them
    static = (N, K, E, m_sizes_step, fused.index_step, fused.x_divisor, fused.fusion.value,
              stride_dw_e, stride_dw_row, 1, 0)  # fmt: skip
    local = _Arguments(kernel, _WEIGHT_AT, shapes, static)
    pack, start = _DYNAMIC.pack_into, _launch(kernel)
    tiles = weight_tiles(N, K, E, config)
    if tiles > _MOST_TILES:
        raise InputError(f"E={E}, N={N}, K={K} make {tiles} tiles of {config}, the most is 2^31 - 1")
    programs = min(tiles, kernel.sm_count * kernel.function.per_sm) if config.persistent else tiles
    dy_maps, x_maps = _TensorMaps.of(kernel, "dy"), _TensorMaps.of(kernel, "x")
    dy_slot, x_slot = local.map_slots.get("dy", 0), local.map_slots.get("x", 0)
    dy_sizes, x_sizes = (*RAGGED_SIZES, N), (*RAGGED_SIZES, K)

    def launch(
        dy: int, x: int, dw: int, m_sizes: int, stride_dy_m: int, stride_x_m: int, M: int, stream: int,
        *rows: int,
    ) -> None:  # fmt: skip
        if dy_maps is not None and x_maps is not None:
            if M > _MOST_RAGGED_ROWS:
                raise InputError(f"M={M}, the most rows of dW through TMA is 2^30: split the batch")
            dy_key, x_key = (dy, stride_dy_m), (x, stride_x_m)
            dy_map = dy_maps.cached.get(dy_key) or dy_maps.encode(dy_key, dy, dy_sizes, ragged_strides(stride_dy_m))
            x_map = x_maps.cached.get(x_key) or x_maps.encode(x_key, x, x_sizes, ragged_strides(stride_x_m))
            local.pointers[dy_slot] = dy_map[0]
            local.pointers[x_slot] = x_map[0]
        pack(local.values, 0, dy, x, dw, m_sizes, stride_dy_m, stride_x_m, M)
        if rows:
            _FUSED.pack_into(local.values, _FUSED_OFFSET, *rows)
        start(local, programs, stream)

    return launch
