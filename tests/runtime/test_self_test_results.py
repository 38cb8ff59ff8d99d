"""Results of self-tests: for which code, GPU and driver they are kept, and how a file holds them."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from processes import copy_of
from small_bundles import ON_A100, ON_L40S, SPECS, variant

from pretuned.artifacts.locking import lock
from pretuned.artifacts.publishing import read_checked, write_checked
from pretuned.artifacts.records import LocalGpu
from pretuned.runtime import reload, self_test_results
from pretuned.runtime.self_test_results import is_wrong, note, path_of, recorded, result_of_today

ONE, OTHER = variant(SPECS[0], b"one"), variant(SPECS[0], b"other")
RIGHT, WRONG = result_of_today(True), result_of_today(False, "y[0, 0] is 1, wanted 2")


def anew() -> Any:
    """The module as the next process has it: a second copy, which knows nothing yet."""
    return copy_of(self_test_results)


@pytest.fixture
def overlay(clean_places: Path, tmp_path: Path) -> Path:
    return tmp_path / ".cache" / "pretuned"


def test_the_next_process_knows_it(overlay: Path) -> None:
    assert recorded(ONE, ON_A100) is None
    note(ONE, ON_A100, RIGHT)
    note(OTHER, ON_A100, WRONG)
    process = anew()
    assert not process.is_wrong(OTHER, ON_A100)  # nobody has asked yet: no file was read
    assert process.recorded(ONE, ON_A100) == RIGHT
    assert process.recorded(OTHER, ON_A100) == WRONG
    assert process.is_wrong(OTHER, ON_A100)
    assert not process.is_wrong(ONE, ON_A100)
    assert len(process.left_out(ON_A100)) == 1
    (file,) = overlay.glob("*.results")
    assert file == path_of(ON_A100)
    assert file.name == "self-test-sm80-nvidia-a100-sxm4-80gb-108-12080.results"


def test_under_umask_000_it_is_remembered_too(overlay: Path) -> None:
    """No directory that is made for it is everybody's to write: nothing would be read from there."""
    old = os.umask(0)
    try:
        note(ONE, ON_A100, WRONG)
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in (overlay, overlay.parent)} == {0o755}
    process = anew()
    assert process.recorded(ONE, ON_A100) == WRONG


@pytest.mark.parametrize(
    "elsewhere",
    [
        ON_L40S,
        LocalGpu(80, ON_A100.gpu._replace(driver=13000)),
        LocalGpu(80, ON_A100.gpu._replace(name="NVIDIA A100-PCIE-40GB")),
        LocalGpu(86, ON_A100.gpu),
    ],
)
def test_it_holds_for_one_kind_of_gpu_and_one_driver(overlay: Path, elsewhere: LocalGpu) -> None:
    note(ONE, ON_A100, RIGHT)
    assert recorded(ONE, elsewhere) is None
    note(ONE, elsewhere, WRONG)
    assert recorded(ONE, ON_A100) == RIGHT
    assert len(list(overlay.glob("*.results"))) == 2


def test_it_holds_for_one_cubin_in_one_record(overlay: Path) -> None:
    """A right cubin under another record, with other arguments say, is other code."""
    note(ONE, ON_A100, RIGHT)
    assert recorded(OTHER, ON_A100) is None
    assert recorded(ONE._replace(shared_bytes=ONE.shared_bytes + 16), ON_A100) is None


def test_wrong_once_is_wrong_for_good(overlay: Path) -> None:
    note(ONE, ON_A100, WRONG)
    note(ONE, ON_A100, RIGHT)
    assert recorded(ONE, ON_A100) == WRONG
    process = anew()
    process.note(ONE, ON_A100, RIGHT)  # by a process that has not read the file
    process = anew()
    assert process.recorded(ONE, ON_A100) == WRONG


