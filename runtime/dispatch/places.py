"""The bundle search path: its places, their order, and the bundle files in them."""

from __future__ import annotations

import contextlib
import enum
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

from ...artifacts import limits
from ...artifacts.errors import BundleError, BundleUnreadable, DriverTooOld, HostError, TargetMismatch
from ...artifacts.limits import MAX_FILES, printable
from ...artifacts.tuples import NamedTuple
from ...kernels.arch import arch_of, refusal, supported
from ..settings import Settings

if TYPE_CHECKING:
    from ...artifacts.bundle_file import BundleFile
    from ...artifacts.records import LocalGpu
    from ...artifacts.signature import Keys

SYSTEM_DIRECTORY = Path("/opt/pretuned/bundles")
ENTRY_POINTS = "pretuned.bundles"
SUFFIX = ".msgpack"
COMPRESSED = "pressed"  # in a clone, the folder of compressed bundles, next to the unpacked ones
REINSTALL = "pip install -e ."
_OVERLAY_LOCK_TIMEOUT_S = 0.2
_MAX_ENTRY_POINTS_BYTES = 2 << 20
_MAX_ENTRY_POINTS = 64  # of one package

_log = logging.getLogger(__name__)


class Kind(enum.Enum):
    """The kinds of place in the bundle search path, in its order."""

    NAMED = "PRETUNED_BUNDLES"
    OVERLAY = "the user's overlay"
    SYSTEM = "the system's directory"
    INSTALLED = "an installed package"
    PROCESS = "made by this process"
    CANDIDATES = "an installed package's candidates"


class Place(NamedTuple):
    """A directory of bundles, or one file that PRETUNED_BUNDLES names."""

    kind: Kind
    path: Path

    def names(self, path: Path) -> bool:
        """True if the user named exactly this file: it must then be usable."""
        return self.kind is Kind.NAMED and path == self.path

    def is_ours(self) -> bool:
        """True if its files are part of pretuned's installation, and as trusted as its code."""
        return self.kind is Kind.INSTALLED and self.path == Path(limits.__file__).with_name("bundles")

    def files(self) -> list[Path]:
        """The bundle files here, sorted by name; [] if the directory can't be read.

        A named file is listed even if it does not exist, so that opening it reports that.
        """
        if self.kind is Kind.NAMED and not os.path.isdir(self.path):  # noqa: PTH112 - Path.is_dir raises for some paths
            return [self.path]
        try:
            names = os.listdir(self.path)  # noqa: PTH208 - most are no bundles
            wanted = sorted(name for name in names if name.endswith(SUFFIX) and _is_shown(name))
            if len(wanted) > MAX_FILES:
                text = "pretuned: %s holds %d bundles: the first %d by name are read. Take out, or merge, the others"
                _log.warning(text, printable(str(self)), len(wanted), MAX_FILES)
            return self._as_cloned([self.path / name for name in wanted[:MAX_FILES]])
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.warning("pretuned: can't list %s: %s", printable(str(self)), error.strerror or error)
            return []

    def _as_cloned(self, unpacked: list[Path]) -> list[Path]:
        """In an editable install of a clone, its bundles: the unpacked copy if it is current, else the compressed file.

        After a ``git pull`` the unpacked copies are of an earlier commit, until the clone is installed again.
        """
        compressed = self.path.with_name(COMPRESSED)
        if not self.is_ours() or not os.path.isdir(compressed):  # noqa: PTH112 - as in ``files``
            return unpacked
        from ...artifacts.packed import is_copy  # imported here: an installed package has none

        held = sorted(name for name in os.listdir(compressed) if name.endswith(f"{SUFFIX}.xz"))  # noqa: PTH208
        copies = [self.path / name.removesuffix(".xz") for name in held]
        paths = [
            copy if is_copy(str(copy), str(compressed / name)) else compressed / name
            for copy, name in zip(copies, held, strict=True)
        ]
        stale = [copy.name for copy in copies if copy in unpacked and copy not in paths]
        other = [path.name for path in unpacked if path not in copies]
        for names, why in (
            (stale, f"not what this clone holds: {compressed} is read, which takes longer. Run: {REINSTALL}"),
            (other, f"not used: this clone holds no such bundle in {compressed}"),
        ):
            if names:
                _log.warning("pretuned: %s in %s: %s", *map(printable, (", ".join(names), str(self.path), why)))
        return paths

    def unlisted(self) -> str:
        """Why the directory exists but can't be listed; "" if it can, or if this is no existing directory."""
        try:
            os.listdir(self.path)  # noqa: PTH208 - as ``files`` does
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def __str__(self) -> str:
        return f"{self.path} ({self.kind.value})"


