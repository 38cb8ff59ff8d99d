"""``explain``: which variant a call would run, why, what the next best was, and what was skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...artifacts.errors import HostError, InputError, PretunedError
from ...artifacts.records import Fusion, Gpu, LocalGpu, Op, Problem, bucket_of, dtypes_of
from ...kernels import arch, chips
from ...kernels.spec import takes_codes_of_x
from .. import settings, verdicts
from ..dispatch import compiled, plans
from ..dispatch import snapshot as bundles
from ..dispatch.decide import Decision, miss_reason, reason, settle, whole_columns, with_wide_rows
from ..dispatch.hints import build_line, remedy
from ..dispatch.ranking import Candidate, Match, Origin, chosen, idles, modelled, summed
from ..dispatch.snapshot import Rejected, Snapshot, View
from ..driver.device import current_device, local_gpu
from . import low_rank, ways
from .explanation import Explanation
from .query import as_read, assumed_top_k, but_for_y, check_numbers, of_numbers, of_tensors, suits

if TYPE_CHECKING:
    import torch

    from ..weights.expert_weights import ExpertWeights
    from ..weights.quantized_rows import QuantizedRows

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
) -> Explanation:
    """Explain what ``grouped_gemm`` would run, without running it.

    Rows that are gathered are taken to be so by an index of ``sort_routing``, which need not be checked.

    Parameters
    ----------
    x, w, m_sizes
        The tensors of a call, on CUDA or (with ``sm``) anywhere, also of padded rows x [E, M_max, K]; or a Problem in
        place of x, with ``M``. w may be ``ExpertWeights``, which are left as they are, and then x ``QuantizedRows``.
    w_layout
        ``"nk"`` for w [E, N, K], ``"kn"`` for w [E, K, N].
    E, N, K, M, dtype
        The call in numbers, 1 to 2^31 - 1: w is [E, N, K], x is [M, K]; dtype is bf16, fp16, fp32 or tf32, or torch's.
    weights
        The format of w of a call in numbers, as a spec of ``aot build`` names it (``mxfp4``, ``fp8_block``, ...), in
        place of dtype.
    sm
        A capability to explain for (90 for 9.0), in place of a GPU. Nothing counts as measured on it.
    device
        Which GPU, if neither x nor ``sm`` says; torch's current one.
    aligned
        Whether pointers, rows and strides are multiples of 16 bytes; what x, w and the sizes say, if None.
    top_k
        Of a Problem that gathers: how many sorted rows read each row of x, the experts of a token (of dX: 1). If None,
        the fewest that a model with this product has, of those that the bundles were built for, or 1 if there is none;
        ``assumed`` then says so.
    rank
        Of a call with ``lora``: the columns of A and B. ``low_rank`` then says which way that part takes.
    expected_rows
        The call's hint, 0 to M: the answer is for so many rows, and ``without_hint`` says what runs without it.

    Returns
    -------
    Explanation
        The kernel that runs, the other candidates and the reasons. ``print`` shows it as a table.

    Raises
    ------
    InputError
        if that is no call.
    HostError
        if there is neither a GPU nor ``sm``.
    """
    coded = False
    if x is not None and not isinstance(x, Problem):
        from ..weights.quantized_rows import QuantizedRows, checked  # here, as it brings torch along

        if isinstance(x, QuantizedRows):
            checked("explain", "x", x, w)
            x, coded = x.stand_in(), True
    if isinstance(x, Problem):
        check_numbers(E=x.E, N=x.N, K=x.K)
        problem, natural = x, suits(x)
    elif x is not None:
        problem, M, natural, device = of_tensors(x, w, m_sizes, w_layout, device)
    else:
        problem = of_numbers(E, N, K, dtype, weights, w_layout)
        natural = suits(problem)
    check_numbers(M=M)
    if rank is not None:
        problem = low_rank.with_rank(problem, rank)
    if top_k is not None:
        check_numbers(top_k=top_k)
    local = made_up_gpu(sm) if sm is not None else gpu_here(device)
    wide = aligned is None and not natural and (w is None or but_for_y(x, w, m_sizes, w_layout))
    aligned, rows = natural if aligned is None else aligned, M or 0
    if expected_rows is not None:
        from ..check.call import expected_bucket  # here, as it brings torch along

        expected_bucket("explain", expected_rows, rows, "M")
    how: dict[str, Any] = {"aligned": aligned, "wide_rows": wide, "top_k": top_k, "coded": coded}
    answer = explain_on(problem, rows, local, **how, expected_rows=expected_rows)
    if expected_rows is not None:
        other = explain_on(problem, rows, local, **how)
        answer = replace(answer, without_hint="the same" if other.summary == answer.summary else other.summary)
    return answer if rank is None else replace(answer, low_rank=low_rank.with_columns(answer.low_rank, rank))


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
) -> Explanation:
    """Explain a call on a GPU that need not be here.

    ``wide_rows``: the rows of y may be filled up to be aligned. ``coded``: x arrives as codes.
    """
    verdicts.recall(local)
    strict, likely = settings.settings().strict, M if expected_rows is None else expected_rows
    answer = (
        _of_codes(problem, likely, local, aligned, top_k or 0)
        if coded
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
    from ..launch.loader import self_test_text  # here, as it brings all that launches along

    return replace(answer, self_test=self_test_text(best.usable.bundle, best.index, best.variant, local))


def _with_few_rows_of_many(answer: Explanation, *, strict: bool) -> Explanation:
    """The answer if few rows of many are expected: a kernel with no program for each tile runs, if there is one."""
    problem, aligned = answer.problem, answer.aligned
    decision = settle(bundles.snapshot(), problem, answer.bucket, answer.local, aligned, strict, persistent=True)
    if not isinstance(decision, Decision):
        return answer
    why = f"{decision.reason}; others would have a program for each tile of the {answer.M} rows that there may be"
    return replace(answer, reason=why, candidates=(decision.chosen, *answer.candidates), gathered_first=False)


def _with_wide_rows(answer: Explanation) -> Explanation:
    """The answer for a plain call of which only y is not aligned: its rows are filled up, so aligned kernels run."""
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
    """Explain a problem over the bundles of ``snapshot``, with every candidate ranked; ``top_k`` is as in ``explain``.

    The kernel is chosen for M rows, of a call of ``rows``, which are M if None.

    One with silu in its epilogue runs where that pays, else the plain product does, and the activation after it. Rows
    are gathered beforehand where that pays, for an index that need not be checked; those of one token, ``top_k`` of
    them, are all its row, and no pass is before the product.
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
        part = low_rank.verdict(snapshot, problem, M, local, aligned=aligned, strict=strict)
        return replace(answer, problem=problem, **part.changes())
    if Fusion.SILU in problem.fusion:
        ruled = ways.fused_silu(snapshot, problem, M, local, top_k=top_k, aligned=aligned)
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
            if decided is not None:  # what this process tuned may end the search before installed bundles are read
                at = decided.usable.bundle, decided.index
                candidates = [
                    decided,
                    *(candidate for candidate in candidates if (candidate.usable.bundle, candidate.index) != at),
                ]
            why = reason(candidates[0], problem, bucket, local) if candidates else miss_reason(problem, local, view)
            why += _passed_over(candidates, local)
            build = None if candidates or not local.sm else build_line(problem, bucket, local.sm, view)
            if not candidates and local.sm and build is None:  # then what to do is no command
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
    """Why a choice of an earlier place in the bundle search path does not run; "" if there is none."""
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
    """Explain a product whose checkpoint has x quantised: x is quantised where that is faster, else left as it is.

    A pass that makes codes gathers the rows, too; a kernel that makes them itself gathers them on load. A low-rank part
    is in the kernel of the product with x as it is, or beside either.
    """
    *_, other = dtypes_of(problem.dtype.value)
    answer = examine(
        snapshot, problem._replace(dtype=other), M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows
    )
    if Fusion.LOW_RANK in problem.fusion:
        if answer.low_rank == low_rank.INSIDE:
            return answer
        alone = problem._replace(fusion=problem.fusion & ~Fusion.LOW_RANK)
        found_alone = _with_x_quantised(snapshot, alone, M, local, aligned, strict, top_k, rows)
        fusion = found_alone.problem.fusion | Fusion.LOW_RANK
        return replace(found_alone, problem=found_alone.problem._replace(fusion=fusion), low_rank=answer.low_rank)
    codes = problem._replace(layout=answer.problem.layout)
    passes, gathers = takes_codes_of_x(codes.dtype, codes.layout), Fusion.GATHER in problem.fusion
    left = codes._replace(fusion=codes.fusion & ~Fusion.GATHER) if passes else codes
    ruled = ways.quantised_x(snapshot, left, other, M, local, top_k=top_k if passes and gathers else 0, aligned=aligned)
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


