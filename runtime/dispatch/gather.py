"""Whether the rows of x are gathered beforehand, into a scratch [M, K], for the plain product: the other way is code
that gathers them as it loads.

Rows that an index picks can't be loaded by TMA. What that costs a product, none to 4 % on an H200 in the same tiles and
up to 15 % where the plain product's are fitted to its rows (docs/inside/trials.md, gathered-rows-there), may be
more or less than a pass over the rows takes. So the pass runs only where one bundle says of both codes, for this very
problem and bucket, that it pays with the pass added, whose time is ``pass_us``:

- measured, on one GPU: the plain product and the pass take less;
- modelled: they take less by more than 5 %, which is what the cost model does not tell apart.

A call that scatters, weighs or has a bias as well needs the indexed code for it. No plan has choices for that beside a
gather: it is taken in the plain choice's config, or, where a bundle has no such code, in its runner-up's, at 5 % above
that one's time (an index costs a large tile up to 7 % on an H200: docs/inside/performance.md).

The code that gathers stays for a GPU whose memory's rate is not known, a bundle without the pass, a kernel that the
caller names, and rows of x that are not dense or not aligned.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import NamedTuple

from ...artifacts.records.bundle import Source
from ...artifacts.records.problem import Fusion, Problem, RowOp, bucket_of
from ...artifacts.records.target import Gpu, LocalGpu
from ...kernels.contract.rowops import by_token, dtype_of
from ...kernels.contract.spec import code_of, gemm_of
from ...kernels.hardware import chips
from . import compare, rowops
from .ranking import Candidate, why_not
from .snapshot import Rejected, Snapshot

# The pass's time: within 10 % of every gather at 1024 tokens and more in benchmarks/results/passes-h200.json (of fewer
# tokens a few us are all that it takes, and the file says up to 2.3 us more). The multiple is of the time in which the
# memory, at its published rate, moves the bytes once.
_FIXED_US, _TRAFFIC_TIMES = 3.7, 1.6
_BY_TOKEN_FIXED_US, _BY_TOKEN_TRAFFIC_TIMES = 6.5, 1.34  # where each row of x is read once (launch/gather.py)
_INDEX_BYTES = 8
CHECK_US = 4.0  # bringing an index that nobody vouches for into range: one launch
MARGIN = 1.05  # of modelled times
_INDEXED = 1.05  # what an index costs the plain product


def never_on_load(problem: Problem) -> bool:
    """Whether there is no code at all that gathers rows as it loads them: none of quantised weights does."""
    return problem.dtype.quantised


class GatherVerdict(NamedTuple):
    """The variant that multiplies rows gathered beforehand, or None for the code that gathers; and why.

    ``time_us`` is the one that counts: with the pass, if that runs.
    """

    chosen: Candidate | None
    reason: str
    time_us: float = 0.0


def verdict(
    snapshot: Snapshot,
    problem: Problem,
    M: int,
    local: LocalGpu,
    *,
    top_k: int,
    fusion: Fusion = Fusion.GATHER,
    aligned: bool = True,
    checks: bool = False,
) -> GatherVerdict:
    """Which of the two runs M rows of ``problem``, one with the code that gathers; the module says by what rule.

    ``fusion`` is all that the call does; ``top_k`` sorted rows read each row of x, 0 says that x can't be gathered
    beforehand; ``checks`` says that the index has to be brought into range.
    """
    bucket = bucket_of(M)
    while True:  # each turn drops a bundle
        with contextlib.suppress(Rejected):
            ran = compare.own(snapshot, problem, bucket, local, aligned)
            if isinstance(ran, str):
                return GatherVerdict(None, ran)
            return against(snapshot, ran, problem, bucket, local, top_k, fusion, aligned, checks)


def against(
    snapshot: Snapshot,
    ran: Candidate,
    problem: Problem,
    bucket: int,
    local: LocalGpu,
    top_k: int,
    fusion: Fusion,
    aligned: bool,
    checks: bool,
) -> GatherVerdict:
    """As ``verdict``, where ``ran`` is the choice of the code that gathers."""
    gather_us = pass_us_for(snapshot, ran, problem, bucket, local, top_k, aligned)
    if isinstance(gather_us, str):
        return GatherVerdict(None, gather_us, ran.time_us)
    gather_us += CHECK_US if checks else 0.0
    plain = replace(problem, fusion=Fusion.NONE, top_k=0)
    found = compare.rival(snapshot, ran, plain, bucket, local, aligned)
    if isinstance(found, Candidate) and code_of(problem.op, fusion & ~Fusion.GATHER):
        runner_up = compare.second(snapshot, found, plain, local, aligned)
        found = _indexed(snapshot, found, runner_up, replace(plain, fusion=Fusion.SCATTER), local, aligned)
    if isinstance(found, str):
        return GatherVerdict(None, f"rows are gathered on load: for the plain GEMM, {found}", ran.time_us)
    times = f"{found.time_us:.1f} us {found.source.value} and the row kernel {gather_us:.1f} us, "
    times += f"gathered on load {ran.time_us:.1f} us"
    time_us = found.time_us + gather_us
    if time_us * (MARGIN if found.source is Source.MODELLED else 1.0) >= ran.time_us:
        return GatherVerdict(None, f"gathering rows first is not faster: {times}", ran.time_us)
    return GatherVerdict(found, f"gathering rows first is faster at M near {bucket}: the GEMM {times}", time_us)


def pass_us_for(
    snapshot: Snapshot, ran: Candidate, problem: Problem, bucket: int, local: LocalGpu, top_k: int, aligned: bool
) -> float | str:
    """The pass's time on the GPU that ``ran`` was measured on (modelled: here); in words why there is none."""
    gpu = local.gpu if ran.gpu is None else ran.gpu
    if not top_k or not aligned:
        return "rows are gathered on load: the row kernel needs dense, aligned rows"
    if not rowops.ranked(snapshot, RowOp.GATHER, dtype_of(problem.dtype), local, aligned=True):
        return "rows are gathered on load: no usable bundle has the row kernel that gathers them"
    gather_us = pass_us(bucket, gemm_of(problem).reduction, problem.dtype.itemsize, top_k, gpu)
    return "rows are gathered on load: the bandwidth of this GPU is not known" if gather_us is None else gather_us


