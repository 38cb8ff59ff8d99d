"""Every number of the cost model that is not in the table of GPUs, and where it is from.

Fitted to measurements where there are some (one H200 so far), published elsewhere or reasoned:
docs/inside/cost-model.md says what has been checked.
"""

from __future__ import annotations

from ...artifacts.tuples import NamedTuple
from ..hardware.arch import Generation, arch_of

SIZES = (16, 32, 64, 128, 256)  # the tile sizes that ``rows`` and ``columns`` speak of


class WeightGrad(NamedTuple):
    """What sets dW apart: a tile takes few steps, each of ragged rows, and ends with a store of the whole tile.

    The defaults lie between neutral values and what an H200 showed. ``step_ns`` and ``issue_ns`` count for each
    4 warps, which meet at the barrier of a step.
    """

    step_ns: float = 5.0  # of a program's step, beside that of the rows' kernels
    issue_ns: float = 20.0  # of a step, from the SM's throughput
    load_share: float = 0.9  # of ``l2_bytes_per_clock``: boxes of few rows
    row_bytes: float = 32.0  # what storing a tile's row costs the memory beside its own bytes
    store_bytes_per_clock: float = 20.0  # one program's
    exposed: float = 0.5  # as ``persistent_exposed``
    norm: float = 3.0  # joins memory, nearly all of it writes, and compute


class Specialized(NamedTuple):
    """What sets warp-specialised kernels apart: another tile's loads and products hide most of a tile's end.

    ``half``, ``lacking``, ``apart`` and ``dealt_memory`` are held, not fitted: docs/inside/cost-model.md says why.
    ``half_columns`` and ``split_tail`` say what the kernels of rows do, but for code with silu in its epilogue;
    ``weight_`` numbers are dW's. Where the warpgroups take turns tiles are whole, and most of a tile's end is hidden:
    ``turns_``.
    """

    rate: float = 1.05  # of the other kernels' tensor rate
    norm: float = 6.0  # as ``Family.norm``: loads go on through a tile's end
    half: float = 0.4  # of half a tile's time, what is saved where its second 64 rows are empty
    lacking: float = 0.65  # of the time of the rows that a fitted tile lacks, what is saved
    apart: float = 0.5  # of the weights that row tiles share, what is read again once programs are out of step
    half_columns: bool = True  # a tile whose right half lies past the last column takes half its time
    split_tail: bool = True  # a last wave that is at most half full is split into tiles of half the columns
    exposed: float = 0.2  # as ``persistent_exposed``
    start_ns: float = 1000.0  # more than the other kernels take to start
    weight_rate: float = 1.1
    weight_exposed: float = 0.3
    turns_rate: float = 1.05  # as ``rate``
    turns_weight_rate: float = 1.2
    turns_exposed: float = 0.05
    dealt_memory: float = 1.0  # of the memory's time, where warpgroups take turns at tiles that are dealt out
    turns_waste: float = 0.5  # what the share of a tile's columns past the last costs beside its own time


