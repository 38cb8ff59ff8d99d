"""Measure on one GPU, in a worker process. Executors call only ``hello(setup)`` and ``run(setup, job)``.

A job measures the candidates of one cell. Each is loaded, launched by the runtime's launcher on NaN-poisoned memory,
compared with the reference, and captured in a CUDA graph. Then all graphs are replayed in turns, with a flush of the L2
cache before each, for two distributions of rows over the experts. The fastest is timed once more against the baseline,
or against the modelled choice if there is no baseline.

The check of linear results is Freivalds' (``NumericsCheck``), without a second GEMM. For a vector r of random signs,
``y @ r`` must be ``x @ (w[g].T @ r)``, which costs M * (N + K) instead of M * N * K operations. The expectation of
||(y - ref) @ r||^2 over r is ||y - ref||^2 (Frobenius), so this estimates the usual error. All sums are fp32 (IEEE).
R. Freivalds, "Probabilistic machines can use less running time", IFIP Congress 1977.

For silu in the epilogue (``GatedNumericsCheck``) a random column of each eight of y is computed again, as
silu(gate) * up of the fp32 product (IEEE). Kernels load, multiply and store at least 8 columns at once, so this finds
their errors at an eighth of the product's cost. All elements must be finite too.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch.nn import functional

from ...artifacts.bundle_file import open_bundle
from ...artifacts.errors import BundleError, CudaError, HostError, InputError
from ...artifacts.records import DType, Fusion, Layout, Op, Problem
from ...kernels.entry import FLAGS
from ...kernels.spec import Config, gemm_of, result_columns, takes_codes_of_x
from ...runtime.driver.device import local_gpu
from ...runtime.launch import gemm
from ...runtime.weights.dequantised import Dequantised
from ...runtime.weights.expert_weights import ExpertWeights
from ...runtime.weights.row_codes import codes_of_rows
from ..journal.records import AGAIN, FAULT, LONG_NS, ROUTINGS, WRONG, Failure, Measured, Rematch, Timing
from ..journal.timings import LEAST_BAND, plain_of
from ..process.gpus import busy, gpu_uuid
from .clock import Clock, Replayed
from .inputs import (
    MAX_ERROR,
    TORCH,
    Tensors,
    caller,
    measured_routings,
    quantised_weights,
    top_k_of,
    torch_caller,
    weights,
)
from .job import MeasureJob, MeasureResult, Setup, WorkerInfo

MAX_ROW_ERROR = 0.1  # a row's error over the rows' root mean square; a wrong row has about 1
# Vectors that results are projected on. A row nearly orthogonal to a single vector looks wrong, because of rounding.
# Averages over many rows hide this; with few rows, like one expert's in dW, eight vectors do.
_VECTORS = 8
_MANY_ROWS = 256
_CHUNK_ELEMENTS = 1 << 26


class NumericsCheck:
    """The reference of one weight, for the results of all problems that use it: Freivalds' check."""

    def __init__(
        self,
        problem: Problem,
        weights: Sequence[torch.Tensor] | torch.Tensor | ExpertWeights | None,
        device: torch.device,
    ) -> None:
        g = torch.Generator(device).manual_seed(3)
        columns = problem.K if problem.op is Op.DW else gemm_of(problem).columns
        self._signs = torch.randint(0, 2, (columns, _VECTORS), generator=g, device=device).float() * 2 - 1
        self._w_kn = problem.op is not Op.DW and gemm_of(problem).w_kn
        self._projected = torch.empty(0, device=device)  # [E, reduction, vectors]
        if weights is not None:
            if isinstance(weights, ExpertWeights):
                weights = Dequantised(weights, torch.float32, transposed=False)
            parts = [(w if self._w_kn else w.T).float() @ self._signs for w in weights]
            self._projected = torch.stack(parts)

    def reference(self, on: Tensors, counts: list[int]) -> torch.Tensor:
        """The expected ``result @ signs``: [M, vectors] in the sorted order of rows, or for dW [E, N, vectors]."""
        if on.problem.op is Op.DW:
            return self._weight_reference(on, counts)
        vectors = 1 if on.M > _MANY_ROWS else _VECTORS
        expert = torch.repeat_interleave(
            torch.arange(len(counts), device=on.rows.device), torch.tensor(counts, device=on.rows.device)
        )
        gathered = Fusion.GATHER in on.problem.fusion
        width = on.rows.shape[1] * vectors
        parts = []
        for here in _chunks(on.M, width):
            rows = on.read(on.index[here].long() // on.top_k if gathered and on.index is not None else here)
            parts.append(torch.einsum("mk,mkv->mv", rows.float(), self._projected[expert[here], :, :vectors]))
        return torch.cat(parts)

    def _weight_reference(self, on: Tensors, counts: list[int]) -> torch.Tensor:
        dy, x, start, parts = on.rows, on.dense, 0, []
        for count in counts:
            total = torch.zeros(dy.shape[1], _VECTORS, device=dy.device)
            for here in _chunks(count, dy.shape[1] + x.shape[1], start):
                total += dy[here].float().T @ (x[here].float() @ self._signs)
            parts.append(total)
            start += count
        return torch.stack(parts)

    def error(self, on: Tensors, reference: torch.Tensor) -> float:
        """The relative error of ``on.result``: NaN if an element is not finite, infinite if a single row is wrong."""
        signs = self._signs[:, : reference.shape[-1]]
        flat = on.result.reshape(-1, on.result.shape[-1])
        got = torch.cat([flat[here].float() @ signs for here in _chunks(flat.shape[0], flat.shape[1])])
        if on.index is not None and Fusion.SCATTER in on.problem.fusion:
            got = got[on.index.long()]
            if on.row_weights is not None:
                got = got / on.row_weights[on.index.long(), None]
        off = got.reshape(reference.shape) - reference
        total = reference.square().sum(dtype=torch.float64).sqrt()
        relative = float(off.square().sum(dtype=torch.float64).sqrt() / total)
        per_expert = reference if on.problem.op is Op.DW else reference[None]
        scale = per_expert.square().mean(dim=(1, 2)).sqrt()  # experts without rows: any error is too much
        worst = (off if on.problem.op is Op.DW else off[None]).abs().amax(dim=(1, 2))
        within = bool((worst <= MAX_ROW_ERROR * scale).all())
        return relative if within or relative != relative else float("inf")


def _chunks(rows: int, width: int, start: int = 0) -> list[slice]:
    """Slices of rows of limited size."""
    step = max(1, _CHUNK_ELEMENTS // max(1, width))
    return [slice(start + at, start + min(at + step, rows)) for at in range(0, rows, step)]


_EACH = 8  # one column of so many is checked
_GROUP = 8  # checked columns that are summed, out of 64 columns of y
_GATED_CHUNK_ELEMENTS = 1 << 26


class GatedNumericsCheck:
    """The reference of one weight for products with silu in the epilogue: one column in eight of y."""

    def __init__(self, problem: Problem, weights: torch.Tensor) -> None:
        gemm = gemm_of(problem)
        half, device = gemm.columns // 2, weights.device
        g = torch.Generator(device).manual_seed(3)
        groups = torch.arange(0, half, _EACH, device=device)
        picked = groups + torch.randint(0, _EACH, groups.shape, generator=g, device=device)
        self._columns = picked.clamp(max=half - 1)
        both = torch.cat([self._columns, half + self._columns])
        self._w = weights.index_select(2 if gemm.w_kn else 1, both)
        self._w_kn = gemm.w_kn

    def reference(self, on: Tensors, counts: list[int]) -> torch.Tensor:
        """The checked columns of ``result``: float32 [M, columns] in the sorted order of rows."""
        index = on.index if Fusion.GATHER in on.problem.fusion else None
        parts: list[torch.Tensor] = []
        start = 0
        step = max(1, _GATED_CHUNK_ELEMENTS // (on.rows.shape[1] + 2 * len(self._columns)))
        for w, count in zip(self._w, counts, strict=True):
            matrix = (w if self._w_kn else w.T).float()
            for first in range(start, start + count, step):
                here = slice(first, min(first + step, start + count))
                rows = on.rows[here] if index is None else on.rows[index[here].long() // on.top_k]
                gate, up = (rows.float() @ matrix).chunk(2, 1)
                parts.append(functional.silu(gate) * up)
            start += count
        return torch.cat(parts)

    def error(self, on: Tensors, reference: torch.Tensor) -> float:
        """The relative error of ``on.result``: NaN if not all is finite, infinite if 64 columns of a row are wrong."""
        got = on.result[: len(reference), self._columns].float()
        off = (got - reference).square()
        total = reference.square().sum(dtype=torch.float64).sqrt()
        relative = float(off.sum(dtype=torch.float64).sqrt() / total)
        if not bool(torch.isfinite(on.result).all()):
            return float("nan")
        short = -off.shape[1] % _GROUP
        groups = functional.pad(off, (0, short)).view(len(off), -1, _GROUP).sum(2)
        scale = reference.square().mean()
        within = bool((groups <= _GROUP * MAX_ROW_ERROR**2 * scale).all())
        return relative if within or relative != relative else float("inf")


_TIMING_US = 10_000.0  # for a candidate on one routing, without flushes
_DUEL_US = 25_000.0
_ROUNDS = (5, 20)  # least and most
_DUEL_ROUNDS = (7, 30)
_QUICK = 0.4  # factor on times and rounds of a quick job
_LONG_ROUNDS = 3
_WARM_UP_ROUNDS = 200
_NOISY = 0.05  # a larger standard error of a median is reported
_REFERENCE_SIZE = 4096
_STEADY_SCATTER = 0.1
_RANDOM_ELEMENTS = 1 << 26  # generated at once

Judges: TypeAlias = NumericsCheck | GatedNumericsCheck

_benches: dict[Setup, Bench] = {}


def hello(setup: Setup) -> WorkerInfo:
    """Start the GPU, warm it up, and describe it.

    Raises
    ------
    HostError
        if torch can't use it.
    """
    if not torch.cuda.is_available():
        built = f"it is built for CUDA {torch.version.cuda}" if torch.version.cuda else "it is built without CUDA"
        raise HostError(f"torch {torch.__version__} can't use this machine's GPU: {built}")
    bench = _bench(setup)
    return WorkerInfo(bench.local.sm, bench.local.gpu, bench.notes, gpu_uuid(setup.device))


def run(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Measure a job. A variant's errors are in the result; ``broken`` asks for a new process."""
    return _bench(setup).run(job)


def _bench(setup: Setup) -> Bench:
    if setup not in _benches:
        _benches[setup] = Bench(setup)
    return _benches[setup]


class Bench:
    """One GPU with the candidates loaded on it, and the tensors of the weights measured last."""

    def __init__(self, setup: Setup) -> None:
        self.bundle = open_bundle(setup.candidates)
        if self.bundle.digest != setup.digest:
            raise InputError(f"candidates '{setup.candidates}': the file was changed meanwhile; start again")
        self.notes = tuple(busy(setup.device))
        torch.cuda.set_device(setup.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        self.device = torch.device("cuda", setup.device)
        self.local = local_gpu(setup.device)
        self.clock = Clock(self.device)
        self._kernels: dict[int, gemm.LoadedKernel] = {}
        self._weights: tuple[object, torch.Tensor | ExpertWeights] | None = None
        self._judges: dict[object, Judges] = {}
        self._pools: dict[str, torch.Tensor] = {}
        self._routings: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self._current: int | None = None
        size = _REFERENCE_SIZE
        square = torch.randn(size, size, device=self.device).to(torch.bfloat16)
        self._held = square, torch.empty_like(square)  # a graph holds addresses, not tensors
        self._warm_up()
        self._reference = self.clock.capture(lambda: torch.mm(square, square, out=self._held[1]))
        self.clock.rounds_us([self._reference], _WARM_UP_ROUNDS)
        times = sorted(self.clock.rounds_us([self._reference], 20)[0])
        self._reference_us = statistics.median(times)
        if times[17] > self._reference_us * (1 + _STEADY_SCATTER):
            self.notes += (
                f"times scatter, one matrix product took {times[0]:.0f} to {times[-1]:.0f} us: is it in use by others?",
            )

    def _warm_up(self) -> None:
        """Run a job without variants once on tiny tensors, so that torch loads all its modules now."""
        with torch.no_grad():
            problems = [Problem(op, DType.BF16, 8, 64, 64) for op in Op]
            for problem in (*problems, problems[0]._replace(fusion=Fusion.SILU)):
                on = self._tensors(problem, 16)
                judge = self._judge(problem, on)
                for m_sizes in measured_routings(problem.E, 16, self.device):
                    judge.error(on, judge.reference(on, m_sizes.tolist()))

    def run(self, job: MeasureJob) -> MeasureResult:
        """Measure a job's candidates."""
        try:
            with torch.cuda.device(self.device), torch.no_grad():
                return self._measured(job)
        except torch.cuda.OutOfMemoryError as error:
            self._current = self._weights = None
            self._judges.clear()
            self._pools.clear()
            self.clock.release()
            torch.cuda.empty_cache()
            return MeasureResult(None, notes=(f"{job.problem}, {job.bucket} rows: {str(error).splitlines()[0]}",))
        except (RuntimeError, CudaError) as error:
            if not isinstance(error, CudaError) and "CUDA" not in str(error):
                raise
            return MeasureResult(None, self._blamed(job, error), broken=True)

    def _blamed(self, job: MeasureJob, error: Exception) -> tuple[Failure, ...]:
        """Record a CUDA error as the failure of the variant that ran last; the process is spoilt."""
        if self._current is None:
            raise error
        return (self._failure(job, self._current, FAULT, str(error).splitlines()[0]),)

    def _failure(self, job: MeasureJob, i: int, kind: str, reason: str) -> Failure:
        variant = self.bundle.variant(i)
        return Failure(
            job.problem, job.bucket, variant.cubin_sha256, kind, f"{Config.from_pairs(variant.config)}: {reason}"
        )

    def _measured(self, job: MeasureJob) -> MeasureResult:
        plain = None if job.plain is None else plain_of(job.problem)
        beside = None if plain is None else self._tensors(plain, job.bucket)  # first: its buffers are larger
        on = self._tensors(job.problem, job.bucket)
        routings = self._routed(job.problem.E, job.bucket)
        failures: list[Failure] = []
        graphs: dict[int, list[Replayed]] = {}
        errors: dict[int, float] = {}
        judge = self._judge(job.problem, on)
        references = [judge.reference(on, m_sizes.tolist()) for m_sizes in routings]
        for i in job.contenders:
            with self._guilty(i):
                try:
                    calls = [caller(self._kernel(i), on, m_sizes) for m_sizes in routings]
                except (CudaError, BundleError) as error:
                    failures.append(self._failure(job, i, FAULT, str(error)))
                    continue
                errors[i] = max(
                    self._error(judge, on, call, reference) for call, reference in zip(calls, references, strict=True)
                )
                if not errors[i] < MAX_ERROR:
                    reason = f"relative error {errors[i]:.2g}, wanted below {MAX_ERROR}"
                    failures.append(self._failure(job, i, WRONG, reason))
                    continue
                graphs[i] = [self.clock.capture(call, warm=False) for call in calls]
        if job.contenders[0] not in graphs:  # the next in the model's order becomes its choice
            return MeasureResult(None, tuple(failures))
        if job.plain is not None and beside is not None:
            peers = self._plain_graphs(job.plain, beside, routings)
        else:
            peers = self._torch_graphs(on, routings) if job.with_torch else None
        measured = self._timed(job, graphs, peers, errors)
        noise = max(timing.noise for timing in measured.timings)
        notes = (f"{job.problem}, {job.bucket} rows: times scatter by {noise:.0%}; is the GPU in use by others?",)
        return MeasureResult(measured, tuple(failures), notes=notes if noise > _NOISY else ())

    @contextlib.contextmanager
    def _guilty(self, i: int) -> Iterator[None]:
        """Attribute CUDA errors in this context to variant ``i``."""
        self._current = i
        yield
        torch.cuda.synchronize(self.device)
        self._current = None

    def _error(self, judge: Judges, on: Tensors, call: Callable[[], None], reference: torch.Tensor) -> float:
        on.result.fill_(float("nan"))
        call()
        return judge.error(on, reference)

    def _timed(
        self, job: MeasureJob, graphs: dict[int, list[Replayed]], peers: list[Replayed] | None, errors: dict[int, float]
    ) -> Measured:
        """Time the graphs in turns. ``peers``: torch's call, or for a fusion the plain product."""
        before = self._drift()
        order = list(graphs)
        modelled = order[0]
        times: dict[int, list[list[float]]] = {i: [] for i in order}
        peer_ns = []
        for routing in range(len(ROUTINGS)):
            together = [graphs[i][routing] for i in order] + ([peers[routing]] if peers else [])
            rounds = self._rounds(together, _TIMING_US, _ROUNDS, job)
            for i, row in zip(order, rounds, strict=False):
                times[i].append(row)
            if peers:
                peer_ns.append(_ns(rounds[-1]))
        timings = {i: self._timing(i, rows, errors[i]) for i, rows in times.items()}
        fastest = min(order, key=lambda i: (timings[i].time_ns, order.index(i)))
        duel = None
        held = min((i for i in job.incumbents if i in timings), key=lambda i: timings[i].time_ns, default=modelled)
        band = max(LEAST_BAND, 2 * math.hypot(timings[fastest].noise, timings[held].noise))
        if timings[fastest].time_ns < timings[held].time_ns * (1 - band):
            duel = self._duel(graphs, fastest, held, job)
        measured = Measured(
            job.problem,
            job.bucket,
            self._sha(modelled),
            tuple(timings.values()),
            duel,
            None,
            round((before + self._drift()) / 2, 4),
            self.local.gpu.driver,
        )
        if not peer_ns:
            return measured
        if job.plain is None:
            return replace(measured, torch_ns=tuple(peer_ns))
        return replace(measured, plain=(self._sha(job.plain), tuple(peer_ns)))

    def _timing(self, i: int, rows: Sequence[Sequence[float]], error: float) -> Timing:
        noise = math.sqrt(sum(_spread([math.log(us) for us in row]) ** 2 for row in rows)) / len(rows)
        least = min(map(len, rows))
        return Timing(self._sha(i), tuple(map(_ns, rows)), round(noise, 6), least, float(f"{error:.4g}"))

    def _duel(self, graphs: dict[int, list[Replayed]], fastest: int, modelled: int, job: MeasureJob) -> Rematch:
        """Time two variants in turns: the ratio is of times of one round, so a drifting clock moves both."""
        ratios, spreads, both = [], [], []
        for routing in range(len(ROUTINGS)):
            both_graphs = [graphs[fastest][routing], graphs[modelled][routing]]
            rounds = self._rounds(both_graphs, _DUEL_US, _DUEL_ROUNDS, job)
            logs = [math.log(a / b) for a, b in zip(*rounds, strict=True)]
            ratios.append(statistics.median(logs))
            spreads.append(_spread(logs))
            both.append((_ns(rounds[0]), _ns(rounds[1])))
        band = max(LEAST_BAND, 2 * math.sqrt(sum(spread**2 for spread in spreads)) / len(spreads))
        return Rematch(
            self._sha(fastest),
            self._sha(modelled),
            tuple(a for a, _ in both),
            tuple(b for _, b in both),
            round(math.exp(statistics.fmean(ratios)), 5),
            round(band, 5),
        )

    def _rounds(
        self, graphs: Sequence[Replayed], budget_us: float, limits: tuple[int, int], job: MeasureJob
    ) -> list[list[float]]:
        """Time rounds; the first warms up and shows how many fit the budget. A job may ask for fewer or more."""
        once = [row[0] for row in self.clock.rounds_us(graphs, 1)]
        share = _QUICK if job.quick else 1.0
        least, most = (max(_LONG_ROUNDS, round(share * limit)) for limit in limits)
        rounds = max(least, min(most, int(share * budget_us * len(once) / sum(once))))
        rounds = _LONG_ROUNDS if 1000 * max(once) > LONG_NS else rounds
        return self.clock.rounds_us(graphs, AGAIN * rounds if job.again else rounds)

    def _drift(self) -> float:
        return statistics.median(self.clock.rounds_us([self._reference], 3)[0]) / self._reference_us

    def _plain_graphs(self, i: int, on: Tensors, routings: Sequence[torch.Tensor]) -> list[Replayed] | None:
        """The plain product by variant ``i``, which passed the check in its own cell; None if there is no room."""
        with self._guilty(i):
            try:
                return [self.clock.capture(caller(self._kernel(i), on, m_sizes)) for m_sizes in routings]
            except (CudaError, BundleError, torch.cuda.OutOfMemoryError):
                return None

    def _torch_graphs(self, on: Tensors, routings: Sequence[torch.Tensor]) -> list[Replayed] | None:
        """torch's grouped_mm; None if this torch lacks it or there is no room for its result."""
        if not hasattr(torch, "_grouped_mm"):
            return None
        try:
            return [self.clock.capture(torch_caller(on, m_sizes)) for m_sizes in routings]
        except torch.cuda.OutOfMemoryError:
            return None
        except RuntimeError as error:
            if "CUDA" in str(error):
                raise
            return None  # torch does not support the problem

    def _routed(self, E: int, M: int) -> tuple[torch.Tensor, ...]:
        """Rows of each expert, by routing: made once for all ops and fusions."""
        if (E, M) not in self._routings:
            self._routings[E, M] = measured_routings(E, M, self.device)
        return self._routings[E, M]

    def _tensors(self, problem: Problem, M: int) -> Tensors:
        dtype, E, N, K = TORCH[problem.dtype], problem.E, problem.N, problem.K
        w = self._weight(problem)
        top_k = top_k_of(E, M)
        index = None
        if problem.fusion & FLAGS:
            g = torch.Generator(self.device).manual_seed(3)
            index = torch.randperm(M, generator=g, device=self.device).to(torch.int32)
        tokens = M // top_k if Fusion.GATHER in problem.fusion else M
        if problem.op is Op.DW:
            dy, x = self._pool("rows", M, N, dtype), self._pool("more rows", M, K, dtype)
            return Tensors(problem, M, dy, x, self._pool("result", E * N, K, dtype).view(E, N, K), top_k=top_k)
        columns, reduction = (N, K) if problem.op is Op.FORWARD else (K, N)
        rows = self._pool("rows", tokens, reduction, dtype)
        result = self._pool("result", M, result_columns(columns, problem.fusion), dtype)
        row_weights = None
        if problem.op is Op.FORWARD and Fusion.SCATTER in problem.fusion:  # most such calls have weights too
            row_weights = torch.exp2(torch.arange(M, device=self.device) % 3 - 1)  # powers of two: nothing is rounded
        scale = problem.dtype.precision.x.scale
        codes = None
        if scale is not None and takes_codes_of_x(problem.dtype, problem.layout):
            codes = codes_of_rows(rows, scale)
        return Tensors(problem, M, rows, w, result, index, top_k, row_weights, codes)

    def _weight(self, problem: Problem) -> torch.Tensor | ExpertWeights:
        """w in the problem's layout: made once for all ops, fusions and buckets that share it."""
        stored = problem.layout is Layout.STORED
        key = (problem.E, problem.N, problem.K, problem.dtype, stored)
        if self._weights is None or self._weights[0] != key:
            self._weights = None
            self._judges.clear()
            sizes = problem.E, problem.N, problem.K
            quantised = problem.dtype.quantised
            self._weights = (
                key,
                (
                    quantised_weights(*sizes, problem.dtype, self.device, prepared=not stored)
                    if quantised
                    else weights(*sizes, TORCH[problem.dtype], self.device)
                ),
            )
        w = self._weights[1]
        return (
            w
            if isinstance(w, ExpertWeights) or problem.layout is Layout.NK
            else w.view(problem.E, problem.K, problem.N)
        )

    def _judge(self, problem: Problem, on: Tensors) -> Judges:
        gated = Fusion.SILU in problem.fusion
        key = (problem.op, problem.layout, gated)
        if key not in self._judges:
            weights = None if problem.op is Op.DW else on.weights
            self._judges[key] = (
                GatedNumericsCheck(problem, on.dense) if gated else NumericsCheck(problem, weights, self.device)
            )
        return self._judges[key]

    def _pool(self, name: str, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, width] of a buffer that only grows; it is N(0, 1), except for results."""
        count = rows * width
        buffer = self._pools.get(name)
        if buffer is None or buffer.dtype is not dtype or buffer.numel() < count:
            self._pools.pop(name, None)
            del buffer
            buffer = torch.empty(count, dtype=dtype, device=self.device)
            if name != "result":
                g = torch.Generator(self.device).manual_seed(len(name))
                for start in range(0, count, _RANDOM_ELEMENTS):
                    part = buffer[start : start + _RANDOM_ELEMENTS]
                    part.copy_(torch.randn(part.numel(), generator=g, device=self.device))
            self._pools[name] = buffer
        return buffer[:count].view(rows, width)

    def _kernel(self, i: int) -> gemm.LoadedKernel:
        if i not in self._kernels:
            sm_count = self.local.gpu.sm_count
            assert self.device.index is not None
            self._kernels[i] = gemm.load_kernel(
                self.bundle.variant(i), self.bundle.cubin(i), self.device.index, sm_count
            )
        return self._kernels[i]

    def _sha(self, i: int) -> bytes:
        return self.bundle.variant(i).cubin_sha256


def _ns(times_us: Sequence[float]) -> int:
    return max(1, round(1000 * statistics.median(times_us)))


def _spread(values: Sequence[float]) -> float:
    """The standard error of the median, of values with a few outliers: 1.2533 * (1.4826 MAD) / sqrt(n)."""
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * deviation / math.sqrt(len(values))
