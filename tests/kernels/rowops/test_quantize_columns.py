"""The row kernels of fp8 training, under Triton's interpreter and compiled: codes along M, and of w both ways."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm

from pretuned.artifacts.records import DType, RowOp
from pretuned.kernels import rowops
from pretuned.kernels.activations import KINDS
from pretuned.kernels.rowops import ALONG_K, ALONG_N

WORKER = Path(__file__).parents[2] / "support" / "interpret_columns.py"
COLUMNS = {
    "counts": [3, 0, 129, 128],
    "spare": 5,
    "C": 256,
    "top_k": 0,
    "wide": False,
    "programs": 2,
    "shared": False,
    "special": False,
}
GRADIENTS = {
    "counts": [3, 0, 129],
    "spare": 5,
    "I": 256,
    "kind": 0,
    "wide": False,
    "programs": 2,
    "shared": False,
    "weighted": True,
    "narrow": False,
    "special": False,
}
BLOCKS = {"E": 2, "N": 256, "K": 384, "fp32": False, "apart": 0, "along": [ALONG_K, ALONG_N], "special": False}


@pytest.mark.slow
def test_codes_and_scales() -> None:
    """Ragged counts, none, more rows than there are, negative ones; gathered; NaN, infinity, tiny numbers."""
    cases: list[dict[str, object]] = [
        COLUMNS,
        COLUMNS | {"shared": True, "C": 128, "wide": True},
        COLUMNS | {"counts": [3, 0, 129], "top_k": 2, "programs": 20},
        COLUMNS | {"top_k": 3, "C": 128, "wide": True, "spare": 0},
        COLUMNS | {"counts": [0, 0, 0], "spare": 4},
        *(
            COLUMNS | {"counts": [127, -3, 1, 0, 255], "C": 128, "special": True, "shared": shared}
            for shared in (False, True)
        ),
        COLUMNS | {"counts": [300], "spare": 0, "C": 128},
        *(COLUMNS | {"counts": [130, 3], "C": 640, "programs": n, "top_k": k} for n, k in ((3, 0), (1, 2))),
        GRADIENTS,
        GRADIENTS | {"I": 128, "shared": True, "wide": True, "narrow": True, "special": True},
        GRADIENTS | {"counts": [0, 128, 2], "I": 128, "kind": KINDS.index("swiglustep"), "weighted": False},
        GRADIENTS | {"counts": [0], "I": 128},
        BLOCKS,
        BLOCKS | {"fp32": True, "apart": 16, "special": True},
        BLOCKS | {"special": True, "along": [ALONG_N]},
        BLOCKS | {"along": [ALONG_K], "E": 1, "N": 128, "K": 128},
    ]
    done = warm.run([WORKER], stdin=json.dumps(cases), env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [[]] * len(cases)


def test_they_know_the_flags_of_the_contract() -> None:
    pytest.importorskip("triton")
    from pretuned.kernels.rowops import activation_grad_codes, quantize_blocks, quantize_columns

    assert (quantize_columns.PICKED.value, quantize_columns.BLOCKS.value) == (rowops.PICKED, rowops.BLOCKS)
    for name in ("WEIGHTED", "WRITES_DWEIGHTS", "NARROW", "NARROW_DWEIGHTS", "BLOCKS", "NOTES"):
        assert getattr(activation_grad_codes, f"_{name}").value == getattr(rowops, name)
    assert (quantize_blocks._ROWS.value, quantize_blocks._COLUMNS.value) == (rowops.ALONG_K, rowops.ALONG_N)
    assert quantize_blocks._FP32.value == rowops.FP32_WEIGHTS
    for op in (RowOp.QUANTIZE_COLUMNS, RowOp.QUANTIZE_BOTH, RowOp.ACTIVATION_GRAD_CODES):
        spec = rowops.RowOpSpec(op, DType.BF16)
        assert rowops.divisibility(spec)["columns"] == rowops.divisibility(spec)["places"] == spec.config.block == 128
