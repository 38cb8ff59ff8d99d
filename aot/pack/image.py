"""An OCI image layout: from scratch, one layer that holds /opt/pretuned/bundles, and labels that say what it is.

The format is https://github.com/opencontainers/image-spec. The same bundles, name and version give the same digest:
entries are sorted and root's, all is dated 1970, and the layer is not compressed (what pushes it compresses it).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

from ...artifacts.errors import HostError, InputError
from ...artifacts.files.publish import publish
from ...runtime.dispatch.places import SYSTEM_DIRECTORY
from ..process.output_file import without_waiting
from .package import Package

ARCHITECTURES = ("amd64", "arm64")
_OCI = "application/vnd.oci.image"
_TAG = "org.opencontainers.image.ref.name"
_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
_INDEX = "index.json"
_MOST_INDEX_BYTES = 16 << 20
_CREATED = "1970-01-01T00:00:00Z"


def write_image(layout: Path, packed: Package, architecture: str) -> str:
    """Write the layout; returns the manifest's digest, ``sha256:...``. Other tags of a layout that is there stay.

    Raises
    ------
    InputError
        if there is something else than a layout.
    HostError
        where the system refuses.
    """
    others = _others(layout, tag(packed))
    try:
        (layout / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"can't make the layout '{layout}': {error.strerror}. Name another with --oci") from error
    layer = _layer(packed)
    labels = _labels(packed)
    config = {
        "created": _CREATED,
        "architecture": architecture,
        "os": "linux",
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        "history": [{"created": _CREATED, "created_by": f"aot pack: {', '.join(one.file for one in packed.items)}"}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
        "config": _blob(layout, _json(config), f"{_OCI}.config.v1+json"),
        "layers": [_blob(layout, layer, f"{_OCI}.layer.v1.tar")],
        "annotations": labels,
    }
    descriptor = _blob(layout, _json(manifest), f"{_OCI}.manifest.v1+json")
    index = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.index.v1+json",
        "manifests": [*others, {**descriptor, "annotations": {_TAG: tag(packed)}}],
    }
    publish(layout / "oci-layout", _LAYOUT)
    publish(layout / _INDEX, _json(index))  # last: who reads it finds all that it names
    return str(descriptor["digest"])


def tag(packed: Package) -> str:
    """The version as an image's tag, which has no plus."""
    return packed.version.replace("+", "_")


def check_layout(layout: Path) -> None:
    """Refuse a path that can't take a layout, before any work.

    Raises
    ------
    InputError, HostError
        as ``write_image``.
    """
    _others(layout, "")


def _others(layout: Path, tag: str) -> list[dict[str, Any]]:
    """What the index of a layout that is there names under other tags; [] where nothing is there."""
    try:
        if not layout.exists() or (layout.is_dir() and not any(layout.iterdir())):
            return []
        found = json.loads(_read(layout / _INDEX))["manifests"]
        return [one for one in found if one.get("annotations", {}).get(_TAG) != tag]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"'{layout}' is there and is no OCI image layout: it is left alone. Name another") from None
    except OSError as error:
        raise HostError(f"can't read '{layout}': {error.strerror}") from error


def _read(path: Path) -> bytes:
    """A file's bytes; ValueError for what is none, or larger than any index."""
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
    """The tar: the directories down to the bundles, mode 0755, and the bundles, mode 0644, all of them root's."""
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
    """Keep ``data`` under its digest; returns what points at it."""
    digest = _digest(data)
    publish(layout / "blobs" / "sha256" / digest.removeprefix("sha256:"), data)
    return {"mediaType": kind, "digest": digest, "size": len(data)}


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
