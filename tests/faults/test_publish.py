"""Publishing when the system fails: at every call, with every error, killed, out of space, on a read-only disk."""

from __future__ import annotations

import multiprocessing
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import golden_bundles
import pytest

from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import HostError
from pretuned.artifacts.locking import lock
from pretuned.artifacts.publishing import publish

pytestmark = pytest.mark.slow

OLD, NEW = (codec.encode(golden_bundles.medium(seed=seed)) for seed in (0, 1))
PUBLISH = """
import sys
from pathlib import Path
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.errors import HostError
data = Path(sys.argv[2]).read_bytes()
Path("/dev/null").write_bytes(b"begin")
try:
    publish(sys.argv[1], data)
except HostError as error:
    print(error)
    sys.exit(1)
"""
LOCK = """
import sys, time
from pretuned.artifacts.locking import lock
begin = time.perf_counter()
with lock(sys.argv[1], 60) as held:
    print("held", held, time.perf_counter() - begin < 5)
"""
HOLD = """
import sys, time
from pretuned.artifacts.locking import lock
with lock(sys.argv[1], 0):
    print("held", flush=True)
    time.sleep(60)
"""
CALLS = {
    "openat": ["EACCES", "EROFS", "ENOSPC", "EDQUOT", "EMFILE"],
    "flock": ["ENOLCK"],
    "write": ["ENOSPC", "EIO", "EDQUOT"],
    "fchmod": ["EPERM"],
    "fsync": ["EIO", "ENOSPC", "EDQUOT"],
    "rename": ["EACCES", "EROFS", "ENOSPC"],
}


