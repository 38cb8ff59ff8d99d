"""The tuner: rank the candidates of cells, hand out jobs to GPUs, and write the results to a journal.

    outcome = tune_problems({problem: (16, 32)}, "candidates.msgpack", Path("h200.journal"), budget_s=600)
    bundle = measured_bundle(plan, read_candidates("candidates.msgpack"), read_journal(Path("h200.journal")))

``measured_bundle`` is in aot/choose/bundle.py. The tuner imports no torch and touches no GPU: it hands jobs to a
``GpuExecutor`` (aot/measure/job.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...artifacts.bundle_file import BundleFile, open_bundle
from ...artifacts.errors import BundleError, HostError, InputError
from ...artifacts.records import Gpu, Kernel, LocalGpu, Op, Problem
from ..choose.bundle import Ships
from ..choose.incumbents import Around, RunsOn
from ..executors.local import local_gpus
from ..journal.file import Header, described, open_journal
from ..measure.job import GpuExecutor, WorkerInfo, WorkerLost, first_line
from .scheduler import SAME_GPU, CellsDone, Outcome, Scheduler, TuneObservers
from .shortlist import SHARE
from .space import TuningSpace

__all__ = ["DEFAULT_BUDGET_S", "CellsDone", "Entrants", "NoGpu", "Outcome", "TuneObservers", "tune_problems"]

DEFAULT_BUDGET_S = 600.0


class NoGpu(HostError):
    """Nothing can be measured here: a GPU is missing, or can't be used."""


@dataclass(frozen=True, slots=True)
class Entrants:
    """The candidates of a cell to measure, and in how many rounds.

    A ``share`` of them is measured. ``like`` is a bundle, as of another GPU of this capability: its choices are
    measured too. So is the baseline that ``runs`` returns for a GPU (``choose.incumbents``). ``quick`` measures in
    fewer rounds. ``around`` returns measured cells that improve the cost model's ranking.
    """

    share: float = SHARE
    like: str | Path | None = None
    runs: RunsOn | None = None
    quick: bool = False
    around: Around | None = None


def tune_problems(
    problems: Mapping[Problem, Sequence[int]],
    candidates: str | Path,
    journal: Path,
    *,
    budget_s: float | None = DEFAULT_BUDGET_S,
    gpus: Sequence[int] | None = None,
    executors: Sequence[GpuExecutor] | None = None,
    joined: Callable[[], Sequence[GpuExecutor]] | None = None,
    with_torch: bool = True,
    entrants: Entrants | None = None,
    ships: Ships | None = None,
    observers: TuneObservers | None = None,
) -> Outcome:
    """Measure the cells that ``journal`` does not have yet, on this machine's GPUs, until done or out of time.

    Parameters
    ----------
    problems
        Problem -> its buckets of M.
    candidates
        A bundle of compiled variants (``aot compile``), for the capability of the GPUs.
    journal
        Created if missing, else continued. Another tuner of this journal waits.
    budget_s
        Seconds after which no more jobs are begun; None for no limit.
    gpus
        Ordinals; None for all of this machine.
    executors
        Used instead of this machine's GPUs; started here, shut down by the caller.
    joined
        Called regularly for executors that have joined. With it, executors that do not start are left out, and if all
        are gone the tuner waits for others.
    with_torch
        Time torch's grouped_mm for the plain bf16 problems too.
    entrants
        The candidates of a cell to measure.
    ships
        From a journal to what would ship (``choose.bundle.shipping``). Once no cell is missing, a second pass measures
        cells again that lack a shipped variant that may be the fastest, or whose choice took over 2 % more than the
        fastest. None: no second pass.

    Raises
    ------
    InputError
        if the candidates or the journal are for another GPU, or a bundle can't be read (BundleError).
    NoGpu
        if there is no GPU, or it can't be used.
    HostError
        if a GPU is lost, or the journal can't be written.
    KeyboardInterrupt
        with a message that says how much is kept.
    """
    watch = observers or TuneObservers()
    with open_bundle(candidates) as bundle, contextlib.ExitStack() as stack:
        entrants = entrants or Entrants()
        like = _other_bundle(entrants.like, bundle, stack)
        if executors is None:
            try:
                executors = stack.enter_context(local_gpus(str(candidates), bundle.digest, gpus))
            except HostError as error:
                raise NoGpu(str(error)) from None
        greeted = _greet(executors, watch, lenient=joined is not None)
        sm, gpu = _same_gpu(greeted, bundle)
        opened = stack.enter_context(open_journal(journal, Header(sm, gpu, _measured_kernels(bundle)), watch.on_note))
        running = {} if entrants.runs is None else entrants.runs(LocalGpu(sm, gpu))
        around = None if entrants.around is None else entrants.around(LocalGpu(sm, gpu))
        space = TuningSpace.of(problems, bundle, gpu, sm, entrants.share, like, running, around)
        return Scheduler(space, greeted, joined, opened, watch, with_torch, budget_s, ships, quick=entrants.quick).run()


