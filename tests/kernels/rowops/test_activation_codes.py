"""The pass that makes codes of the activation, under Triton's interpreter, beside the two passes that it stands for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm

from pretuned.artifacts.records import DType, RowOp
from pretuned.kernels import rowops

WORKER = Path(__file__).parents[2] / "support" / "interpret_activation_codes.py"
BASE = {
    "M": 9,
    "columns": 384,
    "block": 256,
    "rows": 8,
    "used": None,
    "act": "silu",
    "gated": True,
    "interleaved": False,
    "seed": 0,
    "numbers": {},
}
TURNS, WHOLE = {"interleaved": True}, {"gated": False}


@pytest.mark.slow
def test_codes_and_scales_are_those_of_two_passes() -> None:
    """Of every activation, with a gate or without, side by side or in turns; of all rows or of those that count."""
    cases = [
        BASE,
        BASE | TURNS,
        BASE | WHOLE,
        BASE | {"act": "swiglu_oai"},
        BASE | TURNS | {"act": "swiglu", "numbers": {"limit": 2.0}},
        BASE | {"act": "relu2"},
        BASE | {"act": "situ", "numbers": {"beta": 1.5, "linear_beta": 2.0}},
        BASE | TURNS | {"act": "situ", "numbers": {"beta": 3.0}},
        BASE | {"act": "swiglustep", "numbers": {"limit": 0.75}},
        BASE | TURNS | {"act": "swiglu_oai", "M": 3},
        BASE | {"act": "gelu", "columns": 128},
        BASE | WHOLE | {"act": "gelu", "M": 1},
        BASE | {"act": "gelu_tanh"},
        BASE | TURNS | {"act": "gelu_tanh", "used": 6},
        BASE | WHOLE | {"act": "relu2", "M": 12},
        BASE | {"used": 0},
        BASE | {"used": 5, "block": 128, "rows": 4, "M": 7},
        BASE | {"M": 17, "columns": 256, "used": 99, "seed": 3},
    ]
    by_row = {"by_row": True, "rows": 2}
    cases += [
        BASE | by_row,
        BASE | TURNS | by_row,
        BASE | WHOLE | by_row | {"columns": 192},
        BASE | by_row | {"used": 5},
        BASE | TURNS | by_row | {"columns": 320, "block": 128, "M": 7, "used": 0},
        BASE | by_row | {"rows": 4},
        BASE | by_row | {"act": "swiglu_oai", "block": 128, "columns": 448},
        BASE | by_row | {"block": 1024, "M": 3},
    ]
    few = {"M": 19, "columns": 256}
    cases += [
        BASE | few | how | {"used": used, "programs": programs}
        for how in ({}, by_row, by_row | {"block": 128})
        for used in (0, 5, 19, None)
        for programs in (1, 2)
    ]
    done = warm.run([WORKER], stdin=json.dumps(cases), env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [[]] * len(cases)


def test_a_program_has_sixteen_columns_of_each_thread() -> None:
    """256 columns of eight rows: 768 columns leave no lane idle, and eight rows' scales are a whole sector."""
    spec = rowops.RowOpSpec(RowOp.ACTIVATION_CODES, DType.BF16)
    assert (spec.config.block, spec.config.num_warps, rowops.constants(spec)["ROWS"]) == (256, 4, 8)
    assert rowops.programs(RowOp.ACTIVATION_CODES, 9, 768, 256, rowops.rows_at_once(RowOp.ACTIVATION_CODES)) == 6
    assert rowops.divisibility(spec) == {"h": 16, "codes": 16, "columns": 128}


def test_a_program_has_whole_rows_where_each_has_a_scale() -> None:
    spec = rowops.RowOpSpec(RowOp.ACTIVATION_ROW_CODES, DType.BF16)
    assert (spec.config.block, spec.config.num_warps, rowops.constants(spec)["ROWS"]) == (1024, 8, 2)
    rows = rowops.rows_at_once(RowOp.ACTIVATION_ROW_CODES)
    programs = {columns: rowops.programs(RowOp.ACTIVATION_ROW_CODES, 9, columns, 1024, rows) for columns in (64, 1088)}
    assert programs == {64: 5, 1088: 9}
    assert rowops.divisibility(spec) == {"h": 16, "codes": 16, "columns": 64}


def test_it_knows_the_contract_s_flags_and_the_other_passes_numbers() -> None:
    pytest.importorskip("triton")
    from pretuned.kernels.rowops import activation, activation_codes, activation_row_codes, quantize, quantize_rows

    for name in ("_GATED", "_INTERLEAVED"):
        assert getattr(activation_codes, name).value == getattr(activation, name).value
    for name in ("_GROUP", "_MOST", "_LEAST"):
        assert getattr(activation_codes, name).value == getattr(quantize, name).value
    assert activation_row_codes._GROUP.value == quantize._GROUP.value
    for name in ("_USED", "_PICKED", "_MOST", "_LEAST"):
        assert getattr(quantize_rows, name).value == getattr(quantize, name).value
    assert activation_codes._WORDS.value == activation_codes._GROUP.value // 4
