"""The environment variables."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pretuned.artifacts.errors import InputError
from pretuned.runtime import hooks, settings
from pretuned.runtime.settings import Invariance, Settings, read


def test_an_empty_environment() -> None:
    assert read({}) == Settings()


@pytest.mark.parametrize("value", ["", "0", "false", "False", "FALSE"])
def test_off(value: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = read(
        dict.fromkeys(("PRETUNED_STRICT", "PRETUNED_DISABLE_AUTOTUNE", "PRETUNED_DISABLE_SELF_TEST"), value)
    )
    assert not settings.strict
    assert not settings.disable_autotune
    assert not settings.disable_self_test
    assert not caplog.records


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_on(value: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read({"PRETUNED_STRICT": value}) == Settings(strict=True)
    assert read({"PRETUNED_DISABLE_AUTOTUNE": value}) == Settings(disable_autotune=True)
    assert read({"PRETUNED_DISABLE_SELF_TEST": value}) == Settings(disable_self_test=True)
    assert read({"UNSLOTH_MOE_DISABLE_AUTOTUNE": value}) == Settings(disable_autotune=True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("value", "mode"), [("1", Invariance()), ("True", Invariance()), ("quantize_x", Invariance(True)), ("0", None)]
)
def test_the_batch_invariant_mode(value: str, mode: Invariance | None, caplog: pytest.LogCaptureFixture) -> None:
    assert read({"PRETUNED_BATCH_INVARIANT": value}) == Settings(invariance=mode)
    assert not caplog.records


@pytest.mark.parametrize("value", ["yes", "2", "off", "no"])
def test_any_other_value_is_on_and_warns(value: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read({"PRETUNED_STRICT": value}).strict
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"PRETUNED_STRICT={value!r}" in caplog.text


def test_of_a_long_value_some_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert read({"PRETUNED_STRICT": "x" * 100_000}).strict
    assert f"PRETUNED_STRICT='{'x' * 60}' is neither" in caplog.text


def test_bundles_are_listed_in_order_without_empty_entries() -> None:
    assert read({"PRETUNED_BUNDLES": "/b::/a/x.msgpack:"}).bundles == (Path("/b"), Path("/a/x.msgpack"))


@pytest.mark.parametrize(
    ("environ", "overlay"),
    [
        ({}, None),
        ({"HOME": "/home/me"}, "/home/me/.cache/pretuned"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/cache"}, "/cache/pretuned"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/pretuned"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "relative"}, "/home/me/.cache/pretuned"),
        ({"HOME": ""}, None),
        ({"HOME": "nowhere"}, None),
    ],
)
def test_the_overlay(environ: dict[str, str], overlay: str | None) -> None:
    assert read(environ).overlay == (None if overlay is None else Path(overlay))


def test_the_process_reads_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.forget()
    try:
        monkeypatch.setenv("PRETUNED_STRICT", "1")
        assert settings.settings().strict
        monkeypatch.setenv("PRETUNED_STRICT", "0")
        assert settings.settings().strict
        settings.forget()
        assert not settings.settings().strict
    finally:
        settings.forget()


def test_a_home_in_an_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    read_ = read({"PRETUNED_BUNDLES": "/a:~/bundles:~nobody-of-this-name/b"})
    assert read_.bundles == (Path("/a"), tmp_path / "bundles", Path("~nobody-of-this-name/b"))


def test_a_tuner_is_asked_for_where_one_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRETUNED_DISABLE_AUTOTUNE", "UNSLOTH_MOE_DISABLE_AUTOTUNE", "PRETUNED_TRUSTED_KEYS"):
        monkeypatch.delenv(name, raising=False)
    hooks.register_tuner(None)
    settings.forget()
    with pytest.raises(InputError, match=r"autotune=True and no tuner is registered. The runtime never tunes"):
        hooks.demand_tuner()

    def tuner(problems: object, M: int, device: int) -> None: ...

    hooks.register_tuner(tuner)
    assert hooks.demand_tuner() is tuner
    for name, value in (("PRETUNED_DISABLE_AUTOTUNE", "1"), ("PRETUNED_TRUSTED_KEYS", "/keys")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            settings.forget()
            assert hooks.demand_tuner() is None
