"""Open each bundle of a directory with both readers; print as JSON the error, CPU seconds and MiB each one took."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import BundleError
from pretuned.artifacts.records import Gpu


def strict(path: Path) -> None:
    """Read the file whole."""
    codec.decode(path.read_bytes(), path.name)


def lazy(path: Path) -> None:
    """Open it, and touch every part."""
    with open_bundle(path) as file:
        file.variants()
        for problem in file.problems():
            file.find(problem)
        file.models()
        for i in range(file.variant_count):
            file.cubin(i)


def glance(path: Path) -> None:
    """Look at what it begins with, as at a bundle for another GPU."""
    with open_bundle(path, later=True) as file:
        file.may_be_of(Gpu("NVIDIA H200", 132, 143771, 13000))


def resident_mib(peak: bool) -> float:
    """Return the MiB of memory that the process uses now, or the peak since it was reset."""
    key = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def measure(read: Callable[[Path], None], path: Path) -> tuple[str | None, float, float]:
    """The error's class, the CPU seconds, and by how many MiB the process grew meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_mib = resident_mib(peak=False)
    begin = time.process_time()
    error = None
    try:
        read(path)
    except BundleError as caught:
        error = type(caught).__name__
    seconds = time.process_time() - begin
    return error, seconds, resident_mib(peak=True) - before_mib


paths = sorted(Path(sys.argv[1]).glob("*.msgpack"))
print(json.dumps({path.name: {f.__name__: measure(f, path) for f in (lazy, strict, glance)} for path in paths}))
