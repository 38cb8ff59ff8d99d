"""A small build of a user's: where its bundle, compile cache and temporary files are, and how it is run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretuned.kernels.rowops import RowOpSpec
    from pretuned.kernels.spec import Spec

# fp32 has the fewest candidates, and dW the fewest forms: 7 variants and 8 row kernels, about half a second each.
MODEL = "shape:E=8,H=256,I=128,k=2 dtype=fp32 ops=dW tokens=1..64 name=mine"
OTHER = "shape:E=16,H=256,I=128,k=2 dtype=fp32 ops=dW tokens=1..64 name=other"
THIRD = "shape:E=32,H=256,I=128,k=2 dtype=fp32 ops=dW tokens=1..64 name=third"
# pytest itself may run where some are ignored (nohup, a job in the background), and its children with it.
UNDISTURBED = ("env", "--default-signal=INT,TERM,HUP")


class Place:
    """A user's directory: bundles, compile cache and temporary files of its own."""

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        self.root, self.out, self.tmp = root, root / "bundles", root / "tmp"
        self.cache = cache or root / "cache"
        self.tmp.mkdir()
        self.bundle = self.out / "pretuned-sm80.msgpack"

    def command(self, model: str = MODEL, *options: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "pretuned.aot",
            "build",
            "--models",
            model,
            "--sm",
            "80",
            "--out",
            str(self.out),
            "--cache-dir",
            str(self.cache),
            "--workers",
            "2",
            "--compile-all",
            *options,
        ]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.tmp)}

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, env=self.environment(), cwd=self.root, check=False, timeout=300
        )

    def kept(self) -> int:
        return len(list(self.cache.glob("??/*.bin")))

    def leftovers(self) -> list[Path]:
        return [
            *self.tmp.iterdir(),
            *self.out.glob("*.tmp"),
            *self.out.glob(".*.tmp"),
            *self.cache.rglob("*.tmp"),
            *self.cache.rglob(".*.tmp"),
        ]


def fill(cache: Path, compiled: Path, lacking: int = 0) -> None:
    """Copy a compile cache, but for some of its entries."""
    for entry in sorted(compiled.glob("??/*.bin"))[lacking:]:
        (cache / entry.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(entry, cache / entry.parent.name)


def take_row_kernels(cache: Path) -> None:
    """Put the shipped row kernels for 8.0 and 9.0 into a compile cache: half of what a small build would compile.

    tests/test_shipped.py compares them with what is compiled.
    """
    from pretuned.artifacts.records import DType, Op
    from pretuned.kernels import rowops

    cache.mkdir()
    for sm in (80, 90):
        take_shipped(cache, rowops.specs((DType.BF16,), frozenset(Op)), sm)


def take_shipped(cache: Path, specs: Iterable[Spec | RowOpSpec], sm: int) -> None:
    """Put the shipped variants of these specs into a compile cache, if they were compiled with the tools here."""
    from pretuned.aot.compile.cache import CompileCache
    from pretuned.aot.compile.shipped import Shipped
    from pretuned.aot.compile.triton import producer_of

    shipped, here = Shipped.in_packages(sm), producer_of(sm)
    for spec in specs:
        compiled = shipped.get(spec, sm)
        if compiled is None or compiled.maker is None:
            continue
        maker = compiled.maker.producer
        if (maker.triton, maker.ptxas) == (here.triton, here.ptxas):
            CompileCache(cache).put(spec, sm, compiled)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time: the next one finds compiled what this one compiles."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiled_in(shared: Path) -> Path:
    """A compile cache, nobody's to write, with all of MODEL, OTHER and THIRD (the same variants): who asks first
    makes it.
    """
    with alone(shared / "models.lock"):
        cache = shared / "models" / "cache"
        if not cache.exists():
            (shared / "models").mkdir()
            place = Place(shared / "models", shared / "models" / "making")
            done = place.run(place.command())
            assert done.returncode == 0, done.stderr
            place.cache.rename(cache)
    return cache
