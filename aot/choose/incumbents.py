"""The baseline: the kernels that the runtime selects today from all bundles that it finds, and their code.

A bundle that was measured here takes precedence wherever it has a choice. So the baseline is measured together with the
compiled variants, and if nothing beats it the new bundle names it too, and carries its code.

If nothing is measured, the new bundle takes over the measured choices of installed bundles (``TakenOver``).
``BaselineComparison`` counts how many of a new bundle's choices are faster than the baseline, and by how much.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...artifacts.errors import BundleError
from ...artifacts.records import Bundle, Choice, Gpu, Kernel, LocalGpu, Op, Problem, Producer, Source, Variant
from ...kernels.chips import chip_for
from ...kernels.entry import LAUNCH_ABI, has_aligned_rows
from ...kernels.registry import unlaunchable
from ...runtime import settings
from ...runtime.dispatch.decide import Decision, settle, why_not
from ...runtime.dispatch.neighbours import Neighbourhood
from ...runtime.dispatch.places import Kind
from ...runtime.dispatch.snapshot import Rejected, Snapshot, Usable, View, take
from ..bundle.merge import merge
from ..compile.triton import Compiled
from ..journal.file import Contents
from ..journal.records import Incumbent, Measured
from ..journal.timings import Timings, cell_of
from ..plan.families import Family, families
from ..process.gpus import driver_version

Running = Mapping[tuple[Problem, int], Incumbent]  # the baseline of each problem and bucket that a bundle runs
Cells = Mapping[Problem, Sequence[int]]
RunsOn = Callable[[LocalGpu], Running]
Around = Callable[[LocalGpu], "Neighbourhood | None"]  # the cells measured on or for a GPU


@dataclass(frozen=True, slots=True)
class Carried:
    """A variant of an installed bundle, with all that a new bundle takes over with it."""

    code: Compiled
    kernel: Kernel
    min_driver: int
    producer: Producer


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Measured choices of installed bundles for a new one: ``bundle`` holds only them and their code.

    ``codes`` are its variants with their origins. ``sources`` are the digests of the installed bundles.
    """

    bundle: Bundle
    codes: tuple[Carried, ...]
    sources: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Incumbents:
    """The bundles that the runtime would find without the new bundle."""

    snapshot: Snapshot

    @classmethod
    def on_search_path(cls, without: Path | None = None) -> Incumbents:
        """The bundles on the runtime's search path, except the file that is about to be replaced."""
        return cls(take(settings.read(os.environ), without))

    def running(self, cells: Cells, local: LocalGpu) -> dict[tuple[Problem, int], Incumbent]:
        """The kernel that runs each cell today; cells that torch runs are left out."""
        running = {}
        for problem, buckets in cells.items():
            for bucket in buckets:
                try:
                    ran = settle(self.snapshot, problem, bucket, local, has_aligned_rows(problem), False)
                except BundleError:  # a file in PRETUNED_BUNDLES: every call of the runtime reports it
                    continue
                if isinstance(ran, Decision):
                    sha, bundle = ran.chosen.variant.cubin_sha256, ran.chosen.usable.bundle
                    running[problem, bucket] = Incumbent(sha, bundle.digest)
        return running

    def on(self, cells: Cells) -> RunsOn:
        """Return ``running`` as a function of the GPU, which may not be known yet; results are cached."""
        return functools.cache(lambda local: self.running(cells, local))

    def codes(self, problems: Sequence[Problem], sm: int) -> tuple[Carried, ...]:
        """The variants of these bundles that may run a problem, load on this driver, and fit a bundle for ``sm``."""
        codes: dict[Variant, Carried] = {}
        kernels: dict[tuple[str, int], Kernel] = {}
        for usable in self.snapshot.view(LocalGpu(sm, Gpu("", 0, 0, driver_version())), installed=True).usable:
            if usable.bundle.target.sm == sm:
                try:
                    for carried in _codes_of(usable, self.snapshot, problems):
                        name = carried.kernel.name, carried.kernel.revision
                        if kernels.setdefault(name, carried.kernel) == carried.kernel:
                            codes.setdefault(carried.code.variant, carried)
                except (BundleError, Rejected):  # damaged: the runtime reports it
                    continue
        return tuple(codes.values())

    def neighbourhood(self, sm: int) -> Neighbourhood | None:
        """The cells that installed packages measured on a capability, the modelled GPU's first."""
        chip = chip_for(sm)
        local = LocalGpu(sm, Gpu(chip.name, chip.sm_count, chip.memory_gib << 10, 0))
        view = self.snapshot.view(local, installed=True)
        installed = tuple(usable for usable in view.usable if usable.place.kind is Kind.INSTALLED)
        return self._around(local, view._replace(usable=installed))

    def around(self, local: LocalGpu) -> Neighbourhood | None:
        """The measured cells with which the runtime compares unknown problems on a GPU."""
        return self._around(local, self.snapshot.view(local, installed=True))

    def _around(self, local: LocalGpu, view: View) -> Neighbourhood | None:
        try:
            return Neighbourhood(self.snapshot, local, view)
        except Rejected:  # damaged: the runtime reports it
            return None

    def measured(self, cells: Cells, sm: int) -> TakenOver | None:
        """The measured choices of installed packages for these cells of a capability; None if there are none.

        Each GPU keeps its own choice; of several bundles' choices it is the choice that ``aot merge`` keeps. Bundles
        are left out if a kernel has the name and revision of another bundle's kernel, but another source.
        """
        parts: dict[str, Bundle] = {}
        codes: dict[Variant, Carried] = {}
        kernels: dict[tuple[str, int], Kernel] = {}
        sources: set[bytes] = set()
        for usable in self.snapshot.view(LocalGpu(sm, Gpu("", 0, 0, 0)), installed=True).usable:
            if usable.bundle.target.sm != sm or usable.place.kind is not Kind.INSTALLED:
                continue
            try:
                part, carried = _measured_part(usable, self.snapshot, cells)
            except (BundleError, Rejected):  # damaged: the runtime reports it
                continue
            named = {(carried.kernel.name, carried.kernel.revision): carried.kernel for carried in carried}
            if part.choices and all(kernels.get(name, kernel) == kernel for name, kernel in named.items()):
                parts[str(usable.path)] = part
                kernels |= named
                codes |= {carried.code.variant: carried for carried in carried}
                sources.add(usable.bundle.digest)
        if not parts:
            return None
        bundle = merge(parts).bundle if len(parts) > 1 else next(iter(parts.values()))
        return TakenOver(bundle, tuple(codes[variant] for variant in bundle.variants), frozenset(sources))


