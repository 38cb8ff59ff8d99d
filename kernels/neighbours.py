"""Choose for a cell that nobody measured by the measured cells around it. See docs/inside/cost-model.md.

A cell is a problem at a number of rows. Of each measured cell a bundle knows two times: of the variant that was chosen
and of the runner-up. ``tiles_us`` says in a few operations how a variant's time grows with a problem's sizes. What a
measured time is beside it is nearly the same in the cells around, so it carries over to the cell that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..artifacts.records.precision import DType
from ..artifacts.records.problem import Op
from ..artifacts.tuples import NamedTuple
from .contract.config import Config, TileRows
from .cost.resources import join, mean_waves
from .hardware.chips import Chip

NEAREST = 16  # measured cells that are asked
MODEL_SHARE = 0.35  # of what the cost model sees between two variants, what counts beside the neighbours

# The distance of two cells: the sum of these times the square of how many doublings they are apart.
SIZE = 2.45  # E, N and K, each
ROWS = 1.8  # M
EXPERT_ROWS = 5.0  # M / E

# Of cells whose E are one doubling apart, by how many the M of the nearest are, and what E then costs at least.
NEAREST_M = EXPERT_ROWS / (ROWS + EXPERT_ROWS)
EXPERTS = SIZE + ROWS * NEAREST_M

_LAUNCH_US = 10.0  # launch, cold code and a program's start
_SUSTAINED = 0.86  # share of the published rate ...
_BANDWIDTH = 0.9  # ... and of the bandwidth
_NORM = 3.0  # joins memory and compute
_LACKING = 0.8  # of the time of the rows that a fitted tile lacks, what is saved

_LEAST_WEIGHT = 1e-9  # of the nearest cell's: no cell counts for nothing
_OWN = 0.5  # of a time's weight: what holds a cell's own ratio to that of all
_FEW = 0.05  # of all weights: what holds a variant's ratio to ...
_UNSEEN = 0.2  # ... that of all, and so much more (a logarithm): a variant that won nowhere near is no good guess


def tiles_us(op: Op, dtype: DType, sizes: tuple[int, int, int, int], config: Config, chip: Chip) -> float:
    """What the tiles of a config should take for ``sizes`` (E, N, K, M), in us: whole waves of them, or the bytes.

    It knows nothing of stages, warps or schedules. Only its change from one cell to another counts.
    """
    E, N, K, M = sizes
    active = E * -math.expm1(-M / E)
    rows = M / active
    size = dtype.precision.x.bits / 8 if dtype.quantised else dtype.itemsize
    weight_size = dtype.precision.w.bits / 8 if dtype.quantised else size
    tflops = chip.bf16_tflops
    if dtype is DType.FP32 or dtype is DType.TF32:
        tflops = chip.fp32_tflops if dtype is DType.FP32 else chip.tf32_tflops
    flops_per_us = _SUSTAINED * tflops * 1e6
    if op is Op.DW:
        tiles = E * math.ceil(N / config.block_n) * math.ceil(K / config.block_k)
        steps = max(1.0, rows / config.block_m + 0.5) * active / E
        tile_flops = 2.0 * config.block_m * config.block_n * config.block_k * steps
        waves = tiles / chip.sm_count
        waves = 1.0 if waves <= 1.0 else 0.5 * (math.ceil(waves) + waves + 0.5)
        moved_bytes = size * (E * N * K + M * (N + K))
    else:
        columns, reduction = (N, K) if op is Op.FORWARD else (K, N)
        column_tiles = math.ceil(columns / config.block_n)
        row_tiles = max(1.0, rows / config.block_m + 0.5)
        tile_flops = 2.0 * config.block_m * config.block_n * reduction
        if config.rows is TileRows.FITTED:
            tile_flops *= 1.0 - _LACKING * max(0.0, 1.0 - (rows + 8.0) / (row_tiles * config.block_m))
        spread = 0.5 * column_tiles * math.sqrt(active) / chip.sm_count
        waves = mean_waves(active * row_tiles * column_tiles / chip.sm_count, spread)
        moved_bytes = weight_size * active * N * K + size * M * (N + K)
    compute_us = waves * tile_flops * chip.sm_count / flops_per_us
    memory_us = moved_bytes / (_BANDWIDTH * chip.bandwidth_gbs) * 1e-3
    return _LAUNCH_US + join(memory_us, compute_us, _NORM)


class Evidence(NamedTuple):
    """A measured cell: how far it is, and of each variant there, by number, the logarithm of time / ``tiles_us``."""

    apart: float
    ratios: Sequence[tuple[int, float]]


class Ratios(NamedTuple):
    """What times are beside ``tiles_us`` around a cell, as logarithms: of variants timed there, and of all others."""

    of: Mapping[int, float]
    others: float


def ratios(evidence: Sequence[Evidence]) -> Ratios:
    """The ratios of the variants around a cell: of at least one measured cell.

    Each cell has a ratio of its own, by how its rows fell on experts or what ``tiles_us`` does not know of its sizes.
    Which variant was timed there must not decide by that, so it is taken off.
    """
    least = min(one.apart for one in evidence)
    weights = [max(math.exp(least - one.apart), _LEAST_WEIGHT) for one in evidence]
    total = math.fsum(weights)
    weights = [one / total for one in weights]
    usual = math.fsum(weight * one.ratios[0][1] for weight, one in zip(weights, evidence, strict=True))
    sums: dict[int, float] = {}  # by variant, of its ratios ...
    counts: dict[int, float] = {}  # ... and of the weights
    for weight, cell in zip(weights, evidence, strict=True):
        for variant, ratio in cell.ratios:
            if variant in sums:
                sums[variant] += weight * ratio
                counts[variant] += weight
            else:
                sums[variant], counts[variant] = weight * ratio, weight
    means = {variant: sums[variant] / counts[variant] for variant in sums}
    for weight, cell in zip(weights, evidence, strict=True):
        own = 0.0
        for variant, ratio in cell.ratios:
            own += ratio - means[variant]
        own *= weight / (len(cell.ratios) + _OWN)
        for variant, _ in cell.ratios:
            sums[variant] -= own
    others = usual + _UNSEEN
    return Ratios({variant: (sums[variant] + _FEW * others) / (counts[variant] + _FEW) for variant in sums}, others)
