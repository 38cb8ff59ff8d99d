"""The measured cells around a cell that no bundle has, by shape; read when first needed.

Only bundles for this capability count, with the times of this GPU, or else of the most similar measured GPU. Bundles
that this process compiled or tuned do not count: they depend on earlier calls, and all processes must choose alike.
Bundles whose build was compared with others do not count either (``Usable.speaks_of_others``), so that no bundle makes
another's cell slower. ``kernels/neighbours.py`` computes with these cells.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ...artifacts.errors import BundleError
from ...artifacts.records import Gpu, LocalGpu, Problem, Timed, Variant, gpus_apart
from ...artifacts.tuples import NamedTuple
from ...kernels import chips
from ...kernels import neighbours as cost
from ...kernels.chips import Chip
from ...kernels.entry import has_aligned_rows
from ...kernels.neighbours import Evidence
from ...kernels.spec import Config, config_of
from .places import Kind
from .snapshot import Rejected, Snapshot, Usable, View

_Key: TypeAlias = "tuple[tuple[tuple[str, int], ...], bool]"  # a config, and whether its code needs aligned rows
_GpuKind: TypeAlias = "tuple[str, int, int]"
_Kind: TypeAlias = "tuple[object, ...]"
_Sizes: TypeAlias = "tuple[int, int, int]"  # E, N and K
_Place: TypeAlias = "tuple[float, float, float]"  # the binary logarithms of E, N and K
_Cell: TypeAlias = "tuple[Usable, list[Any]]"  # a bundle, and its choices for the cell, as ``Timed`` has them
_Found: TypeAlias = "tuple[float, int, int, _Shape]"  # distance, index of the shape, logarithm of M

_WINDOWS = (0.8, 1.6, math.inf)  # distances in doublings of E within which shapes are searched
_BESIDE = 2  # buckets on each side of a shape's nearest bucket that are read
_MORE = 16  # new cells to find before sorting again
_SHAPES = 40  # nearest shapes that are read
_NO_BETTER = 1.001  # least expected time, over the best, of a variant that won no cell nearby
_RECENT = 256  # sizes whose near shapes are cached


class Near(NamedTuple):
    """The measured cells around a cell: their ratios of times, their number of shapes, the nearest shape, the GPU.

    ``won`` has the numbers (``numbered``) of the variants that are a choice or a runner-up in one of these cells.
    """

    won: Mapping[int, float]
    others: float
    shapes: int
    nearest: Problem
    gpu: Gpu


class _Shape:
    """E, N and K of a problem that bundles have, and the problem as each of them writes it.

    ``cells`` are its measured cells once they were read, by GPU and log2 of M. ``ratios`` are the ratios of the cells
    that were used, by GPU and log2 of M.
    """

    __slots__ = ("cells", "names", "problem", "ratios")

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.names: list[tuple[Usable, Problem]] = []
        self.cells: dict[_GpuKind, dict[int, _Cell]] | None = None
        self.ratios: dict[tuple[_GpuKind, int], list[tuple[int, float]]] = {}


class _ShapeList:
    """All shapes of a kind of problem, by E, with a cache of the shapes near recently requested sizes."""

    __slots__ = ("places", "recent", "shapes")

    def __init__(self, shapes: Iterable[_Shape]) -> None:
        self.shapes = sorted(shapes, key=lambda shape: shape.problem.sort_key)
        self.places = [_place(shape.problem) for shape in self.shapes]
        self.recent: dict[tuple[_Place, float], list[tuple[float, int]]] = {}

    def within(self, doublings: float, place: _Place) -> list[tuple[float, int]]:
        """(least distance over all M, index) of shapes whose E is within ``doublings`` of place's, nearest first."""
        nearest = self.recent.get((place, doublings))
        if nearest is None:
            E, N, K = place
            first = bisect.bisect_left(self.places, (E - doublings,))
            last = bisect.bisect_right(self.places, (E + doublings, math.inf))
            limit, at_E, at_size = cost.EXPERTS * doublings * doublings, cost.EXPERTS, cost.SIZE
            side = math.sqrt(limit / at_size)  # the farthest N or K within ``doublings``
            low_N, high_N, low_K, high_K = N - side, N + side, K - side, K + side
            candidates = [
                (at_E * (e - E) * (e - E) + at_size * ((n - N) * (n - N) + (k - K) * (k - K)), at)
                for at, (e, n, k) in enumerate(self.places[first:last], first)
                if low_N <= n <= high_N and low_K <= k <= high_K
            ]
            nearest = sorted(entry for entry in candidates if entry[0] <= limit)[:_SHAPES]
            if len(self.recent) >= _RECENT:
                self.recent.clear()
            self.recent[place, doublings] = nearest
        return nearest


