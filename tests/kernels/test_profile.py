from __future__ import annotations

import dataclasses

import pytest

from pretuned.artifacts.records import DType, Op
from pretuned.kernels.arch import limits
from pretuned.kernels.chips import chip_for
from pretuned.kernels.cost import CONSTANTS, Resources, join, occupancy
from pretuned.kernels.cost_model import profile
from pretuned.kernels.spec import Config, Loads

WIDE = Resources(Config(64, 128, 256, 8, 3, loads=Loads.TMA), 256, 147480, 168)


@pytest.mark.parametrize(
    ("threads", "shared", "registers", "sm", "expected"),
    [
        (256, 180248, 220, 90, 1),  # registers and shared memory
        (128, 61464, 40, 90, 3),  # 228 KiB by shared memory, 1 KiB each for the driver
        (128, 0, 32, 90, 16),  # threads: 2048
        (32, 0, 16, 90, 32),  # blocks
        (32, 0, 16, 86, 16),
        (128, 0, 255, 80, 2),  # 8 warps fit the register file
        (128, 99 * 1024, 64, 86, 1),
        (128, 99 * 1024 + 1, 64, 86, 0),
        (1056, 0, 16, 90, 0),
    ],
)
def test_occupancy(threads: int, shared: int, registers: int, sm: int, expected: int) -> None:
    resources = Resources(Config(16, 64, 64, 4, 3), threads, shared, registers)
    assert occupancy(resources, limits(sm)) == expected


def test_dw_is_seen_with_its_own_tile_and_constants() -> None:
    rows, weight = (profile(WIDE, op, DType.BF16, chip_for(90), CONSTANTS) for op in (Op.FORWARD, Op.DW))
    assert rows.config == weight.config == WIDE.config
    assert rows.norm == CONSTANTS.hopper.norm
    assert weight.norm == CONSTANTS.hopper.weight.norm
    # The columns' operand of the forward is 128 wide and 256 deep, that of dW 256 wide and 64 deep.
    assert rows.column_flight_bytes == pytest.approx(2 * weight.column_flight_bytes)


def test_what_is_loaded_already_is_not_waited_for() -> None:
    for stages in (2, 3, 6):
        resources = dataclasses.replace(WIDE, config=WIDE.config._replace(num_stages=stages))
        profiled = profile(resources, Op.DW, DType.BF16, chip_for(90), CONSTANTS)
        assert 0.0 < profiled.loaded_ns < profiled.chain_ns
        assert profiled.step_ns > 0.0


@pytest.mark.parametrize(("first", "other", "norm", "expected"), [(3.0, 4.0, 2.0, 5.0), (1.0, 1.0, 1.0, 2.0)])
def test_join(first: float, other: float, norm: float, expected: float) -> None:
    assert join(first, other, norm) == join(other, first, norm) == pytest.approx(expected)
    assert join(first, 0.0, norm) == first
