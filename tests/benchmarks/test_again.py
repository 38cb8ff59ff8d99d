"""The report of cells that were measured twice."""

from __future__ import annotations

import itertools
import lzma
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import LONG_NS, Measured

ROOT = Path(__file__).parents[2]
JOURNAL = ROOT / "benchmarks" / "results" / "catalogue-h200.journal.xz"


@pytest.fixture
def tool() -> ModuleType:
    from benchmarks.model import again

    return again


def part(path: Path, lines: int) -> Path:
    """The first lines of the journal."""
    with lzma.open(JOURNAL, "rt") as journal:
        path.write_text("".join(itertools.islice(journal, lines)))
    return path


def test_the_second_times_are_reported_by_what_the_first_duel_said(tool: ModuleType, tmp_path: Path) -> None:
    journal = read_journal(part(tmp_path / "some.journal", 3000))
    with_duel = (record for record in journal.records if isinstance(record, Measured) and record.duel)
    first = next(record for record in with_duel if max(time.time_ns for time in record.timings) < LONG_NS)
    assert first.duel is not None
    took = {first.duel.challenger: (900, 900), first.duel.modelled: (1000, 1000)}
    timings = tuple(timing._replace(ns=took.get(timing.variant, timing.ns)) for timing in first.timings)
    after = replace(journal, records=(replace(first, timings=timings),))
    for ratio, band, word in (
        (0.97, 0.01, "won"),
        (0.99, 0.02, "even, below 1"),
        (1.0, 0.02, "even, 1 and more"),
        (1.02, 0.02, "lost"),
    ):
        before = replace(journal, records=(replace(first, duel=replace(first.duel, ratio=ratio, band=band)),))
        assert list(tool.second_times(before, after)) == [(False, word, 0.9)]
    assert not list(tool.second_times(before, before))  # not measured again
    slow = tuple(timing._replace(ns=(2 * LONG_NS, 2 * LONG_NS)) for timing in first.timings)
    assert [time[0] for time in tool.second_times(replace(before, records=(replace(first, timings=slow),)), after)] == [
        True
    ]


def test_journals_without_such_a_cell_are_reported(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once = part(tmp_path / "once.journal", 300)  # before any second look
    monkeypatch.setattr(sys, "argv", ["again.py", str(once), str(once)])
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    assert "was measured again" in capsys.readouterr().err
