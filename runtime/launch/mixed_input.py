"""Launchers of products whose w is of codes and x is not.

``rows_wna16`` and ``rows_wna16_zero`` read prepared ones, see kernels/contract/mixed_input.py; ``coded`` any, see
kernels/contract/coded.py.
"""

from __future__ import annotations

import math

from ...artifacts.errors import InputError
from ...artifacts.records.problem import Fusion, Op
from ...kernels.codes import BLOCK, WORD_ROW
from ...kernels.contract.mixed_input import code_layout, zero_bytes
from ...kernels.contract.registry import too_large
from ...kernels.contract.words import CLEARER_ROWS, RAGGED_SIZES
from ..check.tensors import address_of
from ..driver.block import BlockLayout, Words
from ..driver.descriptors import TensorMaps
from ..driver.launcher import Launcher, starter
from ..weights.expert_weights import ExpertWeights
from .gemm import LATE, Fused, LoadedKernel, always, counter_of, low_words, without_clearing

_MOST_TILES = 2**31 - 1
_WORDS: Words = (
    ("x", "desc2"), ("w", "desc2"), ("w_scale", "desc2"), ("w_zero", "desc2"), ("w_outer", "ptr"),
    ("stride_y_m", "i64"), ("index", "ptr"), ("row_weights", "ptr"), ("bias", "ptr"), ("M", "i32"),
    ("index_end", "i32"),
)  # fmt: skip
_LOW_WORDS: Words = (("low_x", "desc2"), ("low_w", "desc3"))
_CODED_WORDS: Words = (
    ("x", "ptr"), ("w", "ptr"), ("w_scale", "ptr"), ("w_zero", "ptr"), ("w_outer", "ptr"), ("stride_x_m", "i64"),
    ("stride_y_m", "i64"), ("index", "ptr"), ("row_weights", "ptr"), ("bias", "ptr"), ("M", "i32"),
    ("index_end", "i32"),
)  # fmt: skip
_MOST_PROGRAMS = 2**26
_UNREAD = ("null", "null", "one", "one")
_UNREAD_3 = ("null", "null", "null", "one", "one", "one")
_UNREAD_4 = ("null", "null", "null", "null", "one", "one", "one", "one")
_NO_MAP = bytes(128)


def reads_scales_as_they_are(kernel: LoadedKernel) -> bool:
    """Whether a kernel reads ``ExpertWeights.plain_scale``, and not what is made of it for the kernels of 9.0."""
    return not kernel.config.schedule.warp_specialized


def addresses_of_scales(w: ExpertWeights, *, plain: bool) -> dict[str, int]:
    """What ``pack`` is given of weights beside their codes; ``plain`` for a kernel that reads scales as they are."""
    if plain:
        return {
            "w_scale": address_of(w.plain_scale),
            "w_zero": address_of(w.zero),
            "w_outer": address_of(w.outer_scale),
        }
    return {
        "w_scale": address_of(w.kernel_scale),
        "w_zero": address_of(w.zero),
        "w_outer": address_of(w.outer_scale),
    }


