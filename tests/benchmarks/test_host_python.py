"""Python calls of repeated calls, by plans, as the benchmark prints them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType

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
        "call",
        "out_given",
        "new_x_each_call",
        "gather",
        "scatter_weight",
        "autograd",
        "autograd_and_backward",
        "layer",
        "layer_autograd",
        "layer_autograd_and_backward",
        "torch_mm",
        "torch_mm_autograd_and_backward",
    ]
    assert all(0 < call["least"] <= call["median"] for call in calls.values())
    assert "layer_autograd_and_backward" in capsys.readouterr().out


SUPPORT = Path(__file__).parents[1] / "support"


def entered(call: Callable[[], object]) -> list[str]:
    """The Python functions that a call runs, in order, without the emulated driver's own."""
    lines: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).name != "emulated_driver.py":
            lines.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return lines


def test_all_but_the_first_calls_are_replayed(tool: ModuleType) -> None:
    """Else it times the long way, which looks at everything."""
    recorded = 0
    with tool.made_up_gpu(SUPPORT):
        for call in tool.calls().values():
            recorded += sum("_recorded" in entered(call) for _ in range(2))
            for _ in range(2):
                assert "_recorded" not in entered(call)
    assert recorded >= 4


def test_a_replay_makes_few_calls_in_python(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's work in functions of Python, without a clock, in a process that was in no block of another mode."""
    from pretuned.runtime import hooks

    monkeypatch.setattr(hooks, "blocks", False)
    most = {"call": 10, "gather": 10, "scatter_weight": 11, "autograd": 15, "layer": 64, "layer_autograd": 73}
    results: dict[str, list[str]] = {key: [] for key in most}
    with tool.made_up_gpu(SUPPORT):
        for name, call in tool.calls().items():
            if name in most:
                for _ in range(3):
                    call()
                results[name] = entered(call)
    assert not {name: results[name] for name in most if not 0 < len(results[name]) <= most[name]}
