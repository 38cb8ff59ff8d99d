"""Read a report's files, a bundle or journals, and make its cells from them and a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...artifacts.errors import InputError
from ...artifacts.records import Bundle, Choice, DType, Gpu, Op, Problem, Source, Variant, cuda_version
from ...kernels.arch import ARCHS, supported
from ...kernels.chips import Chip, chip_for, chip_of
from ...kernels.cost import Resources
from ...kernels.cost_model import Ranker
from ..bundle.assemble import config_text
from ..bundle.verify import sound
from ..journal.file import Contents, read_journal
from ..journal.records import Failure
from ..journal.timings import CellTimes, Timings, cell_of
from ..plan.families import optional
from ..plan.plan import BuildPlan, gated_buckets, planned_on
from .cells import Cell, GemmKey, Roofline, Sheet, State, TimedCandidate, WeightCells, gemm_key, rooflines


def sheet(
    title: str,
    facts: Mapping[str, str],
    bundle: Bundle | None,
    journals: Sequence[Contents],
    plan: BuildPlan | None,
    also: Iterable[Variant] = (),
) -> Sheet:
    """Combine the choices of ``bundle``, the times of ``journals`` and the problems of ``plan``.

    Without a plan, a cell is missing if a model of the bundle has that bucket for another of its problems. ``also`` are
    variants outside the bundle that journals may name.
    """
    sm = bundle.target.sm if bundle is not None else journals[0].header.sm
    plan = plan if plan is None else planned_on(plan, (sm,))
    variants: dict[bytes, Variant] = {}
    for variant in (*also, *(bundle.variants if bundle else ())):
        variants.setdefault(variant.cubin_sha256, variant)
    by_cell = searches(journals)
    buckets: dict[Problem, set[int]] = {}
    for problem, some in (*_chosen(bundle), *_wanted(bundle, plan)):
        buckets.setdefault(problem, set()).update(some)
    named: dict[Problem, set[int]] = {}  # by the journals' name of the product
    for problem, some in buckets.items():
        named.setdefault(problem.canonical, set()).update(some)
    for problem, there in by_cell.items():
        buckets.setdefault(problem, set()).update(there.keys() - named.get(problem, set()))
    shared = _SharedData(sm, _default_gpu(bundle, journals), bundle, variants, by_cell)
    ordered = sorted(buckets, key=lambda problem: problem.sort_key)
    cells = [cell for problem in ordered for cell in _CellMaker(problem, shared).cells(sorted(buckets[problem]))]
    chips = dict.fromkeys(_chip(cell.gpu, sm) for cell in cells)
    models = plan.models if plan is not None else bundle.models if bundle is not None else ()
    notes = [f"{journal.damaged} damaged records of a journal are left out" for journal in journals if journal.damaged]
    return Sheet(title, facts, sm, tuple(chips), tuple(models), _gemms(cells), tuple(notes))


def _default_gpu(bundle: Bundle | None, journals: Sequence[Contents]) -> Gpu | None:
    """The GPU of unmeasured cells: the GPU of all other cells, or None if they differ."""
    gpus = [journals[0].header.gpu] if bundle is None else list(bundle.gpus)
    return gpus[0] if len({(gpu.name, gpu.sm_count) for gpu in gpus}) == 1 else None


def _chip(gpu: Gpu | None, sm: int) -> Chip:
    return chip_for(sm) if gpu is None else chip_of(gpu, sm)


TORCH = "torch grouped_mm"  # the config of a cell that torch runs faster
_MODELLED_CELLS = 400  # cells whose candidates are all estimated: it takes a second, and is representative


class _SharedData:
    """Data shared by all products: variants by cubin, GPUs' figures, and the journals' searches."""

    def __init__(
        self, sm: int, default: Gpu | None, bundle: Bundle | None, variants: Mapping[bytes, Variant], by_cell: Searches
    ) -> None:
        self.default, self.bundle, self.searches = default, bundle, by_cell
        self._sm, self._variants = sm, variants
        self._chips: dict[Gpu | None, Chip] = {}
        self._texts: dict[int, str] = {}  # by id: hashing a variant is slow
        self._rankers: dict[tuple[bytes, Op, DType], dict[Gpu | None, Ranker | None]] = {}
        searched = [(problem, bucket) for problem, there in by_cell.items() for bucket in there]
        self.sampled: dict[Problem, set[int]] = {}
        for problem, bucket in searched[:: 1 + len(searched) // _MODELLED_CELLS]:
            self.sampled.setdefault(problem, set()).add(bucket)

    def chip(self, gpu: Gpu | None) -> Chip:
        """The published figures of a GPU."""
        if gpu not in self._chips:
            self._chips[gpu] = _chip(gpu, self._sm)
        return self._chips[gpu]

    def name(self, sha: bytes) -> str:
        """A variant's config; for an unknown cubin the start of its digest."""
        variant = self._variants.get(sha)
        return self.text(variant) if variant is not None else f"cubin {sha.hex()[:12]}"

    def text(self, variant: Variant) -> str:
        """A variant's config."""
        text = self._texts.get(id(variant))
        if text is None:
            text = self._texts[id(variant)] = config_text(variant)
        return text

    def model_us(self, canonical: Problem, bucket: int, sha: bytes, gpu: Gpu | None) -> float | None:
        """The cost model's estimate; None for an unknown variant or another version's config."""
        there = self._rankers.setdefault((sha, canonical.op, canonical.dtype), {})
        try:
            if gpu not in there:
                there[gpu] = None
                there[gpu] = self._ranker(sha, canonical, gpu)
            ranker = there[gpu]
            time_us = math.inf if ranker is None else ranker.rank(canonical, bucket)[0][0]
        except ValueError:
            return None
        return time_us if math.isfinite(time_us) else None

    def _ranker(self, sha: bytes, canonical: Problem, gpu: Gpu | None) -> Ranker | None:
        variant = self._variants.get(sha)
        if variant is None or self._sm not in ARCHS:
            return None
        return Ranker([Resources.of(variant)], canonical.op, canonical.dtype, self.chip(gpu))


