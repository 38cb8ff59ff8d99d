"""From a loaded variant to a launch: what a launch needs is packed once, then copied and given to the driver.

``launcher.py`` has the hot path.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...artifacts.errors import BundleCorrupt, InputError
from ...artifacts.records.bundle import Variant
from ...artifacts.records.problem import Fusion, Op
from ...kernels.contract.config import Config, Schedule
from ...kernels.contract.launchable import unlaunchable
from ...kernels.contract.registry import clears, limits_of, too_large, transposed, weight_tiles
from ...kernels.contract.spec import result_columns
from ...kernels.contract.words import CLEARER_ROWS, FLAGS, RAGGED_SIZES, ZERO_TAIL, ragged_strides
from ..driver import cuda
from ..driver.block import BlockLayout, Words
from ..driver.descriptors import TensorMaps
from ..driver.device import device as device_of
from ..driver.launcher import Launcher, starter

_MOST_TILES = 2**31 - 1
_MOST_ROWS = RAGGED_SIZES[2]  # kernels count rows past a tile's end, and those of no expert, 16 for each program
_MOST_PROGRAMS = 2**26
_INDEXED = Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT  # what reads the index
# The sizes and strides that follow a descriptor of a rank, where no kernel reads them.
_UNREAD = {rank: ("null",) * rank + ("one",) * rank for rank in (3, 4)}
# The words of a call in the order in which ``pack`` has them, and those that a launch adds.
_ROWS: Words = (
    ("x", "ptr"), ("w", "ptr"), ("stride_x_m", "i64"), ("stride_y_m", "i64"), ("index", "ptr"), ("row_weights", "ptr"),
    ("bias", "ptr"), ("M", "i32"), ("index_end", "i32"),
)  # fmt: skip
_LOW: Words = (("low_x", "ptr"), ("low_w", "ptr"))  # beside these, where the code adds a low-rank part
_WEIGHT: Words = (
    ("dy", "ptr"), ("x", "ptr"), ("dy_at", "ptr"), ("x_at", "ptr"), ("stride_dy_m", "i64"), ("stride_x_m", "i64"),
    ("M", "i32"),
)  # fmt: skip
LATE: Words = (("m_sizes", "ptr"), ("counter", "ptr"))  # beside the result
_NO_INDEX = {"index": 0, "row_weights": 0, "bias": 0, "index_end": 0}


class LoadedKernel(NamedTuple):
    """A variant on a device: its code is loaded and its persistent grid is known."""

    variant: Variant
    function: cuda.Function
    sm_count: int

    @property
    def config(self) -> Config:
        """The config of a GEMM's variant."""
        return Config.from_pairs(self.variant.config)


def load_kernel(variant: Variant, cubin: bytes, device: int, sm_count: int, where: str | None = None) -> LoadedKernel:
    """Load a variant's verified cubin on a device. ``where`` begins an error, else the kernel's name does.

    Raises
    ------
    CudaError
        where the driver refuses the code.
    BundleCorrupt
        where the variant's record is not one that this launcher knows.
    """
    wrong = unlaunchable(variant)
    if not wrong and variant.scratch_bytes:
        wrong = f"it wants {variant.scratch_bytes} bytes of scratch: ABI 1 has none"
    if wrong:
        raise BundleCorrupt(
            f"{where or f'variant {variant.entry}'}: {wrong}. Copy the bundle again, or rebuild it with `aot build`."
        )
    function = cuda.load(
        cubin, variant.entry, threads=variant.threads, shared_bytes=variant.shared_bytes, device=device
    )
    return LoadedKernel(variant, function, sm_count)


class Fused(NamedTuple):
    """What a call does beside the product; the kernel's flags say of ``fusion`` what its code leaves open.

    ``index_step`` is 2 for an int64 index; x's row of an index is ``index // x_divisor``. ``zero_tail`` sets
    the rows of y that belong to no expert to zero; of y [index_end, N] scattered to, those that no row goes to, by code
    that can (``registry.clears``) alone: of one tile a program if they are ``few``, specialised if it can ``beside``
    the product.
    """

    fusion: Fusion = Fusion.NONE
    index_step: int = 1
    x_divisor: int = 1
    zero_tail: bool = False
    few: bool = True
    beside: bool = True


