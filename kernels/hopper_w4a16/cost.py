"""The cost model of the kernels for prepared quantised w and bf16 x (``Schedule.W4A16``): docs/inside/cost-model.md.

A step of a tile takes the longer of two times: turning its codes into bf16 and multiplying them, and loading its
operands from L2. Programs take tiles when they become free, so the last wave counts half. This and the memory's time
are joined by a p-norm, like in kernels/cost_model.py. Pure Python.
"""

from __future__ import annotations

import math

from ...artifacts.records import Op, Problem
from ...artifacts.tuples import NamedTuple
from ..chips import Chip
from ..codes import BLOCK, CodeLayout
from ..cost import Resources, expected_rows, handed_out, join
from ..spec import TileRows, gemm_of
from . import ZERO_DTYPES, code_layout

_GRAIN = 16  # kernels/hopper_w4a16/rows.py rounds a fitted tile's rows up to a multiple of this


class MixedConstants(NamedTuple):
    """Constants in ns, of one SM, fitted to launches on an H100 (benchmarks/results/quantised-sweep-h100.json.xz).

    int4_ns and nvfp4_ns are for later sources, fitted to both GPUs' journals
    (tests/kernels/hopper_w4a16/test_cost.py). There is no constant for a tile's own time: step_ns includes it, because
    choices are better this way.
    """

    start_ns: float
    step_ns: float  # a step's barriers
    mxfp4_ns: float  # turn a block of 64 x 64 codes into bf16
    int4_ns: float
    nvfp4_ns: float
    eight_bits_ns: float
    turned_ns: float  # a block of any format, for dX
    zero_ns: float  # added to a block with zero points
    row_ns: float  # multiply a block by one row of x
    l2_bytes_per_ns: float
    memory_share: float  # of the chip's bandwidth
    norm: float


MIXED = MixedConstants(13165.0, 185.0, 55.8, 40.0, 63.0, 59.5, 98.0, 15.0, 0.980, 143.4, 0.938, 4.51)


def _code_ns(codes: CodeLayout, c: MixedConstants) -> float:
    if codes.codes == "e2m1":
        return c.nvfp4_ns if codes.scales == "e4m3" else c.mxfp4_ns
    return c.int4_ns if codes.codes == "int4" else c.eight_bits_ns


def estimate_us(problem: Problem, M: int, resources: Resources, chip: Chip, c: MixedConstants = MIXED) -> float:
    """Return the expected time of one launch in microseconds."""
    config = resources.config
    gemm, precision = gemm_of(problem), problem.dtype.precision
    rows = expected_rows(problem.E, M)
    row_tiles = rows.tiles[config.block_m]
    height = float(config.block_m)
    if config.rows is TileRows.FITTED:
        height = min(height, rows.tiles[_GRAIN] * _GRAIN / row_tiles)
    column_tiles, steps = -(-gemm.columns // config.block_n), -(-gemm.reduction // config.block_k)
    blocks = config.block_n // BLOCK * (config.block_k // BLOCK)
    code_ns = c.turned_ns if problem.op is Op.DX else _code_ns(code_layout(problem.dtype), c)
    code_ns += c.zero_ns if problem.dtype in ZERO_DTYPES else 0.0
    loaded = math.ceil(height / BLOCK) * BLOCK if config.block_m > BLOCK else config.block_m
    loaded_bytes = loaded * config.block_k * 2 + blocks * BLOCK * BLOCK * precision.w.bits / 8
    work_ns = blocks * (code_ns + c.row_ns * height)
    step_ns = c.step_ns + join(work_ns, loaded_bytes / c.l2_bytes_per_ns, c.norm)
    waves, filled = handed_out(row_tiles * column_tiles / chip.sm_count)
    read_bytes = rows.active * precision.w_bytes(problem.N, problem.K) + 2.0 * M * (gemm.reduction + gemm.columns)
    memory_ns = read_bytes / (chip.bandwidth_gbs * c.memory_share) / filled
    return (c.start_ns + join(memory_ns, waves * steps * step_ns, c.norm)) * 1e-3