@pytest.fixture
def strace(request, tmp_path):
    """Runs a publish under strace; gives its exit status, output and trace of calls after the setup."""
    if shutil.which("strace") is None:
        if request.config.getoption("--without-namespaces"):
            pytest.skip("needs strace")
        pytest.fail("these tests make system calls fail: install strace, or run with --without-namespaces")
    source = tmp_path / "new"
    source.write_bytes(NEW)

    def run(path: Path, *options: str) -> tuple[int, str, list[str]]:
        log = tmp_path / "strace"
        kills = any("signal=" in option for option in options)  # which a filter in the kernel would pass over
        command = ["strace", *([] if kills else ["--seccomp-bpf"]), "-f", "-y", "-o", log, *options]
        command += [sys.executable, "-c", PUBLISH, path, source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
        begin = max((i for i, line in enumerate(lines) if '"begin"' in line), default=0)
        return done.returncode, done.stdout + done.stderr, lines[begin + 1 :]

    return run


@pytest.fixture
def folder(tmp_path):
    """A directory that holds the old bundle."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    publish(folder / "b.msgpack", OLD)
    return folder


TRACED = "trace=openat,flock,write,fchmod,fsync,fdatasync,rename,renameat,renameat2,unlink,close"


def calls(lines: list[str], folder: Path) -> list[tuple[str, str]]:
    """(call, its line) for each that touches the folder."""
    return [(line.split("(")[0], line) for line in lines if str(folder) in line]


def numbered(strace, folder: Path) -> list[tuple[str, int]]:
    """(call, its number among all of the process's calls of that name) for each call of publish."""
    log_all = strace(folder / "b.msgpack", "-e", TRACED)
    assert log_all[0] == 0
    before = {}
    whole = (folder.parent / "strace").read_text().splitlines()
    begin = max(i for i, line in enumerate(whole) if '"begin"' in line)
    seen: list[tuple[str, int]] = []
    for i, line in enumerate(whole):
        match = re.match(r"\d+\s+(\w+)\(", line)
        if match is None:
            continue
        name = match[1]
        before[name] = before.get(name, 0) + 1
        if i > begin and str(folder) in line and (name in CALLS or name in ("close", "unlink")):
            seen.append((name, before[name]))
    publish(folder / "b.msgpack", OLD)
    return seen


def test_every_error_at_every_call(strace, folder):
    points = numbered(strace, folder)
    assert {name for name, _ in points} >= {"openat", "flock", "write", "fchmod", "fsync", "rename"}
    last_fsync = max(when for name, when in points if name == "fsync")
    failed = 0
    for name, when in points:
        for error in CALLS.get(name, ()):
            options = ("-e", TRACED, "-e", f"inject={name}:error={error}:when={when}")
            status, output, _ = strace(folder / "b.msgpack", *options)
            point = f"{name} {when} {error}"
            assert "Traceback" not in output, point
            now = (folder / "b.msgpack").read_bytes()
            if status == 1:
                failed += 1
                needed = "More open files must be allowed: ulimit -n" if error == "EMFILE" else "The directory .*"
                assert re.fullmatch(rf"can't write '.*b\.msgpack' \(\d+ bytes\): .*\. {needed}.*\n", output), point
                assert now == (NEW if (name, when) == ("fsync", last_fsync) else OLD), point
            else:  # what it only tidies or compares may fail
                assert (status, now) == (0, NEW), point
            assert [path.name for path in folder.iterdir()] == ["b.msgpack"], point
            publish(folder / "b.msgpack", OLD)
    assert failed >= 12


def test_killed_at_every_call(strace, folder):
    points = numbered(strace, folder)
    killed = 0
    for name, when in points:
        options = ("-e", TRACED, "-e", f"inject={name}:signal=SIGKILL:when={when}")
        status, _, _ = strace(folder / "b.msgpack", *options)
        killed += status != 0
        with open_bundle(folder / "b.msgpack") as file:
            assert file.load() in (golden_bundles.medium(seed=0), golden_bundles.medium(seed=1))
        publish(folder / "b.msgpack", OLD + b"")
        publish(folder / "other", NEW)  # any next publish tidies
        (folder / "other").unlink()
        assert [path.name for path in folder.iterdir()] == ["b.msgpack"], f"{name} {when}"
    assert killed >= 8


def test_short_writes_and_interrupted_ones(strace, folder):
    write = next(when for name, when in numbered(strace, folder) if name == "write")
    options = ("-e", TRACED, "-e", f"inject=write:error=EINTR:when={write}")
    assert strace(folder / "b.msgpack", *options)[0] == 0
    assert (folder / "b.msgpack").read_bytes() == NEW


def test_a_limit_on_the_size_of_files(folder):
    """The write is short at the limit, and fails behind it."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(NEW) // 2, old[1]))
    try:
        with pytest.raises(HostError, match=r"File too large.*bytes free"):
            publish(folder / "b.msgpack", NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, before)
    assert (folder / "b.msgpack").read_bytes() == OLD
    assert [path.name for path in folder.iterdir()] == ["b.msgpack"]


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_full_and_a_read_only_disk(request, tmp_path, fault):
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        if request.config.getoption("--without-namespaces"):
            pytest.skip("needs namespaces")
        pytest.fail("this test mounts a small disk: allow user namespaces, or run with --without-namespaces")
    big = NEW * 4  # no bundle: publish takes any bytes
    (tmp_path / "old").write_bytes(OLD)
    (tmp_path / "new").write_bytes(big)
    (tmp_path / "code.py").write_text(PUBLISH)
    (tmp_path / "disk").mkdir()
    run = f"{sys.executable} {tmp_path}/code.py {tmp_path}/disk/b.msgpack {tmp_path}/new || echo exit $?"
    script = f"""
        mount -t tmpfs -o size=16k none {tmp_path}/disk
        cp {tmp_path}/old {tmp_path}/disk/b.msgpack
        {"mount -o remount,ro " + str(tmp_path / "disk") if fault == "read-only" else ""}
        {run}
        {sys.executable} {tmp_path}/lock.py {tmp_path}/disk
        cmp {tmp_path}/disk/b.msgpack {tmp_path}/old && ls -A {tmp_path}/disk
    """
    (tmp_path / "lock.py").write_text(LOCK)
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    reason = "No space left on device" if fault == "full" else "Read-only file system"
    assert reason in lines[0], done
    assert f"{len(big)} bytes free" in lines[0]
    assert lines[1] == "exit 1"
    if fault == "read-only":
        assert lines[2] == "held False True"
    assert "b.msgpack" in lines[3:]
    assert not [line for line in lines[3:] if line.endswith(".tmp")]


def republish(path: Path, stop: Event, datas: tuple[bytes, bytes], count: Synchronized[int]) -> None:
    """Publish the two bundles in turn, a hundred times at least."""
    turn = 0
    while turn < 100 or not stop.is_set():
        publish(path, datas[turn % 2])
        turn += 1
    with count.get_lock():
        count.value += turn


def read(path: Path, loads: int, minutes: float, count: Synchronized[int]) -> None:
    """Load again and again; a torn or a missing bundle raises."""
    end, done = time.monotonic() + 60 * minutes, 0
    while done < loads and time.monotonic() < end:
        with open_bundle(path) as file:
            file.load()
        done += 1
    with count.get_lock():
        count.value += done


def under_load(
    folder: Path, datas: tuple[bytes, bytes], loads: int, minutes: float = 60, readers: int = 3
) -> dict[str, int]:
    """Two publishers and some readers: how often each did it, and how many of the processes failed."""
    context = multiprocessing.get_context("fork")
    stop, published, loaded = context.Event(), context.Value("q", 0), context.Value("q", 0)
    path = folder / "b.msgpack"
    publish(path, datas[0])
    publishers = [context.Process(target=republish, args=(path, stop, datas, published)) for _ in range(2)]
    reading = [context.Process(target=read, args=(path, loads // readers, minutes, loaded)) for _ in range(readers)]
    for worker in publishers + reading:
        worker.start()
    for reader in reading:
        reader.join()
    stop.set()
    for publisher in publishers:
        publisher.join()
    failed = sum(worker.exitcode != 0 for worker in publishers + reading)
    return {"loads": loaded.value, "republishes": published.value, "failed": failed}


@pytest.mark.parametrize("loads", [900, pytest.param(6000, marks=pytest.mark.nightly)])
def test_republished_under_load(folder, loads):
    """Nothing torn, nothing missing, and no temp file stays."""
    done = under_load(folder, (OLD, NEW), loads)
    assert done.pop("republishes") >= loads // 30
    assert done == {"loads": loads, "failed": 0}
    publish(folder / "b.msgpack", OLD)
    assert [path.name for path in folder.iterdir()] == ["b.msgpack"]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_lock_holder_stopped_or_killed(folder, how):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.send_signal(how)
        if how is signal.SIGKILL:
            holder.wait()
        begin = time.monotonic()
        with lock(folder, 0.3) as held:
            assert held is (how is signal.SIGKILL)
        assert time.monotonic() - begin < 10
        publish(folder / "b.msgpack", NEW)
        with open_bundle(folder / "b.msgpack") as file:
            assert file.load() == golden_bundles.medium(seed=1)
    finally:
        holder.kill()
        holder.communicate()
