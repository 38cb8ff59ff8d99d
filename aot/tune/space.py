"""The cells to measure that fit the GPU, the variants that serve them, and the cost model's ranking.

One process can schedule a few GPUs. For more, or for machines that share nothing, each tuner gets a part
(``part_of``): ``aot measure --part 1/8``. Journals of parts are merged like any others.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ...artifacts.bundle_file import BundleFile
from ...artifacts.errors import InputError
from ...artifacts.records import DType, Fusion, Gpu, Layout, Op, Problem
from ...kernels.chips import Chip, chip_of
from ...kernels.cost import Resources
from ...kernels.cost_model import Ranker
from ...runtime.dispatch.neighbours import Neighbourhood
from ..choose.choices import with_neighbours
from ..choose.incumbents import Running, runs
from ..journal.records import FLUSH_BYTES, Incumbent, Measured
from ..journal.timings import Cell, cell_of
from ..plan.families import optional, serves
from .shortlist import ConfigPairs

_RESERVE_BYTES = 2 << 30  # for the context, code, and a reference
# Rough seconds of a cell on any GPU: parts need only be about equal.
_EACH_S = 0.03
_LAUNCHES = 40
_FLOPS = 6e14
_BYTES = 2.5e12


@dataclass(slots=True)
class TuningSpace:
    """All that can be measured: which variants serve a problem, and how the cost model ranks them."""

    cells: dict[Problem, tuple[int, ...]]
    bundle: BundleFile
    share: float
    chip: Chip
    able: dict[Problem, tuple[int, ...]] = field(default_factory=dict)
    index: dict[tuple[Problem, bytes], int] = field(default_factory=dict)
    configs: dict[bytes, ConfigPairs] = field(default_factory=dict)  # of each cubin
    too_large: int = 0
    like: BundleFile | None = None
    around: Neighbourhood | None = None
    incumbents: dict[Cell, tuple[Incumbent, ...]] = field(default_factory=dict)
    _rankers: dict[tuple[int, ...], Ranker] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        problems: Mapping[Problem, Sequence[int]],
        bundle: BundleFile,
        gpu: Gpu,
        sm: int,
        share: float,
        like: BundleFile | None = None,
        running: Running = MappingProxyType({}),
        around: Neighbourhood | None = None,
    ) -> TuningSpace:
        """The space of these problems and candidates, less cells that do not fit the GPU's memory.

        ``running`` is the baseline; cells measured ``around`` these improve the model's ranking.

        Raises
        ------
        InputError
            if no candidate serves a problem that is not optional.
        """
        variants = bundle.variants()
        self = cls({}, bundle, share, chip_of(gpu, sm), like=like, around=around)
        self.configs = {variant.cubin_sha256: variant.config for variant in variants}
        wanted: dict[Problem, set[int]] = {}
        for problem, bucket in (cell_of(problem, M) for problem, row in problems.items() for M in row):
            wanted.setdefault(problem, set()).add(bucket)
        ran: dict[Problem, set[bytes]] = {}
        for (problem, bucket), incumbent in running.items():
            cell = cell_of(problem, bucket)
            self.incumbents[cell] = tuple(dict.fromkeys((*self.incumbents.get(cell, ()), incumbent)))
            ran.setdefault(cell[0], set()).add(incumbent.variant)
        for problem in sorted(wanted, key=lambda problem: problem.sort_key):
            before = ran.get(problem, set())
            able = tuple(i for i, v in enumerate(variants) if serves(v, problem) or runs(v, problem, before))
            if not able and optional(problem):
                continue
            if not able:
                raise InputError(
                    f"candidates '{bundle.path}': no variant serves {problem}: run aot compile for the same models"
                )
            fitting = tuple(sorted(M for M in wanted[problem] if fits(problem, M, gpu.memory_mib)))
            self.too_large += len(wanted[problem]) - len(fitting)
            self.cells[problem] = fitting
            self.able[problem] = able
            for i in reversed(able):
                self.index[problem, variants[i].cubin_sha256] = i
        return self

    def has(self, record: Measured) -> bool:
        """True if a record is of a cell in this space, and of these candidates."""
        problem, bucket = cell_of(record.problem, record.bucket)
        return bucket in self.cells.get(problem, ()) and (problem, record.modelled) in self.index

    def ran(self, problem: Problem, bucket: int, without: Container[bytes] = ()) -> dict[int, Incumbent]:
        """The indices of a cell's baseline variants among the candidates, without the cubins in ``without``."""
        incumbents = self.incumbents.get((problem, bucket), ())
        places = ((self.index.get((problem, incumbent.variant)), incumbent) for incumbent in incumbents)
        return {i: incumbent for i, incumbent in places if i is not None and incumbent.variant not in without}

    def variant(self, problem: Problem, config: ConfigPairs, without: Container[bytes] = ()) -> int | None:
        """The variant that serves a problem in this config, unless its cubin is in ``without``."""
        able = ((i, self.bundle.variant(i)) for i in self.able.get(problem, ()))
        return next((i for i, v in able if v.config == config and v.cubin_sha256 not in without), None)

    def elsewhere(self, problem: Problem, bucket: int) -> list[ConfigPairs]:
        """The configs that the bundle ``like`` has for a cell: each GPU's choice, then its runner-up."""
        if self.like is None:
            return []
        there = self.like.find(problem) or (self.like.find(problem.transposed) if problem.transposed else ())
        named = (choice for choice in there if choice.bucket == bucket)
        indices = [i for choice in named for i in (choice.variant, choice.runner_up) if i is not None]
        return [self.like.variant(i).config for i in indices]

    def estimates(self, problem: Problem, bucket: int) -> dict[bytes, float]:
        """The estimate in us of each cubin that serves a cell; empty if the cell is not in this space."""
        problem, bucket = cell_of(problem, bucket)
        if bucket not in self.cells.get(problem, ()):
            return {}
        return {self.bundle.variant(i).cubin_sha256: us for us, i in self.ranked(problem, bucket)}

    def ranked(self, problem: Problem, bucket: int, without: Container[bytes] = ()) -> list[tuple[float, int]]:
        """(estimate in us, variant), best first, less cubins in ``without``."""
        able = self.able[problem]
        if able not in self._rankers:
            resources = [Resources.of(self.bundle.variant(i)) for i in able]
            self._rankers[able] = Ranker(resources, problem.op, problem.dtype, self.chip)
        ranked = [(us, able[i]) for us, i in self._rankers[able].rank(problem, bucket)]
        ranked = with_neighbours(self.around, problem, bucket, self.chip, ranked, self.bundle.variant)
        return [(us, i) for us, i in ranked if self.bundle.variant(i).cubin_sha256 not in without]


