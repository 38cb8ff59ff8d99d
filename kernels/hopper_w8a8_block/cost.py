"""The cost model of the kernel for fp8 128x128 block (``Schedule.W8A8_BLOCK``): docs/inside/cost-model.md.

A step of a tile takes the longer of two times: its products and sums, 64 rows at a time, and loading its operands from
L2. A tile also takes the time of its stores. Programs take tiles when they become free, so the last wave counts half.
This and the memory's time are joined by a p-norm, like in kernels/cost_model.py. Pure Python.
"""

from __future__ import annotations

from ...artifacts.records import Op, Problem
from ...artifacts.tuples import NamedTuple
from ..chips import Chip
from ..cost import Resources, expected_rows, handed_out, join
from ..spec import Schedule

_HALF = 64  # rows of a tile that are multiplied or skipped together
# Times as long for 64 rows whose left operand comes from registers, fitted to an H200
# (docs/inside/trials.md, codes-in-place).
_FROM_REGISTERS = 1.06


class ScaledConstants(NamedTuple):
    """Constants in ns, of one SM, fitted to launches on an H100 (benchmarks/results/quantised-h100.journal.xz)."""

    start_ns: float
    tile_ns: float  # between two tiles of a program
    half_ns: float  # products of 64 rows in a step
    step_ns: float  # barriers of a step
    l2_bytes_per_ns: float
    shallow: float  # share of the products' time that each stage below four adds
    memory_share: float  # of the chip's bandwidth
    norm: float


SCALED = ScaledConstants(14907.0, 1006.0, 345.4, 152.1, 59.1, 0.01, 0.887, 6.76)


def estimate_us(problem: Problem, M: int, resources: Resources, chip: Chip, c: ScaledConstants = SCALED) -> float:
    """Return the expected time of one launch in microseconds, without the row kernels that quantise x and dy."""
    if problem.op is Op.DW:
        return _weight_us(problem, M, resources, chip, c)
    config = resources.config
    E, N, K, precision = problem.E, problem.N, problem.K, problem.dtype.precision
    rows = expected_rows(E, M)
    row_tiles, halves = rows.tiles[config.block_m], rows.tiles[_HALF]
    column_tiles, steps = -(-N // config.block_n), -(-K // config.block_k)
    half_ns = c.half_ns * (_FROM_REGISTERS if config.schedule is Schedule.W8A8_STARTS else 1.0)
    work_ns = (half_ns * halves / row_tiles + c.step_ns) * (1.0 + c.shallow * (4 - config.num_stages))
    loaded_bytes = (config.block_n + min(config.block_m, _HALF * halves / row_tiles)) * config.block_k
    step_ns = join(work_ns, loaded_bytes / c.l2_bytes_per_ns, c.norm)
    waves, filled = handed_out(row_tiles * column_tiles / chip.sm_count)
    read_bytes = rows.active * precision.w_bytes(N, K) + precision.x.nbytes(M, K) + 2.0 * M * N
    memory_ns = read_bytes / (chip.bandwidth_gbs * c.memory_share) / filled
    return (c.start_ns + join(memory_ns, waves * (c.tile_ns + steps * step_ns), c.norm)) * 1e-3


def _weight_us(problem: Problem, M: int, resources: Resources, chip: Chip, c: ScaledConstants) -> float:
    """dW: all experts have tiles, whose steps are groups of 128 of their rows."""
    config, E, N, K = resources.config, problem.E, problem.N, problem.K
    tiles = E * -(-N // config.block_n) * -(-K // config.block_k)
    groups = expected_rows(E, M).tiles[config.block_m] / E  # row tiles of an expert
    work_ns = 2.0 * c.half_ns + c.step_ns
    loaded_bytes = (config.block_n + config.block_k) * config.block_m
    step_ns = join(work_ns, loaded_bytes / c.l2_bytes_per_ns, c.norm)
    waves, filled = handed_out(tiles / chip.sm_count)
    moved_bytes = 1.0 * M * (N + K) + 2.0 * E * N * K
    memory_ns = moved_bytes / (chip.bandwidth_gbs * c.memory_share) / filled
    return (c.start_ns + join(memory_ns, waves * (c.tile_ns + groups * step_ns), c.norm)) * 1e-3
