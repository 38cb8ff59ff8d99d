"""Whether x is quantised, too, for weights whose checkpoints have it so: codes times codes, or codes times bf16.

Codes multiply twice as fast, and x is read as half as many bytes; but a pass has to quantise it (``rowops.CODE_OPS``),
and few rows wait for w alone. So x is quantised only where one bundle says of both products, for this very problem and
bucket, that it pays with the pass added, whose time is ``pass_us``:

- measured, on one GPU: the product of codes and its pass take less than the other, with the pass that gathers its rows
  where they are gathered;
- modelled: by more than 5 %, which is what the cost model does not tell apart.

The kernels for w as it is stored quantise x themselves: their products have no pass, and rows are gathered on load.
Without a choice of their own for either, both are modelled and compared likewise. A bundle without the pass, a GPU
whose memory's rate is not known and rows of x that are not dense leave x as it is.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import NamedTuple

from ...artifacts.records.bundle import Source
from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Problem, bucket_of
from ...artifacts.records.target import Gpu, LocalGpu
from ...kernels.contract.coded import takes_codes_of_x
from ...kernels.contract.registry import has_code
from ...kernels.contract.rowops import CODE_OPS, dtype_of
from ...kernels.hardware import chips
from ...kernels.hardware.arch import ARCHS, Feature
from . import compare, gather, rowops
from .decide import Decision, settle
from .ranking import Candidate, Match
from .snapshot import Rejected, Snapshot

_FIXED_US, _TRAFFIC_TIMES = 6.0, 1.15  # of the time in which the memory, at its published rate, moves the bytes once
_ELEMENTS_PER_SM_US = 8000.0  # measured on an H100: many rows are bound by the arithmetic


class ActivationsVerdict(NamedTuple):
    """The variant that multiplies codes by codes, or None where x stays as it is; and why."""

    chosen: Candidate | None
    reason: str


def verdict(
    snapshot: Snapshot, problem: Problem, other: DType, M: int, local: LocalGpu, *, top_k: int, aligned: bool = True
) -> ActivationsVerdict:
    """Which product runs M rows: ``problem``, whose x is quantised, or that of ``other``; the module has the rule.

    ``top_k`` sorted rows read each row of x where a pass gathers them, 0 says that none does. ``aligned`` is as in
    ``decide``.
    """
    bucket = bucket_of(M)
    while True:  # each turn drops a bundle
        with contextlib.suppress(Rejected):
            return _verdict(snapshot, problem, replace(problem, dtype=other), bucket, local, top_k, aligned)


def without_code(problem: Problem, local: LocalGpu) -> str | None:
    """Why no product on a GPU has x quantised for it, for that no kernel does so there, or None."""
    known = ARCHS.get(local.sm)
    if known is None or has_code(problem.op, problem.dtype, local.sm, problem.layout):
        return None
    if not known.has(Feature.FP8):
        return f"x stays bf16: {known} has no products of e4m3, so w becomes bf16"
    return f"x stays bf16: no kernel for {known} multiplies codes by codes of such w"


def pass_us(M: int, K: int, top_k: int, gpu: Gpu) -> float | None:
    """What quantising M rows of K elements takes, in us; None for a GPU whose memory's rate is not known.

    It reads M rows of bf16, or M / top_k that an index picks, and writes M rows of codes and scales.
    """
    chip = chips.chip_named(gpu.name)
    if chip is None:
        return None
    moved_bytes = 2.0 * K * (M / top_k if top_k else M) + M * (K + K / 32)
    traffic_us = _TRAFFIC_TIMES * moved_bytes / chip.bandwidth_gbs * 1e-3
    return _FIXED_US + max(traffic_us, M * K / (chip.sm_count * _ELEMENTS_PER_SM_US))


def _pass_of(snapshot: Snapshot, problem: Problem, local: LocalGpu) -> bool:
    """Whether some usable bundle has the row kernel that quantises x."""
    op = CODE_OPS[problem.dtype].quantize
    return bool(rowops.ranked(snapshot, op, dtype_of(problem.dtype), local, aligned=True))


def _verdict(
    snapshot: Snapshot, problem: Problem, plain: Problem, bucket: int, local: LocalGpu, top_k: int, aligned: bool
) -> ActivationsVerdict:
    passes = takes_codes_of_x(problem.dtype, problem.layout)
    if lacking := without_code(problem, local):
        return ActivationsVerdict(None, lacking)
    if not passes and not snapshot.serves(problem, local):
        return ActivationsVerdict(None, "x stays bf16: no bundle has the GEMM with quantised x")
    if passes and not _pass_of(snapshot, problem, local):
        return ActivationsVerdict(None, "x stays bf16: no usable bundle has the row kernel that quantises it")
    ran = settle(snapshot, plain, bucket, local, aligned, False)
    found: Candidate | str
    if not isinstance(ran, Decision):  # nothing else runs
        alone = settle(snapshot, problem, bucket, local, aligned, False)
        if isinstance(alone, Decision):
            return ActivationsVerdict(alone.chosen, "x is quantised: no bundle has the GEMM with bf16 x")
        return ActivationsVerdict(None, "no bundle has this GEMM")
    if ran.chosen.match is Match.EXACT:
        found = compare.rival(snapshot, ran.chosen, problem, bucket, local, aligned)
    else:
        other = settle(snapshot, problem, bucket, local, aligned, False)
        found = other.chosen if isinstance(other, Decision) else "no bundle has it"
        if isinstance(found, Candidate) and (found.match, ran.chosen.match) != (Match.COST_MODEL, Match.COST_MODEL):
            found = "its time and the time with bf16 x are not from one source"
    if isinstance(found, str):
        return ActivationsVerdict(None, f"x stays bf16: for the GEMM with quantised x, {found}")
    gpu = local.gpu if ran.chosen.gpu is None else ran.chosen.gpu
    own_us = pass_us(bucket, problem.K, top_k, gpu) if passes else 0.0
    gather_us = gather.pass_us(bucket, problem.K, 2, top_k, gpu) if top_k and passes else 0.0
    if own_us is None or gather_us is None:
        return ActivationsVerdict(None, "x stays bf16: the bandwidth of this GPU is not known")
    beside = f" and the gather {gather_us:.1f} us" if gather_us else ""
    times = f"{found.time_us:.1f} us {found.source.value}"
    times += f" and the row kernel {own_us:.1f} us, with bf16 x " if passes else ", with bf16 x "
    times += f"{ran.chosen.time_us:.1f} us{beside}"
    margin = gather.MARGIN if found.source is Source.MODELLED else 1.0
    if (found.time_us + own_us) * margin >= ran.chosen.time_us + gather_us:
        return ActivationsVerdict(None, f"quantising x is not faster: {times}")
    return ActivationsVerdict(found, f"quantising x is faster at M near {bucket}: the GEMM {times}")