class _CellMaker:
    """Makes the cells of one problem."""

    def __init__(self, problem: Problem, shared: _SharedData) -> None:
        self._problem, self._canonical, self._shared = problem, problem.canonical, shared
        self._searches = shared.searches.get(self._canonical, {})
        self._sampled = shared.sampled.get(self._canonical, set())
        self._lines: dict[Gpu | None, Callable[[int], Roofline]] = {}

    def cells(self, buckets: Iterable[int]) -> Iterator[Cell]:
        """Yield each bucket's cells: the bundle's choices, or else the search's result, with its candidates."""
        bundle = self._shared.bundle
        choices: dict[int, list[Choice]] = {}
        for choice in bundle.choices.get(self._problem, ()) if bundle is not None else ():
            choices.setdefault(choice.bucket, []).append(choice)
        for bucket in buckets:
            there = self._searches.get(bucket, [])
            if bundle is not None and bucket in choices:
                for choice in choices[bucket]:
                    yield self._chosen(choice, bundle, there)
            else:
                yield self._searched(bucket, there[0] if there else None)

    def _line(self, gpu: Gpu | None, bucket: int) -> Roofline:
        if gpu not in self._lines:
            self._lines[gpu] = rooflines(self._problem, self._shared.chip(gpu))
        return self._lines[gpu](bucket)

    def _chosen(self, choice: Choice, bundle: Bundle, there: Sequence[Search]) -> Cell:
        shared, bucket = self._shared, choice.bucket
        variant = bundle.variants[choice.variant]
        second = None if choice.runner_up is None else bundle.variants[choice.runner_up]
        timed_on = choice.measured_on(bundle.gpus)
        gpu = timed_on or shared.default
        search = None  # times of another GPU don't count
        for searched in there:
            if timed_on is None or searched.gpu.is_like(timed_on):
                search = searched
                break
        cell = Cell(
            self._problem,
            bucket,
            State.MEASURED if choice.source is Source.MEASURED else State.MODELLED,
            self._line(gpu, bucket),
            shared.text(variant),
            choice.time_ns / 1e3,
            shared.text(second) if second is not None else "",
            None if choice.runner_up_ns is None else choice.runner_up_ns / 1e3,
            shared.model_us(self._canonical, bucket, variant.cubin_sha256, gpu),
            search.torch_us if search is not None else None,
            gpu,
            *self._tried(bucket, search),
            ", ".join(dict.fromkeys(row.way.name.lower() for row in choice.plan if row.variant is not None)),
        )
        if choice.torch_ns is None:
            return cell
        torch_us = choice.torch_ns / 1e3
        return cell._replace(
            config=TORCH,
            time_us=torch_us,
            runner_up=cell.config,
            runner_up_us=cell.time_us,
            model_us=None,
            torch_us=torch_us,
        )

    def _searched(self, bucket: int, search: Search | None) -> Cell:
        shared = self._shared
        gpu = search.gpu if search is not None else shared.default
        line, (tried, spread, candidates, failures) = self._line(gpu, bucket), self._tried(bucket, search)
        choice = search.choice if search is not None else None
        if search is None or choice is None:
            return Cell(
                self._problem,
                bucket,
                State.MISSING,
                line,
                gpu=gpu,
                tried=tried,
                spread=spread,
                candidates=candidates,
                failures=failures,
            )
        fastest = search.fastest
        second = next((entry for entry in fastest if entry[1] != choice), None)
        return Cell(
            self._problem,
            bucket,
            State.MEASURED,
            line,
            shared.name(choice),
            next(time_us for time_us, sha in fastest if sha == choice),
            shared.name(second[1]) if second else "",
            second[0] if second else None,
            shared.model_us(self._canonical, bucket, choice, gpu),
            search.torch_us,
            gpu,
            tried,
            spread,
            candidates,
            failures,
        )

    def _tried(
        self, bucket: int, search: Search | None
    ) -> tuple[int, float | None, tuple[TimedCandidate, ...], tuple[str, ...]]:
        """(number of measured variants, their spread, the variants if the cell is sampled, failures)."""
        if search is None:
            return 0, None, (), ()
        shared, candidates = self._shared, []
        failures = [f"{shared.name(failure.variant)}: {failure.kind}, {failure.reason}" for failure in search.failures]
        for time_us, sha in search.fastest if bucket in self._sampled else ():
            model_us = shared.model_us(self._canonical, bucket, sha, search.gpu)
            candidates.append(TimedCandidate(shared.name(sha), time_us, model_us))
        return search.tried, search.spread, tuple(candidates), tuple(failures)


