"""A whole vLLM engine, with the plug-in and without: what is asked for, and how runs take turns."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import engine_in_vllm

    return engine_in_vllm


def test_what_is_asked_for(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = tool.arguments(["--json", "o.json", "--cases", "1x16+8,4x64+1"])
    assert options.cases == [(1, 16, 8), (4, 64, 1)]
    assert options.modes == list(tool.MODES)
    wrong = (
        (["--cases", "16"], "'16' is not of the form 1x128+128"),
        (["--modes", "fast"], "'fast' is none of"),
        (["--vllm", "."], "no folder vllm"),
    )
    for words, message in wrong:
        with pytest.raises(SystemExit):
            tool.arguments(["--json", "o.json", *words])
        assert message in capsys.readouterr().err


def test_the_engine_has_room_for_every_case(tool: ModuleType, tmp_path: Path) -> None:
    options = tool.arguments(
        ["--json", "o.json", "--cases", "200x128+128,4x2048+1", "--layers", "3", "--modes", "eager"]
    )
    options.models = ["gpt-oss-20b"]
    settings = tool.settings(options, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["layer_types"] == [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]
    options.models = ["qwen3-30b"]
    settings = tool.settings(options, tmp_path)
    assert (settings["max_model_len"], settings["max_num_seqs"], settings["enforce_eager"]) == (2065, 200, True)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 3


def test_new_tokens_count_and_the_prompt_s_where_one_is_made(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 10.0, 12.0] * 2)
    monkeypatch.setattr(tool.time, "perf_counter", lambda: next(clock))
    assert tool.speed(lambda *_: None, (4, 100, 50)) == 100.0  # of the better: 2 seconds
    assert tool.speed(lambda *_: None, (4, 100, 1)) == 200.0


def test_lines_are_kept_when_an_engine_takes_handlers_away(tool: ModuleType) -> None:
    log = logging.getLogger("vllm.pretuned")
    lines = tool.logged_lines()
    log.handlers.clear()
    log.warning("runs %d", 3)
    log.filters.clear()
    assert lines == ["runs 3"]


def measured(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stops: tuple[str, ...],
    seconds: float,
    takes: float,
    models: str = "qwen3-30b",
) -> list[tuple[str, str, bool]]:
    """Mode, side and whether it ran, of each run of an engine that stops in some modes."""
    now = [0.0]

    folders: dict[str, Path] = {}

    def one_run(options: Any, model: str, mode: str, side: str, caches: Path, left: float) -> dict[str, Any]:
        now[0] += takes
        assert folders.setdefault(side, caches) == caches  # of one round
        why = {"stopped": "Error:\nno compiler"} if mode in stops else {"tokens_per_s": {"1x16+8": 1.0}}
        if why.get("stopped"):
            folders.clear()
        return {"model": model, "mode": mode, "side": side, "run_s": takes, "about": {"torch": "2"}, **why}

    monkeypatch.setattr(tool, "one_run", one_run)
    monkeypatch.setattr(tool.time, "monotonic", lambda: now[0])
    options = tool.arguments(["--json", str(tmp_path / "o.json"), "--seconds", str(seconds), "--models", models])
    runs = tool.measure(options)
    report = json.loads((tmp_path / "o.json").read_text())
    assert (report["runs"], report["torch"]) == (runs, "2")
    assert report["command"].startswith("python ")
    caches = [run["caches"] for run in runs if "stopped" not in run]
    assert caches == (["empty", "empty", "warm", "warm"] * len(models.split(",")))[: len(caches)]
    return [(run["mode"], run["side"], "stopped" not in run) for run in runs]


def test_sides_take_turns_in_the_first_mode_that_runs(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    turns = [("graphs", "without", True), ("graphs", "with", True)] * 2
    row = measured(tool, monkeypatch, tmp_path, ("compiled",), 1000, 50)
    assert row == [("compiled", "without", False), *turns]


def test_no_run_begins_that_would_not_end(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = measured(tool, monkeypatch, tmp_path, (), 250, 100)
    assert row == [("compiled", "without", True), ("compiled", "with", True)]


def test_each_model_has_its_time(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tool.tempfile, "TemporaryDirectory", lambda: contextlib.nullcontext(str(tmp_path)))
    row = measured(tool, monkeypatch, tmp_path, (), 450, 100, "qwen3-30b-fp8,gpt-oss-20b")
    assert len(row) == 8


def test_ranks_share_a_port_and_their_speeds_add_up(tool: ModuleType) -> None:
    assert tool.ranks(1) == [{}]
    first, second = tool.ranks(2)
    assert first["VLLM_DP_MASTER_PORT"] == second["VLLM_DP_MASTER_PORT"]
    assert (first["VLLM_DP_RANK"], second["VLLM_DP_RANK"], second["VLLM_DP_SIZE"]) == ("0", "1", "2")
    reports = [{"first_token_s": 2.0, "tokens_per_s": {"1x16+8": 5.0}, "told": ["first"]}]
    reports += [{"first_token_s": 3.0, "tokens_per_s": {"1x16+8": 4.0}, "told": ["second"]}]
    assert tool.together(reports) == {"first_token_s": 3.0, "tokens_per_s": {"1x16+8": 9.0}, "told": ["first"]}


@pytest.mark.slow
def test_what_stopped_it_is_reported(tool: ModuleType, tmp_path: Path) -> None:
    """(There is no vLLM in the folder.)"""
    (tmp_path / "vllm" / "model_executor").mkdir(parents=True)
    out = tmp_path / "runs.json"
    assert (
        tool.main(["--vllm", str(tmp_path), "--json", str(out), "--modes", "eager", "--tiny", "--models", "qwen3-30b"])
        == 1
    )
    (run,) = json.loads(out.read_text())["runs"]
    assert run["side"] == "without"
    assert "vllm" in run["stopped"].splitlines()[-1]
