"""File systems whose flock fails: what needs no lock goes on, the rest says so at once, and nothing waits for ever."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# By day one of a kind: tests/artifacts/test_locking.py tries each error on a lock.
NONE_THERE = ("ENOSYS", *(pytest.param(error, marks=pytest.mark.nightly) for error in ("EOPNOTSUPP", "ENOLCK")))
BROKEN = ("EIO", pytest.param("ESTALE", marks=pytest.mark.nightly))
# Everything that takes a lock, in one process: a line each, "ok ..." or "error ...".
ALL = """
import sys
from pathlib import Path
import fakemeasure
from golden_bundles import medium
from small_bundles import ON_A100, ON_H200, SPECS, variant
from pretuned.aot.demand import tuner
from pretuned.aot.journal.file import Header, open_journal
from pretuned.aot.models.layer import LayerShard
from pretuned.aot.plan.plan import plan
from pretuned.aot.process.output import held
from pretuned.aot.process.child import scratch_folder
from pretuned.artifacts.errors import PretunedError
from pretuned.artifacts.locking import lock, reading
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.codec import encode
from pretuned.artifacts.records import DType
from pretuned.artifacts.records import Op
from pretuned.runtime import self_test_results

here = Path(sys.argv[1])
PLAN = plan([LayerShard("E8", 8, 2, 256, 128, 0, True, (DType.BF16,), 1, 1, (64, 64), tuple(Op))])
Path("/dev/null").write_bytes(b"begin")


def says(name, call):
    try:
        print("ok", name, call())
    except PretunedError as error:
        print("error", name, error)


def a_lock(required):
    with lock(here / "lock", 0, required=required) as got:
        return got


def a_reader():
    with reading(here / "lock", 0.2):
        return


def output():
    notes = []
    with held(here / "out", notes.append):
        return notes


def journal():
    notes = []
    with open_journal(here / "tuning.journal", Header(90, ON_H200.gpu, ()), notes.append):
        return notes


def self_test():
    self_test_results.note(variant(SPECS[0], b"one"), ON_A100, self_test_results.result_of_today(True))
    return len(list(Path(self_test_results.path_of(ON_A100)).parent.glob("*.results")))


def tuned():
    return tuner.add(here / "overlay", ON_H200.gpu, fakemeasure.bundle(PLAN)).exists()


def scratch():
    with scratch_folder() as folder:
        return folder.is_dir()


def turn():
    with tuner._turn() as mine:
        return mine


says("lock", lambda: a_lock(False))
says("required", lambda: a_lock(True))
says("reading", a_reader)
says("output", output)
says("journal", journal)
says("self-test", self_test)
says("tuned", tuned)
says("scratch", scratch)
says("turn", turn)
says("publish", lambda: publish(here / "b.msgpack", encode(medium(seed=0))))
"""
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def injected(request, tmp_path):
    """Runs a command whose every flock fails with this error; gives its status, its output and how often one failed."""
    if shutil.which("strace") is None:
        if request.config.getoption("--without-namespaces"):
            pytest.skip("needs strace")
        pytest.fail("these tests make system calls fail: install strace, or run with --without-namespaces")

    def run(error: str, *command: object) -> tuple[int, str, int]:
        log = tmp_path / "strace"
        inject = ("--seccomp-bpf", "-f", "-o", log, "-e", "trace=flock", "-e", f"inject=flock:error={error}")
        temp = tmp_path / "tmp"
        temp.mkdir(exist_ok=True)
        environment = {
            "HOME": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PYTHONPATH": str(SUPPORT),
            "TMPDIR": str(temp),
        }
        done = subprocess.run(
            ["strace", *map(str, inject), *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | environment,
        )
        return done.returncode, done.stdout, log.read_text().count("(INJECTED)")

    return run


@pytest.mark.slow
@pytest.mark.parametrize("error", NONE_THERE)
def test_where_there_are_no_locks_everything_goes_on_and_writers_say_so(error, injected, tmp_path):
    status, said, failed = injected(error, sys.executable, "-c", ALL, tmp_path)
    lines = dict(line.split(maxsplit=2)[1:] for line in said.splitlines() if line.startswith("ok "))
    assert status == 0, said
    assert failed >= 9
    note = "the file system of '{}' has no locks: don't let two processes write it at once"
    assert lines == {
        "lock": "False",
        "required": "False",
        "reading": "None",
        "output": str([note.format(tmp_path / "out")]),
        "journal": str([note.format(tmp_path / "tuning.journal")]),
        "self-test": "1",
        "tuned": "True",
        "scratch": "True",
        "turn": "False",
        "publish": "True",
    }, said


@pytest.mark.slow
@pytest.mark.parametrize("error", BROKEN)
def test_where_locks_are_broken_writers_say_so_at_once(error, injected, tmp_path):
    status, said, _ = injected(error, sys.executable, "-c", ALL, tmp_path)
    assert status == 0, said
    lines = {line.split()[1]: line for line in said.splitlines() if line.startswith(("ok ", "error "))}
    why = os.strerror(getattr(errno, error))
    for name, file in (
        ("required", "lock/.pretuned.lock"),
        ("output", "out/.pretuned.lock"),
        ("journal", "tuning.journal.lock"),
        ("tuned", "overlay/.pretuned.lock"),
        ("scratch", "tmp/pretuned-build-"),
    ):
        assert lines[name].startswith(f"error {name} can't lock '{tmp_path}/{file}"), said
        assert why in lines[name]
    assert lines["lock"] == "ok lock False"
    assert lines["reading"] == "ok reading None"
    assert lines["self-test"] == "ok self-test 0"  # it is not remembered
    assert lines["turn"] == "ok turn False"
    assert lines["publish"] == "ok publish True"
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ENOSYS", "EIO"])
def test_a_build(error, injected, tmp_path):
    command = ["build", "--models", "shape:E=8,H=512,I=256,k=2 tokens=64..64", "--sm", "90"]
    status, said, failed = injected(error, sys.executable, "-m", "pretuned.aot", *command, "--out", tmp_path / "out")
    assert failed
    if error == "EIO":
        assert (status, said.count("\n")) == (1, 1), said
        assert said.startswith(f"error: can't lock '{tmp_path}/out/.pretuned.lock': Input/output error")
    else:
        assert status == 0, said
        assert "has no locks: don't let two processes write it at once" in said
        assert (tmp_path / "out" / "pretuned-sm90.msgpack").exists()