def mixed_input_launcher(
    kernel: LoadedKernel, *, N: int, K: int, E: int, m_sizes_step: int, fused: Fused, R: int = 0
) -> Launcher:
    """A launcher of y[g] = x[g] @ w[g].T or dx[g] = dy[g] @ w[g]; ``pack`` takes what ``gemm.row_launcher``s does.

    ``w`` is the address of the codes. ``w_scale``, ``w_zero`` and ``w_outer`` are those of the scales in blocks, of the
    zero points in the same order, and of the scales of experts [E] or of y's columns [E, N]; 0 where the format has
    none. For a kernel that ``reads_scales_as_they_are`` they are those of ``plain_scale``, ``zero`` and
    ``global_scale``. Code that adds a low-rank part of ``R`` columns takes low_x and low_w.

    Raises
    ------
    InputError
        where the product has more columns, or a longer reduction, than the kernel can do.
    """
    if reads_scales_as_they_are(kernel):
        return _coded_launcher(kernel, N, K, E, m_sizes_step, fused)
    config, variant, device = kernel.config, kernel.variant, kernel.function.device
    forward = variant.op is Op.FORWARD
    columns, reduction = (N, K) if forward else (K, N)
    wrong = too_large(variant.op, columns, reduction, config)  # type: ignore[arg-type]
    if wrong:
        raise InputError(f"{variant.entry}: {wrong}")
    fused = without_clearing(fused, variant, config)
    codes, zeros, low = code_layout(variant.dtype), zero_bytes(variant.dtype), Fusion.LOW_RANK in variant.fusion
    lined = bool(zeros)  # w's descriptors have an expert's lines of blocks as dimensions
    maps = (
        {"x": _UNREAD}
        | dict.fromkeys(("w", "w_scale", "w_zero"), _UNREAD_4 if lined else _UNREAD)
        | ({"low_x": _UNREAD, "low_w": _UNREAD_3} if low else {})
    )
    layout = BlockLayout(
        variant.arguments,
        given=_WORDS + _LOW_WORDS if low else _WORDS,
        late=(("y", "ptr"), *LATE),
        fixed={"N": columns, "K": reduction, "stride_outer_e": N if codes.scales == "none" else 1, "R": R}
        | always(E, m_sizes_step, fused),
        maps=maps,
        threads=kernel.function.threads,
        shared_bytes=kernel.function.shared_bytes,
    )
    start, repeater = starter(kernel.function, f"{variant.entry}, {config}", layout, counter_of(kernel))
    packed, tail = layout.pack, layout.tail
    tiles_n, block_m = -(-columns // config.block_n), config.block_m
    most = kernel.sm_count * kernel.function.per_sm
    lines, line = (E, N // BLOCK), K // BLOCK
    w_sizes, scale_sizes, zero_sizes = (
        sizes if lined else (math.prod(sizes[:3]), sizes[3]) for sizes in (
            (*lines, line * codes.words, WORD_ROW), (*lines, line // codes.blocks_per_scale, codes.scale_bytes),
            (*lines, line // codes.blocks_per_scale, zeros),
        )
    )  # fmt: skip
    w_strides, scale_strides, zero_strides = (
        tuple(math.prod(sizes[i:]) for i in range(1, len(sizes))) for sizes in (w_sizes, scale_sizes, zero_sizes)
    )
    x_maps, w_maps, scale_maps, zero_maps = (
        TensorMaps.of(variant, name, device) for name in ("x", "w", "w_scale", "w_zero")
    )
    if x_maps is None or w_maps is None:
        raise AssertionError("the kernel's record has no descriptors")  # launchable.py has looked
    low_of = low_words(kernel, (E, columns, R) if forward else (E, R, columns), R) if low else None

    def pack(
        *, x: int, w: int, w_scale: int, w_outer: int, stride_x_m: int, stride_y_m: int, M: int, w_zero: int = 0,
        index: int = 0, row_weights: int = 0, bias: int = 0, index_end: int = 0, **others: int,
    ) -> bytes:  # fmt: skip
        active = E if E < M else M
        tiles = ((M - active) // block_m + active) * tiles_n  # registry.most_tiles, inlined
        if tiles > _MOST_TILES:
            made = f"M={M} rows and {columns} columns make {tiles} tiles"
            raise InputError(f"{made} of {config}, the most is {_MOST_TILES}: split the batch")
        if RAGGED_SIZES[2] < M:
            raise InputError(f"M={M}, the most rows of {config} is 2^30: split the batch")
        key = (x, M, stride_x_m)
        x_map = x_maps.known.get(key) or x_maps.encode(key, (M, reduction), (stride_x_m,))
        key = (w, 0, 0)
        w_map = w_maps.known.get(key) or w_maps.encode(key, w_sizes, w_strides)
        scale_map = zero_map = _NO_MAP
        if scale_maps is not None:
            key = (w_scale, 0, 0)
            scale_map = scale_maps.known.get(key) or scale_maps.encode(key, scale_sizes, scale_strides)
        if zero_maps is not None:
            key = (w_zero, 0, 0)
            zero_map = zero_maps.known.get(key) or zero_maps.encode(key, zero_sizes, zero_strides)
        programs = tiles if tiles < most else most
        if low_of is not None:
            return packed(
                x_map, w_map, scale_map, zero_map, w_outer, stride_y_m, index, row_weights, bias, M, index_end,
                *low_of(others["low_x"], others["low_w"], M), programs, tail,
            )  # fmt: skip
        return packed(
            x_map, w_map, scale_map, zero_map, w_outer, stride_y_m, index, row_weights, bias, M, index_end, programs,
            tail,
        )  # fmt: skip

    return Launcher(pack, start, repeater, zeroes=fused.zero_tail)


def _coded_launcher(kernel: LoadedKernel, N: int, K: int, E: int, m_sizes_step: int, fused: Fused) -> Launcher:
    config, variant = kernel.config, kernel.variant
    columns, reduction = (N, K) if variant.op is Op.FORWARD else (K, N)
    fused = without_clearing(fused, variant, config)
    layout = BlockLayout(
        variant.arguments, given=_CODED_WORDS, late=(("y", "ptr"), *LATE),
        fixed={"N": columns, "K": reduction} | always(E, m_sizes_step, fused), maps={},
        threads=kernel.function.threads, shared_bytes=kernel.function.shared_bytes,
    )  # fmt: skip
    start, repeater = starter(kernel.function, f"{variant.entry}, {config}", layout, None)
    packed, tail = layout.pack, layout.tail
    tiles_n, block_m = -(-columns // config.block_n), config.block_m
    clearers = fused.zero_tail and Fusion.SCATTER in fused.fusion

    def pack(
        *, x: int, w: int, w_scale: int, stride_x_m: int, stride_y_m: int, M: int, w_outer: int = 0, w_zero: int = 0,
        index: int = 0, row_weights: int = 0, bias: int = 0, index_end: int = 0,
    ) -> bytes:  # fmt: skip
        active = E if E < M else M
        tiles = ((M - active) // block_m + active) * tiles_n  # registry.most_tiles, inlined
        if clearers:
            tiles += -(-index_end // CLEARER_ROWS)
        if tiles > _MOST_PROGRAMS:
            made = f"M={M} rows and {columns} columns make {tiles} tiles"
            raise InputError(f"{made} of {config}, the most is {_MOST_PROGRAMS}: split the batch")
        if RAGGED_SIZES[2] < M:
            raise InputError(f"M={M}, the most rows of {config} is 2^30: split the batch")
        return packed(
            x, w, w_scale, w_zero, w_outer, stride_x_m, stride_y_m, index, row_weights, bias, M, index_end, tiles, tail
        )

    return Launcher(pack, start, repeater, zeroes=fused.zero_tail)
