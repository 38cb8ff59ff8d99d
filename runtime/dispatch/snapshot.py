"""The bundles that this process knows: one snapshot of all places, and which of them a GPU can use."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifacts.errors import BundleError, TargetMismatch
from ...artifacts.names import printable
from ...artifacts.records.problem import Fusion, Problem
from ...artifacts.tuples import NamedTuple
from .. import hooks, verdicts
from ..locks import lock
from ..settings import TRUSTED_KEYS, Invariance, Settings, settings
from .places import Found, Kind, Place, candidates, installed_places, places, scan, unusable

if TYPE_CHECKING:
    from ...artifacts.files.bundle_file import BundleFile
    from ...artifacts.files.signature import Keys
    from ...artifacts.records.bundle import Choice, Variant
    from ...artifacts.records.target import LocalGpu
    from ...kernels.rowops import RowOpSpec

_log = logging.getLogger(__name__)
_kept: list[BundleFile] = []
_LAST = 1 << 16  # the order of what is asked after all bundles


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
        """Whether it has a say in cells that it has no choice of: not if it was held against what ran before.

        An installed package's has: it was there before, whatever its build was held against.
        """
        return self.place.kind is Kind.INSTALLED or not self.bundle.producer.held_against


class Skipped(NamedTuple):
    """A bundle that was found and is not used, and why."""

    place: Place
    path: Path
    error: BundleError | None
    reason: str


class View(NamedTuple):
    """What a snapshot holds for one GPU."""

    usable: tuple[Usable, ...]
    skipped: tuple[Skipped, ...]

    def demand_named_files(self) -> None:
        """Raise the error of a file that PRETUNED_BUNDLES names and that can't be used."""
        for skipped in self.skipped:
            if skipped.error is not None and skipped.place.names(skipped.path):
                raise type(skipped.error)(blamed(str(skipped.error)))


def blamed(reason: str) -> str:
    """Why a file that PRETUNED_BUNDLES names can't be used, and what to do about its being named."""
    return f"{reason.rstrip('.')}. PRETUNED_BUNDLES names this file: correct the variable, or unset it"


class Rejected(Exception):
    """A bundle was found damaged and dropped while it was being read: no error, decide again without it."""


