"""The layer benchmark: its baseline, its summary, and what its file says about the run."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.speed import layer

    return layer


def test_a_summary_has_the_mean_and_the_lowest_with_its_model(tool: ModuleType) -> None:
    cells = [
        {"model": "a", "tokens": 1, "forward_us": 1.0, "torch_forward_us": 2.0, "compiled_forward_us": 1.5},
        {"model": "b", "tokens": 1, "forward_us": 1.0, "torch_forward_us": 8.0},
        {
            "model": "a",
            "tokens": 8192,
            "forward_us": 1.0,
            "torch_forward_us": 3.0,
            "step_us": 2.0,
            "torch_step_us": 3.0,
        },
    ]
    assert tool.summary(cells) == [
        "T=1     forward x torch 4.00 (lowest 2.00, a)   forward x torch.compile 1.50 (lowest 1.50, a)",
        "T=8192  forward x torch 3.00 (lowest 3.00, a)   forward + backward x torch 1.50 (lowest 1.50, a)",
    ]


def test_a_baseline_that_fails_or_is_wrong_is_reported_and_has_no_time(tool: ModuleType) -> None:
    cell: dict[str, Any] = {}
    want = torch.ones(3)
    assert tool.compared("compiled", lambda: want * 1.001, want, cell)
    assert cell == {}
    assert not tool.compared("compiled", lambda: want * 2, want, cell)
    assert cell == {"compiled_failed": "off by 1.0e+00"}

    def fails() -> torch.Tensor:
        raise RuntimeError("no")

    assert not tool.compared("other", fails, want, cell)
    assert cell["other_failed"] == "RuntimeError: no"


def test_a_report_says_where_it_is_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import provenance

    monkeypatch.setattr("sys.argv", ["benchmarks/run.py layer", "--out", "a b.json"])
    about = provenance.about()
    assert about["command"] == "python benchmarks/run.py layer --out 'a b.json'"
    assert re.fullmatch(r"[0-9a-f]{12}(\+changes)?", about["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", about["date"])
    assert about["torch"] == torch.__version__
    assert about["bundles"]
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    assert provenance.commit(tmp_path) is None
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Mon\n")
    assert provenance.driver(version) == "580.159.04"
    assert provenance.driver(tmp_path / "none") is None


def test_every_recorded_command_names_a_benchmark() -> None:
    names = set(
        re.findall(r'Benchmark\(\s*"\w+",\s*"(\w+)"', (ROOT / "benchmarks" / "run.py").read_text(encoding="utf-8"))
    )
    count = 0
    results = ROOT / "benchmarks" / "results"
    for path in (*results.glob("*.json"), *results.glob("*.json.xz")):
        if path.name.startswith("sweep-"):
            continue  # fits name the sha256 of these
        data = path.read_bytes()
        report = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)
        if isinstance(report, dict) and isinstance(report.get("command"), str):
            match = re.match(r"(?:python )?benchmarks/run\.py (\w+)\b", report["command"])
            assert match, f"{path.name}: {report['command']}"
            assert match[1] in names, path.name
            assert "/root/" not in report["command"], path.name
            count += 1
    assert count > 50


def test_a_tree_that_is_no_checkout_has_the_commit_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks import provenance

    monkeypatch.setenv("BENCHMARK_COMMIT", "0123456789ab")
    assert provenance.commit(tmp_path) == "0123456789ab"
    assert provenance.commit() != "0123456789ab"
