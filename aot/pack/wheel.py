"""A data wheel: bundles in a module of their own, which an entry point names to the runtime.

The format is https://packaging.python.org/en/latest/specifications/binary-distribution-format/. The same bundles, name
and version give the same bytes: entries are sorted, stored as they are, and dated 1980, the first year of a zip.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from importlib.metadata import version

from ...runtime.dispatch.places import ENTRY_POINTS
from .package import Package

_DATE = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644  # a regular file that its owner alone can write


def file_name(packed: Package) -> str:
    """As pip wants it: name, version and what it runs on, which is anything."""
    return f"{packed.module}-{packed.version}-py3-none-any.whl"


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
        f"Requires-Python: >=3.10\nRequires-Dist: pretuned>={version('pretuned')}\n"
    )


def _record(files: dict[str, bytes], itself: str) -> bytes:
    rows = io.StringIO()
    write = csv.writer(rows, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        write.writerow((name, f"sha256={digest}", len(data)))
    write.writerow((itself, "", ""))
    return rows.getvalue().encode()
