"""The cost model of the kernels for codes of w as stored: what it must tell apart, and what was measured on an H200."""

from __future__ import annotations

import math

import pytest

from pretuned.artifacts.records import DType, Layout, Op, Problem
from pretuned.kernels.arch import limits, supported
from pretuned.kernels.chips import chip_for
from pretuned.kernels.cost import Resources
from pretuned.kernels.cost_model import estimate_us
from pretuned.kernels.search import candidates, shared_bytes_at_least
from pretuned.kernels.spec import Config, Schedule

H200 = chip_for(90)


def resources(config: Config, registers: int = 128, dtype: DType = DType.MXFP4, sm: int = 90) -> Resources:
    shared = shared_bytes_at_least(Op.FORWARD, dtype, config, sm)
    return Resources(config, 32 * config.num_warps, shared, registers)


def tile(m: int, n: int, k: int, warps: int = 4, stages: int = 3) -> Resources:
    return resources(Config(m, n, k, warps, stages, schedule=Schedule.TILE))


def qwen(op: Op = Op.FORWARD, dtype: DType = DType.MXFP4) -> Problem:
    return Problem(op, dtype, 128, 1536, 2048, Layout.STORED)


@pytest.mark.parametrize("sm", supported())
def test_every_candidate_has_a_time_on_every_capability(sm: int) -> None:
    for dtype in (DType.MXFP4, DType.FP8_BLOCK_A16, DType.MXFP8):
        for config in candidates(Op.DX, dtype, sm):
            used = resources(config, dtype=dtype, sm=sm)
            if used.shared_bytes <= limits(sm).shared_per_block_bytes:
                assert 0 < estimate_us(qwen(Op.DX, dtype), 1024, used, chip_for(sm)) < 1e6


def test_what_fits_no_sm_takes_for_ever() -> None:
    huge = Resources(tile(128, 128, 256).config, 256, 1 << 20, 255)
    assert estimate_us(qwen(), 8, huge, H200) == math.inf


def test_few_rows_want_small_tiles_and_many_large_ones() -> None:
    few, many = tile(16, 64, 128, stages=4), tile(128, 128, 64, 8)
    assert estimate_us(qwen(), 8, few, H200) < estimate_us(qwen(), 8, many, H200)
    assert estimate_us(qwen(), 65536, many, H200) < estimate_us(qwen(), 65536, few, H200)


def test_of_ordered_codes_of_8_bits_one_block_of_columns_is_best() -> None:
    """Qwen3-30B-A3B's dX of fp8 blocks in order, 1024 tokens on an H200: 711 us in 32x64x128, 1652 in 64x128x64."""
    stored = qwen(Op.DX, DType.FP8_BLOCK_A16)
    ordered = stored._replace(layout=Layout.NK)
    first, two = tile(32, 64, 128), tile(64, 128, 64)
    assert estimate_us(ordered, 8192, first, H200) < estimate_us(ordered, 8192, two, H200)
    assert estimate_us(stored, 8192, two, H200) < estimate_us(stored, 8192, first, H200)
    assert 1652 / 2.5 < estimate_us(ordered, 8192, two, H200) < 2.5 * 1652


def test_more_rows_take_longer() -> None:
    took = [estimate_us(qwen(), M, tile(64, 128, 64), H200) for M in (8, 512, 8192, 65536)]
    assert took == sorted(took)


def test_it_is_near_what_was_measured() -> None:
    """Qwen3-30B-A3B's first product in mxfp4 on an H200: 26 us of one token's 8 rows, 1298 of 8192 tokens'."""
    for M, config, us in ((8, tile(16, 64, 128, stages=4), 26), (65536, tile(128, 128, 64, 8), 1298)):
        assert us / 2.5 < estimate_us(qwen(), M, config, H200) < 2.5 * us


@pytest.mark.parametrize("dtype", [DType.FP8_BLOCK, DType.FP8_CHANNEL])
@pytest.mark.parametrize("sm", [89, 100, 103, 120, 121])
def test_many_rows_are_faster_by_codes_than_by_bf16(sm: int, dtype: DType) -> None:
    """A scale of a whole row of x costs one look more at it."""
    chip, plain = chip_for(sm), DType(f"{dtype.value}_a16")

    def best(dtype: DType, M: int) -> float:
        pool = [resources(config, dtype=dtype, sm=sm) for config in candidates(Op.FORWARD, dtype, sm)]
        return min(estimate_us(qwen(dtype=dtype), M, each, chip) for each in pool)

    assert best(dtype, 1 << 16) < best(plain, 1 << 16)
    assert best(dtype, 8) < 1.3 * best(plain, 8)
    assert best(DType.FP8_BLOCK, 1 << 16) <= best(dtype, 1 << 16)


def test_of_few_rows_a_data_centre_s_blackwell_multiplies_fp16() -> None:
    """tcgen05 has tiles of 64 rows and more: below, codes take longer by a clock's worth of conversions."""
    few, many = (
        resources(Config(m, 64, 128, 4, 3, schedule=Schedule.TILE), 128, DType.FP8_BLOCK, 100) for m in (32, 64)
    )
    took = {
        m: estimate_us(qwen(dtype=DType.FP8_BLOCK), 1 << 16, config, chip_for(100))
        for m, config in ((32, few), (64, many))
    }
    assert took[64] < 0.7 * took[32]
