"""Which bundles are found, in which order, and what becomes of those that can't be used. Real files throughout."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import signing
from descriptors import open_files
from small_bundles import (
    DRIVER,
    H200,
    ON_A100,
    ON_H100,
    ON_H200,
    ON_L40S,
    OTHER,
    PROBLEM,
    measured,
    modelled,
    places,
    snapshot,
    write,
)

from pretuned.artifacts import bundle_file
from pretuned.artifacts.errors import (
    BundleCorrupt,
    BundleTooNew,
    BundleUnreadable,
    BundleUntrusted,
    DriverTooOld,
    TargetMismatch,
)
from pretuned.artifacts.locking import lock
from pretuned.artifacts.records import DType, Gpu, LocalGpu, Op
from pretuned.runtime import hooks, settings
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.dispatch.decide import Decision, Origin, chosen, decide
from pretuned.runtime.dispatch.places import ENTRY_POINTS, Kind, Place, _entry_points, installed_places
from pretuned.runtime.dispatch.snapshot import Snapshot, take
from pretuned.runtime.settings import Settings

CHOICES = {PROBLEM: [modelled(64, 0)]}


def names(bundle_set: Snapshot, local: LocalGpu = ON_H200, *, installed: bool = False) -> list[str]:
    return [usable.path.name for usable in bundle_set.view(local, installed=installed).usable]


def test_the_order_of_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Settings(bundles=(tmp_path / "z", tmp_path / "one.msgpack"), overlay=tmp_path / "cache")
    write(tmp_path / "one.msgpack", CHOICES, tag="named file")
    write(tmp_path / "z/b.msgpack", CHOICES, tag="second in the directory")
    write(tmp_path / "z/a.msgpack", CHOICES, tag="first in the directory")
    write(tmp_path / "cache/o.msgpack", CHOICES, tag="overlay")
    (tmp_path / "z/notes.txt").write_text("no bundle")
    (tmp_path / "z/.pretuned-0.msgpack").write_text("a publisher at work")
    bundle_set = take(read)
    assert names(bundle_set) == ["a.msgpack", "b.msgpack", "one.msgpack", "o.msgpack"]
    assert [place.kind for place in bundle_set.places] == [Kind.NAMED, Kind.NAMED, Kind.OVERLAY, Kind.SYSTEM]


def test_a_directory_that_is_not_there_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert names(Snapshot([Place(Kind.OVERLAY, tmp_path / "nowhere")])) == []
    assert not caplog.records


def test_one_content_in_two_places_counts_once(tmp_path: Path) -> None:
    write(tmp_path / "a/a.msgpack", CHOICES)
    write(tmp_path / "b/b.msgpack", CHOICES)
    view = snapshot(tmp_path / "a", tmp_path / "b").view(ON_H200, installed=False)
    assert [usable.path.name for usable in view.usable] == ["a.msgpack"]
    assert [skipped.reason for skipped in view.skipped] == [f"the same as {tmp_path / 'a/a.msgpack'}"]


def test_a_whole_copy_takes_the_place_of_one_with_damaged_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The index of both, and so the digest that stands for the content, is the same."""
    path = write(tmp_path / "a/a.msgpack", CHOICES)
    write(tmp_path / "b/b.msgpack", CHOICES)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    bundle_set = snapshot(tmp_path / "a", tmp_path / "b")
    (usable,) = bundle_set.view(ON_H200, installed=False).usable
    with pytest.raises(BundleCorrupt) as error:
        usable.bundle.cubin(usable.bundle.variant_count - 1)
    bundle_set.reject(usable.bundle, error.value)
    assert names(bundle_set) == ["b.msgpack"]
    decision = decide(bundle_set, PROBLEM, 64, ON_H200)
    assert isinstance(decision, Decision)
    assert decision.chosen.usable.path.name == "b.msgpack"
    assert [record.levelno for record in caplog.records if record.levelno > logging.INFO] == [logging.WARNING]
    assert "a.msgpack" in caplog.text


