"""``explain``: which variant a call would run, why, what the next best was, and what was skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...artifacts.errors import HostError, InputError, PretunedError
from ...artifacts.records.precision import dtypes_of
from ...artifacts.records.problem import Fusion, Op, Problem, bucket_of
from ...artifacts.records.target import Gpu, LocalGpu
from ...kernels.contract.spec import takes_codes_of_x
from ...kernels.hardware import arch, chips
from .. import settings, verdicts
from ..dispatch import compiled, plans
from ..dispatch import snapshot as bundles
from ..dispatch.decide import Decision, miss_reason, reason, settle, whole_columns, with_wide_rows
from ..dispatch.hints import build_line, remedy
from ..dispatch.ranking import Candidate, Match, Origin, chosen, idles, modelled, summed
from ..dispatch.snapshot import Rejected, Snapshot, View
from ..driver.device import current_device, local_gpu
from . import low_rank, ways
from .asked import as_read, assumed_top_k, but_for_y, check_numbers, of_numbers, of_tensors, suits
from .explanation import Explanation

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
    """What ``grouped_gemm`` would run, without running it.

    Rows that are gathered are taken to be so by an index of ``sort_routing``, which need not be checked.

    Parameters
    ----------
    x, w, m_sizes
        The tensors of a call, on CUDA or (with ``sm``) anywhere, also of padded rows x [E, M_max, K]; or a Problem in
        place of x, with ``M``. w may be ``ExpertWeights``, which are left as they are, and then x ``QuantizedRows``.
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
        from ..check.form import expected_bucket  # here, as it brings torch along

        expected_bucket("explain", expected_rows, rows, "M")
    how: dict[str, Any] = {"aligned": aligned, "wide_rows": wide, "top_k": top_k, "coded": coded}
    told = explain_on(problem, rows, local, **how, expected_rows=expected_rows)
    if expected_rows is not None:
        other = explain_on(problem, rows, local, **how)
        told = replace(told, without_hint="the same" if other.summary == told.summary else other.summary)
    return told if rank is None else replace(told, low_rank=low_rank.with_columns(told.low_rank, rank))


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
    told = (
        _of_codes(problem, likely, local, aligned, top_k or 0)
        if coded
        else examine(bundles.snapshot(), problem, likely, local, aligned=aligned, strict=strict, top_k=top_k, rows=M)
    )
    told = replace(told, M=M, expected_rows=expected_rows)
    if wide_rows and told.raises is None:
        told = _with_wide_rows(told)
    if told.chosen is not None and idles(told.chosen.variant, told.problem, M, told.bucket):
        told = _with_few_rows_of_many(told, strict=strict)
    best, invariance = told.chosen, bundles.snapshot().invariance
    if invariance is not None and problem.op is not Op.DW:
        told = replace(told, invariance=str(invariance))
        if best is None:
            return replace(
                told, raises=told.raises or "ProblemNotInBundle: in the batch-invariant mode torch runs nothing"
            )
        told = replace(told, order=str(summed(best.usable, best.variant, problem)))
    if best is None:
        return told
    from ..launch.loader import standing  # here, as it brings all that launches along

    return replace(told, self_test=standing(best.usable.bundle, best.index, best.variant, local))


def _with_few_rows_of_many(told: Explanation, *, strict: bool) -> Explanation:
    """The same where few rows of many are expected: code that has no program for each tile runs then, if there is."""
    problem, aligned = told.problem, told.aligned
    found = settle(bundles.snapshot(), problem, told.bucket, told.local, aligned, strict, persistent=True)
    if not isinstance(found, Decision):
        return told
    why = f"{found.reason}; others would have a program for each tile of the {told.M} rows that there may be"
    return replace(told, reason=why, candidates=(found.chosen, *told.candidates), gathered_first=False)


def _with_wide_rows(told: Explanation) -> Explanation:
    """The same of a plain call whose y alone is not aligned, where its rows are filled up: aligned code runs then."""
    problem, local = told.problem, told.local
    M = told.M if told.expected_rows is None else told.expected_rows
    wide = with_wide_rows(bundles.snapshot(), problem, M, local)
    if wide is None:
        return told
    whole = problem._replace(N=whole_columns(problem))
    why = f"{reason(wide, whole, bucket_of(M), local)}; each row of y is filled up to {whole.N} columns"
    return replace(told, aligned=True, reason=why, candidates=(wide, *told.candidates), compiles=False, build=None)


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
        told = examine(snapshot, problem, M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows)
        return replace(told, assumed=assumed)
    if problem.dtype.quantises_x and problem.op is Op.FORWARD:
        return _with_x_quantised(snapshot, problem, M, local, aligned, strict, top_k, rows)
    if (stored := as_read(snapshot, problem, local)) is not problem:
        return examine(snapshot, stored, M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows)
    if Fusion.GATHER in problem.fusion and plans.never_on_load(problem):
        left = problem._replace(fusion=problem.fusion & ~Fusion.GATHER)
        told = examine(snapshot, left, M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows)
        first = told.chosen is not None and top_k != rows
        return replace(told, problem=problem, gathered_first=first)
    if Fusion.LOW_RANK in problem.fusion:
        alone = problem._replace(fusion=problem.fusion & ~Fusion.LOW_RANK)
        told = examine(snapshot, alone, M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows)
        part = low_rank.verdict(snapshot, problem, M, local, aligned=aligned, strict=strict)
        return replace(told, problem=problem, **part.told())
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
            found = [one for i, one in enumerate(claimed) if one.match is Match.EXACT or not i]
            known = {(one.usable.order, one.index) for one in found}
            found += [
                one
                for one in modelled(snapshot, problem, bucket, local, view, aligned=aligned)
                if (one.usable.order, one.index) not in known
            ]
            if not found:
                reserve = snapshot.reserve(local)
                found = modelled(snapshot, problem, bucket, local, reserve, aligned=aligned)
                view = View(view.usable, view.skipped + reserve.skipped)
            found.sort(key=lambda candidate: (candidate.origin, candidate.match))
            decided, raises = _decided(snapshot, problem, bucket, local, aligned, strict)
            if decided is not None:  # what this process tuned may end the search before installed bundles are read
                at = decided.usable.bundle, decided.index
                found = [decided, *(one for one in found if (one.usable.bundle, one.index) != at)]
            why = reason(found[0], problem, bucket, local) if found else miss_reason(problem, local, view)
            why += _passed_over(found, local)
            build = None if found or not local.sm else build_line(problem, bucket, local.sm, view)
            if not found and local.sm and build is None:  # then what to do is no command
                why = f"{why}. {remedy(problem, bucket, local.sm, view)}"
            compiles = not found and compiled.would_compile(problem, local)
            ruled_rows = _gathered_first(snapshot, problem, M, local, aligned, top_k)
            before = None if ruled_rows is None else ruled_rows.chosen
            if ruled_rows is not None:
                why = f"{why}; {ruled_rows.reason}" if before is None else ruled_rows.reason
            found = found if before is None else [before, *found]
            return Explanation(
                problem,
                M,
                aligned,
                local,
                why,
                tuple(found),
                view.skipped,
                compiles,
                raises,
                gathered_first=before is not None and top_k != rows,
                build=build,
            )


