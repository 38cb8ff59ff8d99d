"""How rows fall on the experts where a measurement is taken."""

from __future__ import annotations

import pytest
import torch
from portable_formats import PORTABLE

from pretuned.aot.journal.records import ROUTINGS
from pretuned.aot.measure.inputs import measured_routings, quantised_weights, routed_rows, top_k_of
from pretuned.artifacts.records import DType


def tiles(m_sizes: torch.Tensor, block: int) -> int:
    return int(((m_sizes + block - 1) // block).sum())


@pytest.mark.parametrize("E", [1, 2, 8, 16, 32, 60, 128, 256])
@pytest.mark.parametrize("M", [1, 2, 8, 64, 1024, 4096])
def test_every_row_falls_on_one_expert_and_the_same_again(E: int, M: int) -> None:
    routings = measured_routings(E, M)
    assert len(routings) == len(ROUTINGS)
    for m_sizes, again in zip(routings, measured_routings(E, M), strict=True):
        assert m_sizes.dtype == torch.int32
        assert m_sizes.shape == (E,)
        assert int(m_sizes.sum()) == M
        assert torch.equal(m_sizes, again)


@pytest.mark.parametrize("E", [8, 32, 128])
def test_a_routing_that_is_even_on_average_is_not_exactly_even(E: int) -> None:
    """Experts get about as many rows as a tile has: exactly so many take one tile, of random ones half take two."""
    skewed, uniform = measured_routings(E, 128 * E)
    assert tiles(uniform, 128) > 1.25 * E
    assert int(uniform.min()) > 64
    assert int(uniform.max()) - int(uniform.min()) < int(skewed.max()) - int(skewed.min())


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_both_together_weigh_tile_sizes_as_other_draws_do(rows: int) -> None:
    """The tiles of 128 rows over those of 64, in the geometric mean over both routings, against twenty other draws.

    A skewed and an exactly even routing are off by 19, 9 and 5 %.
    """
    E = 32
    M = rows * E
    top_k = top_k_of(E, M)
    draws = [routed_rows(E, top_k, M // top_k, 100 + i, skew=(0.0, 0.3)[i % 2]) for i in range(20)]
    typical = sum(tiles(draw, 128) for draw in draws) / sum(tiles(draw, 64) for draw in draws)
    skewed, uniform = (tiles(routing, 128) / tiles(routing, 64) for routing in measured_routings(E, M))
    assert abs((skewed * uniform) ** 0.5 / typical - 1) < 0.04


def test_skewed_rows_leave_experts_out_and_uniform_ones_do_not() -> None:
    skewed, uniform = measured_routings(64, 64 * 64)
    assert int((skewed == 0).sum()) >= 2
    assert int((uniform == 0).sum()) == 0


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.quantised])
def test_quantised_weights_are_prepared_finite_and_as_wide_as_others(dtype: DType) -> None:
    w = quantised_weights(2, 256, 384, dtype, "cpu")
    assert w.shape == (2, 256, 384)
    assert w.kernel_dtypes == (dtype,) or dtype.quantises_x
    assert w.format == dtype.value or dtype.quantises_x
    zeros = dtype.value.endswith("_zp")
    assert w.order == (0 if dtype.value in PORTABLE else 2 if dtype.precision.w.bits == 8 else 1)
    assert (w.zero is not None) is zeros
    values = w.dequantize(torch.float32)
    assert bool(torch.isfinite(values).all())
    assert 0.025 < float(values.std()) < 0.1
    assert abs(float(values.mean())) < 0.01
    raw = w.restore().codes.view(torch.uint8)
    assert len(raw.unique()) == (254 if dtype.precision.w.bits == 8 else 256)  # every code, but NaN
    again = quantised_weights(2, 256, 384, dtype, "cpu")
    assert torch.equal(again.dequantize(torch.float32), values)
