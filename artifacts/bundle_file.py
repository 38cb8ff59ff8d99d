"""Open a bundle file and read its parts when they are needed; each part is checked before it is used.

with open_bundle(path) as bundle:
    choices = bundle.find(problem)
    cubin = bundle.cubin(choices[0].variant)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import weakref
from collections.abc import Callable, Collection, Iterable
from types import TracebackType
from typing import Any

from . import trust
from .errors import BundleError, BundleUnreadable, BundleUntrusted, HostError
from .format import GLANCED_BYTES, Index, glance, glance_at_gpus, glance_at_kernels
from .limits import MAX_FILE_BYTES, MAX_OPEN_BUNDLES
from .records import (
    Bundle,
    Choice,
    DType,
    Fusion,
    Gpu,
    Kernel,
    Layout,
    Model,
    Op,
    Problem,
    Producer,
    RowOp,
    Target,
    Variant,
)
from .wire import BLOB_HEADER_BYTES, PREAMBLE_BYTES, blob_header, check_cubin, check_index, corrupt, read_preamble

_PACKED = ".msgpack.xz"  # files that ``packed`` reads
_CHUNK_BYTES = 1 << 20
_open: dict[int, weakref.ref[BundleFile]] = {}  # by id, in the order of opening: the first is closed first


def open_bundle(
    path: str | os.PathLike[str], *, sha256: str | None = None, later: bool = False, signed: bool = False
) -> BundleFile:
    """Open a bundle file: check its directories, size, header and index. Other parts are checked when they are read.

    Parameters
    ----------
    path
        A bundle. FILE.msgpack.xz is unpacked into memory; FILE.msgpack.xz#sm103 names the bundle for sm_103 in it.
    sha256
        Digest of the whole file, 64 hex digits as ``sha256sum`` prints them. It replaces the check of the directories.
    later
        Check the index only when it is needed: ``target``, ``may_be_of`` and ``may_have``, enough to skip bundles for
        other GPUs and dtypes, work without it.
    signed
        The caller checks a signature of ``digest`` before it uses anything else: a group may then write the file.

    Raises
    ------
    BundleUnreadable, BundleUntrusted, BundleCorrupt, BundleTooNew, BundleTooOld
    TargetMismatch
        if the file has no bundle for the capability that ``path`` names.
    HostError
        if there is no memory for the unpacked bundle.
    """
    where = os.fspath(path)
    if sha256 is not None:
        sha256 = sha256.lower()
        if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
            raise BundleUntrusted(
                f"bundle {where!r}: the pin {sha256[:80]!r} is not 64 hex digits, as sha256sum prints"
            )
    if _PACKED in where:
        from . import packed  # here, because few bundles are packed

        file, sm = packed.split(where)
        if packed.is_packed(file):
            held = _opened(file, trusted=sha256 is not None, signed=signed)
            return _open_pieces(packed.unpack(_read_packed(held.fd, file, sha256), where, sm), where)
    held = _opened(where, trusted=sha256 is not None, signed=signed)
    again = where if where.startswith("/") else f"{os.getcwd()}/{where}"  # noqa: PTH109 - plain text, '..' kept
    bundle = BundleFile(
        held,
        where,
        sha256,
        later=later and sha256 is None,
        again=functools.partial(_opened, again, trusted=sha256 is not None, signed=signed),
    )
    _hold(bundle)
    return bundle


def members(path: str | os.PathLike[str], *, sha256: str | None = None) -> tuple[str, ...]:
    """Return a path for ``open_bundle`` for each bundle in a file: the file's own if it holds a single bundle.

    Raises
    ------
    BundleUnreadable, BundleUntrusted, BundleCorrupt, BundleTooNew, BundleTooOld
    """
    where = os.fspath(path)
    if not where.endswith(_PACKED):
        return (where,)
    from . import packed

    held = _opened(where, trusted=sha256 is not None)
    capabilities = packed.capabilities(_read_packed(held.fd, where, sha256), where)
    return (where,) if len(capabilities) == 1 else tuple(f"{where}#sm{sm}" for sm in capabilities)


def _opened(where: str, *, trusted: bool, signed: bool = False) -> _Descriptor:
    """Open the file; check its owners and modes unless a pinned digest makes it ``trusted``."""
    real = where if trusted else trust.resolve(where, signed=signed)
    flags = 0 if trusted else os.O_NOFOLLOW
    try:
        held = _Descriptor(os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags))
    except (OSError, ValueError) as error:
        raise trust.unreadable(where, error if isinstance(error, OSError) else OSError(str(error))) from error
    if not trusted:
        trust.check(real, os.fstat(held.fd), where, held.fd, signed=signed)
    return held


def _hold(bundle: BundleFile) -> None:
    """Count the bundle as open. Beyond ``MAX_OPEN_BUNDLES`` close the one opened first, until it is read again.

    Applications need their file descriptors for themselves.
    """
    _open.pop(id(bundle), None)
    _open[id(bundle)] = weakref.ref(bundle)
    while len(_open) > MAX_OPEN_BUNDLES:
        with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread is at it, too
            first = _open.pop(next(iter(_open)))()
            if first is not None:
                first.rest()


class _Descriptor:
    """A file descriptor that is closed when no thread refers to it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        try:  # noqa: SIM105 (as the interpreter ends, modules have lost their names: contextlib, too)
            close(self.fd)
        except OSError:
            pass


