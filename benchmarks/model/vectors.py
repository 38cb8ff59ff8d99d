"""The cost model over all variants of many cells at once, for the fit: kernels/cost_model.py in arrays of numpy.

The equations are those of ``kernels/cost_model.py``; tests check that both agree. A search evaluates the model
thousands of times on the same cells, so values that depend on no constant are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from benchmarks.model.sweeps import Cell
from pretuned.artifacts.records import Op
from pretuned.kernels.chips import Chip
from pretuned.kernels.cost import Constants, Resources
from pretuned.kernels.cost_model import _GRAIN, Profile, _short, _Work, _work, profile
from pretuned.kernels.registry import dealt, transposed
from pretuned.kernels.spec import Cache, Config, Edge, Schedule, TileRows

Floats = npt.NDArray[np.float64]

# The numbers that the equations read, for each pair of a variant and a problem.
_OF_PAIR: dict[str, Callable[[Config, _Work], float]] = {
    "block_m": lambda config, work: config.block_m,
    "block_n": lambda config, work: config.block_k if transposed(work.op, config) else config.block_n,
    "block_k": lambda config, work: config.block_n if transposed(work.op, config) else config.block_k,
    "width": lambda config, work: config.block_k,
    "group_m": lambda config, work: config.group_m,
    "persistent": lambda config, work: config.schedule is not Schedule.TILE,
    "specialized": lambda config, work: config.schedule.warp_specialized,
    "streamed": lambda config, work: config.cache is Cache.EVICT_FIRST,
    "narrow": lambda config, work: config.edge is Edge.HALF,
    "pingpong": lambda config, work: config.schedule is Schedule.PINGPONG,
    "dealt": lambda config, work: dealt(work.op, config),
    "short": lambda config, work: _short(config, work),
    "fitted": lambda config, work: config.rows is TileRows.FITTED,
    "E": lambda config, work: work.E,
    "M": lambda config, work: work.M,
    "N": lambda config, work: work.columns if transposed(work.op, config) else work.N,
    "columns": lambda config, work: work.N if transposed(work.op, config) else work.columns,
    "reduction": lambda config, work: work.reduction,
    "active": lambda config, work: work.rows.active,
    "busiest": lambda config, work: work.rows.busiest,
    "row_tiles": lambda config, work: work.rows.tiles[config.block_m],
    "row_tiles_64": lambda config, work: work.rows.tiles[64],
    "grains": lambda config, work: work.rows.tiles[_GRAIN],
    "matrix_bytes": lambda config, work: work.matrix_bytes,
    "left_row_bytes": lambda config, work: work.left_row_bytes,
    "right_row_bytes": lambda config, work: (
        work.N * work.itemsize if transposed(work.op, config) else work.right_row_bytes
    ),
    "read_bytes": lambda config, work: work.read_bytes,
    "written_bytes": lambda config, work: work.written_bytes,
    "itemsize": lambda config, work: work.itemsize,
}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The cells of one kernel (for rows or for dW) on one chip: each pair of a cell and a variant is an entry."""

    pairs: SimpleNamespace
    variants: tuple[tuple[Resources, Op], ...]
    variant_of: npt.NDArray[np.intp]
    cell_of: npt.NDArray[np.intp]
    starts: npt.NDArray[np.intp]
    log_us: Floats
    loss: Floats  # log(time / the cell's best)
    cells: tuple[Cell, ...]

    def estimates_us(self, c: Constants) -> Floats:
        """``kernels.cost.estimate_us`` of every pair; infinity if no program fits an SM."""
        chip, dtype = self.cells[0].chip, self.cells[0].problem.dtype
        rows = [profile(variant, op, dtype, chip, c) for variant, op in self.variants]
        held = dict(zip(Profile._fields[1:], zip(*(row[1:] for row in rows), strict=True), strict=True))
        p = SimpleNamespace(**{name: np.array(column, float)[self.variant_of] for name, column in held.items()})
        with np.errstate(divide="ignore", invalid="ignore"):
            work_ns = (_weight_ns if self.variants[0][1] is Op.DW else _rows_ns)(p, self.pairs, chip, c)
        estimates: Floats = np.where(p.occupancy > 0, (c.launch_ns + c.cold_ns + p.once_ns + work_ns) * 1e-3, np.inf)
        return estimates


def parts(cells: Sequence[Cell]) -> list[Part]:
    """The cells, packed by kernel, chip and dtype."""
    groups: dict[object, list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.problem.op is Op.DW, cell.chip, cell.problem.dtype), []).append(cell)
    return [_packed(group) for group in groups.values()]


