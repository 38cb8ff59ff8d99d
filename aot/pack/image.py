"""An OCI image layout: from scratch, with one layer that holds /opt/pretuned/bundles, and descriptive labels.

The format is https://github.com/opencontainers/image-spec. Equal bundles, names and versions give equal digests:
entries are sorted and owned by root, dates are 1970, and the layer is not compressed (pushing compresses it).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...artifacts.errors import HostError, InputError
from ...artifacts.publishing import make_folder, publish
from ...runtime.dispatch.places import SYSTEM_DIRECTORY
from ..process.output import locked, without_waiting
from .package import Package

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
