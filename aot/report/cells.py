"""What a report tells, as plain data: one cell for each problem and bucket, out of a bundle, journals and a plan."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...artifacts.types import Bundle, DType, Gpu, Layout, Model, Op, Problem, Source, Variant
from ...kernels.chips import LIMITS, Chip
from ...kernels.cost import Resources, estimate_us
from ..assembly import config_text
from ..journal import Contents
from ..plan import Plan
from ..records import Failure, Measured, geometric_mean
from .roofline import Roofline, chip_of, roofline

GemmKey = tuple[int, int, int, DType, Layout]


def gemm_key(problem: Problem) -> GemmKey:
    """Which GEMM a problem belongs to."""
    return (problem.E, problem.N, problem.K, problem.dtype, problem.layout)


class State(enum.Enum):
    """How much is known of a cell."""

    MEASURED = "measured"
    MODELLED = "modelled"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant that was measured in a cell. ``model_us`` is the cost model's estimate, where its cubin is known."""

    config: str
    time_us: float
    model_us: float | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One problem and bucket. Times are microseconds of one launch with ``bucket`` rows.

    ``time_us`` is that of the choice, measured or modelled as ``state`` says; ``model_us`` is what this version's
    cost model says of the same variant. ``torch_us`` is torch's grouped_mm, measured in the same turn.
    ``candidates`` are all that were measured, fastest first; ``failures`` those that broke, with the reason.
    """

    problem: Problem
    bucket: int
    state: State
    roofline: Roofline
    config: str = ""
    time_us: float = math.nan
    runner_up: str = ""
    runner_up_us: float | None = None
    model_us: float | None = None
    torch_us: float | None = None
    gpu: Gpu | None = None
    candidates: tuple[Candidate, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def fraction(self) -> float:
        """How much of the roofline the choice reaches: 1 is all of it."""
        return self.roofline.least_us / self.time_us

    @property
    def against_torch(self) -> float | None:
        """How many times faster than torch's grouped_mm; only where both were measured."""
        measured = self.torch_us is not None and self.state is State.MEASURED
        return self.torch_us / self.time_us if self.torch_us is not None and measured else None

    @property
    def model_ratio(self) -> float | None:
        """Modelled over measured; only where both are known."""
        known = self.model_us is not None and self.state is State.MEASURED
        return self.model_us / self.time_us if self.model_us is not None and known else None


@dataclass(frozen=True, slots=True)
class Gemm:
    """The cells of one weight: E matrices of N x K, in every op and form."""

    E: int
    N: int
    K: int
    dtype: DType
    layout: Layout
    cells: tuple[Cell, ...]

    @property
    def key(self) -> GemmKey:
        """What tells it from the others."""
        return (self.E, self.N, self.K, self.dtype, self.layout)

    @property
    def title(self) -> str:
        """As headings name it."""
        text = f"E={self.E} N={self.N} K={self.K} {self.dtype.value}"
        return text if self.layout is Layout.NK else f"{text} w={self.layout.value}"


@dataclass(frozen=True, slots=True)
class Sheet:
    """Everything of one report. ``chips`` are those whose published figures make the rooflines."""

    title: str
    facts: Mapping[str, str]
    sm: int
    chips: tuple[Chip, ...]
    models: tuple[Model, ...]
    gemms: tuple[Gemm, ...]
    notes: tuple[str, ...]

    @property
    def cells(self) -> list[Cell]:
        """All of them, problem by problem."""
        return [cell for gemm in self.gemms for cell in gemm.cells]


@dataclass(slots=True)
class _Search:
    """What journals know of one cell."""

    gpu: Gpu
    records: list[Measured] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


Key = tuple[Problem, int]


def sheet(
    title: str,
    facts: Mapping[str, str],
    bundle: Bundle | None,
    journals: Sequence[Contents],
    plan: Plan | None,
    known: Iterable[Variant] = (),
) -> Sheet:
    """Put together what ``bundle`` chose, what ``journals`` measured and what ``plan`` wants.

    Without a plan, a cell is missing where a model of the bundle has that bucket for another of its problems.
    ``known`` are variants beside the bundle's that journals may name.
    """
    sm = bundle.target.sm if bundle is not None else journals[0].header.sm
    variants: dict[bytes, Variant] = {}
    for variant in (*known, *(bundle.variants if bundle else ())):
        variants.setdefault(variant.cubin_sha256, variant)
    searches = _searches(journals)
    wanted = _wanted(bundle, plan)
    keys = dict.fromkeys([*_chosen(bundle), *searches, *wanted])
    default = next((one.header.gpu for one in journals), None)
    if bundle is not None:  # what nobody measured was modelled for the one GPU of the rest, or for no particular one
        default = bundle.gpus[0] if len(bundle.gpus) == 1 else None
    read = _Reader(sm, default, bundle, variants, searches)
    cells = [read.cell(*key) for key in sorted(keys, key=lambda key: (key[0].sort_key, key[1]))]
    chips = dict.fromkeys(chip_of(cell.gpu or default, sm) for cell in cells)
    models = plan.models if plan is not None else bundle.models if bundle is not None else ()
    notes = [f"{one.damaged} damaged records of a journal are left out" for one in journals if one.damaged]
    return Sheet(title, facts, sm, tuple(chips), tuple(models), _gemms(cells), tuple(notes))


