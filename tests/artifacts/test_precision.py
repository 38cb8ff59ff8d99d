"""Precisions: what each row says, and how many bytes a matrix of it takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pretuned.artifacts.records import PLAIN_DTYPES, PRECISIONS, DType, Elements, Scale, dtypes_of


def test_every_plain_dtype_has_a_row_that_says_the_same() -> None:
    assert {dtype.value for dtype in PLAIN_DTYPES} == {"bf16", "fp16", "fp32", "tf32"}
    for dtype in PLAIN_DTYPES:
        row = PRECISIONS[dtype.value]
        assert dtype.precision is row
        assert row.x == row.w == row.y
        assert row.w.bits == 8 * dtype.itemsize
        assert row.math == dtype.value
        assert not row.quantised
        assert not dtype.quantised


def test_of_a_quantised_dtype_x_and_y_are_bf16() -> None:
    for dtype in set(DType) - PLAIN_DTYPES:
        row = dtype.precision
        assert row.name == dtype.value
        assert dtype.quantised
        assert row.quantised
        assert row.y == PRECISIONS["bf16"].x
        assert dtype.itemsize == 2
        assert dtype.quantises_x is (dtype in (DType.FP8_BLOCK, DType.FP8_CHANNEL))
        assert dtype.quantises_x or (row.x, row.math) == (row.y, "bf16")


def test_the_dtypes_that_the_kernels_have_for_a_format() -> None:
    dtypes = {name: [dtype.value for dtype in dtypes_of(name)] for name in PRECISIONS}
    assert all(dtypes.values())
    others = {name: some for name, some in dtypes.items() if some != [name]}
    assert others == {name: [name, f"{name}_a16"] for name in ("fp8_block", "fp8_channel")}
    assert dtypes_of("nf4") == ()


def test_the_names_are_those_that_are_promised() -> None:
    int4 = {f"int4_g{g}{zero}" for g in (32, 64, 128) for zero in ("", "_zp")}
    fp8 = {"fp8_block", "fp8_block_a16", "fp8_channel", "fp8_channel_a16"}
    assert set(PRECISIONS) == {"bf16", "fp16", "fp32", "tf32", "mxfp4", "mxfp8", "nvfp4"} | int4 | fp8
    assert all(name == row.name for name, row in PRECISIONS.items())


def test_a16_differs_by_x_alone() -> None:
    for name in ("fp8_block", "fp8_channel"):
        quantised, wide = PRECISIONS[name], PRECISIONS[f"{name}_a16"]
        assert quantised.w == wide.w
        assert (quantised.x.name, quantised.math, wide.x.name, wide.math) == ("e4m3", "fp8", "bf16", "bf16")


@pytest.mark.parametrize(
    ("name", "N", "K", "wanted"),
    [
        ("bf16", 3, 5, 30),
        ("fp32", 3, 5, 60),
        ("fp8_block", 256, 384, 256 * 384 + 2 * 3 * 4),
        ("fp8_block", 257, 129, 257 * 129 + 3 * 2 * 4),  # 3 x 2 blocks, the last ones partly filled
        ("fp8_channel", 257, 129, 257 * 129 + 257 * 4),
        ("mxfp4", 5760, 2880, 5760 * 2880 // 2 + 5760 * 90),  # gpt-oss: 4.25 bits a weight
        ("mxfp4", 1, 33, 17 + 2),
        ("nvfp4", 2, 32, 2 * 16 + 2 * 2 + 4),
        ("int4_g32", 2, 64, 2 * 32 + 2 * 2 * 2),
        ("int4_g128", 2, 130, 2 * 65 + 2 * 2 * 2),
        ("int4_g128_zp", 2, 130, 2 * 65 + 2 * 2 * 3),
        ("mxfp4", 0, 0, 0),
    ],
)
def test_bytes_of_one_expert_with_its_scales(name: str, N: int, K: int, wanted: int) -> None:
    assert PRECISIONS[name].w_bytes(N, K) == wanted


def test_x_of_fp8_has_a_scale_for_each_token_and_128_of_k() -> None:
    assert PRECISIONS["fp8_block"].x == Elements("e4m3", 8, Scale("fp32", 1, 128))
    assert PRECISIONS["fp8_block"].x.nbytes(10, 300) == 10 * 300 + 10 * 3 * 4
    assert PRECISIONS["fp8_channel"].x.nbytes(10, 300) == 10 * 300 + 10 * 4


def test_the_records_need_no_torch() -> None:
    code = "import sys, pretuned.artifacts.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
