"""Decide how a call runs if its choice's own variant is not the fastest way: the plan of a choice.

A plan lists variants that run certain calls of a cell instead: after a row kernel that gathers x, with silu in the
epilogue, or with quantised x. Example: a bundle has a choice for forward+gather at 1,024 rows, 50 us. Its plain forward
takes 40 us and gathering x first 6 us, so the plan says ROWS_FIRST with the plain variant.

The builder writes plans into bundles (``with_plans``), and the runtime looks them up. The runtime calls this module for
quantised weights without a choice in any bundle (``quantised_is_faster``), and for the texts of ``explain``.

Only times of one GPU and one source are compared. A modelled time must be lower by more than 5 %, because the cost
model is no more exact. If a GPU's memory bandwidth is unknown, row kernels have no times, and no plan uses them.

Rows gathered first
    TMA can't load rows that an index picks. That costs a kernel up to 15 %
    (docs/inside/trials.md, gathered-rows-there). A row kernel that gathers x into a scratch [M, K] before may take less
    or more. A call that
    also scatters, weighs or adds a bias then needs a kernel that stores by index. Bundles have no choices for that
    kernel after a row kernel, so the plan takes the variant with the plain choice's config, or its runner-up's, at
    5 % above its time (an index costs a large tile up to 7 % on an H200: docs/inside/performance.md).

Silu in the epilogue
    The kernel stores half of the columns and saves the activation's row kernel, but it has no small tiles. By measured
    times, it must not take longer than the plain kernel plus the least time of the activation. By modelled times, it
    must not take longer than the plain kernel, and experts must have 64 rows on average: then all trials on an H200
    were faster, with 8 rows they were slower. Rows are gathered on load or first, whichever is faster.

Quantised x
    Codes multiply twice as fast as bf16, and x has half as many bytes. For prepared weights a row kernel has to
    quantise x first. Kernels for the checkpoint layout quantise x themselves and gather rows on load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from ..artifacts.records import Bundle, Choice, Fusion, Gpu, Op, PlanRow, Problem, Source, Variant, Way, same_gpu
from ..artifacts.tuples import NamedTuple
from . import registry
from .arch import ARCHS
from .chips import Chip, chip_for, chip_named
from .entry import READS_ABI
from .rowops import by_token
from .spec import Spec, config_of, gemm_of, result_columns, takes_codes_of_x

MARGIN = 1.05  # a modelled time must be better by this factor
CHECK_US = 4.0  # one launch that brings an index into range
_INDEXED = 1.05  # factor of the plain kernel's time for an index
_SILU_ROWS = 64  # rows of an expert that a modelled kernel with silu needs
# The activation's time, as a multiple of its bytes at the published bandwidth: 1.13 to 1.63 on an H200
# (docs/inside/trials.md, activation-behind-products).
_ACTIVATION_TIMES = 1.1
# The gather's time, also for the gather that reads each row of x once: within 10 % of all gathers of 1024 tokens and
# more in benchmarks/results/passes-h200.json. For fewer tokens the fixed time dominates, up to 2.3 us more.
_GATHER_US, _GATHER_TIMES = 3.7, 1.6
_BY_TOKEN_US, _BY_TOKEN_TIMES = 6.5, 1.34
_INDEX_BYTES = 8
# The time of quantising, from its bytes or, for many rows, its arithmetic (measured on an H100).
_QUANTISE_US, _QUANTISE_TIMES = 6.0, 1.15
_ELEMENTS_PER_SM_US = 8000.0
_LEAST_TOP_KS = 64  # a plan covers all top_k up to this, or up to E if that is larger


class Kernels(Protocol):
    """The choices and variants of one bundle."""

    @property
    def gpus(self) -> Sequence[Gpu]:
        """The bundle's GPUs."""

    def find(self, problem: Problem) -> Sequence[Choice]:
        """The choices for a problem or for its ``transposed``."""

    def variant(self, index: int) -> Variant:
        """The variant with this index."""

    def variants(self, problem: Problem) -> Sequence[tuple[int, Variant]]:
        """(index, variant) of all variants for the problem's op, dtype, layout and fusion."""


class Ruling(NamedTuple):
    """The variant that runs a call instead of the choice's own (None: it stays), the faster way's time, and why.

    ``gemm_us`` is the time of that variant without row kernels.
    """

    variant: int | None
    time_us: float
    reason: str
    gemm_us: float = 0.0


