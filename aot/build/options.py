"""How to build, and whom to tell."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...artifacts.records.problem import Problem
from ..choose.bundle import Ships
from ..choose.incumbents import Incumbents
from ..compile.cache import CompileCache
from ..compile.pool import TIMEOUT_S, Compile, CompileResult
from ..compile.shipped import Shipped
from ..compile.triton import compile_variant
from ..plan.families import CONFIG_LIMIT, Pool
from ..process.output_dir import DEFAULT_NAME
from ..tune.tuner import Entrants, Outcome, TuneObservers, tune_problems


class Tune(Protocol):
    """Measures cells of ``candidates`` into ``journal``: ``tune_problems``, but for how. None where it can't."""

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
    """On this machine's GPUs, as long as is usual."""
    return tune_problems(problems, candidates, journal, entrants=entrants, ships=ships, observers=observers)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build. ``workers`` None means one a core; ``cache`` None keeps nothing.

    Capabilities in ``measure`` are measured, by ``tune``. ``journal`` takes what is measured, or has what was;
    None is ``<name>-sm<NN>.journal`` beside the bundle, where it is there or one is measured. ``modelled`` uses none.
    With ``take_over`` a capability that is not measured has the measured choices of installed bundles.
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
    configs: int = CONFIG_LIMIT  # of an op and dtype, at most
    tune: Tune = tune_now
    found: Callable[[Path], Incumbents] = Incumbents.found  # what is there, but for the file that is built
    shipped: Callable[[int], Shipped] = lambda sm: Shipped()  # a capability's candidates that need no compiler


@dataclass(frozen=True, slots=True)
class Observers:
    """Whom to tell while it goes on: the number of variants, each as it is ready, and remarks."""

    on_start: Callable[[int], None] = lambda total: None
    on_result: Callable[[CompileResult], None] = lambda result: None
    on_note: Callable[[str], None] = lambda note: None
    tune: TuneObservers = field(default_factory=TuneObservers)