class Snapshot:
    """The places as they were when they were first read. Bundles are immutable, so it never goes stale.

    All that hangs on which bundles there are lives and dies with the snapshot that it was made from. Of dispatch:
    ``decisions``, ``rankers``, and ``told``, what it has logged. Of the rooms above, each by a key of its own:
    ``launchers`` of products, ``passes`` of row operations, and ``plans``, the one table of calls that come again.
    ``put_off`` counts how often code that is not proven was not used for now, in a graph capture: nothing that was
    chosen meanwhile is kept.
    With ``invariance`` all that is decided is so that a row's bits do not depend on its batch (``ranking.py``).
    A child of ``fork`` goes on with its parent's.
    """

    def __init__(
        self,
        asked: Sequence[Place],
        installed: Callable[[], Sequence[Place]] = tuple,
        without: Path | None = None,
        keys: Keys | None = None,
        invariance: Invariance | None = None,
    ) -> None:
        """``without`` is a file that is as if it were not there: a build leaves out the one that it replaces.

        ``keys``: what is not pretuned's own must be signed by one of them.
        """
        self._installed = installed
        self._without = without
        self.keys = keys
        self.invariance = invariance
        self._named = scan(asked, without, keys)
        self._packages: tuple[Place, ...] | None = None
        self._packaged: tuple[Found, ...] | None = None
        self._made: tuple[Found, ...] = ()
        self._reserves: dict[Hashable, tuple[Found, ...]] = {}
        self._views: dict[Hashable, View] = {}
        self._variants: dict[Hashable, tuple[tuple[int, Variant], ...]] = {}
        self._choices: dict[tuple[bytes, Problem], tuple[Choice, ...]] = {}
        self._rejected: dict[BundleFile, BundleError] = {}  # not by content: a copy of it may be whole
        self.places = tuple(asked)
        self.decisions: dict[Any, Any] = {}
        self.told: set[Hashable] = set()
        self.rankers: dict[Any, Any] = {}
        self.launchers: dict[Any, Any] = {}
        self.passes: dict[Any, Any] = {}
        self.plans: dict[Any, Any] = {}
        self.preferences: dict[Any, Any] = {}
        self.put_off = 0

    def found(self, *, installed: bool) -> tuple[Found, ...]:
        """Every bundle, in the order of the places, those that this process made last; installed ones if asked."""
        return tuple(map(_read, self._found(installed=installed)))

    def _found(self, *, installed: bool) -> tuple[Found, ...]:
        if not installed:
            return self._named + self._made
        packages = self._ask_packages()
        with lock("bundles"):
            if self._packaged is None:
                self._packaged = scan(packages, self._without, self.keys)
            return self._named + self._packaged + self._made

    def _ask_packages(self) -> tuple[Place, ...]:
        """The directories of installed packages. Call it before any lock is taken: it may import these packages.

        Another thread may be importing such a package, and that import may call pretuned and wait for the lock.
        """
        found = self._packages
        if found is None:
            found = self._packages = tuple(self._installed())  # two threads find the same
        return found

    def add(self, bundle: BundleFile) -> None:
        """Use a bundle that this process has made, after all others."""
        place = Place(Kind.PROCESS, Path(bundle.path))
        with lock("bundles"):
            if all(one.bundle is not bundle for one in self._made):
                self._views.clear()  # before: no fork may come upon a bundle that the views lack
                self._made += (Found(place, place.path, bundle, None),)

    def view(self, local: LocalGpu, *, installed: bool) -> View:
        """The bundles that ``local`` can use and those that it can't. Nothing is raised."""
        key = (local.sm, local.gpu.driver, installed)
        if installed:
            self._ask_packages()
        with lock("bundles"):
            view = self._views.get(key)
            if view is None:
                view = self._views[key] = _view(self._found(installed=installed), local, self._rejected)
                self._tell(view.skipped)
        return view

    def nearer_view(self, local: LocalGpu, kernels: frozenset[str] | None = None) -> View:
        """The same with those of the installed ones alone that say that they were measured on such a GPU.

        With ``kernels`` pretuned's own bundles count only if they have one of these. Of the others no more is read than
        that: most first calls need none.
        """
        self._ask_packages()
        key = local, kernels
        with lock("bundles"):
            view = self._views.get(key)
            if view is None:
                every = self._found(installed=True)
                near = [one for one in every if _is_near(one, local, kernels)]
                if len(near) == len(every):
                    return self.view(local, installed=True)
                view = self._views[key] = _view(near, local, self._rejected)
                self._tell(view.skipped)
        return view

    def reserve(self, local: LocalGpu) -> View:
        """The candidates that ship for such a GPU: code for what no bundle has, every choice the cost model's."""
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
        """The bundle's choices for ``problem``, and its twin's of other buckets and GPUs.

        Rejected where their records are damaged.
        """
        key = (bundle.digest, problem)
        found = self._choices.get(key)
        if found is None:
            twin = self._twin(bundle, problem)
            try:
                found, other = bundle.find(problem), bundle.find(twin) if twin is not None else ()
                if found and other:  # what was merged may have each name of one product of another GPU
                    own = {(one.bucket, one.gpu) for one in found}
                    other = tuple(one for one in other if (one.bucket, one.gpu) not in own)
                found = self._choices[key] = found + other
            except BundleError as error:
                self.reject(bundle, error)
                raise Rejected from error
        return found

    def variant(self, bundle: BundleFile, index: int) -> Variant:
        """Variant ``index`` of the bundle; Rejected where its record is damaged."""
        try:
            return bundle.variant(index)
        except BundleError as error:
            self.reject(bundle, error)
            raise Rejected from error

    def variants(self, bundle: BundleFile, problem: Problem | RowOpSpec) -> tuple[tuple[int, Variant], ...]:
        """The bundle's variants of this kind, and of its twin's, or of a pass, with their indices.

        Rejected where records are damaged.
        """
        names = [problem, self._twin(bundle, problem) if isinstance(problem, Problem) else None]
        return tuple(itertools.chain.from_iterable(self._of_kind(bundle, one) for one in names if one is not None))

    def _of_kind(self, bundle: BundleFile, problem: Problem | RowOpSpec) -> tuple[tuple[int, Variant], ...]:
        kind = problem.op, problem.dtype, problem.layout, problem.fusion
        key = (bundle.digest, *(one.value for one in kind))
        found = self._variants.get(key)
        if found is None:
            try:
                found = self._variants[key] = bundle.of_kind(*kind)
            except BundleError as error:
                self.reject(bundle, error)
                raise Rejected from error
        return found

    def _twin(self, bundle: BundleFile, problem: Problem) -> Problem | None:
        """The problem's twin; None in what this process has made: that hangs on the calls so far, in each its own."""
        return None if any(one.bundle is bundle for one in self._made) else problem.transposed

    def having(self, problem: Problem, local: LocalGpu) -> list[Usable]:
        """The bundles that have a variant of ``problem``'s kind; where none has, the candidates, if they have.

        Of those with an epilogue none is taken: it runs where times say so, and they have no times.
        """
        while True:  # each turn drops a bundle
            with contextlib.suppress(Rejected):
                found = [one for one in self.view(local, installed=True).usable if self.variants(one.bundle, problem)]
                if not found and Fusion.SILU not in problem.fusion:
                    found = [one for one in self.reserve(local).usable if self.variants(one.bundle, problem)]
                return found

    def serves(self, problem: Problem, local: LocalGpu) -> bool:
        """Whether anything has a variant of ``problem``'s kind."""
        return bool(self.having(problem, local))

    def reconsider(self) -> None:
        """Decide all anew: some code was found to be wrong on a GPU (``verdicts.py``). What is in use stays."""
        with lock("bundles"):
            self.rankers.clear()
            self.decisions.clear()

    def reject(self, bundle: BundleFile, error: BundleError) -> None:
        """Drop a bundle whose damage showed only when it was read: every view and decision is made anew."""
        with lock("bundles"):
            self._rejected[bundle] = error
            self._views.clear()
            self.reconsider()

    def fingerprint(self, local: LocalGpu) -> str:
        """Digest (hex) of usable bundles, candidates, wrong code and the GPU: equal on ranks that choose alike."""
        gpu = local.gpu
        digest = hashlib.sha256(f"{gpu.name}\n{local.sm}\n{gpu.sm_count}\n{gpu.memory_mib}\n".encode())
        for usable in (*self.view(local, installed=True).usable, *self.reserve(local).usable):
            if usable.place.kind is not Kind.PROCESS or usable.bundle.gpus:  # what is compiled hangs on the calls
                digest.update(usable.bundle.digest)
        digest.update(b"".join(verdicts.left_out(local)))
        if hooks.jit_allowed():
            digest.update(b"jit")
        if self.invariance is not None:
            digest.update(str(self.invariance).encode())
        return digest.hexdigest()

    def _tell(self, skipped: Iterable[Skipped]) -> None:
        for one in skipped:
            topic = one.path, one.reason  # (errors differ: each view makes its own)
            if topic not in self.told:
                self.told.add(topic)
                # A directory for several capabilities is ordinary; everything else wants a look.
                ordinary = one.error is None or isinstance(one.error, TargetMismatch)
                level = logging.INFO if ordinary else logging.WARNING
                _log.log(level, "pretuned: skipping %s: %s", printable(str(one.path)), printable(one.reason))


