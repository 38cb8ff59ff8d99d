"""One run of the tuner: a lane a GPU, each with the cells that wait for it, and what is done when one is lost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

from ...artifacts.errors import HostError
from ..choose.bundle import Ships
from ..journal.file import Journal, described
from ..journal.records import AGAIN, DIED, Failure, Measured
from ..journal.timings import Cell, plain_of
from ..measure.job import GpuExecutor, GpuGone, MeasureJob, MeasureResult, WorkerInfo, WorkerLost, first_line
from ..process.interrupts import interrupted
from .outcome import CellsDone, Outcome, TuneObservers
from .remeasure import Remeasure
from .shortlist import contenders
from .space import TuningSpace, expected_seconds, torch_can, weight_key, weight_seconds
from .state import TuningState
from .task import Task, Worker

_RESTARTS = 3  # of a worker that does not start, one after the other
_LOOK_S = 0.5  # how often to ask for GPUs that have joined
_DESERTED_S = 60.0  # how long to wait for one where all have left
_KILLS = 2  # GPUs that a variant may take with it, alone, before it is to blame

SAME_GPU = "use the same GPU: give each worker its own with CUDA_VISIBLE_DEVICES"


class Scheduler:
    """One run of the tuner."""

    def __init__(
        self,
        ground: TuningSpace,
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
        self.ground, self.journal, self.watch = ground, journal, watch
        self.with_torch, self.quick = with_torch, quick
        self.bundle = ground.bundle
        self.lanes = [Worker(executor, hello.uuid) for executor, hello in greeted.items()]
        self.joined = joined
        self.deserted_at: float | None = None
        self.queue: deque[list[Task]] = deque()
        self.running: dict[Future[Any], Worker] = {}
        self.known = TuningState(ground, journal, ships)
        self.failures: list[Failure] = []
        self.begun = time.monotonic()
        self.end = None if budget_s is None else self.begun + budget_s
        self.total = sum(map(len, ground.cells.values()))
        self.measured = self.looked = self.unable = self.measurements = self.repeated = self.exhaustive = 0
        self.planned_s = self.done_s = 0.0
        self.stage_begun, self.stage_cells, self.stage_done = self.begun, 0, 0

    def run(self) -> Outcome:
        """Until every cell is measured, and looked at where that may find a faster one, or time is up."""
        missing = self.known.missing()
        known = self.total - len(missing)
        try:
            self._measure(dict.fromkeys(missing), known, self.total)
            left = len(missing) - self.measured - self.unable
            begun, found = time.monotonic(), {} if left else self.known.looks()
            while found and not self._over:
                self._measure(found, 0, len(found))
                found = self.known.looks()
            look_s = time.monotonic() - begun
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted: {len(self.known.cells)} of {self.total} cells are measured and kept in "
                f"'{self.journal.path}'; run the same command to go on"
            ) from None
        header = self.journal.contents.header
        return Outcome(
            sm=header.sm,
            gpu=header.gpu,
            total=self.total + self.ground.too_large,
            known=known,
            measured=self.measured,
            looked=self.looked,
            too_large=self.ground.too_large,
            unable=self.unable,
            left=left,
            to_look=len(found),
            failures=tuple(self.failures),
            measurements=self.measurements,
            repeated=self.repeated,
            exhaustive=self.exhaustive,
            seconds=time.monotonic() - self.begun,
            look_seconds=look_s,
        )

    def _measure(self, wanted: Mapping[Cell, Remeasure | None], done: int, cells: int) -> None:
        """Until each of these cells is measured, or time is up: ``done`` of the stage's ``cells`` are, before."""
        groups = self._groups(wanted)
        self.stage_begun, self.stage_done, self.stage_cells = time.monotonic(), done, cells
        self.done_s, self.planned_s = 0.0, sum(trial.seconds for group in groups for trial in group)
        left_s = self.planned_s / max(1, len(self.lanes))
        # Large first balances the GPUs; where time is short, small first measures the most.
        short = self.end is not None and left_s > self.end - self.stage_begun
        groups.sort(key=lambda group: sum(trial.seconds for trial in group), reverse=not short)
        self.queue = deque(groups)
        looking = any(look is not None for look in wanted.values())
        self.watch.on_start(CellsDone(done, cells, left_s, len(self.known.failed), looking=looking))
        self._feed()
        while self._working() or self._deserted():
            if interrupted():  # in a __del__ that Python ran then, which lets no exception out
                raise KeyboardInterrupt
            wait(self.running, timeout=_LOOK_S if self.joined else None, return_when=FIRST_COMPLETED)
            finished = [future for future in self.running if future.done()]
            for future in sorted(finished, key=lambda one: one.exception() is None):  # who is gone, first
                self._settle(self.running.pop(future), future)
            for executor in self.joined() if self.joined else ():
                lane = Worker(executor)
                self.lanes.append(lane)
                self._restart(lane)
            self._feed()

    def _groups(self, wanted: Mapping[Cell, Remeasure | None]) -> list[list[Task]]:
        """What is to be measured, by the weights that are shared; plain forms first, rows rising."""
        groups: dict[object, list[Task]] = {}
        for problem, buckets in self.ground.cells.items():
            for bucket in buckets:
                if (problem, bucket) in wanted:
                    look = wanted[problem, bucket]
                    seconds = expected_seconds(self.ground.ranked(problem, bucket)[0][0])
                    trial = Task(problem, bucket, seconds * (AGAIN if look and look.more else 1), look=look)
                    groups.setdefault(weight_key(problem), []).append(trial)
        return list(groups.values())

    @property
    def _over(self) -> bool:
        """Whether time is up."""
        return self.end is not None and time.monotonic() >= self.end

    def _working(self) -> bool:
        """Whether a cell is under way, or a worker starts that will have some."""
        if any(lane.trial is not None for lane in self.lanes):
            return True
        left = self.queue or any(lane.waiting for lane in self.lanes)
        return bool(left and self.running) and not self._over

    def _deserted(self) -> bool:
        """Whether all GPUs have left with work to do, and others may come; waits a little.

        Raises
        ------
        HostError
            after a while.
        """
        if self.lanes or not self.queue or self._over:
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
        """Give the lanes that have nothing to do their next jobs."""
        if self.lanes:
            self.deserted_at = None
        busy = set(self.running.values())
        for lane in self.lanes:
            if lane not in busy:
                self._next(lane)

    def _next(self, lane: Worker) -> None:
        while True:
            if lane.trial is not None:
                self._skip_failed(lane.trial)
            if lane.trial is None:
                if self._over:
                    return
                if not lane.waiting:
                    lane.waiting = deque(self.queue.popleft()) if self.queue else self._taken()
                    if not lane.waiting:
                        return
                lane.trial = lane.waiting.popleft()
            trial = lane.trial
            lane.sent = (trial.alone[0],) if trial.alone else self._contenders(trial)
            if lane.sent:
                with_torch = self.with_torch and torch_can(trial.problem) and not trial.alone
                more = trial.look is not None and trial.look.more
                ran = tuple(self.ground.ran(trial.problem, trial.bucket, self.known.failed))
                plain = self._plain(trial)
                job = MeasureJob(trial.problem, trial.bucket, lane.sent, with_torch, plain, more, ran, self.quick)
                self.running[lane.executor.submit(job)] = lane
                return
            self._give_up(lane, "no candidate is left")

    def _skip_failed(self, trial: Task) -> None:
        """Of those to be tried alone, another GPU may have found some to be bad meanwhile."""
        while trial.alone and self.bundle.variant(trial.alone[0]).cubin_sha256 in self.known.failed:
            trial.alone.popleft()
            trial.kills = 0

    def _taken(self) -> deque[Task]:
        """Of what waits for the GPU that has most to do, from the end of its queue, all that is done sooner elsewhere.

        That is about half of it, less where the weights take long to be made anew; in the end it is single cells.
        """
        taken: deque[Task] = deque()
        longest = max(self.lanes, key=lambda lane: lane.waiting_s)
        if not longest.waiting:
            return taken
        left_s, taken_s = longest.waiting_s, weight_seconds(longest.waiting[-1].problem)
        while longest.waiting and taken_s + longest.waiting[-1].seconds <= left_s:
            trial = longest.waiting.pop()
            left_s, taken_s = left_s - trial.seconds, taken_s + trial.seconds
            taken.appendleft(trial)
        return taken

    def _contenders(self, trial: Task) -> tuple[int, ...]:
        """The variants to measure: the modelled choice first, and what runs there today among them."""
        ranked = [i for _, i in self.ground.ranked(trial.problem, trial.bucket, self.known.failed)]
        by_config = {self.bundle.variant(i).config: i for i in reversed(ranked)}
        configs = [self.bundle.variant(i).config for i in ranked]
        ran = self.ground.ran(trial.problem, trial.bucket, self.known.failed)
        if not configs:
            return ()
        if trial.look is not None:
            named = {self.ground.index.get((trial.problem, sha)) for sha in trial.look.variants}
            return (ranked[0], *(i for i in ranked[1:] if i in named or i in ran))
        near = self.known.winners.near(trial.problem, trial.bucket)
        twin = self.known.winners.transposed(trial.problem, trial.bucket)
        elsewhere = self.ground.elsewhere(trial.problem, trial.bucket)
        running = [config for config in configs if by_config[config] in ran]
        chosen = contenders(configs, near, twin, self.ground.share, elsewhere, running)
        return tuple(dict.fromkeys((*(by_config[config] for config in chosen), *ran)))

    def _plain(self, trial: Task) -> int | None:
        """The fastest variant of the plain product, where the runtime holds the form's time against it."""
        plain = None if trial.alone or trial.split else plain_of(trial.problem)
        config = None if plain is None else self.known.winners.of(plain, trial.bucket)
        return None if plain is None or config is None else self.ground.variant(plain, config, self.known.failed)

    def _give_up(self, lane: Worker, reason: str) -> None:
        """Leave the lane's cell modelled, or as it was measured before."""
        assert lane.trial is not None
        trial = lane.trial
        self.watch.on_note(f"{trial}: left {'as it was' if trial.look else 'modelled'}: {reason}")
        if trial.look:
            self.known.looked_at((trial.problem, trial.bucket), trial.look)
        else:
            self.unable += 1
        lane.trial = None

    def _settle(self, lane: Worker, future: Future[Any]) -> None:
        """What a future brought: a worker that has started again, or the result of a job."""
        try:
            result: MeasureResult | WorkerInfo = future.result()
        except GpuGone as gone:
            self._retire(lane, gone, guilty=not lane.starts or lane.lost is not None)
            return
        except (WorkerLost, RuntimeError, HostError) as failure:
            if not isinstance(failure, WorkerLost) and not lane.starts:
                raise
            error = failure if isinstance(failure, WorkerLost) else WorkerLost(DIED, first_line(failure))
            if lane.starts >= _RESTARTS:
                self._retire(lane, error, guilty=lane.lost is not None)
                return
            lane.lost = lane.lost or error
            self._restart(lane)
            return
        if isinstance(result, WorkerInfo):
            unfit = self._unfit(lane, result)
            if unfit:
                self._retire(lane, WorkerLost(DIED, unfit), guilty=False)
            else:
                self._restarted(lane, result)
            return
        trial = lane.trial
        assert trial is not None
        for text in result.notes:
            self.watch.on_note(f"{lane.executor.name}: {text}")
        self._fail(result.failures)
        if trial.alone:
            trial.alone.popleft()
            trial.kills = 0
        elif result.measured is not None:
            self._keep(lane, trial, result.measured)
        elif not result.failures:
            self._give_up(lane, "it can't be measured here")
        if result.broken:
            self._restart(lane)

    def _keep(self, lane: Worker, trial: Task, record: Measured) -> None:
        timed = {timing.variant for timing in record.timings}
        ran = self.ground.ran(trial.problem, trial.bucket).values()
        record = replace(record, incumbents=tuple(one for one in ran if one.variant in timed))
        self.known.add([record])
        if trial.look:
            self.known.looked_at((trial.problem, trial.bucket), trial.look)
            self.looked += 1
        else:
            self.measured += 1
            self.measurements += len(record.timings)
            self.repeated += 2 * (record.duel is not None)
            self.exhaustive += len(self.ground.able[trial.problem])
        self.stage_done += 1
        self.done_s += trial.seconds
        lane.trial = None
        self.watch.on_cell(self._progress(record))

    def _fail(self, failures: Sequence[Failure]) -> None:
        if failures:
            self.known.add(failures)
            self.failures += failures
            for one in failures:
                self.watch.on_note(f"{one.problem}, {one.bucket} rows: a variant is out ({one.kind}): {one.reason}")

    def _restart(self, lane: Worker) -> None:
        lane.starts += 1
        self.running[lane.executor.start()] = lane

    def _unfit(self, lane: Worker, hello: WorkerInfo) -> str:
        """Why a worker that has started can't be used: it may be another one than before."""
        header = self.journal.contents.header
        if hello.sm != header.sm or not hello.gpu.is_like(header.gpu):
            here, wanted = described(hello.gpu, hello.sm), described(header.gpu, header.sm)
            return f"its GPU is {here}, the journal is of {wanted}"
        for other in self.lanes:
            if hello.uuid and other is not lane and other.uuid == hello.uuid:
                return f"it and {other.executor.name} {SAME_GPU}"
        return ""

    def _retire(self, lane: Worker, error: WorkerLost, *, guilty: bool) -> None:
        """A GPU is out: the others take over what it had. ``guilty``: what ran there may be the reason.

        Then each variant is tried alone, elsewhere, and one that takes several GPUs with it is to blame.
        """
        lost = lane.lost or error
        self.lanes.remove(lane)
        if not self.lanes and self.joined is None:
            raise HostError(
                f"{lane.executor.name} does not answer any more: {error}. What was measured is kept"
            ) from None
        self.watch.on_note(f"{lane.executor.name} is out: {error}")
        lane.executor.shutdown()
        trial = lane.trial
        if trial is not None and guilty:
            if trial.alone:
                trial.kills += 1
                if trial.kills >= _KILLS:
                    self._blame(trial, lost)
            elif trial.split:
                self._give_up(lane, str(lost))
            else:
                trial.alone, trial.split = deque(lane.sent), True
        if lane.trial is not None:
            lane.waiting.appendleft(lane.trial)
        if lane.waiting:
            self.queue.appendleft(list(lane.waiting))

    def _blame(self, trial: Task, lost: WorkerLost) -> None:
        """The variant that ran alone."""
        sha = self.bundle.variant(trial.alone.popleft()).cubin_sha256
        trial.kills = 0
        self._fail([Failure(trial.problem, trial.bucket, sha, lost.kind, str(lost))])

    def _restarted(self, lane: Worker, hello: WorkerInfo) -> None:
        """The GPU answers again, so what ran there is to blame, if it does it again: each variant is tried alone."""
        trial, lost = lane.trial, lane.lost
        lane.starts, lane.lost, lane.uuid = 0, None, hello.uuid
        if lost is None or trial is None:
            return
        if trial.alone:
            self._blame(trial, lost)
        elif trial.split:  # each works alone, and together they don't
            self._give_up(lane, str(lost))
        else:
            trial.alone, trial.split = deque(lane.sent), True

    def _progress(self, record: Measured) -> CellsDone:
        now = time.monotonic()
        left_s = max(0.0, self.planned_s - self.done_s) * (now - self.stage_begun) / self.done_s
        if self.end is not None:
            left_s = min(left_s, max(0.0, self.end - now))
        return CellsDone(self.stage_done, self.stage_cells, left_s, len(self.known.failed), record)