def test_installed_packages_are_asked_only_without_an_exact_choice_measured_here(tmp_path: Path) -> None:
    write(tmp_path / "named/a.msgpack", {PROBLEM: [measured(64, 0, 9)]}, gpus=[H200], tag="named")
    write(tmp_path / "wheel/w.msgpack", {OTHER: [modelled(64, 1)]}, tag="wheel")
    asked: list[int] = []

    def installed() -> list[Place]:
        asked.append(1)
        return [Place(Kind.INSTALLED, tmp_path / "wheel")]

    bundle_set = Snapshot(places(tmp_path / "named"), installed)
    decide(bundle_set, PROBLEM, 64, ON_H200)
    assert not asked
    decision = decide(bundle_set, OTHER, 64, ON_H200)
    assert isinstance(decision, Decision)
    assert decision.chosen.usable.path.name == "w.msgpack"
    assert asked == [1]


def test_the_entry_points_of_this_very_installation() -> None:
    directories = [place.path for place in installed_places()]
    assert any((directory / "__init__.py").is_file() and directory.name == "bundles" for directory in directories)
    assert "pretuned.artifacts.bundles" not in sys.modules


def damaged(tmp_path: Path, how: str) -> Path:
    path = write(tmp_path / "bad.msgpack", CHOICES)
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    elif how == "writable":
        path.chmod(0o666)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a fifo":
        path.unlink()
        os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("cut", BundleCorrupt),
        ("flipped", BundleCorrupt),
        ("empty", BundleCorrupt),
        ("writable", BundleUntrusted),
        ("a fifo", BundleUnreadable),
    ],
)
def test_a_bad_bundle_is_skipped_once_and_raised_when_it_was_named(
    how: str, error: type[Exception], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = damaged(tmp_path / "d", how)
    write(tmp_path / "d/good.msgpack", CHOICES, tag="good")
    bundle_set = snapshot(tmp_path / "d")
    for _ in range(3):
        for installed in (False, True):
            assert names(bundle_set, installed=installed) == ["good.msgpack"]
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert "bad.msgpack" in caplog.text
    (skipped,) = bundle_set.view(ON_H200, installed=False).skipped
    assert isinstance(skipped.error, error)
    with pytest.raises(error):
        decide(snapshot(path), PROBLEM, 64, ON_H200)


def test_a_named_file_that_is_missing_raises(tmp_path: Path) -> None:
    with pytest.raises(BundleUnreadable, match=r"gone\.msgpack"):
        decide(snapshot(tmp_path / "gone.msgpack"), PROBLEM, 64, ON_H200)


def test_a_directory_stays_one_wherever_the_process_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for sm in (80, 90):
        write(Path("d", f"sm{sm}.msgpack"), CHOICES, sm=sm)
    bundle_set = snapshot(Path("d"))
    assert isinstance(decide(bundle_set, PROBLEM, 64, ON_H200), Decision)
    monkeypatch.chdir("/")  # from here it is not there
    assert isinstance(decide(bundle_set, PROBLEM, 4096, ON_H200), Decision)


def test_a_path_that_cannot_be_looked_at_is_reported_as_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BundleUnreadable, match="PRETUNED_BUNDLES names this file"):
        decide(snapshot(tmp_path / ("x" * 300)), PROBLEM, 64, ON_H200)


@pytest.mark.parametrize("local", [ON_A100, ON_L40S, LocalGpu(100, Gpu("NVIDIA B200", 148, 183359, DRIVER))])
def test_another_capability_is_skipped_quietly_and_raised_by_name(
    local: LocalGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "d/sm90.msgpack", CHOICES)
    assert names(snapshot(tmp_path / "d"), local) == []
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    with pytest.raises(TargetMismatch, match=rf"sm_90a.*sm_{local.sm}.*aot build --models models.txt --sm {local.sm}"):
        decide(snapshot(path), PROBLEM, 64, local)


def test_what_is_damaged_when_it_is_first_wanted_stays_out_of_the_snapshot(tmp_path: Path) -> None:
    path = damaged(tmp_path, "flipped")
    bundle_set = snapshot(tmp_path)
    assert names(bundle_set) == []
    whole = write(tmp_path / "whole/bad.msgpack", CHOICES).read_bytes()
    with path.open("r+b") as file:
        file.write(whole)
    assert names(bundle_set, installed=True) == []
    assert names(snapshot(tmp_path)) == ["bad.msgpack"]


def test_a_bundle_that_turns_into_one_for_another_gpu_is_not_used(tmp_path: Path) -> None:
    path = write(tmp_path / "b.msgpack", CHOICES)
    data, other = path.read_bytes(), write(tmp_path / "other/b.msgpack", CHOICES, sm=80).read_bytes()
    path.write_bytes(data[:63] + other[63:127] + data[127:])
    bundle_set = snapshot(tmp_path)
    with path.open("r+b") as file:
        file.write(data)
    (skipped,) = bundle_set.view(ON_A100, installed=False).skipped
    assert "the file was changed after it was opened" in skipped.reason
    assert names(bundle_set, ON_H200) == []