class _Reader:
    """Cells out of the sources."""

    def __init__(
        self,
        sm: int,
        default: Gpu | None,
        bundle: Bundle | None,
        variants: Mapping[bytes, Variant],
        searches: Mapping[Key, _Search],
    ) -> None:
        self._sm, self._default, self._bundle = sm, default, bundle
        self._variants, self._searches = variants, searches

    def cell(self, problem: Problem, bucket: int) -> Cell:
        search = self._searches.get((problem, bucket))
        choice = None
        if self._bundle is not None:
            choice = next((one for one in self._bundle.choices.get(problem, ()) if one.bucket == bucket), None)
        gpu = self._default
        if choice is not None and self._bundle is not None:
            gpu = self._bundle.gpus[choice.gpu] if choice.gpu is not None else gpu
        elif search is not None:
            gpu = search.gpu
        line = roofline(problem, bucket, chip_of(gpu, self._sm))
        found: dict[str, object] = {}
        if search is not None:
            found = self._searched(problem, bucket, search)
        if choice is not None and self._bundle is not None:
            variant = self._bundle.variants[choice.variant]
            second = None if choice.runner_up is None else self._bundle.variants[choice.runner_up]
            found |= {
                "state": State.MEASURED if choice.source is Source.MEASURED else State.MODELLED,
                "config": config_text(variant),
                "time_us": choice.time_ns / 1e3,
                "runner_up": config_text(second) if second is not None else "",
                "runner_up_us": None if choice.runner_up_ns is None else choice.runner_up_ns / 1e3,
                "model_us": self._model_us(problem, bucket, variant.cubin_sha256, gpu),
            }
        state = found.pop("state", State.MISSING)
        return Cell(problem, bucket, state, line, gpu=gpu, **found)  # type: ignore[arg-type]

    def _searched(self, problem: Problem, bucket: int, search: _Search) -> dict[str, object]:
        """What was measured, the choice by the duel's outcome: inside the noise the modelled one stays."""
        failures = tuple(f"{self._name(one.variant)}: {one.kind}, {one.reason}" for one in search.failures)
        if not search.records:
            return {"failures": failures}
        fullest = min(search.records, key=lambda one: (-len(one.timings), repr(one)))
        times: dict[bytes, float] = {}
        for record in search.records:
            for timing in record.timings:
                times[timing.variant] = min(times.get(timing.variant, math.inf), timing.time_ns / 1e3)
        fastest = sorted(times, key=lambda sha: (times[sha], sha))
        winner = fastest[0]
        if fullest.duel is not None and not fullest.duel.won and fullest.duel.modelled in times:
            winner = fullest.duel.modelled
        second = next((sha for sha in fastest if sha != winner), None)
        torch = [geometric_mean(one.torch_ns) / 1e3 for one in search.records if one.torch_ns]
        return {
            "state": State.MEASURED,
            "config": self._name(winner),
            "time_us": times[winner],
            "runner_up": self._name(second) if second else "",
            "runner_up_us": times[second] if second else None,
            "model_us": self._model_us(problem, bucket, winner, search.gpu),
            "torch_us": min(torch, default=None),
            "candidates": tuple(
                Candidate(self._name(sha), times[sha], self._model_us(problem, bucket, sha, search.gpu))
                for sha in fastest
            ),
            "failures": failures,
        }

    def _name(self, sha: bytes) -> str:
        variant = self._variants.get(sha)
        return config_text(variant) if variant is not None else f"cubin {sha.hex()[:12]}"

    def _model_us(self, problem: Problem, bucket: int, sha: bytes, gpu: Gpu | None) -> float | None:
        variant = self._variants.get(sha)
        if variant is None or self._sm not in LIMITS:
            return None
        try:
            time_us = estimate_us(problem, bucket, Resources.of(variant), chip_of(gpu, self._sm))
        except ValueError:  # a config of another version
            return None
        return time_us if math.isfinite(time_us) else None


def _searches(journals: Sequence[Contents]) -> dict[Key, _Search]:
    found: dict[Key, _Search] = {}
    for journal in journals:
        for record in journal.records:
            search = found.setdefault((record.problem, record.bucket), _Search(journal.header.gpu))
            if isinstance(record, Measured):
                search.records.append(record)
            else:
                search.failures.append(record)
    return found


def _chosen(bundle: Bundle | None) -> list[Key]:
    if bundle is None:
        return []
    return [(problem, one.bucket) for problem, row in bundle.choices.items() for one in row]


def _wanted(bundle: Bundle | None, plan: Plan | None) -> list[Key]:
    if plan is not None:
        return [(problem, bucket) for problem, buckets in plan.buckets.items() for bucket in buckets]
    if bundle is None:
        return []
    found: dict[Key, None] = {}
    for model in bundle.models:
        buckets = {one.bucket for problem in model.problems for one in bundle.choices[problem]}
        found |= dict.fromkeys((problem, bucket) for problem in model.problems for bucket in buckets)
    return list(found)


def _gemms(cells: Iterable[Cell]) -> tuple[Gemm, ...]:
    groups: dict[GemmKey, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(gemm_key(cell.problem), []).append(cell)
    for group in groups.values():
        group.sort(key=_cell_order)
    order = sorted(groups, key=lambda key: (*key[:3], key[3].value, key[4].value))
    return tuple(Gemm(*key, tuple(groups[key])) for key in order)


def _cell_order(cell: Cell) -> tuple[int, int, int, int]:
    one = cell.problem
    return (list(Op).index(one.op), one.fusion.value, one.top_k, cell.bucket)
