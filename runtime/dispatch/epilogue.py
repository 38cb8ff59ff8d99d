"""Whether silu(gate) * up is computed in the first product's epilogue, where a layer keeps no h for a gradient.

The code for it (``Fusion.SILU``) stores half of the columns and saves the pass over h, and has no small tiles. Rows
are gathered as it loads, or beforehand by a pass, as they are for the plain product (``gather.py``): the quicker of
either is compared. So it runs only where one bundle says of both, for this very problem and bucket, that it takes less
time:

- measured, on one GPU: the fused product takes no longer than the plain product's choice and the least that the pass
  takes beside it. That is 1.1 x the time in which the GPU's memory, at its published rate, moves h and the result
  once (``_PASS_TIMES``). It is zero for a GPU whose rate is not known;
- modelled: its estimate is not above the plain product's, and an expert has 64 rows, half of a tile, in the mean: there
  every trial on an H200 won, with 8 it lost, and the cost model does not tell the two kinds of tiles apart so well.

Else the layer runs the plain product and the pass, as it does with a bias, another activation or a gradient.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import NamedTuple

from ...artifacts.records.bundle import Source
from ...artifacts.records.problem import Fusion, Problem, bucket_of
from ...artifacts.records.target import Gpu, LocalGpu
from ...kernels.contract.spec import code_of, result_columns
from ...kernels.hardware import chips
from . import compare, gather
from .ranking import Candidate
from .snapshot import Rejected, Snapshot

_MODELLED_ROWS = 64  # of an expert
# Of the time in which the memory, at its published rate, moves what the pass moves: 1.13 to 1.63 on an H200
# (docs/inside/trials.md, activation-behind-products).
_PASS_TIMES = 1.1


class EpilogueVerdict(NamedTuple):
    """The variant with silu in its epilogue that runs, or None for the plain product and a pass; and why.

    Asked of code that gathers, one that does not is for rows gathered beforehand.
    """

    chosen: Candidate | None
    reason: str


def verdict(
    snapshot: Snapshot,
    problem: Problem,
    M: int,
    local: LocalGpu,
    *,
    aligned: bool,
    top_k: int = 1,
    checks: bool = False,
) -> EpilogueVerdict:
    """Which of the two runs M rows of ``problem``, one with ``Fusion.SILU``; the module says by what rule.

    ``top_k`` and ``checks`` are as ``gathered.verdict`` has them.
    """
    while True:  # each turn drops a bundle
        with contextlib.suppress(Rejected):
            return _verdict(snapshot, problem, bucket_of(M), local, aligned, top_k, checks)


def plain_of(problem: Problem) -> Problem:
    """The product without silu."""
    return replace(problem, fusion=code_of(problem.op, problem.fusion & ~Fusion.SILU))


def least_pass_us(problem: Problem, M: int, gpu: Gpu) -> float:
    """What the pass that silu in the epilogue saves takes at least, on a GPU that it was measured on; 0 if unknown.

    It reads h [M, N] and writes [M, N/2].
    """
    chip = chips.chip_named(gpu.name)
    if chip is None:
        return 0.0
    moved_bytes = M * (problem.N + result_columns(problem.N, problem.fusion)) * problem.dtype.itemsize
    return _PASS_TIMES * moved_bytes / chip.bandwidth_gbs * 1e-3


def _verdict(
    snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu, aligned: bool, top_k: int, checks: bool
) -> EpilogueVerdict:
    plain = plain_of(problem)
    ran = compare.own(snapshot, plain, bucket, local, aligned)
    if isinstance(ran, str):
        return EpilogueVerdict(None, ran)
    fused = compare.rival(snapshot, ran, problem, bucket, local, aligned)
    product_us, time_us = ran.time_us, fused.time_us if isinstance(fused, Candidate) else 0.0
    before = ""
    if Fusion.GATHER in problem.fusion:
        split = gather.against(snapshot, ran, plain, bucket, local, top_k, plain.fusion, aligned, checks)
        product_us = split.time_us
        gather_us = gather.pass_us_for(snapshot, ran, plain, bucket, local, top_k, aligned)
        other = compare.rival(snapshot, ran, replace(problem, fusion=Fusion.SILU), bucket, local, aligned)
        if isinstance(other, Candidate) and not isinstance(gather_us, str):
            other_us = other.time_us + gather_us + (gather.CHECK_US if checks else 0.0)
            margin = gather.MARGIN if other.source is Source.MODELLED else 1.0
            if isinstance(fused, str) or other_us * margin < time_us:
                fused, time_us, before = other, other_us, " with the rows gathered first"
    if isinstance(fused, str):
        return EpilogueVerdict(None, fused)
    if fused.gpu is None and bucket < _MODELLED_ROWS * problem.E:
        return EpilogueVerdict(
            None, f"its time is modelled, and {bucket} rows are fewer than {_MODELLED_ROWS} an expert"
        )
    saved_us = 0.0 if fused.gpu is None else least_pass_us(problem, bucket, fused.gpu)
    times = f"{time_us:.1f} us {fused.source.value}{before}, the plain GEMM {product_us:.1f} us"
    times += f" and the activation {saved_us:.1f} us at least" if saved_us else ""
    if time_us > product_us + saved_us:
        return EpilogueVerdict(None, f"it is slower: {times}")
    return EpilogueVerdict(fused, f"silu in the epilogue is faster at M near {bucket}: {times}")
