"""Config: every knob of a kernel in one frozen dataclass, and the one statement of what is valid."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Config:
    """The knobs of one variant.

    A tile is ``block_m`` rows of one expert by ``block_n`` columns; the reduction goes in steps of
    ``block_k``. (For dW a tile is ``block_n`` x ``block_k`` of one expert, reduced ``block_m`` rows
    at a time.) ``group_m`` row tiles share their weight columns before the next columns are begun,
    so that both stay in L2. ``tma`` loads through TMA descriptors encoded by the host.
    A ``persistent`` kernel runs as many programs as fit the GPU, each over many tiles; any other
    runs one program a tile. A ``specialized`` kernel (sm_90) has one warp that loads and two warpgroups that
    multiply, half of a tile each, and hands out its tiles as programs become free. One that is ``streamed``
    (through TMA) marks w's lines as the first to leave L2: for weights that are read once; one of dW, which is
    specialized, marks dw's, and asks L2 for the rows of many experts at once. A specialized kernel of dW that is
    ``narrow`` multiplies its last columns at half a tile's width where that is enough (one of rows always does). A
    specialized kernel that is ``pingpong`` has warpgroups that take whole tiles of 128 x 192 or 128 x 128 in turns (of
    dW 128 x 192 or 192 x 128); those of 128 x 128 are dealt out in turn, but for the last rounds. Of rows a tile may
    have more than 128 of them: 256 by 128 columns, or pingpong 192 by 128. Such a kernel's tiles are ``fitted``: each
    has as many rows as there are, rounded up to 16, and an expert's rows are shared out evenly among its tiles.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    tma: bool = False
    persistent: bool = True
    specialized: bool = False
    streamed: bool = False
    narrow: bool = False
    pingpong: bool = False

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n}x{self.block_k} w{self.num_warps} s{self.num_stages} g{self.group_m}"
        return (
            text
            + (" tma" if self.tma else "")
            + (" specialized" if self.specialized else " persistent" if self.persistent else "")
            + (" streamed" if self.streamed else "")
            + (" narrow" if self.narrow else "")
            + (" pingpong" if self.pingpong else "")
        )

    def pairs(self) -> tuple[tuple[str, int], ...]:
        """The config as a bundle stores it: (name, value), sorted by name."""
        return tuple((name, int(getattr(self, name))) for name in sorted(FIELDS))

    @classmethod
    def from_pairs(cls, pairs: tuple[tuple[str, int], ...]) -> Config:
        """Back from ``pairs``; a flag that is not there (an older bundle's) has its default.

        Raises
        ------
        ValueError
            if a name is unknown or missing, or the values are not a valid config.
        """
        given = dict(pairs)
        if not set(FIELDS) - set(_FLAGS) <= set(given) <= set(FIELDS):
            raise ValueError(f"config has the fields {sorted(given)}, wanted {sorted(FIELDS)}")
        flags = {name: bool(given.pop(name)) for name in _FLAGS if name in given}
        config = cls(**given, **flags)  # type: ignore[arg-type]  # mypy can't see that the names are disjoint
        problem = invalid(config)
        if problem:
            raise ValueError(problem)
        return config


FIELDS = tuple(field.name for field in dataclasses.fields(Config))
_FLAGS = ("tma", "persistent", "specialized", "streamed", "narrow", "pingpong")
PINGPONG_COLUMNS = 192  # of a tile: its sums fill a warpgroup's registers


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _turns(config: Config) -> bool:
    """Tiles of rows that warpgroups take in turns: a step is as deep as the 64 columns of a part are wide."""
    return (config.block_m, config.block_k) == (128, 64) and config.block_n in (128, PINGPONG_COLUMNS)


def _fitted_turns(config: Config) -> bool:
    """The same of tiles that are fitted to the rows."""
    return (config.block_m, config.block_n, config.block_k) == (PINGPONG_COLUMNS, 128, 64)


def _weight_turns(config: Config) -> bool:
    """The same of dW, in steps of any rows: 128 x 192 of dw, or 192 x 128."""
    return {config.block_n, config.block_k} == {128, PINGPONG_COLUMNS} and config.block_m != PINGPONG_COLUMNS


def of_weight(config: Config) -> bool:
    """Whether a pingpong config is one of dW, and not of rows."""
    return config.pingpong and _weight_turns(config)


def dealt(config: Config) -> bool:
    """Whether a specialised kernel deals most tiles out in turn: others hand them out as programs become free."""
    return config.pingpong and config.block_n == 128 and not of_weight(config) and not fitted(config)


def fitted(config: Config) -> bool:
    """Whether tiles are fitted to the rows of their expert, up to ``block_m`` of them."""
    tile = config.block_m, config.block_n, config.block_k
    return config.specialized and (_fitted_turns(config) if config.pingpong else tile == (256, 128, 64))


def across(config: Config) -> bool:
    """Whether the 192 columns of a pingpong tile are rows of dw."""
    return of_weight(config) and config.block_n == PINGPONG_COLUMNS


def invalid(config: Config) -> str | None:
    """Why no kernel can have this config, or None. What fits a GPU is read from the compiled cubin."""
    for name, low, high in (("block_m", 16, 256), ("block_n", 16, 256), ("block_k", 16, 256)):
        value = getattr(config, name)
        if config.pingpong and value == PINGPONG_COLUMNS:
            continue  # where it may stand is said below
        if not _power_of_two(value) or not low <= value <= high:
            return f"{name} is {value}, wanted a power of two from {low} to {high}"
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps is {config.num_warps}, wanted 1, 2, 4, 8 or 16"
    most_stages = 15 if config.pingpong else 8
    if not 1 <= config.num_stages <= most_stages:
        return f"num_stages is {config.num_stages}, wanted 1 to {most_stages}"
    if not 1 <= config.group_m <= 1024:
        return f"group_m is {config.group_m}, wanted 1 to 1024"
    if config.specialized and not (config.tma and config.persistent and config.num_warps == 8):
        return f"a specialized config has TMA, is persistent and multiplies with 8 warps: {config!r} does not"
    if config.streamed and (not config.tma or config.pingpong):
        return f"a streamed config has TMA and is not pingpong: {config!r}"
    if config.narrow and not config.specialized:
        return f"a narrow config is specialized: {config!r}"
    if config.specialized and config.num_stages < 2:
        return f"a specialized config has a stage to load while another is multiplied: {config!r} has one"
    turns = _turns(config) or _fitted_turns(config) or _weight_turns(config)
    if config.pingpong and not (config.specialized and not config.narrow and turns):
        either = f"128 x {PINGPONG_COLUMNS} or {PINGPONG_COLUMNS} x 128"
        shape = f"tiles of {either} (64 deep, if not of dW), or of 128 x 128"
        return f"a pingpong config is specialized, of {shape}, and not narrow: {config!r}"
    return None
