"""The measured cells around one that no bundle has: what bundles hold, by shape, read when it is first asked for.

Only bundles of this capability count, and of their GPUs the one that is this one, or else most like it, and has
measured anything of the kind. What this process compiled or tuned itself counts for nothing here: it hangs on the calls
so far, and every process is to choose alike. ``kernels/cost/neighbours.py`` reckons with what is found.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from ...artifacts.errors import BundleError
from ...artifacts.records.bundle import Variant
from ...artifacts.records.problem import Problem
from ...artifacts.records.target import Gpu, LocalGpu
from ...kernels.contract.config import Config
from ...kernels.contract.words import has_aligned_rows
from ...kernels.cost import neighbours as cost
from ...kernels.cost.neighbours import Evidence, Ratios
from ...kernels.hardware import chips
from ...kernels.hardware.chips import Chip
from .places import Kind
from .snapshot import Rejected, Snapshot, Usable, View

Key: TypeAlias = "tuple[tuple[tuple[str, int], ...], bool]"  # a config, and whether its code needs aligned rows
_GpuKind: TypeAlias = "tuple[str, int, int]"
_Kind: TypeAlias = "tuple[object, ...]"
_Sizes: TypeAlias = "tuple[int, int, int]"  # E, N and K
_Place: TypeAlias = "tuple[float, float, float]"  # the binary logarithms of E, N and K
_Found: TypeAlias = "tuple[float, int, int, _Cell, _Shape]"  # distance, index of the shape, logarithm of M

_WINDOWS = (1.0, 2.0, math.inf)  # doublings of E between which shapes are looked for
_BESIDE = 3  # buckets to either side of the best one of a shape that are looked at
_MORE = 24  # cells that are found before they are sorted again
_RECENT = 256  # sizes whose near shapes are kept


class Near(NamedTuple):
    """The measured cells around a cell: what times are there, of how many shapes, the nearest shape, on which GPU."""

    ratios: Ratios
    shapes: int
    nearest: Problem
    gpu: Gpu


class _Cell:
    """A measured cell of a shape: its variants with their times in ns, and, once they were asked for, the ratios."""

    __slots__ = ("M", "ratios", "times")

    def __init__(self, M: int, times: list[tuple[Key, int]]) -> None:
        self.M, self.times = M, times
        self.ratios: tuple[tuple[Key, float], ...] | None = None


class _Shape:
    """E, N and K that bundles have, by all names there; its cells by GPU and the logarithm of M, once they are read."""

    __slots__ = ("cells", "names", "problem")

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.names: list[tuple[Usable, Problem]] = []
        self.cells: dict[_GpuKind, dict[int, _Cell]] | None = None


class _Family:
    """All shapes of a kind of problem, by E; and of the sizes that were asked for lately, which are near."""

    __slots__ = ("places", "recent", "shapes")

    def __init__(self, shapes: Iterable[_Shape]) -> None:
        self.shapes = sorted(shapes, key=lambda one: one.problem.sort_key)
        self.places = [_place(one.problem) for one in self.shapes]
        self.recent: dict[tuple[_Place, float], list[tuple[float, int]]] = {}

    def within(self, doublings: float, place: _Place) -> list[tuple[float, int]]:
        """(the least distance that any M gives, index) of the shapes whose E is so near, nearest first."""
        found = self.recent.get((place, doublings))
        if found is None:
            E, N, K = place
            first = bisect.bisect_left(self.places, (E - doublings,))
            last = bisect.bisect_right(self.places, (E + doublings, math.inf))
            limit, at_E, at_size = cost.EXPERTS * doublings * doublings, cost.EXPERTS, cost.SIZE
            every = [
                (at_E * (e - E) * (e - E) + at_size * ((n - N) * (n - N) + (k - K) * (k - K)), at)
                for at, (e, n, k) in enumerate(self.places[first:last], first)
            ]
            found = sorted(one for one in every if one[0] <= limit)
            if len(self.recent) >= _RECENT:
                self.recent.clear()
            self.recent[place, doublings] = found
        return found


class Neighbourhood:
    """What the bundles of a view have measured, for the problems that they lack on one GPU."""

    def __init__(self, snapshot: Snapshot, local: LocalGpu, view: View) -> None:
        """Reads which problems there are, and no times.

        Raises
        ------
        Rejected
            where a bundle's records are damaged, which then is in no view any more.
        """
        self.view = view  # whose identity is this one's key
        self._snapshot, self._local = snapshot, local
        self._keys: dict[tuple[int, int], Key] = {}
        shapes: dict[_Kind, dict[_Sizes, _Shape]] = {}
        gpus: dict[_GpuKind, Gpu] = {}
        for usable in view.usable:
            bundle = usable.bundle
            if usable.place.kind is Kind.PROCESS or bundle.target.sm != local.sm or not bundle.gpus:
                continue
            for gpu in bundle.gpus:
                gpus.setdefault(_gpu_kind(gpu), gpu)
            with _checked(snapshot, usable):
                names = bundle.problems()
            for name in names:
                one = name.canonical
                there = shapes.setdefault(_kind(one, has_aligned_rows(one)), {})
                sizes = one.E, one.N, one.K
                if sizes not in there:
                    there[sizes] = _Shape(one)
                there[sizes].names.append((usable, name))
        order = {kind: (not gpu.is_like(local.gpu), gpus_apart(gpu, local.gpu), kind) for kind, gpu in gpus.items()}
        self._gpus = tuple(sorted(gpus.values(), key=lambda gpu: order[_gpu_kind(gpu)]))
        self._families = {kind: _Family(some.values()) for kind, some in shapes.items()}

    def without(self, sizes: Container[_Sizes]) -> Neighbourhood:
        """What is left without problems of these E, N and K: to judge what is chosen for them."""
        rest = copy.copy(self)
        rest._families = {
            kind: _Family(one for one in family.shapes if _sizes(one.problem) not in sizes)
            for kind, family in self._families.items()
        }
        return rest

    def near(self, problem: Problem, bucket: int, *, aligned: bool = True) -> Near | None:
        """The measured cells around M rows of ``problem``; None where nothing of the kind was measured on any GPU.

        Raises
        ------
        Rejected
            where a bundle's records are damaged.
        """
        wanted = problem.canonical
        family = self._families.get(_kind(wanted, aligned and has_aligned_rows(wanted)))
        if family is None:
            return None
        for gpu in self._gpus:
            found = self._nearest(family, _place(wanted), math.log2(bucket), _gpu_kind(gpu))
            if found:
                return _summed(found, gpu, self._local.sm)
        return None

    def _nearest(self, family: _Family, place: _Place, M: float, gpu: _GpuKind) -> list[_Found]:
        """The nearest measured cells, nearest first, each once."""
        most, (E, N, K) = cost.NEAREST, place
        best: list[_Found] = []
        for doublings in _WINDOWS:
            best = []
            edge, full = math.inf, most  # the distance of the last of the best, and how many are sorted next
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
                for log2 in range(middle - _BESIDE, middle + _BESIDE + 1):
                    cell = cells.get(log2)
                    if cell is not None:
                        rows = log2 - M
                        each = rows - e + E
                        distance = apart + cost.ROWS * rows * rows + cost.EXPERT_ROWS * each * each
                        best.append((distance, at, log2, cell, shape))
                if len(best) >= full:
                    best.sort()
                    del best[most:]
                    edge, full = best[-1][0], most + _MORE
            best.sort()
            del best[most:]
            if len(best) == most and best[-1][0] <= cost.EXPERTS * doublings * doublings:
                break  # no shape beyond the window is nearer
        return best

    def _read(self, shape: _Shape) -> dict[_GpuKind, dict[int, _Cell]]:
        """The measured cells of a shape, read once: of two bundles with one cell the first's."""
        found: dict[_GpuKind, dict[int, _Cell]] = {}
        for usable, name in shape.names:
            kinds = [_gpu_kind(gpu) for gpu in usable.bundle.gpus]
            with _checked(self._snapshot, usable):
                timed = usable.bundle.timed(name)
            for bucket, gpu, variant, time_ns, runner_up, runner_up_ns in timed:
                named = ((variant, time_ns), (runner_up, runner_up_ns))
                keys = [(self._key(usable, i), ns) for i, ns in named if i is not None and ns is not None]
                times = [(key, ns) for key, ns in keys if config_of(key[0]) is not None]
                if times:
                    found.setdefault(kinds[gpu], {}).setdefault(bucket.bit_length() - 1, _Cell(bucket, times))
        shape.cells = found
        return found

    def _key(self, usable: Usable, variant: int) -> Key:
        key = self._keys.get((usable.order, variant))
        if key is None:
            key = self._keys[usable.order, variant] = key_of(self._snapshot.variant(usable.bundle, variant))
        return key