def runs(variant: Variant, problem: Problem, incumbents: Container[bytes]) -> bool:
    """True if a variant runs a problem today, even if no build may choose it, like a fallback for aligned rows."""
    same = variant.cubin_sha256 in incumbents and Family.of(variant) == Family.of(problem)
    return same and variant.max_experts >= problem.E


def _codes_of(usable: Usable, snapshot: Snapshot, problems: Sequence[Problem]) -> list[Carried]:
    bundle = usable.bundle
    kernels = {(kernel.name, kernel.revision): kernel for kernel in bundle.kernels}
    members = [group[0] for group in families(problems).values()]
    wanted = {i: variant for member in members for i, variant in snapshot.variants(bundle, member)}
    return [
        Carried(
            Compiled(variant, bundle.cubin(i)),
            kernels[variant.kernel, variant.revision],
            bundle.min_driver,
            bundle.producer,
        )
        for i, variant in sorted(wanted.items())
        if isinstance(variant.op, Op) and variant.abi == LAUNCH_ABI and unlaunchable(variant) is None
    ]


def _measured_part(usable: Usable, snapshot: Snapshot, cells: Cells) -> tuple[Bundle, list[Carried]]:
    """The measured choices of one bundle for these cells that this version can launch, as a bundle, and their code."""
    file = usable.bundle
    anywhere = LocalGpu(file.target.sm, Gpu("", 0, 0, 0))

    @functools.cache
    def variant_for(i: int, problem: Problem) -> Variant | None:
        variant = snapshot.variant(file, i)
        lacking = variant.abi != LAUNCH_ABI or unlaunchable(variant)
        able = not lacking and why_not(variant, problem, anywhere, aligned=has_aligned_rows(problem)) is None
        return variant if able else None

    place: dict[Variant, int] = {}
    number: dict[int, int] = {}
    choices: dict[Problem, tuple[Choice, ...]] = {}
    for problem, buckets in cells.items():
        wanted = frozenset(buckets)
        row = []
        for choice in snapshot.find(file, problem):
            if choice.source is not Source.MEASURED or choice.bucket not in wanted:
                continue
            first, second = (None if i is None else variant_for(i, problem) for i in (choice.variant, choice.runner_up))
            if first is None:
                continue
            for i, variant in ((choice.variant, first), (choice.runner_up, second)):
                if i is not None and variant is not None:
                    number[i] = place.setdefault(variant, len(place))
            row.append(
                choice._replace(
                    variant=number[choice.variant],
                    runner_up=None if second is None else place[second],
                    runner_up_ns=None if second is None else choice.runner_up_ns,
                    plan=(),  # the new bundle makes its own plans
                )
            )
        if row:
            choices[problem] = tuple(sorted(row, key=lambda choice: choice.sort_key))
    kernels = {(kernel.name, kernel.revision): kernel for kernel in file.kernels}
    cubins = {n: file.cubin(i) for i, n in number.items()}
    carried = [
        Carried(Compiled(variant, cubins[n]), kernels[variant.kernel, variant.revision], file.min_driver, file.producer)
        for variant, n in place.items()
    ]
    part = Bundle(
        file.target,
        file.min_driver,
        file.producer,
        tuple(dict.fromkeys(carried.kernel for carried in carried)),
        file.gpus,
        tuple(place),
        tuple(cubins[n] for n in place.values()),
        choices,
        (),
    )
    return part, carried


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """The cells of a bundle by comparison with the baseline that ran there before.

    ``faster`` cells gain ``gain`` in the geometric mean (0.05 is 5 %). ``as_before`` cells keep their kernel.
    ``slower`` cells occur if the earlier kernel is in no bundle here. The rest is ``not_compared``: torch ran there
    before, or code that could not be measured here.
    """

    faster: int
    gain: float
    as_before: int
    slower: int
    not_compared: int

    @classmethod
    def of(cls, bundle: Bundle, evidence: Timings | None, running: Running | None) -> BaselineComparison | None:
        """Compare by measured times; None if nothing was compared."""
        ratios: list[float] = []
        as_before = slower = others = 0
        compared = False
        for problem, row in bundle.choices.items():
            for choice in row:
                gpu = choice.measured_on(bundle.gpus)
                if gpu is not None and (evidence is None or gpu not in evidence.gpus):
                    continue  # taken over from an installed bundle
                before = _before(problem, choice.bucket, evidence, running or {})
                compared = compared or bool(before)
                now = bundle.variants[choice.variant].cubin_sha256
                cell = evidence.cells.get(cell_of(problem, choice.bucket)) if evidence else None
                times_ns = cell.times_ns if cell else {}
                if now in before:
                    as_before += 1
                elif now in times_ns and before and before <= times_ns.keys():
                    ratio = min(times_ns[sha] for sha in before) / times_ns[now]
                    slower += ratio < 1
                    if ratio >= 1:
                        ratios.append(ratio)
                else:
                    others += 1
        if not compared:
            return None
        gain = math.expm1(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
        return cls(len(ratios), gain, as_before, slower, others)

    def __str__(self) -> str:
        by = f" by {self.gain:.1%}".replace("%", " %") + " in the mean" if self.faster else ""
        text = f"{self.faster} cells faster than before{by}, {self.as_before} as before, {self.slower} slower"
        return text + (f", {self.not_compared} not compared" if self.not_compared else "")

    def to_dict(self) -> dict[str, object]:
        """The comparison as plain values for JSON."""
        return {
            "faster": self.faster,
            "gain": round(self.gain, 4),
            "as_before": self.as_before,
            "slower": self.slower,
            "not_compared": self.not_compared,
        }


def timed_before(contents: Contents) -> frozenset[bytes]:
    """The variants that were timed together with a baseline, and the baselines."""
    records = (record for record in contents.records if isinstance(record, Measured) and record.incumbents)
    return frozenset(timing.variant for record in records for timing in record.timings)


def _before(problem: Problem, bucket: int, evidence: Timings | None, running: Running) -> set[bytes]:
    now = running.get((problem, bucket))
    if now is not None:
        return {now.variant}
    cell = evidence.cells.get(cell_of(problem, bucket)) if evidence else None
    return set(cell.incumbents) if cell else set()
