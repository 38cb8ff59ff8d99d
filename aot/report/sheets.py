"""Cells out of a bundle, journals and a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ...artifacts.records.bundle import Bundle, Choice, Source, Variant
from ...artifacts.records.problem import Op, Problem
from ...artifacts.records.target import Gpu
from ...kernels.cost.model import Resources, estimate_us
from ...kernels.hardware.arch import ARCHS
from ...kernels.hardware.chips import Chip, chip_for, chip_of
from ..bundle.assemble import config_text
from ..journal.file import Contents
from ..journal.timings import cell_of
from ..plan.families import optional
from ..plan.plan import BuildPlan, gated_buckets, planned_on
from .cells import Cell, GemmKey, Sheet, State, TimedCandidate, WeightCells, gemm_key
from .roofline import roofline
from .search import Key, Search, searches


def sheet(
    title: str,
    facts: Mapping[str, str],
    bundle: Bundle | None,
    journals: Sequence[Contents],
    plan: BuildPlan | None,
    known: Iterable[Variant] = (),
) -> Sheet:
    """Put together what ``bundle`` chose, what ``journals`` measured and what ``plan`` wants.

    Without a plan, a cell is missing where a model of the bundle has that bucket for another of its problems.
    ``known`` are variants beside the bundle's that journals may name.
    """
    sm = bundle.target.sm if bundle is not None else journals[0].header.sm
    plan = plan if plan is None else planned_on(plan, (sm,))
    variants: dict[bytes, Variant] = {}
    for variant in (*known, *(bundle.variants if bundle else ())):
        variants.setdefault(variant.cubin_sha256, variant)
    found = searches(journals)
    keys = dict.fromkeys([*_chosen(bundle), *_wanted(bundle, plan)])
    named = {cell_of(*key) for key in keys}
    keys |= dict.fromkeys(key for key in found if key not in named)
    read = _Reader(sm, _default_gpu(bundle, journals), bundle, variants, found)
    cells = [one for key in sorted(keys, key=lambda key: (key[0].sort_key, key[1])) for one in read.cells(*key)]
    chips = dict.fromkeys(_chip(cell.gpu, sm) for cell in cells)
    models = plan.models if plan is not None else bundle.models if bundle is not None else ()
    notes = [f"{one.damaged} damaged records of a journal are left out" for one in journals if one.damaged]
    return Sheet(title, facts, sm, tuple(chips), tuple(models), _gemms(cells), tuple(notes))


def _default_gpu(bundle: Bundle | None, journals: Sequence[Contents]) -> Gpu | None:
    """Of what nobody measured: the one GPU of the rest, or none in particular."""
    gpus = [journals[0].header.gpu] if bundle is None else list(bundle.gpus)
    return gpus[0] if len({(gpu.name, gpu.sm_count) for gpu in gpus}) == 1 else None


def _chip(gpu: Gpu | None, sm: int) -> Chip:
    return chip_for(sm) if gpu is None else chip_of(gpu, sm)


_MODELLED_CELLS = 400  # whose every candidate the cost model is asked for: it takes a second, and shows what all would


class _Reader:
    """Makes cells, one after the other."""

    def __init__(
        self,
        sm: int,
        default: Gpu | None,
        bundle: Bundle | None,
        variants: Mapping[bytes, Variant],
        found: Mapping[Key, Sequence[Search]],
    ) -> None:
        self._sm, self._default, self._bundle = sm, default, bundle
        self._variants, self._found = variants, found
        self._chips: dict[Gpu | None, Chip] = {}
        self._texts: dict[int, str] = {}  # by id: to hash a variant takes as long
        self._resources: dict[bytes, Resources] = {}
        searched = [key for key, there in found.items() if there]
        self._modelled = set(searched[:: 1 + len(searched) // _MODELLED_CELLS])

    def _chip(self, gpu: Gpu | None) -> Chip:
        if gpu not in self._chips:
            self._chips[gpu] = _chip(gpu, self._sm)
        return self._chips[gpu]

    def cells(self, problem: Problem, bucket: int) -> list[Cell]:
        """The bundle's choices, of each GPU one, or else the search's; with the search's candidates."""
        there = self._found.get(cell_of(problem, bucket), ())
        search = next(iter(there), None)
        if self._bundle is not None:
            choices = [one for one in self._bundle.choices.get(problem, ()) if one.bucket == bucket]
            if choices:
                return [self._chosen(problem, one, self._bundle, there) for one in choices]
        gpu = search.gpu if search is not None else self._default
        return [self._searched(problem, bucket, gpu, search)]

    def _chosen(self, problem: Problem, choice: Choice, bundle: Bundle, there: Sequence[Search]) -> Cell:
        variant = bundle.variants[choice.variant]
        second = None if choice.runner_up is None else bundle.variants[choice.runner_up]
        timed_on = choice.measured_on(bundle.gpus)
        gpu = timed_on or self._default
        # the times of another GPU say nothing of this one's
        search = next((one for one in there if timed_on is None or one.gpu.is_like(timed_on)), None)
        return Cell(
            problem,
            choice.bucket,
            State.MEASURED if choice.source is Source.MEASURED else State.MODELLED,
            roofline(problem, choice.bucket, self._chip(gpu)),
            config=self._text(variant),
            time_us=choice.time_ns / 1e3,
            runner_up=self._text(second) if second is not None else "",
            runner_up_us=None if choice.runner_up_ns is None else choice.runner_up_ns / 1e3,
            model_us=self._model_us(problem, choice.bucket, variant.cubin_sha256, gpu),
            torch_us=search.torch_us if search is not None else None,
            gpu=gpu,
            candidates=self._candidates(problem, choice.bucket, search),
            failures=self._failures(search),
        )

    def _searched(self, problem: Problem, bucket: int, gpu: Gpu | None, search: Search | None) -> Cell:
        line = roofline(problem, bucket, self._chip(gpu))
        candidates, failures = self._candidates(problem, bucket, search), self._failures(search)
        if search is None or search.choice is None:
            return Cell(problem, bucket, State.MISSING, line, gpu=gpu, candidates=candidates, failures=failures)
        second = search.runner_up
        return Cell(
            problem,
            bucket,
            State.MEASURED,
            line,
            config=self._name(search.choice),
            time_us=next(time_us for time_us, sha in search.fastest if sha == search.choice),
            runner_up=self._name(second[1]) if second else "",
            runner_up_us=second[0] if second else None,
            model_us=self._model_us(problem, bucket, search.choice, gpu),
            torch_us=search.torch_us,
            gpu=gpu,
            candidates=candidates,
            failures=failures,
        )

    def _candidates(self, problem: Problem, bucket: int, search: Search | None) -> tuple[TimedCandidate, ...]:
        if search is None:
            return ()
        modelled = cell_of(problem, bucket) in self._modelled
        return tuple(
            TimedCandidate(
                self._name(sha), time_us, self._model_us(problem, bucket, sha, search.gpu) if modelled else None
            )
            for time_us, sha in search.fastest
        )

    def _failures(self, search: Search | None) -> tuple[str, ...]:
        failures = search.failures if search is not None else ()
        return tuple(f"{self._name(one.variant)}: {one.kind}, {one.reason}" for one in failures)

    def _name(self, sha: bytes) -> str:
        variant = self._variants.get(sha)
        return self._text(variant) if variant is not None else f"cubin {sha.hex()[:12]}"

    def _text(self, variant: Variant) -> str:
        if id(variant) not in self._texts:
            self._texts[id(variant)] = config_text(variant)
        return self._texts[id(variant)]

    def _model_us(self, problem: Problem, bucket: int, sha: bytes, gpu: Gpu | None) -> float | None:
        variant = self._variants.get(sha)
        if variant is None or self._sm not in ARCHS:
            return None
        try:
            if sha not in self._resources:
                self._resources[sha] = Resources.of(variant)
            time_us = estimate_us(problem.canonical, bucket, self._resources[sha], self._chip(gpu))
        except ValueError:  # a config of another version
            return None
        return time_us if math.isfinite(time_us) else None


