"""Launches of a call, and the torch operators that it uses."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed import host_work


def test_launches_and_operators_of_one_call_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    launched: list[int] = []
    x = torch.zeros(4, 4)

    def once() -> None:
        launched.append(1)
        torch.mm(x, x)

    def twice() -> None:
        launched.extend((1, 2))
        torch.mm(torch.mm(x, x), x)

    old = host_work.work({"call": (once, 50)}, launched, lambda: None)
    new = host_work.work({"call": (twice, 50)}, launched, lambda: None)
    assert (old["call"]["launches"], new["call"]["launches"]) == (1, 2)
    assert (old["call"]["operators"]["aten::mm"], new["call"]["operators"]["aten::mm"]) == (1, 2)
    host_work.show({"old": old, "new": new})
    out = capsys.readouterr().out
    assert "    aten::mm: 1, 2\n" in out
    host_work.show({"old": old, "new": old})
    assert "aten::mm" not in capsys.readouterr().out


def test_launches_that_nothing_notes_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    result = host_work.work({"call": (lambda: None, 1)}, None, lambda: None)
    assert result["call"]["launches"] is None
    host_work.show({"old": result, "new": result})
    assert "?, ?" in capsys.readouterr().out
