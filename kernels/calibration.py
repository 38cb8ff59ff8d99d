"""Every number of the cost model that is not in the table of GPUs, and where it is from.

Fitted from measurements where there are some (one H200 so far), published elsewhere or reasoned:
docs/cost-model.md says what has been checked.
"""

from __future__ import annotations

from dataclasses import dataclass

SIZES = (16, 32, 64, 128, 256)  # the tile sizes that ``rows`` and ``columns`` speak of


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one generation of SM apart.

    ``rows`` and ``columns``: the share of the sustained rate that a tile of 16, 32, 64, 128, 256 rows
    or columns of the product reaches. ``one_cta``: the share of an SM's rate that one program of so
    many warps reaches alone.
    """

    sustained: float
    l2_bytes_per_clock: float
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    one_cta: dict[int, float]


_MMA_CTA = {1: 0.25, 2: 0.45, 4: 0.8, 8: 1.0, 16: 1.0}
_MMA_ROWS = (0.30, 0.50, 0.80, 1.0, 0.95)
_MMA_COLUMNS = (0.40, 0.55, 0.80, 0.97, 1.0)

# sustained: share of the published rate that a dense cuBLAS product keeps. sm_90: 790 of 989 TFLOP/s, measured on an
#   H200 at its power limit; the others are guesses from public benchmarks.
# l2_bytes_per_clock of one SM: from published L2 read microbenchmarks (A100 6-7 TB/s, RTX 4090 5.5, RTX PRO 6000 8.7);
#   sm_90 such that 128x128 tiles reach .91 of 128x256, as measured on an H200; sm_100 is a guess.
# rows, columns: sm_90 wgmma needs 64 rows, below that mma.sync reaches part of the rate; 256x128 reached .81 of 128x256
#   and 64-row tiles .925 on an H200. The others follow the same reasoning and no measurement.
_AMPERE = Family(0.85, 40.0, _MMA_ROWS, _MMA_COLUMNS, _MMA_CTA)
_AMPERE_SMALL = Family(0.90, 20.0, _MMA_ROWS, _MMA_COLUMNS, _MMA_CTA)
_HOPPER = Family(
    0.80,
    44.0,
    (0.40, 0.55, 0.97, 1.0, 0.85),
    (0.30, 0.50, 0.75, 0.97, 1.0),
    {1: 0.25, 2: 0.4, 4: 0.75, 8: 1.0, 16: 1.0},
)
_BLACKWELL = Family(
    0.75, 56.0, (0.20, 0.28, 0.55, 1.0, 1.0), (0.25, 0.45, 0.70, 0.90, 1.0), {1: 0.25, 2: 0.4, 4: 0.9, 8: 1.0, 16: 1.0}
)


@dataclass(frozen=True, slots=True)
class Constants:
    """Every number of the model that no generation sets apart. Times in ns."""

    launch_ns: float = 4000.0  # an empty kernel in a CUDA graph on an H200: 4.06 us
    memory_share: float = 0.9  # of the published bandwidth: 4.3 of 4.8 TB/s, the best copies on an H200
    latency_ns: float = 750.0  # one load from DRAM under load; microbenchmarks of Ampere to Hopper give 500-900
    epilogue_ns: float = 300.0  # convert and issue the stores, beside their bytes
    search_ns: float = 300.0  # find the tile's expert ...
    search_expert_ns: float = 0.4  # ... and scan this much more per expert
    persistent_exposed: float = 0.35  # share of a tile's start and end left visible: flattening gained 7 % at K = 2048
    pointer_step_ns: float = 40.0  # addresses and masks of a pointer load, each step
    tma_step_ns: float = 10.0  # barrier of a TMA step
    pointer_wgmma: float = 0.9  # tensor rate with pointer loads from sm_90 up
    unaligned_load: float = 6.0  # loads of one element each: no 16-byte copies, no pipeline
    crowded_registers: float = 0.5  # rate left when the accumulators alone pass 128 registers a thread
    fma_rows: tuple[float, ...] = (0.3, 0.45, 0.6, 0.65, 0.65)  # IEEE fp32 dots run on the FMA pipes
    empty_program_ns: float = 300.0  # a program that finds no tile
    tail_static: float = 0.35  # share of the last wave that is lost: a fixed stride over the tiles ...
    tail_dynamic: float = 0.20  # ... and the hardware's own scheduling
    l2_usable: float = 0.6  # share of L2 that holds what is used again
    norm: float = 6.0  # memory and compute equal: 12 % over either

    def family(self, sm: int) -> Family:
        """The generation of capability ``sm``."""
        if sm in (90, 100, 103):
            return _HOPPER if sm == 90 else _BLACKWELL
        return _AMPERE if sm == 80 else _AMPERE_SMALL


CONSTANTS = Constants()