def _chosen(bundle: Bundle | None) -> list[Key]:
    if bundle is None:
        return []
    return list(dict.fromkeys((problem, one.bucket) for problem, row in bundle.choices.items() for one in row))


def _wanted(bundle: Bundle | None, plan: BuildPlan | None) -> list[Key]:
    if plan is not None:
        return [(problem, bucket) for problem, buckets in plan.buckets.items() for bucket in buckets]
    if bundle is None:
        return []
    found: dict[Key, None] = {}
    for model in bundle.models:
        buckets = {one.bucket for problem in model.problems for one in bundle.choices[problem]}
        for problem in model.problems:
            some = gated_buckets(problem, buckets) if optional(problem) else buckets
            found |= dict.fromkeys((problem, bucket) for bucket in some)
    return list(found)


def _gemms(cells: Iterable[Cell]) -> tuple[WeightCells, ...]:
    groups: dict[GemmKey, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(gemm_key(cell.problem), []).append(cell)
    for group in groups.values():
        group.sort(key=_cell_order)
    order = sorted(groups, key=lambda key: (*key[:3], key[3].value, key[4].value))
    return tuple(WeightCells(*key, tuple(groups[key])) for key in order)


def _cell_order(cell: Cell) -> tuple[int, int, int, int]:
    one = cell.problem
    return (list(Op).index(one.op), one.fusion.value, one.top_k, cell.bucket)