def fits(problem: Problem, M: int, memory_mib: int) -> bool:
    """True if a cell's tensors fit a GPU's memory: w, dw, M rows of both widths, and buffers for measuring."""
    matrices_bytes = (
        problem.E * problem.dtype.precision.w_bytes(problem.N, problem.K) * (2 if problem.op is Op.DW else 1)
    )
    rows_bytes = M * (problem.N + problem.K) * problem.dtype.itemsize
    wanted = matrices_bytes + rows_bytes + M * 16 + 2 * FLUSH_BYTES + _RESERVE_BYTES
    return wanted <= memory_mib * (1 << 20) * 9 // 10


def weight_key(problem: Problem) -> tuple[int, int, int, DType, Layout]:
    """The key of the weights that a problem shares with other ops, fusions and buckets."""
    return (problem.E, problem.N, problem.K, problem.dtype, problem.layout)


def torch_can(problem: Problem) -> bool:
    """True if torch has one call for it: grouped_mm takes bf16, plain, w [E, N, K], rows of 16 bytes."""
    plain = problem.dtype is DType.BF16 and problem.layout is Layout.NK and problem.fusion is Fusion.NONE
    return plain and problem.N % 8 == 0 and problem.K % 8 == 0


def expected_seconds(best_us: float) -> float:
    """The approximate seconds to measure a cell, for the progress and the order."""
    return 0.1 + 80e-6 * best_us


def weight_seconds(problem: Problem) -> float:
    """The approximate seconds to make the weights anew, to decide whether to move a cell to another GPU."""
    return 0.02 + problem.E * problem.N * problem.K / 20e9


def part_of(problems: Mapping[Problem, Sequence[int]], number: int, count: int) -> dict[Problem, tuple[int, ...]]:
    """The problems and buckets of part ``number`` (from 1) of ``count``, split by weights, which take time to make.

    The parts are disjoint, cover all cells, are about equal in work, and do not depend on the caller.

    Raises
    ------
    InputError
        if there are fewer weights than parts.
    """
    weights: dict[tuple[object, ...], dict[Problem, tuple[int, ...]]] = {}
    for problem, buckets in problems.items():
        weights.setdefault(weight_key(problem.canonical), {})[problem] = tuple(buckets)
    if len(weights) < count:
        raise InputError(
            f"--part {number}/{count}: the models have {len(weights)} weights; wanted at most so many parts"
        )
    work = {key: math.fsum(_seconds(members)) for key, members in weights.items()}
    parts: list[list[tuple[object, ...]]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for key in sorted(weights, key=lambda key: (-work[key], min(problem.sort_key for problem in weights[key]))):
        least = loads.index(min(loads))
        parts[least].append(key)
        loads[least] += work[key]
    mine = {problem: buckets for key in parts[number - 1] for problem, buckets in weights[key].items()}
    return {problem: mine[problem] for problem in problems if problem in mine}


def _seconds(members: Mapping[Problem, Sequence[int]]) -> Iterable[float]:
    measured: dict[Problem, set[int]] = {}
    for problem, buckets in members.items():  # a product of two names is measured once
        measured.setdefault(problem.canonical, set()).update(buckets)
    for problem, rows in measured.items():
        matrix, w_bytes = problem.N * problem.K, problem.dtype.precision.w_bytes(problem.N, problem.K)
        row_bytes = (problem.N + problem.K) * problem.dtype.itemsize
        for M in rows:
            moved = (problem.E if problem.op is Op.DW else min(problem.E, M)) * w_bytes + M * row_bytes
            yield _EACH_S + _LAUNCHES * max(2 * M * matrix / _FLOPS, moved / _BYTES)
