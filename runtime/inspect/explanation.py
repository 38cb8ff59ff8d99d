"""``explain``'s answer: which variant a call would run and why, as a table or as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...artifacts.errors import TargetMismatch
from ...artifacts.limits import printable
from ...artifacts.records import Fusion, LocalGpu, Problem, bucket_of
from ...kernels.entry import slow_rows
from ..dispatch.decide import Candidate, Match, Origin
from ..dispatch.snapshot import Skipped

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Explanation:
    """The kernels that a call would run, and why. ``str()`` is a table, ``to_dict()`` is for JSON.

    ``problem`` and ``M`` are the call, ``aligned`` says whether its tensors are multiples of 16 bytes, ``local`` is the
    GPU, ``reason`` says why the first candidate runs, and ``skipped`` are the bundles that this GPU can't use.
    ``compiles`` says that Triton would compile a kernel first.

    ``candidates`` are ranked, the first is what runs; there are none where torch would run it, or Triton would first
    compile it (``runs``, after ``allow_jit``). Past the first, times are for this very bucket: what a bundle says of
    it, or else what the cost model expects. With ``gathered_first`` a pass gathers the rows of x beforehand, and the
    first is for the product that is left: its time is without the pass, whose time ``reason`` has. So it is with
    ``quantised_first``, of a row kernel that makes codes of x, or with ``coded`` orders those that x is; the others
    leave x as it is. ``raises`` is the error that the call ends with instead, if any: of strict mode, or of a file that
    PRETUNED_BUNDLES names. ``assumed`` says, of rows that are gathered, which top_k was taken where none was given.
    ``self_test`` says where the kernel was tested on this capability, or that it is tested before its first use
    (``launch/self_test.py``). Where no bundle can run it ``build`` is the command that makes one that can, and the last
    line of ``str()``. ``low_rank`` says, of a product with an adapter, whether its part is in the product's kernel or
    beside it, and why. If torch's grouped_mm was measured faster on this GPU, torch runs the call (``torch_us``), and
    the first candidate a call with ``out``. With ``expected_rows`` the kernel is chosen for so many rows, and
    ``without_hint`` says what runs for M.
    ``invariance`` says how in the batch-invariant mode, and ``order`` in which order the kernel sums K.
    """

    problem: Problem
    M: int
    aligned: bool
    local: LocalGpu
    reason: str
    candidates: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...]
    compiles: bool = False
    raises: str | None = None
    gathered_first: bool = False
    quantised_first: bool = False
    assumed: str | None = None
    build: str | None = None
    self_test: str | None = None
    low_rank: str | None = None
    expected_rows: int | None = None
    without_hint: str | None = None
    invariance: str | None = None
    order: str | None = None
    coded: bool = False

    @property
    def bucket(self) -> int:
        """The bucket of rows that the kernel is chosen for."""
        return bucket_of(self.M if self.expected_rows is None else self.expected_rows)

    @property
    def chosen(self) -> Candidate | None:
        """The variant that runs, or None for torch."""
        return self.candidates[0] if self.candidates else None

    @property
    def torch_us(self) -> float | None:
        """The time of torch's grouped_mm, if it runs the call because it was measured faster."""
        return None if self.chosen is None or self.problem.fusion else self.chosen.torch_us

    @property
    def steps(self) -> tuple[str, ...]:
        """The kernels that the call launches of a bundle, in their order; () if something else runs it."""
        best = self.chosen
        if best is None or self.torch_us is not None:
            return ()
        first = (f"gather the rows of x into a scratch [{self.M}, K]",) if self.gathered_first else ()
        does = "order the codes" if self.coded else "quantise the rows"
        first = (f"{does} of x into codes [{self.M}, K]",) if self.quantised_first else first
        return *first, f"{best.variant.entry} {best.config}"

    @property
    def summary(self) -> str:
        """``steps`` in a line, or what runs the call where there are none."""
        return ", then ".join(self.steps) or self.runs

    @property
    def runs(self) -> str:
        """``bundle``, ``jit`` or ``torch``, whichever runs the call."""
        if self.torch_us is not None:
            return "torch"
        return "bundle" if self.candidates else "jit" if self.compiles else "torch"

    @property
    def measured_on(self) -> tuple[str, ...]:
        """GPUs of the candidates' measured choices, if the answer is for a capability and no particular GPU.

        The first is the one that the answer is for.
        """
        if self.local.gpu.name:
            return ()
        return tuple(dict.fromkeys(candidate.gpu.name for candidate in self.candidates if candidate.gpu is not None))

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain values."""
        p = self.problem
        return {
            "problem": {
                "op": p.op.value,
                "dtype": p.dtype.value,
                "E": p.E,
                "N": p.N,
                "K": p.K,
                "w": p.layout.value,
                "fused": [str(fusion.name).lower() for fusion in Fusion if fusion and fusion in p.fusion],
            },
            "M": self.M,
            "bucket": self.bucket,
            "expected_rows": self.expected_rows,
            "without_hint": self.without_hint,
            "batch_invariant": self.invariance,
            "order": self.order,
            "aligned": self.aligned,
            "gpu": {"sm": self.local.sm, "name": self.local.gpu.name or None, "sm_count": self.local.gpu.sm_count},
            "runs": self.runs,
            "torch_us": self.torch_us,
            "raises": self.raises,
            "gathered_first": self.gathered_first,
            "quantised_first": self.quantised_first,
            "coded": self.coded,
            "steps": list(self.steps),
            "assumed": self.assumed,
            "reason": self.reason,
            "note": slow_rows(self.problem),
            "measured_on": list(self.measured_on),
            "self_test": self.self_test,
            "low_rank": self.low_rank,
            "build": self.build,
            "candidates": [_row(candidate) for candidate in self.candidates],
            "skipped": [{"path": str(entry.path), "reason": entry.reason} for entry in self.skipped],
        }

    def __str__(self) -> str:
        lines = [f"{self.problem} M={self.M} (bucket {self.bucket}) on {self.local}"]
        lines += [] if self.aligned else ["  tensors are not aligned to 16 bytes: only unaligned variants can run"]
        lines += [f"  assumed: {self.assumed}"] if self.assumed is not None else []
        best = self.chosen
        otherwise = "what Triton compiles in the first call (allow_jit)" if self.compiles else "torch"
        if self.raises is not None:
            lines.append(f"  the call raises: {self.raises}")
        runs = otherwise if best is None else best.config if self.torch_us is None else best.by_torch
        lines.append(f"  {'runs' if self.raises is None else 'else'}: {runs}")
        if self.gathered_first:
            lines.append("  after a row kernel that gathers the rows of x into a scratch [M, K]")
        lines += [f"  step {place}: {step}" for place, step in enumerate(self.steps, 1)]
        if best is not None:
            lines.append(f"  from: {best.usable.path}, {best.usable.place.kind.value}, variant {best.index}")
        lines.append(f"  why:  {self.reason}")
        if self.expected_rows is not None:
            what = f"expected_rows={self.expected_rows}: chosen for bucket {self.bucket}"
            lines.append(f"  hint: {what}; for M={self.M} it is {self.without_hint}")
        lines += [f"  mode: {self.invariance}"] if self.invariance is not None else []
        lines += [f"  sums: {self.order}"] if self.order is not None else []
        note = slow_rows(self.problem)
        lines += [f"  note: {note}"] if note is not None else []
        if best is not None and best.gpu is not None and len(self.measured_on) > 1:
            first, *others = self.measured_on
            rest = f"for {', '.join(others)}: aot explain MODEL --gpu NAME"
            lines.append(f"  card: the answer for {first}; {rest}")
        lines += [f"  lora: {self.low_rank}"] if self.low_rank is not None else []
        lines += [f"  test: {self.self_test}"] if self.self_test is not None else []
        shown = self.candidates[:_SHOWN]
        config = max((len(str(candidate.config)) for candidate in shown), default=0)
        basis = max((len(_basis(candidate)) for candidate in shown), default=0)
        if shown:
            lines.append(f"  {'rank':>4}  {'time':>10}  {'':8}  {'config':{config}}  {'for':{basis}}  bundle")
        for place, candidate in enumerate(shown, 1):
            lines.append(
                f"  {place:>4}  {candidate.time_us:>7.1f} us  {candidate.source.value:8}  "
                f"{candidate.config!s:{config}}  {_basis(candidate):{basis}}  {candidate.usable.path.name}"
            )
        mismatched = [entry for entry in self.skipped if isinstance(entry.error, TargetMismatch)]
        ordinary = [entry for entry in mismatched if not entry.place.names(entry.path)]
        if len(ordinary) == 1:  # one is worth its name
            ordinary = []
        lines += [f"  skipped {entry.path}: {entry.reason}" for entry in self.skipped if entry not in ordinary]
        if ordinary:
            lines.append(f"  skipped {len(ordinary)} bundles for other capabilities")
        lines += [f"  build it with: {self.build}"] if self.build is not None else []
        return "\n".join(map(printable, lines))


def _basis(candidate: Candidate) -> str:
    what = "cost model" if candidate.match is Match.COST_MODEL else f"M near {candidate.bucket}"
    if candidate.origin is Origin.COMPATIBLE:
        return f"{what}, {candidate.usable.bundle.target} code"
    return f"{what}, {candidate.gpu.name}" if candidate.gpu is not None else what


def _row(candidate: Candidate) -> Mapping[str, Any]:
    return {
        "bundle": str(candidate.usable.path),
        "place": candidate.usable.place.kind.value,
        "variant": candidate.index,
        "config": dict(candidate.variant.config),
        "origin": candidate.origin.name.lower(),
        "match": candidate.match.name.lower(),
        "source": candidate.source.value,
        "bucket": candidate.bucket,
        "time_us": candidate.time_us,
        "measured_on": candidate.gpu.name if candidate.gpu is not None else None,
    }
