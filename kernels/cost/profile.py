"""A variant on a chip, as the cost model sees it: all that does not depend on the problem's sizes."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import NamedTuple

from ...artifacts.records.bundle import Variant
from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op
from ..contract.config import Config, Loads, Schedule, TileRows
from ..contract.registry import transposed
from ..contract.spec import MAX_EXPERTS
from ..hardware.arch import Feature, SmLimits, arch_of
from ..hardware.chips import Chip
from .constants import SIZES, Constants, Specialized


@dataclass(frozen=True, slots=True)
class Resources:
    """What the model needs to know of a variant: the config, and what its cubin takes."""

    config: Config
    threads: int
    shared_bytes: int
    registers: int
    alignment: int = 16
    max_experts: int = MAX_EXPERTS

    @classmethod
    def of(cls, variant: Variant) -> Resources:
        """The resources of a variant of a bundle."""
        config = Config.from_pairs(variant.config)
        return cls(
            config, variant.threads, variant.shared_bytes, variant.registers, variant.alignment, variant.max_experts
        )


def occupancy(resources: Resources, sm_limits: SmLimits) -> int:
    """Programs resident on one SM, 0 if not even one fits.

    The least of: shared memory (plus the driver's share), registers (in units of 256 a warp, a
    quarter of the file per scheduler), threads, and the limit of blocks.
    """
    if resources.threads > sm_limits.threads_per_block or resources.shared_bytes > sm_limits.shared_per_block_bytes:
        return 0
    warps = max(1, -(-resources.threads // 32))
    registers_per_warp = max(1, -(-resources.registers * 32 // 256)) * 256
    by_registers = 4 * (sm_limits.registers_per_sm // 4 // registers_per_warp) // warps
    shared = -(-resources.shared_bytes // 128) * 128 + sm_limits.shared_reserved_bytes
    by_shared = sm_limits.shared_per_sm_bytes // shared
    return min(by_registers, by_shared, sm_limits.threads_per_sm // (warps * 32), sm_limits.blocks_per_sm)


class Profile(NamedTuple):
    """A variant's times on a chip, in ns."""

    config: Config
    occupancy: int
    step_ns: float  # one step of one tile, the whole SM's throughput
    chain_ns: float  # one step of one program, its own latency
    loaded_ns: float  # the same where what it loads is there already
    once_ns: float  # start of the first tile and end of the last
    tile_ns: float  # between two tiles of one slot: what their own steps don't hide
    latency_ns: float
    under_way: float  # steps that load at once
    column_flight_bytes: float  # loads of the columns' operand that one program keeps under way ...
    row_flight_bytes: float  # ... and of one row of the other
    tail: float
    norm: float  # joins memory and compute


def profile(resources: Resources, op: Op, dtype: DType, chip: Chip, c: Constants) -> Profile:
    """What ``resources`` take on ``chip``; docs/inside/cost-model.md has the equations."""
    config, family, weight = resources.config, c.family(chip.sm), c.family(chip.sm).weight
    rows, columns, depth = config.block_m, config.block_n, config.block_k
    if op is Op.DW:
        rows, columns, depth = config.block_n, config.block_k, config.block_m
        if transposed(op, config):
            rows, columns = columns, rows
    arch = arch_of(chip.sm)
    wgmma = arch.has(Feature.WGMMA) and dtype is not DType.FP32
    wgmma = wgmma and config.loads is Loads.TMA and rows >= 64 and config.num_warps >= 4
    math_ns = 2.0 * rows * columns * depth / _flops_per_ns(resources, rows, columns, wgmma, dtype, chip, c)
    if arch.has(Feature.WGMMA) and dtype is DType.TF32 and op is not Op.FORWARD:
        math_ns /= _tf32_rate(config, op, rows, wgmma, c)
    load_per_ns = family.l2_bytes_per_clock * chip.clock_ghz
    latency_ns, overhead_ns = family.latency_ns, family.pointer_step_ns
    if config.loads is Loads.TMA:
        latency_ns, overhead_ns = family.tma_latency_ns, family.tma_step_ns
    store_per_ns, issue_ns, exposed, norm = load_per_ns, overhead_ns / 2, family.persistent_exposed, family.norm
    if op is Op.DW:
        load_per_ns, store_per_ns = load_per_ns * weight.load_share, weight.store_bytes_per_clock * chip.clock_ghz
        overhead_ns += weight.step_ns * config.num_warps / 4
        issue_ns, exposed, norm = weight.issue_ns * config.num_warps / 4, weight.exposed, weight.norm
    if config.schedule.warp_specialized:
        special = family.specialized
        math_ns /= _special_rate(special, config, op)
        exposed = special.weight_exposed if op is Op.DW else special.exposed
        exposed = special.turns_exposed if config.schedule is Schedule.PINGPONG else exposed
        norm = norm if op is Op.DW else special.norm
    under_way = max(0.5, config.num_stages - 1 - (family.held_stages if wgmma else 0.0))
    if resources.alignment < 16:
        load_per_ns, under_way = load_per_ns / c.unaligned_load, 0.5
    load_ns = (rows + columns) * depth * dtype.itemsize / load_per_ns
    alone = family.one_cta[config.num_warps]
    scanned = resources.max_experts / resources.threads  # experts of one thread
    search_ns = c.search_ns + 0.25 * c.scan_ns * scanned
    start_ns = (
        c.start_ns + c.scan_ns * scanned + (family.specialized.start_ns if config.schedule.warp_specialized else 0.0)
    )
    tile_ns = search_ns + latency_ns + math_ns / alone + c.store_ns + rows * columns * dtype.itemsize / store_per_ns
    loaded_ns = join(math_ns / alone, load_ns, family.chain_norm)
    return Profile(
        config,
        occupancy(resources, arch.limits),
        join(math_ns, load_ns, family.step_norm) + issue_ns,
        join(loaded_ns, latency_ns / under_way, family.chain_norm) + overhead_ns,
        loaded_ns + overhead_ns,
        start_ns + tile_ns,
        start_ns + tile_ns if config.schedule is Schedule.TILE else tile_ns * exposed,
        latency_ns,
        under_way,
        under_way * columns * depth * dtype.itemsize,
        under_way * depth * dtype.itemsize,
        family.tail_static if config.schedule is Schedule.PERSISTENT else family.tail_dynamic,
        norm,
    )


