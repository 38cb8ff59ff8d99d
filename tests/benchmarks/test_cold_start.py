"""First calls with empty and warm caches: what counts, who takes turns, and what a page says of it."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.start import cold_start

    return cold_start


@pytest.fixture(scope="module")
def libraries() -> ModuleType:
    from benchmarks.start import cold_libraries

    return cold_libraries


@pytest.mark.slow  # a process that imports torch
def test_ready_inputs_import_nothing_of_pretuned() -> None:
    """Its import is in its time."""
    code = (
        f"import runpy, sys; runpy.run_path({str(RUN)!r})['package']()\n"
        "from benchmarks.start import cold_start as tool, cold_libraries\n"
        "for name in ('pretuned_bf16', 'pretuned_fp8', 'torch'):\n"
        "    one = cold_libraries.LIBRARIES[name](None); one.set_up()\n"
        "    tool.work(one, [1, 4], tool.TINY, 'cpu')\n"
        "print([one for one in sys.modules if one.partition('.')[0] in tool.COMPILERS])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["pretuned_bf16", "pretuned_fp8", "pretuned_mxfp4", "torch"])
def test_steps_are_timed_and_each_call_is_tested(tool: ModuleType, libraries: ModuleType, name: str) -> None:
    library = libraries.LIBRARIES[name](None)
    times = tool.steps(library, tool.work(library, [1, 16], tool.TINY, "cpu"), lambda: None)
    assert len(times["calls_s"]) == len(times["errors"]) == 4
    assert times["seconds"] == pytest.approx(times["import_s"] + times["compile_s"] + sum(times["calls_s"]), abs=1e-4)
    assert not times["wrong"]


def test_a_wrong_result_is_reported(tool: ModuleType, libraries: ModuleType) -> None:
    class Wrong(libraries.LIBRARIES["torch"]):  # type: ignore[misc]
        def arrange(self, weights: Any, cell: Any) -> Any:
            return lambda: torch.zeros(cell.M, cell.N)

    library = Wrong(None)
    assert tool.steps(library, tool.work(library, [2], tool.TINY, "cpu"), lambda: None)["wrong"]


def test_what_a_library_compiles_at_once_counts(
    tool: ModuleType, libraries: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    class Slow(libraries.LIBRARIES["torch"]):  # type: ignore[misc]
        def load(self) -> None:
            now[0] += 1

        def prepare(self, product: Any) -> Any:
            now[0] += 10
            return super().prepare(product)

        def arrange(self, weights: Any, cell: Any) -> Any:
            now[0] += 100
            return super().arrange(weights, cell)

        def compile(self, weights: Any, cells: Any) -> None:
            now[0] += 1000

    monkeypatch.setattr(tool.time, "perf_counter", lambda: now[0])
    library = Slow(None)
    times = tool.steps(library, tool.work(library, [2], tool.TINY, "cpu"), lambda: None)
    assert (times["seconds"], times["prepare_s"]) == (1001, 20)


def measured(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str, takes: float = 1.0, fails: str = ""
) -> tuple[dict[str, Any], list[tuple[str, Path]]]:
    """A report, and each process: its library, and the folder of its caches."""
    now, ran = [0.0], []

    def one_process(options: Any, name: str, caches: Path, seconds: float) -> dict[str, Any]:
        now[0] += takes
        ran.append((name, caches))
        if name == fails:
            return {"failed": "OSError: no kernel image", "process_s": takes}
        return {"seconds": 2.0 if len(ran) % 2 else 1.0, "prepare_s": 0.5, "wrong": False, "process_s": takes}

    monkeypatch.setattr(tool, "one_process", one_process)
    monkeypatch.setattr(tool.time, "monotonic", lambda: now[0])
    options = tool.arguments(["--json", str(tmp_path / "c.json"), *words])
    return tool.measure(options, {"gpu": "NVIDIA H100 80GB HBM3"}), ran


def test_each_library_has_empty_caches_and_then_the_same_ones(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--libraries", "pretuned_bf16,torch", "--rounds", "2")
    report, ran = measured(tool, monkeypatch, tmp_path, *words)
    assert [name for name, _ in ran] == ["pretuned_bf16"] * 2 + ["torch"] * 4 + ["pretuned_bf16"] * 2
    folders = [folder for _, folder in ran]
    assert folders[::2] == folders[1::2]
    assert len(set(folders)) == 4
    assert json.loads((tmp_path / "c.json").read_text()) == report
    row = report["rows"]["torch"]
    assert (tool.median(row, "empty"), tool.median(row, "warm")) == (2.0, 1.0)


def test_no_library_begins_that_would_not_end(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--libraries", "pretuned_bf16,torch", "--rounds", "9", "--seconds", "300")
    report, ran = measured(tool, monkeypatch, tmp_path, *words, takes=50.0)
    assert len(ran) == 4  # 100 s each; a third would end at 300 s, with slack later
    assert all(len(row["empty"]) == len(row["warm"]) == 1 for row in report["rows"].values())


def test_a_library_that_cannot_run_has_the_reason(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--libraries", "torch,marlin,pretuned_bf16", "--rounds", "2")
    report, ran = measured(tool, monkeypatch, tmp_path, *words, fails="torch")
    assert [name for name, _ in ran].count("torch") == 1
    lines = tool.table(report)
    assert "not measured: OSError: no kernel image" in lines[0]
    assert "not measured: no --vllm" in lines[2]  # by weights, then as asked for
    assert lines[1] == "| bf16, Qwen3-30B-A3B | pretuned | 1.00 | 2.00 | 0.50 | 0.50 | 2 |"


def test_a_process_has_folders_of_its_own(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    def child(words: list[str], seconds: float, environ: dict[str, str]) -> str:
        seen.update(environ)
        return "it ended"

    monkeypatch.setattr(tool, "child", child)
    options = tool.arguments(["--json", "c.json"])
    assert tool.one_process(options, "torch", tmp_path / "a", 9.0)["failed"] == "it ended"
    for variable in ("HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "DG_JIT_CACHE_DIR", "HUMMING_CACHE_DIR"):
        assert Path(seen[variable]).parent == tmp_path / "a"
        assert not any(Path(seen[variable]).iterdir())
    assert seen["PATH"] == os.environ["PATH"]


REPORT = {
    "gpu": "NVIDIA H100 80GB HBM3",
    "rows": {
        name: {
            "library": library,
            "format": "bf16",
            "model": "Qwen3-30B-A3B",
            "empty": [{"seconds": empty, "prepare_s": 0.0, "wrong": False}],
            "warm": [{"seconds": empty / 4, "prepare_s": 0.0, "wrong": False}],
        }
        for name, library, empty in (
            ("pretuned_bf16", "pretuned", 0.254),
            ("pretuned_fp8", "pretuned", 0.484),
            ("torch", "torch grouped_mm", 0.0181),
            ("vllm_bf16", "vLLM", 3.51),
            ("deepgemm", "DeepGEMM", 19.44),
        )
    },
}


def test_it_is_written_into_the_pages(tool: ModuleType, tmp_path: Path) -> None:
    pages = readme, page, start = tuple(tmp_path / name for name in ("README.md", "page.md", "start.md"))
    page.write_text(f"text\n\n{tool.PLACE}\n\nmore\n")
    start.write_text(f"## Start\n\n{tool.START}\n\n- more\n")
    readme.write_text("# p\n\n- **Cold start.** stale\n  stale\n- **Speed.** fast\n\n![layers](l.svg)\n")
    few = REPORT | {"rows": dict(list(REPORT["rows"].items())[:4])}
    for report in (few, REPORT):  # the second in place of the first
        tool.write(report, "c.json", pages)
    text = page.read_text()
    assert "| bf16, Qwen3-30B-A3B | torch grouped_mm | 0.018 | 0.005 | 0 | 0 | 1 |" in text
    assert text.count("| torch grouped_mm |") == text.count(tool.HEAD) == text.count("On an H100 ([result]") == 1
    assert text.endswith("\n\nmore\n")
    assert start.read_text().count("(../pictures/cold-start.svg)\n\n- more") == 1
    text = " ".join(readme.read_text().split())
    assert "finishes its first ten GEMMs 0.25 to 0.48 s after torch and CUDA are up." in text
    assert "Libraries that compile need 3.51 to 19.4 s (H100," in text
    assert "stale" not in text
    assert readme.read_text().endswith(f"\n- **Speed.** fast\n\n{tool.PICTURE}\n\n![layers](l.svg)\n")
    assert max(len(line) for line in readme.read_text().splitlines()) <= 120


def test_what_is_asked_for(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in (
        (["--json", "c", "--libraries", "cutlass"], "'cutlass' is none of"),
        ([], "--json is needed"),
        (["--json", "c", "--vllm", "."], "no folder vllm"),
    ):
        with pytest.raises(SystemExit):
            tool.arguments(wrong)
        assert message in capsys.readouterr().err


def test_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = runpy.run_path(str(RUN.parents[1] / "docs" / "pictures" / "draw.py"))
    monkeypatch.setitem(draw["cold"].__globals__, "COLD", [Path(__file__).name])
    monkeypatch.setitem(draw["cold"].__globals__, "RESULTS", Path(__file__).parent)
    monkeypatch.setitem(draw["cold"].__globals__, "read", lambda name: REPORT)
    svg = draw["cold"]().svg()
    assert all(f">{seconds} s<" in svg for seconds in ("0.25", "0.018", "3.51", "19.4", "4.86"))
    assert svg.count('class="ours"') == 4