class Neighbourhood:
    """The measured cells of a view's bundles, for the problems that they lack on a GPU."""

    def __init__(self, snapshot: Snapshot, local: LocalGpu, view: View) -> None:
        """Read which problems the bundles have, but no times.

        Raises
        ------
        Rejected
            if a bundle's records are damaged; the bundle is then dropped from all views.
        """
        self.view = view  # keeps the view alive: its id is this object's key in the cache
        self._snapshot, self._local = snapshot, local
        self.sources: frozenset[bytes] = frozenset()  # digests of the bundles with measured choices
        self._numbers: dict[
            tuple[int, int], int
        ] = {}  # (bundle, variant) -> the number of its config, because configs are slow to hash
        self._keys: dict[_Key, int] = {}
        shapes: dict[_Kind, dict[_Sizes, _Shape]] = {}
        gpus: dict[_GpuKind, Gpu] = {}
        for usable in view.usable:
            bundle = usable.bundle
            if usable.place.kind is Kind.PROCESS or bundle.target.sm != local.sm or not bundle.gpus:
                continue
            if not usable.speaks_of_others:
                continue
            self.sources |= {bundle.digest}
            for gpu in bundle.gpus:
                gpus.setdefault(_gpu_kind(gpu), gpu)
            with _checked(snapshot, usable):
                names = bundle.problems()
            for name in names:
                problem = name.canonical
                there = shapes.setdefault(_kind(problem, has_aligned_rows(problem)), {})
                sizes = problem.E, problem.N, problem.K
                if sizes not in there:
                    there[sizes] = _Shape(problem)
                there[sizes].names.append((usable, name))
        order = {kind: (not gpu.is_like(local.gpu), gpus_apart(gpu, local.gpu), kind) for kind, gpu in gpus.items()}
        self._gpus = tuple(sorted(gpus.values(), key=lambda gpu: order[_gpu_kind(gpu)]))
        self._families = {kind: _ShapeList(some.values()) for kind, some in shapes.items()}

    def without(self, sizes: Container[_Sizes]) -> Neighbourhood:
        """The neighbourhood without problems of these E, N and K, to test the choices that it gives for them."""
        rest = copy.copy(self)
        rest._families = {
            kind: _ShapeList(shape for shape in family.shapes if _sizes(shape.problem) not in sizes)
            for kind, family in self._families.items()
        }
        return rest

    def near(self, problem: Problem, bucket: int, *, aligned: bool = True) -> Near | None:
        """The measured cells around ``bucket`` rows of ``problem``; None if no problem of its kind was measured.

        Raises
        ------
        Rejected
            if a bundle's records are damaged.
        """
        wanted = problem.canonical
        family = self._families.get(_kind(wanted, aligned and has_aligned_rows(wanted)))
        if family is None:
            return None
        for gpu in self._gpus:
            cells = self._nearest(family, _place(wanted), math.log2(bucket), _gpu_kind(gpu))
            near = self._near(cells, gpu) if cells else None
            if near is not None:
                return near
        return None

    def _nearest(self, family: _ShapeList, place: _Place, M: float, gpu: _GpuKind) -> list[_Found]:
        """The nearest measured cells, nearest first, without duplicates."""
        most, (E, N, K) = cost.NEAREST, place
        best: list[_Found] = []
        for doublings in _WINDOWS:
            best = []
            edge, full = math.inf, most  # farthest distance to keep; count at which to sort next
            for least, at in family.within(doublings, place):
                if least > edge:
                    break
                shape = family.shapes[at]
                cells = (self._read(shape) if shape.cells is None else shape.cells).get(gpu)
                if not cells:
                    continue
                e, n, k = family.places[at]
                apart = cost.SIZE * ((e - E) * (e - E) + (n - N) * (n - N) + (k - K) * (k - K))
                middle = round(M + cost.NEAREST_M * (e - E))
                near = [log2 for log2 in range(middle - _BESIDE, middle + _BESIDE + 1) if log2 in cells]
                for log2 in near or [min(cells, key=lambda other: (abs(other - middle), other))]:
                    rows = log2 - M
                    each = rows - e + E
                    distance = apart + cost.ROWS * rows * rows + cost.EXPERT_ROWS * each * each
                    best.append((distance, at, log2, shape))
                if len(best) >= full:
                    best.sort()
                    del best[most:]
                    edge, full = best[-1][0], most + _MORE
            best.sort()
            del best[most:]
            if len(best) == most:
                break  # (for few rows, a skipped shape with fewer experts may be nearer: harmless)
        return best

    def _read(self, shape: _Shape) -> dict[_GpuKind, dict[int, _Cell]]:
        """The measured cells of a shape, read once. If two bundles have a cell, the first bundle's counts."""
        by_gpu: dict[_GpuKind, dict[int, _Cell]] = {}
        for usable, name in reversed(shape.names):
            with _checked(self._snapshot, usable):
                timed = usable.bundle.timed(name)
            for number, gpu in enumerate(usable.bundle.gpus):
                cells = {row[0]: (usable, row) for row in timed if row[6] == number}
                if cells:
                    by_gpu.setdefault(_gpu_kind(gpu), {}).update(cells)
        shape.cells = by_gpu
        return by_gpu

    def numbered(self, variant: Variant) -> tuple[int, Config]:
        """Return (number, config): one number for all variants of a config, in any bundle; configs are slow to hash.

        Variants that need aligned rows have another number than those that don't. Raises ValueError as
        ``Config.from_pairs`` does.
        """
        config = config_of(variant.config) or Config.from_pairs(variant.config)
        return self._keys.setdefault((variant.config, variant.alignment > 1), len(self._keys)), config

    def _number(self, usable: Usable, variant: int) -> int:
        number = self._numbers.get((usable.order, variant))
        if number is None:
            number, _ = self.numbered(self._snapshot.variant(usable.bundle, variant))
            self._numbers[usable.order, variant] = number
        return number

    def _near(self, cells: list[_Found], gpu: Gpu) -> Near | None:
        kind, evidence = _gpu_kind(gpu), []
        for distance, _, log2, shape in cells:
            shape_ratios = shape.ratios.get((kind, log2))
            if shape_ratios is None:
                shape_ratios = shape.ratios[kind, log2] = self._ratios(shape, log2, gpu)
            if shape_ratios:
                evidence.append(Evidence(distance, shape_ratios))
        if not evidence:
            return None
        ratios = cost.ratios(evidence)
        return Near(ratios.of, ratios.others, len({id(shape) for *_, shape in cells}), cells[0][3].problem, gpu)

    def _ratios(self, shape: _Shape, log2: int, gpu: Gpu) -> list[tuple[int, float]]:
        """The ratios of the variants that a cell names; none if this version knows none of their configs."""
        assert shape.cells is not None
        usable, row = shape.cells[_gpu_kind(gpu)][log2]
        timed = Timed(*row)
        problem, chip = shape.problem, chips.chip_of(gpu, self._local.sm)
        named = [(timed.variant, timed.time_ns)]
        if timed.runner_up is not None and timed.runner_up_ns is not None:
            named.append((timed.runner_up, timed.runner_up_ns))
        ratios = []
        for variant, ns in named:
            config = config_of(self._snapshot.variant(usable.bundle, variant).config)
            if config is not None:
                tiles_us = cost.tiles_us(
                    problem.op, problem.dtype, (problem.E, problem.N, problem.K, 1 << log2), config, chip
                )
                ratios.append((self._number(usable, variant), math.log(ns * 1e-3 / tiles_us)))
        return ratios


