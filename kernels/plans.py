"""The rule that makes a plan: what runs a cell other than its choice's own variant, by the times of one bundle.

The builder writes plans into bundles (``with_plans``). The runtime looks them up. It asks here only for quantised
weights of which no bundle has a choice (``quantised_is_faster``), and for the words of ``explain``.

Times of two GPUs or of two sources are never compared. Modelled times have to be lower by more than 5 %: the cost model
does not tell apart what is nearer. If the rate of a GPU's memory is not known, row kernels have no time there, and no
way with a row kernel is taken.

Rows gathered first
    Rows that an index picks can't be loaded by TMA. That costs a kernel up to 15 %
    (docs/inside/trials.md, gathered-rows-there), which may be more or less than a row kernel takes that gathers the
    rows of x into a scratch [M, K]. A call that also scatters, weighs or adds a bias needs a kernel that stores by
    index. Bundles have no choices for it after a row kernel: it is taken in the plain choice's config, or in its
    runner-up's, at 5 % above that one's time (an index costs a large tile up to 7 % on an H200:
    docs/inside/performance.md).

Silu in the epilogue
    The kernel stores half of the columns and saves the activation's row kernel, and has no small tiles. Measured, it
    has to take no longer than the plain kernel and the least time of the activation. Modelled, its estimate must not
    be above the plain kernel's, and an expert must have 64 rows in the mean: there every trial on an H200 won, and with
    8 it lost. Its rows are gathered on load or first, whichever is faster.

Quantised x
    Codes multiply twice as fast as bf16, and x is read as half as many bytes. But a row kernel has to quantise x, if
    weights are prepared. Kernels for the checkpoint layout quantise x themselves and gather rows on load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from ..artifacts.records.bundle import Bundle, Choice, PlanRow, Source, Variant, Way
from ..artifacts.records.problem import Fusion, Op, Problem
from ..artifacts.records.target import Gpu, same_gpu
from ..artifacts.tuples import NamedTuple
from . import registry
from .contract import words
from .contract.config import config_of
from .contract.spec import Spec, gemm_of, result_columns, takes_codes_of_x
from .hardware.arch import ARCHS
from .hardware.chips import Chip, chip_for, chip_named
from .rowops import by_token

MARGIN = 1.05  # of modelled times
CHECK_US = 4.0  # bringing an index that is not known to be in range into it: one launch
_INDEXED = 1.05  # what an index costs the plain kernel
_SILU_ROWS = 64  # of an expert, that a modelled kernel with silu needs
# Of the time in which the memory, at its published rate, moves what the activation moves: 1.13 to 1.63 on an H200
# (docs/inside/trials.md, activation-behind-products).
_ACTIVATION_TIMES = 1.1
# The gather's time, and where each row of x is read once (runtime/launch/gather.py): within 10 % of every gather of
# 1024 tokens and more in benchmarks/results/passes-h200.json. For fewer tokens the few us are all, up to 2.3 us more.
_GATHER_US, _GATHER_TIMES = 3.7, 1.6
_BY_TOKEN_US, _BY_TOKEN_TIMES = 6.5, 1.34
_INDEX_BYTES = 8
# The time that quantising takes, by its bytes or, of many rows, by its arithmetic (measured on an H100).
_QUANTISE_US, _QUANTISE_TIMES = 6.0, 1.15
_ELEMENTS_PER_SM_US = 8000.0
_LEAST_TOP_KS = 64  # top_k up to which a plan is exact, at least


class Kernels(Protocol):
    """The choices and the variants of one bundle."""

    @property
    def gpus(self) -> Sequence[Gpu]:
        """The bundle's GPUs."""

    def find(self, problem: Problem) -> Sequence[Choice]:
        """The choices for a problem, by either of its names."""

    def variant(self, index: int) -> Variant:
        """One of its variants."""

    def variants(self, problem: Problem) -> Sequence[tuple[int, Variant]]:
        """Its variants of a problem's kind, with their indices."""


class Ruling(NamedTuple):
    """The variant that runs a call in the choice's place, or None; the time of the faster way in us; and why.

    ``gemm_us`` is the time of that variant without row kernels.
    """

    variant: int | None
    time_us: float
    reason: str
    gemm_us: float = 0.0


