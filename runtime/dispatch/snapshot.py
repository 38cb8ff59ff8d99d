"""The bundles that this process knows: a snapshot of the bundle search path, and a view of what a GPU can use."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifacts.errors import BundleError, TargetMismatch
from ...artifacts.limits import printable
from ...artifacts.records import Fusion, Problem
from ...artifacts.tuples import NamedTuple
from .. import hooks, self_test_results
from ..settings import TRUSTED_KEYS, Invariance, Settings, lock, settings
from .places import Kind, Place, PlacedBundle, candidates, installed_places, places, scan, unusable

if TYPE_CHECKING:
    from ...artifacts.bundle_file import BundleFile
    from ...artifacts.records import Choice, LocalGpu, Variant
    from ...artifacts.signature import Keys
    from ...kernels.rowops import RowOpSpec

_log = logging.getLogger(__name__)
_kept: list[BundleFile] = []
_LAST = 1 << 16  # the order of candidates: after all bundles


class Usable(NamedTuple):
    """A bundle that a GPU can use; ``order`` is its rank among all of them."""

    order: int
    place: Place
    bundle: BundleFile

    @property
    def path(self) -> Path:
        """The bundle's file."""
        return Path(self.bundle.path)

    @property
    def speaks_of_others(self) -> bool:
        """True if the bundle's variants may run cells for which it has no choice.

        False if its build was compared with other bundles: these are at least as fast in such cells. Always True for
        installed packages, which are such other bundles.
        """
        return self.place.kind is Kind.INSTALLED or not self.bundle.producer.held_against


class Skipped(NamedTuple):
    """A bundle that was found and is not used, and why."""

    place: Place
    path: Path
    error: BundleError | None
    reason: str


class View(NamedTuple):
    """The bundles of a snapshot that a GPU can use, and those that it skips."""

    usable: tuple[Usable, ...]
    skipped: tuple[Skipped, ...]

    def demand_named_files(self) -> None:
        """Raise the error of the first file that PRETUNED_BUNDLES names and that can't be used, if there is one."""
        for skipped in self.skipped:
            if skipped.error is not None and skipped.place.names(skipped.path):
                raise type(skipped.error)(blamed(str(skipped.error)))


def blamed(reason: str) -> str:
    """Why a file that PRETUNED_BUNDLES names can't be used, and what to do about it."""
    return f"{reason.rstrip('.')}. PRETUNED_BUNDLES names this file: correct the variable, or unset it"


class Rejected(Exception):
    """Raised when a bundle turns out damaged and is dropped. Callers catch it and decide again without the bundle."""