def neighbourhood(snapshot: Snapshot, local: LocalGpu, view: View) -> Neighbourhood:
    """That of a view, made when it is first asked for and kept by the snapshot; Rejected as it says."""
    key = ("neighbours", id(view), local)
    known: Neighbourhood | None = snapshot.rankers.get(key)
    if known is None:
        known = snapshot.rankers[key] = Neighbourhood(snapshot, local, view)
    return known


def _summed(found: list[_Found], gpu: Gpu, sm: int) -> Near:
    chip = chips.chip_of(gpu, sm)
    evidence = []
    for distance, _, _, cell, shape in found:
        if cell.ratios is None:
            one = shape.problem
            sizes = (one.E, one.N, one.K, cell.M)
            cell.ratios = tuple(
                (key, math.log(ns * 1e-3 / cost.tiles_us(one.op, one.dtype, sizes, config, chip)))
                for key, ns in cell.times
                if (config := config_of(key[0])) is not None
            )
        evidence.append(Evidence(distance, cell.ratios))
    shapes = {id(shape) for *_, shape in found}
    return Near(cost.ratios(evidence), len(shapes), found[0][4].problem, gpu)


def blended(
    near: Near, problem: Problem, bucket: int, chip: Chip, estimates: Iterable[tuple[float, int]],
    variant: Callable[[int], Variant],
) -> list[tuple[bool, float, int]]:  # fmt: skip
    """(whether it won nowhere near, expected time in us, index) of variants with their estimates, best first.

    ``estimates`` are the cost model's: (us, index of a ``variant``).
    """
    wanted = problem.canonical
    sizes = (wanted.E, wanted.N, wanted.K, bucket)
    every = [(us, at, variant(at)) for us, at in estimates if math.isfinite(us)]
    ratios = near.ratios.of
    won = [us for us, _, one in every if key_of(one) in ratios]
    least = min(won or [us for us, *_ in every], default=0.0)
    found = []
    for us, at, one in every:
        config = config_of(one.config)
        if config is None:
            continue
        tiles_us = cost.tiles_us(wanted.op, wanted.dtype, sizes, config, chip)
        ratio = ratios.get(key_of(one))
        expected_us = tiles_us * math.exp(near.ratios.others if ratio is None else ratio)
        found.append((ratio is None, expected_us * (us / least) ** cost.MODEL_SHARE, at))
    return sorted(found)


@functools.lru_cache(maxsize=4096)
def config_of(pairs: tuple[tuple[str, int], ...]) -> Config | None:
    """The config of a variant; None where this version does not know it."""
    try:
        return Config.from_pairs(pairs)
    except ValueError:
        return None


def key_of(variant: Variant) -> Key:
    """What a variant is known by in all bundles."""
    return variant.config, variant.alignment > 1


def _kind(problem: Problem, aligned: bool) -> _Kind:
    return problem.op, problem.dtype, problem.layout, problem.fusion, aligned


@contextlib.contextmanager
def _checked(snapshot: Snapshot, usable: Usable) -> Iterator[None]:
    """Records of a bundle are read in here: Rejected where they are damaged."""
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


def gpus_apart(one: Gpu, other: Gpu) -> float:
    """How unlike two GPUs of one capability are, in doublings of SMs and of memory."""
    return abs(math.log2(one.sm_count / other.sm_count)) + abs(math.log2(one.memory_mib / other.memory_mib))