def _read_packed(fd: int, where: str, sha256: str | None) -> bytes:
    """Read a packed file whole; check its pinned digest, if there is one."""
    size = _size_of(fd, where)
    data = _read(fd, 0, size, where)
    if sha256 is not None:
        _check_pin(fd, data, size, sha256, where)
    return data


def _size_of(fd: int, where: str) -> int:
    """Return the size of a regular file; raise if it is another kind of file or too large."""
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        raise BundleUnreadable(f"bundle {where!r}: it is a directory. Name its files, e.g. {where}/*.msgpack")
    if not stat.S_ISREG(status.st_mode):
        raise BundleUnreadable(f"bundle {where!r}: it is no regular file (mode {status.st_mode:o})")
    if status.st_size > MAX_FILE_BYTES:
        raise corrupt(where, f"file is {status.st_size} bytes, the limit is {MAX_FILE_BYTES}")
    return status.st_size


def open_bytes(data: bytes, where: str) -> BundleFile:
    """Open a bundle that is in memory. ``where`` names it in errors. Linux only.

    Raises
    ------
    BundleCorrupt, BundleTooNew, BundleTooOld
        if ``data`` is no bundle.
    HostError
        if there is no memory for a copy.
    """
    return _open_pieces([data], where)


def _open_pieces(pieces: Iterable[bytes], where: str) -> BundleFile:
    """Open a bundle whose bytes come in pieces: they are copied to a file in memory."""
    try:
        held = _Descriptor(os.memfd_create("pretuned", os.MFD_CLOEXEC))
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[os.write(held.fd, view) :]
        return BundleFile(held, where, None)
    except OSError as error:
        if isinstance(error, BundleUnreadable):
            raise
        raise HostError(f"can't keep {where!r} in memory: {error.strerror or error}") from error


