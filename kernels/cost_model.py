"""The cost model: estimate a variant's time on a GPU where it was not measured. See docs/inside/cost-model.md.

``estimate_us(problem, M, resources, chip)`` is the time of one launch; ``Ranker`` sorts many candidates for a problem.

Three times bound a kernel from below: memory traffic, the throughput of all SMs, and the latency of one program's
steps; the last two are rounded up to whole waves. Memory and compute overlap in part, so they are joined by a p-norm.
Kernels of quantised weights have their own terms in their folder's ``cost.py``. Pure Python: the runtime calls it for
new shapes.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

from ..artifacts.records import DType, Fusion, Op, Problem, Variant
from ..artifacts.tuples import NamedTuple
from .arch import Feature, arch_of
from .chips import Chip
from .cost import (
    CONSTANTS,
    SIZES,
    Constants,
    ConstantsFamily,
    ExpectedRows,
    Resources,
    Specialized,
    expected_rows,
    join,
    mean_waves,
    occupancy,
)
from .registry import dealt, kernel_of, transposed
from .spec import Cache, Config, Edge, Loads, Schedule, TileRows, result_columns

# Padded rows listed and their codes ordered (docs/inside/trials.md, codes-in-place).
_ORDER_US, _ORDER_TIMES = 4.0, 1.15
_GRAIN = 16  # kernels/hopper_plain/fitted.py rounds a tile's rows up to a multiple of this


class Profile(NamedTuple):
    """A variant's times on a chip, in ns."""

    config: Config
    occupancy: int
    step_ns: float  # a tile's step, by the throughput of the whole SM
    chain_ns: float  # a program's step, by its own latency
    loaded_ns: float  # a program's step if its operands are loaded already
    once_ns: float  # start of the first tile and end of the last
    tile_ns: float  # between two tiles of a slot: the part that their steps don't hide
    latency_ns: float  # of a load
    under_way: float  # steps whose loads are in flight at once
    column_flight_bytes: float  # bytes in flight of the columns' operand, of one program, ...
    row_flight_bytes: float  # ... and of each row of the other operand
    tail: float  # how sharply the last wave starves the memory
    norm: float  # joins memory and compute


def profile(resources: Resources, op: Op, dtype: DType, chip: Chip, c: Constants) -> Profile:
    """Return the times of a variant's steps and tiles on ``chip``; docs/inside/cost-model.md has the equations."""
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
    """Return the share of the tf32 rate that is left because w (dX) or both operands (dW) don't suit wgmma."""
    if op is Op.DX:
        return min(1.0, rows / c.held_tf32_rows) if wgmma else 1.0
    if config.schedule.warp_specialized:
        return c.fragments_tf32
    return c.crossed_tf32 if config.loads is Loads.TMA and not wgmma else c.turned_tf32


def _special_rate(special: Specialized, config: Config, op: Op) -> float:
    # Fitted tiles are equally fast in pingpong and cooperative kernels.
    if config.schedule is Schedule.PINGPONG and config.rows is TileRows.FIXED:
        return special.turns_weight_rate if op is Op.DW else special.turns_rate
    return special.weight_rate if op is Op.DW else special.rate


def _size(size: int) -> int:
    """Return the index of the largest of ``SIZES`` that is not above ``size``; 0 if all are."""
    return max(0, bisect.bisect_right(SIZES, size) - 1)


def _flops_per_ns(
    resources: Resources, rows: int, columns: int, wgmma: bool, dtype: DType, chip: Chip, c: Constants
) -> float:
    """Return the rate of one SM on tiles of ``rows`` x ``columns``."""
    config, family = resources.config, c.family(chip.sm)
    if dtype is DType.FP32:
        peak, sustained = chip.fp32_tflops, 1.0
        share = math.sqrt(c.fma_rows[_size(rows)] * c.fma_rows[_size(columns)])
    else:
        peak, sustained = (chip.tf32_tflops if dtype is DType.TF32 else chip.bf16_tflops), family.sustained
        share = family.rows[_size(columns if config.rows is TileRows.FITTED else rows)]  # fitted tiles are transposed
        if wgmma:  # the columns of one instruction: warpgroups share the rows first, 64 each
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


