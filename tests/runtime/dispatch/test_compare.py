"""Times of two codes for one product: compared only where one bundle, source and GPU say both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from made import ANY, H200, NARROW, ON_H200, PROBLEM, SPECS, WIDE, measured, snapshot, write

from pretuned.runtime.dispatch import compare
from pretuned.runtime.dispatch.ranking import Candidate


def first(path: Path, second: int | None, *, alignment: int = 16) -> Candidate | None:
    """The runner-up of a rival whose choice names ``second``, with the code in second place of such an alignment."""
    specs = [replace(one, abi=1 if i != NARROW or alignment == 16 else 2) for i, one in enumerate(SPECS)]
    write(path, {PROBLEM: [measured(64, WIDE, 5, second=second)]}, gpus=[H200], specs=specs)
    found = snapshot(path)
    ran = compare.own(found, PROBLEM, 64, ON_H200, True)
    assert isinstance(ran, Candidate)
    rival = compare.rival(found, ran, PROBLEM, 64, ON_H200, True)
    assert isinstance(rival, Candidate)
    return compare.second(found, rival, PROBLEM, ON_H200, True)


def test_a_runner_up(tmp_path: Path) -> None:
    found = first(tmp_path / "a.msgpack", NARROW)
    assert found is not None
    assert (found.index, found.config, found.time_us) == (NARROW, SPECS[NARROW].config, 5.5)
    assert first(tmp_path / "b.msgpack", None) is None
    other = first(tmp_path / "c.msgpack", ANY)
    assert other is not None
    assert other.index == ANY


def test_a_runner_up_that_can_not_run(tmp_path: Path) -> None:
    assert first(tmp_path / "a.msgpack", NARROW, alignment=1) is None
