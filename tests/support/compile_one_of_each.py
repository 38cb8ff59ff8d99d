"""Compiles one variant of every kind of code with the Triton that is installed: builders bring others than ours.

PYTHONPATH=<folder that holds pretuned> python tests/support/compile_one_of_each.py [--night]
"""

from __future__ import annotations

import sys

import triton

from pretuned.aot.compile.toolchain import unable
from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.records import DType, Fusion, Layout, Op, RowOp
from pretuned.kernels.rowops import MAKES_CODES, WEIGHT_OPS, RowOpSpec
from pretuned.kernels.spec import Cache, Config, Edge, Loads, Schedule, Spec, TileRows

FORWARD, DX, DW = Op
BF16, NONE, LOW, GATHER = DType.BF16, Fusion.NONE, Fusion.LOW_RANK, Fusion.GATHER
SCATTER, SILU = Fusion.SCATTER, Fusion.SILU
# The smallest tiles, and fewest stages, of each kind of code: they are compiled fastest.
TMA = Config(64, 64, 64, 4, 2, loads=Loads.TMA)
POINTERS = Config(64, 64, 32, 4, 2)
ONE_TILE = Config(16, 64, 128, 4, 2, schedule=Schedule.TILE)  # its programs find their tile in PTX
CODED = ONE_TILE._replace(block_k=64)
SPECS = [
    *(Spec(FORWARD, BF16, TMA, fusion=fusion) for fusion in (NONE, SCATTER, LOW | GATHER)),
    Spec(DX, BF16, TMA),
    Spec(DW, BF16, TMA._replace(block_m=32)),
    Spec(FORWARD, BF16, ONE_TILE._replace(loads=Loads.TMA)),
    Spec(DX, DType.TF32, TMA._replace(block_k=32)),  # w through registers
    *(RowOpSpec(op, BF16) for op in MAKES_CODES),  # of e4m3, which 8.0 has not
    Spec(DX, DType.FP8_BLOCK_A16, CODED),  # codes in order
]
BOTH = Config(128, 256, 64, 8, 2, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
HALF = BOTH._replace(block_n=128)
TURNS = BOTH._replace(block_n=192, schedule=Schedule.PINGPONG)
NARROW = TURNS._replace(block_n=128)
FITTED = BOTH._replace(block_m=256, block_n=128, rows=TileRows.FITTED)
FITTED_TURNS = FITTED._replace(block_m=192, schedule=Schedule.PINGPONG)
ALL_OF_DW = BOTH._replace(block_m=16, block_n=128, block_k=256)
MIXED = BOTH._replace(schedule=Schedule.W4A16)
FEW_ROWS = MIXED._replace(block_m=16, block_n=64, block_k=128)
OF_CODES = MIXED._replace(block_m=64, block_n=128, block_k=128, rows=TileRows.FITTED)
BY_BLOCKS = BOTH._replace(block_k=128, schedule=Schedule.W8A8_BLOCK)
SPECIALISED = [
    Spec(FORWARD, BF16, BOTH),
    *(Spec(FORWARD, BF16, HALF, fusion=fusion) for fusion in (GATHER | SILU, LOW | GATHER)),
    Spec(DX, BF16, FITTED_TURNS, fusion=LOW),
    Spec(FORWARD, DType.FP16, NARROW, fusion=SCATTER),
    Spec(FORWARD, BF16, FITTED, fusion=SCATTER),
    Spec(DW, BF16, ALL_OF_DW._replace(block_k=128, edge=Edge.HALF, cache=Cache.EVICT_FIRST)),
    Spec(DW, BF16, TURNS._replace(block_m=16, block_k=128)),
    Spec(DW, DType.TF32, ALL_OF_DW),
    *(Spec(FORWARD, dtype, FEW_ROWS) for dtype in (DType.INT4_G32, DType.INT4_G128, DType.FP8_CHANNEL_A16)),
    Spec(FORWARD, DType.NVFP4, FEW_ROWS._replace(block_k=512)),  # more than one product in flight
    Spec(FORWARD, DType.FP8_BLOCK_A16, OF_CODES._replace(block_n=256, block_k=64), fusion=SCATTER),
    Spec(DX, DType.MXFP4, OF_CODES._replace(block_m=128, block_k=64), fusion=LOW),
    Spec(DX, DType.FP8_BLOCK_A16, OF_CODES, fusion=LOW),
    Spec(FORWARD, DType.INT4_G128_ZP, OF_CODES, fusion=SCATTER),
    Spec(DX, DType.INT4_G32_ZP, OF_CODES, fusion=LOW),
    Spec(FORWARD, DType.MXFP8, OF_CODES, fusion=SCATTER),
    Spec(DX, DType.MXFP8, OF_CODES, fusion=LOW),
    Spec(FORWARD, DType.FP8_BLOCK, BY_BLOCKS),
]
BY_NIGHT = [  # what goes together otherwise
    Spec(op, dtype, config, fusion=fusion)
    for op, dtype, config, fusion in (
        (FORWARD, BF16, HALF, SCATTER),
        (FORWARD, BF16, HALF, SILU),
        (DX, BF16, TURNS, LOW),
        (DX, BF16, FITTED, LOW),
        (DX, BF16, NARROW, NONE),
        (DX, BF16, FITTED_TURNS, NONE),
        (FORWARD, BF16, FITTED_TURNS, SCATTER),
        (FORWARD, DType.INT4_G64, FEW_ROWS, NONE),
        (FORWARD, DType.FP8_BLOCK, BY_BLOCKS, SCATTER),
    )
]
OLDER = [
    *(Spec(op, BF16, POINTERS) for op in (FORWARD, DW)),
    Spec(DX, BF16, POINTERS, fusion=LOW),
    Spec(FORWARD, BF16, ONE_TILE),
    *(
        Spec(op, dtype, CODED, Layout.STORED)
        for op, dtype in ((FORWARD, DType.MXFP4), (DX, DType.INT4_G32_ZP), (FORWARD, DType.FP8_CHANNEL_A16))
    ),
    *(RowOpSpec(op, BF16) for op in RowOp if op not in (*MAKES_CODES, *WEIGHT_OPS)),
    RowOpSpec(RowOp.QUANTIZE_WEIGHTS, DType.FP8_BLOCK),
    RowOpSpec(RowOp.DEQUANTIZE_WEIGHTS, DType.INT4_G128_ZP),
    RowOpSpec(RowOp.MOVE_CODES, DType.MXFP4),
    RowOpSpec(RowOp.LARGEST_WEIGHT, DType.FP32),
]
BY_CODES = [  # where a GPU multiplies e4m3; on 10.0 by tcgen05, whose tiles have 64 rows and more
    Spec(FORWARD, DType.FP8_BLOCK, ONE_TILE, Layout.STORED, GATHER),
    Spec(FORWARD, DType.FP8_CHANNEL, ONE_TILE._replace(block_m=64), Layout.STORED),
]

if __name__ == "__main__":
    builds = [(90, SPECS), (90, SPECIALISED), (80, OLDER), (100, BY_CODES), (120, BY_CODES[:1]), (89, BY_CODES[1:])]
    builds += [(90, BY_NIGHT), (120, BY_CODES[1:]), (89, BY_CODES[:1])] if "--night" in sys.argv else []
    for sm, specs in builds:
        for spec in specs:
            if reason := unable(spec):
                print(f"{spec}: {reason}", flush=True)
                continue
            variant = compile_variant(spec, sm).variant
            print(f"triton {triton.__version__} sm_{sm} {spec}: {variant.registers} registers", flush=True)