class ConstantsFamily(NamedTuple):
    """What sets one generation of SM apart. The defaults are published figures and reasoning.

    ``rows`` and ``columns``: the share of the sustained rate that a tile of 16, 32, 64, 128, 256 rows
    or columns of the product reaches. ``one_cta``: the share of an SM's rate that one program of so
    many warps reaches alone.
    """

    sustained: float  # share of the published rate that a dense product keeps
    l2_bytes_per_clock: float  # of one SM
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    one_cta: dict[int, float]
    wgmma_columns: tuple[float, ...] = ()  # as ``columns``, of one wgmma instruction (sm_90)
    memory_share: float = 0.9  # of the published bandwidth
    latency_ns: float = 750.0  # one load under load; microbenchmarks of Ampere to Hopper give 500-900
    tma_latency_ns: float = 750.0  # the same through TMA
    held_stages: float = 0.0  # stages of a pipeline that asynchronous products (wgmma) still read
    chain_norm: float = 64.0  # joins what may bound a program's step; large: the longest alone counts
    pointer_step_ns: float = 40.0  # addresses and masks of a pointer load, each step
    tma_step_ns: float = 10.0  # barrier of a TMA step
    pointer_wgmma: float = 0.9  # tensor rate with pointer loads from sm_90 up
    persistent_exposed: float = 0.35  # share of a tile's start and end left visible between two tiles
    flight_norm: float = 6.0  # joins the memory's rate and the loads under way
    tail_static: float = 0.6  # how sharply the last wave starves the memory: a fixed stride over the tiles ...
    tail_dynamic: float = 0.3  # ... and the hardware's own scheduling
    lockstep: float = 1.0  # how much of a tile's start leaves the memory idle while all slots start together
    l2_usable: float = 0.6  # share of L2 that holds what is used again
    norm: float = 6.0  # memory and compute equal: 12 % over either
    step_norm: float = 6.0  # joins a step's products and its loads from L2
    write_share: float = 0.75  # of the published bandwidth, for what is written
    short_reads: float = 1.0  # of the memory's time, where a forward reads 128 bytes of each row of w at a time; held
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
    """Every number of the model: what all generations share, and each generation's own. Times in ns."""

    launch_ns: float = 4000.0  # an empty kernel in a CUDA graph on an H200: 4.06 us
    cold_ns: float = _COLD_NS  # code, constants and descriptors come from DRAM once
    start_ns: float = _START_NS  # a program's start: parameters, descriptors, the rows of every expert ...
    scan_ns: float = 20.0  # ... and this much more per expert that a thread scans
    search_ns: float = 150.0  # find a tile's expert: one reduction, a quarter of the scans
    store_ns: float = _STORE_NS  # convert and issue the stores, beside their bytes
    unaligned_load: float = 6.0  # loads of one element each: no 16-byte copies, no pipeline
    crowded_registers: float = 0.5  # rate left when the accumulators alone pass 128 registers a thread
    # tf32 on sm_90, the rate left where w (of dX) or both operands (of dW) lie the wrong way for wgmma:
    turned_tf32: float = 0.15  # dW's, turned round in shared memory first, or loaded through pointers
    crossed_tf32: float = 0.56  # dW's, of mma.sync, in small tiles by TMA: two lanes of each load want one bank
    fragments_tf32: float = 0.56  # dW's, of wgmma, on mma.sync in specialised tiles (kernels/gluon/tf32.py)
    held_tf32_rows: float = 128.0  # of a tile, at full rate: dX's weights, through registers
    split_waves: float = 0.6  # what a split last wave takes of a whole one
    dirty_ns: float = 5000.0  # what writing back takes where a call pushes all dirty lines out of L2 ...
    dirty_l2: float = 1.5  # ... which it does once it reads so much, in sizes of L2; ``streamed`` loads don't ...
    streamed_share: float = 0.056  # ... but cost this share of their bytes' time ...
    streamed_most_ns: float = 20000.0  # ... up to so much
    l2_near: float = 0.5  # share of L2 that one SM's partition is: what programs out of step still share
    fma_rows: tuple[float, ...] = (0.3, 0.45, 0.6, 0.65, 0.65)  # IEEE fp32 dots run on the FMA pipes
    empty_program_ns: float = 300.0  # a program that finds no tile
    ampere: ConstantsFamily = _AMPERE
    ampere_small: ConstantsFamily = _AMPERE_SMALL
    hopper: ConstantsFamily = _HOPPER
    blackwell: ConstantsFamily = _BLACKWELL

    def family(self, sm: int) -> ConstantsFamily:
        """The generation of capability ``sm``."""
        generation = arch_of(sm).generation
        if generation is Generation.HOPPER:
            return self.hopper
        if generation is Generation.BLACKWELL:
            return self.blackwell
        return self.ampere if generation is Generation.AMPERE else self.ampere_small


CONSTANTS = Constants()
