"""The contents of a package: bundles, each checked whole, under the names by which the runtime lists them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...artifacts.errors import HostError, InputError
from ...artifacts.publishing import make_folder, publish
from ...artifacts.records import Bundle
from ...artifacts.signature import SUFFIX as SIGNATURE
from ...artifacts.signature import Key, Keys, check, encode, read
from ...artifacts.wire import PREAMBLE_BYTES, read_preamble
from ...runtime.dispatch.places import SUFFIX
from ..bundle.verify import sound
from ..process.output import check_out, check_signature, held

# Letters that file names, wheels and tars hold unchanged.
_FILE = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,99}}{re.escape(SUFFIX)}")
_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9._-]{0,63}[A-Za-z0-9])?")
# The canonical form of https://packaging.python.org/en/latest/specifications/version-specifiers/, without an epoch.
_VERSION = re.compile(
    r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){0,5}((a|b|rc)(0|[1-9]\d*))?(\.post(0|[1-9]\d*))?(\.dev(0|[1-9]\d*))?"
    r"(\+[a-z0-9]+(\.[a-z0-9]+)*)?"
)
# https://github.com/opencontainers/distribution-spec/blob/main/spec.md#pulling-manifests
LONGEST_TAG = 128


@dataclass(frozen=True, slots=True)
class Item:
    """One bundle: its file name, bytes and contents, and the bytes of its signature if it has one."""

    file: str
    data: bytes
    bundle: Bundle
    signature: bytes | None = None

    @property
    def sha256(self) -> str:
        """The digest of the whole file, in hex."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class Package:
    """The bundles of one package, sorted by file name, with the package's ``name`` and ``version``."""

    name: str
    version: str
    items: tuple[Item, ...]

    @property
    def module(self) -> str:
        """The folder that a wheel installs, and that its entry point names."""
        return re.sub(r"[-_.]+", "_", self.name).lower()

    @property
    def files(self) -> dict[str, bytes]:
        """The bytes of every file by name: bundles, each followed by its signature."""
        contents = {}
        for item in self.items:
            contents[item.file] = item.data
            if item.signature is not None:
                contents[item.file + SIGNATURE] = item.signature
        return contents

    @property
    def targets(self) -> tuple[str, ...]:
        """The capabilities of the bundles."""
        return tuple(dict.fromkeys(str(item.bundle.target) for item in self.items))

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that the bundles were measured on."""
        return tuple(dict.fromkeys(gpu.name for item in self.items for gpu in item.bundle.gpus))

    @property
    def about(self) -> str:
        """One sentence on the contents."""
        measured = f", measured on {', '.join(self.gpus)}" if self.gpus else ", modelled"
        return f"Precompiled MoE kernels for pretuned: {', '.join(self.targets)}{measured}"


def contents(paths: Sequence[str], name: str, version: str) -> Package:
    """Read the bundles and check all of each.

    Raises
    ------
    InputError
        for a name or version that a package can't have, and two files of one name.
    BundleError
        if a file is no sound bundle, others can write its directory, or its signature is of other content.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"--name {name!r} is no package name; wanted 1 to 65 of A-Z a-z 0-9 . _ -, a letter first, "
            "a letter or digit last"
        )
    if not _VERSION.fullmatch(version):
        raise InputError(f"--version {version!r} is no package version; wanted e.g. 1.0, 2026.11 or 1.0+h100")
    if len(version) > LONGEST_TAG:
        raise InputError(f"--version has {len(version)} characters, at most {LONGEST_TAG} fit into an image's tag")
    package = Package(name, version, tuple(sorted(map(_item, dict.fromkeys(paths)), key=lambda item: item.file)))
    if package.module.split("_")[0] == "pretuned" and package.module != "pretuned_bundles":
        raise InputError(
            f"--name {name!r}: names that begin with pretuned are reserved; choose your own, e.g. acme-bundles"
        )
    for before, after in zip(package.items, package.items[1:], strict=False):
        if before.file == after.file:
            raise InputError(f"two bundles are named '{after.file}': a package has them in one directory. Rename one")
    return package


def _item(path: str) -> Item:
    file = Path(path).name
    if not _FILE.fullmatch(file):
        raise InputError(
            f"'{path}': the runtime would not list it under that name, wanted 1 to 100 of A-Z a-z 0-9 . _ - and "
            f"{SUFFIX} after them. Rename the file"
        )
    sound(path)  # checks the directory too
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise HostError(f"can't read '{path}': {error.strerror}") from error
    bundle = sound(path, hashlib.sha256(data).hexdigest())  # these very bytes
    signed_by = read(path)
    if signed_by is not None:
        digest = read_preamble(data[:PREAMBLE_BYTES], len(data), path).digest
        check(path, digest, Keys("aot pack", (Key("its own key", signed_by[0]),)))
    return Item(file, data, bundle, None if signed_by is None else encode(*signed_by))


def write_directory(directory: Path, packed: Package, note: Callable[[str], None]) -> None:
    """Write the bundles and signatures as files of mode 0644 in a directory of mode 0755, made if it is missing.

    A signature of a replaced bundle is removed first.

    Raises
    ------
    InputError
        if a file of their name is something other than a bundle or a signature of aot sign.
    HostError
        if the system refuses.
    """
    before = os.umask(0o022)  # readable by others, writable by its owner only
    try:
        make_folder(directory)
    except OSError as error:
        raise HostError(f"can't make the directory '{directory}': {error.strerror}. Name another with --dir") from error
    finally:
        os.umask(before)
    for item in packed.items:
        check_out(directory / item.file)
        check_signature(directory / (item.file + SIGNATURE))
    with held(directory, note, "--dir DIR"):
        for item in packed.items:
            _write_item(directory, item, note)


def _write_item(directory: Path, item: Item, note: Callable[[str], None]) -> None:
    path, signature = directory / item.file, directory / (item.file + SIGNATURE)
    if signature.exists() and not _holds(path, item.data):
        try:
            signature.unlink()
        except OSError as error:
            raise HostError(f"can't remove '{signature}', which signs another bundle: {error.strerror}") from error
        if item.signature is None:
            note(f"removed '{signature}': it signed the bundle that was there before. Sign the new one with aot sign")
    publish(path, item.data)
    if item.signature is not None:
        publish(signature, item.signature)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False
