"""The pass that makes codes of rows, under Triton's interpreter."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm

from pretuned.artifacts.records import DType, RowOp
from pretuned.kernels import rowops

WORKER = Path(__file__).parents[2] / "support" / "interpret_quantize.py"
BASE = {"M": 7, "columns": 384, "block": 256, "top_k": 0, "used": None, "wide": False, "seed": 0}


@pytest.mark.slow
def test_codes_and_scales_of_rows() -> None:
    """Of all rows or those that count, in their order or as an index picks them; K no multiple of a block, M of 4."""
    cases = [
        BASE,
        BASE | {"M": 8, "columns": 128, "block": 1024},
        BASE | {"top_k": 2},
        BASE | {"top_k": 3, "wide": True},
        BASE | {"used": 5},
        BASE | {"used": 0},
        BASE | {"top_k": 2, "used": 3, "wide": True, "columns": 1152, "seed": 1},
    ]
    cases += [BASE | {"top_k": k, "used": used, "programs": 2} for k in (0, 2) for used in (0, 1, 5, 9, None)]
    cases += [case | {"by_row": True} for case in cases] + [BASE | {"by_row": True, "columns": 64, "block": 128}]
    done = warm.run([WORKER], stdin=json.dumps(cases), env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [[]] * len(cases)


def test_it_knows_the_flags_of_the_contract() -> None:
    pytest.importorskip("triton")
    from pretuned.kernels.rowops import order_codes

    assert (order_codes._USED.value, order_codes._PICKED.value) == (rowops.USED, rowops.PICKED)
    spec = rowops.RowOpSpec(RowOp.ORDER_CODES, DType.BF16)
    assert (spec.config.block, spec.config.num_warps) == (2048, 4)
    assert rowops.programs(RowOp.ORDER_CODES, 9, 7168, 2048) == 9
    assert rowops.divisibility(spec) == {"x_codes": 16, "codes": 16, "columns": 64}


def test_a_program_does_a_row() -> None:
    spec = rowops.RowOpSpec(RowOp.QUANTIZE, DType.BF16)
    assert rowops.programs(RowOp.QUANTIZE, 9, 7168, spec.config.block) == 9
    assert rowops.divisibility(spec)["columns"] == 128
    assert spec.config.block % 128 == 0
    by_row = rowops.RowOpSpec(RowOp.QUANTIZE_ROWS, DType.BF16)
    assert (by_row.config.block, by_row.config.num_warps) == (2048, 4)
    assert rowops.programs(RowOp.QUANTIZE_ROWS, 9, 7168, 2048) == 9
    assert rowops.divisibility(by_row)["columns"] == 64