def pass_us(M: int, K: int, itemsize: int, top_k: int, gpu: Gpu) -> float | None:
    """What the pass takes for M rows of K elements, in us; None for a GPU whose memory's rate is not known.

    It reads the index and M/top_k rows of x, and writes M rows.
    """
    chip = chips.chip_named(gpu.name)
    if chip is None:
        return None
    moved_bytes = (M + M / top_k) * K * itemsize + _INDEX_BYTES * M
    once = by_token(M, K * itemsize, M, top_k)
    fixed_us, times = (_BY_TOKEN_FIXED_US, _BY_TOKEN_TRAFFIC_TIMES) if once else (_FIXED_US, _TRAFFIC_TIMES)
    return fixed_us + times * moved_bytes / chip.bandwidth_gbs * 1e-3


def _indexed(
    snapshot: Snapshot, plain: Candidate, runner_up: Candidate | None, problem: Problem, local: LocalGpu, aligned: bool
) -> Candidate | str:
    """The indexed code in the plain choice's config, or else in its runner-up's."""
    for one in (plain, runner_up) if runner_up is not None else (plain,):
        for index, variant in snapshot.variants(one.usable.bundle, problem):
            alike = variant.config == one.variant.config and variant.alignment == one.variant.alignment
            if alike and why_not(variant, problem, local, aligned=aligned) is None:
                return replace(one, index=index, variant=variant, time_us=_INDEXED * one.time_us)
    return "none in that config, or the runner-up's, stores by index"
