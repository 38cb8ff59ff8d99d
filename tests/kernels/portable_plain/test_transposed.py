"""tf32 whose weights lie as [E, K, N] in the kernel's words: on sm_90 they reach the tensor cores from registers."""

from __future__ import annotations

import pytest

from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.records import DType, Fusion, Layout, Op, Problem
from pretuned.kernels.arch import arch_of, limits
from pretuned.kernels.chips import chip_for
from pretuned.kernels.cost import Resources, rejection
from pretuned.kernels.cost_model import estimate_us
from pretuned.kernels.registry import constants
from pretuned.kernels.spec import Config, Loads, Spec

TILE = Config(128, 128, 32, 4, 3, loads=Loads.TMA)
DX = Spec(Op.DX, DType.TF32, TILE)


@pytest.mark.parametrize(
    ("spec", "sm", "turned"),
    [
        (DX, 90, True),
        (DX._replace(fusion=Fusion.GATHER), 90, True),
        (Spec(Op.FORWARD, DType.TF32, TILE, Layout.KN), 90, True),
        (Spec(Op.DX, DType.TF32, TILE, Layout.KN), 90, False),
        (Spec(Op.FORWARD, DType.TF32, TILE), 90, False),
        (DX._replace(dtype=DType.BF16), 90, False),
        (DX._replace(config=Config(128, 128, 32, 4, 3)), 90, False),  # through pointers
        (DX._replace(config=Config(64, 64, 32, 2, 4, loads=Loads.TMA)), 90, False),  # on mma.sync
        (DX._replace(config=Config(32, 256, 32, 4, 3, loads=Loads.TMA)), 90, False),
        (DX, 100, False),
    ],
)
def test_where_weights_come_from_registers(spec: Spec, sm: int, turned: bool) -> None:
    assert constants(spec, sm)["TURNED"] is turned


@pytest.mark.slow
@pytest.mark.parametrize(
    "fusion",
    [Fusion.GATHER, *(pytest.param(fusion, marks=pytest.mark.nightly) for fusion in (Fusion.NONE, Fusion.SCATTER))],
)
def test_two_such_tiles_fit_an_sm(fusion: Fusion) -> None:
    variant = compile_variant(DX._replace(fusion=fusion), 90).variant
    assert rejection(variant, arch_of(90)) is None
    assert 2 * variant.shared_bytes <= limits(90).shared_per_sm_bytes


def test_the_model_prefers_the_rows_that_keep_up_with_the_registers() -> None:
    """OLMoE gate_up dX, T=8192: measured 1798 us, and 3198 with 64 rows; 3653 on mma.sync."""
    problem, chip = Problem(Op.DX, DType.TF32, 64, 2048, 2048), chip_for(90)
    us = {
        config: estimate_us(problem, 65536, Resources(config, threads, shared_bytes, registers), chip)
        for config, threads, shared_bytes, registers in (
            (TILE, 128, 98352, 255),
            (Config(64, 128, 64, 4, 3, loads=Loads.TMA), 128, 131120, 154),
            (Config(64, 64, 32, 2, 4, loads=Loads.TMA), 64, 49184, 217),
        )
    }
    assert 1.2 * us[TILE] < min(time for config, time in us.items() if config != TILE)
    assert 1600 < us[TILE] < 2000
