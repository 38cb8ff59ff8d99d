"""The options of a build, the callbacks that follow it, and its result as plain data, for a table or for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...artifacts.records import Gpu, Problem, Target
from ...kernels.registry import entry_of
from ...kernels.rowops import RowOpSpec
from ...kernels.spec import Spec
from ..choose.bundle import Ships
from ..choose.incumbents import BaselineComparison, Incumbents
from ..compile.cache import CompileCache
from ..compile.pool import TIMEOUT_S, Compile, CompileResult
from ..compile.shipped import Shipped
from ..compile.triton import compile_variant
from ..plan.families import CONFIG_LIMIT, Pool
from ..process.output import DEFAULT_NAME
from ..tune.scheduler import Outcome
from ..tune.tuner import Entrants, TuneObservers, tune_problems

_REASON_CHARS = 160


@dataclass(frozen=True, slots=True)
class Dropped:
    """A variant that does not ship: it ``failed`` to compile, or was ``pruned`` because its cubin needs too much."""

    spec: Spec | RowOpSpec
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelCells:
    """The number of (problem, bucket) cells of a model; ``shipped`` of them have choices of installed bundles."""

    name: str
    cells: int
    shipped: int
    measured: int

    @property
    def ships_measured(self) -> bool:
        """True if the runtime has measured choices for all of this model without the bundle."""
        return self.shipped == self.cells

    def to_dict(self) -> dict[str, object]:
        """The record as plain values for JSON."""
        return {"name": self.name, "cells": self.cells, "shipped_measured": self.shipped, "measured": self.measured}


@dataclass(frozen=True, slots=True)
class Built:
    """One bundle. Of the ``variants`` that ship, ``compiled`` were compiled now, others were ``cached`` or ``shipped``.

    ``measured`` of the ``choices`` were measured, on ``gpus``; ``taken_over`` come from installed bundles. ``tuned`` is
    the outcome of this build's measuring. ``by_model`` has the cells of each model. ``comparison`` compares the
    bundle with the kernels selected before.

    ``worst_loss`` is the largest slowdown of a problem, by the cost model, from shipping so few variants (0.02 is 2 %).
    ``seconds`` runs from the start of the build to the bundle's publication.
    """

    path: Path
    target: Target
    models: int
    shards: int
    problems: int
    choices: int
    measured: int
    gpus: tuple[Gpu, ...]
    variants: int
    compiled: int
    cached: int
    dropped: tuple[Dropped, ...]
    worst_loss: float
    size_bytes: int
    unchanged: bool
    seconds: float
    tuned: Outcome | None = None
    comparison: BaselineComparison | None = None
    shipped: int = 0
    taken_over: int = 0
    by_model: tuple[ModelCells, ...] = ()

    @property
    def modelled(self) -> int:
        """The number of choices that the cost model made."""
        return self.choices - self.measured

    @property
    def source(self) -> str:
        """The source of the choices: ``measured``, ``modelled``, or ``measured and modelled``."""
        if not self.measured:
            return "modelled"
        return "measured" if self.measured == self.choices else "measured and modelled"

    @property
    def pruned(self) -> int:
        """The number of compiled variants that can't run well on this capability."""
        return sum(variant.kind == "pruned" for variant in self.dropped)

    @property
    def failed(self) -> int:
        """The number of variants that failed to compile."""
        return sum(variant.kind == "failed" for variant in self.dropped)

    @property
    def lost(self) -> str:
        """A sentence on the variants that failed to compile, and why; empty if none did."""
        failed = [variant for variant in self.dropped if variant.kind == "failed"]
        if not failed:
            return ""
        kernels = ", ".join(dict.fromkeys(entry_of(variant.spec).name for variant in failed))
        said = Counter(variant.reason.removeprefix(f"{variant.spec} for sm_{self.target.sm}: ") for variant in failed)
        (reason, _), *others = said.most_common()
        reason = reason if len(reason) <= _REASON_CHARS else f"{reason[:_REASON_CHARS]}..."
        more = f", and {len(others)} other reasons" if len(others) > 1 else ", and another reason" if others else ""
        instead = "; what bundles here have of them took part instead" if self.comparison else ""
        total = self.compiled + self.cached + self.shipped + len(failed)
        text = f"{len(failed)} of {total} variants could not be compiled here, of the kernels {kernels}"
        return f"{text} ({reason}{more}){instead}"

    def to_dict(self) -> dict[str, object]:
        """The record as plain values for JSON."""
        return {
            "path": str(self.path),
            "sm": self.target.sm,
            "target": str(self.target),
            "models": self.models,
            "shards": self.shards,
            "problems": self.problems,
            "choices": self.choices,
            "measured": self.measured,
            "taken_over": self.taken_over,
            "modelled": self.modelled,
            "by_model": [model.to_dict() for model in self.by_model],
            "gpus": [gpu.name for gpu in self.gpus],
            "source": self.source,
            "variants": self.variants,
            "compiled": self.compiled,
            "cached": self.cached,
            "shipped": self.shipped,
            "pruned": self.pruned,
            "failed": self.failed,
            "lost": self.lost,
            "dropped": [
                {"variant": str(variant.spec), "kind": variant.kind, "reason": variant.reason}
                for variant in self.dropped
            ],
            "worst_loss": round(self.worst_loss, 6),
            "size_bytes": self.size_bytes,
            "unchanged": self.unchanged,
            "seconds": round(self.seconds, 3),
            "tuned": self.tuned and self.tuned.to_dict(),
            "compared_with_before": self.comparison and self.comparison.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The result of a whole build."""

    bundles: tuple[Built, ...]
    notes: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """The record as plain values for JSON."""
        return {
            "bundles": [bundle.to_dict() for bundle in self.bundles],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


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
    incumbents: Callable[[Path], Incumbents] = Incumbents.on_search_path  # other bundles than the file that is built
    shipped: Callable[[int], Shipped] = lambda sm: Shipped()  # a capability's candidates that need no compiler


@dataclass(frozen=True, slots=True)
class Observers:
    """Callbacks that follow a build: the number of variants, each result, and notes."""

    on_start: Callable[[int], None] = lambda total: None
    on_result: Callable[[CompileResult], None] = lambda result: None
    on_note: Callable[[str], None] = lambda note: None
    tune: TuneObservers = field(default_factory=TuneObservers)
