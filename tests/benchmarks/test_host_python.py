"""What Python takes of calls: by plans, as it is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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


SUPPORT = Path(__file__).parents[1] / "support"


def entered(call: Callable[[], object]) -> list[str]:
    """The functions of Python that a call runs, in order."""
    found: list[str] = []
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_all_but_the_first_calls_are_replayed(tool: ModuleType) -> None:
    """Else it times the long way, which looks at everything."""
    recorded = 0
    with tool.made_up_gpu(SUPPORT):
        for call in tool.calls().values():
            recorded += sum("_recorded" in entered(call) for _ in range(2))
            for _ in range(2):
                assert "_recorded" not in entered(call)
    assert recorded >= 4


def test_a_replay_makes_few_calls_in_python(tool: ModuleType) -> None:
    """Of functions of Python, those of the emulated GPU among them: what it takes, without a clock."""
    most = {"call": 20, "gather": 15, "scatter_weight": 16, "autograd": 21, "layer": 84, "layer_autograd": 90}
    found = dict.fromkeys(most, 0)
    with tool.made_up_gpu(SUPPORT):
        for name, call in tool.calls().items():
            if name in most:
                for _ in range(3):
                    call()
                found[name] = len(entered(call))
    assert all(0 < found[name] <= most[name] for name in most), found