def snapshot() -> Snapshot:
    """The process's snapshot, or that of a block of ``hooks.within``, taken at first use."""
    found: Snapshot = hooks.current()
    if found is None:
        with lock("snapshot"):
            found, mode = hooks.current(), hooks.said()
            if found is None:
                read = settings()
                own = mode is hooks.UNSAID or mode == read.invariance
                found = _with_made(read, read.invariance if own else mode)
                if own:
                    hooks.snapshot = found
                else:
                    hooks.in_blocks[mode] = found
    return found


def _with_made(read: Settings, invariance: Invariance | None) -> Snapshot:
    """A snapshot with what this process has made and keeps, unless all must be signed."""
    taken = take(read)
    taken.invariance = invariance
    for bundle in _kept if taken.keys is None else ():
        taken.add(bundle)
    return taken


def take(read: Settings, without: Path | None = None) -> Snapshot:
    """A new snapshot of the places that ``read`` names, but for the file ``without``; its keys are read first."""
    keys = None
    if read.trusted_keys is not None:
        from ...artifacts.files.signature import read_keys  # here, as most processes want no signature

        keys = read_keys(str(read.trusted_keys), f"{TRUSTED_KEYS}={read.trusted_keys}")
        for fault in keys.faults:
            _log.warning("pretuned: %s: %s", TRUSTED_KEYS, printable(fault))
    return Snapshot(places(read), installed_places, without, keys)


def keep(bundle: BundleFile) -> None:
    """Have every snapshot taken from now on use a bundle that this process has made."""
    _kept.append(bundle)


def forget_made() -> None:
    """Have no later snapshot use what ``keep`` was given."""
    _kept.clear()


def forget() -> None:
    """Makes the next ``snapshot()`` read the places again. Bundles that are in use stay open."""
    with lock("snapshot"):
        hooks.snapshot = None
        hooks.in_blocks.clear()


hooks.on_reload(forget)


def _is_near(found: Found, local: LocalGpu, kernels: frozenset[str] | None) -> bool:
    if found.place.kind is not Kind.INSTALLED or found.bundle is None or not found.bundle.target.runs_on(local.sm):
        return True
    if not found.bundle.may_be_of(local.gpu):
        return False
    return kernels is None or found.bundle.may_have(kernels) or not found.place.is_ours()


def _read(found: Found) -> Found:
    """The same, with the error that reading its index meets."""
    try:
        if found.bundle is not None:
            found.bundle.variant_count  # noqa: B018 - reads the index
        return found
    except BundleError as error:
        return Found(found.place, found.path, None, error)


def _up_to_a_usable(found: Iterable[Found], local: LocalGpu) -> Iterator[Found]:
    for one in found:
        yield one
        if one.bundle is not None and unusable(one.bundle, local) is None:
            return


def _view(found: Iterable[Found], local: LocalGpu, rejected: dict[BundleFile, BundleError], first: int = 0) -> View:
    usable: list[Usable] = []
    skipped: list[Skipped] = []
    seen: dict[bytes, Path] = {}
    for one in found:
        bundle = one.bundle
        error = one.error if bundle is None else rejected.get(bundle) or unusable(bundle, local)
        if bundle is None or error is not None:
            skipped.append(Skipped(one.place, one.path, error, str(error)))
        elif bundle.digest in seen:
            skipped.append(Skipped(one.place, one.path, None, f"the same as {seen[bundle.digest]}"))
        else:
            seen[bundle.digest] = one.path
            usable.append(Usable(first + len(usable), one.place, bundle))
            continue
        if bundle is not None:
            bundle.rest()  # of another GPU, perhaps, which reads it again
    return View(tuple(usable), tuple(skipped))
