"""Launchers of products whose w is of prepared codes: ``rows_wna16``, see kernels/contract/mixed_input.py."""

from __future__ import annotations

from ...artifacts.errors import InputError
from ...kernels.codes import BLOCK, CODES, WORD_ROW
from ...kernels.contract.registry import too_large
from ...kernels.contract.words import RAGGED_SIZES
from ..driver.block import BlockLayout, Words
from ..driver.descriptors import TensorMaps
from ..driver.launcher import Launcher, starter
from .gemm import LATE, Fused, LoadedKernel, always, counter_of, without_clearing

_MOST_TILES = 2**31 - 1
_WORDS: Words = (
    ("x", "desc2"), ("w", "desc2"), ("w_scale", "desc2"), ("w_outer", "ptr"), ("stride_y_m", "i64"), ("index", "ptr"),
    ("row_weights", "ptr"), ("bias", "ptr"), ("M", "i32"), ("index_end", "i32"),
)  # fmt: skip
_UNREAD = ("null", "null", "one", "one")
_NO_MAP = bytes(128)


def mixed_input_launcher(kernel: LoadedKernel, *, N: int, K: int, E: int, m_sizes_step: int, fused: Fused) -> Launcher:
    """A launcher of y[g] = x[g] @ w[g].T, whose ``pack`` takes what that of ``gemm.row_launcher`` does.

    ``w`` is the address of the codes. ``w_scale`` and ``w_outer`` are those of the scales in blocks, and of the scales
    of experts [E] or of y's columns [E, N]; 0 where the format has none.

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
    codes = CODES[variant.dtype.value]
    layout = BlockLayout(
        variant.arguments,
        given=_WORDS,
        late=(("y", "ptr"), *LATE),
        fixed={"N": N, "K": K, "stride_outer_e": N if codes.scales == "none" else 1} | always(E, m_sizes_step, fused),
        maps=dict.fromkeys(("x", "w", "w_scale"), _UNREAD),
        threads=kernel.function.threads,
        shared_bytes=kernel.function.shared_bytes,
    )
    start, repeater = starter(kernel.function, f"{variant.entry}, {config}", layout, counter_of(kernel))
    packed, tail = layout.pack, layout.tail
    tiles_n, block_m = -(-N // config.block_n), config.block_m
    most = kernel.sm_count * kernel.function.per_sm
    blocks = E * (N // BLOCK) * (K // BLOCK)
    w_sizes, scale_sizes = (blocks * codes.words, WORD_ROW), (blocks // codes.blocks_per_scale, codes.scale_bytes)
    x_maps, w_maps, scale_maps = (TensorMaps.of(variant, name, device) for name in ("x", "w", "w_scale"))
    if x_maps is None or w_maps is None:
        raise AssertionError("the kernel's record has no descriptors")  # launchable.py has looked

    def pack(
        *, x: int, w: int, w_scale: int, w_outer: int, stride_x_m: int, stride_y_m: int, M: int,
        index: int = 0, row_weights: int = 0, bias: int = 0, index_end: int = 0,
    ) -> bytes:  # fmt: skip
        active = E if E < M else M
        tiles = ((M - active) // block_m + active) * tiles_n  # registry.most_tiles, inlined
        if tiles > _MOST_TILES:
            made = f"M={M} rows and N={N} columns make {tiles} tiles"
            raise InputError(f"{made} of {config}, the most is {_MOST_TILES}: split the batch")
        if RAGGED_SIZES[2] < M:
            raise InputError(f"M={M}, the most rows of {config} is 2^30: split the batch")
        key = (x, M, stride_x_m)
        x_map = x_maps.known.get(key) or x_maps.encode(key, (M, K), (stride_x_m,))
        key = (w, 0, 0)
        w_map = w_maps.known.get(key) or w_maps.encode(key, w_sizes, (WORD_ROW,))
        scale_map = _NO_MAP
        if scale_maps is not None:
            key = (w_scale, 0, 0)
            scale_map = scale_maps.known.get(key) or scale_maps.encode(key, scale_sizes, scale_sizes[1:])
        return packed(
            x_map, w_map, scale_map, w_outer, stride_y_m, index, row_weights, bias, M, index_end,
            tiles if tiles < most else most, tail,
        )  # fmt: skip

    return Launcher(pack, start, repeater, zeroes=fused.zero_tail)