def test_what_a_process_could_not_test_is_no_other_processs_business(overlay: Path) -> None:
    self_test_results.leave_out(ONE, ON_A100)
    assert is_wrong(ONE, ON_A100)
    assert recorded(ONE, ON_A100) is None
    note(OTHER, ON_A100, RIGHT)
    process = anew()
    assert process.recorded(OTHER, ON_A100) == RIGHT
    assert not process.is_wrong(ONE, ON_A100)


@pytest.mark.parametrize("damage", ["cut", "a digest", "no JSON", "another GPU's", "odd rows", "everybody's"])
def test_a_file_that_is_no_good_is_as_none(damage: str, overlay: Path) -> None:
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
    process = anew()
    assert process.recorded(ONE, ON_A100) is None
    process.note(ONE, ON_A100, RIGHT)
    process = anew()
    assert process.recorded(ONE, ON_A100) == RIGHT


def test_where_nothing_can_be_written_the_process_knows_it_alone(
    overlay: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overlay.parent.mkdir(parents=True)
    overlay.write_text("no directory")
    with caplog.at_level(logging.INFO, "pretuned.runtime.self_test_results"):
        note(ONE, ON_A100, WRONG)
        note(OTHER, ON_A100, RIGHT)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "results of self-tests are not kept" in caplog.text
    assert is_wrong(ONE, ON_A100)
    assert recorded(OTHER, ON_A100) == RIGHT


def test_without_overlay_writes_nothing_is_written(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETUNED_DISABLE_AUTOTUNE", "1")
    reload()
    note(ONE, ON_A100, WRONG)
    assert is_wrong(ONE, ON_A100)
    assert not overlay.exists()


def test_one_call_a_process_waits_for_the_overlays_lock(overlay: Path) -> None:
    """A preload of many kernels beside a process that was stopped with the lock in its hands. Nothing is lost."""
    with lock(overlay, 1.0):
        began = time.monotonic()
        for number in range(20):
            note(variant(SPECS[0], b"%d" % number), ON_A100, RIGHT)
        assert 2.0 <= time.monotonic() - began < 10.0
    note(OTHER, ON_A100, WRONG)
    process = anew()
    assert process.recorded(OTHER, ON_A100) == WRONG
    assert all(process.recorded(variant(SPECS[0], b"%d" % number), ON_A100) == RIGHT for number in range(20))


def _notes(first: int, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    for number in range(first, first + 20):
        note(variant(SPECS[0], b"%d" % number), ON_A100, RIGHT if number % 3 else WRONG)


def test_processes_that_write_at_once_lose_nothing(overlay: Path) -> None:
    """Two that prove the same and two others' code, beside each other."""
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(3)
    children = [fork.Process(target=_notes, args=(first, barrier)) for first in (0, 0, 10)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    process = anew()
    for number in range(30):
        assert process.recorded(variant(SPECS[0], b"%d" % number), ON_A100) == (RIGHT if number % 3 else WRONG), number
    assert len(list(overlay.glob("*.results"))) == 1


def test_of_very_many_the_wrong_ones_stay(overlay: Path) -> None:
    variants = [variant(SPECS[0], b"%d" % number) for number in range(5)]
    note(variants[1], ON_A100, WRONG)
    path = path_of(ON_A100)
    assert path is not None
    head, rows = json.loads(read_checked(path) or b"")
    rows += [[f"{number:064x}", True, "2026-01-04", ""] for number in range(4093)]
    write_checked(path, json.dumps([head, rows]).encode())
    self_test_results.forget()
    for number in (0, 2, 3, 4):
        note(variants[number], ON_A100, RIGHT._replace(day=f"2026-01-0{2 * number + 1}"))
    process = anew()
    results = [process.recorded(variant, ON_A100) for variant in variants]
    assert [result is not None for result in results] == [False, True, True, True, True]


def test_without_a_place_for_a_file_the_process_knows_it_alone(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    reload()
    assert path_of(ON_A100) is None
    note(ONE, ON_A100, WRONG)
    assert recorded(ONE, ON_A100) == WRONG
    assert recorded(OTHER, ON_A100) is None
