"""``Config``, the knobs of a kernel's variant; ``Spec``, a variant before it is compiled; ``Gemm``, a kernel's sizes.

Knobs are e.g. tile sizes, stages and schedule; a kernel's entry declares which values it supports together.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence

from ..artifacts.records import DType, Fusion, Layout, Op, Problem
from ..artifacts.tuples import NamedTuple


class Loads(enum.IntEnum):
    """How operands are loaded into shared memory."""

    POINTER = 0
    TMA = 1  # through descriptors that the host encodes


class Schedule(enum.IntEnum):
    """Which program or warpgroup computes which tile, in CUTLASS's words."""

    TILE = 0  # one program for each tile
    PERSISTENT = 1  # as many programs as fit the GPU, each computes many tiles
    COOPERATIVE = 2  # warp-specialised: one warp loads, two warpgroups share each tile
    PINGPONG = 3  # warp-specialised: one warp loads, two warpgroups take whole tiles in turns
    W4A16 = 4  # COOPERATIVE; w's codes become bf16 in registers; tiles of 64 columns split K between the warpgroups
    W8A8_BLOCK = 5  # COOPERATIVE; codes of x times codes of w, scaled for each block of K
    W8A8_CHANNEL = 6  # like W4A16, but codes of x times codes of w; sums are scaled for each row of both
    W8A8_STARTS = 7  # like W8A8_BLOCK, for padded rows, whose codes are read in place

    @property
    def warp_specialized(self) -> bool:
        """True if some warps only load and others only multiply."""
        return self >= Schedule.COOPERATIVE


class Cache(enum.IntEnum):
    """The L2 policy for lines of w, or in dW for lines of dw, where rows of many experts are also prefetched."""

    DEFAULT = 0
    EVICT_FIRST = 1  # the lines are used once: evict them first


class Edge(enum.IntEnum):
    """The width of dW's last column tile. Forward and dX always halve it if half is enough."""

    WHOLE = 0
    HALF = 1  # half a tile if that is enough


class TileRows(enum.IntEnum):
    """The rows of a tile in forward and dX."""

    FIXED = 0  # each has ``block_m`` rows
    FITTED = 1  # an expert's rows are split evenly among its tiles: at most ``block_m``, a multiple of 16


