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

    ``problem`` and ``M`` are the call, ``aligned`` says whether its pointers, rows and strides are multiples of 16
    bytes, ``local`` is the GPU, ``reason`` says why the first candidate runs, and ``skipped`` are the bundles that this
    GPU can't use. ``compiles`` says that Triton would compile a kernel first.

    ``candidates`` are ranked, and the first runs. There are none if torch runs the call, or if Triton first compiles a
    kernel (``runs``; after ``allow_jit``). The times after the first are for exactly this bucket: a bundle's, or the
    cost model's. With ``gathered_first`` a row kernel gathers the rows of x before the first candidate, whose time
    excludes the row kernel; ``reason`` has that time. With ``quantised_first`` a row kernel quantises x or, with
    ``coded``, sorts its codes; the candidates after the first read x as it is. ``raises`` is the error that the call
    raises instead, if any: by strict mode, or for a file that PRETUNED_BUNDLES names. ``assumed`` names the top_k that
    was assumed for a gather.
    ``self_test`` says where the kernel was tested on this capability, or that it is tested before its first use
    (``launch/self_test.py``). If no bundle can run the call, ``build`` is the command that builds such a bundle, and
    the last line of ``str()``. ``low_rank`` says for an adapter whether the product's kernel adds its part, and why. If
    torch's grouped_mm was measured faster on this GPU, torch runs the call (``torch_us``), and the first candidate runs
    it with ``out``. With ``expected_rows`` the kernel is chosen for that many rows, and ``without_hint`` says what runs
    for M. ``invariance`` is the batch-invariant mode, and ``order`` the order in which the kernel then sums K.
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
        """The bundle's kernels that the call launches, in order; () if no bundle's kernel runs the call."""
        best = self.chosen
        if best is None or self.torch_us is not None:
            return ()
        first = (f"gather the rows of x into a scratch [{self.M}, K]",) if self.gathered_first else ()
        does = "order the codes" if self.coded else "quantise the rows"
        first = (f"{does} of x into codes [{self.M}, K]",) if self.quantised_first else first
        return *first, f"{best.variant.entry} {best.config}"

    @property
    def summary(self) -> str:
        """``steps`` in one line; if there are none, the name of what runs the call."""
        return ", then ".join(self.steps) or self.runs

    @property
    def runs(self) -> str:
        """The runner of the call: ``bundle``, ``jit`` or ``torch``."""
        if self.torch_us is not None:
            return "torch"
        return "bundle" if self.candidates else "jit" if self.compiles else "torch"

    @property
    def measured_on(self) -> tuple[str, ...]:
        """The GPUs that the candidates were measured on, if the answer is for a capability and not for one GPU.

        The answer is for the first of these GPUs.
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
        if len(ordinary) == 1:  # a single bundle is named
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
