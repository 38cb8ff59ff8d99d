from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import misbehaving
import pytest

from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.compile.pool import CompileJob, CompileResult, compile_all
from pretuned.aot.process.child import scratch_folder
from pretuned.artifacts.errors import HostError
from pretuned.artifacts.records import DType, Op
from pretuned.kernels.spec import Config, Spec

pytestmark = pytest.mark.slow


def job(stages: int, sm: int = 80) -> CompileJob:
    return CompileJob(Spec(Op.FORWARD, DType.BF16, Config(16, 32, 64, 4, stages)), sm)


GOOD, ODD, LAST = job(2), job(5), job(3)


@pytest.fixture
def scratch_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the run's temporary files go; empty again afterwards."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_an_aborting_worker_is_one_failed_result(compiled_dir: Path, scratch_place: Path) -> None:
    heard: list[CompileResult] = []
    cache = CompileCache(compiled_dir)
    results = compile_all(
        [GOOD, ODD, LAST], workers=1, cache=cache, on_result=heard.append, compile_one=misbehaving.aborts
    )
    assert [result.job for result in results] == [GOOD, ODD, LAST]
    assert [result.compiled is not None for result in results] == [True, False, True]
    assert "sm_80: the compiler's process died (SIGABRT)" in results[1].reason
    assert sorted(map(id, heard)) == sorted(map(id, results))
    assert not list(scratch_place.iterdir())


def test_an_unsupported_capability_that_aborts_llvm(scratch_place: Path) -> None:
    (result,) = compile_all([job(2, sm=101)], workers=1)
    assert result.compiled is None
    assert "the compiler's process died" in result.reason or "sm_101" in result.reason
    assert not list(scratch_place.iterdir())


def test_a_hanging_compiler_is_killed_with_its_child(
    tmp_path: Path, compiled_dir: Path, scratch_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETUNED_TEST_PID", str(tmp_path / "pid"))
    compile_all([GOOD], workers=1, cache=CompileCache(compiled_dir))
    results = compile_all(
        [ODD, GOOD], workers=1, cache=CompileCache(compiled_dir), timeout_s=3.0, compile_one=misbehaving.hangs
    )
    assert results[0].compiled is None
    assert results[0].reason.endswith("sm_80: the compiler did not end within 3 s")
    assert results[1].compiled is not None
    child = int((tmp_path / "pid").read_text())
    assert _gone(child)
    assert not list(scratch_place.iterdir())


def test_a_compiler_that_refuses_gives_its_reason(compiled_dir: Path) -> None:
    results = compile_all([GOOD, ODD], cache=CompileCache(compiled_dir), compile_one=misbehaving.refuses)
    assert [bool(result.compiled) for result in results] == [True, False]
    assert results[1].reason == "forward bf16 16x32x64 w4 s5 g8 persistent for sm_80: no such instruction"


def test_a_full_disk_is_the_machines_fault(scratch_place: Path) -> None:
    with pytest.raises(HostError, match=re.escape("No space left on device: '/tmp/variant.ptx'")):
        compile_all([GOOD], workers=1, compile_one=misbehaving.disk_is_full)
    assert not list(scratch_place.iterdir())


def test_a_cached_variant_is_the_compiled_one(compiled_dir: Path) -> None:
    cache = CompileCache(compiled_dir)
    (first,) = compile_all([GOOD], workers=1, cache=cache)
    (second,) = compile_all([GOOD], cache=cache, compile_one=misbehaving.must_not_run)
    assert second.cached
    assert second.compiled == first.compiled


def test_a_damaged_entry_is_compiled_again(tmp_path: Path, compiled_dir: Path) -> None:
    (whole,) = compile_all([GOOD], workers=1, cache=CompileCache(compiled_dir))
    assert whole.compiled
    cache = CompileCache(tmp_path)
    cache.put(GOOD.spec, GOOD.sm, whole.compiled)
    (entry,) = tmp_path.glob("??/*.bin")
    assert cache.has(GOOD.spec, GOOD.sm)
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(data)
    assert cache.get(GOOD.spec, GOOD.sm) is None
    (again,) = compile_all([GOOD], workers=1, cache=cache)
    assert (again.compiled, again.cached) == (whole.compiled, False)
    assert cache.get(GOOD.spec, GOOD.sm) == whole.compiled


def test_an_entry_that_others_can_write_is_not_used(tmp_path: Path, compiled_dir: Path) -> None:
    (whole,) = compile_all([GOOD], workers=1, cache=CompileCache(compiled_dir))
    assert whole.compiled
    cache = CompileCache(tmp_path)
    cache.put(GOOD.spec, GOOD.sm, whole.compiled)
    (entry,) = tmp_path.glob("??/*.bin")
    entry.chmod(0o666)
    assert cache.get(GOOD.spec, GOOD.sm) is None


def test_a_cache_that_cannot_be_written_costs_nothing_else(tmp_path: Path, compiled_dir: Path) -> None:
    (whole,) = compile_all([GOOD], workers=1, cache=CompileCache(compiled_dir))
    assert whole.compiled
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file" / "compiled")
    cache.put(GOOD.spec, GOOD.sm, whole.compiled)
    assert "can't be written" in cache.trouble
    assert cache.get(GOOD.spec, GOOD.sm) is None


def test_the_scratch_of_a_killed_run_is_swept_and_that_of_a_living_one_stays(scratch_place: Path) -> None:
    stale = scratch_place / "pretuned-build-stale"
    (stale / "pretuned-x").mkdir(parents=True)
    with scratch_folder() as mine:
        assert not stale.exists()
        with scratch_folder() as other:
            assert mine.is_dir()
            assert other != mine
    assert not list(scratch_place.iterdir())


def test_runs_that_begin_at_once_never_sweep_each_other(scratch_place: Path) -> None:
    def run(number: int) -> bool:
        with scratch_folder() as mine:
            (mine / "file").write_text("")
            return (mine / "file").exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(400)))
    assert not list(scratch_place.iterdir())


def _gone(pid: int) -> bool:
    """Return True if a process has ended; a process that nobody has waited for counts as ended."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    os.kill(pid, 9)
    return False


@pytest.mark.parametrize("when", ["mkdir", "open", "flock"])
def test_an_interrupt_while_the_folder_is_made_leaves_none(
    when: str, monkeypatch: pytest.MonkeyPatch, scratch_place: Path
) -> None:
    owner = {"mkdir": Path, "open": os, "flock": fcntl}[when]
    done = getattr(owner, when)

    def interrupted(*args: Any, **how: Any) -> None:
        done(*args, **how)
        monkeypatch.undo()
        raise KeyboardInterrupt  # as a signal's handler would, right after it

    monkeypatch.setattr(owner, when, interrupted)
    with pytest.raises(KeyboardInterrupt), scratch_folder():
        pytest.fail("it went on")
    assert not list(scratch_place.iterdir())


def test_a_folder_that_another_run_took_for_stale_is_made_again_by_another_name(
    monkeypatch: pytest.MonkeyPatch, scratch_place: Path
) -> None:
    """Whoever took it may still be about to remove what has its name."""
    lock, seen = fcntl.flock, []

    def removed(fd: int, how: int) -> None:
        lock(fd, how)
        if not seen:
            seen.extend(scratch_place.iterdir())
            seen[0].rmdir()

    monkeypatch.setattr(fcntl, "flock", removed)
    with scratch_folder() as folder:
        assert [folder] == list(scratch_place.iterdir()) != seen
    assert not list(scratch_place.iterdir())
