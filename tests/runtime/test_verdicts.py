"""What is remembered of code that was proven: for which code, GPU and driver, and what becomes of it in a file."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from made import ON_A100, ON_L40S, SPECS, variant

from pretuned.artifacts.files.lock import lock
from pretuned.artifacts.records.target import LocalGpu
from pretuned.runtime import verdicts
from pretuned.runtime.settings import Settings
from pretuned.runtime.verdicts import is_wrong, known, left_out, note, path_of, verdict

ONE, OTHER = variant(SPECS[0], b"one"), variant(SPECS[0], b"other")
RIGHT, WRONG = verdict(True), verdict(False, "y[0, 0] is 1, wanted 2")


def anew(patch: pytest.MonkeyPatch) -> None:
    """As in another process."""
    patch.setattr(verdicts, "_memory", verdicts._Memory())


@pytest.fixture
def overlay(clean_places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    anew(monkeypatch)
    return tmp_path / ".cache" / "pretuned"


def test_the_next_process_knows_it(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known(ONE, ON_A100) is None
    note(ONE, ON_A100, RIGHT)
    note(OTHER, ON_A100, WRONG)
    anew(monkeypatch)
    assert not is_wrong(OTHER, ON_A100)  # nobody has asked yet: no file was read
    assert known(ONE, ON_A100) == RIGHT
    assert known(OTHER, ON_A100) == WRONG
    assert is_wrong(OTHER, ON_A100)
    assert not is_wrong(ONE, ON_A100)
    assert len(left_out(ON_A100)) == 1
    (file,) = overlay.glob("*.results")
    assert file == path_of(ON_A100)
    assert file.name == "self-test-sm80-nvidia-a100-sxm4-80gb-108-12080.results"


def test_under_umask_000_it_is_remembered_too(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory that is made for it is everybody's to write: nothing would be read from there."""
    old = os.umask(0)
    try:
        note(ONE, ON_A100, WRONG)
    finally:
        os.umask(old)
    assert {one.stat().st_mode & 0o777 for one in (overlay, overlay.parent)} == {0o755}
    anew(monkeypatch)
    assert known(ONE, ON_A100) == WRONG


@pytest.mark.parametrize(
    "elsewhere",
    [
        ON_L40S,
        LocalGpu(80, replace(ON_A100.gpu, driver=13000)),
        LocalGpu(80, replace(ON_A100.gpu, name="NVIDIA A100-PCIE-40GB")),
        LocalGpu(86, ON_A100.gpu),
    ],
)
def test_it_holds_for_one_kind_of_gpu_and_one_driver(overlay: Path, elsewhere: LocalGpu) -> None:
    note(ONE, ON_A100, RIGHT)
    assert known(ONE, elsewhere) is None
    note(ONE, elsewhere, WRONG)
    assert known(ONE, ON_A100) == RIGHT
    assert len(list(overlay.glob("*.results"))) == 2


def test_it_holds_for_one_cubin_in_one_record(overlay: Path) -> None:
    """A right cubin under another record, with other arguments say, is other code."""
    note(ONE, ON_A100, RIGHT)
    assert known(OTHER, ON_A100) is None
    assert known(replace(ONE, shared_bytes=ONE.shared_bytes + 16), ON_A100) is None