class Snapshot:
    """The bundles of the search path, as they were when it was first read. Bundle files never change.

    A snapshot has the caches of everything that depends on its bundles. Dispatch has ``decisions``, ``rankers``, and
    ``logged``, the outcomes that it has logged. The layers above have ``launchers`` of products, ``passes`` (launchers
    of row kernels), and ``plans``, the table of repeated calls. ``put_off`` counts the uses of untested kernels that
    were postponed in a graph capture: decisions made meanwhile are not cached.
    With ``invariance``, decisions are such that a row's bits do not depend on its batch (``decide.py``).
    A child of ``fork`` keeps its parent's snapshot.
    """

    def __init__(
        self,
        asked: Sequence[Place],
        installed: Callable[[], Sequence[Place]] = tuple,
        without: Path | None = None,
        keys: Keys | None = None,
        invariance: Invariance | None = None,
    ) -> None:
        """``without`` is a file to ignore: a build ignores the bundle that it replaces.

        With ``keys``, bundles that are not pretuned's own must be signed by one of them.
        """
        self._installed = installed
        self._without = without
        self.keys = keys
        self.invariance = invariance
        self._named = scan(asked, without, keys)
        self._packages: tuple[Place, ...] | None = None
        self._packaged: tuple[PlacedBundle, ...] | None = None
        self._added: tuple[PlacedBundle, ...] = ()
        self._reserves: dict[Hashable, tuple[PlacedBundle, ...]] = {}
        self._views: dict[Hashable, View] = {}
        self._variants: dict[Hashable, tuple[tuple[int, Variant], ...]] = {}
        self._choices: dict[tuple[bytes, Problem], tuple[Choice, ...]] = {}
        self._rejected: dict[BundleFile, BundleError] = {}  # by file, not by digest: another copy may be undamaged
        self.places = tuple(asked)
        self.decisions: dict[Any, Any] = {}
        self.logged: set[Hashable] = set()
        self.rankers: dict[Any, Any] = {}
        self.launchers: dict[Any, Any] = {}
        self.passes: dict[Any, Any] = {}
        self.plans: dict[Any, Any] = {}
        self.preferences: dict[Any, Any] = {}
        self.put_off = 0

    def files(self, *, installed: bool) -> tuple[PlacedBundle, ...]:
        """Return every bundle in search order, this process's own last; installed packages' only with ``installed``."""
        return tuple(map(_read, self._files(installed=installed)))

    def _files(self, *, installed: bool) -> tuple[PlacedBundle, ...]:
        if not installed:
            return self._named + self._added
        packages = self._ask_packages()
        with lock("bundles"):
            if self._packaged is None:
                self._packaged = scan(packages, self._without, self.keys)
            return self._named + self._packaged + self._added

    def _ask_packages(self) -> tuple[Place, ...]:
        """The directories of installed packages. Call it before any lock is taken: it may import these packages.

        Another thread may be importing such a package, and this import may call pretuned and wait for the lock.
        """
        packages = self._packages
        if packages is None:
            packages = self._packages = tuple(self._installed())  # two threads compute the same value
        return packages

    def add(self, bundle: BundleFile) -> None:
        """Use a bundle that this process has made, after all others."""
        place = Place(Kind.PROCESS, Path(bundle.path))
        with lock("bundles"):
            if all(file.bundle is not bundle for file in self._added):
                self._views.clear()  # first: no forked child may get views that lack the bundle
                self._added += (PlacedBundle(place, place.path, bundle, None),)

    def view(self, local: LocalGpu, *, installed: bool) -> View:
        """The bundles that ``local`` can use and those that it can't. Raises no error for a bundle."""
        key = (local.sm, local.gpu.driver, installed)
        if installed:
            self._ask_packages()
        with lock("bundles"):
            view = self._views.get(key)
            if view is None:
                view = self._views[key] = _view(self._files(installed=installed), local, self._rejected)
                self._tell(view.skipped)
        return view

    def nearer_view(self, local: LocalGpu, kernels: frozenset[str] | None = None) -> View:
        """Return ``view`` without the installed packages' bundles that were not measured on this kind of GPU.

        With ``kernels``, bundles of pretuned itself must have one of these kernels, too. The excluded bundles are not
        read: most first calls need none of them.
        """
        self._ask_packages()
        key = local, kernels
        with lock("bundles"):
            view = self._views.get(key)
            if view is None:
                files = self._files(installed=True)
                near = [file for file in files if _is_near(file, local, kernels)]
                if len(near) == len(files):
                    return self.view(local, installed=True)
                view = self._views[key] = _view(near, local, self._rejected)
                self._tell(view.skipped)
        return view

    def reserve(self, local: LocalGpu) -> View:
        """Return the shipped candidates for this GPU, from which the cost model chooses if no bundle has a problem."""
        packages = self._ask_packages()
        with lock("bundles"):
            key = ("reserve", local.sm, local.gpu.driver)
            view = self._views.get(key)
            if view is None:
                if key not in self._reserves:
                    self._reserves[key] = tuple(_up_to_a_usable(candidates(packages, local.sm, self.keys), local))
                view = self._views[key] = _view(self._reserves[key], local, self._rejected, _LAST)
                self._tell(view.skipped)
        return view

    def find(self, bundle: BundleFile, problem: Problem) -> tuple[Choice, ...]:
        """The bundle's choices for ``problem``, and those for its twin (``transposed``) at other buckets and GPUs.

        Raises Rejected if records are damaged.
        """
        key = (bundle.digest, problem)
        choices = self._choices.get(key)
        if choices is None:
            twin = self._twin(bundle, problem)
            try:
                choices, other = bundle.find(problem), bundle.find(twin) if twin is not None else ()
                if choices and other:  # a merged bundle may have the problem for one GPU, its twin for another
                    own = {(choice.bucket, choice.gpu) for choice in choices}
                    other = tuple(choice for choice in other if (choice.bucket, choice.gpu) not in own)
                choices = self._choices[key] = choices + other
            except BundleError as error:
                self.reject(bundle, error)
                raise Rejected from error
        return choices

    def variant(self, bundle: BundleFile, index: int) -> Variant:
        """Variant ``index`` of the bundle; raises Rejected if its record is damaged."""
        try:
            return bundle.variant(index)
        except BundleError as error:
            self.reject(bundle, error)
            raise Rejected from error

    def variants(self, bundle: BundleFile, problem: Problem | RowOpSpec) -> tuple[tuple[int, Variant], ...]:
        """The bundle's variants of the kind of a problem and its twin, or of a row kernel, with their indices.

        Raises Rejected if records are damaged.
        """
        names = [problem, self._twin(bundle, problem) if isinstance(problem, Problem) else None]
        return tuple(itertools.chain.from_iterable(self._of_kind(bundle, name) for name in names if name is not None))

    def _of_kind(self, bundle: BundleFile, problem: Problem | RowOpSpec) -> tuple[tuple[int, Variant], ...]:
        kind = problem.op, problem.dtype, problem.layout, problem.fusion
        key = (bundle.digest, *(member.value for member in kind))
        variants = self._variants.get(key)
        if variants is None:
            try:
                variants = self._variants[key] = bundle.of_kind(*kind)
            except BundleError as error:
                self.reject(bundle, error)
                raise Rejected from error
        return variants

    def _twin(self, bundle: BundleFile, problem: Problem) -> Problem | None:
        """``problem.transposed``; None for bundles that this process built: processes must not differ."""
        return None if any(file.bundle is bundle for file in self._added) else problem.transposed

    def having(self, problem: Problem, local: LocalGpu) -> list[Usable]:
        """The bundles that have a variant of ``problem``'s kind; if there are none, the shipped candidates that do.

        There are no candidates for silu in the epilogue: it needs measured times, and candidates have none.
        """
        while True:  # again if ``Rejected`` has dropped a bundle
            with contextlib.suppress(Rejected):
                bundles = [
                    usable
                    for usable in self.view(local, installed=True).usable
                    if self.variants(usable.bundle, problem)
                ]
                if not bundles and Fusion.SILU not in problem.fusion:
                    bundles = [usable for usable in self.reserve(local).usable if self.variants(usable.bundle, problem)]
                return bundles

    def serves(self, problem: Problem, local: LocalGpu) -> bool:
        """True if a bundle or the shipped candidates have a variant of ``problem``'s kind."""
        return bool(self.having(problem, local))

    def reconsider(self) -> None:
        """Clear all decisions, because a variant failed its test on a GPU (runtime/self_test_results.py)."""
        with lock("bundles"):
            self.rankers.clear()
            self.decisions.clear()

    def reject(self, bundle: BundleFile, error: BundleError) -> None:
        """Drop a bundle whose records are damaged. All views and decisions are computed again."""
        with lock("bundles"):
            self._rejected[bundle] = error
            self._views.clear()
            self.reconsider()

    def fingerprint(self, local: LocalGpu) -> str:
        """Digest (hex) of usable bundles, candidates, wrong variants and the GPU; equal on ranks that choose alike."""
        gpu = local.gpu
        digest = hashlib.sha256(f"{gpu.name}\n{local.sm}\n{gpu.sm_count}\n{gpu.memory_mib}\n".encode())
        for usable in (*self.view(local, installed=True).usable, *self.reserve(local).usable):
            if (
                usable.place.kind is not Kind.PROCESS or usable.bundle.gpus
            ):  # without GPUs the bundle was compiled by this process, which depends on its calls
                digest.update(usable.bundle.digest)
        digest.update(b"".join(self_test_results.left_out(local)))
        if hooks.jit_allowed():
            digest.update(b"jit")
        if self.invariance is not None:
            digest.update(str(self.invariance).encode())
        return digest.hexdigest()

    def _tell(self, skipped: Iterable[Skipped]) -> None:
        for entry in skipped:
            topic = entry.path, entry.reason  # not the error: each view makes a new one
            if topic not in self.logged:
                self.logged.add(topic)
                # A bundle for another capability is ordinary; other reasons are warnings.
                ordinary = entry.error is None or isinstance(entry.error, TargetMismatch)
                level = logging.INFO if ordinary else logging.WARNING
                _log.log(level, "pretuned: skipping %s: %s", printable(str(entry.path)), printable(entry.reason))


