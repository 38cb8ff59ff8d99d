"""The contents of a package: bundles, each checked whole, under the names by which the runtime lists them.

A package is a data wheel or an OCI image layout. Equal bundles, names and versions give equal bytes.

The wheel (https://packaging.python.org/en/latest/specifications/binary-distribution-format/) has the bundles in a
module of their own, which an entry point makes known to the runtime. Its entries are sorted, uncompressed, and dated
1980, the first year of a zip.

The image (https://github.com/opencontainers/image-spec) is from scratch, with one layer that holds
/opt/pretuned/bundles, and descriptive labels. Entries are sorted and owned by root, dates are 1970, and the layer is
not compressed (pushing compresses it).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import stat
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ... import integrations
from ...artifacts.errors import HostError, InputError
from ...artifacts.publishing import make_folder, publish
from ...artifacts.records import Bundle
from ...artifacts.signature import SUFFIX as SIGNATURE
from ...artifacts.signature import Key, Keys, check, encode, read
from ...artifacts.wire import PREAMBLE_BYTES, read_preamble
from ...runtime.dispatch.places import ENTRY_POINTS, SUFFIX, SYSTEM_DIRECTORY
from ..bundle.verify import sound
from ..process.output import check_out, check_signature, held, locked, without_waiting

_DATE = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644  # a regular file that only its owner can write


def file_name(packed: Package) -> str:
    """The wheel's name for pip: name, version, and that it runs anywhere."""
    return f"{packed.module}-{packed.version}-py3-none-any.whl"


def check_name(packed: Package) -> None:
    """Refuse a name under which installing the wheel would replace another package.

    Taken are the names of Python's own modules, of pretuned's dependencies and integrations, and of every package
    installed here, except an earlier wheel of bundles.

    Raises
    ------
    InputError
    """
    name = _normalised(packed.name)
    ours = _distribution_has_bundles(packed.name)
    if ours is None:
        ours = _module_has_bundles(packed.module)
    if ours is False or packed.module in sys.stdlib_module_names or name in _libraries():
        raise InputError(
            f"--name {packed.name!r} is the name of another package, which installing this wheel would replace. "
            f"Choose your own, e.g. --name {name}-bundles"
        )


def _distribution_has_bundles(name: str) -> bool | None:
    """True if the distribution of this name is a wheel of bundles; None if there is none."""
    try:
        points = metadata.distribution(name).entry_points
    except metadata.PackageNotFoundError:
        return None
    return bool(points.select(group=ENTRY_POINTS))


def _module_has_bundles(module: str) -> bool | None:
    """True if the installed module holds nothing but bundles; None if there is none."""
    here = os.path.realpath(os.curdir)
    spec = PathFinder.find_spec(module, [path for path in sys.path if os.path.realpath(path or os.curdir) != here])
    if spec is None:
        return None
    folders = spec.submodule_search_locations
    return folders is not None and all(
        file.name in ("__init__.py", "__pycache__") or file.name.endswith((SUFFIX, SUFFIX + SIGNATURE))
        for folder in folders
        for file in Path(folder).iterdir()
    )


def _libraries() -> set[str]:
    """The names of pretuned's dependencies and of the libraries that it integrates with."""
    needed = (re.match(r"[A-Za-z0-9._-]+", text) for text in metadata.requires("pretuned") or ())
    plugged = Path(integrations.__file__).parent.iterdir()
    return {_normalised(match[0]) for match in needed if match} | {match.name for match in plugged if match.is_dir()}


def _normalised(name: str) -> str:
    """Normalise a package's name: https://packaging.python.org/en/latest/specifications/name-normalization/"""
    return re.sub(r"[-_.]+", "-", name).lower()


def wheel(packed: Package) -> bytes:
    """The wheel's bytes."""
    info = f"{packed.module}-{packed.version}.dist-info"
    files = {f"{packed.module}/__init__.py": f'"""{packed.about}."""\n'.encode()}
    files |= {f"{packed.module}/{file}": data for file, data in packed.files.items()}
    files |= {
        f"{info}/METADATA": _metadata(packed).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: pretuned\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{ENTRY_POINTS}]\n{packed.name} = {packed.module}\n".encode(),
    }
    files = dict(sorted(files.items()))
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")  # the last, as the format recommends
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr = _MODE << 16
            entry.create_system = 3  # Unix, whose modes these are
            archive.writestr(entry, data)
    return out.getvalue()


def _metadata(packed: Package) -> str:
    return (
        f"Metadata-Version: 2.1\nName: {packed.name}\nVersion: {packed.version}\nSummary: {packed.about}\n"
        f"Requires-Python: >=3.10\nRequires-Dist: pretuned>={metadata.version('pretuned')}\n"
    )


