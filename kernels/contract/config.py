"""Config: every knob of a kernel in one named tuple. Which values go together is said by its kernel's entry."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence

from ...artifacts.tuples import NamedTuple


class Loads(enum.IntEnum):
    """How operands come to shared memory."""

    POINTER = 0
    TMA = 1  # through descriptors that the host encodes


class Schedule(enum.IntEnum):
    """Who computes which tile, in CUTLASS's words."""

    TILE = 0  # one program a tile
    PERSISTENT = 1  # as many programs as fit the GPU, each over many tiles
    COOPERATIVE = 2  # warp-specialised: one warp loads, two warpgroups share each tile
    PINGPONG = 3  # warp-specialised: one warp loads, two warpgroups take whole tiles in turns
    W4A16 = 4  # as cooperative, of codes of w that become x's type in registers; tiles of 64 columns share out K
    W8A8_BLOCK = 5  # as cooperative, of codes of x and of w, whose products are scaled for each block of K
    W8A8_CHANNEL = 6  # as W4A16, of codes of x and of w, whose sums are scaled for each row of both

    @property
    def warp_specialized(self) -> bool:
        """Whether some warps load and others multiply."""
        return self >= Schedule.COOPERATIVE


class Cache(enum.IntEnum):
    """What L2 is told of the lines of w; of dW, where it is also asked for many experts' rows at once, of dw's."""

    DEFAULT = 0
    EVICT_FIRST = 1  # they are read, or written, once: let them leave first


class Edge(enum.IntEnum):
    """How dW's last columns are multiplied; products of rows halve their last tile wherever that is enough."""

    WHOLE = 0
    HALF = 1  # at half a tile's width where that is enough


class TileRows(enum.IntEnum):
    """How many rows a tile of a product of rows has."""

    FIXED = 0  # ``block_m``
    FITTED = 1  # as many as there are, up to ``block_m``, in 16s: an expert's rows are shared out among its tiles


class Config(NamedTuple):
    """The knobs of one variant.

    The numbers keep the names that users of Triton know. A tile is ``block_m`` rows of one expert by ``block_n``
    columns; the reduction goes in steps of ``block_k``. (For dW a tile is ``block_n`` x ``block_k`` of one expert,
    reduced ``block_m`` rows at a time.)
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int  # that multiply
    num_stages: int  # steps whose operands are in shared memory at once
    group_m: int = 8  # row tiles that share their weight columns before the next columns begin: both stay in L2
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
        """The config as a bundle stores it: (name, value), sorted by name; knobs that are no number as flags.

        The flags are format 1's, from before knobs had names: kept, so that no bundle and no journal changes a byte.
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
        if self.schedule is Schedule.W4A16:  # (others' pairs are from before it)
            flags |= {"mixed_input": True, "fitted": self.rows is TileRows.FITTED}
        if self.schedule is Schedule.W8A8_BLOCK:
            flags |= {"block_scaled": True}
        if self.schedule is Schedule.W8A8_CHANNEL:
            flags |= {"row_scaled": True, "fitted": self.rows is TileRows.FITTED}
        return tuple(sorted((name, int(value)) for name, value in (numbers | flags).items()))

    @classmethod
    def from_pairs(cls, pairs: tuple[tuple[str, int], ...]) -> Config:
        """Back from ``pairs``; a flag that is not there (an older bundle's) has its default.

        Raises
        ------
        ValueError
            if a name is unknown or missing, a number is out of range, or flags contradict each other.
        """
        given = dict(pairs)
        if not set(RANGES) <= set(given) <= set(_WIRE):
            raise ValueError(f"config has the fields {sorted(given)}, wanted {sorted(_WIRE)}")
        flags = {name: bool(given.get(name, default)) for name, default in _FLAGS.items()}
        schedule = _schedule(flags)
        config = cls(
            **{name: given[name] for name in RANGES},
            loads=Loads(flags["tma"]),
            schedule=schedule,
            cache=Cache(flags["streamed"]),
            edge=Edge(flags["narrow"]),
            rows=TileRows(
                flags["fitted"] or (schedule, given["block_m"], given["block_n"], given["block_k"]) in _FITTED
            ),
        )
        problem = out_of_range(config)
        if problem:
            raise ValueError(problem)
        return config


FIELDS = Config._fields
PINGPONG_COLUMNS = 192  # of a tile: its sums fill a warpgroup's registers
SIZES = (16, 32, 64, 128, 256)  # of a tile's sides, and that of a pingpong tile above
DEPTHS = (512, 1024)  # of a reduction's step, more than a tile's side: codes take little room
_SIDES = (*SIZES, PINGPONG_COLUMNS)
RANGES: Mapping[str, Sequence[int]] = {  # what a knob that is a number can be, of any kernel
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
}
_WIRE = (*RANGES, *_FLAGS)
# Of format 1's pairs: tiles of these sizes are fitted to their rows, and were told from others by that alone.
_FITTED = {(Schedule.COOPERATIVE, 256, 128, 64), (Schedule.PINGPONG, PINGPONG_COLUMNS, 128, 64)}


def _schedule(flags: Mapping[str, bool]) -> Schedule:
    """What format 1's flags say of the schedule."""
    if flags["specialized"] and not flags["persistent"]:
        raise ValueError("a specialized config is persistent, this is not")
    if flags["pingpong"] and not flags["specialized"]:
        raise ValueError("a pingpong config is specialized, this is not")
    if flags["mixed_input"] and not flags["specialized"]:
        raise ValueError("a mixed_input config is specialized; this is not")
    if flags["fitted"] and not (flags["mixed_input"] or flags["row_scaled"]):
        raise ValueError("a fitted config of format 1 is mixed_input or row_scaled; this is not")
    for name, schedule in (("block_scaled", Schedule.W8A8_BLOCK), ("row_scaled", Schedule.W8A8_CHANNEL)):
        others = [one for one in ("mixed_input", "pingpong", "block_scaled", "row_scaled") if one != name]
        if flags[name] and (not flags["specialized"] or any(flags[one] for one in others)):
            raise ValueError(f"a {name} config is specialized, and none of {', '.join(others)}; this is not")
        if flags[name]:
            return schedule
    if flags["mixed_input"] and not flags["pingpong"]:
        return Schedule.W4A16
    if flags["specialized"]:
        return Schedule.PINGPONG if flags["pingpong"] else Schedule.COOPERATIVE
    return Schedule.PERSISTENT if flags["persistent"] else Schedule.TILE


def out_of_range(config: Config) -> str | None:
    """What no config of any kernel can have, or None."""
    for name, allowed in RANGES.items():
        if getattr(config, name) not in allowed:
            return misfit(name, getattr(config, name), allowed)
    if config.rows is TileRows.FIXED and (config.schedule, config.block_m, config.block_n, config.block_k) in _FITTED:
        return f"{misfit('rows', config.rows, (TileRows.FITTED,))}: format 1 has no other {config}"
    return None


def misfit(name: str, value: int, allowed: Sequence[int]) -> str:
    """Which knob has a value that is not one of those."""
    wanted = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else " or ".join(map(_said, allowed))
    return f"{name} is {_said(value)}, wanted {wanted}"


def _said(value: int) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)


@functools.lru_cache(maxsize=4096)
def config_of(pairs: tuple[tuple[str, int], ...]) -> Config | None:
    """The config of a variant, by its pairs; None where this version does not know it."""
    try:
        return Config.from_pairs(pairs)
    except ValueError:
        return None