class _Work(NamedTuple):
    """The numbers of a problem with M rows that do not depend on the variant."""

    op: Op
    E: int
    M: int
    N: int
    columns: int  # of the product, for dW of dw: C in docs/inside/cost-model.md
    reduction: int  # of forward and dX: R in docs/inside/cost-model.md
    rows: ExpectedRows
    matrix_bytes: float  # of one expert's w
    left_row_bytes: float  # of one row of x (forward), or dy
    right_row_bytes: float  # of one row of x, for dW
    read_bytes: float  # each operand once
    written_bytes: float
    itemsize: int
    gated: bool  # silu in the epilogue: all tiles are multiplied at their whole width


def _work(problem: Problem, M: int) -> _Work:
    E, N, K, size = problem.E, problem.N, problem.K, problem.dtype.itemsize
    rows = expected_rows(E, M)
    matrix_bytes = float(N * K * size)
    columns, reduction = (K, N) if problem.op is not Op.FORWARD else (N, K)
    if problem.op is Op.DW:  # experts without rows are written, too: zeros
        read_bytes, written_bytes = float(M * (N + K) * size), E * matrix_bytes
    else:
        read_bytes = rows.active * matrix_bytes + M * reduction * size
        written_bytes = float(M * result_columns(columns, problem.fusion) * size)  # (computing silu takes no time)
    return _Work(
        problem.op,
        E,
        M,
        N,
        columns,
        reduction,
        rows,
        matrix_bytes,
        float(reduction * size),
        float(K * size),
        read_bytes,
        written_bytes,
        size,
        Fusion.SILU in problem.fusion,
    )


def _waves(count: float) -> float:
    """Return the waves that ``count`` waves of work take: the mean of ceil(count) and count + 0.5; 1 at least."""
    return 1.0 if count <= 1.0 else 0.5 * (math.ceil(count) + count + 0.5)


