"""``explain``: which variant a call would run and why, the next best variants, and the skipped bundles."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...artifacts.errors import HostError, InputError, PretunedError
from ...artifacts.records import (
    PRECISIONS,
    Choice,
    DType,
    Fusion,
    Gpu,
    Layout,
    LocalGpu,
    Op,
    Problem,
    RowOp,
    Variant,
    bucket_of,
    dtypes_of,
    same_gpu,
)
from ...artifacts.tuples import NamedTuple
from ...kernels import arch, chips
from ...kernels import plans as rule
from ...kernels.chips import chip_named
from ...kernels.entry import ALIGNMENT_BYTES
from ...kernels.rowops import CODE_OPS
from ...kernels.spec import code_of, reads_in_place, takes_codes_of_x
from .. import self_test_results, settings
from ..check.call import MAX_RANK
from ..dispatch import compiled, plans
from ..dispatch import snapshot as bundles
from ..dispatch.decide import (
    Candidate,
    Decision,
    Match,
    Origin,
    chosen,
    idles,
    in_place,
    miss_reason,
    modelled,
    reason,
    settle,
    summed,
    whole_columns,
    why_not,
    with_low_part,
    with_wide_rows,
)
from ..dispatch.hints import build_line, remedy
from ..dispatch.plans import Planned
from ..dispatch.snapshot import Rejected, Snapshot, Usable, View
from ..driver.device import current_device, local_gpu
from .explanation import Explanation
from .query import as_read, assumed_top_k, but_for_y, check_numbers, in_fp8, of_numbers, of_tensors, suits

if TYPE_CHECKING:
    import torch

    from ...artifacts.records import LocalGpu
    from ..dispatch.snapshot import Snapshot
    from ..weights.expert_weights import ExpertWeights
    from ..weights.quantized_rows import QuantizedRows

_ITEM_BYTES = 2  # of an element of A and B, for alignment
INSIDE = "in the GEMM's kernel, as part of its reduction"


class LowRankChoice(NamedTuple):
    """The ranked variants that add the low-rank part in their kernel; the first runs. If there are none, the reason."""

    candidates: tuple[Candidate, ...]
    reason: str

    def changes(self) -> dict[str, Any]:
        """The fields of an ``Explanation`` that differ from the explanation of the product without an adapter."""
        if not self.candidates:
            return {"low_rank": f"a product of its own, which is added: {self.reason}"}
        return {
            "low_rank": INSIDE,
            "candidates": self.candidates,
            "reason": self.reason,
            "compiles": False,
            "raises": None,
            "build": None,
            "gathered_first": False,
        }


def with_rank(problem: Problem, rank: int) -> Problem:
    """The problem with a low-rank part of ``rank`` columns; InputError for a product that supports none."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise InputError(f"explain: rank is {rank!r}, wanted the columns of an adapter, an int of 1 to {MAX_RANK}")
    if problem.op is Op.DW or Fusion.SILU in problem.fusion:
        raise InputError("explain: rank of dW, or of a product with silu in it: neither has a low-rank part")
    return problem._replace(fusion=problem.fusion | Fusion.LOW_RANK)


