"""Run the tuner: a worker for each GPU with its waiting cells, and recovery when a GPU is lost.

``TuningState`` below has the measured cells of a run, the cells to measure, each GPU, and the second measurement pass.
A cell is measured with a few candidates, before it is known which variants ship: a shipped variant that may be the
fastest may be missing there. And times of few rounds are some percent off in long launches: if a choice took longer
than the fastest, more rounds tell whether that is real. Such cells are measured again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from ...artifacts.errors import CompileError, HostError
from ...artifacts.records import Gpu, Problem
from ..choose.bundle import Ships
from ..choose.choices import Chosen
from ..choose.subset import MAX_LOSS
from ..journal.file import Contents, Journal, described
from ..journal.records import AGAIN, DIED, Failure, Measured, Record
from ..journal.timings import Cell, Timings, cell_of, counting, plain_of
from ..measure.job import GpuExecutor, GpuGone, MeasureJob, MeasureResult, WorkerInfo, WorkerLost, first_line
from ..process.interrupts import interrupted
from .shortlist import Winners, contenders
from .space import TuningSpace, expected_seconds, torch_can, weight_key, weight_seconds


@dataclass(frozen=True, slots=True)
class CellsDone:
    """The progress: cells ``done`` of ``total``, variants that ``failed``, and the ``last`` cell measured.

    ``second_pass`` is set when the second measurement pass starts.
    """

    done: int
    total: int
    seconds_left: float
    failed: int
    last: Measured | None = None
    second_pass: bool = False


@dataclass(frozen=True, slots=True)
class TuneObservers:
    """Callbacks: at the start of each stage, after each cell, and for notes."""

    on_start: Callable[[CellsDone], None] = lambda progress: None
    on_cell: Callable[[CellsDone], None] = lambda progress: None
    on_note: Callable[[str], None] = lambda note: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run of the tuner. Of ``total`` cells, ``in_journal`` were in the journal before.

    ``too_large`` cells do not fit the GPU's memory, ``unable`` could not be measured, ``left`` were not reached. The
    second measurement pass measured ``remeasured`` cells again in ``remeasure_seconds``, and has ``to_remeasure`` left.
    ``measurements`` (variant, cell) pairs were timed in ``measured`` cells; timing all candidates would take
    ``exhaustive``. ``repeated`` were timed once more, in duels.
    """

    sm: int
    gpu: Gpu
    total: int
    in_journal: int
    measured: int
    remeasured: int
    too_large: int
    unable: int
    left: int
    to_remeasure: int
    failures: tuple[Failure, ...]
    measurements: int
    repeated: int
    exhaustive: int
    seconds: float
    remeasure_seconds: float

    @property
    def finished(self) -> bool:
        """True if nothing is left to do."""
        return not self.left and not self.to_remeasure

    def to_dict(self) -> dict[str, object]:
        """The outcome as plain values for JSON."""
        return {
            "gpu": {
                "name": self.gpu.name,
                "sm": self.sm,
                "sm_count": self.gpu.sm_count,
                "memory_mib": self.gpu.memory_mib,
                "driver": self.gpu.driver,
            },
            "cells": self.total,
            "known": self.in_journal,
            "measured": self.measured,
            "too_large": self.too_large,
            "unable": self.unable,
            "left": self.left,
            "looked_at": self.remeasured,
            "to_look_at": self.to_remeasure,
            "finished": self.finished,
            "failed": [
                {
                    "problem": str(failure.problem),
                    "bucket": failure.bucket,
                    "variant": failure.variant.hex(),
                    "kind": failure.kind,
                    "reason": failure.reason,
                }
                for failure in self.failures
            ],
            "measurements": self.measurements,
            "repeated": self.repeated,
            "exhaustive": self.exhaustive,
            "seconds": round(self.seconds, 1),
            "look_seconds": round(self.remeasure_seconds, 1),
        }


NEAR = 0.1  # a variant within this of the fastest may be the fastest
BESIDE = 0.03  # variants within this of the fastest are timed together with missing ones
LIKELY = 1.06  # times the least estimate: 99 % of the winners in an H200's journal (benchmarks/model/shipped.py)


@dataclass(frozen=True, slots=True)
class Remeasure:
    """The variants to time in a cell, by cubin; ``more``: in more rounds than before."""

    variants: frozenset[bytes]
    more: bool