def test_a_named_file_that_is_damaged_is_reported_as_damaged_whatever_it_is_for(tmp_path: Path) -> None:
    path = write(tmp_path / "sm80.msgpack", CHOICES, sm=80)
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    with pytest.raises(BundleCorrupt, match="PRETUNED_BUNDLES names this file"):
        decide(snapshot(path), PROBLEM, 64, ON_H200)


def test_of_another_capabilitys_bundle_only_the_target_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "sm90.msgpack", CHOICES)
    path = write(tmp_path / "sm80.msgpack", CHOICES, sm=80)
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    bundle_set = snapshot(tmp_path)
    assert names(bundle_set) == ["sm90.msgpack"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert names(bundle_set, ON_A100) == []  # there it is wanted, and damaged
    assert "header and index have sha256" in caplog.text
    assert [type(opened.error) for opened in bundle_set.files(installed=False)] == [BundleCorrupt, type(None)]


def test_code_without_a_suffix_runs_on_later_minor_revisions_only(tmp_path: Path) -> None:
    write(tmp_path / "sm89.msgpack", CHOICES, sm=89)
    assert names(snapshot(tmp_path), ON_L40S) == ["sm89.msgpack"]
    assert names(snapshot(tmp_path), ON_A100) == []


def test_the_error_of_an_old_driver_has_both_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "d/new.msgpack", CHOICES, min_driver=13020)
    bundle_set = snapshot(tmp_path / "d")
    for installed in (False, True):
        assert names(bundle_set, ON_H200, installed=installed) == []
    (record,) = caplog.records  # once, however often it is passed over
    assert record.levelno == logging.WARNING
    with pytest.raises(DriverTooOld, match=r"CUDA 13\.2 or later.*CUDA 12\.8"):
        decide(snapshot(path), PROBLEM, 64, ON_H200)
    newer = LocalGpu(90, Gpu("NVIDIA H200", 132, 143771, 13020))
    assert names(snapshot(tmp_path / "d"), newer) == ["new.msgpack"]


def test_the_overlay_is_read_although_another_holds_its_lock(tmp_path: Path) -> None:
    write(tmp_path / "o.msgpack", CHOICES)
    with lock(tmp_path, timeout_s=0) as held:
        assert held
        began = time.monotonic()
        bundle_set = Snapshot([Place(Kind.OVERLAY, tmp_path)])
        waited_s = time.monotonic() - began
    assert names(bundle_set) == ["o.msgpack"]
    assert 0.1 < waited_s < 10


def test_a_snapshot_does_not_change_until_reload(clean_places: Path) -> None:
    before = dispatch_snapshot.snapshot()
    write(clean_places / "new.msgpack", CHOICES)
    assert dispatch_snapshot.snapshot() is before
    assert names(before) == []
    dispatch_snapshot.forget()
    assert names(dispatch_snapshot.snapshot()) == ["new.msgpack"]


def test_the_fingerprint_is_of_bundles_in_order_and_the_gpu(tmp_path: Path) -> None:
    write(tmp_path / "a/a.msgpack", CHOICES, tag="a")
    write(tmp_path / "b/b.msgpack", CHOICES, tag="b")
    a, b = tmp_path / "a", tmp_path / "b"
    fingerprint = snapshot(a, b).fingerprint(ON_H200)
    assert fingerprint == snapshot(a, b).fingerprint(ON_H200)
    others = {
        snapshot(b, a).fingerprint(ON_H200),
        snapshot(a).fingerprint(ON_H200),
        snapshot(a, b).fingerprint(ON_H100),
    }
    assert fingerprint not in others
    assert len(others) == 3
    newer_driver = LocalGpu(90, Gpu("NVIDIA H200", 132, 143771, DRIVER + 10))
    assert snapshot(a, b).fingerprint(newer_driver) == fingerprint


def test_a_newer_format_is_skipped_and_named(tmp_path: Path) -> None:
    path = write(tmp_path / "d/bad.msgpack", CHOICES)
    data = bytearray(path.read_bytes())
    data[11:15] = (9).to_bytes(4, "big")  # the preamble's format number
    path.write_bytes(bytes(data))
    with pytest.raises(BundleTooNew, match="9"):
        decide(snapshot(path), PROBLEM, 64, ON_H200)
    assert names(snapshot(tmp_path / "d")) == []