class PlacedBundle(NamedTuple):
    """A bundle file in a place: an open file, whose index may not have been read yet, or the error of opening it."""

    place: Place
    path: Path
    bundle: BundleFile | None
    error: BundleError | None


def _is_shown(name: str) -> bool:
    return not name.startswith(".")  # temporary files of a publisher at work begin with a dot


def places(settings: Settings, system: Path = SYSTEM_DIRECTORY) -> tuple[Place, ...]:
    """Every place except the installed packages; finding those takes milliseconds (``installed_places``)."""
    named = [Place(Kind.NAMED, path) for path in settings.bundles]
    if settings.overlay is not None:
        named.append(Place(Kind.OVERLAY, settings.overlay))
    return (*named, Place(Kind.SYSTEM, system))


def scan(asked: Iterable[Place], without: Path | None, keys: Keys | None) -> tuple[PlacedBundle, ...]:
    """Open every bundle file of these places except ``without``. With ``keys``, check the signatures."""
    opened: list[PlacedBundle] = []
    for place in asked:
        wanted = None if place.is_ours() else keys
        with _undisturbed(place):
            files = [path for path in place.files() if without is None or not _same(path, without)]
            opened += [_open(place, path, wanted) for path in files]
    return tuple(opened)


def candidates_name(*sms: int) -> str:
    """The name of the file with the candidates for a capability, or for several."""
    from ...artifacts.packed import SUFFIX as PACKED  # imported here: a process without a GPU asks for none

    return f"candidates{''.join(f'-sm{sm}' for sm in sms)}{PACKED}"


def candidates_file(folder: Path, sm: int) -> Path | None:
    """The path of a capability's shipped candidates in a folder, found by file names; None if there are none.

    The candidates are a file, candidates-sm80.msgpack.xz, or a part of a file with several capabilities, FILE#sm80.
    """
    from ...artifacts.packed import SUFFIX as PACKED

    own = candidates_name(sm)
    try:
        names = os.listdir(folder)  # noqa: PTH208 - most are no candidates
    except OSError:
        return None
    if own in names:
        return folder / own
    for name in sorted(names):
        kind, *sms = name.removesuffix(PACKED).split("-")
        if name.endswith(PACKED) and kind == "candidates" and f"sm{sm}" in sms:
            return folder / f"{name}#sm{sm}"
    return None


def candidates(asked: Iterable[Place], sm: int, keys: Keys | None) -> Iterator[PlacedBundle]:
    """Yield these places' candidates for a capability, then those for earlier capabilities whose code it runs.

    Each file is unpacked into memory when the iterator reaches it: 16 to 51 MB, 0.1 to 0.4 s.
    """
    places = tuple(asked)
    for able in (capability for capability in reversed(supported()) if arch_of(capability).runs_on(sm)):
        for place in places:
            path = candidates_file(place.path, able)
            if path is not None:
                yield _open(Place(Kind.CANDIDATES, place.path), path, None if place.is_ours() else keys)


def unusable(bundle: BundleFile, local: LocalGpu) -> BundleError | None:
    """Return the reason why ``local`` can't run this bundle's code, or None, before the driver reads any code.

    Most installed bundles are for other capabilities: nothing but the capability is read of them.
    """
    name = Path(bundle.path).name
    if not bundle.target.runs_on(local.sm):
        return TargetMismatch(
            f"bundle {name!r} holds code for {bundle.target}, this GPU is sm_{local.sm} ({local}). "
            + (refusal(local.sm) or f"Build one with: aot build --models models.txt --sm {local.sm}")
        )
    try:
        least = bundle.min_driver
    except BundleError as error:
        return error
    if 0 < local.gpu.driver < least:
        from ...artifacts.records import cuda_version

        return DriverTooOld(
            f"bundle {name!r} needs a driver for CUDA {cuda_version(least)} or later, this one is for CUDA "
            f"{cuda_version(local.gpu.driver)}. Update the driver, or rebuild with a Triton whose ptxas is older"
        )
    return None


def _same(path: Path, other: Path) -> bool:
    return path == other or os.path.realpath(path) == os.path.realpath(other)