def cells_to_remeasure(
    chosen: Chosen, contents: Contents, estimates: Callable[[Problem, int], Mapping[bytes, float]]
) -> dict[Cell, Remeasure]:
    """The measured cells that lack a variant that may be the fastest, or whose choice looks too slow.

    A missing variant ships, was not timed in the cell, and may be the fastest by the model's estimate: it is timed
    together with the fastest ones. A choice looks too slow if it took over MAX_LOSS more than the fastest, by a single
    record: then all variants that may be the fastest are timed in more rounds.

    ``chosen`` is what would ship by the journal; ``estimates`` returns the cost model's estimate for each cubin that
    serves a cell. Variants that failed anywhere are left out.
    """
    records: dict[Cell, list[Measured]] = {}
    for record in contents.records:
        if isinstance(record, Measured):
            records.setdefault(cell_of(record.problem, record.bucket), []).append(record)
    evidence = Timings.of(contents)
    ships = {code.variant.cubin_sha256 for code in chosen.variants}
    cells = {}
    for problem, choices in chosen.choices.items():
        for choice in choices:
            cell, ours = cell_of(problem, choice.bucket), chosen.variants[choice.variant].variant.cubin_sha256
            able = {sha: us for sha, us in estimates(*cell).items() if sha not in evidence.failed}
            measured_ns = evidence.cells[cell].times_ns if cell in evidence.cells else {}
            times = {sha: ns for sha, ns in measured_ns.items() if sha in able}
            if not times:
                continue
            least = min(times.values())
            doubted = times.get(ours, 0) > least * (1 + MAX_LOSS) and len(counting(records[cell])) == 1
            most = LIKELY * min((us for sha, us in able.items() if sha in ships), default=0.0)
            missing = {sha for sha in ships & able.keys() if able[sha] <= most and sha not in times}
            if doubted or missing:
                ahead = {sha for sha, ns in times.items() if ns <= least * (1 + (NEAR if doubted else BESIDE))}
                cells[cell] = Remeasure(frozenset({*ahead, *missing, *({ours} if doubted else ())}), doubted)
    return cells


@dataclass(slots=True, eq=False)
class Task:
    """A cell to measure. ``alone``: variants to try one by one, since a process died over them (``split``).

    ``kills``: GPUs lost while the first of ``alone`` ran there. ``remeasure``: the variants to time again.
    """

    problem: Problem
    bucket: int
    seconds: float
    alone: deque[int] = field(default_factory=deque)
    split: bool = False
    kills: int = 0
    remeasure: Remeasure | None = None

    def __str__(self) -> str:
        return f"{self.problem}, {self.bucket} rows"


@dataclass(slots=True, eq=False)
class Worker:
    """One GPU: its waiting cells, the cell being measured, and the error that its worker was lost over."""

    executor: GpuExecutor
    uuid: str = ""
    waiting: deque[Task] = field(default_factory=deque)
    task: Task | None = None
    sent: tuple[int, ...] = ()
    lost: WorkerLost | None = None
    starts: int = 0

    @property
    def waiting_s(self) -> float:
        """The approximate seconds of the waiting cells."""
        return sum(task.seconds for task in self.waiting)


