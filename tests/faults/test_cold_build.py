"""A build of three models, killed at a call of its cold phase: the old bundle stays, and the next run goes on.

``tests/support/failing.c`` counts the calls that touch the output or the compile cache, in all of the build's
processes, and kills them all at one, or lets it fail. Every call: ``python -m tests.faults --long --rows R5``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from building import MODEL, OTHER, THIRD, Place, fill

from pretuned.aot.bundle.verify import verify

pytestmark = pytest.mark.slow

FAILING = Path(__file__).parents[1] / "support" / "failing.c"
COLD = 2  # variants that are not in the cache
ERRORS = {
    "open": ("EIO", "EACCES", "EROFS", "ENOSPC", "EDQUOT", "EMFILE"),
    "mkdir": ("EIO", "EACCES", "EROFS", "ENOSPC", "EDQUOT"),
    "flock": ("EINTR", "ENOLCK"),
    "write": ("short", "EINTR", "ENOSPC", "EIO", "EDQUOT"),
    "fchmod": ("EIO", "EPERM", "EROFS"),
    "fsync": ("EINTR", "EIO", "ENOSPC", "EDQUOT"),
    "rename": ("EIO", "EDQUOT", "EACCES", "EROFS", "ENOSPC"),
    "unlink": ("EIO", "EACCES"),
}
HARMLESS = ("short", "EINTR")  # it is done again, or the rest of it


class Call(NamedTuple):
    """A call that touches the output or the cache: its number, its name, and its path in the place."""

    number: int
    name: str
    path: str


class Cold:
    """A place with an old bundle, and a cache that lacks the last entries that the next build writes."""

    def __init__(self, root: Path, compiled: Path | None = None) -> None:
        self.place = Place(root)
        if compiled is not None:
            fill(self.place.cache, compiled)
        self.library = root / "failing.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self.library, FAILING, "-ldl"], check=True)
        done = self.place.run(self.command(MODEL))
        assert done.returncode == 0, done.stderr
        self.old = self.place.bundle.read_bytes()
        done = self.place.run(self.command())
        assert done.returncode == 0, done.stderr
        self.new = self.place.bundle.read_bytes()
        assert self.old != self.new
        # The smallest first: they are compiled in the shortest time.
        self.entries = sorted(self.place.cache.glob("??/*.bin"), key=lambda path: (path.stat().st_size, path.name))
        self.calls = tuple(self._calls())

    def command(self, *models: str) -> list[str]:
        more = [word for model in (models or (MODEL, OTHER, THIRD))[1:] for word in ("--models", model)]
        return self.place.command((models or (MODEL,))[0], "--workers", "1", *more)

    def reset(self) -> None:
        """Restore the state before the build."""
        for entry in self.entries[:COLD]:
            entry.unlink(missing_ok=True)
        self.place.bundle.write_bytes(self.old)

    def run(self, number: int, how: str) -> subprocess.CompletedProcess[str]:
        """The build, of which a call goes wrong."""
        count = self.place.root / "count"
        count.write_bytes(bytes(8))
        environment = {
            **self.place.environment(),
            "LD_PRELOAD": str(self.library),
            "FAIL_COUNT": str(count),
            "FAIL_UNDER": f"{self.place.out}:{self.place.cache}",
            "FAIL_AT": str(number),
            "FAIL_HOW": how,
            "FAIL_LOG": str(self.place.root / "log"),
        }
        return subprocess.run(
            self.command(),
            capture_output=True,
            text=True,
            env=environment,
            cwd=self.place.root,
            check=False,
            timeout=300,
            start_new_session=True,
        )

    def _calls(self) -> Iterator[Call]:
        self.reset()
        (self.place.root / "log").unlink(missing_ok=True)
        assert self.run(0, "").returncode == 0
        for i, line in enumerate((self.place.root / "log").read_text().splitlines(), 1):
            name, _, path = line.partition(" ")
            yield Call(i, name, str(Path(path).relative_to(self.place.root)))

    def killed(self, call: Call, how: str) -> list[str]:
        """Return the faults after a kill before ("kill") or "after" a call, and after the next run."""
        self.reset()
        done = self.run(call.number, how)
        wrong = [] if done.returncode == -9 else [f"it ended with {done.returncode}: {done.stderr[-200:]}"]
        if self.place.bundle.read_bytes() not in (self.old, self.new):
            wrong.append("the bundle is neither the old nor the new one")
        verify(str(self.place.bundle))
        kept = self.place.kept()
        again = self.place.run([*self.command(), "--json"])
        if again.returncode:
            return [*wrong, f"the next run ended with {again.returncode}: {again.stderr[-200:]}"]
        (bundle,) = json.loads(again.stdout)["bundles"]
        if (bundle["cached"], bundle["compiled"]) != (kept, len(self.entries) - kept):
            wrong.append(f"{kept} were kept, {bundle['compiled']} compiled again")
        if self.place.bundle.read_bytes() != self.new:
            wrong.append("the next run made another bundle")
        if left := self.place.leftovers():
            wrong.append(f"left behind: {left}")
        return wrong

    def failed(self, call: Call, error: str) -> list[str]:
        """Return the faults if a call fails: the error is one line that names a path, or the call does not matter."""
        self.reset()
        done = self.run(call.number, error if error == "short" else str(getattr(errno, error)))
        lines = [line for line in done.stderr.splitlines() if not re.match(r"\d+ of \d+ variants", line)]
        now = self.place.bundle.read_bytes()
        wrong = []
        if error in HARMLESS and done.returncode:
            wrong.append("it ended for what does no harm")
        if "ulimit -n" not in done.stderr and error == "EMFILE" and done.returncode:
            wrong.append(f"it does not say what is needed: {lines}")
        if "as others can write it" in done.stderr:
            wrong.append(f"it says what is not so: {lines}")
        if done.returncode == 1:
            if len(lines) != 1 or not lines[0].startswith("error: ") or str(self.place.root) not in lines[0]:
                wrong.append(f"it says {lines}")
            if os.strerror(getattr(errno, error)) not in done.stderr:
                wrong.append(f"it does not say why: {lines}")
            # What fails once the bundle is in its place: making that durable, and letting the lock go.
            behind = call in self.calls[-2:]
            if now != (self.new if behind else self.old):
                wrong.append(f"the {'new' if behind else 'old'} bundle is gone")
        elif done.returncode or now != self.new:
            wrong.append(f"it ended with {done.returncode}, the new bundle is {now == self.new}: {lines}")
        if left := self.place.leftovers():
            wrong.append(f"left behind: {left}")
        return wrong

    def cold_calls(self) -> list[Call]:
        """Return the calls of the first entry that is compiled."""
        first = next(i for i, call in enumerate(self.calls) if call.name == "write" and call.path.startswith("cache/"))
        folder = Path(self.calls[first].path).parent
        return [call for call in self.calls if folder in (Path(call.path), Path(call.path).parent)]


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory, compiled_models: Path) -> Cold:
    return Cold(tmp_path_factory.mktemp("cold"), compiled_models)


def test_killed_at_the_calls_of_an_entry(cold: Cold) -> None:
    calls = cold.cold_calls()
    assert [call.name for call in calls if call.name in ("write", "fsync", "rename")] == [
        "write",
        "fsync",
        "rename",
        "fsync",
    ]
    for call in calls:
        if call.name in ("write", "fsync", "rename"):  # a minute's worth; all of them are in the long run
            assert cold.killed(call, "kill") == [], call


@pytest.mark.parametrize("where", ["cache", "bundles"])
def test_a_call_that_fails(cold: Cold, where: str) -> None:
    """One of each name: in the cache it costs the next run time, in the output it is told."""
    calls = {call.name: call for call in cold.calls if call.path.startswith(where) and call.path.endswith(".tmp")}
    calls |= {
        call.name: call for call in cold.calls if call.path.startswith(where) and call.name in ("rename", "mkdir")
    }
    assert set(calls) >= {"open", "flock", "write", "fchmod", "fsync", "rename"}
    for name in ("open", "write", "rename"):
        assert cold.failed(calls[name], ERRORS[name][-1]) == [], calls[name]


def test_an_entry_that_can_not_be_read_again_is_reported_as_that(cold: Cold) -> None:
    last = cold.cold_calls()[-1]
    assert (last.name, Path(last.path).suffix) == ("open", ".bin")
    assert cold.failed(last, "EROFS") == []
