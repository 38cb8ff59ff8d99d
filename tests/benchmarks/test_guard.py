"""benchmarks/speed/guard.py: its sample is fixed, and what it fails for."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pretuned.artifacts.records import Fusion, Layout, Op


@pytest.fixture(scope="module")
def guard() -> ModuleType:
    from benchmarks.speed import guard

    return guard


def cell(us: float, torch_us: float | None = None, config: str = "a") -> dict[str, Any]:
    return {"us": us, "torch_us": torch_us, "config": config}


def test_the_sample_is_fixed_and_of_all_ops_forms_and_formats(guard: ModuleType) -> None:
    cells = guard.sample()
    names = sorted(map(guard.name_of, cells))
    assert len(names) == len(set(names)) == guard.CELLS
    assert {problem.op for problem, _ in cells} == set(Op)
    assert {problem.layout for problem, _ in cells} == {Layout.NK, Layout.KN}
    assert {problem.dtype.value for problem, _ in cells} == {"bf16", "mxfp4", "fp8_block", "fp8_block_a16", "int4_g128"}
    forms = {Fusion.NONE, Fusion.GATHER, Fusion.SCATTER, Fusion.SILU, Fusion.SILU | Fusion.GATHER}
    assert {problem.fusion for problem, _ in cells} == forms
    assert len({M for _, M in cells}) > 10
    # Another digest is another sample: the records in benchmarks/results are then to be made anew.
    assert hashlib.sha256("\n".join(names).encode()).hexdigest()[:16] == "934822642549d291"


def test_weights_are_made_once(guard: ModuleType) -> None:
    keys = [guard.weight_key(problem) for problem, _ in guard.sample()]
    changes = sum(a != b for a, b in itertools.pairwise(keys))
    assert changes + 1 == len(set(keys))


def test_a_ratio_is_scaled_by_torch_s_drift_in_the_cell_or_in_the_median(guard: ModuleType) -> None:
    recorded = {"a": cell(10, 20), "b": cell(10, 20), "c": cell(10, 20), "d": cell(10)}
    now = {"a": cell(12, 24), "b": cell(11, 20), "c": cell(12, 23), "d": cell(12)}
    rows = {row.cell: row for row in guard.compare(now, recorded)}
    assert rows["a"].ratio == pytest.approx(1.0)
    assert rows["b"].ratio == pytest.approx(1.1)
    assert rows["d"].drift == pytest.approx(1.15)
    assert [*rows] == ["b", "c", "d", "a"]
    assert guard.complaints(list(rows.values()), now, recorded)[-1] == "b: 1.100 x the time recorded, 1.08 is allowed"


def test_without_torch_nothing_is_scaled(guard: ModuleType) -> None:
    (row,) = guard.compare({"a": cell(11)}, {"a": cell(10)})
    assert (row.drift, row.ratio) == (1.0, pytest.approx(1.1))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ([10.0] * 10, []),
        ([10.15] * 10, []),
        ([10.25] * 10, ["the mean is 1.025 x the time recorded, 1.02 is allowed"]),
        ([10.7, *[10.0] * 9], []),
        ([10.9, *[10.0] * 9], ["0: 1.090 x the time recorded, 1.08 is allowed"]),
        ([5.0] * 10, []),
    ],
)
def test_what_it_fails_for(guard: ModuleType, times: list[float], words: list[str]) -> None:
    recorded = {str(i): cell(10) for i in range(10)}
    now = {str(i): cell(us) for i, us in enumerate(times)}
    assert guard.complaints(guard.compare(now, recorded), now, recorded) == words


def test_what_is_wrong_or_of_another_sample_fails(guard: ModuleType) -> None:
    recorded = {"a": cell(10), "b": cell(10)}
    now = {"a": cell(10), "b": {"failed": "relative error 0.5, wanted below 0.01"}}
    assert guard.complaints(guard.compare(now, recorded), now, recorded) == ["b: relative error 0.5, wanted below 0.01"]
    assert "2 cells differ" in guard.complaints([], {"a": cell(10)}, {"b": cell(10)})[0]


def test_the_table_tells_the_worst_first_and_what_else_runs(guard: ModuleType) -> None:
    recorded = {"a": cell(10, 20), "longer b": cell(10)}
    text = guard.table(guard.compare({"a": cell(10, 20), "longer b": cell(10.5, config="other")}, recorded))
    head, first, second, mean = text.splitlines()
    assert head.split() == ["cell", "us", "recorded", "drift", "ratio", "x", "torch"]
    assert first.startswith("longer b")
    assert first.endswith("other, was a")
    assert second.split()[-1] == "2.00"
    assert mean == "2 cells, mean 1.025 x the time recorded"


@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_what_is_no_record_is_reported(
    guard: ModuleType,
    tmp_path: Path,
    text: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "record.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr("sys.argv", ["guard", "--against", str(path)])
    with pytest.raises(SystemExit) as ended:
        guard.main()
    assert ended.value.code == 2
    assert "has no times that --record kept" in capsys.readouterr().err


def test_of_several_looks_the_middle_one_counts(guard: ModuleType) -> None:
    looks = [{"a": cell(us, 2 * us, str(us)), "b": cell(1)} for us in (12.0, 10.0, 11.0)]
    assert guard.middle(looks) == {"a": cell(11.0, 22.0, "11.0"), "b": cell(1)}
    looks[2]["b"] = {"failed": "it hangs"}
    assert guard.middle(looks)["b"] == {"failed": "it hangs"}