class Cell(NamedTuple):
    """A choice of a bundle, and the GPU that the time of row kernels is taken of."""

    kernels: Kernels
    problem: Problem
    choice: Choice
    chip: Chip | None

    @classmethod
    def of(cls, kernels: Kernels, problem: Problem, choice: Choice, sm: int) -> Cell:
        """The cell of a bundle for capability ``sm``; a modelled choice is for the capability's representative."""
        gpu = choice.measured_on(kernels.gpus)
        chip = chip_named(gpu.name) if gpu is not None else chip_for(sm) if sm in ARCHS else None
        return cls(kernels, problem, choice, chip)

    @property
    def time_us(self) -> float:
        """The time of the choice's own variant."""
        return self.choice.time_ns / 1e3

    @property
    def margin(self) -> float:
        """The factor of another way's time before it is compared."""
        return MARGIN if self.choice.source is Source.MODELLED else 1.0

    def rival(self, problem: Problem) -> Choice | str:
        """The choice for another kernel whose time compares with this choice's, or why there is none."""
        bucket, gpus = self.choice.bucket, self.kernels.gpus
        there = [one for one in self.kernels.find(problem) if one.bucket == bucket]
        if not there:
            return f"the bundle has no choice for it at M near {bucket}"
        gpu = self.choice.measured_on(gpus)
        found = next((one for one in there if same_gpu(one.measured_on(gpus), gpu)), None)
        return "its time and the plain GEMM's are not from one source" if found is None else found


def gather_us(M: int, K: int, itemsize: int, top_k: int, chip: Chip | None) -> float | None:
    """The time of gathering M rows of K elements in us, if ``top_k`` sorted rows read each row of x; None if unknown.

    It reads the index and M / top_k rows of x, and writes M rows.
    """
    if chip is None:
        return None
    moved_bytes = (M + M / top_k) * K * itemsize + _INDEX_BYTES * M
    once = by_token(M, K * itemsize, M, top_k)
    fixed_us, times = (_BY_TOKEN_US, _BY_TOKEN_TIMES) if once else (_GATHER_US, _GATHER_TIMES)
    return fixed_us + times * moved_bytes / chip.bandwidth_gbs * 1e-3


def quantise_us(M: int, K: int, top_k: int, chip: Chip | None) -> float | None:
    """The time of quantising M rows of K elements in us; None if the GPU's rates are not known.

    It reads M rows of bf16, or M / top_k that an index picks, and writes M rows of codes and scales.
    """
    if chip is None:
        return None
    moved_bytes = 2.0 * K * (M / top_k if top_k else M) + M * (K + K / 32)
    traffic_us = _QUANTISE_TIMES * moved_bytes / chip.bandwidth_gbs * 1e-3
    return _QUANTISE_US + max(traffic_us, M * K / (chip.sm_count * _ELEMENTS_PER_SM_US))


def least_activation_us(problem: Problem, M: int, chip: Chip | None) -> float:
    """The least time of the row kernel that fused silu saves, in us; 0 if the memory's rate is not known.

    It reads h [M, N] and writes [M, N/2], for a ``problem`` with ``Fusion.SILU``.
    """
    if chip is None:
        return 0.0
    moved_bytes = M * (problem.N + result_columns(problem.N, problem.fusion)) * problem.dtype.itemsize
    return _ACTIVATION_TIMES * moved_bytes / chip.bandwidth_gbs * 1e-3


def rows_first(cell: Cell, top_k: int, *, checks: bool, by_index: bool = False) -> Ruling:
    """Whether rows are gathered first, for a cell whose choice gathers them on load.

    ``by_index``: the call scatters, weighs or adds a bias as well. ``top_k`` is 0 for rows that no row kernel can
    gather.
    """
    problem, own_us = cell.problem, cell.time_us
    pass_us = _gather_us(cell, top_k, checks)
    if isinstance(pass_us, str):
        return Ruling(None, own_us, pass_us)
    plain = problem._replace(fusion=Fusion.NONE, top_k=0)
    found = cell.rival(plain)
    timed: tuple[int, float] | str = found if isinstance(found, str) else (found.variant, found.time_ns / 1e3)
    if by_index and not isinstance(found, str):
        timed = _by_index(cell.kernels, found, plain._replace(fusion=Fusion.SCATTER))
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
    """Whether silu is in the epilogue, for a cell whose choice has none. Rows are as for ``rows_first``.

    A variant that gathers nothing is for rows gathered first.
    """
    choice, problem, bucket = cell.choice, _forward(cell.problem), cell.choice.bucket
    on_load = problem._replace(fusion=problem.fusion | Fusion.SILU)
    found = cell.rival(on_load)
    plain_us, time_us, before = cell.time_us, 0.0 if isinstance(found, str) else found.time_ns / 1e3, ""
    if Fusion.GATHER in problem.fusion:
        plain_us = rows_first(cell, top_k, checks=checks).time_us
        pass_us = _gather_us(cell, top_k, checks)
        other = cell.rival(problem._replace(fusion=Fusion.SILU))
        if not isinstance(other, str) and not isinstance(pass_us, str):
            other_us = other.time_ns / 1e3 + pass_us
            if isinstance(found, str) or other_us * cell.margin < time_us:
                found, time_us, before = other, other_us, " with the rows gathered first"
    if isinstance(found, str):
        return Ruling(None, plain_us, found)
    modelled = choice.source is Source.MODELLED
    if modelled and bucket < _SILU_ROWS * problem.E:
        return Ruling(None, plain_us, f"its time is modelled, and {bucket} rows are fewer than {_SILU_ROWS} an expert")
    saved_us = 0.0 if modelled else least_activation_us(on_load, bucket, cell.chip)
    times = f"{time_us:.1f} us {choice.source.value}{before}, the plain GEMM {plain_us:.1f} us"
    times += f" and the activation {saved_us:.1f} us at least" if saved_us else ""
    if time_us > plain_us + saved_us:
        return Ruling(None, plain_us, f"it is slower: {times}")
    reason = f"silu in the epilogue is faster at M near {bucket}: {times}"
    return Ruling(found.variant, time_us, reason, found.time_ns / 1e3)


