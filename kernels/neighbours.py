"""Estimate variants' times in a cell that was not measured from measured cells around it: docs/inside/cost-model.md.

A cell is a problem with a number of rows M. For a measured cell a bundle has two times: of the chosen variant and of
the runner-up. ``tiles_us`` is a rough model of how a time depends on the sizes. The ratio of measured time to
``tiles_us`` is nearly equal in cells near each other, so ``ratios`` averages it over the neighbours of a new cell, and
the new cell's estimate is the variant's ratio times its ``tiles_us`` there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..artifacts.records import DType, Op
from ..artifacts.tuples import NamedTuple
from .chips import Chip
from .cost import join, mean_waves
from .spec import Config, TileRows

NEAREST = 16  # neighbours that count
MODEL_SHARE = 0.35  # the share of the cost model's difference between two variants that is added to the neighbours'

# The distance of two cells is a sum over sizes: this factor times the square of the difference in doublings.
SIZE = 2.45  # E, N and K, each
ROWS = 1.8  # M
EXPERT_ROWS = 5.0  # M / E

# If E differs by a doubling, the nearest M differs by NEAREST_M doublings, and the distance is at least EXPERTS.
NEAREST_M = EXPERT_ROWS / (ROWS + EXPERT_ROWS)
EXPERTS = SIZE + ROWS * NEAREST_M

_LAUNCH_US = 10.0  # launch, cold code and a program's start
_SUSTAINED = 0.86  # share of the published rate ...
_BANDWIDTH = 0.9  # ... and of the bandwidth
_NORM = 3.0  # joins memory and compute
_LACKING = 0.8  # a fitted tile saves this share of the time of the rows that it lacks

_LEAST_WEIGHT = 1e-9  # of the nearest cell's weight, so that no weight is zero
_OWN = 0.5  # weight of the mean ratio in a cell's own ratio
_FEW = 0.05  # weight of the mean ratio in a variant's ratio, and ...
_UNSEEN = 0.2  # ... a penalty (of the logarithm): variants that won nowhere near are bad guesses


def tiles_us(op: Op, dtype: DType, sizes: tuple[int, int, int, int], config: Config, chip: Chip) -> float:
    """Estimate the time in us of a config's tiles for ``sizes`` (E, N, K, M), from waves of tiles and bytes moved.

    Stages, warps and schedules are ignored: only the change from a cell to another counts.
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
    """A measured cell: its distance, and (variant, log(time / ``tiles_us``)) for each variant timed there."""

    apart: float
    ratios: Sequence[tuple[int, float]]


class Ratios(NamedTuple):
    """log(time / ``tiles_us``) around a cell: for variants timed in its neighbours, and for all others."""

    of: Mapping[int, float]
    others: float


def ratios(evidence: Sequence[Evidence]) -> Ratios:
    """Average the ratios of at least one measured cell, weighted by distance.

    All variants of a cell share an error: its rows' distribution, or sizes that ``tiles_us`` describes badly. This
    shared part is subtracted, so that a variant gains nothing from being timed in a lucky cell.
    """
    least = min(cell.apart for cell in evidence)
    weights = [max(math.exp(least - cell.apart), _LEAST_WEIGHT) for cell in evidence]
    total = math.fsum(weights)
    weights = [weight / total for weight in weights]
    usual = math.fsum(weight * cell.ratios[0][1] for weight, cell in zip(weights, evidence, strict=True))
    sums: dict[int, float] = {}  # by variant, of its weighted ratios ...
    counts: dict[int, float] = {}  # ... and of its weights
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