_Wanted = list[tuple[Problem, Iterable[int]]]


def _chosen(bundle: Bundle | None) -> _Wanted:
    if bundle is None:
        return []
    return [(problem, [choice.bucket for choice in row]) for problem, row in bundle.choices.items()]


def _wanted(bundle: Bundle | None, plan: BuildPlan | None) -> _Wanted:
    if plan is not None:
        return list(plan.buckets.items())
    if bundle is None:
        return []
    wanted: _Wanted = []
    for model in bundle.models:
        buckets = {choice.bucket for problem in model.problems for choice in bundle.choices[problem]}
        for problem in model.problems:
            wanted.append((problem, gated_buckets(problem, buckets) if optional(problem) else buckets))
    return wanted


def _gemms(cells: Iterable[Cell]) -> tuple[WeightCells, ...]:
    problems: dict[Problem, list[Cell]] = {}
    for cell in cells:  # each problem's cells are adjacent, with ascending buckets
        problems.setdefault(cell.problem, []).append(cell)
    groups: dict[GemmKey, list[Problem]] = {}
    for problem in sorted(problems, key=_order):
        groups.setdefault(gemm_key(problem), []).append(problem)
    order = sorted(groups, key=lambda key: (*key[:3], key[3].value, key[4].value))
    return tuple(WeightCells(*key, tuple(cell for member in groups[key] for cell in problems[member])) for key in order)


def _order(problem: Problem) -> tuple[int, int, int]:
    return (list(Op).index(problem.op), problem.fusion.value, problem.top_k)


@dataclass(frozen=True, slots=True)
class Search:
    """The search in one cell; ``times`` is None if nothing was timed. A bundle has these times multiplied by ``clock``.

    ``failed`` are the variants that failed anywhere, which are never chosen.
    """

    gpu: Gpu
    times: CellTimes | None
    clock: float
    failed: Container[bytes]
    failures: tuple[Failure, ...]

    @property
    def fastest(self) -> list[tuple[float, bytes]]:
        """(time in us, cubin's sha256) of all measured variants, fastest first."""
        times = {} if self.times is None else self.times.times_ns
        return sorted((self.clock * time_ns / 1e3, sha) for sha, time_ns in times.items())

    @property
    def choice(self) -> bytes | None:
        """The variant that a bundle of this journal would choose; None if every timed variant also failed somewhere."""
        if self.times is None:
            return None
        return self.times.best_of([sha for sha in sorted(self.times.times_ns) if sha not in self.failed])

    @property
    def tried(self) -> int:
        """The number of measured variants."""
        return 0 if self.times is None else len(self.times.times_ns)

    @property
    def spread(self) -> float | None:
        """The median of the measured times over the fastest."""
        if not self.tried or self.times is None:
            return None
        ordered = sorted(self.times.times_ns.values())
        half = len(ordered) // 2
        return (ordered[half] + ordered[~half]) / 2 / ordered[0]

    @property
    def torch_us(self) -> float | None:
        """The time of torch's grouped_mm, at the clock of ``fastest``."""
        torch_ns = None if self.times is None else self.times.torch_ns
        return None if torch_ns is None else self.clock * torch_ns / 1e3