def test_wrong_once_is_wrong_for_good(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(ONE, ON_A100, WRONG)
    note(ONE, ON_A100, RIGHT)
    assert known(ONE, ON_A100) == WRONG
    anew(monkeypatch)
    note(ONE, ON_A100, RIGHT)  # by a process that has not read the file
    anew(monkeypatch)
    assert known(ONE, ON_A100) == WRONG


@pytest.mark.parametrize(
    ("why", "stays"),
    [
        ("y[0, 2] is 1.5, wanted 1 (3 of 96 elements are wrong)", True),
        ("where the rows go is noted wrongly", True),
        ("of 100 slots order, places are wrong", True),
        ("silu: rows of no expert were stored", True),
        ("it did not end within 60 s", True),
        ("what was launched did not end within 30 s", True),
        ("rows_tma forward bf16 w=nk block_m=64 stages=3: CUDA error: an illegal memory access was encountered", True),
        ("bundle '/b/a.msgpack': another file took its place while it was being proven", False),
        ("can't read '/b/a.msgpack': No such file or directory", False),
        ("the process that ran it ended by SIGKILL", False),
        ("the process that ran it ended with exit code 1: it said nothing", False),
        ("cuLaunchKernelEx(rows): CUDA error 701, too many resources requested for launch", False),
    ],
)
def test_of_what_an_older_version_took_for_wrong_only_results_stay(
    why: str, stays: bool, overlay: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "_FORM", 1)
    note(ONE, ON_A100, verdict(False, why))
    note(OTHER, ON_A100, RIGHT)
    monkeypatch.setattr(verdicts, "_FORM", 2)
    anew(monkeypatch)
    assert (known(ONE, ON_A100) is not None) == stays
    assert known(OTHER, ON_A100) == RIGHT
    note(OTHER, ON_A100, RIGHT)  # what it writes is of the new form
    anew(monkeypatch)
    assert (known(ONE, ON_A100) is not None) == stays


def test_what_a_process_could_not_test_is_no_other_processs_business(
    overlay: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts.leave_out(ONE, ON_A100)
    assert is_wrong(ONE, ON_A100)
    assert known(ONE, ON_A100) is None
    note(OTHER, ON_A100, RIGHT)
    anew(monkeypatch)
    assert known(OTHER, ON_A100) == RIGHT
    assert not is_wrong(ONE, ON_A100)


@pytest.mark.parametrize("damage", ["cut", "a digest", "no JSON", "another GPU's", "odd rows", "everybody's"])
def test_a_file_that_is_no_good_is_as_none(damage: str, overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pretuned.artifacts.files.blob import write_checked

    note(ONE, ON_A100, RIGHT)
    path = path_of(ON_A100)
    assert path is not None
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[:-3])
    elif damage == "a digest":
        path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    elif damage == "no JSON":
        write_checked(path, b"{")
    elif damage == "another GPU's":
        write_checked(path, data[48:].replace(b"A100", b"H100"))
    elif damage == "odd rows":
        write_checked(path, data[48:].replace(b"true", b"1"))
    else:
        path.chmod(0o666)
    anew(monkeypatch)
    assert known(ONE, ON_A100) is None
    note(ONE, ON_A100, RIGHT)
    anew(monkeypatch)
    assert known(ONE, ON_A100) == RIGHT


def test_where_nothing_can_be_written_the_process_knows_it_alone(
    overlay: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    overlay.parent.mkdir(parents=True)
    overlay.write_text("no directory")
    with caplog.at_level(logging.INFO, "pretuned.runtime.verdicts"):
        note(ONE, ON_A100, WRONG)
        note(OTHER, ON_A100, RIGHT)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "results of self-tests are not kept" in caplog.text
    assert is_wrong(ONE, ON_A100)
    assert known(OTHER, ON_A100) == RIGHT


def test_without_overlay_writes_nothing_is_written(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pretuned.runtime import reload

    monkeypatch.setenv("PRETUNED_DISABLE_AUTOTUNE", "1")
    reload()
    note(ONE, ON_A100, WRONG)
    assert is_wrong(ONE, ON_A100)
    assert not overlay.exists()


def test_one_call_a_process_waits_for_the_overlays_lock(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preload of many kernels beside a process that was stopped with the lock in its hands. Nothing is lost."""
    monkeypatch.setattr(verdicts._memory, "wait_s", 0.5)
    with lock(overlay, 1.0):
        began = time.monotonic()
        for number in range(20):
            note(variant(SPECS[0], b"%d" % number), ON_A100, RIGHT)
        assert 0.5 <= time.monotonic() - began < 5.0
    note(OTHER, ON_A100, WRONG)
    anew(monkeypatch)
    assert known(OTHER, ON_A100) == WRONG
    assert all(known(variant(SPECS[0], b"%d" % number), ON_A100) == RIGHT for number in range(20))


def _notes(first: int, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    for number in range(first, first + 20):
        note(variant(SPECS[0], b"%d" % number), ON_A100, RIGHT if number % 3 else WRONG)


def test_processes_that_write_at_once_lose_nothing(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that prove the same and two others' code, beside each other."""
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(3)
    children = [fork.Process(target=_notes, args=(first, barrier)) for first in (0, 0, 10)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    anew(monkeypatch)
    for number in range(30):
        assert known(variant(SPECS[0], b"%d" % number), ON_A100) == (RIGHT if number % 3 else WRONG), number
    assert len(list(overlay.glob("*.results"))) == 1


def test_of_very_many_the_wrong_ones_stay(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_MOST", 3)
    every = [variant(SPECS[0], b"%d" % number) for number in range(5)]
    for number, one in enumerate(every):
        note(one, ON_A100, WRONG if number == 1 else RIGHT._replace(day=f"2026-01-0{number + 1}"))
    anew(monkeypatch)
    found = [known(one, ON_A100) for one in every]
    assert [one is not None for one in found] == [False, True, False, True, True]


def test_without_a_place_for_a_file_the_process_knows_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    anew(monkeypatch)
    monkeypatch.setattr(verdicts, "settings", Settings)
    assert path_of(ON_A100) is None
    note(ONE, ON_A100, WRONG)
    assert known(ONE, ON_A100) == WRONG
    assert known(OTHER, ON_A100) is None
