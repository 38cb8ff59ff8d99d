"""Plug-ins of engines before there is a layer: the switch, versions, lines logged once, imports watched."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pretuned.integrations.plug_in import PlugIn, when_imported


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> PlugIn:
    """A plug-in of an engine whose version is 2.5.3."""
    module = ModuleType("an_engine")
    module.__version__ = "2.5.3"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_engine", module)
    monkeypatch.delenv("PRETUNED_ENGINE", raising=False)
    monkeypatch.setenv("_PRETUNED_ENGINE_LOGGED", "")
    caplog.set_level(logging.INFO, "an_engine")
    return PlugIn(
        "Engine", "an_engine", "PRETUNED_ENGINE", first=(2, 3, 1), last=(2, 5), group="engine.plugins", listed="PLUGINS"
    )


@pytest.mark.parametrize(
    ("version", "tried"),
    [
        ("2.3.1", True),
        ("2.3.0", False),
        ("2.4", True),
        ("2.5.99", True),
        ("2.6.0", False),
        ("3.0", False),
        ("2.5.1rc2.dev3+g1234", True),
        ("0.0.0.dev0", False),
        ("dev", False),
        ("", False),
        ("2.3", False),
    ],
)
def test_versions(engine: PlugIn, version: str, tried: bool) -> None:
    assert engine.was_tried(version) is tried


def test_it_says_once_that_it_is_active(engine: PlugIn, caplog: pytest.LogCaptureFixture) -> None:
    assert engine.begin()
    assert engine.begin()
    engine.say_active()
    text = "pretuned is active: it runs the MoE layers that it has kernels for. PRETUNED_ENGINE=0 switches it off"
    assert [record.getMessage() for record in caplog.records] == [text]


def test_it_says_so_later_if_the_engine_sets_its_loggers_up_later(
    engine: PlugIn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "an_engine")
    assert engine.begin()
    assert not caplog.records
    caplog.set_level(logging.INFO, "an_engine")
    lines: list[str] = []
    for _ in range(2):
        engine.say_active(lines.append)
    assert len(lines) == 1


def test_an_engine_s_other_processes_say_nothing(
    engine: PlugIn, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child() -> list[str]:
        plugged = PlugIn(
            "Engine", "an_engine", "PRETUNED_ENGINE", first=(2,), last=(2,), group="engine.plugins", listed="PLUGINS"
        )
        lines: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(multiprocessing, "parent_process", lambda: object())
            assert plugged.begin()
            plugged.say_active(lines.append)
        return lines

    assert len(child()) == 1  # the first process could not: one with a layer does
    assert not caplog.records
    assert child() == []  # another has
    caplog.set_level(logging.WARNING, "an_engine")
    assert engine.begin()  # another engine, whose first process can't log it
    caplog.set_level(logging.INFO, "an_engine")
    assert len(child()) == 1
    assert engine.begin()
    assert child() == []
    assert len(caplog.records) == 1


def test_another_version_is_left_alone(engine: PlugIn, caplog: pytest.LogCaptureFixture) -> None:
    sys.modules["an_engine"].__version__ = "2.6.0"  # type: ignore[attr-defined]
    assert not engine.begin()
    assert not engine.begin()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "pretuned was tested with Engine 2.3.1 to 2.5 and this is 2.6.0: every MoE layer stays with Engine"
    )


def test_a_failure_is_reported_once_with_its_reason(engine: PlugIn, caplog: pytest.LogCaptureFixture) -> None:
    def fails(what: str) -> None:
        raise KeyError(what)

    assert engine.attempt("add", lambda number: number + 1, 1) == 2
    for what in ("a", "b", "a"):
        assert engine.attempt("take a layer", fails, what) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"pretuned: MoE layers stay with Engine, as pretuned could not take a layer: KeyError: '{what}'. "
        "PRETUNED_ENGINE=0 switches pretuned off"
        for what in "ab"
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_module_is_reported_once_it_is_imported(folder: Path) -> None:
    (folder / "watched_package").mkdir()
    (folder / "watched_package/__init__.py").write_text("from . import watched\n")
    (folder / "watched_package/watched.py").write_text("value = 1\n")
    seen: list[Any] = []

    def call(module: Any) -> None:
        seen.append((module.__name__, module.value))

    when_imported("watched_package.watched", call)
    when_imported("watched_package.watched", call)  # again: nothing more
    assert not seen
    assert "watched_package" not in sys.modules
    module = importlib.import_module("watched_package.watched")
    assert seen == [("watched_package.watched", 1)]
    assert module.__spec__ is not None
    assert "exec_module" not in vars(module.__spec__.loader)  # which is as it was
    when_imported("watched_package.watched", call)
    assert len(seen) == 2  # at once
    importlib.reload(module)
    assert len(seen) == 2


def test_a_module_that_fails_is_reported_when_it_is_whole(folder: Path) -> None:
    (folder / "watched_broken.py").write_text("raise RuntimeError('no')\n")
    seen: list[Any] = []
    when_imported("watched_broken", seen.append)
    with pytest.raises(RuntimeError):
        importlib.import_module("watched_broken")
    assert not seen
    (folder / "watched_broken.py").write_text("value = 1234567\n")
    importlib.invalidate_caches()
    assert importlib.import_module("watched_broken") is seen[0]


def test_a_module_that_is_not_there(folder: Path) -> None:
    when_imported("watched_nowhere", lambda _: pytest.fail("there is none"))
    assert importlib.util.find_spec("watched_nowhere") is None
    with pytest.raises(ImportError):
        importlib.import_module("watched_nowhere")


def test_a_module_whose_loader_can_not_be_watched_is_imported_as_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loader:
        __slots__ = ()

        def create_module(self, spec: Any) -> None:
            return None

        def exec_module(self, module: Any) -> None:
            module.value = 5

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.machinery.ModuleSpec(name, Loader()) if name == "watched_odd" else None

    when_imported("watched_odd", lambda _: pytest.fail("it is not told"))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert importlib.import_module("watched_odd").value == 5


def test_a_module_that_another_thread_is_importing(folder: Path) -> None:
    (folder / "watched_slow.py").write_text(
        "import sys\nbegun, go_on = sys.watched_events\nbegun.set()\nassert go_on.wait(30)\nvalue = 1\n"
    )
    begun, go_on, seen = threading.Event(), threading.Event(), []
    sys.watched_events = begun, go_on  # type: ignore[attr-defined]
    importer = threading.Thread(target=importlib.import_module, args=("watched_slow",))
    importer.start()
    assert begun.wait(30)
    asker = threading.Thread(target=when_imported, args=("watched_slow", lambda module: seen.append(module.value)))
    asker.start()
    go_on.set()
    for thread in (importer, asker):
        thread.join(30)
    assert seen == [1]