def test_entry_points_are_those_that_importlib_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packages in folders on sys.path; what can't be read, or is none, is passed over."""
    for name, text in {
        "one-1.0.dist-info": "[console_scripts]\na = b:c\n[pretuned.bundles]\none = one.bundles\n",
        "two-1.0.egg-info": "[pretuned.bundles]\ntwo = two.bundles\n",
        "four-1.0.dist-info": None,
        "three-1.0.dist-info": "[pretuned.bundle]\nx = y\n",
        "five": "[pretuned.bundles]\nfive = five\n",
    }.items():
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "entry_points.txt").write_text(text)
    (tmp_path / "six.egg-info").write_text("a file")
    (tmp_path / "seven-1.0.dist-info/entry_points.txt").mkdir(parents=True)
    (tmp_path / "large-1.0.dist-info").mkdir()
    large = "[a]\n" + f"b = {'c' * 800}:d\n" * 2_000 + "[pretuned.bundles]\nlarge = large.bundles\n"
    (tmp_path / "large-1.0.dist-info/entry_points.txt").write_text(large)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path), str(tmp_path / "gone"), __file__])
    wanted = {(point.name, point.value) for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    assert {("one", "one.bundles"), ("two", "two.bundles"), ("large", "large.bundles")} < wanted
    (tmp_path / "eight-1.0.dist-info").mkdir()
    os.mkfifo(tmp_path / "eight-1.0.dist-info/entry_points.txt")  # importlib waits for a writer
    before = open_files()
    assert {(point.name, point.value) for point in _entry_points()} == wanted
    assert open_files() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = my-bundles", "names no module"),
        ("x =", "names no module"),
        ("x = broken.bundles", "no licence"),
        ("x = leaves.bundles", "x = leaves.bundles can't be found: 7"),
        ("x = generator.bundles", "x = generator.bundles can't be found: GeneratorExit"),
        ("x = mute.bundles", "x = mute.bundles can't be found: Mute"),
        ("x = gone.bundles", "gone"),
        ("x", "can't be read"),
        ("x = \udcff", "can't be read"),
    ],
)
def test_an_entry_point_that_is_wrong_is_passed_over(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, line in {"a-1.0.dist-info": text, "b-1.0.dist-info": "good = whole"}.items():
        (tmp_path / name).mkdir()
        written = f"[{ENTRY_POINTS}]\n{line}\n".encode(errors="surrogateescape")
        (tmp_path / name / "entry_points.txt").write_bytes(written)
    for name, line in {
        "broken": "raise RuntimeError('no licence')",
        "whole": "",
        "leaves": "raise SystemExit(7)",
        "generator": "raise GeneratorExit",
        "mute": "class Mute(Exception):\n    def __str__(self): raise SystemExit(7)\nraise Mute",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    places = installed_places()
    assert tmp_path / "whole" in [place.path for place in places]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert says in record.getMessage()


def test_packages_that_no_scan_should_fall_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    huge = tmp_path / "huge-1.0.dist-info" / "entry_points.txt"
    huge.parent.mkdir()
    huge.touch()
    os.truncate(huge, 1 << 40)
    (tmp_path / "good-1.0.dist-info").mkdir()
    (tmp_path / "good-1.0.dist-info" / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ngood = whole\n")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [os.fsencode(tmp_path), *sys.path, str(tmp_path), "a\0b"])
    assert tmp_path / "whole" in [place.path for place in installed_places()]
    (record,) = caplog.records
    assert "huge-1.0.dist-info can't be read: entry_points.txt is 1099511627776 bytes" in record.getMessage()


def test_entry_points_that_name_a_file_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, line in {"a": "a = single", "b": "b = pretuned_gone", "c": "c = sys"}.items():
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{line}\n")
    (tmp_path / "single.py").touch()
    before = [place.path for place in installed_places()]
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert [place.path for place in installed_places()] == [tmp_path, *before]


@pytest.mark.parametrize(
    "line", ["raise KeyboardInterrupt", "class E(Exception):\n  __str__ = lambda s: stop()\nraise E"]
)
def test_who_stops_the_program_stops_it(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a-1.0.dist-info").mkdir()
    (tmp_path / "a-1.0.dist-info" / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\na = stops.bundles\n")
    (tmp_path / "stops").mkdir()
    stop = "def stop():\n  raise KeyboardInterrupt\n"
    (tmp_path / "stops" / "__init__.py").write_text(stop + line)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        installed_places()


def test_a_directory_that_can_not_be_listed_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = Place(Kind.OVERLAY, tmp_path / ("n" * 300))
    assert place.files() == []
    (record,) = caplog.records
    assert record.getMessage() == f"pretuned: can't list {place}: File name too long"
    assert place.unlisted() == "File name too long"
    (tmp_path / "file").touch()
    for fine in (tmp_path, tmp_path / "gone", tmp_path / "file"):
        assert Place(Kind.OVERLAY, fine).unlisted() == ""


def test_a_file_is_left_out_by_any_of_its_names(tmp_path: Path) -> None:
    path = write(tmp_path / "d/a.msgpack", CHOICES)
    write(tmp_path / "d/b.msgpack", CHOICES, tag="b")
    (tmp_path / "link").symlink_to("d")
    asked = Settings(bundles=(tmp_path / "d",))
    for without in (path, tmp_path / "link" / "a.msgpack"):
        assert [opened.path.name for opened in take(asked, without).files(installed=False)] == ["b.msgpack"]
    assert len(take(asked, tmp_path / "other").files(installed=False)) == 2


def test_without_an_overlay_there_is_no_place_for_one() -> None:
    assert [place.kind for place in dispatch_snapshot.places(Settings())] == [Kind.SYSTEM]
    assert [place.kind for place in dispatch_snapshot.places(Settings(overlay=Path("/o")))] == [
        Kind.OVERLAY,
        Kind.SYSTEM,
    ]


def test_signatures_that_are_wanted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    signing.sign(write(tmp_path / "d/a.msgpack", CHOICES))
    write(tmp_path / "d/b.msgpack", CHOICES, tag="b")
    keys = signing.keys(tmp_path / "keys")
    asked = Settings(bundles=(tmp_path / "d",), trusted_keys=keys)
    assert not asked.on_demand
    assert names(take(asked)) == ["a.msgpack"]
    assert "b.msgpack.sig" in caplog.text
    caplog.clear()
    (keys / "1.pem").write_text("nothing")
    assert names(take(asked)) == ["a.msgpack"]
    assert "PRETUNED_TRUSTED_KEYS: key" in caplog.text


def test_what_this_process_made_is_kept_until_it_is_forgotten(clean_places: Path, tmp_path: Path) -> None:
    opened = bundle_file.open_bundle(write(tmp_path / "m.msgpack", CHOICES))
    dispatch_snapshot.keep(opened)
    try:
        bundle_set = dispatch_snapshot.snapshot()
        bundle_set.add(opened)  # once more: it counts once
        assert [opened.bundle for opened in bundle_set.files(installed=False)] == [opened]
        dispatch_snapshot.forget()
        assert [opened.bundle for opened in dispatch_snapshot.snapshot().files(installed=False)] == [opened]
    finally:
        dispatch_snapshot.forget_made()
    dispatch_snapshot.forget()
    assert dispatch_snapshot.snapshot().files(installed=False) == ()


def test_another_thread_may_take_the_snapshot_first(clean_places: Path) -> None:
    assert hooks.snapshot is None
    with ThreadPoolExecutor(1) as pool:
        with settings.lock("snapshot"):
            later = pool.submit(dispatch_snapshot.snapshot)
            assert wait([later], timeout=0.1).not_done
            first = dispatch_snapshot.snapshot()
        assert later.result() is first


def test_what_can_not_be_opened_is_found_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "a.msgpack").write_bytes(b"nothing")
    (opened,) = snapshot(tmp_path).files(installed=False)
    assert opened.bundle is None
    assert isinstance(opened.error, BundleCorrupt)


def test_all_is_decided_anew(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", CHOICES)
    bundle_set = snapshot(tmp_path)
    first = decide(bundle_set, PROBLEM, 64, ON_H200)
    assert decide(bundle_set, PROBLEM, 64, ON_H200) is first
    bundle_set.reconsider()
    assert not bundle_set.decisions
    assert not bundle_set.rankers
    again = decide(bundle_set, PROBLEM, 64, ON_H200)
    assert again is not first
    assert again == first


def test_each_gpu_has_its_own_choice_whichever_name_it_is_under(tmp_path: Path) -> None:
    """A merge of two bundles may have a product of one GPU by one name, and of another by the other."""
    twin = PROBLEM.transposed
    assert twin is not None
    choices = {PROBLEM: [measured(64, 0, 10, gpu=0)], twin: [measured(64, 1, 10, gpu=1)]}
    write(tmp_path / "b.msgpack", choices, gpus=(ON_H100.gpu, H200))
    bundle_set = snapshot(tmp_path)
    for local, index in ((ON_H100, 0), (ON_H200, 1)):
        for problem in (PROBLEM, twin):
            ran = decide(bundle_set, problem, 64, local)
            assert isinstance(ran, Decision)
            assert (ran.chosen.index, ran.chosen.origin) == (index, Origin.THIS_GPU), (local.gpu.name, problem)


_IMPORTER = """
import importlib, logging, os, sys, threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from small_bundles import ON_H200, PROBLEM
from pretuned.runtime import settings
from pretuned.runtime.dispatch import decide, places, snapshot

folder = Path(sys.argv[1])
sys.path.append(str(folder))
ours, held, looked, importing = [], [], threading.Event(), threading.Event()
real_lock, real_find = settings.lock, places.importlib.util.find_spec

class Held:
    def __init__(self, name):
        self.name, self.lock = name, real_lock(name)
    def __enter__(self):
        self.lock.__enter__()
        ours.append((threading.get_ident(), self.name))
    def __exit__(self, *error):
        ours.remove((threading.get_ident(), self.name))
        self.lock.__exit__(*error)

def find_spec(name, *rest):
    if name == "friend.bundles":
        held.extend(one for thread, one in ours if thread == threading.get_ident())
        looked.set()
    return real_find(name, *rest)

for module in (decide, snapshot):
    module.lock = Held
places.importlib.util.find_spec = find_spec

def ask():
    decide.decide(snapshot.snapshot(), PROBLEM, 64, ON_H200)

def as_the_package_does():
    importing.set()
    assert looked.wait(20)
    ask()

sys.modules["__main__"].hook = as_the_package_does
threads = [threading.Thread(target=importlib.import_module, args=("friend",)), threading.Thread(target=ask)]
threads[0].start()
assert importing.wait(20)
threads[1].start()
for one in threads:
    one.join(20)
assert not any(one.is_alive() for one in threads)
print("ended", *held, flush=True)
os._exit(0)
"""


def test_no_lock_is_held_while_a_package_is_imported(tmp_path: Path) -> None:
    """A thread that imports a package with bundles, whose import calls pretuned, and one that looks for bundles."""
    (tmp_path / "friend").mkdir()
    (tmp_path / "friend/__init__.py").write_text("import __main__\n__main__.hook()\n")
    (tmp_path / "friend-1.0.dist-info").mkdir()
    (tmp_path / "friend-1.0.dist-info/entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nx = friend.bundles\n")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _IMPORTER, str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.stdout == "ended\n", done.stderr


@pytest.mark.parametrize(
    ("dtype", "has", "lacks"),
    [(DType.BF16, "catalogue-sm90", "quantised-sm90"), (DType.INT4_G128, "quantised-sm90", "catalogue-sm90")],
)
def test_a_shipped_bundle_without_a_kernel_for_a_dtype_is_not_read(dtype: DType, has: str, lacks: str) -> None:
    bundles = {opened.path.name.partition(".")[0]: opened.bundle for opened in take(Settings()).files(installed=True)}
    shipped = bundles[has]
    assert shipped is not None
    gpu = next(at for at, gpu in enumerate(shipped.gpus) if gpu.is_like(H200))
    forward = (problem for problem in shipped.problems() if problem.dtype is dtype and problem.op is Op.FORWARD)
    problem, choice = next(
        (product, choice) for product in forward for choice in shipped.find(product) if choice.gpu == gpu
    )
    taken = take(Settings())
    decision = decide(taken, problem, choice.bucket, ON_H200)
    assert isinstance(decision, Decision)
    read = {
        opened.path.name.partition(".")[0]
        for opened in taken._files(installed=True)
        if opened.bundle is not None and opened.bundle._checked is not None
    }
    assert has in read
    assert lacks not in read
    whole = chosen(taken, problem, choice.bucket, ON_H200, taken.view(ON_H200, installed=True), aligned=True, most=1)
    assert [(candidate.usable.path, candidate.index) for candidate in whole] == [
        (decision.chosen.usable.path, decision.chosen.index)
    ]
