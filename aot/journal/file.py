"""The journal of measuring: every result is appended at once, to a file that a crash can't spoil.

A text file, one record a line: 8 hex digits, the CRC-32 of what follows the blank, and JSON. The first line is
the header: the format, pretuned's version, the kernels measured, the GPU. Lines are only ever appended, with
an fsync; a cut last line is ignored, and cut off before the next one is written. The order of the
records means nothing. A journal whose name ends in ``.xz`` is compressed: it is read like any other, and never
written.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...artifacts.errors import HostError, InputError, LockBusy
from ...artifacts.limits import MAX_DIM, is_label, is_text
from ...artifacts.locking import no_locks, release, take
from ...artifacts.publishing import make_folder
from ...artifacts.records import Gpu, Kernel
from ...artifacts.wire import digest, integer, name, shown
from ...kernels.arch import supported
from ..process.output import holder, without_waiting
from .records import ROUTINGS, Record, from_value, to_value

FORMAT = 1
MAX_BYTES = 1 << 30
MAX_LINES = 1 << 20
_LONGEST_LINE = 4 << 20  # bytes; ten times the record of a cell with all variants
_PIECE_BYTES = 1 << 20  # read or decompressed at once
COMPRESSED = ".xz"
_MOST_MEMORY = 1 << 27  # bytes for a decompressor; the largest preset takes half
_LONGEST_WAIT_S = 24 * 3600.0


class OtherJournal(InputError):
    """A journal of another GPU, routing or kernel revision, or a compressed one: it can be read but not continued."""


@dataclass(frozen=True, slots=True)
class Header:
    """The GPU, kernels and routings of a journal's times. ``gpu.driver`` is the first session's.

    ``routings`` name distributions of rows over experts, in the order of a record's times.
    """

    sm: int
    gpu: Gpu
    kernels: tuple[Kernel, ...]
    pretuned: str = ""
    routings: tuple[str, ...] = ROUTINGS


@dataclass(frozen=True, slots=True)
class Contents:
    """A journal as read: ``damaged`` lines are left out; a cut last line begins at ``sound_bytes``."""

    header: Header
    records: tuple[Record, ...]
    damaged: int
    sound_bytes: int


def read_journal(path: Path) -> Contents:
    """Read a whole journal without a lock: readers see complete records only. It may be compressed (``.xz``).

    Raises
    ------
    InputError
        if it is missing, no journal, of a later format, or compressed and damaged or too large.
    """
    try:
        with open(path, "rb", opener=without_waiting) as file:
            _size(file.fileno(), path)
            pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
            return _parse(_decompressed(pieces, path) if path.suffix == COMPRESSED else pieces, path)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"journal '{path}': {reason}; aot measure writes one") from None


def _decompressed(pieces: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Yield the decompressed journal in pieces: a few bytes may claim any size."""
    import lzma

    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_MEMORY)
    reason = ""
    try:
        for piece in pieces:
            if decompressor.eof:
                reason = "something follows its end"
                break
            yield decompressor.decompress(piece, max_length=_PIECE_BYTES)
            while not (decompressor.needs_input or decompressor.eof):
                yield decompressor.decompress(b"", max_length=_PIECE_BYTES)
    except lzma.LZMAError as error:
        reason = str(error)
    if decompressor.unused_data:
        reason = "something follows its end"
    elif not (reason or decompressor.eof):
        reason = "it is cut off"
    if reason:
        raise InputError(f"journal '{path}': it can't be decompressed: {reason}. Copy it anew")


