"""PRETUNED_TRUSTED_KEYS: what is not pretuned's own is used where one of these keys signed it, and else nothing is."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import signing
from processes import copy_of
from small_bundles import ON_H200, PROBLEM, SPECS, WIDE, modelled, variant, write

from pretuned.aot.demand import tuner
from pretuned.artifacts.errors import BundleError
from pretuned.artifacts.records import Variant
from pretuned.integrations.unsloth import cache as unsloth
from pretuned.runtime import allow_jit, hooks, reload, self_test_results
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.dispatch.places import Kind, Place, installed_places
from pretuned.runtime.dispatch.snapshot import Snapshot, take
from pretuned.runtime.inspect.doctor import report
from pretuned.runtime.settings import Settings, read

CHOICES = {PROBLEM: [modelled(64, WIDE)]}


def taken(tmp_path: Path, *named: Path) -> Snapshot:
    """With the keys of ``tmp_path/keys``."""
    return take(Settings(bundles=named, overlay=tmp_path / "overlay", trusted_keys=tmp_path / "keys"))


def used(bundle_set: Snapshot) -> list[str]:
    return [usable.path.name for usable in bundle_set.view(ON_H200, installed=False).usable]


def why(bundle_set: Snapshot) -> list[str]:
    return [skip.reason for skip in bundle_set.view(ON_H200, installed=False).skipped]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle outside the package that the trusted key signed."""
    signing.keys(tmp_path / "keys")
    return signing.sign(write(tmp_path / "named" / "a.msgpack", CHOICES))