class Cell(NamedTuple):
    """A problem, its choice in a bundle, and the GPU for which row kernels' times are estimated (None: unknown)."""

    kernels: Kernels
    problem: Problem
    choice: Choice
    chip: Chip | None

    @classmethod
    def of(cls, kernels: Kernels, problem: Problem, choice: Choice, sm: int) -> Cell:
        """Make the cell of a choice. A modelled choice is for the representative GPU of capability ``sm``."""
        gpu = choice.measured_on(kernels.gpus)
        chip = chip_named(gpu.name) if gpu is not None else chip_for(sm) if sm in ARCHS else None
        return cls(kernels, problem, choice, chip)

    @property
    def time_us(self) -> float:
        """The time of the choice's own variant."""
        return self.choice.time_ns / 1e3

    @property
    def margin(self) -> float:
        """The factor on another way's time before it is compared with this choice's."""
        return MARGIN if self.choice.source is Source.MODELLED else 1.0

    def rival(self, problem: Problem) -> Choice | str:
        """Return the choice for another problem with the same bucket and GPU, or why there is none."""
        bucket, gpus = self.choice.bucket, self.kernels.gpus
        choices = [choice for choice in self.kernels.find(problem) if choice.bucket == bucket]
        if not choices:
            return f"the bundle has no choice for it at M near {bucket}"
        gpu = self.choice.measured_on(gpus)
        choice = next((choice for choice in choices if same_gpu(choice.measured_on(gpus), gpu)), None)
        return "its time and the plain GEMM's are not from one source" if choice is None else choice


def gather_us(M: int, K: int, itemsize: int, top_k: int, chip: Chip | None) -> float | None:
    """Estimate the time in us of gathering M rows of K elements; None if the GPU is unknown.

    ``top_k`` sorted rows read each row of x: the kernel reads the index and M / top_k rows, and writes M rows.
    """
    if chip is None:
        return None
    moved_bytes = (M + M / top_k) * K * itemsize + _INDEX_BYTES * M
    once = by_token(M, K * itemsize, M, top_k)
    fixed_us, times = (_BY_TOKEN_US, _BY_TOKEN_TIMES) if once else (_GATHER_US, _GATHER_TIMES)
    return fixed_us + times * moved_bytes / chip.bandwidth_gbs * 1e-3


def quantise_us(M: int, K: int, top_k: int, chip: Chip | None) -> float | None:
    """Estimate the time in us of quantising M rows of K elements; None if the GPU is unknown.

    The kernel reads M rows of bf16, or M / top_k rows that an index picks, and writes M rows of codes and scales.
    """
    if chip is None:
        return None
    moved_bytes = 2.0 * K * (M / top_k if top_k else M) + M * (K + K / 32)
    traffic_us = _QUANTISE_TIMES * moved_bytes / chip.bandwidth_gbs * 1e-3
    return _QUANTISE_US + max(traffic_us, M * K / (chip.sm_count * _ELEMENTS_PER_SM_US))


def least_activation_us(problem: Problem, M: int, chip: Chip | None) -> float:
    """Return the least time in us of the activation that ``Fusion.SILU`` saves; 0 if the GPU is unknown.

    The activation's row kernel reads h [M, N] and writes [M, N/2].
    """
    if chip is None:
        return 0.0
    moved_bytes = M * (problem.N + result_columns(problem.N, problem.fusion)) * problem.dtype.itemsize
    return _ACTIVATION_TIMES * moved_bytes / chip.bandwidth_gbs * 1e-3


def rows_first(cell: Cell, top_k: int, *, checks: bool, by_index: bool = False) -> Ruling:
    """Decide whether rows are gathered before the GEMM, for a cell whose choice gathers them on load.

    ``by_index``: the call also scatters, weighs or adds a bias. ``top_k`` is 0 for rows that no row kernel can gather.
    ``checks``: the index must be brought into range first.
    """
    problem, own_us = cell.problem, cell.time_us
    pass_us = _gather_us(cell, top_k, checks)
    if isinstance(pass_us, str):
        return Ruling(None, own_us, pass_us)
    plain = problem._replace(fusion=Fusion.NONE, top_k=0)
    rival = cell.rival(plain)
    timed: tuple[int, float] | str = rival if isinstance(rival, str) else (rival.variant, rival.time_ns / 1e3)
    if by_index and not isinstance(rival, str):
        timed = _by_index(cell.kernels, rival, plain._replace(fusion=Fusion.SCATTER))
    if isinstance(timed, str):
        return Ruling(None, own_us, f"rows are gathered on load: for the plain GEMM, {timed}")
    variant, gemm_us = timed
    times = f"{gemm_us:.1f} us {cell.choice.source.value} and the row kernel {pass_us:.1f} us, "
    times += f"gathered on load {own_us:.1f} us"
    if (gemm_us + pass_us) * cell.margin >= own_us:
        return Ruling(None, own_us, f"gathering rows first is not faster: {times}")
    reason = f"gathering rows first is faster at M near {cell.choice.bucket}: the GEMM {times}"
    return Ruling(variant, gemm_us + pass_us, reason, gemm_us)


