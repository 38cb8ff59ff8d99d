"""How the structure's figures are counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.start import structure


@pytest.fixture(autouse=True)
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("runtime", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "runtime/down.py").write_text("def deepest():\n    return 1\n")
    (tmp_path / "runtime/up.py").write_text(
        "from down import deepest\n\n\ndef outer():\n    return deepest() + len('a') + deepest()\n"
    )
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "runtime"))
    return tmp_path


def test_a_way_counts_files_calls_and_returns() -> None:
    import up  # type: ignore[import-not-found]

    assert structure.followed(up.outer) == {"files": 2, "calls": 3, "returns": 3}
    assert sys.getprofile() is None


def test_code_elsewhere_does_not_count() -> None:
    assert structure.followed(lambda: sorted([2, 1])) == {"files": 0, "calls": 0, "returns": 0}


def test_sizes(tree: Path) -> None:
    files = sorted((tree / "runtime").glob("*.py"))
    assert structure.size(files) == {"lines": 7, "statements": 5, "files": 2, "small files": 2}


def test_patches_are_those_of_attributes(tree: Path) -> None:
    (tree / "test_it.py").write_text("monkeypatch.setattr(a, 'b', 1)\nmock.patch('c')\nmonkeypatch.setenv('d', 'e')\n")
    assert structure.patches([tree / "test_it.py"]) == 2
