"""Launchers of products whose x and w are of codes, which row kernels make of x.

``rows_w8a8`` (kernels/contract/block_scaled.py) and ``rows_w8a8_channel`` (kernels/contract/row_scaled.py).
"""

from __future__ import annotations

from ...artifacts.errors import InputError
from ...kernels.codes import BLOCK, WORD_ROW
from ...kernels.contract.block_scaled import GROUP, scale_columns
from ...kernels.contract.config import Schedule
from ...kernels.contract.registry import too_large
from ...kernels.contract.words import RAGGED_SIZES
from ..driver.block import BlockLayout, Words
from ..driver.descriptors import TensorMaps
from ..driver.launcher import Launcher, starter
from .gemm import LATE, Fused, LoadedKernel, always, counter_of, map_of_rows, without_clearing

_MOST_TILES = 2**31 - 1
_WORDS: Words = (
    ("x", "desc2"), ("w", "desc4"), ("x_scale", "desc2"), ("w_scale", "ptr"), ("stride_y_m", "i64"), ("index", "ptr"),
    ("row_weights", "ptr"), ("bias", "ptr"), ("M", "i32"), ("index_end", "i32"),
)  # fmt: skip
_KINDS = {"w": "desc3", "x_scale": "ptr"}  # of products with a scale a row
_UNREAD = {rank: ("null",) * rank + ("one",) * rank for rank in (2, 3, 4)}
_QUARTERS = BLOCK * BLOCK // 4 // WORD_ROW  # of a block of codes, each a row of its descriptor


def block_scaled_launcher(kernel: LoadedKernel, *, N: int, K: int, E: int, m_sizes_step: int, fused: Fused) -> Launcher:
    """A launcher of y[g] = x[g] @ w[g].T, whose ``pack`` takes what that of ``gemm.row_launcher`` does.

    ``x`` and ``x_scale`` are the addresses of what ``RowOp.QUANTIZE`` writes, or with a scale a row what
    ``RowOp.QUANTIZE_ROWS`` does; ``w`` is that of prepared codes [E, N, K] and ``w_scale`` that of their fp32 scales,
    [E, N / 128, K / 128] or [E, N].

    Raises
    ------
    InputError
        where the product has more columns, or a longer reduction, than the kernel can do.
    """
    config, variant, device = kernel.config, kernel.variant, kernel.function.device
    wrong = too_large(variant.op, N, K, config)  # type: ignore[arg-type]
    if wrong:
        raise InputError(f"{variant.entry}: {wrong}")
    fused = without_clearing(fused, variant, config)
    by_row = config.schedule is Schedule.ROW_SCALED
    layout = BlockLayout(
        variant.arguments,
        given=tuple((name, _KINDS.get(name, kind)) for name, kind in _WORDS) if by_row else _WORDS,
        late=(("y", "ptr"), *LATE, *([("y_map", "desc4")] if "y_map" in dict(variant.arguments) else [])),
        fixed={"N": N, "K": K} | always(E, m_sizes_step, fused),
        maps={"x": _UNREAD[2], "w": _UNREAD[3 if by_row else 4], "x_scale": _UNREAD[2], "y_map": _UNREAD[4]},
        threads=kernel.function.threads,
        shared_bytes=kernel.function.shared_bytes,
    )
    start, repeater = starter(
        kernel.function, f"{variant.entry}, {config}", layout, counter_of(kernel),
        map_of_rows(kernel, N, layout.offsets["stride_y_m"]),
    )  # fmt: skip
    packed, tail = layout.pack, layout.tail
    tiles_n, block_m = -(-N // config.block_n), config.block_m
    most = kernel.sm_count * kernel.function.per_sm
    deep = K // BLOCK
    w_sizes: tuple[int, ...] = (deep, E * (N // BLOCK), _QUARTERS, WORD_ROW)
    w_strides: tuple[int, ...] = (_QUARTERS * WORD_ROW, deep * _QUARTERS * WORD_ROW, WORD_ROW)
    if by_row:
        w_sizes, w_strides = (E * (N // BLOCK), deep * _QUARTERS, WORD_ROW), (deep * _QUARTERS * WORD_ROW, WORD_ROW)
    x_maps, w_maps, scale_maps = (TensorMaps.of(variant, name, device) for name in ("x", "w", "x_scale"))
    if x_maps is None or w_maps is None or (scale_maps is None) is not by_row:
        raise AssertionError("the kernel's record has no descriptors")  # launchable.py has looked

    def pack(
        *, x: int, x_scale: int, w: int, w_scale: int, stride_y_m: int, M: int,
        index: int = 0, row_weights: int = 0, bias: int = 0, index_end: int = 0,
    ) -> bytes:  # fmt: skip
        active = E if E < M else M
        tiles = ((M - active) // block_m + active) * tiles_n  # registry.most_tiles, inlined
        if tiles > _MOST_TILES:
            made = f"M={M} rows and N={N} columns make {tiles} tiles"
            raise InputError(f"{made} of {config}, the most is {_MOST_TILES}: split the batch")
        if RAGGED_SIZES[2] < M:
            raise InputError(f"M={M}, the most rows of {config} is 2^30: split the batch")
        key = (x, M, 0)
        x_map = x_maps.known.get(key) or x_maps.encode(key, (M, K), (K,))
        key = (w, 0, 0)
        w_map = w_maps.known.get(key) or w_maps.encode(key, w_sizes, w_strides)
        scale_map: int | bytes = x_scale
        if scale_maps is not None:
            key = (x_scale, M, 0)
            columns = scale_columns(M)
            scale_map = scale_maps.known.get(key) or scale_maps.encode(key, (K // GROUP, columns), (columns,))
        return packed(
            x_map, w_map, scale_map, w_scale, stride_y_m, index, row_weights, bias, M, index_end,
            tiles if tiles < most else most, tail,
        )  # fmt: skip

    return Launcher(pack, start, repeater, zeroes=fused.zero_tail)