def test_signed_ones_are_used_and_others_are_not(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(bundle.with_name("b.msgpack"), CHOICES, tag="unsigned")
    write(tmp_path / "overlay" / "tuned.msgpack", CHOICES, tag="unsigned, of the user's own")
    signing.sign(write(tmp_path / "overlay" / "kept.msgpack", CHOICES, tag="signed there"))
    bundle_set = taken(tmp_path, bundle.parent)
    assert used(bundle_set) == ["a.msgpack", "kept.msgpack"]
    assert len(why(bundle_set)) == 2
    for name in ("b.msgpack", "tuned.msgpack"):
        (record,) = [record for record in caplog.records if f"{name}.sig" in record.getMessage()]
        assert record.levelno == logging.WARNING
        for word in ("has no signature", "PRETUNED_TRUSTED_KEYS", "0.pem", "aot sign BUNDLE --key"):
            assert word in record.getMessage()
    used(bundle_set)
    assert len([record for record in caplog.records if "b.msgpack.sig" in record.getMessage()]) == 1


def test_without_the_variable_no_signature_is_asked_for(bundle: Path, tmp_path: Path) -> None:
    Path(f"{bundle}.sig").write_bytes(b"nothing")
    assert read({"PRETUNED_TRUSTED_KEYS": ""}).trusted_keys is None
    assert used(take(Settings(bundles=(bundle.parent,)))) == ["a.msgpack"]


def test_the_signature_of_another_bundle(bundle: Path, tmp_path: Path) -> None:
    other = signing.sign(write(tmp_path / "else" / "a.msgpack", CHOICES, tag="another"))
    Path(f"{other}.sig").replace(f"{bundle}.sig")
    bundle_set = taken(tmp_path, bundle.parent)
    assert used(bundle_set) == []
    assert "is not of this content" in why(bundle_set)[0]


def test_a_strangers_signature(bundle: Path, tmp_path: Path) -> None:
    signing.sign(bundle, signing.STRANGER)
    bundle_set = taken(tmp_path, bundle.parent)
    assert used(bundle_set) == []
    assert "is by another key" in why(bundle_set)[0]
    signing.keys(tmp_path / "keys", signing.PRIVATE, signing.STRANGER)
    assert used(taken(tmp_path, bundle.parent)) == ["a.msgpack"]


@pytest.mark.parametrize("how", ["missing", "empty", "a file", "others write", "a stranger's", "key written by others"])
def test_keys_that_can_not_be_had_let_nothing_in(how: str, bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    key = folder / "0.pem"
    if how in ("missing", "empty", "a file"):
        key.unlink()
    if how in ("missing", "a file"):
        folder.rmdir()
    if how == "a file":
        folder.write_bytes(signing.public_pem())
    if how == "others write":
        folder.chmod(0o777)
    if how == "a stranger's":
        if os.geteuid():
            pytest.skip("needs root to give a file away")
        os.chown(key, 34567, 34567)
    if how == "key written by others":
        key.chmod(0o666)
    bundle_set = taken(tmp_path, bundle.parent)
    assert used(bundle_set) == []
    assert "has no key to check with" in why(bundle_set)[0]
    doctor_report = report(bundle_set, Settings(), (), "")
    assert not doctor_report.ok
    assert any(problem.startswith("PRETUNED_TRUSTED_KEYS: ") for problem in doctor_report.problems)


def test_a_link_to_a_key_that_others_can_write(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "keys" / "0.pem").rename(tmp_path / "open" / "k")
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "keys" / "0.pem").symlink_to(tmp_path / "open" / "k")
    assert used(taken(tmp_path, bundle.parent)) == []


def test_the_place_of_a_signed_bundle_is_checked_all_the_same(bundle: Path, tmp_path: Path) -> None:
    bundle.parent.chmod(0o777)
    bundle_set = taken(tmp_path, bundle.parent)
    assert used(bundle_set) == []
    assert "everybody can write it" in why(bundle_set)[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a group's directory")
def test_a_group_may_write_the_place_of_signed_bundles(bundle: Path, tmp_path: Path) -> None:
    """A volume with ``fsGroup: 2000``. Its members can take bundles away, or put back what was signed before."""
    for path in (bundle.parent, bundle, Path(f"{bundle}.sig")):
        os.chown(path, 0, 2000)
        path.chmod(0o2775 if path.is_dir() else 0o664)
    assert used(taken(tmp_path, bundle.parent)) == ["a.msgpack"]
    assert used(taken(tmp_path, bundle)) == ["a.msgpack"]
    (refused,) = why(take(Settings(bundles=(bundle.parent,))))
    assert refused.endswith(
        "group 2000 can write it. Move the bundle, sign it and set PRETUNED_TRUSTED_KEYS, or run: "
        f"chmod g-w {bundle.parent}"
    )
    write(bundle, CHOICES, tag="by one of the group")
    bundle_set = taken(tmp_path, bundle.parent)
    assert used(bundle_set) == []
    assert "is not of this content" in why(bundle_set)[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a group's directory")
def test_a_signed_bundle_that_one_of_a_group_replaces_while_it_is_read(bundle: Path, tmp_path: Path) -> None:
    for path in (bundle.parent, bundle):
        os.chown(path, 0, 2000)
        path.chmod(0o2775 if path.is_dir() else 0o664)
    bundle_set = taken(tmp_path, bundle.parent)
    (usable,) = bundle_set.view(ON_H200, installed=False).usable
    usable.bundle.rest()
    other = write(tmp_path / "other.msgpack", CHOICES, tag="other code")
    other.replace(bundle)
    with pytest.raises(BundleError, match="changed after it was opened"):
        usable.bundle.cubin(0)


def test_a_link_to_a_signed_bundle_brings_its_own_signature(bundle: Path, tmp_path: Path) -> None:
    """A config map of Kubernetes has both as links."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "c.msgpack").symlink_to(bundle)
    assert used(taken(tmp_path, mounted)) == []
    (mounted / "c.msgpack.sig").symlink_to(f"{bundle}.sig")
    assert used(taken(tmp_path, mounted)) == ["c.msgpack"]


def test_swapped_after_it_was_opened(bundle: Path, tmp_path: Path) -> None:
    """The bytes that were verified are those that load, also where the file rested meanwhile."""
    bundle_set = taken(tmp_path, bundle.parent)
    (usable,) = bundle_set.view(ON_H200, installed=False).usable
    before = usable.bundle.cubin(0)
    usable.bundle.rest()
    Path(f"{bundle}.sig").write_bytes(b"")
    assert usable.bundle.cubin(0) == before
    usable.bundle.rest()
    signing.sign(write(bundle, CHOICES, tag="another, signed as well"))
    with pytest.raises(BundleError, match="the file was changed after it was opened"):
        usable.bundle.cubin(1)


def test_swapped_while_it_is_opened(bundle: Path, tmp_path: Path) -> None:
    """An evil bundle and a good one take turns under one name beside the good one's signature."""
    good, evil = bundle.read_bytes(), write(tmp_path / "evil.msgpack", CHOICES, tag="evil").read_bytes()
    digest = good[31:63]
    stop = threading.Event()

    def swap() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            (tmp_path / "new").write_bytes((good, evil)[turn % 2])
            (tmp_path / "new").replace(bundle)

    swapper = threading.Thread(target=swap)
    swapper.start()
    accepted = refused = 0
    try:
        while accepted < 20 or refused < 20:
            bundle_set = taken(tmp_path, bundle.parent)
            for usable in bundle_set.view(ON_H200, installed=False).usable:
                assert usable.bundle.digest == digest
                accepted += 1
            refused += len(why(bundle_set))
    finally:
        stop.set()
        swapper.join()


def test_a_named_file_that_is_refused_is_raised_and_fails_the_doctor(bundle: Path, tmp_path: Path) -> None:
    Path(f"{bundle}.sig").unlink()
    bundle_set = taken(tmp_path, bundle)
    with pytest.raises(BundleError, match="has no signature"):
        bundle_set.view(ON_H200, installed=False).demand_named_files()
    for named in (bundle, bundle.parent):
        doctor_report = report(taken(tmp_path, named), Settings(), (), "")
        assert not doctor_report.ok
        assert any("has no signature" in problem for problem in doctor_report.problems)
        assert "key       0.pem (" in str(doctor_report)


def test_pretuneds_own_need_none_and_other_packages_do(bundle: Path, tmp_path: Path) -> None:
    (own,) = [place.path for place in installed_places() if place.is_ours()]
    assert (own / "catalogue-sm90.msgpack").is_file()
    assert not Place(Kind.NAMED, own).is_ours()
    Path(f"{bundle}.sig").unlink()
    keys = taken(tmp_path).keys
    bundle_set = Snapshot((), lambda: [Place(Kind.INSTALLED, own), Place(Kind.INSTALLED, bundle.parent)], None, keys)
    by_place = {opened.place.path: opened.error for opened in bundle_set.files(installed=True)}
    assert by_place.pop(bundle.parent) is not None
    assert list(by_place.values()) == [None]


def test_nothing_is_tuned_or_compiled_on_demand(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can have signed that."""
    import pretuned.aot  # noqa: F401 - registers the tuner and the compiler

    monkeypatch.setenv("PRETUNED_TRUSTED_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        reload()
        assert hooks.demand_tuner() is None
        allow_jit()
        assert not hooks.jit_allowed()
        from pretuned.artifacts.bundle_file import open_bundle

        with open_bundle(bundle) as opened:
            dispatch_snapshot.keep(opened)
            assert all(
                opened.place.kind is not Kind.PROCESS for opened in dispatch_snapshot.snapshot().files(installed=False)
            )
            monkeypatch.delenv("PRETUNED_TRUSTED_KEYS")
            reload()
            assert hooks.demand_tuner() is not None
            assert hooks.jit_allowed()
            assert any(
                opened.place.kind is Kind.PROCESS for opened in dispatch_snapshot.snapshot().files(installed=False)
            )
    finally:
        dispatch_snapshot.forget_made()
        allow_jit(False)
        monkeypatch.undo()
        reload()


def test_a_home_in_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert read({"PRETUNED_TRUSTED_KEYS": "~/keys"}) == Settings(trusted_keys=Path("/home/me/keys"))


def test_test_results_and_configs_are_neither_read_nor_written(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody signs those."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, other = variant(SPECS[0], b"one"), variant(SPECS[0], b"other")

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()}

    def keep(of: Variant, process: Any = self_test_results) -> None:
        process.note(of, ON_H200, self_test_results.result_of_today(False, "y[0, 0] is 1, wanted 2"))
        unsloth.save_cached_config(of.cubin_sha256.hex(), {}, {}, {})

    reload()
    keep(first)
    before = files()
    assert len(before) == 3, before
    monkeypatch.setenv("PRETUNED_TRUSTED_KEYS", str(tmp_path / "keys"))
    reload()
    process = copy_of(self_test_results)
    unsloth.clear_cache()
    assert process.recorded(first, ON_H200) is None
    assert unsloth.load_cached_config(first.cubin_sha256.hex()) is None
    keep(other, process)
    assert process.is_wrong(other, ON_H200)
    assert files() == before
    assert tuner.OnDemand(tuner.measure_in_child)._kept._place() is None
