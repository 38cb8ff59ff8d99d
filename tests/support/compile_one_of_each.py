"""Compiles one variant of every kind of code with the Triton that is installed: builders bring others than ours.

PYTHONPATH=<folder that holds pretuned> python tests/support/compile_one_of_each.py
"""

from __future__ import annotations

from dataclasses import replace

import triton

from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Op, RowOp
from pretuned.kernels.contract.config import Config, Loads, Schedule
from pretuned.kernels.contract.rowops import RowOpSpec
from pretuned.kernels.contract.spec import Spec

TMA = Config(64, 128, 64, 4, 3, loads=Loads.TMA)
POINTERS = Config(64, 128, 32, 4, 3)
ONE_TILE = Config(16, 64, 128, 4, 3, schedule=Schedule.TILE)  # its programs find their tile in PTX
SPECS = [
    *(Spec(op, DType.BF16, TMA, fusion=fusion) for op in (Op.FORWARD, Op.DX) for fusion in
      (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)),
    Spec(Op.DW, DType.BF16, Config(32, 128, 128, 4, 4, loads=Loads.TMA)),
    Spec(Op.FORWARD, DType.BF16, replace(ONE_TILE, loads=Loads.TMA)),
    Spec(Op.DX, DType.TF32, Config(128, 128, 32, 4, 3, loads=Loads.TMA)),  # w through registers
    RowOpSpec(RowOp.QUANTIZE, DType.BF16),  # to e4m3, which 8.0 has not
]  # fmt: skip
OLDER = [
    *(Spec(op, DType.BF16, POINTERS) for op in Op), Spec(Op.FORWARD, DType.BF16, ONE_TILE),
    *(RowOpSpec(one, DType.BF16) for one in RowOp if one is not RowOp.QUANTIZE),
]  # fmt: skip

if __name__ == "__main__":
    for sm, specs in ((90, SPECS), (80, OLDER)):
        for spec in specs:
            variant = compile_variant(spec, sm).variant
            print(f"triton {triton.__version__} sm_{sm} {spec}: {variant.registers} registers", flush=True)
