"""The kernels that write and read quantised weights: under Triton's interpreter, and what is compiled."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm
from portable_formats import PORTABLE

from pretuned.artifacts.records import PRECISIONS, DType, RowOp
from pretuned.kernels import rowops
from pretuned.kernels.rowops import RowOpSpec

WORKER = Path(__file__).parents[2] / "support" / "interpret_weights.py"
FORMATS = [dtype.value for dtype in DType if dtype.quantised and not dtype.value.endswith("_a16")]
FORMATS = [format for format in FORMATS if format not in PORTABLE]
SHAPES = [[2, 64, 192], [2, 128, 128], [1, 192, 64]]


@pytest.mark.slow
def test_bits_are_torchs() -> None:
    """Each format and dtype of w, both layouts, there and back: ties, zeros, the smallest numbers, rows apart."""
    dtypes = ("bf16", "fp16", "fp32")
    cases = [
        {
            "format": format,
            "dtype": dtypes[i % 3],
            "shape": SHAPES[i // 2 % 3],
            "seed": i,
            "hard": i % 4 != 3,
            "view": i % 2 == 1,
        }
        for i, format in enumerate(FORMATS)
    ]
    base = {"seed": 0, "hard": True, "view": False}
    cases += [
        base | {"format": "fp8_channel", "dtype": "bf16", "shape": [1, 64, 1088]},  # a row of two blocks
        base | {"format": "fp8_block", "dtype": "fp32", "shape": [1, 192, 192]},  # blocks that are cut off
        base | {"format": "mxfp4", "dtype": "fp32", "shape": [1, 64, 128]},
        base | {"format": "int4_g64", "dtype": "bf16", "shape": [1, 40, 64]},  # no whole block of rows: not prepared
    ]
    done = warm.run([WORKER], stdin=json.dumps(cases), env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [[]] * len(cases)


def test_which_kernels_there_are() -> None:
    """One of each format, whether x is quantised or not; codes are moved alike whatever their scales are."""
    specs = rowops.weight_specs(tuple(DType))
    assert {spec.dtype.value for spec in specs if spec.op is RowOp.QUANTIZE_WEIGHTS} == set(FORMATS)
    assert {spec.dtype for spec in specs if spec.op is RowOp.MOVE_CODES} == {
        DType.MXFP4,
        DType.FP8_BLOCK,
        DType.INT4_G32,
    }
    assert rowops.weight_specs((DType.BF16, DType.FP32)) == ()
    only = rowops.weight_specs((DType.FP8_BLOCK_A16,))
    assert [(spec.op, spec.dtype) for spec in only] == [
        (RowOp.QUANTIZE_WEIGHTS, DType.FP8_BLOCK),
        (RowOp.DEQUANTIZE_WEIGHTS, DType.FP8_BLOCK),
        (RowOp.MOVE_CODES, DType.FP8_BLOCK),
        (RowOp.LARGEST_WEIGHT, DType.FP32),
    ]


@pytest.mark.parametrize("op", rowops.WEIGHT_OPS)
def test_the_kernels_take_the_arguments_of_the_contract(op: RowOp) -> None:
    from pretuned.kernels.rowops import weights

    for dtype in (DType.FP8_BLOCK, DType.FP8_CHANNEL, DType.MXFP4):
        wanted = [*(name for name, _ in rowops.arguments(op)), *rowops.constants(RowOpSpec(op, dtype))]
        assert wanted == list(getattr(weights, op.value).arg_names)


@pytest.mark.parametrize("op", rowops.WEIGHT_OPS)
def test_a_launch_has_a_program_for_each_tile(op: RowOp) -> None:
    """They do not loop: with fewer programs some experts would keep what they hold."""
    assert rowops.most_programs(op, 3) is None
    assert rowops.programs(op, 1 << 20, 4096, 128, rowops.rows_at_once(op)) == 1 << 20


@pytest.mark.parametrize("format", FORMATS)
def test_a_tile_holds_whole_groups(format: str) -> None:
    scale = PRECISIONS[format].w.scale
    assert scale is not None
    for op in (RowOp.QUANTIZE_WEIGHTS, RowOp.DEQUANTIZE_WEIGHTS):
        spec = RowOpSpec(op, rowops.dtype_of(DType(format), op))
        rows, columns, _ = rowops.tile_of(op, spec.dtype)
        assert columns % max(scale.columns, 64) == 0
        if op is RowOp.QUANTIZE_WEIGHTS:
            assert rows % scale.rows == 0
        across = 1 if not scale.columns and op is RowOp.QUANTIZE_WEIGHTS else -(-320 // columns)
        assert rowops.tiles(spec, 5, 200, 320) == 5 * -(-200 // rows) * across
        assert rowops.divisibility(spec)["words"] == 16