def fused_silu(cell: Cell, top_k: int, *, checks: bool) -> Ruling:
    """Decide whether silu is computed in the epilogue, for a cell whose choice does not. See ``rows_first`` for top_k.

    For a problem that gathers, a variant without gather means that rows are gathered first.
    """
    choice, problem, bucket = cell.choice, _forward(cell.problem), cell.choice.bucket
    on_load = problem._replace(fusion=problem.fusion | Fusion.SILU)
    fused = cell.rival(on_load)
    plain_us, time_us, before = cell.time_us, 0.0 if isinstance(fused, str) else fused.time_ns / 1e3, ""
    if Fusion.GATHER in problem.fusion:
        plain_us = rows_first(cell, top_k, checks=checks).time_us
        pass_us = _gather_us(cell, top_k, checks)
        other = cell.rival(problem._replace(fusion=Fusion.SILU))
        if not isinstance(other, str) and not isinstance(pass_us, str):
            other_us = other.time_ns / 1e3 + pass_us
            if isinstance(fused, str) or other_us * cell.margin < time_us:
                fused, time_us, before = other, other_us, " with the rows gathered first"
    if isinstance(fused, str):
        return Ruling(None, plain_us, fused)
    modelled = choice.source is Source.MODELLED
    if modelled and bucket < _SILU_ROWS * problem.E:
        return Ruling(None, plain_us, f"its time is modelled, and {bucket} rows are fewer than {_SILU_ROWS} an expert")
    saved_us = 0.0 if modelled else least_activation_us(on_load, bucket, cell.chip)
    times = f"{time_us:.1f} us {choice.source.value}{before}, the plain GEMM {plain_us:.1f} us"
    times += f" and the activation {saved_us:.1f} us at least" if saved_us else ""
    if time_us > plain_us + saved_us:
        return Ruling(None, plain_us, f"it is slower: {times}")
    reason = f"silu in the epilogue is faster at M near {bucket}: {times}"
    return Ruling(fused.variant, time_us, reason, fused.time_ns / 1e3)


def quantised_x(cell: Cell, top_k: int) -> Ruling:
    """Decide whether x is quantised, for a cell whose choice keeps x in bf16; ``top_k`` is 0 without a gather."""
    dtype = cell.problem.dtype.with_x_quantised
    if dtype is None:
        return Ruling(None, cell.time_us, "x stays bf16: the format's checkpoints have it so")
    coded = cell.problem._replace(dtype=dtype)
    rival = cell.rival(coded)
    if isinstance(rival, str):
        return Ruling(None, cell.time_us, f"x stays bf16: for the GEMM with quantised x, {rival}")
    faster, reason = quantised_is_faster(
        coded, cell.choice.bucket, rival.time_ns / 1e3, cell.time_us, cell.choice.source, top_k, cell.chip
    )
    return Ruling(rival.variant if faster else None, cell.time_us, reason, rival.time_ns / 1e3)


def quantised_is_faster(
    problem: Problem, M: int, coded_us: float, plain_us: float, source: Source, top_k: int, chip: Chip | None
) -> tuple[bool, str]:
    """Compare the GEMM with quantised x (``problem``) with the GEMM that keeps x in bf16, each with its row kernels.

    Returns (whether quantising is faster, the reason). ``top_k`` is 0 if no rows are gathered.
    """
    row_kernels = takes_codes_of_x(problem.dtype, problem.layout)
    times_us = _row_kernels_us(row_kernels, M, problem.K, top_k, chip)
    if times_us is None:
        return False, "x stays bf16: the bandwidth of this GPU is not known"
    own_us, rows_us = times_us
    also = f" and the gather {rows_us:.1f} us" if rows_us else ""
    times = f"{coded_us:.1f} us {source.value}"
    times += f" and the row kernel {own_us:.1f} us, with bf16 x " if row_kernels else ", with bf16 x "
    times += f"{plain_us:.1f} us{also}"
    if not _quantising_pays(times_us, coded_us, plain_us, source):
        return False, f"quantising x is not faster: {times}"
    return True, f"quantising x is faster at M near {M}: the GEMM {times}"


