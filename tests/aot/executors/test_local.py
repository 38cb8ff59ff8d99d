"""A worker process that begins before what it measures is known."""

from __future__ import annotations

import time
from pathlib import Path

import faketimer
import pytest
from emulated_driver import EmulatedGpu, emulated

from pretuned.aot.executors.local import LocalExecutor, begun
from pretuned.aot.measure.job import Setup
from pretuned.aot.process.child import scratch_folder

WAIT_S = 60


def test_the_process_that_has_begun_is_the_one_that_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOKEN", str(tmp_path / "woken"))
    with scratch_folder() as scratch:
        executor = LocalExecutor(Setup("", b"", 3), scratch, greet=faketimer.introduced)
        try:
            executor.begin(faketimer.wake)
            executor.measures("candidates.msgpack", b"\x05")
            pid, *setup = executor.start().result(WAIT_S).notes
            assert (tmp_path / "woken").read_text() == f"{pid} 3"
            assert setup == ["candidates.msgpack", "05", "3"]
            again, *_ = executor.start().result(WAIT_S).notes  # as after a kernel that hangs: another process
            assert again != pid
        finally:
            executor.shutdown()


def test_what_goes_wrong_while_it_wakes_is_for_its_start_to_meet() -> None:
    with scratch_folder() as scratch:
        executor = LocalExecutor(Setup("", b"", 0), scratch, greet=faketimer.introduced)
        try:
            executor.begin(faketimer.wake_badly)
            executor.measures("a", b"")
            assert executor.start().result(WAIT_S).notes[1] == "a"
        finally:
            executor.shutdown()


@pytest.mark.slow
def test_one_that_died_when_it_was_awake_is_another_one_at_its_start() -> None:
    with scratch_folder() as scratch:
        executor = LocalExecutor(Setup("", b"", 0), scratch, greet=faketimer.introduced)
        try:
            executor.begin(faketimer.wake_and_die)
            until = time.monotonic() + WAIT_S
            while executor._pool.active:
                assert time.monotonic() < until
                time.sleep(0.05)
            executor.measures("a", b"")
            assert executor.start().result(WAIT_S).notes[1] == "a"
        finally:
            executor.shutdown()


@pytest.mark.parametrize(("count", "device"), [(0, 0), (2, 2), (2, -1)])
def test_without_such_a_gpu_nothing_begins(count: int, device: int) -> None:
    with emulated(EmulatedGpu(count=count)), begun(device) as executor:
        assert executor is None
