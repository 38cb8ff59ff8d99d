"""Failed self-tests and measured choices of a user's GPU, which decide the kernel that dispatch selects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pretuned.artifacts.codec import encode
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import Bundle, Choice, LocalGpu, PlanRow, Problem, Source, Target, Variant, Way
from pretuned.runtime import reload, self_test_results
from pretuned.runtime.dispatch.decide import Decision, settle
from pretuned.runtime.dispatch.plans import Planned
from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.driver.device import local_gpu

BUCKETS = [1 << power for power in range(15)]
_US = 10_000  # of every choice: nothing compares it


@contextlib.contextmanager
def failed(which: Callable[[Variant], bool]) -> Iterator[None]:
    """On the first GPU these variants of all bundles are as if they had failed their self-tests there."""
    bundles, local, wrong = snapshot(), local_gpu(0), self_test_results._memory.wrong
    before = {key: set(digests) for key, digests in wrong.items()}
    for view in (bundles.view(local, installed=True), bundles.reserve(local)):
        for usable in view.usable:
            for variant in filter(which, usable.bundle.variants()):
                self_test_results.leave_out(variant, local)
    reload()
    try:
        yield
    finally:
        wrong.clear()
        wrong.update(before)
        reload()


class Line(NamedTuple):
    """A line of a plan: calls of ``way`` with this ``top_k`` or more run a variant of a bundle."""

    way: Way
    top_k: int
    runs: Planned


class Cell(NamedTuple):
    """The choice of a problem at a bucket of rows: a variant of a bundle, and the lines of its plan."""

    problem: Problem
    bucket: int
    own: Planned
    plan: Sequence[Line] = ()


def decided(problem: Problem, bucket: int, local: LocalGpu) -> Planned | None:
    """The variant that dispatch selects for aligned operands; None if torch runs the problem."""
    decision = settle(snapshot(), problem, bucket, local, aligned=True, strict=False)
    return Planned(decision.chosen.usable, decision.chosen.index) if isinstance(decision, Decision) else None


def publish_choices(path: Path, cells: Sequence[Cell], local: LocalGpu) -> None:
    """Publish a bundle with these choices, measured on such a GPU, and the code of the variants that they name."""
    used = list(dict.fromkeys(choice for cell in cells for choice in (cell.own, *(line.runs for line in cell.plan))))
    records = [choice.usable.bundle.variant(choice.variant) for choice in used]
    variants = tuple(dict.fromkeys(records))
    number = {choice: variants.index(record) for choice, record in zip(used, records, strict=True)}
    cubins = {record: choice.usable.bundle.cubin(choice.variant) for choice, record in zip(used, records, strict=True)}
    bundles = list(dict.fromkeys(choice.usable.bundle for choice in used))
    kernels = {kernel.name: kernel for bundle in bundles for kernel in bundle.kernels}
    choices: dict[Problem, list[Choice]] = {}
    for cell in cells:
        own = variants[number[cell.own]]
        twin = cell.problem.transposed
        named = cell.problem if own.op is cell.problem.op or twin is None else twin
        plan = sorted(PlanRow(line.way, False, line.top_k, number[line.runs]) for line in cell.plan)
        choice = Choice(cell.bucket, number[cell.own], Source.MEASURED, _US, gpu=0, plan=tuple(plan))
        choices.setdefault(named, []).append(choice)
    bundle = Bundle(
        Target(local.sm, local.sm >= 90),
        max(bundle.min_driver for bundle in bundles),
        bundles[0].producer._replace(options=()),
        tuple(kernels[name] for name in sorted({variant.kernel for variant in variants})),
        (local.gpu,),
        variants,
        tuple(cubins[variant] for variant in variants),
        {problem: tuple(rows) for problem, rows in choices.items()},
        (),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, encode(bundle))