def _undisturbed(place: Place) -> contextlib.AbstractContextManager[object]:
    # Without the lock reading is safe too, as files are renamed into place and never change: so go on after a timeout.
    if place.kind is Kind.OVERLAY and os.path.isdir(place.path):  # noqa: PTH112 - as in ``files``
        from ...artifacts.locking import reading

        return reading(place.path, timeout_s=_OVERLAY_LOCK_TIMEOUT_S)
    return contextlib.nullcontext()


def _open(place: Place, path: Path, keys: Keys | None) -> PlacedBundle:
    from ...artifacts.bundle_file import open_bundle  # imported here: a process without a GPU opens none

    try:
        if keys is None:
            return PlacedBundle(place, path, open_bundle(path, later=not place.names(path)), None)
        from ...artifacts import signature

        bundle = open_bundle(path, later=True, signed=True)
        signature.check(bundle.path, bundle.digest, keys)
        if place.names(path):
            bundle.variant_count  # noqa: B018 - reads the index, once it is known whose it is
        return PlacedBundle(place, path, bundle, None)
    except BundleError as error:
        return PlacedBundle(place, path, None, error)
    except HostError as error:  # no memory or file descriptor for unpacking
        return PlacedBundle(place, path, None, BundleUnreadable(str(error)))


def installed_places() -> tuple[Place, ...]:
    """The directories of the modules that installed packages name in the entry point group ``pretuned.bundles``."""
    directories: dict[Path, None] = {}
    for point in sorted(_entry_points(), key=lambda p: (p.name, p.value)):
        try:
            spec = importlib.util.find_spec(_module(point))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module's parent is imported, and may raise anything, or call sys.exit
            details = map(printable, (point.name, point.value, _words(error)))
            _log.warning("pretuned: entry point %s = %s can't be found: %s", *details)
            continue
        directories.update(dict.fromkeys(_directories(spec)))
    return tuple(Place(Kind.INSTALLED, directory) for directory in directories)


def _entry_points() -> Iterator[EntryPoint]:
    """The entry points of the packages that are installed as directories on sys.path.

    ``importlib.metadata.entry_points(group=...)`` takes far longer: it parses the entry points of every package.
    """
    word = ENTRY_POINTS.encode()
    for folder in dict.fromkeys(
        entry for entry in sys.path if isinstance(entry, str)
    ):  # no packages are found in other entries
        try:
            names = os.listdir(folder or os.curdir)  # noqa: PTH208 - hundreds of names, each asked one thing
        except (OSError, ValueError):  # an archive, a missing directory, or no path
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                package = os.path.join(folder, name)  # noqa: PTH118
                try:
                    if not _holds(f"{package}/entry_points.txt", word):
                        continue
                    points = [*Distribution.at(package).entry_points.select(group=ENTRY_POINTS)]
                except Exception as error:  # importlib raises many types of error for malformed text
                    details = printable(package), printable(_words(error))
                    _log.warning("pretuned: the entry points of %s can't be read: %s", *details)
                    continue
                if len(points) > _MAX_ENTRY_POINTS:
                    text = "pretuned: %s has %d entry points %s: the first %d are asked"
                    _log.warning(text, printable(package), len(points), ENTRY_POINTS, _MAX_ENTRY_POINTS)
                yield from points[:_MAX_ENTRY_POINTS]


def _words(error: BaseException) -> str:
    """An error's text, or its type if making the text fails: an error's own ``__str__`` may raise anything."""
    try:
        return str(error) or type(error).__name__
    except KeyboardInterrupt:
        raise
    except BaseException:
        return type(error).__name__


def _module(point: EntryPoint) -> str:
    match = point.pattern.match(point.value)
    if match is None:
        raise ValueError("that names no module")
    return str(match["module"])


def _holds(path: str, word: bytes) -> bool:
    """True if this is a regular file that contains the word. Opening a FIFO does not block.

    Raises
    ------
    ValueError
        for a file that is larger than any package's.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        size = os.fstat(fd).st_size
        if size > _MAX_ENTRY_POINTS_BYTES:
            raise ValueError(f"entry_points.txt is {size} bytes, the limit is {_MAX_ENTRY_POINTS_BYTES}")
        return word in os.read(fd, size)
    except OSError:
        return False
    finally:
        os.close(fd)


def _directories(spec: importlib.machinery.ModuleSpec | None) -> Iterator[Path]:
    if spec is None:
        return
    if spec.submodule_search_locations:
        yield from map(Path, spec.submodule_search_locations)
    elif spec.has_location and spec.origin:  # (the origin of a built-in module is not a path)
        yield Path(spec.origin).parent
