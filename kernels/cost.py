"""The cost model: what a variant should take on a GPU where nobody measured it. See docs/cost-model.md.

Three times bound a kernel from below: memory traffic, the throughput of all SMs, and the chain of
one program's own steps, the last two rounded up to whole waves. Memory and compute overlap, but not
wholly: they are joined by a p-norm. Pure Python, no torch: the runtime calls it per new shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..artifacts.types import DType, Op, Problem, Variant
from .abi import MAX_EXPERTS
from .calibration import CONSTANTS, SIZES, Constants
from .chips import Chip, SmLimits, limits
from .config import Config
from .routing import expected_rows


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


@dataclass(frozen=True, slots=True)
class _Profile:
    """A variant on a chip, all that does not depend on the problem's sizes. Times in ns."""

    config: Config
    occupancy: int
    step_ns: float  # one step of one tile, the whole SM's throughput
    chain_ns: float  # one step of one program, its own latency
    once_ns: float  # start of the first tile and end of the last
    tile_ns: float  # between two tiles of one slot: what their own steps don't hide
    latency_ns: float
    column_flight_bytes: float  # loads of the columns' operand that one program keeps under way ...
    row_flight_bytes: float  # ... and of one row of the other
    tail: float


@dataclass(frozen=True, slots=True)
class _Work:
    """A problem of M rows, all that does not depend on the variant."""

    op: Op
    columns: int
    reduction: int
    E: int
    M: int
    N: int
    active: float
    busiest: float
    row_tiles: dict[int, float]
    weight_bytes: float  # one expert's
    row_bytes: float  # one row of the left operand
    least_bytes: float  # everything read and written once