class Config(NamedTuple):
    """The knobs of one variant.

    Numbers have the names that users of Triton know. A tile is ``block_m`` rows of one expert by ``block_n`` columns;
    the reduction advances in steps of ``block_k``. For dW a tile is ``block_n`` x ``block_k`` of one expert, and a step
    is ``block_m`` rows.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int  # warps that multiply
    num_stages: int  # steps whose operands are in shared memory at once
    group_m: int = 8  # row tiles computed for the same columns of w before the next columns, to stay in L2
    loads: Loads = Loads.POINTER
    schedule: Schedule = Schedule.PERSISTENT
    cache: Cache = Cache.DEFAULT
    edge: Edge = Edge.WHOLE
    rows: TileRows = TileRows.FIXED

    def __str__(self) -> str:
        words = (
            f"{self.block_m}x{self.block_n}x{self.block_k} w{self.num_warps} s{self.num_stages} g{self.group_m}",
            "tma" if self.loads is Loads.TMA else "",
            self.schedule.name.lower() if self.schedule is not Schedule.TILE else "",
            "evict-first" if self.cache is Cache.EVICT_FIRST else "",
            "half-edge" if self.edge is Edge.HALF else "",
            "fitted" if self.rows is TileRows.FITTED else "",
        )
        return " ".join(word for word in words if word)

    def pairs(self) -> tuple[tuple[str, int], ...]:
        """Return the config in a bundle's form: (name, value), sorted by name. Enums become flags.

        The flags' names are older than the enums'. They stay, so that bundles and journals keep their bytes.
        """
        flags = {
            "narrow": self.edge is Edge.HALF,
            "persistent": self.schedule is not Schedule.TILE,
            "pingpong": self.schedule is Schedule.PINGPONG,
            "specialized": self.schedule.warp_specialized,
            "streamed": self.cache is Cache.EVICT_FIRST,
            "tma": self.loads is Loads.TMA,
        }
        numbers = {name: getattr(self, name) for name in RANGES}
        if self.schedule is Schedule.W4A16:  # (older schedules' pairs have no such flag)
            flags |= {"mixed_input": True, "fitted": self.rows is TileRows.FITTED}
        if self.schedule is Schedule.W8A8_BLOCK:
            flags |= {"block_scaled": True}
        if self.schedule is Schedule.W8A8_STARTS:
            flags |= {"block_scaled": True, "starts": True}
        if self.schedule is Schedule.W8A8_CHANNEL:
            flags |= {"row_scaled": True, "fitted": self.rows is TileRows.FITTED}
        return tuple(sorted((name, int(value)) for name, value in (numbers | flags).items()))

    @classmethod
    def from_pairs(cls, pairs: tuple[tuple[str, int], ...]) -> Config:
        """Decode ``pairs``; a missing flag (an older bundle's) has its default.

        Raises
        ------
        ValueError
            if a name is unknown or missing, a number is out of range, or flags contradict each other.
        """
        values = dict(pairs)
        if not set(RANGES) <= set(values) <= set(_WIRE):
            raise ValueError(f"config has the fields {sorted(values)}, wanted {sorted(_WIRE)}")
        flags = {name: bool(values.get(name, default)) for name, default in _FLAGS.items()}
        schedule = _schedule(flags)
        config = cls(
            **{name: values[name] for name in RANGES},
            loads=Loads(flags["tma"]),
            schedule=schedule,
            cache=Cache(flags["streamed"]),
            edge=Edge(flags["narrow"]),
            rows=TileRows(
                flags["fitted"] or (schedule, values["block_m"], values["block_n"], values["block_k"]) in _FITTED
            ),
        )
        problem = out_of_range(config)
        if problem:
            raise ValueError(problem)
        return config


FIELDS = Config._fields
PINGPONG_COLUMNS = 192  # of a pingpong tile: its sums fill a warpgroup's registers
SIZES = (16, 32, 64, 128, 256)  # sides that other tiles can have
DEPTHS = (512, 1024)  # more steps of K for 4- and 8-bit codes, which take little shared memory
_SIDES = (*SIZES, PINGPONG_COLUMNS)
RANGES: Mapping[str, Sequence[int]] = {  # the numbers that a knob can have in any kernel
    "block_m": _SIDES,
    "block_n": _SIDES,
    "block_k": (*_SIDES, *DEPTHS),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": range(1, 16),
    "group_m": range(1, 1025),
}
_FLAGS = {
    "tma": False,
    "persistent": True,
    "specialized": False,
    "streamed": False,
    "narrow": False,
    "pingpong": False,
    "mixed_input": False,
    "fitted": False,
    "block_scaled": False,
    "row_scaled": False,
    "starts": False,
}
_WIRE = (*RANGES, *_FLAGS)
# Pairs of these schedules have no flag "fitted": tiles of these sizes are always fitted.
_FITTED = {(Schedule.COOPERATIVE, 256, 128, 64), (Schedule.PINGPONG, PINGPONG_COLUMNS, 128, 64)}


def _schedule(flags: Mapping[str, bool]) -> Schedule:
    """Return the schedule that a bundle's flags stand for."""
    if flags["specialized"] and not flags["persistent"]:
        raise ValueError("a specialized config is persistent, this is not")
    if flags["pingpong"] and not flags["specialized"]:
        raise ValueError("a pingpong config is specialized, this is not")
    if flags["mixed_input"] and not flags["specialized"]:
        raise ValueError("a mixed_input config is specialized; this is not")
    if flags["starts"] and not flags["block_scaled"]:
        raise ValueError("a config with starts is block_scaled; this is not")
    if flags["fitted"] and not (flags["mixed_input"] or flags["row_scaled"]):
        raise ValueError("a fitted config of format 1 is mixed_input or row_scaled; this is not")
    for name, schedule in (("block_scaled", Schedule.W8A8_BLOCK), ("row_scaled", Schedule.W8A8_CHANNEL)):
        others = [flag for flag in ("mixed_input", "pingpong", "block_scaled", "row_scaled") if flag != name]
        if flags[name] and (not flags["specialized"] or any(flags[flag] for flag in others)):
            raise ValueError(f"a {name} config is specialized, and none of {', '.join(others)}; this is not")
        if flags[name]:
            return Schedule.W8A8_STARTS if flags["starts"] else schedule
    if flags["mixed_input"] and not flags["pingpong"]:
        return Schedule.W4A16
    if flags["specialized"]:
        return Schedule.PINGPONG if flags["pingpong"] else Schedule.COOPERATIVE
    return Schedule.PERSISTENT if flags["persistent"] else Schedule.TILE


def out_of_range(config: Config) -> str | None:
    """Return which knob has a value that no kernel supports, None if there is none."""
    for name, allowed in RANGES.items():
        if getattr(config, name) not in allowed:
            return misfit(name, getattr(config, name), allowed)
    if config.rows is TileRows.FIXED and (config.schedule, config.block_m, config.block_n, config.block_k) in _FITTED:
        return f"{misfit('rows', config.rows, (TileRows.FITTED,))}: format 1 has no other {config}"
    return None


def misfit(name: str, value: int, allowed: Sequence[int]) -> str:
    """Return the error text for a knob whose value is not one of ``allowed``."""
    wanted = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else " or ".join(map(_shown, allowed))
    return f"{name} is {_shown(value)}, wanted {wanted}"


def _shown(value: int) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)


@functools.lru_cache(maxsize=4096)
def config_of(pairs: tuple[tuple[str, int], ...]) -> Config | None:
    """Decode a variant's config; None if this version does not support it."""
    try:
        return Config.from_pairs(pairs)
    except ValueError:
        return None