Searches = dict[Problem, dict[int, list[Search]]]


def searches(journals: Sequence[Contents]) -> Searches:
    """Every cell of every journal by product and bucket, under ``cell_of``'s key, in the journals' order."""
    by_cell: Searches = {}
    for journal in journals:
        _add(journal, by_cell)
    return by_cell


def _add(journal: Contents, by_cell: Searches) -> None:
    evidence = Timings.of(journal)
    failures: dict[tuple[Problem, int], list[Failure]] = {}
    for record in journal.records:
        if isinstance(record, Failure):
            failures.setdefault(cell_of(record.problem, record.bucket), []).append(record)
    gpus = {gpu.driver: gpu for gpu in evidence.gpus}
    for (problem, bucket), times in evidence.cells.items():
        broken = _ordered(failures.pop((problem, bucket), ()))
        clock = evidence.clock(problem, bucket) if times.plain_ns else 1.0
        search = Search(gpus[times.driver], times, clock, evidence.failed, broken)
        by_cell.setdefault(problem, {}).setdefault(bucket, []).append(search)
    for (problem, bucket), some in failures.items():
        search = Search(journal.header.gpu, None, 1.0, evidence.failed, _ordered(some))
        by_cell.setdefault(problem, {}).setdefault(bucket, []).append(search)


def _ordered(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    return tuple(sorted(failures, key=lambda failure: (failure.variant, failure.kind, failure.reason)))


def read(
    source: str, is_bundle: bool, journals: Sequence[Path], candidates: str | None, plan: BuildPlan | None
) -> Sheet:
    """Read the sheet of a bundle or journal; further ``journals`` add times, ``candidates`` names, ``plan`` cells.

    Raises
    ------
    BundleError, InputError
        if a file can't be read, or they are for different capabilities.
    """
    bundle = sound(source) if is_bundle else None
    paths = [*([] if is_bundle else [Path(source)]), *journals]
    contents = [read_journal(path) for path in paths]
    named = sound(candidates) if candidates is not None else None
    sm = _capability(source, bundle, dict(zip(paths, contents, strict=True)), candidates, named)
    name = Path(source).name
    title = f"{name}: what the {'bundle' if bundle else 'journal'} holds"
    wanted = None if plan is None else planned_on(plan, (sm,))
    return sheet(title, _facts(source, bundle, contents), bundle, contents, wanted, named.variants if named else ())


def _capability(
    source: str, bundle: Bundle | None, journals: dict[Path, Contents], candidates: str | None, named: Bundle | None
) -> int:
    """The capability of the bundles and journals of a report; InputError for several, or one without kernels."""
    sms = {source: bundle.target.sm} if bundle is not None else {}
    sms |= {str(path): journal.header.sm for path, journal in journals.items()}
    if candidates is not None and named is not None:
        sms[candidates] = named.target.sm
    (first, wanted), *rest = sms.items()
    if wanted not in supported():
        listed = ", ".join(map(str, supported()))
        raise InputError(f"'{first}' is for sm_{wanted}, of which no GPU's figures are known; known are {listed}")
    for path, sm in rest:
        if sm != wanted:
            raise InputError(f"'{path}' is for sm_{sm}, '{first}' for sm_{wanted}: a report is of one capability")
    return wanted


def _facts(source: str, bundle: Bundle | None, journals: Sequence[Contents]) -> dict[str, str]:
    gpus = [journal.header.gpu for journal in journals] + list(bundle.gpus if bundle else ())
    facts = {
        "file": source,
        "target": str(bundle.target) if bundle else f"sm_{journals[0].header.sm}",
        "measured on": "; ".join(dict.fromkeys(map(_gpu, gpus))),
    }
    if bundle is not None:
        producer = bundle.producer
        facts["built by"] = f"pretuned {producer.pretuned}, Triton {producer.triton}, ptxas {producer.ptxas}"
        facts["kernels"] = ", ".join(f"{kernel.name} revision {kernel.revision}" for kernel in bundle.kernels)
        facts["variants"] = f"{len(bundle.variants)}, {sum(map(len, bundle.cubins)) / (1 << 20):.2f} MiB of code"
    else:
        header = journals[0].header
        facts["built by"] = f"pretuned {header.pretuned}"
        facts["kernels"] = ", ".join(f"{kernel.name} revision {kernel.revision}" for kernel in header.kernels)
    return facts


def _gpu(gpu: Gpu) -> str:
    return f"{gpu.name}, {gpu.sm_count} SMs, {gpu.memory_mib} MiB, CUDA driver {cuda_version(gpu.driver)}"
