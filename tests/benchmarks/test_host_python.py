"""What Python takes of calls: by plans, as it is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from benchmarks.speed import host_python

    monkeypatch.setattr(host_python, "BATCHES", 2)
    monkeypatch.setattr(host_python, "CALLS", 2)
    return host_python


def test_each_call_has_its_times(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "times.json"
    monkeypatch.setattr(sys, "argv", ["host_python.py", "--out", str(out)])
    tool.main()
    calls = json.loads(out.read_text())["calls"]
    assert list(calls) == [
        "call", "gather", "scatter_weight", "autograd", "autograd_and_backward", "layer", "layer_autograd",
        "layer_autograd_and_backward", "torch_mm", "torch_mm_autograd_and_backward",
    ]  # fmt: skip
    assert all(0 < one["least"] <= one["median"] for one in calls.values())
    assert "layer_autograd_and_backward" in capsys.readouterr().out


def test_all_but_the_first_calls_are_replayed(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it times the long way, which looks at everything."""
    import host_gpu

    from pretuned.runtime.replay import programs

    recorded: list[object] = []
    first = programs.Programs._recorded
    monkeypatch.setattr(
        programs.Programs, "_recorded", lambda self, *given: recorded.append(self) or first(self, *given)
    )
    with pytest.MonkeyPatch.context() as patch:
        kept = tool.without_arithmetic(host_gpu, patch)
        for call in tool.calls().values():
            call()
            call()
            before = len(recorded)
            call()
            call()
            assert len(recorded) == before
        del kept
    assert len(recorded) >= 6


def test_a_replay_makes_few_calls_in_python(tool: ModuleType) -> None:
    """Of functions of Python, those of the made-up GPU among them: what it takes, without a clock."""
    import host_gpu

    most = {"call": 11, "gather": 10, "scatter_weight": 10, "autograd": 15, "layer": 46, "layer_autograd": 52}
    found = dict.fromkeys(most, 0)
    with pytest.MonkeyPatch.context() as patch:
        kept = tool.without_arithmetic(host_gpu, patch)
        for name, call in tool.calls().items():
            if name not in most:
                continue
            for _ in range(3):
                call()
            entered: list[str] = []
            sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)  # noqa: B023
            try:
                call()
            finally:
                sys.setprofile(None)
            found[name] = len(entered)
        del kept
    assert all(0 < found[name] <= most[name] for name in most), found