def _rows_ns(profile: Profile, work: _Work, chip: Chip, c: Constants, family: ConstantsFamily) -> float:
    """Return the time of forward or dX without the launch and the first program's start."""
    config, rows = profile.config, work.rows
    row_tiles = rows.tiles[config.block_m]
    column_tiles = -(-work.columns // config.block_n)
    tiles = row_tiles * column_tiles
    tile_steps = -(-work.reduction // config.block_k)
    slots = float(chip.sm_count * profile.occupancy)
    per_slot = tiles / slots
    empty = 0.0
    if config.schedule is Schedule.TILE:  # the grid is for the most tiles that M rows can make
        first = min(work.E, work.M)
        empty = ((work.M - first) // config.block_m + first) * column_tiles - tiles
    total_bytes = work.read_bytes + work.written_bytes * family.memory_share / family.write_share
    l2_bytes = chip.l2_mib * 1048576 * family.l2_usable
    height = row_tiles / rows.active  # of an expert
    groups = height / config.group_m
    if groups > 1.0 and work.matrix_bytes > l2_bytes:  # each group of row tiles reads the weights again
        total_bytes += (groups - 1.0) * rows.active * (work.matrix_bytes - l2_bytes)
    slab_bytes = min(height, config.group_m) * config.block_m * work.left_row_bytes
    if slab_bytes > l2_bytes:  # each column of tiles reads the group's rows again
        total_bytes += (column_tiles - 1.0) * work.M * work.left_row_bytes * (1.0 - l2_bytes / slab_bytes)
    share, saved = 1.0, 0.0  # share of a tile's time that is needed; share of the last wave's that is saved
    if config.schedule.warp_specialized:
        special = family.specialized
        if config.rows is TileRows.FITTED:
            share = _wasteful(column_tiles * config.block_n, work, special)
            empty_rows = 1.0 - rows.tiles[_GRAIN] * _GRAIN / (row_tiles * config.block_m)
            share *= 1.0 - special.lacking * empty_rows
        elif config.schedule is Schedule.PINGPONG:
            share = _wasteful(column_tiles * config.block_n, work, special)
        else:
            share = _share(config, row_tiles, work, special)
            saved = 1.0 - c.split_waves if special.split_tail and not work.gated else 0.0
        if row_tiles > rows.active and per_slot > 1.0:  # row tiles that share weights get out of step
            near_bytes = chip.l2_mib * 1048576 * c.l2_near
            wave_bytes = slots * config.block_n * work.left_row_bytes / height
            if wave_bytes > near_bytes:
                again = (row_tiles - rows.active) * (1.0 - 1.0 / per_slot) * (1.0 - near_bytes / wave_bytes)
                total_bytes += special.apart * again * work.matrix_bytes
    filled = min(config.block_m, work.M / rows.active)  # rows of a tile that carry data
    flight_bytes = profile.column_flight_bytes + filled * profile.row_flight_bytes
    tile_bytes = total_bytes / tiles
    alone_ns = tile_bytes / flight_bytes * profile.latency_ns  # a tile's loads if no other tile loads
    shared_ns = tile_bytes / (chip.bandwidth_gbs * family.memory_share)  # a tile's share of the memory's time
    full, last = divmod(per_slot, 1.0)
    memory_ns = per_slot * join(slots * shared_ns, alone_ns, family.flight_norm) if full else 0.0
    if last:
        sharp_ns = join(last * slots * shared_ns, alone_ns, family.flight_norm)
        memory_ns += profile.tail * (sharp_ns - last / per_slot * memory_ns) if full else sharp_ns
    if per_slot > 1.0:  # all slots begin their second tiles together, with no loads in flight
        memory_ns += family.lockstep * profile.tile_ns * min(1.0, per_slot - 1.0) / per_slot
    if config.schedule is Schedule.PINGPONG and dealt(work.op, config):
        memory_ns *= family.specialized.dealt_memory
    if _short(config, work):
        memory_ns *= family.short_reads
    if config.cache is Cache.EVICT_FIRST:
        memory_ns += _streamed_ns(work, chip, c)
    spread = 0.5 * column_tiles * math.sqrt(rows.active) / slots
    waves = mean_waves(per_slot, spread, saved)
    worked = waves if share == 1.0 else mean_waves(per_slot * share, spread, saved)
    blocks = profile.occupancy
    rate_ns = tile_steps * profile.step_ns
    rate_ns *= worked if blocks == 1 else mean_waves(per_slot * share * blocks, spread * blocks, saved)
    chain_ns = worked * tile_steps * profile.chain_ns + (waves - 1.0) * profile.tile_ns
    if empty > 0.0:
        chain_ns += empty * c.empty_program_ns / slots
    return join(memory_ns, max(rate_ns, chain_ns), profile.norm)


def _short(config: Config, work: _Work) -> bool:
    """Return whether a step reads at most 128 bytes of each row of w; in dX it reads a tile's columns of each."""
    return work.op is Op.FORWARD and config.block_k * work.itemsize <= 128


def _streamed_ns(work: _Work, chip: Chip, c: Constants) -> float:
    """Return the time that evict-first reads of w add (or save, if negative)."""
    pushed = min(1.0, work.read_bytes / (c.dirty_l2 * chip.l2_mib * 1048576))
    return min(c.streamed_share * work.read_bytes / chip.bandwidth_gbs, c.streamed_most_ns) - c.dirty_ns * pushed


def _share(config: Config, row_tiles: float, work: _Work, special: Specialized) -> float:
    """Return the mean time of a cooperative kernel's tiles over a whole tile's: some have half the rows or columns."""
    thin = 2.0 - work.rows.tiles[64] / row_tiles  # share of the tiles whose second 64 rows are empty
    share = 1.0 - 0.5 * special.half * thin
    if special.half_columns and not work.gated:
        half = config.block_n // 2
        share *= -(-work.columns // half) / 2.0 / -(-work.columns // config.block_n)
    return share


def _wasteful(tiled_columns: int, work: _Work, special: Specialized) -> float:
    """Return the mean time of a pingpong kernel's tiles over that of a tile without columns past the last."""
    return 1.0 + special.turns_waste * (tiled_columns / work.columns - 1.0)


def _weight_ns(profile: Profile, work: _Work, chip: Chip, c: Constants, family: ConstantsFamily) -> float:
    """Return the time of dW without the launch and the first program's start."""
    config, rows = profile.config, work.rows
    if transposed(Op.DW, config):  # the kernel computes dw transposed
        config = config._replace(block_n=config.block_k, block_k=config.block_n)
        work = work._replace(N=work.columns, columns=work.N, right_row_bytes=float(work.N * work.itemsize))
    tiles_n, tiles_k = -(-work.N // config.block_n), -(-work.columns // config.block_k)
    tiles = float(work.E * tiles_n * tiles_k)
    steps = rows.tiles[config.block_m] * tiles_n * tiles_k
    slots = float(chip.sm_count * profile.occupancy)
    per_sm, per_slot = tiles / chip.sm_count, tiles / slots
    read_bytes, l2_bytes = work.read_bytes, chip.l2_mib * 1048576 * family.l2_usable
    height = min(float(tiles_n), max(config.group_m, slots / tiles_k))  # concurrent row tiles that share x's columns
    expert_rows = work.M / rows.active
    x_bytes = expert_rows * work.right_row_bytes
    if height < tiles_n and x_bytes > l2_bytes:  # each group of row tiles reads x again
        read_bytes += (tiles_n / height - 1.0) * rows.active * (x_bytes - l2_bytes)
    slab_bytes = height * config.block_n * expert_rows * work.itemsize
    if slab_bytes > l2_bytes:  # concurrent column tiles read the group's columns of dy again
        again = max(0.0, tiles_k * height / slots - 1.0)
        read_bytes += again * work.M * work.N * work.itemsize * (1.0 - l2_bytes / slab_bytes)
    width_bytes = profile.config.block_k * work.itemsize  # of a tile's row of dw
    written_bytes = work.written_bytes * (1.0 + family.weight.row_bytes / width_bytes)
    memory_ns = (read_bytes / family.memory_share + written_bytes / family.write_share) / chip.bandwidth_gbs
    if config.edge is Edge.HALF:  # the last tile may have half the columns, and half a tile's work
        steps *= -(-work.columns // (config.block_k // 2)) / (2.0 * tiles_k)
    elif config.schedule is Schedule.PINGPONG:
        steps *= _wasteful(tiles_k * config.block_k, work, family.specialized)
    rate_ns = steps * profile.step_ns / chip.sm_count * _waves(per_sm) / per_sm
    waves, used = _waves(per_slot), rows.active / work.E  # tiles of experts without rows have no steps
    chain_ns = waves * used * _steps_ns(profile, steps / tiles / used) + (waves - 1.0) * profile.tile_ns
    chain_ns = max(chain_ns, _steps_ns(profile, rows.busiest / config.block_m + 1.0))
    return join(memory_ns, max(rate_ns, chain_ns), profile.norm)


def _steps_ns(profile: Profile, steps: float) -> float:
    """Return the latency of a tile's steps: the first loads are issued together, only later ones are waited for."""
    later = max(0.0, steps - profile.under_way)
    return steps * profile.loaded_ns + later * (profile.chain_ns - profile.loaded_ns)


def _time_us(profile: Profile, work: _Work, chip: Chip, c: Constants, family: ConstantsFamily) -> float:
    if not profile.occupancy:
        return math.inf
    work_ns = (_weight_ns if work.op is Op.DW else _rows_ns)(profile, work, chip, c, family)
    return (c.launch_ns + c.cold_ns + profile.once_ns + work_ns) * 1e-3


def estimate_us(problem: Problem, M: int, resources: Resources, chip: Chip, constants: Constants = CONSTANTS) -> float:
    """Return the expected time of one launch in microseconds; infinity if no program fits an SM.

    Raises
    ------
    ValueError
        if M is below 1.
    """
    _check_rows(M)
    if problem.dtype.quantised:
        return _quantised_us(problem, M, resources, chip)
    times = profile(resources, problem.op, problem.dtype, chip, constants)
    return _time_us(times, _work(problem, M), chip, constants, constants.family(chip.sm))


def order_us(M: int, K: int, chip: Chip) -> float:
    """Estimate the time in us of listing M padded rows and ordering their codes, which are read and written."""
    return _ORDER_US + _ORDER_TIMES * M * 2.0 * (K + K / 32) / chip.bandwidth_gbs * 1e-3


def in_place_is_faster(problem: Problem, M: int, starts: Variant, by_index: Variant, chip: Chip) -> bool:
    """Return whether a product of codes where they arrive is faster than ordering them before a product by an index.

    Both times are the cost model's, also where the other product was measured.
    """
    starts_us = estimate_us(problem, M, Resources.of(starts), chip)
    ordered_us = estimate_us(problem._replace(fusion=by_index.fusion), M, Resources.of(by_index), chip)
    return starts_us < ordered_us + order_us(M, problem.K, chip)


def _quantised_us(problem: Problem, M: int, resources: Resources, chip: Chip) -> float:
    """Return the estimate of the kernel's own ``cost.py``; infinity if no kernel has the config, or no program fits."""
    entry = kernel_of(problem.op, resources.config, problem.dtype)
    if entry is None or not entry.cost or not occupancy(resources, arch_of(chip.sm).limits):
        return math.inf
    return _terms(entry.cost)(problem, M, resources, chip)


@functools.cache
def _terms(cost: str) -> Callable[[Problem, int, Resources, Chip], float]:
    terms: Callable[[Problem, int, Resources, Chip], float] = import_module(f".{cost}", __package__).estimate_us
    return terms


class Ranker:
    """The candidates of an op and dtype on a chip, prepared once, so that ranking them for a shape is cheap."""

    __slots__ = ("_candidates", "_chip", "_constants", "_dtype", "_op", "_profiles")

    def __init__(
        self, candidates: Sequence[Resources], op: Op, dtype: DType, chip: Chip, constants: Constants = CONSTANTS
    ) -> None:
        self._op, self._dtype, self._chip, self._constants = op, dtype, chip, constants
        self._candidates = candidates
        self._profiles = (
            [] if dtype.quantised else [profile(resources, op, dtype, chip, constants) for resources in candidates]
        )

    def rank(self, problem: Problem, M: int) -> list[tuple[float, int]]:
        """Return (estimate in us, index of the candidate), best first; equal estimates are sorted by config.

        Raises
        ------
        ValueError
            if M is below 1, or the problem's op or dtype is not the ranker's.
        """
        times = self.estimates(problem, M, range(len(self._candidates)))
        return sorted(times, key=lambda time: (time[0], self._candidates[time[1]].config, time[1]))

    def estimates(self, problem: Problem, M: int, some: Iterable[int]) -> list[tuple[float, int]]:
        """Return (estimate in us, index) of the candidates ``some``, in that order; raises like ``rank``."""
        _check_rows(M)
        if problem.op is not self._op or problem.dtype is not self._dtype:
            wanted = f"{self._op.value} {self._dtype.value}"
            raise ValueError(f"the ranker is for {wanted}, got {problem}; make one for that op and dtype")
        if problem.dtype.quantised:
            return [(_quantised_us(problem, M, self._candidates[i], self._chip), i) for i in some]
        work, chip, constants = _work(problem, M), self._chip, self._constants
        family = constants.family(chip.sm)
        return [(_time_us(self._profiles[i], work, chip, constants, family), i) for i in some]


def _check_rows(M: int) -> None:
    if M < 1:
        raise ValueError(f"M is {M}, wanted at least 1: nothing is launched without rows")