def with_columns(text: str | None, rank: int) -> str:
    """A text for ``Explanation.low_rank`` that names the adapter's rank."""
    wide = -(-rank * _ITEM_BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // _ITEM_BYTES
    own = f", {rank} of them the adapter's" if wide != rank else ""
    return f"{text}: {wide} columns{own}" if text == INSIDE else str(text)


def low_rank_choice(
    snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, *, aligned: bool, strict: bool
) -> LowRankChoice:
    """Decide a problem with ``Fusion.LOW_RANK`` as ``launch/product_kernels.py`` and ``launch/quantised.py`` do."""
    why = _ruled_out(problem, aligned=aligned, strict=strict)
    if why is not None:
        return LowRankChoice((), why)
    code = problem._replace(fusion=code_of(problem.op, problem.fusion))
    best = with_low_part(snapshot, code, M, local)
    if best is None:
        return LowRankChoice((), f"no shipped kernel for it runs on sm_{local.sm}")
    others: list[Candidate] = []
    with contextlib.suppress(Rejected):
        others = modelled(snapshot, code, bucket_of(M), local, snapshot.reserve(local), aligned=True)
    rest = (candidate for candidate in others if candidate.index != best.index or candidate.usable is not best.usable)
    first = not others or best.config == others[0].config
    why = "the cost model's choice" if first else "the config of the GEMM without an adapter"
    return LowRankChoice((best, *rest), f"{why}. Only the shipped candidates have low-rank kernels")


def _ruled_out(problem: Problem, *, aligned: bool, strict: bool) -> str | None:
    """Why no kernel can add the low-rank part; None if kernels may."""
    fusion, dtype = problem.fusion, problem.dtype
    if strict:
        return "strict mode takes nothing of the candidates, which have the code for it"
    if fusion & (Fusion.SCATTER | Fusion.WEIGHT):
        return "no code adds it to rows that go elsewhere or are weighed"
    if not dtype.quantised:
        if dtype is not DType.BF16:
            return f"its kernels are for bf16, this is {dtype.value}"
        if Fusion.BIAS in fusion and Fusion.GATHER not in fusion:
            return "the low-rank kernels add a bias only if they gather rows"
    else:
        format = next(name for name in PRECISIONS if dtype in dtypes_of(name))
        if problem.op is Op.FORWARD and dtypes_of(format)[0] in CODE_OPS:
            return f"the forward of {format} quantises x, which is faster"
        if problem.layout is Layout.STORED:
            return "only prepared weights have a kernel for it: w = w.prepare()"
    return None if aligned else "rows of x, w or y are no whole 16 bytes"


class Ruled(NamedTuple):
    """The candidate that runs the call in place of the choice's own variant, or None; and why."""

    chosen: Candidate | None
    reason: str


class _Kernels:
    """The choices and variants of one bundle of a snapshot."""

    def __init__(self, snapshot: Snapshot, usable: Usable) -> None:
        self._snapshot, self._bundle = snapshot, usable.bundle
        self.gpus = usable.bundle.gpus

    def find(self, problem: Problem) -> Sequence[Choice]:
        return self._snapshot.find(self._bundle, problem)

    def variant(self, index: int) -> Variant:
        return self._snapshot.variant(self._bundle, index)

    def variants(self, problem: Problem) -> Sequence[tuple[int, Variant]]:
        return self._snapshot.variants(self._bundle, problem)


def rows_first(
    snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, *, top_k: int, fusion: Fusion, aligned: bool
) -> Ruled | None:
    """The decision of ``plans.rows_first``, and its reason; None if no bundle has a choice for exactly this cell."""
    ran = plans.own(snapshot, problem, M, local, aligned)
    if ran is None:
        return None
    planned = plans.rows_first(snapshot, problem, M, local, top_k=top_k, fusion=fusion, aligned=aligned)
    if aligned and top_k and not plans.can_gather(snapshot, problem, local, top_k, aligned):
        return Ruled(None, "rows are gathered on load: no usable bundle has the row kernel that gathers them")
    by_index = bool(code_of(problem.op, fusion & ~Fusion.GATHER))
    ruling = rule.rows_first(_cell(snapshot, ran, problem), top_k * aligned, checks=False, by_index=by_index)
    return _ruled(snapshot, ran, problem, planned, ruling, local, aligned)


def fused_silu(snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, *, top_k: int, aligned: bool) -> Ruled:
    """Return the decision of ``plans.fused_silu``, and its reason. ``problem`` has ``Fusion.SILU``."""
    plain = plans.plain_of(problem)
    if snapshot.invariance is not None:
        return Ruled(None, "in the batch-invariant mode h is rounded, as it is in a call with a gradient")
    decided = settle(snapshot, plain, bucket_of(M), local, aligned, False)
    if not isinstance(decided, Decision):
        return Ruled(None, "no bundle has the plain GEMM")
    if decided.chosen.match is not Match.EXACT:
        return Ruled(None, f"the plain GEMM has no time to compare with, as its choice is {decided.reason}")
    planned = plans.fused_silu(snapshot, problem, M, local, aligned=aligned, top_k=top_k)
    at = top_k if plans.can_gather(snapshot, plain, local, top_k, aligned) else 0
    ruling = rule.fused_silu(_cell(snapshot, decided.chosen, plain), at, checks=False)
    return _ruled(snapshot, decided.chosen, plain, planned, ruling, local, aligned)


def quantised_x(
    snapshot: Snapshot, problem: Problem, other: DType, M: int, local: LocalGpu, *, top_k: int, aligned: bool
) -> Ruled:
    """The decision of ``plans.quantised_x``, and its reason. ``other``: the dtype of ``problem`` with bf16 x."""
    if (lacking := plans.lacks_for_codes(snapshot, problem, local)) is not None:
        return Ruled(None, lacking)
    bucket, plain = bucket_of(M), problem._replace(dtype=other)
    if snapshot.invariance is not None:
        return _always_or_never(snapshot, problem, plain, bucket, local, aligned)
    planned = plans.quantised_x(snapshot, problem, other, M, local, top_k=top_k, aligned=aligned)
    decided = settle(snapshot, plain, bucket, local, aligned, False)
    if isinstance(decided, Decision) and decided.chosen.match is Match.EXACT:
        ruling = rule.quantised_x(_cell(snapshot, decided.chosen, plain), top_k)
        return _ruled(snapshot, decided.chosen, plain, planned, ruling, local, aligned)
    coded = settle(snapshot, problem, bucket, local, aligned, False)
    if not isinstance(coded, Decision):
        lacks = "x stays bf16: for the GEMM with quantised x, no bundle has it"
        return Ruled(None, lacks if isinstance(decided, Decision) else "no bundle has this GEMM")
    if not isinstance(decided, Decision):
        return Ruled(coded.chosen, "x is quantised: no bundle has the GEMM with bf16 x")
    if (coded.chosen.match, decided.chosen.match) != (Match.COST_MODEL, Match.COST_MODEL):
        why = "its time and the time with bf16 x are not from one source"
        return Ruled(None, f"x stays bf16: for the GEMM with quantised x, {why}")
    chip, times = chip_named(local.gpu.name), (coded.chosen.time_us, decided.chosen.time_us)
    _, why = rule.quantised_is_faster(problem, bucket, *times, coded.chosen.source, top_k, chip)
    return Ruled(None if planned is None else coded.chosen, why)


def _always_or_never(
    snapshot: Snapshot, problem: Problem, plain: Problem, bucket: int, local: LocalGpu, aligned: bool
) -> Ruled:
    """The batch-invariant mode's decision on quantised x, for any number of rows."""
    if not plans.always_quantises(snapshot, plain, local):
        return Ruled(None, "in the batch-invariant mode x stays bf16 at any number of rows (quantize_x=False)")
    coded = settle(snapshot, problem, bucket, local, aligned, False)
    if not isinstance(coded, Decision):
        return Ruled(None, f"x stays bf16: {coded.reason}")
    return Ruled(coded.chosen, "in the batch-invariant mode x is quantised at any number of rows (quantize_x=True)")


def of_codes(
    snapshot: Snapshot,
    problem: Problem,
    M: int,
    local: LocalGpu,
    *,
    top_k: int,
    aligned: bool,
    op: RowOp | None = RowOp.ORDER_CODES,
) -> Ruled:
    """The kernel for x that arrives as codes, as ``plans.of_codes`` decides; or why there is none.

    ``op`` is the row kernel that provides the codes; None means that x is bf16 and must be quantised.
    """
    what = "x arrives as codes" if op is not None else "precision='fp8' quantises x at any number of rows"
    *_, other = dtypes_of(problem.dtype.value)
    if problem.layout is not Layout.NK or not problem.dtype.quantises_x:
        return Ruled(None, "w is in the checkpoint's layout: prepare it")
    if not aligned:
        return Ruled(None, "x, y or w, or a row of them, does not begin at a multiple of 16 bytes")
    lacking = plans.lacks_for_codes(snapshot, problem, local, op)
    planned = plans.of_codes(snapshot, problem, other, M, local, top_k=top_k, op=op)
    if planned is None:
        return Ruled(None, (lacking or "no bundle has this GEMM").removeprefix("x stays bf16: "))
    ruled = quantised_x(snapshot, problem, other, M, local, top_k=top_k, aligned=True)
    if ruled.chosen is not None:
        return ruled._replace(reason=f"{what}, by the variant of a call that quantises it: {ruled.reason}")
    coded = settle(snapshot, problem, bucket_of(M), local, True, False)
    if not isinstance(coded, Decision):
        raise AssertionError(f"{problem}: a variant without a decision")
    return Ruled(coded.chosen, f"{what}: {coded.reason}")


def _cell(snapshot: Snapshot, ran: Candidate, problem: Problem) -> rule.Cell:
    """The choice that names the candidate ``ran``, in the form that the rule of ``kernels/plans.py`` reads."""
    kernels, gpus = _Kernels(snapshot, ran.usable), ran.usable.bundle.gpus
    choice = next(
        choice
        for choice in kernels.find(problem)
        if choice.bucket == ran.bucket and same_gpu(choice.measured_on(gpus), ran.gpu)
    )
    return rule.Cell.of(kernels, problem, choice, ran.usable.bundle.target.sm)


def _ruled(
    snapshot: Snapshot,
    ran: Candidate,
    problem: Problem,
    planned: Planned | None,
    ruling: rule.Ruling,
    local: LocalGpu,
    aligned: bool,
) -> Ruled:
    """The kernel that dispatch finds, and the reason by the rule of ``kernels/plans.py``."""
    bundle = ran.usable.bundle
    if planned is None:
        if ruling.variant is None:
            return Ruled(None, ruling.reason)
        variant = snapshot.variant(bundle, ruling.variant)
        asked = problem._replace(dtype=variant.dtype, fusion=variant.fusion, top_k=0)
        lacking = why_not(variant, asked, local, aligned=aligned)
        why = "the bundle's plan is not to" if lacking is None else f"its variant can't run here: {lacking}"
        return Ruled(None, f"{why}. By its times, {ruling.reason}")
    as_planned = ruling.variant == planned.variant
    return Ruled(
        ran._replace(
            index=planned.variant,
            variant=snapshot.variant(bundle, planned.variant),
            time_us=ruling.gemm_us if as_planned else ran.time_us,
            torch_us=None,
            plan=(),
        ),
        ruling.reason if as_planned else f"the bundle's plan. By its times, {ruling.reason}",
    )


_MOST = 1 << 16


def explain(
    x: torch.Tensor | QuantizedRows | Problem | None = None,
    w: torch.Tensor | ExpertWeights | None = None,
    m_sizes: torch.Tensor | None = None,
    *,
    w_layout: str = "nk",
    E: int | None = None,
    N: int | None = None,
    K: int | None = None,
    M: int | None = None,
    dtype: str | torch.dtype = "bf16",
    weights: str | None = None,
    sm: int | None = None,
    device: int | None = None,
    aligned: bool | None = None,
    top_k: int | None = None,
    rank: int | None = None,
    expected_rows: int | None = None,
    precision: str | None = None,
) -> Explanation:
    """Explain what ``grouped_gemm`` would run, without running it.

    For a gather, the index is assumed to be from ``sort_routing``: such an index needs no range check.

    Parameters
    ----------
    x, w, m_sizes
        The tensors of a call, on CUDA or (with ``sm``) anywhere. x may be padded, [E, M_max, K], or a Problem with
        ``M``. w may be ``ExpertWeights``, which do not change; x may then be ``QuantizedRows``.
    w_layout
        ``"nk"`` for w [E, N, K], ``"kn"`` for w [E, K, N].
    E, N, K, M, dtype
        The call in numbers, 1 to 2^31 - 1: w is [E, N, K], x is [M, K]; dtype is bf16, fp16, fp32 or tf32, or torch's.
    weights
        In place of dtype: the format of w, as a spec of ``aot build`` names it (``mxfp4``, ``fp8_block``, ...).
    sm
        A capability to explain for, such as 90, in place of a GPU. No choice counts as measured on exactly this GPU.
    device
        torch's index of the GPU, if neither x nor ``sm`` says; torch's current GPU if None.
    aligned
        Whether pointers, rows and strides are multiples of 16 bytes; taken from x, w and the sizes if None.
    top_k
        For a Problem that gathers: how many sorted rows read each row of x, which is the experts of a token (for dX:
        1). If None, the least top_k of the bundles' models with this product, or 1 if there is none; ``assumed`` then
        says so.
    rank
        For a call with ``lora``: the adapter's rank r. ``low_rank`` then says whether the product's kernel adds that
        part.
    expected_rows
        The call's hint, 0 to M: the kernel is chosen for that many rows, and ``without_hint`` says what runs for M.
    precision
        "fp8" explains the forward of a call with this precision. The call's dX is a forward with N and K exchanged.

    Returns
    -------
    Explanation
        The kernel that runs, the other candidates and the reasons. ``print`` shows it as a table.

    Raises
    ------
    InputError
        for arguments that are not a call.
    HostError
        if there is neither a GPU nor ``sm``.
    """
    coded, padded = False, getattr(x, "ndim", 2) == 3
    if x is not None and not isinstance(x, Problem):
        from ..weights.quantized_rows import QuantizedRows, checked  # imported here: it imports torch

        if isinstance(x, QuantizedRows):
            checked("explain", "x", x, w)
            padded = x.codes.dim() == 3
            x, coded = x.stand_in(), True
    if isinstance(x, Problem):
        check_numbers(E=x.E, N=x.N, K=x.K)
        problem, natural = x, suits(x)
    elif x is not None:
        problem, M, natural, device = of_tensors(x, w, m_sizes, w_layout, device)
    else:
        problem = of_numbers(E, N, K, dtype, weights, w_layout)
        natural = suits(problem)
    if precision is not None:
        problem = in_fp8(problem, precision)
        natural = suits(problem)
    check_numbers(M=M)
    if rank is not None:
        problem = with_rank(problem, rank)
    if top_k is not None:
        check_numbers(top_k=top_k)
    local = made_up_gpu(sm) if sm is not None else gpu_here(device)
    wide = aligned is None and not natural and (w is None or but_for_y(x, w, m_sizes, w_layout))
    aligned, rows = natural if aligned is None else aligned, M or 0
    if expected_rows is not None:
        from ..check.call import expected_bucket  # imported here: it imports torch

        expected_bucket("explain", expected_rows, rows, "M")
    how: dict[str, Any] = {"aligned": aligned, "wide_rows": wide, "top_k": top_k, "coded": coded, "padded": padded}
    how["always"] = precision is not None
    answer = explain_on(problem, rows, local, **how, expected_rows=expected_rows)
    if expected_rows is not None:
        other = explain_on(problem, rows, local, **how)
        answer = replace(answer, without_hint="the same" if other.summary == answer.summary else other.summary)
    return answer if rank is None else replace(answer, low_rank=with_columns(answer.low_rank, rank))


def explain_on(
    problem: Problem,
    M: int,
    local: LocalGpu,
    *,
    aligned: bool,
    wide_rows: bool = False,
    top_k: int | None = None,
    expected_rows: int | None = None,
    coded: bool = False,
    padded: bool = False,
    always: bool = False,
) -> Explanation:
    """Explain a call on a GPU that may be another machine's.

    ``wide_rows``: the rows of y may be padded to be aligned. ``coded``: x arrives as codes, with
    ``padded`` as [E, M_max, K]. ``always``: x is quantised whatever the number of rows.
    """
    self_test_results.recall(local)
    strict, likely = settings.settings().strict, M if expected_rows is None else expected_rows
    answer = (
        _of_codes(problem, likely, local, aligned, top_k or 0, padded=padded, coded=coded)
        if coded or always
        else examine(bundles.snapshot(), problem, likely, local, aligned=aligned, strict=strict, top_k=top_k, rows=M)
    )
    answer = replace(answer, M=M, expected_rows=expected_rows)
    if wide_rows and answer.raises is None:
        answer = _with_wide_rows(answer)
    if answer.chosen is not None and idles(answer.chosen.variant, answer.problem, M, answer.bucket):
        answer = _with_few_rows_of_many(answer, strict=strict)
    best, invariance = answer.chosen, bundles.snapshot().invariance
    if invariance is not None and problem.op is not Op.DW:
        answer = replace(answer, invariance=str(invariance))
        if best is None:
            return replace(
                answer, raises=answer.raises or "ProblemNotInBundle: in the batch-invariant mode torch runs nothing"
            )
        answer = replace(answer, order=str(summed(best.usable, best.variant, problem)))
    if best is None:
        return answer
    from ..launch.loader import self_test_text  # imported here: it imports everything that launches

    return replace(answer, self_test=self_test_text(best.usable.bundle, best.index, best.variant, local))


def _with_few_rows_of_many(answer: Explanation, *, strict: bool) -> Explanation:
    """The answer if ``expected_rows`` is far below M: a kernel that has no program for each tile, if there is one."""
    problem, aligned = answer.problem, answer.aligned
    decision = settle(bundles.snapshot(), problem, answer.bucket, answer.local, aligned, strict, persistent=True)
    if not isinstance(decision, Decision):
        return answer
    why = f"{decision.reason}; others would have a program for each tile of the {answer.M} rows that there may be"
    return replace(answer, reason=why, candidates=(decision.chosen, *answer.candidates), gathered_first=False)


def _with_wide_rows(answer: Explanation) -> Explanation:
    """The answer for a plain call of which only y is not aligned: y's rows are padded, so that aligned kernels run."""
    problem, local = answer.problem, answer.local
    M = answer.M if answer.expected_rows is None else answer.expected_rows
    wide = with_wide_rows(bundles.snapshot(), problem, M, local)
    if wide is None:
        return answer
    whole = problem._replace(N=whole_columns(problem))
    why = f"{reason(wide, whole, bucket_of(M), local)}; each row of y is filled up to {whole.N} columns"
    return replace(answer, aligned=True, reason=why, candidates=(wide, *answer.candidates), compiles=False, build=None)


def examine(
    snapshot: Snapshot,
    problem: Problem,
    M: int,
    local: LocalGpu,
    *,
    aligned: bool,
    strict: bool = False,
    top_k: int | None = None,
    rows: int | None = None,
) -> Explanation:
    """Explain a problem by the bundles of ``snapshot``, with every candidate ranked; ``top_k`` is as in ``explain``.

    The kernel is chosen for M rows; the call has ``rows``, or M if that is None.

    A kernel with silu in its epilogue runs if it is faster than the plain product and the activation. A row kernel
    gathers the rows first if this is faster than a gather on load. A call of one token has no such row kernel: its
    ``top_k`` sorted rows are all the token's row.
    """
    rows = M if rows is None else rows
    if top_k is None:
        top_k, assumed = assumed_top_k(snapshot, problem, local)
        answer = examine(snapshot, problem, M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows)
        return replace(answer, assumed=assumed)
    if problem.dtype.quantises_x and problem.op is Op.FORWARD:
        return _with_x_quantised(snapshot, problem, M, local, aligned, strict, top_k, rows)
    if (stored := as_read(snapshot, problem, local)) is not problem:
        return examine(snapshot, stored, M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows)
    if Fusion.GATHER in problem.fusion and plans.never_on_load(problem):
        left = problem._replace(fusion=problem.fusion & ~Fusion.GATHER)
        answer = examine(snapshot, left, M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows)
        first = answer.chosen is not None and top_k != rows
        return replace(answer, problem=problem, gathered_first=first)
    if Fusion.LOW_RANK in problem.fusion:
        alone = problem._replace(fusion=problem.fusion & ~Fusion.LOW_RANK)
        answer = examine(snapshot, alone, M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows)
        part = low_rank_choice(snapshot, problem, M, local, aligned=aligned, strict=strict)
        return replace(answer, problem=problem, **part.changes())
    if Fusion.SILU in problem.fusion:
        ruled = fused_silu(snapshot, problem, M, local, top_k=top_k, aligned=aligned)
        if ruled.chosen is None:
            plain = examine(
                snapshot, plans.plain_of(problem), M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows
            )
            why = f"the GEMM, then the activation. Fused silu: {ruled.reason}. The GEMM: {plain.reason}"
            return replace(plain, problem=problem, reason=why)
        view = snapshot.view(local, installed=True)
        first = Fusion.GATHER in problem.fusion & ~ruled.chosen.variant.fusion and top_k != rows
        return Explanation(
            problem, M, aligned, local, ruled.reason, (ruled.chosen,), view.skipped, gathered_first=first
        )
    bucket = bucket_of(M)
    while True:
        with contextlib.suppress(Rejected):
            view = snapshot.view(local, installed=True)
            claimed = chosen(snapshot, problem, bucket, local, view, aligned=aligned, most=_MOST)
            candidates = [candidate for i, candidate in enumerate(claimed) if candidate.match is Match.EXACT or not i]
            listed = {(candidate.usable.order, candidate.index) for candidate in candidates}
            candidates += [
                candidate
                for candidate in modelled(snapshot, problem, bucket, local, view, aligned=aligned)
                if (candidate.usable.order, candidate.index) not in listed
            ]
            if not candidates:
                reserve = snapshot.reserve(local)
                candidates = modelled(snapshot, problem, bucket, local, reserve, aligned=aligned)
                view = View(view.usable, view.skipped + reserve.skipped)
            candidates.sort(key=lambda candidate: (candidate.origin, candidate.match))
            decided, raises = _decided(snapshot, problem, bucket, local, aligned, strict)
            if decided is not None:  # the search may end before installed bundles are read
                at = decided.usable.bundle, decided.index
                candidates = [
                    decided,
                    *(candidate for candidate in candidates if (candidate.usable.bundle, candidate.index) != at),
                ]
            why = reason(candidates[0], problem, bucket, local) if candidates else miss_reason(problem, local, view)
            why += _passed_over(candidates, local)
            build = None if candidates or not local.sm else build_line(problem, bucket, local.sm, view)
            if not candidates and local.sm and build is None:  # no command can build the problem
                why = f"{why}. {remedy(problem, bucket, local.sm, view)}"
            compiles = not candidates and compiled.would_compile(problem, local)
            ruled_rows = _gathered_first(snapshot, problem, M, local, aligned, top_k)
            before = None if ruled_rows is None else ruled_rows.chosen
            if ruled_rows is not None:
                why = f"{why}; {ruled_rows.reason}" if before is None else ruled_rows.reason
            candidates = candidates if before is None else [before, *candidates]
            return Explanation(
                problem,
                M,
                aligned,
                local,
                why,
                tuple(candidates),
                view.skipped,
                compiles,
                raises,
                gathered_first=before is not None and top_k != rows,
                build=build,
            )


def _passed_over(candidates: Sequence[Candidate], local: LocalGpu) -> str:
    """Why a choice from earlier in the bundle search path does not run; "" if there is no such choice."""
    for candidate in candidates[1:]:
        earlier = (
            candidate.usable.order < candidates[0].usable.order and candidate.usable.place != candidates[0].usable.place
        )
        if earlier and candidate.match is not Match.COST_MODEL:
            what = {
                Origin.THIS_GPU: "measured on this GPU, but for other rows",
                Origin.THIS_CAPABILITY: f"measured on {candidate.gpu.name if candidate.gpu else '?'}",
                Origin.MODELLED: "only modelled",
            }.get(candidate.origin, f"code for {candidate.usable.bundle.target}")
            earlier_choice = f"{candidate.usable.path.name} ({candidate.usable.place.kind.value})"
            return f". That ranks before the choice of {earlier_choice}: {what}"
    return ""


def _with_x_quantised(
    snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, aligned: bool, strict: bool, top_k: int, rows: int
) -> Explanation:
    """Explain a product whose checkpoint asks for quantised x: x is quantised if that is faster, else it stays bf16.

    If a row kernel quantises x, it also gathers the rows; if the product's kernel quantises x, it gathers rows on load.
    The kernel of the product with bf16 x may add a low-rank part; otherwise the part is a product of its own.
    """
    *_, other = dtypes_of(problem.dtype.value)
    answer = examine(
        snapshot, problem._replace(dtype=other), M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows
    )
    if Fusion.LOW_RANK in problem.fusion:
        if answer.low_rank == INSIDE:
            return answer
        alone = problem._replace(fusion=problem.fusion & ~Fusion.LOW_RANK)
        found_alone = _with_x_quantised(snapshot, alone, M, local, aligned, strict, top_k, rows)
        fusion = found_alone.problem.fusion | Fusion.LOW_RANK
        return replace(found_alone, problem=found_alone.problem._replace(fusion=fusion), low_rank=answer.low_rank)
    codes = problem._replace(layout=answer.problem.layout)
    passes, gathers = takes_codes_of_x(codes.dtype, codes.layout), Fusion.GATHER in problem.fusion
    left = codes._replace(fusion=codes.fusion & ~Fusion.GATHER) if passes else codes
    ruled = quantised_x(snapshot, left, other, M, local, top_k=top_k if passes and gathers else 0, aligned=aligned)
    if ruled.chosen is None or (passes and not aligned):
        return replace(answer, reason=f"{answer.reason}; {ruled.reason}") if answer.candidates else answer
    candidates = (ruled.chosen, *answer.candidates)
    return replace(
        answer,
        problem=codes,
        reason=ruled.reason,
        candidates=candidates,
        compiles=False,
        raises=None,
        build=None,
        gathered_first=False,
        quantised_first=passes,
    )


def _of_codes(
    problem: Problem, M: int, local: LocalGpu, aligned: bool, top_k: int, *, padded: bool, coded: bool
) -> Explanation:
    """Explain a product of x's codes. A row kernel sorts and gathers the codes, or the product reads them in place.

    Unless x is ``coded``, a row kernel first quantises x.
    """
    snapshot = bundles.snapshot()
    if padded and aligned and reads_in_place(problem):
        starts = problem._replace(fusion=Fusion.STARTS, top_k=0)
        candidate = in_place(snapshot, starts, M, local, strict=settings.settings().strict)
        if candidate is not None:
            why = "x arrives as codes, which are read in place: by the cost model faster than ordering them first"
            view = snapshot.view(local, installed=True)
            return Explanation(starts, M, aligned, local, why, (candidate,), view.skipped, coded=True)
    op = RowOp.ORDER_CODES if coded else None
    ruled = of_codes(snapshot, problem, M, local, top_k=top_k, aligned=aligned, op=op)
    view, candidates = snapshot.view(local, installed=True), () if ruled.chosen is None else (ruled.chosen,)
    raises = None if candidates or not coded else f"InputError: no kernel here reads x as codes: {ruled.reason}"
    how: dict[str, Any] = {"raises": raises, "quantised_first": bool(candidates), "coded": coded}
    return Explanation(problem, M, aligned, local, ruled.reason, candidates, view.skipped, **how)


def _gathered_first(
    snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, aligned: bool, top_k: int
) -> Ruled | None:
    """The decision to gather rows first or not; None if the problem gathers none, or no bundle has a choice for it."""
    if Fusion.GATHER not in problem.fusion:
        return None
    code = problem._replace(fusion=Fusion.GATHER)
    return rows_first(snapshot, code, M, local, top_k=top_k, fusion=problem.fusion, aligned=aligned)


def _decided(
    snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu, aligned: bool, strict: bool
) -> tuple[Candidate | None, str | None]:
    """(the candidate that a call runs, or None; the text of the error that the call raises, or None)."""
    try:
        decided = settle(snapshot, problem, bucket, local, aligned, strict)
    except PretunedError as error:
        return None, str(error)
    return (decided.chosen if isinstance(decided, Decision) else None), None


def gpu_here(device: int | None = None) -> LocalGpu:
    """A GPU of this machine, torch's current one by default; HostError where there is none."""
    try:
        return local_gpu(current_device() if device is None else device)
    except HostError as error:
        raise HostError(
            f"explain: {error}. CPU tensors run the torch reference; sm=90 explains for a GPU of 9.0 that is not here"
        ) from None


def fingerprint(device: int | None = None) -> str:
    """Digest the usable bundles, in order, and the GPU's identity.

    Ranks with equal digests choose the same kernels for equal calls with equal ``expected_rows``.

    Parameters
    ----------
    device
        torch's index of the GPU; its current device if None.

    Returns
    -------
    str
        Hex digits. All machines without a GPU have the same digest for the same bundles.

    Raises
    ------
    HostError, CudaError
        if there is no such GPU as ``device``.
    """
    try:
        local = local_gpu(current_device() if device is None else device)
    except HostError:
        if device is not None:
            raise
        local = LocalGpu(0, Gpu("", 0, 0, 0))
    return bundles.snapshot().fingerprint(local)


def made_up_gpu(sm: int) -> LocalGpu:
    """An unnamed GPU of capability ``sm``, with the SM count and memory of a typical GPU of this capability.

    Raises
    ------
    InputError
        for a capability without kernels.
    """
    if not isinstance(sm, int) or sm not in arch.ARCHS:
        raise InputError(f"sm={sm!r} is not supported, wanted one of {', '.join(map(str, arch.supported()))}")
    chip = chips.chip_for(sm)
    return LocalGpu(sm, Gpu("", chip.sm_count, chip.memory_gib << 10, 0))