def _measured_kernels(bundle: BundleFile) -> tuple[Kernel, ...]:
    """The kernels of the variants, each in its first revision; code carried from other bundles comes last."""
    revisions: dict[str, int] = {}
    for variant in bundle.variants():
        if isinstance(variant.op, Op):
            revisions.setdefault(variant.kernel, variant.revision)
    return tuple(kernel for kernel in bundle.kernels if revisions.get(kernel.name) == kernel.revision)


def _other_bundle(named: str | Path | None, candidates: BundleFile, stack: contextlib.ExitStack) -> BundleFile | None:
    """Open another bundle of the candidates' capability, if one is named."""
    if named is None:
        return None
    other = stack.enter_context(open_bundle(named))
    if other.target != candidates.target:
        raise InputError(
            f"bundle '{named}': it is for {other.target}, the candidates are for {candidates.target}. Name one for the "
            "same capability, or none"
        )
    return other


def _greet(executors: Sequence[GpuExecutor], watch: TuneObservers, *, lenient: bool) -> dict[GpuExecutor, WorkerInfo]:
    """Start the executors. ``lenient`` drops those that fail to start, unless all do."""
    started = [executor.start() for executor in executors]
    greeted: dict[GpuExecutor, WorkerInfo] = {}
    last = NoGpu("there is no GPU to measure on")
    for executor, future in zip(executors, started, strict=True):
        try:
            greeted[executor] = future.result()
        except BundleError:
            raise
        except (WorkerLost, RuntimeError, HostError) as error:
            last = NoGpu(f"{executor.name}: its worker does not start: {first_line(error)}")
            if not lenient:
                raise last from None
            watch.on_note(f"left out: {last}")
            executor.shutdown()
        else:
            for text in greeted[executor].notes:
                watch.on_note(f"{executor.name}: {text}")
    if not greeted:
        raise last
    return greeted


def _same_gpu(greeted: Mapping[GpuExecutor, WorkerInfo], bundle: BundleFile) -> tuple[int, Gpu]:
    """The identity that all GPUs share: a journal holds the times of one kind of GPU."""
    first = next(iter(greeted.values()))
    users: dict[str, str] = {}
    for executor, other in greeted.items():
        if other.sm != first.sm or not other.gpu.is_like(first.gpu):
            raise InputError(
                f"the GPUs differ: {described(first.gpu, first.sm)} and {described(other.gpu, other.sm)}. "
                "Choose equal ones (--gpus, or the resources of the Dask workers), and give each kind a journal of "
                "its own"
            )
        if other.uuid in users:
            raise InputError(f"{users[other.uuid]} and {executor.name} {SAME_GPU}")
        if other.uuid:
            users[other.uuid] = executor.name
    if not bundle.target.runs_on(first.sm):
        raise InputError(
            f"candidates '{bundle.path}': compiled for {bundle.target}, this is {described(first.gpu, first.sm)}: "
            f"aot compile --sm {first.sm}"
        )
    return first.sm, first.gpu