def _packed(cells: Sequence[Cell]) -> Part:
    number: dict[tuple[Resources, Op], int] = {}
    variant_of: list[int] = []
    cell_of: list[int] = []
    starts: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in _OF_PAIR}
    for index, cell in enumerate(cells):
        starts.append(len(cell_of))
        work = _work(cell.problem, cell.M)
        for variant in cell.variants:
            variant_of.append(number.setdefault((variant, cell.problem.op), len(number)))
            cell_of.append(index)
            for name, read in _OF_PAIR.items():
                columns[name].append(read(variant.config, work))
    pairs = SimpleNamespace(**{name: np.array(column, float) for name, column in columns.items()})
    log_us = np.log(np.concatenate([cell.times_us for cell in cells]))
    begins, cell_index = np.array(starts), np.array(cell_of)
    loss = log_us - np.minimum.reduceat(log_us, begins)[cell_index]
    return Part(pairs, tuple(number), np.array(variant_of), cell_index, begins, log_us, loss, tuple(cells))


def _join(a: Floats, b: Floats, norm: Floats | float) -> Floats:
    low, high = np.minimum(a, b), np.maximum(a, b)
    joined: Floats = high * (1.0 + (low / high) ** norm) ** (1.0 / norm)
    return joined


def _waves(count: Floats) -> Floats:
    return np.where(count <= 1.0, 1.0, 0.5 * (np.ceil(count) + count + 0.5))


def _mean_waves(count: Floats, spread: Floats, saved: Floats) -> Floats:
    high = count + spread
    low = np.where(count > spread, count - spread, 0.0)
    low = np.where(high - low < 1e-9, 0.999 * high, low)
    waves = np.maximum(1.0 - saved, (_ceil_area(high, saved) - _ceil_area(low, saved)) / (high - low))
    return np.where((high <= 1.0) & (saved == 0.0), 1.0, waves)


def _ceil_area(count: Floats, saved: Floats) -> Floats:
    whole = np.floor(count)
    area: Floats = (whole + 1.0) * (count - 0.5 * whole) - saved * (0.5 * whole + np.minimum(0.5, count - whole))
    return area