def _size(fd: int, path: Path) -> int:
    """The size of an open journal, in bytes; InputError if it is not a regular file or too large."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"journal '{path}': it is no regular file; name another file with --journal")
    if status.st_size > MAX_BYTES:
        raise InputError(f"journal '{path}': {status.st_size} bytes, the limit is {MAX_BYTES}")
    return status.st_size


def _parse(pieces: Iterable[bytes], path: Path) -> Contents:
    lines = _lines(pieces, path)
    line, sound = next(lines, (b"", 0))
    first = _checked(line)
    if first is None or first.get("record") != "header":
        raise InputError(f"journal '{path}': it does not begin with a header: no journal, or its first line is damaged")
    form = first.get("format")
    if type(form) is not int or form != FORMAT:
        raise InputError(f"journal '{path}': format {shown(form)}, this version reads {FORMAT}. Upgrade pretuned")
    try:
        header = _header(first)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(
            f"journal '{path}': its header can't be read: {reason}; aot measure writes a new one"
        ) from None
    records: list[Record] = []
    damaged = 0
    for line, size in lines:
        sound += size
        value = _checked(line)
        try:
            if value is None:
                raise ValueError
            records.append(from_value(value))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            damaged += 1
    return Contents(header, tuple(records), damaged, sound)


class Journal:
    """An open journal that only this process writes: ``open_journal`` makes it."""

    def __init__(self, path: Path, fd: int, contents: Contents) -> None:
        self.path = path
        self.contents = contents
        self._fd = fd
        self._end = contents.sound_bytes

    def append(self, records: Sequence[Record]) -> None:
        """Append records; they are on the disk when this returns.

        Raises
        ------
        HostError
            if the disk refuses; the journal is then unchanged.
        """
        self._write(b"".join(_line(to_value(record)) for record in records))

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            at = self._end
            while view:
                written = os.pwrite(self._fd, view, at)
                view, at = view[written:], at + written
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise HostError(
                f"can't write the journal '{self.path}': {error.strerror}. What it had is kept; make room and run "
                "the same command to go on"
            ) from error
        self._end = at


@contextlib.contextmanager
def open_journal(path: Path, header: Header, note: Callable[[str], None] = lambda note: None) -> Iterator[Journal]:
    """Open a journal to append to, and create it if it is missing. While another process holds it, note that and wait.

    Raises
    ------
    InputError
        if it is of another GPU, capability, routing or revision of a kernel, compressed, or can't be read.
    HostError
        if it can't be made, locked or written.
    """
    if path.suffix == COMPRESSED:
        raise OtherJournal(
            f"journal '{path}': it is compressed, and so it is only read. To go on with it decompress it first "
            f"(xz -dk '{path}') and name '{path.with_suffix('')}' with --journal"
        )
    try:
        make_folder(path.parent)
    except OSError as error:
        raise HostError(f"can't make the directory '{path.parent}': {error.strerror}") from error
    lock_path = Path(f"{path}.lock")
    _check_lock(lock_path)
    try:
        try:
            lock = take(lock_path, 0)
        except LockBusy:
            note(f"another tuner ({holder(lock_path)}) writes '{path}': waiting for it")
            lock = take(lock_path, _LONGEST_WAIT_S)
    except OSError as error:
        reason = error.strerror or error
        raise HostError(f"can't lock '{lock_path}': {reason}. Name a writable place with --journal") from error
    if lock is None:
        note(no_locks(path))
    try:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        except OSError as error:
            raise HostError(f"can't open the journal '{path}': {error.strerror}") from error
        try:
            yield _begun(path, fd, header, note)
        finally:
            os.close(fd)
    finally:
        release(lock, lock_path)


def _check_lock(path: Path) -> None:
    """Refuse a lock name that is another program's file, like uv.lock, whose owner may lock it too."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            begin = file.read(80)
    except OSError:  # missing, or locking it reports the error
        return
    if begin and not begin.split(b"\n")[0].isdigit():  # filelock may have left a process number
        raise InputError(f"'{path}' is there and is no lock: it is left as it is. Name another file with --journal")


def _begun(path: Path, fd: int, header: Header, note: Callable[[str], None]) -> Journal:
    size = _size(fd, path)
    own = _line(_header_value(header))
    begin = os.pread(fd, len(own), 0)
    if size == len(begin) and b"\n" not in begin:  # new, or killed while its first line was written
        if not own.startswith(begin):
            raise InputError(
                f"journal '{path}': it is no journal, nor how this one would begin: it is left as it is. "
                "Name another file with --journal"
            )
        os.ftruncate(fd, 0)
        journal = Journal(path, fd, Contents(header, (), 0, 0))
        journal._write(own)
        return journal
    contents = _parse(iter(lambda: os.read(fd, _PIECE_BYTES), b""), path)
    _check_same(path, contents.header, header)
    if contents.damaged:
        note(f"journal '{path}': {contents.damaged} damaged records are left out")
    if contents.sound_bytes < size:
        os.ftruncate(fd, contents.sound_bytes)
    return Journal(path, fd, contents)


