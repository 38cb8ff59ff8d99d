"""Parts of the cost models: fitted constants, occupancy, expected rows of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ..artifacts.records import RowOp, Variant
from ..artifacts.tuples import NamedTuple
from .arch import Arch, Generation, SmLimits, arch_of
from .spec import MAX_EXPERTS, Config

SIZES = (16, 32, 64, 128, 256)  # the tile sizes of the entries of ``rows`` and ``columns``


class WeightGrad(NamedTuple):
    """Constants of dW, whose tiles have few steps, each of ragged rows, and end with a store of the whole tile.

    The defaults are between neutral values and an H200's. ``step_ns`` and ``issue_ns`` are for each 4 warps, which meet
    at a step's barrier.
    """

    step_ns: float = 5.0  # added to a program's step in forward and dX
    issue_ns: float = 20.0  # of a step, from the SM's throughput
    load_share: float = 0.9  # of ``l2_bytes_per_clock``, for boxes of few rows
    row_bytes: float = 32.0  # memory traffic that storing a tile's row adds to its own bytes
    store_bytes_per_clock: float = 20.0  # of one program
    exposed: float = 0.5  # see ``ConstantsFamily.persistent_exposed``
    norm: float = 3.0  # joins memory, nearly all of it writes, and compute


class Specialized(NamedTuple):
    """Constants of warp-specialised kernels, where another tile's loads and products hide most of a tile's end.

    ``half``, ``lacking``, ``apart`` and ``dealt_memory`` are fixed, not fitted: docs/inside/cost-model.md says why.
    ``half_columns`` and ``split_tail`` are for cooperative forward and dX without silu, ``weight_`` for dW, ``turns_``
    for pingpong kernels, whose tiles are always whole.
    """

    rate: float = 1.05  # multiple of the other kernels' tensor rate
    norm: float = 6.0  # see ``ConstantsFamily.norm``: loads go on during a tile's end
    half: float = 0.4  # share of half a tile's time that is saved if its second 64 rows are empty
    lacking: float = 0.65  # a fitted tile saves this share of the time of the rows that it lacks
    apart: float = 0.5  # programs out of step read this share of their common weights again
    half_columns: bool = True  # a tile whose right half is past the last column takes half its time
    split_tail: bool = True  # a last wave that is at most half full is split into tiles of half the columns
    exposed: float = 0.2  # see ``ConstantsFamily.persistent_exposed``
    start_ns: float = 1000.0  # added to the other kernels' start
    weight_rate: float = 1.1  # see ``rate``
    weight_exposed: float = 0.3
    turns_rate: float = 1.05  # see ``rate``
    turns_weight_rate: float = 1.2
    turns_exposed: float = 0.05
    dealt_memory: float = 1.0  # factor on the memory's time if tiles are taken in a fixed order (``Tiles.dealt``)
    turns_waste: float = 0.5  # cost of a tile's columns past the last one; 1 is their full share of its time


class ConstantsFamily(NamedTuple):
    """Constants of a generation of SMs. The defaults are published figures or guesses.

    ``rows`` and ``columns``: the share of the sustained rate that a tile of 16, 32, 64, 128, 256 rows or columns of
    the product reaches. ``one_cta``: the share of an SM's rate that a single program reaches, by its warps.
    """

    sustained: float  # share of the published rate that a dense product keeps
    l2_bytes_per_clock: float  # of one SM
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    one_cta: dict[int, float]
    wgmma_columns: tuple[float, ...] = ()  # like ``columns``, of a wgmma instruction (sm_90)
    memory_share: float = 0.9  # of the published bandwidth, for reads
    latency_ns: float = 750.0  # of a load under load; microbenchmarks of Ampere to Hopper give 500-900
    tma_latency_ns: float = 750.0  # of a load through TMA
    held_stages: float = 0.0  # stages of a pipeline that asynchronous products (wgmma) still read
    chain_norm: float = 64.0  # joins the latencies of a program's step; large: only the longest counts
    pointer_step_ns: float = 40.0  # addresses and masks of a step's pointer loads
    tma_step_ns: float = 10.0  # barrier of a TMA step
    pointer_wgmma: float = 0.9  # tensor rate with pointer loads from sm_90 up
    persistent_exposed: float = 0.35  # share of a tile's start and end that is not hidden between two tiles
    flight_norm: float = 6.0  # joins the memory's rate and the loads in flight
    tail_static: float = 0.6  # how sharply the last wave starves the memory: with a fixed stride over the tiles ...
    tail_dynamic: float = 0.3  # ... and with the hardware's own scheduling
    lockstep: float = 1.0  # share of a tile's start during which the memory is idle, if all slots start together
    l2_usable: float = 0.6  # share of L2 that holds reused data
    norm: float = 6.0  # joins memory and compute; if both are equal the sum is 12 % above either
    step_norm: float = 6.0  # joins a step's products and its loads from L2
    write_share: float = 0.75  # of the published bandwidth, for writes
    short_reads: float = 1.0  # factor on the memory's time if a forward reads 128 bytes of a row of w at a time; fixed
    weight: WeightGrad = WeightGrad()
    specialized: Specialized = Specialized()


_MMA_CTA = {1: 0.25, 2: 0.45, 4: 0.8, 8: 1.0, 16: 1.0}
_MMA_ROWS = (0.30, 0.50, 0.80, 1.0, 0.95)
_MMA_COLUMNS = (0.40, 0.55, 0.80, 0.97, 1.0)

# sustained: guesses from public benchmarks. l2_bytes_per_clock: from published L2 read microbenchmarks
#   (A100 6-7 TB/s, RTX 4090 5.5, RTX PRO 6000 8.7); sm_100 is a guess. rows, columns: reasoned.
_AMPERE = ConstantsFamily(0.85, 40.0, _MMA_ROWS, _MMA_COLUMNS, _MMA_CTA)
_AMPERE_SMALL = ConstantsFamily(0.90, 20.0, _MMA_ROWS, _MMA_COLUMNS, _MMA_CTA)
_BLACKWELL = ConstantsFamily(
    0.75, 56.0, (0.20, 0.28, 0.55, 1.0, 1.0), (0.25, 0.45, 0.70, 0.90, 1.0), {1: 0.25, 2: 0.4, 4: 0.9, 8: 1.0, 16: 1.0}
)

# fitted: begin
# Fitted to sweeps with the sha256 0b51a75be11cb971 by python
# benchmarks/run.py
#   fit_cost
#   benchmarks/results/sweep-h200-dW-bf16.json
#   benchmarks/results/sweep-h200-dX-bf16.json
#   benchmarks/results/sweep-h200-forward-bf16.json
#   --steps 4000
#   --write
#   --out benchmarks/results/fit-h200-bf16.json
_HOPPER = ConstantsFamily(
    sustained=0.781,
    l2_bytes_per_clock=62.8,
    rows=(0.266, 0.424, 1.1, 1.05, 0.875),
    columns=(0.3, 0.479, 0.86, 0.837, 1.0),
    one_cta={1: 0.25, 2: 0.4, 4: 0.963, 8: 1.0, 16: 1.0},
    wgmma_columns=(0.2, 0.35, 0.689, 0.865, 1.0),
    memory_share=0.96,
    latency_ns=1000.0,
    tma_latency_ns=715.0,
    held_stages=0.474,
    chain_norm=8.32,
    pointer_step_ns=62.3,
    tma_step_ns=8.7,
    pointer_wgmma=0.9,
    persistent_exposed=0.412,
    flight_norm=2.52,
    tail_static=0.743,
    tail_dynamic=0.451,
    lockstep=1.09,
    l2_usable=0.668,
    norm=2.73,
    step_norm=5.5,
    write_share=0.95,
    short_reads=1.01,
    weight=WeightGrad(
        step_ns=4.59,
        issue_ns=7.51,
        load_share=0.8,
        row_bytes=24.2,
        store_bytes_per_clock=45.2,
        exposed=0.615,
        norm=2.0,
    ),
    specialized=Specialized(
        rate=0.98,
        norm=5.36,
        half=0.4,
        lacking=0.65,
        apart=0.5,
        half_columns=True,
        split_tail=True,
        exposed=0.185,
        start_ns=803.0,
        weight_rate=1.03,
        weight_exposed=0.0517,
        turns_rate=1.02,
        turns_weight_rate=1.3,
        turns_exposed=0.063,
        dealt_memory=1.03,
        turns_waste=0.568,
    ),
)
_COLD_NS = 3850.0
_START_NS = 1160.0
_STORE_NS = 291.0
# fitted: end


class Constants(NamedTuple):
    """All constants of the model: those of all generations, and each generation's. Times are in ns."""

    launch_ns: float = 4000.0  # an empty kernel in a CUDA graph on an H200: 4.06 us
    cold_ns: float = _COLD_NS  # loading code, constants and descriptors from DRAM
    start_ns: float = _START_NS  # a program's start: parameters, descriptors, the rows of all experts ...
    scan_ns: float = 20.0  # ... and in addition for each expert that a thread scans
    search_ns: float = 150.0  # finding a tile's expert: one reduction, a quarter of the scans
    store_ns: float = _STORE_NS  # converting and issuing the stores, without their bytes
    unaligned_load: float = 6.0  # loads of one element each: no 16-byte copies, no pipeline
    crowded_registers: float = 0.5  # rate left when the accumulators alone pass 128 registers a thread
    # The share of the tf32 rate on sm_90 that is left, as w (dX) or both operands (dW) are not contiguous for wgmma:
    turned_tf32: float = 0.15  # dW, transposed in shared memory first, or loaded through pointers
    crossed_tf32: float = 0.56  # dW on mma.sync, in small tiles by TMA: two lanes of each load want one bank
    fragments_tf32: float = 0.56  # dW on mma.sync in specialised tiles (kernels/gluon/tf32.py), of wgmma's rate
    held_tf32_rows: float = 128.0  # dX, whose w goes through registers: rows of a tile at full rate
    split_waves: float = 0.6  # time of a split last wave over a whole wave's
    dirty_ns: float = 5000.0  # writing back, if a call pushes all dirty lines out of L2 ...
    dirty_l2: float = 1.5  # ... which happens if it reads this multiple of L2's size; evict-first loads avoid it ...
    streamed_share: float = 0.056  # ... but cost this share of their bytes' time ...
    streamed_most_ns: float = 20000.0  # ... at most this
    l2_near: float = 0.5  # an SM's own partition of L2, as a share: programs out of step still share it
    fma_rows: tuple[float, ...] = (0.3, 0.45, 0.6, 0.65, 0.65)  # IEEE fp32 dots run on the FMA pipes
    empty_program_ns: float = 300.0  # a program that finds no tile
    ampere: ConstantsFamily = _AMPERE
    ampere_small: ConstantsFamily = _AMPERE_SMALL
    hopper: ConstantsFamily = _HOPPER
    blackwell: ConstantsFamily = _BLACKWELL

    def family(self, sm: int) -> ConstantsFamily:
        """Return the constants of the generation of capability ``sm``."""
        generation = arch_of(sm).generation
        if generation is Generation.HOPPER:
            return self.hopper
        if generation is Generation.BLACKWELL:
            return self.blackwell
        return self.ampere if generation is Generation.AMPERE else self.ampere_small


