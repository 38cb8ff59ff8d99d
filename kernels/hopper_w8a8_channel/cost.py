"""The cost model of the kernel for fp8 per-channel (``Schedule.W8A8_CHANNEL``): docs/inside/cost-model.md.

A step of a tile takes the longer of two times: its products, and loading its operands from L2. A tile also takes the
time of its stores. Programs take tiles when they become free, so the last wave counts half. This and the memory's time
are joined by a p-norm, like in kernels/cost_model.py. Pure Python.
"""

from __future__ import annotations

import math

from ...artifacts.records import Problem
from ...artifacts.tuples import NamedTuple
from ..chips import Chip
from ..codes import BLOCK
from ..cost import Resources, expected_rows, handed_out, join
from ..spec import TileRows

_GRAIN = 16  # kernels/hopper_w8a8_channel/rows.py rounds a fitted tile's rows up to a multiple of this


class RowScaledConstants(NamedTuple):
    """Constants in ns, of one SM, fitted to launches on an H100."""

    start_ns: float
    tile_ns: float  # between two tiles of a program
    step_ns: float  # a step's barriers
    block_ns: float  # a block of 64 x 64 codes, for any number of rows
    row_ns: float  # multiply a block by one row of x
    l2_bytes_per_ns: float
    memory_share: float  # of the chip's bandwidth
    norm: float


ROW_SCALED = RowScaledConstants(12778.0, 228.0, 16.2, 7.29, 0.741, 75.3, 0.934, 3.94)


def estimate_us(
    problem: Problem, M: int, resources: Resources, chip: Chip, c: RowScaledConstants = ROW_SCALED
) -> float:
    """Return the expected time of one launch in microseconds, without the row kernel that quantises x."""
    config = resources.config
    E, N, K, precision = problem.E, problem.N, problem.K, problem.dtype.precision
    rows = expected_rows(E, M)
    row_tiles, height = rows.tiles[config.block_m], float(config.block_m)
    if config.rows is TileRows.FITTED:
        height = min(height, rows.tiles[_GRAIN] * _GRAIN / row_tiles)
    column_tiles, steps = -(-N // config.block_n), -(-K // config.block_k)
    blocks = config.block_n // BLOCK * (config.block_k // BLOCK)
    loaded = math.ceil(height / BLOCK) * BLOCK if config.block_m > BLOCK else config.block_m
    loaded_bytes = (loaded + config.block_n) * config.block_k
    work_ns = blocks * (c.block_ns + c.row_ns * height)
    step_ns = c.step_ns + join(work_ns, loaded_bytes / c.l2_bytes_per_ns, c.norm)
    waves, filled = handed_out(row_tiles * column_tiles / chip.sm_count)
    read_bytes = rows.active * precision.w_bytes(N, K) + precision.x.nbytes(M, K) + 2.0 * M * N
    memory_ns = read_bytes / (chip.bandwidth_gbs * c.memory_share) / filled
    return (c.start_ns + join(memory_ns, waves * (c.tile_ns + steps * step_ns), c.norm)) * 1e-3