def neighbourhood(snapshot: Snapshot, local: LocalGpu, view: View) -> Neighbourhood:
    """The neighbourhood of a view, made at first use and cached by the snapshot. Raises Rejected as it does."""
    key = ("neighbours", id(view), local)
    cached: Neighbourhood | None = snapshot.rankers.get(key)
    if cached is None:
        cached = snapshot.rankers[key] = Neighbourhood(snapshot, local, view)
    return cached


def blended(
    near: Near,
    problem: Problem,
    bucket: int,
    chip: Chip,
    estimates: Sequence[tuple[float, int]],
    variants: Mapping[int, tuple[int, Config]],
) -> list[tuple[float, int]]:
    """(expected time in us, index) of variants, best first. A variant that won a cell nearby is first, if there is one.

    ``estimates`` are the cost model's: (us, index). ``variants`` has the number and the config of each index.
    """
    wanted = problem.canonical
    sizes = (wanted.E, wanted.N, wanted.K, bucket)
    won = [us for us, at in estimates if variants[at][0] in near.won]
    least = min(won or (us for us, _ in estimates), default=0.0)
    winners: list[tuple[float, int]] = []
    others: list[tuple[float, int]] = []
    for us, at in estimates:
        number, config = variants[at]
        ratio = near.won.get(number)
        expected_us = cost.tiles_us(wanted.op, wanted.dtype, sizes, config, chip)
        expected_us *= math.exp(near.others if ratio is None else ratio) * (us / least) ** cost.MODEL_SHARE
        (others if ratio is None else winners).append((expected_us, at))
    if winners:  # a variant that won no cell nearby is expected to be slower
        best_us = min(winners)[0]
        others = [(max(us, best_us * _NO_BETTER), at) for us, at in others]
    return sorted(winners + others)


def _kind(problem: Problem, aligned: bool) -> _Kind:
    return problem.op, problem.dtype, problem.layout, problem.fusion, aligned


@contextlib.contextmanager
def _checked(snapshot: Snapshot, usable: Usable) -> Iterator[None]:
    """A block that reads a bundle's records: a damaged record drops the bundle and raises Rejected."""
    try:
        yield
    except BundleError as error:
        snapshot.reject(usable.bundle, error)
        raise Rejected from error


def _sizes(problem: Problem) -> _Sizes:
    return problem.E, problem.N, problem.K


def _place(problem: Problem) -> _Place:
    return math.log2(problem.E), math.log2(problem.N), math.log2(problem.K)


def _gpu_kind(gpu: Gpu) -> _GpuKind:
    return gpu.name, gpu.sm_count, gpu.memory_mib
