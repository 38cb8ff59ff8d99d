"""Explains the low-rank part of a product with an adapter: inside the product's kernel or beside it, and why."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ...artifacts.errors import InputError
from ...artifacts.records import PRECISIONS, DType, Fusion, Layout, Op, Problem, bucket_of, dtypes_of
from ...artifacts.tuples import NamedTuple
from ...kernels.entry import ALIGNMENT_BYTES
from ...kernels.rowops import CODE_OPS
from ...kernels.spec import code_of
from ..check.call import MAX_RANK
from ..dispatch.decide import with_low_part
from ..dispatch.ranking import Candidate, modelled
from ..dispatch.snapshot import Rejected

if TYPE_CHECKING:
    from ...artifacts.records import LocalGpu
    from ..dispatch.snapshot import Snapshot

_ITEM_BYTES = 2  # of what such code reads
INSIDE = "in the GEMM's kernel, as part of its reduction"


class LowRankVerdict(NamedTuple):
    """The variants that have the part in them, the first of which runs; or none, and why that is."""

    candidates: tuple[Candidate, ...]
    reason: str

    def changes(self) -> dict[str, Any]:
        """The fields in which an explanation differs from that of the product without an adapter."""
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
    """The problem with a low-rank part of ``rank`` columns; InputError for a product that takes none."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise InputError(f"explain: rank is {rank!r}, wanted the columns of an adapter, an int of 1 to {MAX_RANK}")
    if problem.op is Op.DW or Fusion.SILU in problem.fusion:
        raise InputError("explain: rank of dW, or of a product with silu in it: neither has a low-rank part")
    return problem._replace(fusion=problem.fusion | Fusion.LOW_RANK)


def with_columns(text: str | None, rank: int) -> str:
    """A text of ``low_rank`` with the number of columns."""
    wide = -(-rank * _ITEM_BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // _ITEM_BYTES
    own = f", {rank} of them the adapter's" if wide != rank else ""
    return f"{text}: {wide} columns{own}" if text == INSIDE else str(text)


def verdict(
    snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, *, aligned: bool, strict: bool
) -> LowRankVerdict:
    """Decide a problem with ``Fusion.LOW_RANK`` as ``launch/ready.py`` and ``launch/quantised.py`` do."""
    why = _ruled_out(problem, aligned=aligned, strict=strict)
    if why is not None:
        return LowRankVerdict((), why)
    code = problem._replace(fusion=code_of(problem.op, problem.fusion))
    best = with_low_part(snapshot, code, M, local)
    if best is None:
        return LowRankVerdict((), f"no shipped kernel for it runs on sm_{local.sm}")
    others: list[Candidate] = []
    with contextlib.suppress(Rejected):
        others = modelled(snapshot, code, bucket_of(M), local, snapshot.reserve(local), aligned=True)
    rest = (candidate for candidate in others if candidate.index != best.index or candidate.usable is not best.usable)
    first = not others or best.config == others[0].config
    why = "the cost model's choice" if first else "the config of the GEMM without an adapter"
    return LowRankVerdict((best, *rest), f"{why}. Only the shipped candidates have low-rank kernels")


def _ruled_out(problem: Problem, *, aligned: bool, strict: bool) -> str | None:
    """Why no kernel can add the low-rank part; None if one may."""
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