def _profile(resources: Resources, op: Op, dtype: DType, chip: Chip, constants: Constants) -> _Profile:
    config, family, c = resources.config, constants.family(chip.sm), constants
    resident = occupancy(resources, limits(chip.sm))
    rows, columns, depth = config.block_m, config.block_n, config.block_k
    if op is Op.DW:
        rows, columns, depth = config.block_n, config.block_k, config.block_m
    wgmma = chip.sm == 90 and config.tma and rows >= 64 and dtype is not DType.FP32
    if dtype is DType.FP32:
        peak, sustained = chip.fp32_tflops, 1.0
        share = math.sqrt(c.fma_rows[SIZES.index(rows)] * c.fma_rows[SIZES.index(columns)])
    else:
        peak, sustained = (chip.tf32_tflops if dtype is DType.TF32 else chip.bf16_tflops), family.sustained
        share = family.rows[SIZES.index(rows)]
        if wgmma:  # the columns of one instruction: warpgroups are laid along the rows first, 64 of them each
            across = max(1, config.num_warps // 4 // (rows // 64))
            share *= family.wgmma_columns[SIZES.index(max(16, columns // across))]
        else:
            share *= family.columns[SIZES.index(columns)]
        if chip.sm in (90, 100, 103) and rows >= 64 and not config.tma:
            share *= family.pointer_wgmma
    if rows * columns > 128 * resources.threads:
        share *= c.crowded_registers
    flops_per_ns = peak * 1e3 * sustained * share / chip.sm_count
    load_per_ns = family.l2_bytes_per_clock * chip.clock_ghz
    under_way = max(0.5, config.num_stages - 1 - (family.held_stages if wgmma else 0.0))  # steps loading at once
    if resources.alignment < 16:
        load_per_ns, under_way = load_per_ns / c.unaligned_load, 0.5
    math_ns = 2.0 * rows * columns * depth / flops_per_ns
    load_ns = (rows + columns) * depth * dtype.itemsize / load_per_ns
    alone = family.one_cta[config.num_warps]
    latency_ns, overhead = family.latency_ns, family.pointer_step_ns
    if config.tma:
        latency_ns, overhead = family.tma_latency_ns, family.tma_step_ns
    scanned = resources.max_experts / resources.threads  # experts of one thread
    search_ns = c.search_ns + 0.25 * c.scan_ns * scanned
    start_ns = c.start_ns + c.scan_ns * scanned
    tile_ns = search_ns + latency_ns + math_ns / alone + c.store_ns + rows * columns * dtype.itemsize / load_per_ns
    return _Profile(
        config,
        resident,
        _join(math_ns, load_ns, family.norm) + overhead / 2,
        _join(_join(math_ns / alone, load_ns, family.chain_norm), latency_ns / under_way, family.chain_norm) + overhead,
        start_ns + tile_ns,
        tile_ns * family.persistent_exposed if config.persistent else start_ns + tile_ns,
        latency_ns,
        under_way * columns * depth * dtype.itemsize,
        under_way * depth * dtype.itemsize,
        family.tail_static if config.persistent else family.tail_dynamic,
    )


def _work(problem: Problem, M: int) -> _Work:
    E, N, K, size = problem.E, problem.N, problem.K, problem.dtype.itemsize
    rows = expected_rows(E, M)
    matrix = float(N * K * size)
    columns, reduction = (K, N) if problem.op is Op.DX else (N, K)
    written_experts = E if problem.op is Op.DW else rows.active
    return _Work(
        problem.op, columns, reduction, E, M, N, rows.active, rows.busiest, rows.tiles,
        matrix, float(reduction * size), written_experts * matrix + M * (N + K) * size,
    )  # fmt: skip


def _join(one: float, other: float, norm: float) -> float:
    """The p-norm: near the larger, up to 2^(1/norm) times it where both are equal."""
    low, high = min(one, other), max(one, other)
    joined: float = high * (1.0 + (low / high) ** norm) ** (1.0 / norm)
    return joined


def _waves(count: float) -> float:
    """Whole waves that ``count`` waves of work take: between ceil(count) and the mean of a smooth tail."""
    return 1.0 if count <= 1.0 else 0.5 * (math.ceil(count) + count + 0.5)


def _time_us(profile: _Profile, work: _Work, chip: Chip, c: Constants) -> float:
    if not profile.occupancy:
        return math.inf
    config, family = profile.config, c.family(chip.sm)
    row_tiles = work.row_tiles[config.block_m]
    sms = chip.sm_count
    total_bytes = work.least_bytes
    rows = config.block_m
    longest_ns = 0.0
    if work.op is Op.DW:
        rows = config.block_n
        per_expert = -(-work.N // config.block_n) * -(-work.reduction // config.block_k)
        tiles = float(work.E * per_expert)
        steps = row_tiles * per_expert
        empty = 0.0
        longest_ns = (work.busiest / config.block_m + 1.0) * profile.chain_ns
    else:
        column_tiles = -(-work.columns // config.block_n)
        tiles = row_tiles * column_tiles
        steps = tiles * -(-work.reduction // config.block_k)
        empty = 0.0
        if not config.persistent:  # the grid is for the most tiles that M rows can make
            first = min(work.E, work.M)
            empty = ((work.M - first) // config.block_m + first) * column_tiles - tiles
        l2 = chip.l2_mib * 1048576 * family.l2_usable
        groups = row_tiles / (work.active * config.group_m)
        if groups > 1.0 and work.weight_bytes > l2:  # each group of row tiles reads the weights again
            total_bytes += (groups - 1.0) * work.active * (work.weight_bytes - l2)
        slab = config.group_m * config.block_m * work.row_bytes
        if slab > l2:  # each column of tiles reads the group's rows again
            total_bytes += (column_tiles - 1.0) * work.M * work.row_bytes * (1.0 - l2 / slab)
    slots = float(sms * profile.occupancy)
    per_sm, per_slot = tiles / sms, tiles / slots
    filled = rows if work.op is Op.DW else min(rows, work.M / work.active)  # rows of a tile that carry data
    flight_bytes = profile.column_flight_bytes + filled * profile.row_flight_bytes
    tile_bytes = total_bytes / tiles
    alone_ns = tile_bytes / flight_bytes * profile.latency_ns  # a tile's loads with no other tile about
    shared_ns = tile_bytes / (chip.bandwidth_gbs * family.memory_share)  # a tile's share of the memory's time
    full, last = divmod(per_slot, 1.0)
    memory_ns = per_slot * _join(slots * shared_ns, alone_ns, family.flight_norm) if full else 0.0
    if last:
        sharp_ns = _join(last * slots * shared_ns, alone_ns, family.flight_norm)
        memory_ns += profile.tail * (sharp_ns - last / per_slot * memory_ns) if full else sharp_ns
    if per_slot > 1.0:  # the slots begin their second tiles together, with nothing under way
        memory_ns += family.lockstep * profile.tile_ns * min(1.0, per_slot - 1.0) / per_slot
    rate_ns = steps * profile.step_ns / sms * _waves(per_sm) / per_sm
    waves = _waves(per_slot)
    chain_ns = max(longest_ns, waves * steps / tiles * profile.chain_ns + (waves - 1.0) * profile.tile_ns)
    if empty > 0.0:
        chain_ns += empty * c.empty_program_ns / slots
    work_ns = _join(memory_ns, max(rate_ns, chain_ns), family.norm)
    return (c.launch_ns + c.cold_ns + profile.once_ns + work_ns) * 1e-3


def estimate_us(problem: Problem, M: int, resources: Resources, chip: Chip, constants: Constants = CONSTANTS) -> float:
    """The expected time of one launch in microseconds; infinity where not one program fits an SM.

    Raises
    ------
    ValueError
        if M is below 1.
    """
    _check_rows(M)
    profile = _profile(resources, problem.op, problem.dtype, chip, constants)
    return _time_us(profile, _work(problem, M), chip, constants)


class Ranker:
    """The candidates of one op and dtype on one chip, prepared once: ranking a shape is then cheap."""

    __slots__ = ("_chip", "_constants", "_dtype", "_op", "_profiles")

    def __init__(
        self, candidates: Sequence[Resources], op: Op, dtype: DType, chip: Chip, constants: Constants = CONSTANTS
    ) -> None:
        self._op, self._dtype, self._chip, self._constants = op, dtype, chip, constants
        self._profiles = [_profile(resources, op, dtype, chip, constants) for resources in candidates]

    def rank(self, problem: Problem, M: int) -> list[tuple[float, int]]:
        """(estimate in us, index of the candidate), best first; equal estimates in the configs' order.

        Raises
        ------
        ValueError
            if M is below 1, or the problem's op or dtype is not the ranker's.
        """
        _check_rows(M)
        if problem.op is not self._op or problem.dtype is not self._dtype:
            wanted = f"{self._op.value} {self._dtype.value}"
            raise ValueError(f"the ranker is for {wanted}, got {problem}; make one for that op and dtype")
        work, chip, constants = _work(problem, M), self._chip, self._constants
        times = [(_time_us(profile, work, chip, constants), i) for i, profile in enumerate(self._profiles)]
        return sorted(times, key=lambda time: (time[0], self._profiles[time[1]].config, time[1]))


def rank(
    problem: Problem, M: int, candidates: Sequence[Resources], chip: Chip, constants: Constants = CONSTANTS
) -> list[tuple[float, int]]:
    """``Ranker(...).rank(problem, M)``, for one shape."""
    return Ranker(candidates, problem.op, problem.dtype, chip, constants).rank(problem, M)


def _check_rows(M: int) -> None:
    if M < 1:
        raise ValueError(f"M is {M}, wanted at least 1: nothing is launched without rows")