def snapshot() -> Snapshot:
    """The snapshot of the process, or of this ``hooks.within`` block; it is read at first use."""
    current: Snapshot = hooks.current()
    if current is None:
        with lock("snapshot"):
            current, mode = hooks.current(), hooks.said()
            if current is None:
                read = settings()
                own = mode is hooks.UNSAID or mode == read.invariance
                current = _with_made(read, read.invariance if own else mode)
                if own:
                    hooks.snapshot = current
                else:
                    hooks.in_blocks[mode] = current
    return current


def _with_made(read: Settings, invariance: Invariance | None) -> Snapshot:
    """A snapshot with the bundles that this process made (``keep``), unless all bundles must be signed."""
    taken = take(read)
    taken.invariance = invariance
    for bundle in _kept if taken.keys is None else ():
        taken.add(bundle)
    return taken


def take(read: Settings, without: Path | None = None) -> Snapshot:
    """A new snapshot of the search path that ``read`` gives, except the file ``without``."""
    keys = None
    if read.trusted_keys is not None:
        from ...artifacts.signature import read_keys  # imported here: most processes need no signatures

        keys = read_keys(str(read.trusted_keys), f"{TRUSTED_KEYS}={read.trusted_keys}")
        for fault in keys.faults:
            _log.warning("pretuned: %s: %s", TRUSTED_KEYS, printable(fault))
    return Snapshot(places(read), installed_places, without, keys)