def quantised_x(cell: Cell, top_k: int) -> Ruling:
    """Whether x is quantised, for a cell whose choice leaves it as it is; ``top_k`` is 0 if no rows are gathered."""
    dtype = cell.problem.dtype.with_x_quantised
    if dtype is None:
        return Ruling(None, cell.time_us, "x stays bf16: the format's checkpoints have it so")
    coded = cell.problem._replace(dtype=dtype)
    found = cell.rival(coded)
    if isinstance(found, str):
        return Ruling(None, cell.time_us, f"x stays bf16: for the GEMM with quantised x, {found}")
    faster, reason = quantised_is_faster(
        coded, cell.choice.bucket, found.time_ns / 1e3, cell.time_us, cell.choice.source, top_k, cell.chip
    )
    return Ruling(found.variant if faster else None, cell.time_us, reason, found.time_ns / 1e3)


def quantised_is_faster(
    problem: Problem, M: int, coded_us: float, plain_us: float, source: Source, top_k: int, chip: Chip | None
) -> tuple[bool, str]:
    """Whether the GEMM with quantised x (``problem``) is faster than the one that leaves x, with its row kernels; why.

    ``top_k`` is 0 if no rows are gathered.
    """
    passes = takes_codes_of_x(problem.dtype, problem.layout)
    own_us = quantise_us(M, problem.K, top_k, chip) if passes else 0.0
    rows_us = gather_us(M, problem.K, 2, top_k, chip) if top_k and passes else 0.0
    if own_us is None or rows_us is None:
        return False, "x stays bf16: the bandwidth of this GPU is not known"
    also = f" and the gather {rows_us:.1f} us" if rows_us else ""
    times = f"{coded_us:.1f} us {source.value}"
    times += f" and the row kernel {own_us:.1f} us, with bf16 x " if passes else ", with bf16 x "
    times += f"{plain_us:.1f} us{also}"
    margin = MARGIN if source is Source.MODELLED else 1.0
    if (coded_us + own_us) * margin >= plain_us + rows_us:
        return False, f"quantising x is not faster: {times}"
    return True, f"quantising x is faster at M near {M}: the GEMM {times}"


def with_plans(bundle: Bundle) -> Bundle:
    """The bundle with the plan of each of its choices made anew, by its own times."""
    kernels = _Whole(bundle)
    choices = {
        problem: tuple(one._replace(plan=plan_of(Cell.of(kernels, problem, one, bundle.target.sm))) for one in row)
        for problem, row in bundle.choices.items()
    }
    return bundle._replace(choices=choices)


def plan_of(cell: Cell) -> tuple[PlanRow, ...]:
    """The rows of a cell's plan, in the order of the format."""
    return tuple(row for way in Way for row in _rows(cell, way))