PLAIN = Fused()


def _refuse(variant: Variant, columns: int, reduction: int, config: Config) -> None:
    wrong = too_large(variant.op, columns, reduction, config) if isinstance(variant.op, Op) else None
    if wrong:
        raise InputError(f"{variant.entry}: {wrong}")


def without_clearing(fused: Fused, variant: Variant, config: Config) -> Fused:
    """What is asked, less ``zero_tail`` where code that an index tells where to store can't do it, or is not to."""
    asked = fused.beside if config.schedule.warp_specialized else fused.few
    can = asked and clears(variant.fusion, config)
    return fused._replace(zero_tail=False) if fused.fusion & _INDEXED and not can else fused


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
    R: int = 0,
    rows_of_w: int | None = None,
) -> Launcher:
    """A launcher of y[g] = x[g] @ w[g].T.

    ``pack`` takes x, w, stride_x_m, stride_y_m and M, a fused call also the addresses of index, row_weights and bias (0
    for none), and index_end; of code that adds a low-rank part, of ``R`` columns, low_x and low_w. In the kernel's
    words: ``columns`` of the product (of code with SILU y has half as many), ``reduction``, and ``w_kn`` where w's
    columns are the contiguous ones. Where the code can't do ``fused.zero_tail`` it is left to the caller:
    ``Launcher.zeroes`` tells. ``rows_of_w`` are fewer than ``columns`` where y's rows are filled up to whole 16 bytes,
    of code that reads w [E, N, K] through a descriptor: those columns are zeros.

    Raises
    ------
    InputError
        where the product has more columns, or a longer reduction, than the kernel can do.
    """
    config, variant = kernel.config, kernel.variant
    _refuse(variant, columns, reduction, config)
    if rows_of_w is not None and (w_kn or all(one.argument != "w" for one in variant.tensor_maps)):
        raise AssertionError("fewer rows of w by code that would read past them")
    specialized, one_tile = config.schedule.warp_specialized, config.schedule is Schedule.TILE
    fused = without_clearing(fused, variant, config)
    w_sizes = ("K", "N") if w_kn else ("N", "K")
    maps = {"x": ("M", "K", "stride_x_m", "one"), "w": ("E", *w_sizes, "stride_w_e", "stride_w_row", "one")}
    fixed = {"N": columns, "K": reduction, "stride_w_e": stride_w_e, "stride_w_row": stride_w_row, "R": R}
    low = Fusion.LOW_RANK in variant.fusion
    late = (("y", "ptr"), *LATE, *([("y_map", "desc4")] if "y_map" in dict(variant.arguments) else []))
    unread = {"y_map": _UNREAD[4], "low_x": ("null",) * 2 + ("one",) * 2, "low_w": _UNREAD[3]}
    given = _ROWS + _LOW if low else _ROWS
    layout = _layout(kernel, given, late, fixed | always(E, m_sizes_step, fused), maps | unread)
    start, repeater = starter(
        kernel.function,
        f"{variant.entry}, {config}",
        layout,
        counter_of(kernel),
        map_of_rows(kernel, result_columns(columns, variant.fusion), layout.offsets["stride_y_m"]),
    )
    packed, tail = layout.pack, layout.tail
    tiles_n, block_m = -(-columns // config.block_n), config.block_m
    clearers = fused.zero_tail and Fusion.SCATTER in fused.fusion and not specialized
    most_tiles = _MOST_PROGRAMS if one_tile else _MOST_TILES
    most = _MOST_PROGRAMS if one_tile else kernel.sm_count * kernel.function.per_sm
    sizes = (E, reduction, columns) if w_kn else (E, rows_of_w or columns, reduction)
    strides = stride_w_e, stride_w_row
    x_maps, w_maps = (TensorMaps.of(variant, name, kernel.function.device) for name in ("x", "w"))
    low_of = low_words(kernel, (E, R, columns) if w_kn else (E, columns, R), R) if low else None

    def pack(
        *, x: int, w: int, stride_x_m: int, stride_y_m: int, M: int,
        index: int = 0, row_weights: int = 0, bias: int = 0, index_end: int = 0, low_x: int = 0, low_w: int = 0,
    ) -> bytes:  # fmt: skip
        active = E if E < M else M
        tiles = ((M - active) // block_m + active) * tiles_n  # registry.most_tiles, inlined
        if clearers:
            tiles += -(-index_end // CLEARER_ROWS)
        if tiles > most_tiles:
            made = f"M={M} rows and N={columns} columns make {tiles} tiles"
            raise InputError(f"{made} of {config}, the most is {most_tiles}: split the batch")
        if M > _MOST_ROWS:
            raise InputError(f"M={M}, the most rows of {config} is 2^30: split the batch")
        x_word: int | bytes = x
        w_word: int | bytes = w
        if x_maps is not None:
            key = (x, M, stride_x_m)
            x_word = x_maps.known.get(key) or x_maps.encode(key, (M, reduction), (stride_x_m,))
        if w_maps is not None:
            key = (w, 0, 0)
            w_word = w_maps.known.get(key) or w_maps.encode(key, sizes, strides)
        if low_of is not None:
            return packed(
                x_word, w_word, stride_x_m, stride_y_m, index, row_weights, bias, M, index_end,
                *low_of(low_x, low_w, M), tiles if tiles < most else most, tail,
            )  # fmt: skip
        return packed(
            x_word, w_word, stride_x_m, stride_y_m, index, row_weights, bias, M, index_end,
            tiles if tiles < most else most, tail,
        )  # fmt: skip

    return Launcher(pack, start, repeater, zeroes=fused.zero_tail)


def low_words(
    kernel: LoadedKernel, sizes: tuple[int, int, int], R: int
) -> Callable[[int, int, int], tuple[int | bytes, int | bytes]]:
    """Who has low_x [M, R] and low_w, of these sizes, as the kernel takes them: addresses, or descriptors."""
    x_maps, w_maps = (TensorMaps.of(kernel.variant, name, kernel.function.device) for name in ("low_x", "low_w"))
    strides = sizes[1] * sizes[2], sizes[2]

    def words(low_x: int, low_w: int, M: int) -> tuple[int | bytes, int | bytes]:
        if x_maps is None or w_maps is None:
            return low_x, low_w
        x_key, w_key = (low_x, M, R), (low_w, 0, 0)
        return (
            x_maps.known.get(x_key) or x_maps.encode(x_key, (M, R), (R,)),
            w_maps.known.get(w_key) or w_maps.encode(w_key, sizes, strides),
        )

    return words


def weight_launcher(
    kernel: LoadedKernel,
    *,
    N: int,
    K: int,
    E: int,
    stride_dw_e: int,
    stride_dw_row: int,
    m_sizes_step: int,
) -> Launcher:
    """A launcher of dw[g] = dy[g].T @ x[g], whose ``pack`` takes dy, x, stride_dy_m, stride_x_m and M.

    Raises
    ------
    InputError
        where dw's tiles pass 2^31, or it has more columns than the kernel can do.
    """
    config, variant, device = kernel.config, kernel.variant, kernel.function.device
    _refuse(variant, N if transposed(Op.DW, config) else K, 0, config)
    maps = {"dy": _UNREAD[4], "x": _UNREAD[4], "dw": _UNREAD[3]}
    fixed = {"N": N, "K": K, "stride_dw_e": stride_dw_e, "stride_dw_row": stride_dw_row} | _NO_INDEX
    kind = dict(variant.arguments)["dw"]  # beside a descriptor its address is given all the same
    late = (("dw", kind), *LATE) if kind == "ptr" else (("dw_at", "ptr"), *LATE, ("dw", kind))
    layout = _layout(kernel, _WEIGHT, late, fixed | always(E, m_sizes_step, PLAIN), maps)
    start, repeater = starter(
        kernel.function,
        f"{variant.entry}, {config}",
        layout,
        counter_of(kernel),
        _map_of_weight(kernel, (E, N, K), (stride_dw_e, stride_dw_row)),
    )
    packed, tail = layout.pack, layout.tail
    tiles = weight_tiles(N, K, E, config)
    if tiles > _MOST_TILES:
        raise InputError(f"E={E}, N={N}, K={K} make {tiles} tiles of {config}, the most is 2^31 - 1")
    programs = tiles if config.schedule is Schedule.TILE else min(tiles, kernel.sm_count * kernel.function.per_sm)
    dy_maps, x_maps = (TensorMaps.of(variant, name, device) for name in ("dy", "x"))
    dy_sizes, x_sizes = (*RAGGED_SIZES, N), (*RAGGED_SIZES, K)
    most_steps = limits_of(Op.DW, config).steps
    most_rows = _MOST_ROWS if most_steps is None else min(_MOST_ROWS, config.block_m * most_steps)

    def pack(*, dy: int, x: int, stride_dy_m: int, stride_x_m: int, M: int) -> bytes:
        dy_word: int | bytes = dy
        x_word: int | bytes = x
        if dy_maps is not None and x_maps is not None:
            if most_rows < M:
                raise InputError(f"M={M}, the most rows of dW by {config} is {most_rows}: split the batch")
            dy_key, x_key = (dy, 0, stride_dy_m), (x, 0, stride_x_m)
            dy_word = dy_maps.known.get(dy_key) or dy_maps.encode(dy_key, dy_sizes, ragged_strides(stride_dy_m))
            x_word = x_maps.known.get(x_key) or x_maps.encode(x_key, x_sizes, ragged_strides(stride_x_m))
        return packed(dy_word, x_word, dy, x, stride_dy_m, stride_x_m, M, programs, tail)

    return Launcher(pack, start, repeater)


def map_of_rows(kernel: LoadedKernel, columns: int, stride_at: int) -> Callable[[int, bytes], bytes] | None:
    """Who describes y, ragged rows, to a kernel that stores through TMA; packed words have y's row stride there."""
    maps = TensorMaps.of(kernel.variant, "y_map", kernel.function.device)
    if maps is None:
        return None
    sizes, stride = (*RAGGED_SIZES, columns), struct.Struct(f"={stride_at}xq")

    def map_of(y: int, packed: bytes) -> bytes:
        (stride_y_m,) = stride.unpack_from(packed)
        key = (y, 0, stride_y_m)
        return maps.known.get(key) or maps.encode(key, sizes, ragged_strides(stride_y_m))

    return map_of


def _map_of_weight(
    kernel: LoadedKernel, sizes: tuple[int, int, int], strides: tuple[int, int]
) -> Callable[[int, bytes], bytes] | None:
    """The same of dw."""
    maps = TensorMaps.of(kernel.variant, "dw", kernel.function.device)
    if maps is None:
        return None

    def map_of(dw: int, _packed: bytes) -> bytes:
        key = (dw, 0, 0)
        return maps.known.get(key) or maps.encode(key, sizes, strides)

    return map_of


def counter_of(kernel: LoadedKernel) -> Callable[[int], int] | None:
    """Who gives the launches of a kernel that hands out its tiles the word to count them in."""
    counts = any(name == "counter" for name, _ in kernel.variant.arguments)
    return device_of(kernel.function.device).counters.take if counts else None


def _layout(
    kernel: LoadedKernel, given: Words, late: Words, fixed: Mapping[str, int], maps: Mapping[str, tuple[str, ...]]
) -> BlockLayout:
    function = kernel.function
    return BlockLayout(
        kernel.variant.arguments, given=given, late=late, fixed=fixed, maps=maps, threads=function.threads,
        shared_bytes=function.shared_bytes,
    )  # fmt: skip


def always(E: int, m_sizes_step: int, fused: Fused) -> dict[str, int]:
    """The words that a launcher fixes, of every op."""
    flags = (fused.fusion & FLAGS).value | (ZERO_TAIL if fused.zero_tail else 0)
    return {"E": E, "m_sizes_step": m_sizes_step, "index_step": fused.index_step, "x_divisor": fused.x_divisor,
            "flags": flags}  # fmt: skip
