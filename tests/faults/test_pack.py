"""aot pack when it is killed, fails at any call, runs out of disk, or runs several times at once: repeated, it ends."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import golden_bundles
import pytest

from pretuned.aot.pack.package import Item, Package, write_directory, write_image
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle

pytestmark = pytest.mark.slow

PACK = """
import sys
from pathlib import Path
from pretuned.aot.pack.package import write_image
from pretuned.aot.pack.package import Item, Package, write_directory
from pretuned.artifacts.errors import PretunedError
from pretuned.artifacts.bundle_file import open_bundle
kind, out, version, bundle = sys.argv[1:]
with open_bundle(bundle) as file:
    packed = Package("acme", version, (Item(Path(bundle).name, Path(bundle).read_bytes(), file.load()),))
Path("/dev/null").write_bytes(b"begin")
try:
    if kind == "oci":
        write_image(Path(out), packed, "amd64", print)
    else:
        write_directory(Path(out), packed, print)
except PretunedError as error:
    print(error)
    sys.exit(1)
"""
TRACED = "trace=openat,mkdir,write,fchmod,fsync,rename,flock,close,getdents64,umask"
ERRORS = {
    "openat": ["EACCES", "ENOSPC", "EMFILE"],
    "mkdir": ["ENOSPC", "EROFS"],
    "write": ["ENOSPC", "EIO"],
    "fsync": ["EIO", "ENOSPC"],
    "rename": ["ENOSPC", "EACCES"],
    "flock": ["ENOLCK", "EIO"],
    "getdents64": ["EIO"],
}


@pytest.fixture
def bundle(tmp_path) -> Path:
    path = tmp_path / "small-sm90.msgpack"
    path.write_bytes(codec.encode(golden_bundles.medium(seed=0)))
    return path


@pytest.fixture
def traced(request, tmp_path, bundle) -> Callable[..., tuple[int, str, list[str]]]:
    """Packs under strace; gives the exit status, the output, and the whole trace."""
    if shutil.which("strace") is None:
        if request.config.getoption("--without-namespaces"):
            pytest.skip("needs strace")
        pytest.fail("these tests make system calls fail: install strace, or run with --without-namespaces")

    def run(kind: str, out: Path, *options: str) -> tuple[int, str, list[str]]:
        log = tmp_path / "strace"
        kills = any("signal=" in option for option in options)  # which a filter in the kernel would pass over
        strace = ["strace", *([] if kills else ["--seccomp-bpf"]), "-f", "-y", "-o", log, "-e", TRACED, *options]
        done = subprocess.run(
            [*strace, sys.executable, "-c", PACK, kind, out, "1.0", bundle], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()

    return run


def pack_here(kind: str, out: Path, bundle: Path) -> None:
    """PACK in this process: it starts no interpreter."""
    with open_bundle(bundle) as file:
        packed = Package("acme", "1.0", (Item(bundle.name, bundle.read_bytes(), file.load()),))
    if kind == "oci":
        write_image(out, packed, "amd64", print)
    else:
        write_directory(out, packed, print)


def points(lines: list[str], out: Path) -> list[tuple[str, int]]:
    """(call, its number among all calls of that name) for each call that touches ``out``."""
    begin = max(i for i, line in enumerate(lines) if '"begin"' in line)
    seen: dict[str, int] = {}
    results = []
    for i, line in enumerate(lines):
        if (match := re.match(r"\d+\s+(\w+)\(", line)) is None:
            continue
        seen[match[1]] = seen.get(match[1], 0) + 1
        if i > begin and str(out) in line:
            results.append((match[1], seen[match[1]]))
    return results


def check_oci(layout: Path, tags: tuple[str, ...] = ("1.0",)) -> None:
    """Every tag is there, and every blob that a tag leads to has its digest and size."""
    assert json.loads((layout / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((layout / "index.json").read_bytes())
    named = [manifest["annotations"]["org.opencontainers.image.ref.name"] for manifest in index["manifests"]]
    assert sorted(named) == sorted(tags)

    def read(descriptor: dict[str, object]) -> bytes:
        data = (layout / "blobs" / "sha256" / str(descriptor["digest"]).removeprefix("sha256:")).read_bytes()
        assert (len(data), f"sha256:{hashlib.sha256(data).hexdigest()}") == (descriptor["size"], descriptor["digest"])
        return data

    for entry in index["manifests"]:
        manifest = json.loads(read(entry))
        for blob in (manifest["config"], *manifest["layers"]):
            read(blob)


def check_dir(folder: Path) -> None:
    """The bundle can be opened, and nothing else is there but a lock."""
    assert sorted(path.name for path in folder.iterdir() if path.name != ".pretuned.lock") == ["small-sm90.msgpack"]
    with open_bundle(folder / "small-sm90.msgpack") as file:
        assert file.load() == golden_bundles.medium(seed=0)
    assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("nth", [7, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("kind", "check"), [("oci", check_oci), ("dir", check_dir)])
def test_a_first_pack_killed_or_failing_at_any_call_is_completed_by_the_next(
    traced, tmp_path, bundle, kind, check, nth
):
    def out(name: str) -> Path:
        return tmp_path / name / "made" / "here"

    whole = out("whole")
    status, said, lines = traced(kind, whole)
    assert status == 0, said
    check(whole)
    steps = points(lines, whole)
    assert {name for name, _ in steps} >= {"openat", "mkdir", "write", "fsync", "rename", "flock"}
    faults = [
        (name, when, how)
        for name, when in steps
        for how in ("signal=SIGKILL", *(f"error={error}" for error in ERRORS.get(name, ())))
    ]
    ended = 0
    for number, (name, when, how) in enumerate(faults[::nth]):
        here = out(str(number))
        status, said, _ = traced(kind, here, "-e", f"inject={name}:{how}:when={when}")
        point = f"{name} {when} {how}: {said}"
        assert "Traceback" not in said, point
        assert status in (0, 1) if "error" in how else status, point
        ended += status != 0
        try:
            pack_here(kind, here, bundle)
            check(here)
        except Exception as error:
            raise AssertionError(f"after {point}") from error
        temps = [*here.rglob("*.tmp")]
        assert not temps, f"after {point}: {temps}"
        shutil.rmtree(tmp_path / str(number))
    assert ended > len(faults[::nth]) // 3


@pytest.mark.parametrize("error", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
@pytest.mark.parametrize(("kind", "check"), [("oci", check_oci), ("dir", check_dir)])
def test_a_file_system_without_locks(traced, tmp_path, kind, check, error):
    status, said, _ = traced(kind, tmp_path / "out", "-e", f"inject=flock:error={error}")
    assert status == 0, said
    assert f"'{tmp_path / 'out'}'" in said, "it says that there are no locks"
    check(tmp_path / "out")


@pytest.mark.parametrize("size_kib", [4, 8, 12, 16, 20, 24])
def test_a_disk_that_is_full_and_then_is_not(request, tmp_path, bundle, size_kib):
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        if request.config.getoption("--without-namespaces"):
            pytest.skip("needs namespaces")
        pytest.fail("this test mounts a small disk: allow user namespaces, or run with --without-namespaces")
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "code.py").write_text(PACK)
    run = f"{sys.executable} {tmp_path}/code.py oci {disk}/image 1.0 {bundle}"
    script = f"""
        mount -t tmpfs -o size={size_kib}k none {disk}
        {run} || echo exit $?
        mount -o remount,size=4m {disk}
        {run} && cp -a {disk}/image {tmp_path}/copy
    """
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=True)
    assert "No space left on device" in done.stdout, done
    assert "exit 1" in done.stdout
    assert "Traceback" not in done.stderr
    check_oci(tmp_path / "copy")


@pytest.mark.parametrize("packs", [8, pytest.param(16, marks=pytest.mark.nightly)])
def test_several_at_once_keep_all_tags(tmp_path, bundle, packs):
    tags = [f"1.{number}" for number in range(packs)]
    layout = tmp_path / "image"
    waiting = list(tags)
    while waiting:
        four, waiting = waiting[:4], waiting[4:]
        running = [
            subprocess.Popen([sys.executable, "-c", PACK, "oci", layout, tag, bundle], stdout=subprocess.PIPE)
            for tag in four
        ]
        for process in running:
            said = process.communicate()[0]
            assert process.returncode == 0, said
    check_oci(layout, tuple(tags))


def test_a_new_layout_under_umask_000_can_be_written_by_nobody_else(tmp_path, bundle):
    old = os.umask(0)
    try:
        subprocess.run([sys.executable, "-c", PACK, "oci", tmp_path / "some" / "image", "1.0", bundle], check=True)
    finally:
        os.umask(old)
    paths = [tmp_path / "some", *(tmp_path / "some").rglob("*")]
    assert not [path for path in paths if path.stat().st_mode & 0o002]