MAX_EXPERTS = 512  # a kernel keeps the rows of so many experts in registers: one cubin serves all smaller E
MAX_EXPERTS_FALLBACK = 65536  # with more experts the counts are scanned for each tile, MAX_EXPERTS at a time


class Spec(NamedTuple):
    """A variant before it is compiled. A spec and a target give one cubin."""

    op: Op
    dtype: DType
    config: Config
    layout: Layout = Layout.NK
    fusion: Fusion = Fusion.NONE
    alignment: int = 16
    max_experts: int = MAX_EXPERTS

    def __str__(self) -> str:
        text = f"{self.op.value} {self.dtype.value} {self.config}"
        text += f" w={self.layout.value}" if self.layout is not Layout.NK else ""
        text += " gather" if Fusion.GATHER in self.fusion else ""
        text += " silu" if Fusion.SILU in self.fusion else ""
        text += " low-rank" if Fusion.LOW_RANK in self.fusion else ""
        text += " starts" if Fusion.STARTS in self.fusion else ""
        return text + (" unaligned" if self.alignment == 1 else "")


class Gemm(NamedTuple):
    """A forward or dX with the sizes that the kernel sees: the result's ``columns``, ``reduction``, w's order.

    ``w_kn``: the elements of w that belong to neighbouring result columns are contiguous.
    """

    columns: int
    reduction: int
    w_kn: bool


def gemm_of(problem: Problem) -> Gemm:
    """Return the sizes of a forward or dX that the kernel sees.

    The forward multiplies by w[g].T: columns N, reduction K. dX multiplies by w[g]: columns K, reduction N, and the
    same memory is read transposed.
    """
    forward = problem.op is Op.FORWARD
    kn = (problem.layout is Layout.KN) == forward
    return Gemm(problem.N, problem.K, kn) if forward else Gemm(problem.K, problem.N, kn)


def code_of(op: Op, fusion: Fusion) -> Fusion:
    """Return the fusion of the variants that run a call with ``fusion``.

    - NONE runs calls without fusion; it is separate because it is faster.
    - SCATTER runs SCATTER, WEIGHT and BIAS in any combination, chosen at run time by flags.
    - GATHER runs these with GATHER, which needs other loads.
    - SILU and SILU with GATHER are variants of their own, for the forward.
    - LOW_RANK and LOW_RANK with GATHER are variants of their own; the second takes flags.
    - STARTS is a variant of its own, for the forward.

    dW has no fusions: rows are gathered before. Through an index an H200 took 2.3 ms instead of 0.8 (Qwen3-30B,
    gate_up, T=8192).

    Raises
    ------
    ValueError
        for SILU with anything but GATHER, or not of the forward; for LOW_RANK of dW, or with other fusions but without
        GATHER; for STARTS with anything else, or not of the forward.
    """
    if Fusion.STARTS in fusion:
        if op is not Op.FORWARD or fusion is not Fusion.STARTS:
            raise ValueError(f"there is no code for {fusion} of {op.value}: STARTS goes alone, of the forward")
        return fusion
    if Fusion.LOW_RANK in fusion:
        other = fusion & ~Fusion.LOW_RANK
        if op is Op.DW or Fusion.SILU in other or (other and Fusion.GATHER not in other):
            raise ValueError(f"there is no code for {fusion} of {op.value}: LOW_RANK goes alone, or with GATHER")
        return Fusion.LOW_RANK | (other & Fusion.GATHER)
    if Fusion.SILU in fusion:
        if op is not Op.FORWARD or fusion & ~(Fusion.SILU | Fusion.GATHER):
            raise ValueError(f"there is no code for {fusion} of {op.value}: SILU goes with GATHER, of the forward")
        return fusion
    if op is Op.DW or not fusion:
        return Fusion.NONE
    return Fusion.GATHER if Fusion.GATHER in fusion else Fusion.SCATTER


def indexed(fusion: Fusion) -> bool:
    """Return whether a variant reads ``flags``, and by them an index, weights or a bias."""
    return bool(fusion & ~Fusion.LOW_RANK) and not fusion & (Fusion.SILU | Fusion.STARTS)


def result_columns(columns: int, fusion: Fusion) -> int:
    """Return the columns of y for a product with ``columns``: half as many if silu joins gate and up."""
    return columns // 2 if Fusion.SILU in fusion else columns


def w_kn(spec: Spec) -> bool:
    return (spec.layout is Layout.KN) == (spec.op is Op.FORWARD)


def takes_codes_of_x(dtype: DType, layout: Layout) -> bool:
    """Return whether a row kernel must quantise x before: kernels for the checkpoint layout quantise x themselves."""
    return dtype.quantises_x and layout is not Layout.STORED


def reads_in_place(problem: Problem) -> bool:
    """Return whether there is code with ``Fusion.STARTS``: codes of padded rows are read where they arrive."""
    return problem.op is Op.FORWARD and problem.dtype is DType.FP8_BLOCK and problem.layout is Layout.NK
