"""The kernel for codes by codes, under Triton's interpreter against float64 of the quantised operands, and compiled."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import warm

from pretuned.aot.compile import triton as compiler
from pretuned.artifacts.records import DType, Fusion, Layout, Op
from pretuned.kernels.search import candidates, fallbacks
from pretuned.kernels.spec import Config, Spec

WORKER = Path(__file__).parents[2] / "support" / "interpret_w8a8.py"
FORMATS = ("fp8_block", "fp8_channel")
ALL = Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT | Fusion.BIAS
BASE: dict[str, Any] = {
    "format": "fp8_block",
    "prepared": False,
    "dtype": "fp32",
    "m_sizes": [3, 0, 4, 2],
    "M": 9,
    "N": 50,
    "K": 200,
    "block": (16, 64, 128),
    "group_m": 8,
    "fusion": 0,
    "top_k": 1,
    "seed": 0,
    "ends": False,
    "wide": False,
    "zero_tail": False,
    "poison": 0,
    "bad_index": False,
    "bad_code": False,
}


def wrong(*cases: dict[str, Any]) -> list[tuple[dict[str, Any], list[str]]]:
    """Those cases, of changes to ``BASE``, in each format, that come out otherwise than wanted, and how."""
    whole = [BASE | case | {"format": format} for case in cases for format in FORMATS]
    done = warm.run([WORKER], stdin=json.dumps(whole), env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [(case, wrong) for case, wrong in zip(whole, json.loads(done.stdout), strict=True) if wrong]


@pytest.mark.slow
def test_a_product_of_quantised_operands() -> None:
    """Every code of w, subnormal and largest, an expert without rows, an N and a K that are no multiples of blocks."""
    assert not wrong({}, {"dtype": "bf16"})


@pytest.mark.slow
def test_sizes_and_scales_at_their_ends() -> None:
    assert not wrong(
        {"ends": True},
        {"m_sizes": [0, 1, 0, 0], "M": 1},
        {"m_sizes": [0, 0, 0, 0], "M": 5, "zero_tail": True},
        {"N": 1, "K": 7},
        {"N": 257, "K": 384, "block": (16, 128, 128)},
        {"N": 130, "K": 129, "block": (32, 64, 128), "m_sizes": [40, 3, 0, 2], "M": 45, "group_m": 1},
    )


@pytest.mark.slow
def test_every_form() -> None:
    """Rows gathered, scattered, weighted, with a bias, and those that nobody has; NaN stays in its expert."""
    assert not wrong(
        {"fusion": Fusion.GATHER.value, "top_k": 2, "bad_index": True},
        {"fusion": (Fusion.SCATTER | Fusion.WEIGHT | Fusion.BIAS).value},
        {"fusion": ALL.value, "top_k": 2, "wide": True, "bad_code": True},
        {"poison": 2},
        {"bad_code": True, "block": (64, 64, 128), "m_sizes": [3, 20, 0, 3], "M": 26},
        {"zero_tail": True, "M": 40, "block": (32, 64, 128)},
        {"zero_tail": True, "fusion": Fusion.SCATTER.value, "m_sizes": [3, 0, 4, 1]},
    )


def products(dtype: DType, config: Config, sm: int) -> set[str]:
    """The kinds of tensor-core instructions in the PTX of what is compiled."""
    spec = Spec(Op.FORWARD, dtype, config, Layout.STORED, Fusion.GATHER)
    with tempfile.TemporaryDirectory() as scratch:
        text = compiler._triton_compile(spec, sm, scratch).asm["ptx"]
    matches = re.findall(r"mma\.sync\S*|tcgen05\.mma\S*|wgmma\.mma_async\S*", text)
    return {"f8f6f4" if "f8f6f4" in name else "e4m3" if name.count("e4m3") == 2 else name for name in matches}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "dtype"),
    [
        (89, DType.FP8_BLOCK),
        (100, DType.FP8_CHANNEL),
        *(
            pytest.param(sm, dtype, marks=pytest.mark.nightly)
            for sm, dtype in (
                (89, DType.FP8_CHANNEL),
                (100, DType.FP8_BLOCK),
                (120, DType.FP8_BLOCK),
                (120, DType.FP8_CHANNEL),
            )
        ),
    ],
)
def test_tensor_cores_multiply_e4m3(sm: int, dtype: DType) -> None:
    """But for few rows on 10.0, whose tcgen05 has tiles of 64 rows and more: there both become fp16, exactly."""
    configs = (*candidates(Op.FORWARD, dtype, sm), *fallbacks(Op.FORWARD, dtype, sm))
    few, *more = sorted(configs, key=lambda config: config.block_m * config.block_n)
    many = next(config for config in more if config.block_m >= 64)
    native = "f8f6f4" if sm == 100 else "e4m3"
    assert products(dtype, many, sm) == {native}
    assert products(dtype, few, sm) == (
        {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"} if sm == 100 else {native}
    )