def _tf32_rate(config: Config, op: Op, rows: int, wgmma: bool, c: Constants) -> float:
    """What is left of the rate where w, or both operands, lie the wrong way for wgmma."""
    if op is Op.DX:
        return min(1.0, rows / c.held_tf32_rows) if wgmma else 1.0
    if config.schedule.warp_specialized:
        return c.fragments_tf32
    return c.crossed_tf32 if config.loads is Loads.TMA and not wgmma else c.turned_tf32


def _special_rate(special: Specialized, config: Config, op: Op) -> float:
    # Tiles that are fitted to their rows go as fast in turns as by both.
    if config.schedule is Schedule.PINGPONG and config.rows is TileRows.FIXED:
        return special.turns_weight_rate if op is Op.DW else special.turns_rate
    return special.weight_rate if op is Op.DW else special.rate


def _size(size: int) -> int:
    """The place in ``SIZES`` of a tile's rows or columns: of the largest that is no larger."""
    return max(0, bisect.bisect_right(SIZES, size) - 1)


def _flops_per_ns(
    resources: Resources, rows: int, columns: int, wgmma: bool, dtype: DType, chip: Chip, c: Constants
) -> float:
    """The rate of one SM on tiles of ``rows`` x ``columns``."""
    config, family = resources.config, c.family(chip.sm)
    if dtype is DType.FP32:
        peak, sustained = chip.fp32_tflops, 1.0
        share = math.sqrt(c.fma_rows[_size(rows)] * c.fma_rows[_size(columns)])
    else:
        peak, sustained = (chip.tf32_tflops if dtype is DType.TF32 else chip.bf16_tflops), family.sustained
        share = family.rows[_size(columns if config.rows is TileRows.FITTED else rows)]  # those are turned round
        if wgmma:  # the columns of one instruction: warpgroups are laid along the rows first, 64 of them each
            across = max(1, config.num_warps // 4 // (rows // 64))
            whole = config.schedule is Schedule.PINGPONG or config.rows is TileRows.FITTED
            wide = 256 if whole else max(16, columns // across)
            share *= family.wgmma_columns[_size(wide)]
        else:
            share *= family.columns[_size(columns)]
        if arch_of(chip.sm).has(Feature.MMA_ASYNC) and rows >= 64 and config.loads is Loads.POINTER:
            share *= family.pointer_wgmma
    if rows * columns > 128 * resources.threads:
        share *= c.crowded_registers
    return peak * 1e3 * sustained * share / chip.sm_count


def join(one: float, other: float, norm: float) -> float:
    """The p-norm: near the larger, up to 2^(1/norm) times it where both are equal."""
    low, high = (one, other) if one < other else (other, one)
    joined: float = high * (1.0 + (low / high) ** norm) ** (1.0 / norm)
    return joined