def _check_same(path: Path, old: Header, new: Header) -> None:
    a, b = old.gpu, new.gpu
    if old.sm != new.sm or not a.is_like(b):
        raise OtherJournal(
            f"journal '{path}': measured on {described(a, old.sm)}, this is {described(b, new.sm)}. "
            "Times of one say nothing of the other: name a new file with --journal"
        )
    if old.routings != new.routings:
        raise OtherJournal(
            f"journal '{path}': measured on {' and '.join(old.routings)} rows, this version measures on "
            f"{' and '.join(new.routings)} ones: name a new file with --journal (aot build still reads this one)"
        )
    theirs = {kernel.name: kernel for kernel in old.kernels}
    for kernel in new.kernels:
        was = theirs.get(kernel.name, kernel)
        if was != kernel:
            raise OtherJournal(
                f"journal '{path}': measured with revision {was.revision} of the kernel {kernel.name} "
                f"(source {was.source_sha256.hex()[:12]}), the candidates have revision {kernel.revision} "
                f"(source {kernel.source_sha256.hex()[:12]}): name a new file with --journal"
            )


def described(gpu: Gpu, sm: int) -> str:
    """A GPU's name and sizes for a message."""
    return f"{gpu.name} (sm_{sm}, {gpu.sm_count} SMs, {gpu.memory_mib} MiB)"


def _line(value: dict[str, object]) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _lines(pieces: Iterable[bytes], path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield every whole line with its size in bytes; of a line that is too long only the beginning.

    Raises
    ------
    InputError
        if there are too many bytes or lines.
    """
    begun, length, total, count = b"", 0, 0, 0
    for piece in pieces:
        total += len(piece)
        if total > MAX_BYTES:
            raise InputError(f"journal '{path}': over {MAX_BYTES} bytes, which is the limit")
        at = 0
        while (end := piece.find(b"\n", at)) >= 0:
            count += 1
            if count > MAX_LINES:
                raise InputError(f"journal '{path}': over {MAX_LINES:,} lines, which is the limit")
            yield begun + piece[at:end], length + end + 1 - at
            begun, length, at = b"", 0, end + 1
        if len(begun) <= _LONGEST_LINE:
            begun += piece[at:]
        length += len(piece) - at


def _checked(line: bytes) -> dict[str, object] | None:
    """The JSON of a line if its checksum is right, else None."""
    text = memoryview(line)[9:]
    try:
        if len(line) > _LONGEST_LINE or line[8:9] != b" " or int(line[:8], 16) != zlib.crc32(text):
            return None
        value = json.loads(str(text, "utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _header_value(header: Header) -> dict[str, object]:
    gpu = header.gpu
    return {
        "record": "header",
        "format": FORMAT,
        "pretuned": header.pretuned or importlib.metadata.version("pretuned"),
        "kernels": [[kernel.name, kernel.revision, kernel.source_sha256.hex()] for kernel in header.kernels],
        "sm": header.sm,
        "gpu": {"name": gpu.name, "sm_count": gpu.sm_count, "memory_mib": gpu.memory_mib},
        "driver": gpu.driver,
        "routings": list(header.routings),
    }


def _header(value: dict[str, object]) -> Header:
    gpu = value["gpu"]
    kernels = value["kernels"]
    if not isinstance(gpu, dict) or not isinstance(kernels, list):
        raise ValueError(f"gpu is {shown(gpu)}, kernels is {shown(kernels)}")
    sm = integer(value["sm"], "sm", 10, 9999)
    if sm not in supported():
        raise ValueError(f"sm is {sm}, wanted one of {', '.join(map(str, supported()))}")
    return Header(
        sm,
        Gpu(
            name(gpu["name"], "gpu.name", is_label),
            integer(gpu["sm_count"], "gpu.sm_count", 1, MAX_DIM),
            integer(gpu["memory_mib"], "gpu.memory_mib", 1, MAX_DIM),
            integer(value["driver"], "driver", 0, MAX_DIM),
        ),
        tuple(_kernel(*row) for row in kernels),
        name(value["pretuned"], "pretuned", is_text),
        routings=_routings(value["routings"]),
    )


def _routings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"routings is {shown(value)}, wanted a list of names")
    return tuple(name(item, "a routing", is_label) for item in value)


def _kernel(kernel: object, revision: object, source: object) -> Kernel:
    return Kernel(
        name(kernel, "a kernel's name"),
        integer(revision, "a kernel's revision", 0, MAX_DIM),
        digest(bytes.fromhex(source) if isinstance(source, str) else source, "a kernel's source"),
    )