CONSTANTS = Constants()


# A few registers spilled outside the loop cost almost nothing. With more bytes a thread the loop itself spills.
MAX_SPILL_BYTES = 64


@dataclass(frozen=True, slots=True)
class Resources:
    """A variant's config, and the resources that its cubin uses."""

    config: Config
    threads: int
    shared_bytes: int
    registers: int
    alignment: int = 16
    max_experts: int = MAX_EXPERTS

    @classmethod
    def of(cls, variant: Variant) -> Resources:
        """Return the resources of a variant in a bundle."""
        config = Config.from_pairs(variant.config)
        return cls(
            config, variant.threads, variant.shared_bytes, variant.registers, variant.alignment, variant.max_experts
        )


def occupancy(resources: Resources, sm_limits: SmLimits) -> int:
    """Return how many programs fit an SM at once; 0 if none.

    The limits are shared memory (plus the driver's share), registers (in units of 256 a warp, a quarter of the file for
    each scheduler), threads and blocks.
    """
    if resources.threads > sm_limits.threads_per_block or resources.shared_bytes > sm_limits.shared_per_block_bytes:
        return 0
    warps = max(1, -(-resources.threads // 32))
    registers_per_warp = max(1, -(-resources.registers * 32 // 256)) * 256
    by_registers = 4 * (sm_limits.registers_per_sm // 4 // registers_per_warp) // warps
    shared = -(-resources.shared_bytes // 128) * 128 + sm_limits.shared_reserved_bytes
    by_shared = sm_limits.shared_per_sm_bytes // shared
    return min(by_registers, by_shared, sm_limits.threads_per_sm // (warps * 32), sm_limits.blocks_per_sm)


def rejection(variant: Variant, arch: Arch) -> str | None:
    """Return why a compiled variant is dropped for an architecture, None if it ships. All figures are the cubin's.

    A fallback (alignment 1) is dropped only if it can't run.
    """
    limits = arch.limits
    if variant.shared_bytes > limits.shared_per_block_bytes:
        return f"{variant.shared_bytes} bytes of shared memory, sm_{arch.sm} has {limits.shared_per_block_bytes}"
    if isinstance(variant.op, RowOp):
        fits = variant.registers * variant.threads <= limits.registers_per_sm
    else:
        fits = occupancy(Resources.of(variant), limits) > 0
    if not fits:
        return (
            f"{variant.registers} registers x {variant.threads} threads, "
            f"sm_{arch.sm} has {limits.registers_per_sm} registers"
        )
    if variant.spill_bytes > MAX_SPILL_BYTES and variant.alignment != 1:
        return f"{variant.spill_bytes} bytes a thread are spilled, at most {MAX_SPILL_BYTES} are accepted"
    return None


def mean_waves(count: float, spread: float, saved: float = 0.0) -> float:
    """Return the mean of ceil over [count - spread, count + spread]; a last wave at most half full saves ``saved``."""
    high = count + spread
    if high <= 1.0 and not saved:
        return 1.0
    low = count - spread if count > spread else 0.0
    if high - low < 1e-9:
        low = 0.999 * high
    return max(1.0 - saved, (_ceil_area(high, saved) - _ceil_area(low, saved)) / (high - low))


def _ceil_area(count: float, saved: float) -> float:
    """Return the integral of ceil from 0 to ``count``, minus ``saved`` in the first half of each unit."""
    whole = int(count)
    area = (whole + 1.0) * (count - 0.5 * whole)
    return area - saved * (0.5 * whole + min(0.5, count - whole)) if saved else area


def handed_out(per_slot: float) -> tuple[float, float]:
    """Return (waves, share of the memory's rate in use) if programs take tiles when they become free.

    The last wave counts half.
    """
    if per_slot <= 1.0:
        return 1.0, max(0.25, min(1.0, 1.3 * per_slot))
    return 0.5 * (math.ceil(per_slot) + per_slot), 1.0


def join(a: float, b: float, norm: float) -> float:
    """Return the p-norm of two times: near the larger, and 2^(1/norm) times either if both are equal."""
    low, high = (a, b) if a < b else (b, a)
    joined: float = high * (1.0 + (low / high) ** norm) ** (1.0 / norm)
    return joined


SKEW = 0.5
BLOCKS = (16, 32, 64, 128, 192, 256)


class ExpectedRows(NamedTuple):
    """Expected values for M rows over E experts.

    ``tiles[B]`` is sum_r E[ceil(rows_r / B)], B as in ``BLOCKS``. ``busiest`` is the rows of the first expert.
    """

    active: float
    busiest: float
    tiles: dict[int, float]


@lru_cache(maxsize=256)
def _classes(E: int) -> tuple[tuple[float, float], ...]:
    """Return (experts, share of each), with ranks grouped into classes that grow by about 1.4."""
    shares = [rank**-SKEW for rank in range(1, E + 1)]
    total = math.fsum(shares)  # not sum, which rounds differently from Python 3.12 on: all processes must choose alike
    classes, first = [], 0
    while first < E:
        last = min(E, max(first + 1, int(first * 1.4)))
        classes.append((float(last - first), math.fsum(shares[first:last]) / total / (last - first)))
        first = last
    return tuple(classes)


@lru_cache(maxsize=4096)
def expected_rows(E: int, M: int) -> ExpectedRows:
    """Return the expected values for M rows over E experts.

    active = sum_r 1 - (1 - p_r)^M. With the load u = M * p_r / B, the tiles of expert r are
    max(1 - (1 - p_r)^M, u + min(1, u) / 2): ceil(u) smoothed over the spread of u.
    """
    classes = _classes(E)
    active = 0.0
    tiles = dict.fromkeys(BLOCKS, 0.0)
    for experts, share in classes:
        used = 1.0 if share >= 1.0 else -math.expm1(M * math.log1p(-share))
        active += experts * used
        for block in BLOCKS:
            load = M * share / block
            load += 0.5 if load >= 1.0 else 0.5 * load
            tiles[block] += experts * (load if load > used else used)
    return ExpectedRows(active, M * classes[0][1], tiles)
