"""The argument block, read back through its pointers as the driver reads it."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import replace

import pytest
from cudaconfig import LaunchConfig

from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Op
from pretuned.kernels.contract.config import Cache, Config, Loads, Schedule
from pretuned.kernels.contract.registry import arguments
from pretuned.kernels.contract.spec import Spec
from pretuned.runtime.driver.block import (
    LAUNCH,
    MAPPED_LAUNCH,
    PREPARED,
    ROWS,
    SIZES,
    STRIDE_B,
    STRIDES,
    WEIGHT,
    Block,
    Blocks,
    config_tail,
)

MAPS = bytes(range(128)), bytes(range(128, 256)), bytes(range(64, 192))
X_MAP = ("M", "K", "stride_x_m", "one")
W_MAP = ("E", "N", "K", "stride_w_e", "stride_w_row", "one")
RAGGED = ("null",) * 4 + ("one",) * 4
ROW_MAPS = {"x": X_MAP, "w": W_MAP, "y_map": RAGGED}
WEIGHT_MAPS = {"dy": RAGGED, "x": RAGGED, "dw": ("null",) * 3 + ("one",) * 3}
BIG = 1 << 40  # what must not be cut to 32 bits
NUMBERS = {"M": 3, "index_end": 4, "N": 5, "K": 6, "E": 7, "m_sizes_step": 2, "index_step": 1, "x_divisor": 8}
POINTERS_ALONE = Config(128, 128, 64, 8, 3)
TMA = replace(POINTERS_ALONE, loads=Loads.TMA)
SPECIALIZED = replace(TMA, schedule=Schedule.COOPERATIVE)
CONFIGS = [POINTERS_ALONE, TMA, SPECIALIZED]
POINTERS = {"counter": BIG + 8, "m_sizes": BIG + 4, "index": BIG + 5, "row_weights": BIG + 6, "bias": BIG + 7}


def packed(block: Block) -> Block:
    sizes = SIZES.pack(5, 6, 7, 2, 1, 8, 9, 0)
    prepared = PREPARED.pack(
        *MAPS[:2], BIG + 1, BIG + 2, BIG + 11, BIG + 12, STRIDES.pack(BIG + 13, BIG + 14, 1),
        BIG + 5, BIG + 6, BIG + 7, 3, 4, sizes, 1234, config_tail(256, 70_000),
    )  # fmt: skip
    assert STRIDE_B.unpack_from(prepared) == (BIG + 12,)
    MAPPED_LAUNCH.pack_into(block[0], block[1], prepared, BIG + 20, BIG + 3, BIG + 4, BIG + 8, MAPS[2])
    return block


def read(op: Op, config: Config) -> list[tuple[str, int | bytes]]:
    """(name, value) of every argument; a descriptor is its 128 bytes, then the sizes and strides that follow it."""
    one = Spec(op, DType.BF16, config)
    maps, offsets = (ROW_MAPS, ROWS) if op is Op.FORWARD else (WEIGHT_MAPS, WEIGHT)
    kinds: list[tuple[str, type[ctypes._SimpleCData[int]] | int]] = []
    for name, passed in arguments(one):
        if passed.startswith("desc"):
            rank = int(passed[4:])
            kinds.append((name, 128))
            kinds += [(part, c_int32 if i < rank else c_int64) for i, part in enumerate(maps[name])]
        else:
            kinds.append((name, {"ptr": c_uint64, "i32": c_int32, "i64": c_int64}[passed]))
    kinds += [("null", c_uint64)] * 2
    block = packed(Blocks(arguments(one), offsets, maps).new())
    places = (c_void_p * len(kinds)).from_address(block[3])
    return [
        (name, bytes((c_char * kind).from_address(place or 0)) if isinstance(kind, int)
         else kind.from_address(place or 0).value)
        for (name, kind), place in zip(kinds, places, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_read_every_argument_where_the_kernel_has_it(config: Config) -> None:
    named = NUMBERS | POINTERS | {
        "x": BIG + 1, "w": BIG + 2, "y": BIG + 3, "stride_x_m": BIG + 11, "stride_y_m": BIG + 12,
        "stride_w_e": BIG + 13, "stride_w_row": BIG + 14, "flags": 9, "one": 1, "null": 0,
    }  # fmt: skip
    wanted = named | dict(zip(("x", "w", "y_map"), MAPS, strict=True)) if config.loads is Loads.TMA else named
    assert read(Op.FORWARD, config) == [(name, wanted[name]) for name, _ in read(Op.FORWARD, config)]


@pytest.mark.parametrize("config", [*CONFIGS, replace(SPECIALIZED, cache=Cache.EVICT_FIRST)], ids=str)
def test_weights_read_every_argument_where_the_kernel_has_it(config: Config) -> None:
    assert ("dy_at" in dict(arguments(Spec(Op.DW, DType.BF16, config)))) is (config.cache is Cache.EVICT_FIRST)
    named = NUMBERS | POINTERS | {
        "dy": BIG + 1, "x": BIG + 2, "dw": BIG + 3, "dy_at": BIG + 1, "x_at": BIG + 2,
        "stride_dy_m": BIG + 11, "stride_x_m": BIG + 12,
        "stride_dw_e": BIG + 13, "stride_dw_row": BIG + 14, "flags": 9, "one": 1, "null": 0,
    }  # fmt: skip
    given = MAPS if config.schedule.warp_specialized else MAPS[:2]
    wanted = named | dict(zip(("dy", "x", "dw"), given, strict=False)) if config.loads is Loads.TMA else named
    assert read(Op.DW, config) == [(name, wanted[name]) for name, _ in read(Op.DW, config)]


def test_the_launch_configuration_is_the_drivers() -> None:
    block = packed(Blocks((("x", "ptr"),), ROWS, ROW_MAPS).new())
    config = LaunchConfig.from_address(block[2])
    assert (config.grid_x, config.grid_y, config.grid_z) == (1234, 1, 1)
    assert (config.block_x, config.block_y, config.block_z) == (256, 1, 1)
    assert (config.shared_bytes, config.stream) == (70_000, BIG + 20)
    assert (config.attributes, config.attribute_count) == (None, 0)
    assert LAUNCH.size == block[2] - (ctypes.addressof(block[4]) + block[1]) + ctypes.sizeof(config) + 24


def test_every_block_has_its_own_aligned_memory() -> None:
    blocks = Blocks((("x", "desc2"),), ROWS, ROW_MAPS)
    made = [packed(blocks.new()) for _ in range(20)]
    places = [c_uint64.from_address(block[3]).value for block in made]
    assert not any(place % 64 for place in places)
    assert len(set(places)) == 20
    assert c_uint32.from_address(places[0]).value == int.from_bytes(MAPS[0][:4], "little")