def _rows_ns(p: SimpleNamespace, g: SimpleNamespace, chip: Chip, c: Constants) -> Floats:
    family, special = c.family(chip.sm), c.family(chip.sm).specialized
    specialized = g.specialized > 0
    column_tiles = np.ceil(g.columns / g.block_n)
    tiles, tile_steps = g.row_tiles * column_tiles, np.ceil(g.reduction / g.block_k)
    slots = chip.sm_count * p.occupancy
    per_slot = tiles / slots
    first = np.minimum(g.E, g.M)
    grid = (np.floor((g.M - first) / g.block_m) + first) * column_tiles
    empty = np.where(g.persistent > 0, 0.0, np.maximum(0.0, grid - tiles))
    total_bytes = g.read_bytes + g.written_bytes * family.memory_share / family.write_share
    l2_bytes = chip.l2_mib * 1048576 * family.l2_usable
    height = g.row_tiles / g.active
    groups = height / g.group_m
    total_bytes = total_bytes + np.where(
        (groups > 1.0) & (g.matrix_bytes > l2_bytes), (groups - 1.0) * g.active * (g.matrix_bytes - l2_bytes), 0.0
    )
    slab_bytes = np.minimum(height, g.group_m) * g.block_m * g.left_row_bytes
    total_bytes = total_bytes + (column_tiles - 1.0) * g.M * g.left_row_bytes * np.where(
        slab_bytes > l2_bytes, 1.0 - l2_bytes / slab_bytes, 0.0
    )
    thin = 2.0 - g.row_tiles_64 / g.row_tiles
    share = 1.0 - 0.5 * special.half * thin
    if special.half_columns:
        share = share * (np.ceil(g.columns / (g.block_n // 2)) / 2.0 / column_tiles)
    parted = specialized & (g.pingpong == 0) & (g.fitted == 0)
    wasteful = 1.0 + special.turns_waste * (column_tiles * g.block_n / g.columns - 1.0)
    empty_rows = 1.0 - g.grains * _GRAIN / (g.row_tiles * g.block_m)
    turned = wasteful * (1.0 - special.lacking * empty_rows)
    share = np.where(parted, share, np.where(g.fitted > 0, turned, np.where(g.pingpong > 0, wasteful, 1.0)))
    saved = np.where(parted & special.split_tail, 1.0 - c.split_waves, 0.0)
    near_bytes = chip.l2_mib * 1048576 * c.l2_near
    wave_bytes = slots * g.block_n * g.left_row_bytes / height
    again = (g.row_tiles - g.active) * (1.0 - 1.0 / per_slot) * (1.0 - near_bytes / wave_bytes)
    apart = specialized & (g.row_tiles > g.active) & (per_slot > 1.0) & (wave_bytes > near_bytes)
    total_bytes = total_bytes + np.where(apart, special.apart * again * g.matrix_bytes, 0.0)
    filled = np.minimum(g.block_m, g.M / g.active)
    flight_bytes = p.column_flight_bytes + filled * p.row_flight_bytes
    tile_bytes = total_bytes / tiles
    alone_ns = tile_bytes / flight_bytes * p.latency_ns
    shared_ns = tile_bytes / (chip.bandwidth_gbs * family.memory_share)
    full = np.floor(per_slot)
    last = per_slot - full
    whole_ns = np.where(full > 0, per_slot * _join(slots * shared_ns, alone_ns, family.flight_norm), 0.0)
    sharp_ns = _join(last * slots * shared_ns, alone_ns, family.flight_norm)
    tail_ns = np.where(full > 0, p.tail * (sharp_ns - last / per_slot * whole_ns), sharp_ns)
    memory_ns = whole_ns + np.where(last > 0, tail_ns, 0.0)
    again_ns = family.lockstep * p.tile_ns * np.minimum(1.0, per_slot - 1.0) / per_slot
    memory_ns = memory_ns + np.where(per_slot > 1.0, again_ns, 0.0)
    pushed = np.minimum(1.0, g.read_bytes / (c.dirty_l2 * chip.l2_mib * 1048576))
    streamed_ns = np.minimum(c.streamed_share * g.read_bytes / chip.bandwidth_gbs, c.streamed_most_ns)
    memory_ns = memory_ns * np.where(g.dealt > 0, special.dealt_memory, 1.0)
    memory_ns = memory_ns * np.where(g.short > 0, family.short_reads, 1.0)
    memory_ns = memory_ns + np.where(g.streamed > 0, streamed_ns - c.dirty_ns * pushed, 0.0)
    spread = 0.5 * column_tiles * np.sqrt(g.active) / slots
    waves = _mean_waves(per_slot, spread, saved)
    worked = _mean_waves(per_slot * share, spread, saved)
    rate_ns = tile_steps * p.step_ns * _mean_waves(per_slot * share * p.occupancy, spread * p.occupancy, saved)
    chain_ns = worked * tile_steps * p.chain_ns + (waves - 1.0) * p.tile_ns + empty * c.empty_program_ns / slots
    return _join(memory_ns, np.maximum(rate_ns, chain_ns), p.norm)


def _weight_ns(p: SimpleNamespace, g: SimpleNamespace, chip: Chip, c: Constants) -> Floats:
    family = c.family(chip.sm)
    tiles_n, tiles_k = np.ceil(g.N / g.block_n), np.ceil(g.columns / g.block_k)
    worked_k = np.where(g.narrow > 0, np.ceil(g.columns / (g.block_k // 2)) / 2.0, tiles_k)
    wasteful = 1.0 + family.specialized.turns_waste * (tiles_k * g.block_k / g.columns - 1.0)
    worked_k = np.where(g.pingpong > 0, tiles_k * wasteful, worked_k)
    tiles, steps = g.E * tiles_n * tiles_k, g.row_tiles * tiles_n * worked_k
    slots = chip.sm_count * p.occupancy
    per_sm, per_slot = tiles / chip.sm_count, tiles / slots
    l2_bytes = chip.l2_mib * 1048576 * family.l2_usable
    height = np.minimum(tiles_n, np.maximum(g.group_m, slots / tiles_k))
    expert_rows = g.M / g.active
    x_bytes = expert_rows * g.right_row_bytes
    read_bytes = g.read_bytes + np.where(
        (height < tiles_n) & (x_bytes > l2_bytes), (tiles_n / height - 1.0) * g.active * (x_bytes - l2_bytes), 0.0
    )
    slab_bytes = height * g.block_n * expert_rows * g.itemsize
    again = np.maximum(0.0, tiles_k * height / slots - 1.0)
    read_bytes = read_bytes + again * g.M * g.N * g.itemsize * np.where(
        slab_bytes > l2_bytes, 1.0 - l2_bytes / slab_bytes, 0.0
    )
    written_bytes = g.written_bytes * (1.0 + family.weight.row_bytes / (g.width * g.itemsize))
    memory_ns = (read_bytes / family.memory_share + written_bytes / family.write_share) / chip.bandwidth_gbs
    rate_ns = steps * p.step_ns / chip.sm_count * _waves(per_sm) / per_sm
    waves, used = _waves(per_slot), g.active / g.E
    chain_ns = waves * used * _steps_ns(p, steps / tiles / used) + (waves - 1.0) * p.tile_ns
    chain_ns = np.maximum(chain_ns, _steps_ns(p, g.busiest / g.block_m + 1.0))
    return _join(memory_ns, np.maximum(rate_ns, chain_ns), p.norm)


def _steps_ns(p: SimpleNamespace, steps: Floats) -> Floats:
    later = np.maximum(0.0, steps - p.under_way)
    chain_ns: Floats = steps * p.loaded_ns + later * (p.chain_ns - p.loaded_ns)
    return chain_ns
