"""One bundle written to the path that the user named, and never over a file that is something else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..artifacts import codec
from ..artifacts.errors import HostError, InputError
from ..artifacts.store import publish
from ..artifacts.types import Bundle

_BEGINS = b"\x95\xa8pretuned"  # FORMAT.md: an array of 5, the magic


@dataclass(frozen=True, slots=True)
class Written:
    """A bundle on disk; ``unchanged`` if the file held these very bytes before."""

    path: Path
    size_bytes: int
    unchanged: bool


def check_out(path: Path) -> None:
    """Refuse a path that can't take a bundle, before any work.

    Raises
    ------
    InputError
        if there is something else than a bundle.
    HostError
        if its directory is not there, or the file can't be read.
    """
    if not path.parent.is_dir():
        raise HostError(f"can't write '{path}': '{path.parent}' is no directory. Make it, or name another file with -o")
    try:
        with path.open("rb") as file:
            begin = file.read(len(_BEGINS))
    except FileNotFoundError:
        return
    except IsADirectoryError:
        raise InputError(
            f"-o '{path}' is a directory, wanted a file's name, such as '{path / 'new.msgpack'}'"
        ) from None
    if begin != _BEGINS:
        raise InputError(f"-o '{path}' is there and is no bundle: it is not overwritten. Name another file")


def write_bundle(path: Path, bundle: Bundle) -> Written:
    """Publish ``bundle``: readers see the old file or the new one.

    Raises
    ------
    InputError, HostError
        as ``check_out``; HostError also where the system refuses.
    BundleCorrupt
        if the bundle passes a limit of the format.
    """
    check_out(path)
    data = codec.encode(bundle, str(path))
    try:
        unchanged = path.read_bytes() == data
    except FileNotFoundError:
        unchanged = False
    publish(path, data)
    return Written(path, len(data), unchanged)
