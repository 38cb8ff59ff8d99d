"""A data wheel: bundles in a module of their own, which an entry point makes known to the runtime.

The format is https://packaging.python.org/en/latest/specifications/binary-distribution-format/. Equal bundles,
names and versions give equal bytes: entries are sorted, uncompressed, and dated 1980, the first year of a zip.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import sys
import zipfile
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from ... import integrations
from ...artifacts.errors import InputError
from ...artifacts.signature import SUFFIX as SIGNATURE
from ...runtime.dispatch.places import ENTRY_POINTS, SUFFIX
from .package import Package

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