def _rows(cell: Cell, way: Way) -> Iterator[PlanRow]:
    """A way's rows: those for all calls, then those for calls with a check, if they differ."""
    problem = cell.problem
    if not any(cell.kernels.find(one) for one in _rivals(way, problem)):
        return
    gathers = Fusion.GATHER in problem.fusion
    rules: dict[Way, Callable[[int, bool], Ruling]] = {
        Way.ROWS_FIRST: lambda top_k, checks: rows_first(cell, top_k, checks=checks),
        Way.ROWS_FIRST_BY_INDEX: lambda top_k, checks: rows_first(cell, top_k, checks=checks, by_index=True),
        Way.FUSED_SILU: lambda top_k, checks: fused_silu(cell, top_k, checks=checks),
        Way.QUANTISED_X: lambda top_k, _: quantised_x(cell, top_k),
    }
    rule = rules[way]
    most = max(problem.E, _LEAST_TOP_KS)
    if way is Way.QUANTISED_X:
        dtype = problem.dtype.with_x_quantised
        steps = dtype is not None and takes_codes_of_x(dtype, problem.layout)
    else:  # with these top_k a row kernel takes the least time: if it is not worth it then, it never is
        steps = gathers and any(rule(top_k, False).reason != rule(0, False).reason for top_k in (1, most))
        if way is not Way.FUSED_SILU:
            steps = any(rule(top_k, False).variant is not None for top_k in (1, most))
    top_ks = range(most + 1 if steps else 1)
    always = [*_steps(top_ks, lambda top_k: rule(top_k, False).variant)]
    yield from (PlanRow(way, False, *step) for step in always)
    if not steps or way is Way.QUANTISED_X:
        return
    checked = [*_steps(top_ks, lambda top_k: rule(top_k, True).variant)]
    if checked != always:
        yield from (PlanRow(way, True, *step) for step in checked or [(0, None)])


def _rivals(way: Way, problem: Problem) -> tuple[Problem, ...]:
    """The problems without whose choices a way is never taken."""
    if way is not Way.QUANTISED_X and problem.dtype.quantised:
        return ()
    return Way.ROWS_FIRST.problems(problem) if way is Way.ROWS_FIRST_BY_INDEX else way.problems(problem)


def _steps(top_ks: Sequence[int], variant: Callable[[int], int | None]) -> Iterator[tuple[int, int | None]]:
    """(top_k, variant) wherever the variant becomes another than before; at first it is None."""
    last = None
    for top_k in top_ks:
        found = variant(top_k)
        if found != last:
            yield top_k, found
        last = found


def _forward(problem: Problem) -> Problem:
    """The problem by its name as a forward, if it has one."""
    return problem if problem.op is Op.FORWARD else problem.transposed or problem


def _gather_us(cell: Cell, top_k: int, checks: bool) -> float | str:
    if not top_k:
        return "rows are gathered on load: the row kernel needs dense, aligned rows"
    problem = cell.problem
    found = gather_us(cell.choice.bucket, gemm_of(problem).reduction, problem.dtype.itemsize, top_k, cell.chip)
    if found is None:
        return "rows are gathered on load: the bandwidth of this GPU is not known"
    return found + (CHECK_US if checks else 0.0)


def _by_index(kernels: Kernels, plain: Choice, problem: Problem) -> tuple[int, float] | str:
    """The variant that stores by index in the plain choice's config, or else in its runner-up's, and its time."""
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
    """Whether a variant computes a problem, on whatever GPU."""
    first, last = words.READS_ABI
    config = config_of(variant.config)
    if config is None or not first <= variant.abi <= last or variant.max_experts < problem.E:
        return False
    spec = Spec(problem.op, problem.dtype, config, variant.layout, variant.fusion)
    return not (registry.refusal(spec) or registry.beyond(problem, config))


class _Whole:
    """``Kernels`` of a whole bundle."""

    def __init__(self, bundle: Bundle) -> None:
        self.gpus = bundle.gpus
        self._bundle = bundle
        self._found: dict[Problem, Sequence[Choice]] = {}
        self._kinds: dict[tuple[object, ...], list[tuple[int, Variant]]] = {}
        for index, one in enumerate(bundle.variants):
            self._kinds.setdefault((one.op, one.dtype, one.layout, one.fusion), []).append((index, one))

    def find(self, problem: Problem) -> Sequence[Choice]:
        found = self._found.get(problem)
        if found is None:
            twin = problem.transposed
            choices: Mapping[Problem, tuple[Choice, ...]] = self._bundle.choices
            own, other = choices.get(problem, ()), choices.get(twin, ()) if twin is not None else ()
            known = {(one.bucket, one.gpu) for one in own}
            found = (*own, *(one for one in other if (one.bucket, one.gpu) not in known))
            self._found[problem] = found
        return found

    def variant(self, index: int) -> Variant:
        return self._bundle.variants[index]

    def variants(self, problem: Problem) -> Sequence[tuple[int, Variant]]:
        names = [one for one in (problem, problem.transposed) if one is not None]
        return [found for one in names for found in self._kinds.get((one.op, one.dtype, one.layout, one.fusion), ())]