class BundleFile:
    """An open bundle, read lazily. ``open_bundle`` returns it.

    Threads may share it, also after a fork: no call moves a file position or takes a lock. A record is checked when it
    is first read, a cubin each time it is read; BundleCorrupt says what is wrong.
    """

    def __init__(
        self,
        held: _Descriptor,
        where: str,
        sha256: str | None,
        *,
        later: bool = False,
        again: Callable[[], _Descriptor] | None = None,
    ) -> None:
        """``again`` opens the file anew; without it the descriptor stays open until ``close``."""
        self._closed = False
        self._held: _Descriptor | None = held
        self._again = again
        fd = held.fd
        size = _size_of(fd, where)
        begin = _read(fd, 0, PREAMBLE_BYTES + (GLANCED_BYTES if later else 0), where)
        self._head = begin[:PREAMBLE_BYTES]
        self._preamble = read_preamble(self._head, size, where)
        self.path = where
        self._file_bytes = size
        self._begin = begin[PREAMBLE_BYTES:]
        self._glanced = glance(self._begin) if later else None
        self._checked: Index | BundleError | None = None  # None until the index is read
        if self._glanced is None:
            self._checked = self._read_index(fd, sha256)

    def _descriptor(self) -> _Descriptor:
        """Return the descriptor. If ``rest`` closed it, open the file again and check that its header is unchanged."""
        held, again = self._held, self._again
        if held is None and again is not None and not self._closed:
            held = again()
            if _read(held.fd, 0, PREAMBLE_BYTES, self.path) != self._head:
                raise corrupt(self.path, "the file was changed after it was opened")
            self._held = held
            _hold(self)
        if held is None:
            raise BundleUnreadable(f"bundle {self.path!r}: it was closed")
        return held

    def rest(self) -> None:
        """Close the descriptor until something is read; the file's owners and modes are then checked again."""
        if self._again is not None:
            self._held = None

    def _read_index(self, fd: int, sha256: str | None) -> Index:
        where, preamble = self.path, self._preamble
        index = _read(fd, PREAMBLE_BYTES, preamble.index_bytes, where)
        cubins_header = _read(fd, PREAMBLE_BYTES + preamble.index_bytes, BLOB_HEADER_BYTES, where)
        if sha256 is not None:
            _check_pin(fd, self._head + index + cubins_header, self._file_bytes, sha256, where)
        check_index(self._head, preamble, index, where)
        if cubins_header != blob_header(self._file_bytes - preamble.cubins_at):
            raise corrupt(where, f"the cubins' header before byte {preamble.cubins_at} is not that of the file's size")
        parsed = Index(index, preamble, where)
        if self._glanced not in (None, parsed.target):
            raise corrupt(where, "the file was changed after it was opened")
        return parsed

    @property
    def _index(self) -> Index:
        """The checked index, read now if ``later`` put it off. An error is kept and raised each time."""
        if self._checked is None:
            try:
                held = self._descriptor()
                self._checked = self._read_index(held.fd, None)
            except BundleError as error:
                self._checked = error
        if isinstance(self._checked, BundleError):
            raise self._checked.with_traceback(None)
        return self._checked

    @property
    def digest(self) -> bytes:
        """sha256 of header and index, 32 bytes. The index holds each cubin's digest, so it covers the whole content."""
        return self._preamble.digest

    @property
    def size_bytes(self) -> int:
        """The size of the file when it was opened."""
        return self._file_bytes

    @property
    def target(self) -> Target:
        """The capability of all cubins. With ``later`` it is read from the index's first bytes, unchecked."""
        return self._glanced or self._index.target

    @property
    def min_driver(self) -> int:
        """The least CUDA driver version, as cuDriverGetVersion counts (12080 is 12.8)."""
        return self._index.min_driver

    @property
    def producer(self) -> Producer:
        """The versions and compile options that built the bundle."""
        return self._index.producer

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of its variants."""
        return self._index.kernels

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that its times were measured on."""
        return self._index.gpus

    def may_be_of(self, gpu: Gpu) -> bool:
        """Return False only if no time in the bundle was measured on such a GPU.

        With ``later`` this reads the index's first bytes, unchecked; True if they don't hold all GPUs.
        """
        if self._checked is None:
            measured = glance_at_gpus(self._begin)
        else:
            measured = None if isinstance(self._checked, BundleError) else self._checked.gpus
        return measured is None or any(candidate.is_like(gpu) for candidate in measured)

    def may_have(self, kernels: Collection[str]) -> bool:
        """Return False only if the bundle has none of these kernels, by name.

        With ``later`` this reads the index's first bytes, unchecked; True if they don't hold all kernels.
        """
        if self._checked is None:
            names = glance_at_kernels(self._begin)
        elif isinstance(self._checked, BundleError):
            names = None
        else:
            names = frozenset(kernel.name for kernel in self._checked.kernels)
        return names is None or any(name in names for name in kernels)

    @property
    def variant_count(self) -> int:
        """The number of variants, which is that of cubins."""
        return self._index.variant_count

    def variant(self, i: int) -> Variant:
        """Variant ``i``; IndexError if there is none."""
        return self._index.variant(i)

    def variants(self) -> tuple[Variant, ...]:
        """All variants."""
        return tuple(map(self._index.variant, range(self._index.variant_count)))

    def of_kind(self, op: Op | RowOp, dtype: DType, layout: Layout, fusion: Fusion) -> tuple[tuple[int, Variant], ...]:
        """Return (index, variant) of the variants of a kind; other records are not parsed."""
        return self._index.of_kind(op, dtype, layout, fusion)

    def find(self, problem: Problem) -> tuple[Choice, ...]:
        """The choices for ``problem``, ascending by bucket and GPU; () if it is not in the bundle."""
        return self._index.find(problem)

    def timed(self, problem: Problem) -> list[list[Any]]:
        """The measured choices for ``problem``, each with the fields of ``Timed``; [] if it is not in the bundle."""
        return self._index.timed(problem)

    def tested_on(self, i: int) -> Gpu | None:
        """Return a GPU that variant ``i`` was tested and timed on; None if no measured choice names the variant."""
        return self._index.tested_on(i)

    def problems(self) -> tuple[Problem, ...]:
        """All problems, in the bundle's order."""
        return tuple(self._index.problems())

    def models(self) -> tuple[Model, ...]:
        """The models that the bundle was built for."""
        return self._index.models()

    def models_of(self, problem: Problem) -> tuple[Model, ...]:
        """The models that have this product (op, fusion, E, N, K), in any dtype and layout."""
        return self._index.models_of(problem)

    def cubin(self, i: int) -> bytes:
        """The cubin of variant ``i``, after a check of its digest. IndexError if there is no such variant."""
        sha256 = self._index.variant(i).cubin_sha256
        offset, size = self._index.place(i)
        held = self._descriptor()
        return check_cubin(_read(held.fd, offset, size, self.path), i, sha256, self.path)

    def load(self) -> Bundle:
        """The whole bundle in memory, all parts and digests checked."""
        from . import codec  # here, because processes that only run kernels don't need it

        held = self._descriptor()
        data = _read(held.fd, 0, self._file_bytes, self.path)
        bundle = codec.decode(data, self.path)
        if data[:PREAMBLE_BYTES] != self._head:
            raise corrupt(self.path, "the file was changed after it was opened")
        return bundle

    def close(self) -> None:
        """Close the file. Decoded records stay usable; ``cubin`` and ``load`` then raise BundleUnreadable."""
        self._closed, self._held = True, None

    def __enter__(self) -> BundleFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read(fd: int, offset: int, size: int, where: str) -> bytes:
    """Read ``size`` bytes at ``offset``; fewer at the end of the file, which the digest check notices."""
    parts = []
    while size:
        try:
            part = os.pread(fd, size, offset)
        except OSError as error:
            raise trust.unreadable(where, error) from error
        if not part:
            break
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_pin(fd: int, begin: bytes, file_bytes: int, sha256: str, where: str) -> None:
    """Compare the file's sha256 with the pinned one. ``begin`` are the first bytes, already read, that get parsed."""
    digest = hashlib.sha256(begin)
    for offset in range(len(begin), file_bytes, _CHUNK_BYTES):
        digest.update(_read(fd, offset, min(_CHUNK_BYTES, file_bytes - offset), where))
    if digest.hexdigest() != sha256:
        raise BundleUntrusted(
            f"bundle {where!r}: its sha256 is {digest.hexdigest()}, the pin says {sha256}. "
            "Get the file again, or pin the new one if it was rebuilt."
        )