class TuningState:
    """The cells measured with these candidates (``cells``), their winners, and the variants that ``failed``.

    A cell counts as measured only if its baseline was timed too.
    """

    def __init__(self, space: TuningSpace, journal: Journal, ships: Ships | None) -> None:
        self.cells: set[Cell] = set()
        self.failed: dict[bytes, Failure] = {}
        self.winners = Winners()
        self._space, self._journal, self._ships = space, journal, ships
        self._records: list[Record] = []
        self._timed: dict[Cell, set[bytes]] = {}
        self._asked: dict[Cell, frozenset[bytes]] = {}
        self._learn(journal.contents.records)

    def add(self, records: Sequence[Record]) -> None:
        """Append records to the journal."""
        self._journal.append(records)
        self._learn(records)

    def missing(self) -> list[Cell]:
        """The cells of the space that are not measured yet."""
        wanted = ((problem, bucket) for problem, buckets in self._space.cells.items() for bucket in buckets)
        return [cell for cell in wanted if cell not in self.cells or self._lacks_incumbent(cell)]

    def to_remeasure(self) -> dict[Cell, Remeasure]:
        """The cells for the second measurement pass, without cells that it already had."""
        if self._ships is None:
            return {}
        contents = replace(self._journal.contents, records=tuple(self._records))
        try:
            cells = cells_to_remeasure(self._ships(contents), contents, self._space.estimates)
        except CompileError:  # nothing ships
            return {}
        return {
            cell: remeasure
            for cell, remeasure in cells.items()
            if cell in self.cells and not remeasure.variants <= self._asked.get(cell, frozenset())
        }

    def remeasured(self, cell: Cell, remeasure: Remeasure) -> None:
        """Mark the variants of a second measurement as asked for, whether or not they could be timed."""
        self._asked[cell] = self._asked.get(cell, frozenset()) | remeasure.variants

    def _lacks_incumbent(self, cell: Cell) -> bool:
        ran = self._space.ran(*cell, without=self.failed).values()
        return any(incumbent.variant not in self._timed[cell] for incumbent in ran)

    def _learn(self, records: Sequence[Record]) -> None:
        self._records += records
        for record in records:
            if isinstance(record, Failure):
                self.failed[record.variant] = record
                continue
            cell = cell_of(record.problem, record.bucket)
            if self._space.has(record):
                self.cells.add(cell)
                self._timed.setdefault(cell, set()).update(timing.variant for timing in record.timings)
            # Winners of cells outside the space help with near cells too.
            ours = [timing for timing in record.timings if timing.variant in self._space.configs]
            if ours:
                best = min(ours, key=lambda timing: (timing.time_ns, timing.variant)).variant
                self.winners.add(*cell, self._space.configs[best])


_RESTARTS = 3  # tries to start a worker
_LOOK_S = 0.5  # between checks for GPUs that have joined
_DESERTED_S = 60.0  # wait for a GPU when all have left
_KILLS = 2  # lost GPUs after which a variant that ran alone counts as failed

SAME_GPU = "use the same GPU: give each worker its own with CUDA_VISIBLE_DEVICES"