def keep(bundle: BundleFile) -> None:
    """Have every snapshot taken from now on use a bundle that this process has made."""
    _kept.append(bundle)


def forget_made() -> None:
    """Have no later snapshot use the bundles that were passed to ``keep``."""
    _kept.clear()


def forget() -> None:
    """Have the next ``snapshot()`` read the search path again. Bundles in use stay open."""
    with lock("snapshot"):
        hooks.snapshot = None
        hooks.in_blocks.clear()


hooks.on_reload(forget)


def _is_near(file: PlacedBundle, local: LocalGpu, kernels: frozenset[str] | None) -> bool:
    if file.place.kind is not Kind.INSTALLED or file.bundle is None or not file.bundle.target.runs_on(local.sm):
        return True
    if not file.bundle.may_be_of(local.gpu):
        return False
    return kernels is None or file.bundle.may_have(kernels) or not file.place.is_ours()


def _read(file: PlacedBundle) -> PlacedBundle:
    """Read a file's index. Return the file, with the error if reading fails."""
    try:
        if file.bundle is not None:
            file.bundle.variant_count  # noqa: B018 - reads the index
        return file
    except BundleError as error:
        return PlacedBundle(file.place, file.path, None, error)


def _up_to_a_usable(files: Iterable[PlacedBundle], local: LocalGpu) -> Iterator[PlacedBundle]:
    for file in files:
        yield file
        if file.bundle is not None and unusable(file.bundle, local) is None:
            return


def _view(
    files: Iterable[PlacedBundle], local: LocalGpu, rejected: dict[BundleFile, BundleError], first: int = 0
) -> View:
    usable: list[Usable] = []
    skipped: list[Skipped] = []
    seen: dict[bytes, Path] = {}
    for file in files:
        bundle = file.bundle
        error = file.error if bundle is None else rejected.get(bundle) or unusable(bundle, local)
        if bundle is None or error is not None:
            skipped.append(Skipped(file.place, file.path, error, str(error)))
        elif bundle.digest in seen:
            skipped.append(Skipped(file.place, file.path, None, f"the same as {seen[bundle.digest]}"))
        else:
            seen[bundle.digest] = file.path
            usable.append(Usable(first + len(usable), file.place, bundle))
            continue
        if bundle is not None:
            bundle.rest()  # perhaps another GPU's bundle, which reads the index again
    return View(tuple(usable), tuple(skipped))
