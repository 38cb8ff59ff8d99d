"""The estimated time of a variant, by the measured cells around."""

from __future__ import annotations

import math

import pytest

from pretuned.artifacts.records import DType, Op
from pretuned.kernels.chips import chip_for
from pretuned.kernels.neighbours import Evidence, ratios, tiles_us
from pretuned.kernels.spec import Config, Loads, Schedule, TileRows

CHIP = chip_for(90)
A, B, C = 0, 1, 2  # variants
WIDE = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
NARROW = Config(16, 64, 128, 4, 3, loads=Loads.TMA)


def test_a_variant_carries_its_ratio_to_the_cell() -> None:
    """If a variant takes 10 % less than another in all cells around, so much less is expected here."""
    shares = ratios([Evidence(0.1 * i, ((A, 0.5), (B, 0.6))) for i in range(20)])
    assert shares.of[B] - shares.of[A] == pytest.approx(0.1, abs=0.01)
    assert shares.others > max(shares.of.values())


def test_what_a_cell_has_of_its_own_decides_nothing() -> None:
    """Some cells take longer with every variant: who won there is not slow for that."""
    even = [Evidence(0.0, ((A, 0.5), (B, 0.55))), Evidence(0.0, ((B, 1.04), (C, 1.06)))] * 8
    shares = ratios(even)
    assert shares.of[A] < shares.of[B] < shares.of[C]
    assert shares.of[B] - shares.of[A] < 0.2  # their plain means are 0.295 apart ...
    assert shares.of[C] - shares.of[A] < 0.35  # ... and these 0.56


def test_the_near_count_more_than_the_far() -> None:
    """Far cells alone are all that there is, and count as the nearest do elsewhere."""
    near, far = Evidence(0.1, ((A, 0.0), (B, 0.1))), Evidence(8.0, ((B, 0.0), (A, 0.1)))
    both = ratios([near, far])
    assert both.of[A] < both.of[B]
    alone = ratios([far])
    assert alone.of[B] < alone.of[A]
    assert alone == ratios([Evidence(1e6, far.ratios)])


def test_a_runner_up_may_be_missing() -> None:
    shares = ratios([Evidence(0.0, ((A, 0.2),)), Evidence(0.0, ((B, 0.3), (A, 0.4)))])
    assert set(shares.of) == {A, B}
    assert all(map(math.isfinite, (*shares.of.values(), shares.others)))


@pytest.mark.parametrize("op", list(Op))
def test_tiles_take_the_longer_of_their_waves_and_their_bytes(op: Op) -> None:
    few, many = (tiles_us(op, DType.BF16, (64, 2048, 4096, M), WIDE, CHIP) for M in (64, 1 << 18))
    moved_us = 2 * 64 * 2048 * 4096 / CHIP.bandwidth_gbs * 1e-3
    assert 0.3 * moved_us < few < 2 * moved_us
    flops_us = 2 * 2048 * 4096 * (1 << 18) / CHIP.bf16_tflops * 1e-6
    assert flops_us < many < 1.6 * flops_us


def test_tiles_that_fit_ill_take_longer() -> None:
    """Columns past the last, rows of a tile that no expert has, waves that are hardly begun."""

    def beside(columns: int, rows: int) -> float:
        sizes = (8, columns, 4096, rows)
        return tiles_us(Op.FORWARD, DType.BF16, sizes, WIDE, CHIP) / tiles_us(
            Op.FORWARD, DType.BF16, sizes, NARROW, CHIP
        )

    assert beside(2048 + 32, 32768) > 1.05 * beside(2048, 32768)
    assert beside(2048, 64) > beside(2048, 32768)
    fitted = WIDE._replace(block_m=256, block_n=128, rows=TileRows.FITTED)
    fixed = fitted._replace(rows=TileRows.FIXED)
    sizes = (64, 4096, 4096, 64 * 140)
    assert tiles_us(Op.FORWARD, DType.BF16, sizes, fitted, CHIP) < tiles_us(Op.FORWARD, DType.BF16, sizes, fixed, CHIP)


def test_quantised_weights_move_fewer_bytes() -> None:
    bf16, mxfp4 = (
        tiles_us(Op.FORWARD, dtype, (64, 4096, 4096, 64), NARROW, CHIP) for dtype in (DType.BF16, DType.MXFP4)
    )
    assert 0.2 * bf16 < mxfp4 < 0.4 * bf16