def _of_codes(problem: Problem, M: int, local: LocalGpu, aligned: bool, top_k: int) -> Explanation:
    """Explain a product whose x arrives as codes: a row kernel orders and gathers them."""
    snapshot = bundles.snapshot()
    ruled = ways.of_codes(snapshot, problem, M, local, top_k=top_k, aligned=aligned)
    view, candidates = snapshot.view(local, installed=True), () if ruled.chosen is None else (ruled.chosen,)
    raises = None if candidates else f"InputError: no kernel here reads x as codes: {ruled.reason}"
    how: dict[str, Any] = {"raises": raises, "quantised_first": bool(candidates), "coded": True}
    return Explanation(problem, M, aligned, local, ruled.reason, candidates, view.skipped, **how)


def _gathered_first(
    snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, aligned: bool, top_k: int
) -> ways.Ruled | None:
    """True if rows are gathered beforehand; None if none are gathered, or no bundle's choice runs the problem."""
    if Fusion.GATHER not in problem.fusion:
        return None
    code = problem._replace(fusion=Fusion.GATHER)
    return ways.rows_first(snapshot, code, M, local, top_k=top_k, fusion=problem.fusion, aligned=aligned)


def _decided(
    snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu, aligned: bool, strict: bool
) -> tuple[Candidate | None, str | None]:
    """The candidate that a call runs, if a bundle has one; and the error that the call ends with, in words."""
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
    """A GPU of capability ``sm`` with the figures of its representative, and nobody's name.

    Raises
    ------
    InputError
        for a capability that there are no kernels for.
    """
    if not isinstance(sm, int) or sm not in arch.ARCHS:
        raise InputError(f"sm={sm!r} is not supported, wanted one of {', '.join(map(str, arch.supported()))}")
    chip = chips.chip_for(sm)
    return LocalGpu(sm, Gpu("", chip.sm_count, chip.memory_gib << 10, 0))
