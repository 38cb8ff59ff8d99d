"""Builds that are stopped, killed, or refused by the disk: nothing is lost, nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from building import MODEL, OTHER, UNDISTURBED, Place, fill

from pretuned.aot.bundle.verify import verify
from pretuned.aot.cli.main import run as run_here

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def built(tmp_path: Path, compiled_models: Path) -> Place:
    """A place with an old bundle, and everything compiled for the next."""
    place = Place(tmp_path, compiled_models)
    done = place.run(place.command())
    assert done.returncode == 0, done.stderr
    return place


def descendants(pid: int) -> list[int]:
    seen = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            seen += [child, *descendants(child)]
    return seen


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(true, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 130, marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, 130, marks=pytest.mark.nightly),
        (signal.SIGKILL, -9),
    ],
)
def test_a_build_that_is_stopped_goes_on_where_it_was(
    place: Place, compiled_models: Path, number: signal.Signals, code: int
) -> None:
    fill(place.cache, compiled_models, lacking=5)
    before = place.kept()
    assert before == 15 - 5
    with subprocess.Popen(
        [*UNDISTURBED, *place.command()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=place.environment(),
        start_new_session=True,
    ) as process:
        until(lambda: place.kept() >= before + 2, 60, "nothing is compiled")
        workers = descendants(process.pid)
        os.killpg(process.pid, number)  # as a terminal does
        out, err = process.communicate(timeout=60)
    until(lambda: not any(map(alive, workers)), 60, "workers live on")
    assert len(workers) >= 2
    until(lambda: not place.leftovers(), 60, f"left behind: {place.leftovers()}")
    assert not place.bundle.exists()
    assert process.returncode == code
    assert out == ""
    assert "Traceback" not in err
    kept = place.kept()
    assert before + 2 <= kept < 15, "it was stopped in the middle"
    if code == 130:
        assert err.splitlines()[-1] == (
            f"interrupted: {kept} of 15 variants are compiled and kept; run the same command to go on"
        )
    again = place.run(place.command(MODEL, "--json"))
    assert again.returncode == 0, again.stderr
    (bundle,) = json.loads(again.stdout)["bundles"]
    assert (bundle["cached"], bundle["compiled"]) == (kept, 15 - kept)
    assert verify(str(place.bundle)).choices == bundle["choices"]
    assert not place.leftovers()


@pytest.mark.parametrize(
    ("kind", "rounds"), [("restless", 1), ("deaf", 1), pytest.param("restless", 6, marks=pytest.mark.nightly)]
)
def test_a_killed_builds_folder_goes_while_compilers_are_at_work(place: Place, kind: str, rounds: int) -> None:
    command = [*UNDISTURBED, sys.executable, str(SUPPORT / "restless_build.py"), kind]
    for _ in range(rounds):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=place.environment(), start_new_session=True
        ) as process:
            until(lambda: sum(path.name.isdigit() for path in place.tmp.rglob("*")) == 2, 60, "no worker is at work")
            workers = descendants(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
        until(lambda held=workers: not any(map(alive, held)), 60, "workers live on")
        until(lambda: not place.leftovers(), 60, "something is left behind")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.nightly), 2])
def test_ctrl_c_while_the_workers_start_and_more_while_it_tidies(place: Place, workers: int) -> None:
    with subprocess.Popen(
        [*UNDISTURBED, *place.command()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=place.environment(),
        start_new_session=True,
    ) as process:
        # (A folder of its own: before, Python looks whether it can write there, with a file that it takes away again.)
        until(lambda: any(path.is_dir() for path in place.tmp.iterdir()), 60, "it does not start")
        until(lambda: started(process.pid) >= workers, 60, "no worker starts")
        for _ in range(5):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.02)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        err.lstrip()
        == f"interrupted: {place.kept()} of 15 variants are compiled and kept; run the same command to go on\n"
    )
    until(lambda: not place.leftovers(), 60, f"left behind: {place.leftovers()}")


def started(pid: int) -> int:
    """How many workers of a build there are."""
    count = 0
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            count += b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    return count


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("compile", signal.SIGKILL),
        pytest.param("compile", signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param("measure", signal.SIGKILL, marks=pytest.mark.nightly),
        ("measure", signal.SIGTERM),
    ],
)
def test_a_program_that_is_killed_takes_its_child_along(place: Place, what: str, number: signal.Signals) -> None:
    """It holds the lock of those that tune: what it started must not measure on beside the next one."""
    command = [*UNDISTURBED, sys.executable, str(SUPPORT / "ondemand_child.py"), what]
    environment = {**place.environment(), "HOME": str(place.root), "XDG_CACHE_HOME": str(place.root / "home")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        compiled = place.root / "home" / "pretuned" / "compiled"
        until(lambda: any(compiled.glob("??/*.bin")), 60, "nothing is compiled")
        children = descendants(process.pid)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == -number
    assert len(children) >= 2
    until(lambda: not any(map(alive, children)), 60, "its child lives on")
    until(lambda: not place.leftovers(), 60, f"left behind: {place.leftovers()}")


CALLS = ("mkdir", "flock", "write", "fchmod", "fsync", "rename", "unlink")


def calls_on_the_output(place: Place, command: list[str]) -> list[tuple[str, int]]:
    """Every system call of a build that touches its output directory: the name, and the how-manieth of that name."""
    log = place.root / "calls"
    done = place.run(
        ["strace", "--seccomp-bpf", "-f", "-y", "-o", str(log), "-e", f"trace={','.join(CALLS)}", *command]
    )
    assert done.returncode == 0, done.stderr
    counts: dict[tuple[str, str], int] = {}
    seen = []
    for line in log.read_text().splitlines():
        pid, _, call = line.partition(" ")
        name, _, arguments = call.strip().partition("(")
        counts[pid, name] = counts.get((pid, name), 0) + 1  # strace counts each process by itself
        if re.match(rf'(\d+<|"){re.escape(str(place.out))}', arguments):
            seen.append((name, counts[pid, name]))
    return seen


def test_a_build_that_is_killed_at_any_call_while_it_publishes(built: Place) -> None:
    """The old bundle or the new one, never neither; the next run finishes and tidies."""
    models = {built.bundle.read_bytes(): OTHER}
    calls = calls_on_the_output(built, built.command(OTHER))
    models[built.bundle.read_bytes()] = MODEL
    assert len(models) == 2
    assert [name for name, _ in calls if name in ("write", "fsync", "rename")] == ["write", "fsync", "rename", "fsync"]
    for name, number in calls:
        before = built.bundle.read_bytes()
        command = built.command(models[before])
        inject = f"inject={name}:signal=SIGKILL:when={number}"
        done = built.run(["strace", "-f", "-o", "/dev/null", "-e", f"trace={name}", "-e", inject, *command])
        assert done.returncode != 0, f"not killed at {name} {number}"
        assert built.bundle.read_bytes() in models
        assert verify(str(built.bundle))
        assert run_here(command[3:]) == 0
        assert built.bundle.read_bytes() in set(models) - {before}
        assert not built.leftovers(), f"killed at {name} {number}"


def in_small_disk(place: Place, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a mount namespace, with a file system of 64 KiB at the output directory."""
    setup = f"mount -t tmpfs -o size=32k,mode=755 tmpfs '{place.out}'"
    return place.run(["unshare", "-rm", "sh", "-ec", f"{setup}\n{script}"])


