"""The sweep's file: written after every cell, gone on from, and of one bundle's variants alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture
def tool() -> ModuleType:
    from benchmarks.model import variants

    return variants


def parts(sweep: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    """A committed sweep's head and cells."""
    recorded = json.loads(sweep.read_text())
    cells = recorded.pop("cells")
    recorded.pop("seconds")
    return recorded, cells


def test_a_sweep_goes_on_where_it_was_ended(tool: ModuleType, tmp_path: Path) -> None:
    head, cells = parts(RESULTS / "sweep-h200-dW-bf16.json")
    out = tmp_path / "sweep.json"
    begun = tool.Sweep(out, head)
    for cell in cells[:3]:
        begun.add(cell, 1.5)
    again = tool.Sweep(out, head | {"command": "the same, once more"})
    assert [again.has(cell["model"], cell["gemm"], cell["tokens"]) for cell in cells[:5]] == [True] * 3 + [False] * 2
    for cell in cells[3:]:
        again.add(cell, 0.25)
    whole = json.loads(out.read_text())
    assert whole["cells"] == cells
    assert whole["seconds"] == 4.5 + 0.25 * (len(cells) - 3)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


def test_a_sweep_of_other_variants_is_no_place_for_a_cell(tool: ModuleType, tmp_path: Path) -> None:
    head, cells = parts(RESULTS / "sweep-h200-dX-bf16.json")
    out = tmp_path / "sweep.json"
    tool.Sweep(out, head).add(cells[0], 1.0)
    with pytest.raises(SystemExit, match=r"another variants: name another --out"):
        tool.Sweep(out, head | {"variants": {}})
    with pytest.raises(SystemExit, match=r"another op, gpu: name"):
        tool.Sweep(out, head | {"op": "dW", "gpu": "NVIDIA H100"})