def _row_kernels_us(needed: bool, M: int, K: int, top_k: int, chip: Chip | None) -> tuple[float, float] | None:
    """Estimate the times in us of quantising x and of gathering bf16 x; 0 for a row kernel that is not needed.

    None if the GPU is unknown.
    """
    if not needed:
        return 0.0, 0.0
    own_us = quantise_us(M, K, top_k, chip)
    rows_us = gather_us(M, K, 2, top_k, chip) if top_k else 0.0
    return None if own_us is None or rows_us is None else (own_us, rows_us)


def _quantising_pays(row_kernels_us: tuple[float, float], coded_us: float, plain_us: float, source: Source) -> bool:
    own_us, rows_us = row_kernels_us
    return (coded_us + own_us) * (MARGIN if source is Source.MODELLED else 1.0) < plain_us + rows_us


def with_plans(bundle: Bundle) -> Bundle:
    """Return the bundle with new plans for all of its choices, from its own times."""
    kernels, sm = _BundleKernels(bundle), bundle.target.sm
    choices: dict[Problem, tuple[Choice, ...]] = {}
    for problem, row in bundle.choices.items():
        ways = _possible_ways(kernels, problem)
        choices[problem] = tuple(
            choice._replace(plan=_plan_of(_BundleCell.of(kernels, problem, choice, sm), ways)) for choice in row
        )
    return bundle._replace(choices=choices)


def _possible_ways(kernels: Kernels, problem: Problem) -> tuple[Way, ...]:
    """Return the ways to run a problem of which the bundle has choices, in the order of the format."""
    return tuple(way for way in Way if any(map(kernels.find, _rivals(way, problem))))


def _plan_of(cell: Cell, ways: Iterable[Way]) -> tuple[PlanRow, ...]:
    """Return the rows of a cell's plan, in the order of the format."""
    return tuple(row for way in ways for row in _rows(cell, way))


def _rows(cell: Cell, way: Way) -> Iterator[PlanRow]:
    """Yield the plan rows of a ``Way`` to run the cell: for all calls, then for calls with a check if they differ."""
    if way is Way.QUANTISED_X:
        yield from (PlanRow(way, False, *step) for step in _quantised_x_steps(cell))
        return
    problem = cell.problem
    gathers = Fusion.GATHER in problem.fusion
    rules: dict[Way, Callable[[int, bool], Ruling]] = {
        Way.ROWS_FIRST: lambda top_k, checks: rows_first(cell, top_k, checks=checks),
        Way.ROWS_FIRST_BY_INDEX: lambda top_k, checks: rows_first(cell, top_k, checks=checks, by_index=True),
        Way.FUSED_SILU: lambda top_k, checks: fused_silu(cell, top_k, checks=checks),
    }
    rule = rules[way]
    most = max(problem.E, _LEAST_TOP_KS)
    # With these two top_k a row kernel takes the least time: if it does not pay then, it never does.
    if way is Way.FUSED_SILU:
        steps = gathers and any(rule(top_k, False).reason != rule(0, False).reason for top_k in (1, most))
    else:
        steps = any(rule(top_k, False).variant is not None for top_k in (1, most))
    top_ks = range(most + 1 if steps else 1)
    always = [*_steps(top_ks, lambda top_k: rule(top_k, False).variant)]
    yield from (PlanRow(way, False, *step) for step in always)
    if not steps:
        return
    checked = [*_steps(top_ks, lambda top_k: rule(top_k, True).variant)]
    if checked != always:
        yield from (PlanRow(way, True, *step) for step in checked or [(0, None)])


def _quantised_x_steps(cell: Cell) -> Iterator[tuple[int, int | None]]:
    """Yield the ``_steps`` of ``quantised_x``."""
    dtype = cell.problem.dtype.with_x_quantised
    assert dtype is not None
    coded = cell.problem._replace(dtype=dtype)
    rival = cell.rival(coded)
    if isinstance(rival, str):
        return
    index, coded_us, plain_us, chip = rival.variant, rival.time_ns / 1e3, cell.time_us, cell.chip
    M, K, source = cell.choice.bucket, coded.K, cell.choice.source
    row_kernels = takes_codes_of_x(dtype, coded.layout)

    def variant(top_k: int) -> int | None:
        times_us = _row_kernels_us(row_kernels, M, K, top_k, chip)
        return index if times_us is not None and _quantising_pays(times_us, coded_us, plain_us, source) else None

    yield from _steps(range(max(cell.problem.E, _LEAST_TOP_KS) + 1 if row_kernels else 1), variant)


