"""Under umask 000 what pretuned makes is not everybody's to write: else nothing would be loaded from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.compile.triton import Compiled
from pretuned.aot.journal.file import Header, open_journal
from pretuned.aot.process.output import held
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.locking import lock
from pretuned.artifacts.publishing import make_folder, publish
from pretuned.artifacts.records import DType, Gpu, Op
from pretuned.kernels import registry
from pretuned.kernels.spec import Config, Spec

GOLDEN = Path(__file__).parents[1] / "golden" / "format2-small.msgpack"


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def writable_by_all(place: Path) -> list[str]:
    return [str(path) for path in [place, *place.rglob("*")] if path.stat().st_mode & 0o002]


def test_what_a_build_makes_is_loaded(tmp_path: Path) -> None:
    notes: list[str] = []
    out = tmp_path / "made" / "here" / "out"
    with held(out, notes.append):
        publish(out / "b.msgpack", GOLDEN.read_bytes())
    assert writable_by_all(tmp_path / "made") == []
    assert {path.stat().st_mode & 0o777 for path in (out, out.parent, out.parent.parent)} == {0o755}
    open_bundle(out / "b.msgpack").close()
    assert notes == []


def test_a_build_into_a_directory_that_everybody_can_write_says_so_at_once(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "out").mkdir(mode=0o777)
    with held(tmp_path / "out", notes.append):
        (note,) = notes
    assert "the runtime refuses bundles in" in note
    assert f"everybody can write it. Move the bundle, or run: chmod go-w {tmp_path / 'out'}" in note


def test_locks_journals_and_caches(tmp_path: Path) -> None:
    with lock(tmp_path / "a" / "b", 0, required=True):
        pass
    with open_journal(tmp_path / "c" / "d" / "j", Header(90, Gpu("NVIDIA H200", 132, 143771, 13000), ())):
        pass
    bundle, spec = open_bundle(GOLDEN), Spec(Op.FORWARD, DType.BF16, Config(64, 64, 64, 4, 3))
    variant = bundle.variant(0)._replace(arguments=registry.arguments(spec))
    cache = CompileCache(tmp_path / "e" / "f")
    cache.put(spec, 90, Compiled(variant, bundle.cubin(0)))
    assert cache.trouble == ""
    make_folder(tmp_path / "g" / "h")
    assert sum(map(len, (writable_by_all(tmp_path / name) for name in "aceg"))) == 0


def test_a_folder_where_a_file_is(tmp_path: Path) -> None:
    shutil.copyfile(GOLDEN, tmp_path / "file")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"exists|Not a directory"):
            make_folder(path)
