"""The kernel for codes of w as they lie, under Triton's interpreter: each format, op and order, against float64."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm
from portable_formats import PORTABLE

from pretuned.artifacts.records import PRECISIONS, Fusion
from pretuned.runtime.weights.prepared_layout import ORDERS

WORKER = Path(__file__).parents[2] / "support" / "interpret_coded.py"
FORMATS = [name for name, precision in PRECISIONS.items() if precision.quantised and precision.x.name == "bf16"]
ALL = Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT | Fusion.BIAS
BASE: dict[str, Any] = {
    "op": "forward",
    "format": "mxfp4",
    "prepared": False,
    "dtype": "fp32",
    "m_sizes": [3, 0, 4, 2],
    "M": 9,
    "N": 48,
    "K": 96,
    "block": (16, 64, 64),
    "group_m": 8,
    "fusion": 0,
    "top_k": 1,
    "seed": 0,
    "ends": False,
    "one_hot": False,
    "wide": False,
    "zero_tail": False,
    "poison": 0,
    "bad_index": False,
}


def wrong(*cases: dict[str, Any]) -> list[tuple[dict[str, Any], list[str]]]:
    """Those cases, of changes to ``BASE``, that come out otherwise than wanted, and how."""
    whole = [BASE | case for case in cases]
    done = warm.run([WORKER], stdin=json.dumps(whole), env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [(case, wrong) for case, wrong in zip(cases, json.loads(done.stdout), strict=True) if wrong]


def sizes(format: str, *, prepared: bool) -> dict[str, int]:
    """N and K that are no multiples of a tile; in order whole blocks."""
    if not prepared:
        return {"N": 50, "K": 96}
    return {"N": 128 if format.startswith("fp8_block") else 64, "K": 128}


@pytest.mark.slow
def test_weights_come_out_bit_for_bit() -> None:
    """x has one 1 in a row: y is then w."""
    assert not wrong({"one_hot": True}, {"one_hot": True, "op": "dX"})


@pytest.mark.slow
def test_every_format_op_and_order() -> None:
    """Codes of every value, and scales at both ends, bit for bit."""
    stored = [
        {"op": op, "format": format, "one_hot": True, "ends": True, **sizes(format, prepared=False)}
        for format in FORMATS
        for op in ("forward", "dX")
    ]
    ordered = [
        {"op": "dX", "format": format, "one_hot": True, "prepared": True, **sizes(format, prepared=True)}
        for format in FORMATS
        if format in ORDERS
    ]
    assert len(ordered) == len(FORMATS) - len(PORTABLE) > 10
    assert not wrong(*stored, *ordered)


@pytest.mark.slow
def test_every_form() -> None:
    """Rows gathered, scattered, weighted, with a bias, and those that nobody has; NaN stays in its expert."""
    assert not wrong(
        {"fusion": Fusion.GATHER.value, "top_k": 2, "bad_index": True},
        {"fusion": (Fusion.SCATTER | Fusion.WEIGHT | Fusion.BIAS).value, "op": "dX", "format": "fp8_block_a16"},
        {"fusion": ALL.value, "top_k": 2, "wide": True, "poison": 2, "format": "int4_g32_zp"},
        {"fusion": ALL.value, "op": "dX", "format": "int4_g128_zp", "prepared": True, "N": 64, "K": 128},
        {"poison": 2, "op": "dX"},
        {"poison": 2, "op": "dX", "format": "mxfp8", "prepared": True, "N": 64, "K": 128},
        {"fusion": ALL.value, "top_k": 2, "poison": 2, "format": "mxfp8"},
        {"zero_tail": True, "M": 40, "block": (32, 64, 128)},
        {"zero_tail": True, "fusion": Fusion.SCATTER.value, "m_sizes": [3, 0, 4, 1]},
        {"m_sizes": [7, 20, 0, 3], "M": 32, "group_m": 2, "N": 80, "K": 100, "dtype": "fp16"},
    )