class Scheduler:
    """One run of the tuner."""

    def __init__(
        self,
        space: TuningSpace,
        greeted: Mapping[GpuExecutor, WorkerInfo],
        joined: Callable[[], Sequence[GpuExecutor]] | None,
        journal: Journal,
        watch: TuneObservers,
        with_torch: bool,
        budget_s: float | None,
        ships: Ships | None,
        *,
        quick: bool = False,
    ) -> None:
        self.space, self.journal, self.watch = space, journal, watch
        self.with_torch, self.quick = with_torch, quick
        self.bundle = space.bundle
        self.workers = [Worker(executor, hello.uuid) for executor, hello in greeted.items()]
        self.joined = joined
        self.deserted_at: float | None = None
        self.queue: deque[list[Task]] = deque()
        self.running: dict[Future[Any], Worker] = {}
        self.state = TuningState(space, journal, ships)
        self.failures: list[Failure] = []
        self.begun = time.monotonic()
        self.end = None if budget_s is None else self.begun + budget_s
        self.total = sum(map(len, space.cells.values()))
        self.measured = self.remeasured = self.unable = self.measurements = self.repeated = self.exhaustive = 0
        self.planned_s = self.done_s = 0.0
        self.stage_begun, self.stage_cells, self.stage_done = self.begun, 0, 0

    def run(self) -> Outcome:
        """Measure every cell, then run second passes while they may find a faster variant and time is left."""
        missing = self.state.missing()
        before = self.total - len(missing)
        try:
            self._measure(dict.fromkeys(missing), before, self.total)
            left = len(missing) - self.measured - self.unable
            begun, again = time.monotonic(), {} if left else self.state.to_remeasure()
            while again and not self._over:
                self._measure(again, 0, len(again))
                again = self.state.to_remeasure()
            remeasure_s = time.monotonic() - begun
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted: {len(self.state.cells)} of {self.total} cells are measured and kept in "
                f"'{self.journal.path}'; run the same command to go on"
            ) from None
        header = self.journal.contents.header
        return Outcome(
            sm=header.sm,
            gpu=header.gpu,
            total=self.total + self.space.too_large,
            in_journal=before,
            measured=self.measured,
            remeasured=self.remeasured,
            too_large=self.space.too_large,
            unable=self.unable,
            left=left,
            to_remeasure=len(again),
            failures=tuple(self.failures),
            measurements=self.measurements,
            repeated=self.repeated,
            exhaustive=self.exhaustive,
            seconds=time.monotonic() - self.begun,
            remeasure_seconds=remeasure_s,
        )

    def _measure(self, wanted: Mapping[Cell, Remeasure | None], done: int, cells: int) -> None:
        """Measure each of these cells, or until time is up; ``done`` of the stage's ``cells`` are measured already."""
        groups = self._groups(wanted)
        self.stage_begun, self.stage_done, self.stage_cells = time.monotonic(), done, cells
        self.done_s, self.planned_s = 0.0, sum(task.seconds for group in groups for task in group)
        left_s = self.planned_s / max(1, len(self.workers))
        # Large cells first balances the GPUs; if time is short, small cells first measures the most.
        short = self.end is not None and left_s > self.end - self.stage_begun
        groups.sort(key=lambda group: sum(task.seconds for task in group), reverse=not short)
        self.queue = deque(groups)
        second_pass = any(remeasure is not None for remeasure in wanted.values())
        self.watch.on_start(CellsDone(done, cells, left_s, len(self.state.failed), second_pass=second_pass))
        self._feed()
        while self._working() or self._deserted():
            if interrupted():  # during a __del__, which lets no exception out
                raise KeyboardInterrupt
            wait(self.running, timeout=_LOOK_S if self.joined else None, return_when=FIRST_COMPLETED)
            finished = [future for future in self.running if future.done()]
            for future in sorted(finished, key=lambda done: done.exception() is None):  # lost workers first
                self._settle(self.running.pop(future), future)
            for executor in self.joined() if self.joined else ():
                worker = Worker(executor)
                self.workers.append(worker)
                self._restart(worker)
            self._feed()

    def _groups(self, wanted: Mapping[Cell, Remeasure | None]) -> list[list[Task]]:
        """Group the cells to measure by shared weights, in the order of the space: plain forms first, rows rising."""
        groups: dict[object, list[Task]] = {}
        for problem, buckets in self.space.cells.items():
            for bucket in buckets:
                if (problem, bucket) in wanted:
                    remeasure = wanted[problem, bucket]
                    seconds = expected_seconds(self.space.ranked(problem, bucket)[0][0])
                    task = Task(
                        problem, bucket, seconds * (AGAIN if remeasure and remeasure.more else 1), remeasure=remeasure
                    )
                    groups.setdefault(weight_key(problem), []).append(task)
        return list(groups.values())

    @property
    def _over(self) -> bool:
        """True if time is up."""
        return self.end is not None and time.monotonic() >= self.end

    def _working(self) -> bool:
        """True if a cell is being measured, or a starting worker will get some."""
        if any(worker.task is not None for worker in self.workers):
            return True
        left = self.queue or any(worker.waiting for worker in self.workers)
        return bool(left and self.running) and not self._over

    def _deserted(self) -> bool:
        """Wait a little if all GPUs have left with work to do and others may join; True if the run goes on.

        Raises
        ------
        HostError
            if none joins within ``_DESERTED_S``.
        """
        if self.workers or not self.queue or self._over:
            return False
        now = time.monotonic()
        if self.deserted_at is None:
            self.deserted_at = now
            self.watch.on_note(f"all workers have left; waiting {_DESERTED_S:.0f} s for others")
        if now - self.deserted_at >= _DESERTED_S:
            raise HostError("all workers have left, and no other has come. What was measured is kept")
        time.sleep(_LOOK_S)
        return True

    def _feed(self) -> None:
        """Give the idle workers their next jobs."""
        if self.workers:
            self.deserted_at = None
        busy = set(self.running.values())
        for worker in self.workers:
            if worker not in busy:
                self._next(worker)

    def _next(self, worker: Worker) -> None:
        while True:
            if worker.task is not None:
                self._skip_failed(worker.task)
            if worker.task is None:
                if self._over:
                    return
                if not worker.waiting:
                    worker.waiting = deque(self.queue.popleft()) if self.queue else self._taken()
                    if not worker.waiting:
                        return
                worker.task = worker.waiting.popleft()
            task = worker.task
            worker.sent = (task.alone[0],) if task.alone else self._contenders(task)
            if worker.sent:
                with_torch = self.with_torch and torch_can(task.problem) and not task.alone
                more = task.remeasure is not None and task.remeasure.more
                ran = tuple(self.space.ran(task.problem, task.bucket, self.state.failed))
                plain = self._plain(task)
                job = MeasureJob(task.problem, task.bucket, worker.sent, with_torch, plain, more, ran, self.quick)
                self.running[worker.executor.submit(job)] = worker
                return
            self._give_up(worker, "no candidate is left")

    def _skip_failed(self, task: Task) -> None:
        """Drop variants that another GPU has found to fail from those to be tried alone."""
        while task.alone and self.bundle.variant(task.alone[0]).cubin_sha256 in self.state.failed:
            task.alone.popleft()
            task.kills = 0

    def _taken(self) -> deque[Task]:
        """Take waiting cells from the busiest GPU's end, as many as finish sooner here.

        That is about half of them, fewer if the weights take long to make, and single cells in the end.
        """
        taken: deque[Task] = deque()
        longest = max(self.workers, key=lambda worker: worker.waiting_s)
        if not longest.waiting:
            return taken
        left_s, taken_s = longest.waiting_s, weight_seconds(longest.waiting[-1].problem)
        while longest.waiting and taken_s + longest.waiting[-1].seconds <= left_s:
            task = longest.waiting.pop()
            left_s, taken_s = left_s - task.seconds, taken_s + task.seconds
            taken.appendleft(task)
        return taken

    def _contenders(self, task: Task) -> tuple[int, ...]:
        """The variants to measure: the modelled choice first, the baseline among them."""
        ranked = [i for _, i in self.space.ranked(task.problem, task.bucket, self.state.failed)]
        by_config = {self.bundle.variant(i).config: i for i in reversed(ranked)}
        configs = [self.bundle.variant(i).config for i in ranked]
        ran = self.space.ran(task.problem, task.bucket, self.state.failed)
        if not configs:
            return ()
        if task.remeasure is not None:
            named = {self.space.index.get((task.problem, sha)) for sha in task.remeasure.variants}
            return (ranked[0], *(i for i in ranked[1:] if i in named or i in ran))
        near = self.state.winners.near(task.problem, task.bucket)
        twin = self.state.winners.other_fusion(task.problem, task.bucket)
        elsewhere = self.space.elsewhere(task.problem, task.bucket)
        running = [config for config in configs if by_config[config] in ran]
        chosen = contenders(configs, near, twin, self.space.share, elsewhere, running)
        return tuple(dict.fromkeys((*(by_config[config] for config in chosen), *ran)))

    def _plain(self, task: Task) -> int | None:
        """The fastest variant of the plain product, if the runtime compares the fusion's time with it."""
        plain = None if task.alone or task.split else plain_of(task.problem)
        config = None if plain is None else self.state.winners.of(plain, task.bucket)
        return None if plain is None or config is None else self.space.variant(plain, config, self.state.failed)

    def _give_up(self, worker: Worker, reason: str) -> None:
        """Leave the worker's cell modelled, or as it was measured before."""
        assert worker.task is not None
        task = worker.task
        self.watch.on_note(f"{task}: left {'as it was' if task.remeasure else 'modelled'}: {reason}")
        if task.remeasure:
            self.state.remeasured((task.problem, task.bucket), task.remeasure)
        else:
            self.unable += 1
        worker.task = None

    def _settle(self, worker: Worker, future: Future[Any]) -> None:
        """Handle a future: a worker that has restarted, or the result of a job."""
        try:
            result: MeasureResult | WorkerInfo = future.result()
        except GpuGone as gone:
            self._retire(worker, gone, guilty=not worker.starts or worker.lost is not None)
            return
        except (WorkerLost, RuntimeError, HostError) as failure:
            if not isinstance(failure, WorkerLost) and not worker.starts:
                raise
            error = failure if isinstance(failure, WorkerLost) else WorkerLost(DIED, first_line(failure))
            if worker.starts >= _RESTARTS:
                self._retire(worker, error, guilty=worker.lost is not None)
                return
            worker.lost = worker.lost or error
            self._restart(worker)
            return
        if isinstance(result, WorkerInfo):
            unfit = self._unfit(worker, result)
            if unfit:
                self._retire(worker, WorkerLost(DIED, unfit), guilty=False)
            else:
                self._restarted(worker, result)
            return
        task = worker.task
        assert task is not None
        for text in result.notes:
            self.watch.on_note(f"{worker.executor.name}: {text}")
        self._fail(result.failures)
        if task.alone:
            task.alone.popleft()
            task.kills = 0
        elif result.measured is not None:
            self._keep(worker, task, result.measured)
        elif not result.failures:
            self._give_up(worker, "it can't be measured here")
        if result.broken:
            self._restart(worker)

    def _keep(self, worker: Worker, task: Task, record: Measured) -> None:
        timed = {timing.variant for timing in record.timings}
        ran = self.space.ran(task.problem, task.bucket).values()
        record = replace(record, incumbents=tuple(incumbent for incumbent in ran if incumbent.variant in timed))
        self.state.add([record])
        if task.remeasure:
            self.state.remeasured((task.problem, task.bucket), task.remeasure)
            self.remeasured += 1
        else:
            self.measured += 1
            self.measurements += len(record.timings)
            self.repeated += 2 * (record.duel is not None)
            self.exhaustive += len(self.space.able[task.problem])
        self.stage_done += 1
        self.done_s += task.seconds
        worker.task = None
        self.watch.on_cell(self._progress(record))

    def _fail(self, failures: Sequence[Failure]) -> None:
        if failures:
            self.state.add(failures)
            self.failures += failures
            for failure in failures:
                cell, why = f"{failure.problem}, {failure.bucket} rows", failure.reason
                self.watch.on_note(f"{cell}: a variant is out ({failure.kind}): {why}")

    def _restart(self, worker: Worker) -> None:
        worker.starts += 1
        self.running[worker.executor.start()] = worker

    def _unfit(self, worker: Worker, hello: WorkerInfo) -> str:
        """Why a restarted worker can't be used: its GPU may be another one than before. Empty if it can."""
        header = self.journal.contents.header
        if hello.sm != header.sm or not hello.gpu.is_like(header.gpu):
            here, wanted = described(hello.gpu, hello.sm), described(header.gpu, header.sm)
            return f"its GPU is {here}, the journal is of {wanted}"
        for other in self.workers:
            if hello.uuid and other is not worker and other.uuid == hello.uuid:
                return f"it and {other.executor.name} {SAME_GPU}"
        return ""

    def _retire(self, worker: Worker, error: WorkerLost, *, guilty: bool) -> None:
        """Drop a lost GPU and pass its cells on. ``guilty``: a variant that ran there may be the reason.

        Then each variant is tried alone, elsewhere; a variant that loses several GPUs is recorded as failed.
        """
        lost = worker.lost or error
        self.workers.remove(worker)
        if not self.workers and self.joined is None:
            raise HostError(
                f"{worker.executor.name} does not answer any more: {error}. What was measured is kept"
            ) from None
        self.watch.on_note(f"{worker.executor.name} is out: {error}")
        worker.executor.shutdown()
        task = worker.task
        if task is not None and guilty:
            if task.alone:
                task.kills += 1
                if task.kills >= _KILLS:
                    self._blame(task, lost)
            elif task.split:
                self._give_up(worker, str(lost))
            else:
                task.alone, task.split = deque(worker.sent), True
        if worker.task is not None:
            worker.waiting.appendleft(worker.task)
        if worker.waiting:
            self.queue.appendleft(list(worker.waiting))

    def _blame(self, task: Task, lost: WorkerLost) -> None:
        """Record the variant that ran alone as failed."""
        sha = self.bundle.variant(task.alone.popleft()).cubin_sha256
        task.kills = 0
        self._fail([Failure(task.problem, task.bucket, sha, lost.kind, str(lost))])

    def _restarted(self, worker: Worker, hello: WorkerInfo) -> None:
        """Go on with a restarted GPU. The variants of the job that it was lost in are tried one by one."""
        task, lost = worker.task, worker.lost
        worker.starts, worker.lost, worker.uuid = 0, None, hello.uuid
        if lost is None or task is None:
            return
        if task.alone:
            self._blame(task, lost)
        elif task.split:  # each variant works alone, and together they don't
            self._give_up(worker, str(lost))
        else:
            task.alone, task.split = deque(worker.sent), True

    def _progress(self, record: Measured) -> CellsDone:
        now = time.monotonic()
        left_s = max(0.0, self.planned_s - self.done_s) * (now - self.stage_begun) / self.done_s
        if self.end is not None:
            left_s = min(left_s, max(0.0, self.end - now))
        return CellsDone(self.stage_done, self.stage_cells, left_s, len(self.state.failed), record)