def _record(files: dict[str, bytes], itself: str) -> bytes:
    rows = io.StringIO()
    write = csv.writer(rows, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        write.writerow((name, f"sha256={digest}", len(data)))
    write.writerow((itself, "", ""))
    return rows.getvalue().encode()


ARCHITECTURES = ("amd64", "arm64")
_OCI = "application/vnd.oci.image"
_TAG = "org.opencontainers.image.ref.name"
_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
_MARK = "oci-layout"
_INDEX = "index.json"
# https://github.com/opencontainers/image-spec/blob/main/descriptor.md#digests
_DIGEST = re.compile(r"[a-z0-9]+([+._-][a-z0-9]+)*:[a-zA-Z0-9=_-]+")
_MOST_INDEX_BYTES = 16 << 20
_CREATED = "1970-01-01T00:00:00Z"


def write_image(layout: Path, packed: Package, architecture: str, note: Callable[[str], None]) -> str:
    """Write the image into a layout and return its manifest's digest, ``sha256:...``; other tags stay.

    A layout that an interrupted run left unfinished is completed. Writers wait for each other.

    Raises
    ------
    InputError
        if the directory holds something other than a layout.
    HostError
        if the system refuses.
    """
    check_layout(layout)  # write nothing, not even a lock, into another directory
    try:
        make_folder(layout)
    except OSError as error:
        raise HostError(f"can't make the layout '{layout}': {error.strerror}. Name another with --oci") from error
    with locked(layout, note):
        index = _index(layout)
        if not (layout / _MARK).exists():  # first, so that an interrupted run leaves a layout
            publish(layout / _MARK, _LAYOUT)
        try:
            make_folder(layout / "blobs" / "sha256")
        except OSError as error:
            raise HostError(f"can't write into the layout '{layout}': {error.strerror}") from error
        descriptor = _write_blobs(layout, packed, architecture)
        others = [m for m in index["manifests"] if m.get("annotations", {}).get(_TAG) != tag(packed)]
        index["manifests"] = [*others, {**descriptor, "annotations": {_TAG: tag(packed)}}]
        publish(layout / _INDEX, _json(index))  # last, so that readers find all that it names
    return str(descriptor["digest"])


def _write_blobs(layout: Path, packed: Package, architecture: str) -> dict[str, Any]:
    """Write layer, config and manifest; returns the manifest's descriptor."""
    layer = _layer(packed)
    labels = _labels(packed)
    config = {
        "created": _CREATED,
        "architecture": architecture,
        "os": "linux",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        "history": [{"created": _CREATED, "created_by": f"aot pack: {', '.join(item.file for item in packed.items)}"}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
        "config": _blob(layout, _json(config), f"{_OCI}.config.v1+json"),
        "layers": [_blob(layout, layer, f"{_OCI}.layer.v1.tar")],
        "annotations": labels,
    }
    return _blob(layout, _json(manifest), f"{_OCI}.manifest.v1+json")


def tag(packed: Package) -> str:
    """The version as an image's tag, which has no plus."""
    return packed.version.replace("+", "_")


def repository(packed: Package) -> str:
    """The package's name as a registry takes it: lower-case, with single dashes."""
    return re.sub(r"[-_.]+", "-", packed.name).lower()


def check_layout(layout: Path) -> None:
    """Refuse a path that can't take a layout, before any work.

    Raises
    ------
    InputError, HostError
        as ``write_image``.
    """
    _index(layout)


def _index(layout: Path) -> dict[str, Any]:
    """The index of a layout; an empty one for a new directory, or for a layout that an interrupted run left without.

    Raises
    ------
    InputError
        for a directory that holds anything else.
    """
    empty = {"schemaVersion": 2, "mediaType": f"{_OCI}.index.v1+json", "manifests": []}
    try:
        if not layout.exists() or all(entry.name.startswith(".pretuned") for entry in layout.iterdir()):
            return empty
        if json.loads(_read(layout / _MARK))["imageLayoutVersion"] != "1.0.0":
            raise ValueError("another layout version")
        if not os.path.lexists(layout / _INDEX):
            return empty
        index: dict[str, Any] = json.loads(_read(layout / _INDEX))
        if index["schemaVersion"] != 2 or not isinstance(index["manifests"], list):
            raise ValueError("no index")
        if not all(map(_is_descriptor, index["manifests"])):
            raise ValueError("no manifests")
        return index
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"--oci '{layout}' holds something other than an OCI image layout and is left as it is. "
            "Name a new or empty directory"
        ) from None
    except OSError as error:
        raise HostError(f"can't read '{layout}': {error.strerror}") from error


def _is_descriptor(value: object) -> bool:
    """True if a value has all that the specification demands of a manifest's descriptor."""
    if not isinstance(value, dict):
        return False
    digest, size, annotations = value.get("digest"), value.get("size"), value.get("annotations", {})
    return (
        isinstance(value.get("mediaType"), str)
        and isinstance(digest, str)
        and _DIGEST.fullmatch(digest) is not None
        and type(size) is int
        and size >= 0
        and isinstance(annotations, dict)
        and all(isinstance(text, str) for text in annotations.values())
    )


def _read(path: Path) -> bytes:
    """A file's bytes; ValueError if it is not a regular file, or larger than any index."""
    with open(path, "rb", opener=without_waiting) as file:
        data = file.read(_MOST_INDEX_BYTES + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    if data is None or len(data) > _MOST_INDEX_BYTES:
        raise ValueError("no index")
    return data


def _labels(packed: Package) -> dict[str, str]:
    named = "org.opencontainers.image"
    return {
        f"{named}.title": packed.name,
        f"{named}.version": packed.version,
        f"{named}.description": packed.about,
        "pretuned.targets": ",".join(packed.targets),
        "pretuned.gpus": ",".join(packed.gpus),
        "pretuned.bundles": str(SYSTEM_DIRECTORY),
    }


def _layer(packed: Package) -> bytes:
    """The tar: the directories down to the bundles, mode 0755, and the bundles, mode 0644, all owned by root."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        inside = SYSTEM_DIRECTORY.relative_to("/")
        for directory in reversed((inside, *inside.parents[:-1])):
            entry = tarfile.TarInfo(str(directory))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for file, data in packed.files.items():
            entry = tarfile.TarInfo(str(inside / file))
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def _blob(layout: Path, data: bytes, kind: str) -> dict[str, Any]:
    """Write ``data`` under its digest, and return its descriptor."""
    digest = _digest(data)
    publish(layout / "blobs" / "sha256" / digest.removeprefix("sha256:"), data)
    return {"mediaType": kind, "digest": digest, "size": len(data)}


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


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
    bundle = sound(path, hashlib.sha256(data).hexdigest())  # checks that the file still has the bytes read above
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