def _rivals(way: Way, problem: Problem) -> tuple[Problem, ...]:
    """Return the problems of which a bundle must have a choice for a way to be possible."""
    if way is not Way.QUANTISED_X and problem.dtype.quantised:
        return ()
    return Way.ROWS_FIRST.problems(problem) if way is Way.ROWS_FIRST_BY_INDEX else way.problems(problem)


def _steps(top_ks: Sequence[int], variant: Callable[[int], int | None]) -> Iterator[tuple[int, int | None]]:
    """Yield (top_k, variant) for each top_k with another variant than the top_k before; None is before the first."""
    last = None
    for top_k in top_ks:
        current = variant(top_k)
        if current != last:
            yield top_k, current
        last = current


def _forward(problem: Problem) -> Problem:
    """Return the problem or its ``transposed``, whichever is a forward; the problem itself if neither is."""
    return problem if problem.op is Op.FORWARD else problem.transposed or problem


def _gather_us(cell: Cell, top_k: int, checks: bool) -> float | str:
    if not top_k:
        return "rows are gathered on load: the row kernel needs dense, aligned rows"
    problem = cell.problem
    time_us = gather_us(cell.choice.bucket, gemm_of(problem).reduction, problem.dtype.itemsize, top_k, cell.chip)
    if time_us is None:
        return "rows are gathered on load: the bandwidth of this GPU is not known"
    return time_us + (CHECK_US if checks else 0.0)


def _by_index(kernels: Kernels, plain: Choice, problem: Problem) -> tuple[int, float] | str:
    """Return (index, time) of a variant that stores by index with the config of the plain choice or its runner-up."""
    pairs = ((plain.variant, plain.time_ns), (plain.runner_up, plain.runner_up_ns))
    for index, time_ns in pairs:
        if index is None or time_ns is None:
            continue
        like = kernels.variant(index)
        for at, variant in kernels.variants(problem):
            alike = variant.config == like.config and variant.alignment == like.alignment
            if alike and _runs(variant, problem):
                return at, _INDEXED * time_ns / 1e3
    return "none in that config, or the runner-up's, stores by index"


def _runs(variant: Variant, problem: Problem) -> bool:
    """Return whether a variant can compute a problem, regardless of the GPU."""
    first, last = READS_ABI
    config = config_of(variant.config)
    if config is None or not first <= variant.abi <= last or variant.max_experts < problem.E:
        return False
    spec = Spec(problem.op, problem.dtype, config, variant.layout, variant.fusion)
    return not (registry.refusal(spec) or registry.beyond(problem, config))


class _BundleCell(Cell):
    """A cell whose rivals are looked up once: a plan asks for them for each top_k."""

    __slots__ = ()

    def rival(self, problem: Problem) -> Choice | str:
        rivals: dict[tuple[Problem, int, int | None], Choice | str] = self.kernels.rivals  # type: ignore[attr-defined]
        key = problem, self.choice.bucket, self.choice.gpu
        rival = rivals.get(key)
        if rival is None:
            rival = rivals[key] = super().rival(problem)
        return rival


class _BundleKernels:
    """``Kernels`` of a bundle in memory."""

    def __init__(self, bundle: Bundle) -> None:
        self.gpus = bundle.gpus
        self.rivals: dict[tuple[Problem, int, int | None], Choice | str] = {}
        self._bundle = bundle
        self._choices: dict[Problem, Sequence[Choice]] = {}
        self._kinds: dict[tuple[object, ...], list[tuple[int, Variant]]] = {}
        for index, variant in enumerate(bundle.variants):
            self._kinds.setdefault((variant.op, variant.dtype, variant.layout, variant.fusion), []).append(
                (index, variant)
            )

    def find(self, problem: Problem) -> Sequence[Choice]:
        choices = self._choices.get(problem)
        if choices is None:
            twin = problem.transposed
            table: Mapping[Problem, tuple[Choice, ...]] = self._bundle.choices
            own, other = table.get(problem, ()), table.get(twin, ()) if twin is not None else ()
            cells = {(choice.bucket, choice.gpu) for choice in own}
            choices = (*own, *(choice for choice in other if (choice.bucket, choice.gpu) not in cells))
            self._choices[problem] = choices
        return choices

    def variant(self, index: int) -> Variant:
        return self._bundle.variants[index]

    def variants(self, problem: Problem) -> Sequence[tuple[int, Variant]]:
        names = [name for name in (problem, problem.transposed) if name is not None]
        kinds = [(name.op, name.dtype, name.layout, name.fusion) for name in names]
        return [pair for kind in kinds for pair in self._kinds.get(kind, ())]
