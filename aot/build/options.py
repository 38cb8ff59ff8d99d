"""The options of a build, and the callbacks that follow it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...artifacts.records import Problem
from ..choose.bundle import Ships
from ..choose.incumbents import Incumbents
from ..compile.cache import CompileCache
from ..compile.pool import TIMEOUT_S, Compile, CompileResult
from ..compile.shipped import Shipped
from ..compile.triton import compile_variant
from ..plan.families import CONFIG_LIMIT, Pool
from ..process.output import DEFAULT_NAME
from ..tune.tuner import Entrants, Outcome, TuneObservers, tune_problems


class Tune(Protocol):
    """Measure cells of ``candidates`` into ``journal``, as ``tune_problems`` does. Returns None if it can't."""

    def __call__(
        self,
        problems: Mapping[Problem, Sequence[int]],
        candidates: Path,
        journal: Path,
        ships: Ships,
        entrants: Entrants,
        observers: TuneObservers,
    ) -> Outcome | None: ...


def tune_now(
    problems: Mapping[Problem, Sequence[int]],
    candidates: Path,
    journal: Path,
    ships: Ships,
    entrants: Entrants,
    observers: TuneObservers,
) -> Outcome:
    """Measure on this machine's GPUs with the usual budget."""
    return tune_problems(problems, candidates, journal, entrants=entrants, ships=ships, observers=observers)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of a build. ``workers`` None means one a core; without ``cache`` nothing compiled is kept.

    Capabilities in ``measure`` are measured, by ``tune``. ``journal`` is the file that times are written to, or read
    from; None is ``<name>-sm<NN>.journal`` next to the bundle, if it exists or the build measures. ``modelled`` uses no
    journal. With ``take_over``, a capability that is not measured gets the measured choices of installed bundles.
    """

    out: Path
    name: str = DEFAULT_NAME
    workers: int | None = None
    cache: CompileCache | None = None
    space: Pool = field(default_factory=Pool)
    timeout_s: float = TIMEOUT_S
    compile_one: Compile = compile_variant
    journal: Path | None = None
    measure: Container[int] = ()
    modelled: bool = False
    take_over: bool = True
    configs: int = CONFIG_LIMIT  # the most configs to try for an op and dtype
    tune: Tune = tune_now
    incumbents: Callable[[Path], Incumbents] = Incumbents.found  # other bundles than the file that is built
    shipped: Callable[[int], Shipped] = lambda sm: Shipped()  # a capability's candidates that need no compiler


@dataclass(frozen=True, slots=True)
class Observers:
    """Callbacks that follow a build: the number of variants, each result, and notes."""

    on_start: Callable[[int], None] = lambda total: None
    on_result: Callable[[CompileResult], None] = lambda result: None
    on_note: Callable[[str], None] = lambda note: None
    tune: TuneObservers = field(default_factory=TuneObservers)