def quoted(command: list[str]) -> str:
    return " ".join(f"'{word}'" for word in command)


def test_a_full_disk(built: Place) -> None:
    old = built.bundle.read_bytes()
    assert len(old) > 48 << 10, "the bundle must be larger than the disk"
    begins = r"printf '\225\250pretuned, old\n'"  # what is no bundle is not written over
    script = f"""
{begins} > '{built.bundle}'
set +e
{quoted(built.command(OTHER))}
echo "exit $?"
ls -A '{built.out}'
tail -c 4 '{built.bundle}'
"""
    done = in_small_disk(built, script)
    assert done.stdout.split("\n") == ["exit 1", ".pretuned.lock", built.bundle.name, "old", ""], done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for words in ("error: can't write", str(built.bundle), "No space left on device", "bytes free"):
        assert words in done.stderr
    assert not built.leftovers()


@pytest.mark.parametrize("locked", [True, False])
def test_a_read_only_directory(built: Place, locked: bool) -> None:
    """With and without the lock file of an earlier build in it."""
    script = f"""
echo old > '{built.bundle}'
{f"touch '{built.out}/.pretuned.lock'" if locked else ""}
mount -o remount,ro '{built.out}'
set +e
{quoted(built.command(OTHER))}
echo "exit $?"
cat '{built.bundle}'
"""
    done = in_small_disk(built, script)
    assert done.stdout.split("\n") == ["exit 1", "old", ""], done.stderr
    assert done.stderr == (
        f"error: can't write into '{built.out}': Read-only file system. "
        "Make it writable, or name another one with --out DIR\n"
    )


def test_a_read_only_compile_cache_costs_one_note(place: Place, compiled_models: Path) -> None:
    """Cached variants are used, the rest compiled, and nothing is stored."""
    fill(place.cache, compiled_models, lacking=1)
    script = f"""
mount --bind '{place.cache}' '{place.cache}'
mount -o remount,ro,bind '{place.cache}'
{quoted(place.command(MODEL))}
"""
    done = place.run(["unshare", "-rm", "sh", "-ec", script])
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if line.startswith("note:")]
    assert len(notes) == 1, done.stderr
    assert "Read-only file system" in notes[0]
    assert place.kept() == 14
    assert verify(str(place.bundle))


def test_two_builds_in_one_directory_at_once(built: Place) -> None:
    commands = [built.command(MODEL), built.command(OTHER), built.command(MODEL)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=built.environment())
        for command in commands
    ]
    for process in running:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert verify(str(built.bundle))
    assert not built.leftovers()


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(descendants(os.getpid()))
    yield
    after = {pid for pid in descendants(os.getpid()) if alive(pid)} - before
    # the resource tracker of multiprocessing belongs to pytest itself
    assert not {pid for pid in after if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}
