"""Compiles one variant of every kind of code with the Triton that is installed: builders bring others than ours.

PYTHONPATH=<folder that holds pretuned> python tests/support/compile_one_of_each.py
"""

from __future__ import annotations

from dataclasses import replace

import triton

from pretuned.aot.compile.toolchain import unable
from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Layout, Op, RowOp
from pretuned.kernels.codes import CODES
from pretuned.kernels.contract.config import Cache, Config, Edge, Loads, Schedule, TileRows
from pretuned.kernels.contract.rowops import MAKES_CODES, RowOpSpec
from pretuned.kernels.contract.spec import Spec

TMA = Config(64, 128, 64, 4, 3, loads=Loads.TMA)
LOW = Fusion.LOW_RANK
POINTERS = Config(64, 128, 32, 4, 3)
ONE_TILE = Config(16, 64, 128, 4, 3, schedule=Schedule.TILE)  # its programs find their tile in PTX
SPECS = [
    *(Spec(op, DType.BF16, TMA, fusion=fusion) for op in (Op.FORWARD, Op.DX) for fusion in
      (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)),
    Spec(Op.FORWARD, DType.BF16, TMA, fusion=LOW | Fusion.GATHER),
    Spec(Op.DW, DType.BF16, Config(32, 128, 128, 4, 4, loads=Loads.TMA)),
    Spec(Op.FORWARD, DType.BF16, replace(ONE_TILE, loads=Loads.TMA)),
    Spec(Op.DX, DType.TF32, Config(128, 128, 32, 4, 3, loads=Loads.TMA)),  # w through registers
    *(RowOpSpec(one, DType.BF16) for one in MAKES_CODES),  # of e4m3, which 8.0 has not
    Spec(Op.DX, DType.FP8_BLOCK_A16, ONE_TILE),  # codes in order
]  # fmt: skip
BOTH = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
TURNS = replace(BOTH, block_n=192, num_stages=5, schedule=Schedule.PINGPONG)
HALF = replace(BOTH, block_n=128, num_stages=6)  # compiled in half the time, where the fusion is what matters
NARROW = replace(TURNS, block_n=128, num_stages=6)
FITTED = replace(BOTH, block_m=256, block_n=128, rows=TileRows.FITTED)
ALL_OF_DW = replace(BOTH, block_m=32, block_n=128, block_k=256, num_stages=8)
MIXED = replace(BOTH, schedule=Schedule.MIXED_INPUT)
FEW_ROWS = replace(MIXED, block_m=16, block_n=64, block_k=512, num_stages=3)
SPECIALISED = [
    Spec(Op.FORWARD, DType.BF16, BOTH),
    *(Spec(Op.FORWARD, DType.BF16, HALF, fusion=fusion) for fusion in
      (Fusion.SCATTER, Fusion.GATHER, Fusion.SILU, Fusion.GATHER | Fusion.SILU, LOW | Fusion.GATHER)),
    *(Spec(Op.DX, DType.BF16, config, fusion=LOW) for config in (TURNS, FITTED)),
    Spec(Op.FORWARD, DType.FP16, NARROW),
    *(Spec(op, DType.BF16, config, fusion=fusion)
      for op, fusion in ((Op.DX, Fusion.NONE), (Op.FORWARD, Fusion.SCATTER))
      for config in (NARROW, FITTED, replace(TURNS, block_m=192, block_n=128, rows=TileRows.FITTED))),
    *(Spec(Op.DW, DType.BF16, config) for config in
      (replace(ALL_OF_DW, edge=Edge.HALF), replace(ALL_OF_DW, cache=Cache.EVICT_FIRST),
       replace(TURNS, block_m=32, block_n=128, block_k=192, num_stages=10),
       replace(TURNS, block_m=32, block_k=128, num_stages=10))),
    Spec(Op.DW, DType.TF32, replace(ALL_OF_DW, num_stages=4)),
    *(Spec(Op.FORWARD, DType(name), FEW_ROWS) for name in CODES),
    Spec(Op.FORWARD, DType.FP8_BLOCK_A16, replace(MIXED, block_m=64, block_k=128, num_stages=3, rows=TileRows.FITTED),
         fusion=Fusion.SCATTER),
    *(Spec(Op.DX, dtype, replace(MIXED, block_m=128, block_n=128, block_k=128, num_stages=3, rows=TileRows.FITTED),
           fusion=LOW) for dtype in (DType.MXFP4, DType.FP8_BLOCK_A16)),
    *(Spec(Op.FORWARD, DType.FP8_BLOCK, replace(BOTH, block_k=128, schedule=Schedule.BLOCK_SCALED), fusion=fusion)
      for fusion in (Fusion.NONE, Fusion.SCATTER)),
]  # fmt: skip
OLDER = [
    *(Spec(op, DType.BF16, POINTERS) for op in Op), Spec(Op.DX, DType.BF16, POINTERS, fusion=LOW),
    Spec(Op.FORWARD, DType.BF16, ONE_TILE),
    *(Spec(op, dtype, ONE_TILE, Layout.STORED) for op, dtype in
      ((Op.FORWARD, DType.MXFP4), (Op.DX, DType.INT4_G32_ZP), (Op.FORWARD, DType.FP8_CHANNEL_A16))),
    *(RowOpSpec(one, DType.BF16) for one in RowOp if one not in MAKES_CODES),
]  # fmt: skip
BY_CODES = [  # where a GPU multiplies e4m3; on 10.0 by tcgen05, whose tiles have 64 rows and more
    Spec(Op.FORWARD, DType.FP8_BLOCK, ONE_TILE, Layout.STORED, Fusion.GATHER),
    Spec(Op.FORWARD, DType.FP8_CHANNEL, Config(64, 128, 128, 8, 3, schedule=Schedule.TILE), Layout.STORED),
]

if __name__ == "__main__":
    every = ((90, SPECS), (90, SPECIALISED), (80, OLDER), (89, BY_CODES), (100, BY_CODES), (120, BY_CODES))
    for sm, specs in every:
        for spec in specs:
            if reason := unable(spec):
                print(f"{spec}: {reason}", flush=True)
                continue
            variant = compile_variant(spec, sm).variant
            print(f"triton {triton.__version__} sm_{sm} {spec}: {variant.registers} registers", flush=True)
