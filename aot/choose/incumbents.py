"""What the runtime runs today, by all bundles that it finds: what a new one is held against, and code to take part.

A bundle that was measured here goes before others wherever it has a choice. So whatever ran before is measured beside
what was compiled, and where nothing beats it the new bundle names it, too, and carries its code.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...artifacts.errors import BundleError
from ...artifacts.records.bundle import Kernel, Producer, Variant
from ...artifacts.records.problem import Op, Problem
from ...artifacts.records.target import Gpu, LocalGpu
from ...kernels.contract.launchable import unlaunchable
from ...kernels.contract.words import LAUNCH_ABI, has_aligned_rows
from ...runtime import settings
from ...runtime.dispatch.decide import Decision, settle
from ...runtime.dispatch.snapshot import Rejected, Snapshot, Usable, take
from ..compile.triton import Compiled
from ..journal.records import Incumbent
from ..plan.families import Family, families
from ..process.gpus import driver_version

Running = Mapping[tuple[Problem, int], Incumbent]  # of each problem and bucket that a bundle runs
Cells = Mapping[Problem, Sequence[int]]
RunsOn = Callable[[LocalGpu], Running]


@dataclass(frozen=True, slots=True)
class Carried:
    """A variant of a bundle that is there, and what a new bundle takes over with it."""

    code: Compiled
    kernel: Kernel
    min_driver: int
    producer: Producer


@dataclass(frozen=True, slots=True)
class Incumbents:
    """The bundles that the runtime finds, as they are before there is a new one."""

    snapshot: Snapshot

    @classmethod
    def found(cls, without: Path | None = None) -> Incumbents:
        """Those of the places where the runtime looks, but for the file that is about to be replaced."""
        return cls(take(settings.read(os.environ), without))

    def running(self, cells: Cells, local: LocalGpu) -> dict[tuple[Problem, int], Incumbent]:
        """What runs each cell today; those that torch runs are left out."""
        found = {}
        for problem, buckets in cells.items():
            for bucket in buckets:
                try:
                    ran = settle(self.snapshot, problem, bucket, local, has_aligned_rows(problem), False)
                except BundleError:  # a file that PRETUNED_BUNDLES names: every call of the runtime says so
                    continue
                if isinstance(ran, Decision):
                    sha, bundle = ran.chosen.variant.cubin_sha256, ran.chosen.usable.bundle
                    found[problem, bucket] = Incumbent(sha, bundle.digest)
        return found

    def on(self, cells: Cells) -> RunsOn:
        """``running``, for a GPU that is not known yet: asked once for each."""
        return functools.cache(lambda local: self.running(cells, local))

    def codes(self, problems: Sequence[Problem], sm: int) -> tuple[Carried, ...]:
        """Every variant that may run one of these problems, that this machine's driver loads (where there is one), and
        that a bundle for this capability can hold.
        """
        found: dict[Variant, Carried] = {}
        kernels: dict[tuple[str, int], Kernel] = {}
        for usable in self.snapshot.view(LocalGpu(sm, Gpu("", 0, 0, driver_version())), installed=True).usable:
            if usable.bundle.target.sm == sm:
                try:
                    for one in _codes_of(usable, self.snapshot, problems):
                        name = one.kernel.name, one.kernel.revision
                        if kernels.setdefault(name, one.kernel) == one.kernel:
                            found.setdefault(one.code.variant, one)
                except (BundleError, Rejected):  # damaged: the runtime says so
                    continue
        return tuple(found.values())


def runs(variant: Variant, problem: Problem, incumbents: Container[bytes]) -> bool:
    """Whether it is one that runs a problem today, though no build may choose it: a fallback where rows are aligned."""
    same = variant.cubin_sha256 in incumbents and Family.of(variant) == Family.of(problem)
    return same and variant.max_experts >= problem.E


def _codes_of(usable: Usable, snapshot: Snapshot, problems: Sequence[Problem]) -> list[Carried]:
    bundle = usable.bundle
    kernels = {(one.name, one.revision): one for one in bundle.kernels}
    members = [one[0] for one in families(problems).values()]
    wanted = {i: variant for one in members for i, variant in snapshot.variants(bundle, one)}
    return [
        Carried(
            Compiled(variant, bundle.cubin(i)), kernels[variant.kernel, variant.revision], bundle.min_driver,
            bundle.producer,
        )
        for i, variant in sorted(wanted.items())
        if isinstance(variant.op, Op) and variant.abi == LAUNCH_ABI and unlaunchable(variant) is None
    ]  # fmt: skip
