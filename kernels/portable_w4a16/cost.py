"""The cost model of the portable kernels for quantised w, ``coded`` and ``w8a8``: docs/inside/cost-model.md.

A tile takes its start and, for each step, the longer of two times: turning its codes into bf16 and multiplying them,
and loading both operands. Programs take tiles when they become free. ``w8a8`` turns x into codes instead of w into
bf16, adds each step's product to sums, and multiplies twice as fast. Figures of a GPU are from the tables of GPUs and
``kernels/cost.py``. One constant is measured (``eight_bits_apart``), the others are counted instructions.
"""

from __future__ import annotations

import math

from ...artifacts.records import Layout, Problem
from ...artifacts.tuples import NamedTuple
from ..arch import Feature, arch_of
from ..chips import Chip
from ..codes import BLOCK
from ..cost import CONSTANTS, SIZES, Constants, Resources, expected_rows, handed_out, join, occupancy
from ..spec import gemm_of

_TCGEN05_ROWS = 64  # of the smallest tile


class CodedConstants(NamedTuple):
    """Instructions of a lane for each element of a step, without loads; and a program's latencies in ns."""

    four_bits: float = 9.0  # of w: unpack, two products, half a conversion, to shared memory and back
    eight_bits: float = 9.0
    eight_bits_apart: float = 60.0  # prepared codes, tiles wider than a block: 6 times as long on an H200
    of_x: float = 6.0  # x to codes: widen, largest, scale, half a conversion, to shared memory and back
    of_largest: float = 3.0  # find the largest |x| of a row before its codes, for one scale per row
    promoted: float = 2.0  # add a step's product to the sums in fp32, for each sum
    rate: float = 2.0  # speed of e4m3 products over bf16 products
    widened: float = 2.0  # w to fp16, for tiles that are too small for e4m3 products
    step_ns: float = 350.0  # a program's barriers, and the way through shared memory
    tile_ns: float = 1500.0
    norm: float = 4.0


CODED = CodedConstants()


def estimate_us(
    problem: Problem,
    M: int,
    resources: Resources,
    chip: Chip,
    constants: Constants = CONSTANTS,
    c: CodedConstants = CODED,
) -> float:
    """Return the expected time of one launch in microseconds; infinity if no program fits an SM."""
    config, arch, family = resources.config, arch_of(chip.sm), constants.family(chip.sm)
    programs = occupancy(resources, arch.limits)
    if not programs:
        return math.inf
    gemm, precision = gemm_of(problem), problem.dtype.precision
    rows = expected_rows(problem.E, M)
    row_tiles, column_tiles = rows.tiles[config.block_m], -(-gemm.columns // config.block_n)
    steps = -(-gemm.reduction // config.block_k)
    elements = config.block_n * config.block_k
    per_element = c.four_bits if precision.w.bits == 4 else c.eight_bits
    if precision.w.bits == 8 and problem.layout is Layout.NK and config.block_n > BLOCK:
        per_element = c.eight_bits_apart
    work = elements * per_element
    peak = chip.bf16_tflops * 1e3 / chip.sm_count * family.sustained  # FLOPs a ns
    if problem.dtype.quantises_x:
        largest = c.of_largest if precision.x.scale is not None and not precision.x.scale.columns else 0.0
        work = config.block_m * (config.block_k * (c.of_x + largest) + config.block_n * c.promoted)
        if config.block_m < _TCGEN05_ROWS and arch.has(Feature.TCGEN05):
            work += elements * c.widened
        else:
            peak *= c.rate
    decode_ns = work / (arch.limits.fp32_lanes * chip.clock_ghz)  # of a whole SM
    height = family.rows[SIZES.index(config.block_m)] if config.block_m in SIZES else 1.0
    dot_ns = 2.0 * config.block_m * elements / (peak * height)
    loaded_bytes = config.block_m * config.block_k * 2 + elements * precision.w.bits / 8
    load_ns = loaded_bytes / (family.l2_bytes_per_clock * chip.clock_ghz)
    tiles = row_tiles * column_tiles
    busy = min(programs, max(1.0, tiles / chip.sm_count))  # programs that share an SM
    step_ns = max(join(decode_ns + dot_ns, load_ns, c.norm), c.step_ns / busy)
    waves, filled = handed_out(tiles / chip.sm_count)
    work_ns = waves * (steps * step_ns + c.tile_ns / busy)
    read_bytes = rows.active * precision.w_bytes(problem.N, problem.K) + 2.0 * M * (gemm.reduction + gemm.columns)
    memory_ns = read_bytes / (chip.bandwidth_gbs * family.memory_share) / filled
    return (constants.launch_ns + constants.cold_ns + constants.start_ns + join(memory_ns, work_ns, c.norm)) * 1e-3
