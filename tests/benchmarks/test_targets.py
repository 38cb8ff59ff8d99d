"""Goals of quantised products: the page's table equals the files, and each time is compared with its bounds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import warm

ROOT = Path(__file__).parents[2]
RUNS = """
import runpy, sys
runpy.run_path("benchmarks/run.py")["package"]()
import torch
from benchmarks.peers import floors, stream
from benchmarks.peers.products import Cell, Product
from pretuned.aot.measure.clock import HostClock

source, target = torch.arange(10_000, dtype=torch.int32), torch.full((12_000,), 7, dtype=torch.int32)
stream.stream[(3,)](source * 0, target, 10_000, 9_000, BLOCK=4096, num_warps=8)
assert not target[:9_000].any() and (target[9_000:] == 7).all()
stream.stream[(3,)](source, target, 10_000, 0, BLOCK=4096, num_warps=8)
assert target[0] != 0  # what it has read is not zero
cell = Cell(Product("fp8_block", "qwen3-30b", "down", 4, 128, 256, 256, 2, "cpu"), 3)
print(floors.json.dumps(floors.measured(cell, floors.calls_of(cell, None, 1), HostClock())))
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import targets

    return targets


def cell(tool: ModuleType, us: float, best_us: float, moved: int, tokens: int = 1, kind: str = "mxfp4") -> Any:
    return tool.Cell(kind, "m", "down", tokens, us, best_us, moved, 2e6)


def test_the_bound_is_of_the_fastest_reader_and_the_least_beside(tool: ModuleType) -> None:
    cells = [
        cell(tool, 10.0, 20.0, 3_000),  # 300 bytes a us would be the highest rate, but for
        cell(tool, 50.0, 40.0, 40_000, 128, "fp8_block"),
        cell(tool, 12.0, 8.0, 2_000),
        cell(tool, 1.0, 1.0, 9_000, 1024),  # more tokens than memory bounds
    ]
    limits = tool.Limits(cells)
    assert limits.rate == 1_000.0
    column = limits.column("mxfp4", 1)
    assert column == [cells[0], cells[2]]
    assert limits.beside_us(column) == pytest.approx(6.0)  # of the other library's 8
    assert [limits.bound_us(column)(cell) for cell in column] == pytest.approx([9.0, 8.0])


def test_bytes_are_those_of_the_experts_that_have_rows(tool: ModuleType) -> None:
    E, N, K = 128, 1536, 2048
    read, written = tool.bytes_of("mxfp4", (E, N, K), 1, 8)
    assert read == 8 * (N * K // 2 + N * K // 32) + 8 * K * 2
    assert written == 8 * N * 2
    read, _ = tool.bytes_of("fp8_block", (E, N, K), 1, 8)
    assert read == 8 * (N * K + N * K // 128 // 128 * 4) + 8 * (K + K // 32)


@pytest.mark.slow
def test_what_stands_beside_ours_runs(tool: ModuleType, tmp_path: Path) -> None:
    """Under Triton's interpreter, on the CPU; and its table."""
    done = warm.run(["-c", RUNS], cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result["us"]) == ["ours", *(f"read {count}" for count in (1, 2, 4, 8)), "nothing", "dense"]
    assert not result["failed"]
    from benchmarks.peers import floors

    result |= {"tokens": 16, "us": {"ours": 20.0, "read 1": 12.0, "read 8": 10.0, "nothing": 3.0, "dense": 5.0}}
    (tmp_path / "floors.jsonl").write_text(json.dumps(result) + "\n")
    assert floors.main(["--table", str(tmp_path / "floors.jsonl")]) == 0
    assert floors.table([result])[2:] == ["| fp8 blocks, 16 | 0.50 | 3.0 | 0.25 |"]