def _passed_over(found: Sequence[Candidate], local: LocalGpu) -> str:
    """Why a choice of an earlier place in the bundle search path does not run; "" if there is none."""
    for one in found[1:]:
        earlier = one.usable.order < found[0].usable.order and one.usable.place != found[0].usable.place
        if earlier and one.match is not Match.COST_MODEL:
            what = {
                Origin.THIS_GPU: "measured on this GPU, but for other rows",
                Origin.THIS_CAPABILITY: f"measured on {one.gpu.name if one.gpu else '?'}",
                Origin.MODELLED: "only modelled",
            }.get(one.origin, f"code for {one.usable.bundle.target}")
            return f". That ranks before the choice of {one.usable.path.name} ({one.usable.place.kind.value}): {what}"
    return ""


def _with_x_quantised(
    snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, aligned: bool, strict: bool, top_k: int, rows: int
) -> Explanation:
    """Of weights whose checkpoint has x quantised: that product where it pays, else the one with x as it is; and why.

    A pass that makes codes gathers the rows, too; a kernel that makes them itself gathers them on load. A low-rank part
    is in the kernel of the product with x as it is, or beside either.
    """
    *_, other = dtypes_of(problem.dtype.value)
    told = examine(
        snapshot, problem._replace(dtype=other), M, local, aligned=aligned, strict=strict, top_k=top_k, rows=rows
    )
    if Fusion.LOW_RANK in problem.fusion:
        if told.low_rank == low_rank.INSIDE:
            return told
        alone = problem._replace(fusion=problem.fusion & ~Fusion.LOW_RANK)
        found_alone = _with_x_quantised(snapshot, alone, M, local, aligned, strict, top_k, rows)
        fusion = found_alone.problem.fusion | Fusion.LOW_RANK
        return replace(found_alone, problem=found_alone.problem._replace(fusion=fusion), low_rank=told.low_rank)
    codes = problem._replace(layout=told.problem.layout)
    passes, gathers = takes_codes_of_x(codes.dtype, codes.layout), Fusion.GATHER in problem.fusion
    left = codes._replace(fusion=codes.fusion & ~Fusion.GATHER) if passes else codes
    ruled = ways.quantised_x(snapshot, left, other, M, local, top_k=top_k if passes and gathers else 0, aligned=aligned)
    if ruled.chosen is None or (passes and not aligned):
        return replace(told, reason=f"{told.reason}; {ruled.reason}") if told.candidates else told
    found = (ruled.chosen, *told.candidates)
    return replace(
        told,
        problem=codes,
        reason=ruled.reason,
        candidates=found,
        compiles=False,
        raises=None,
        build=None,
        gathered_first=False,
        quantised_first=passes,
    )


def _of_codes(problem: Problem, M: int, local: LocalGpu, aligned: bool, top_k: int) -> Explanation:
    """Of x that arrives as codes: a row kernel orders them, and gathers them, too."""
    snapshot = bundles.snapshot()
    ruled = ways.of_codes(snapshot, problem, M, local, top_k=top_k, aligned=aligned)
    view, found = snapshot.view(local, installed=True), () if ruled.chosen is None else (ruled.chosen,)
    raises = None if found else f"InputError: no kernel here reads x as codes: {ruled.reason}"
    how: dict[str, Any] = {"raises": raises, "quantised_first": bool(found), "coded": True}
    return Explanation(problem, M, aligned, local, ruled.reason, found, view.skipped, **how)


def _gathered_first(
    snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, aligned: bool, top_k: int
) -> ways.Ruled | None:
    """Whether rows are gathered beforehand; None where none are gathered, or no choice of a bundle runs the problem."""
    if Fusion.GATHER not in problem.fusion:
        return None
    code = problem._replace(fusion=Fusion.GATHER)
    return ways.rows_first(snapshot, code, M, local, top_k=top_k, fusion=problem.fusion, aligned=aligned)


def _decided(
    snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu, aligned: bool, strict: bool
) -> tuple[Candidate | None, str | None]:
    """What a call runs, if a bundle does; the error that it ends with, in words."""
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
    """Digest (hex) of the usable bundles, in order, and the GPU's identity: ranks with equal ones choose alike for
    equal calls, with equal ``expected_rows``.

    ``device`` is an index of torch's; its current device if None. Without a GPU it is that of machines without one.
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
