"""Every python block of the README and of the pages runs as it stands, without a GPU, in a process for each page."""

from __future__ import annotations

import importlib
import json
import lzma
import os
import re
import runpy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "```python\n" in page.read_text(encoding="utf-8")
)
ELSEWHERE = {
    "docs/runtime/quantised.md",
    "docs/runtime/finetuning.md",
}  # on checkpoints of their own: runtime/test_*_md.py
MODEL = "Qwen/Qwen3-30B-A3B"  # the pages' example, found in the working directory: a small one


def blocks(page: str) -> str:
    """The page's python, one block after the other, at the lines where it stands."""
    kept, inside = [], False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            kept.append("")
        else:
            kept.append(line if inside else "")
    return "\n".join(kept)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a checkpoint of the pages' model, of random weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    place = tmp_path_factory.mktemp("pages")
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place / MODEL)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_the_python_of_a_page_runs(page: str, folder: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(folder / "cache")}
    done = warm.run(["-c", blocks(page)], cwd=folder, env=environment)
    assert done.returncode == 0, f"{page}:\n{done.stderr}"


def test_the_pages_are_those_that_have_python() -> None:
    assert "README.md" in PAGES
    assert set(PAGES) > ELSEWHERE


ARCHITECTURE = "docs/inside/architecture.md"  # drawings and tables
OTHERS = ("examples/README.md", "tests/README.md", "benchmarks/peers/README.md")
TEXTS = sorted(
    name
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in OTHERS))
    if (name := str(page.relative_to(ROOT))) != ARCHITECTURE
)


def sentences(text: str) -> list[str]:
    """The sentences of a page's prose: without code, tables, headings and addresses."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>|!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "Code", text)
    parts = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |#|\|))", text):
        if paragraph.strip() and not re.match(r"\s*[|#]|    ", paragraph):
            parts += re.split(r"(?<=[.!?:])\s+(?=[A-Z0-9*(]|[a-z]+\d)", " ".join(paragraph.split()))
    return [part for part in parts if part]


def test_sentences_are_found() -> None:
    page = "# Title\n\nOne two. Three [four](five.md#six) `a b`.\n\n```sh\nno\n```\n\n- item\n- x: more\n\n| a | b |\n"
    page += "\n    code\n"
    assert sentences(page) == ["One two.", "Three four Code.", "- item", "- x: more"]


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_is_written_in_short_sentences(page: str) -> None:
    lengths = {sentence: len(sentence.split()) for sentence in sentences((ROOT / page).read_text(encoding="utf-8"))}
    assert [sentence for sentence, words in lengths.items() if words > 35] == []
    assert statistics.mean(lengths.values()) <= 20


@pytest.mark.parametrize("page", [page for page in TEXTS if page != "README.md"])
def test_a_page_begins_with_what_its_reader_can_do(page: str) -> None:
    opening = (ROOT / page).read_text(encoding="utf-8").split("\n\n")[1]
    assert re.match(r"[A-Z]", opening), "a sentence, before any code, table or list"
    assert not re.match(r"For (who|a reader)\b", opening)
    assert re.search(r"\byou\b|\bRead this\b", opening)


def test_all_pages_together_are_read_in_an_afternoon() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").rglob("*.md")) <= 35_000


def test_the_readme_has_the_length_and_the_commands_of_one() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 700 <= len(text.split()) <= 900
    commands = re.findall(r"```sh\n(.*?)\n```", text, re.DOTALL)
    assert len(commands) == 2
    assert all(re.match(r"python3 -m venv [^\n]*pip install[^\n]*-e '", command) for command in commands)
    assert re.search(r"&& \.venv/bin/aot build [^\n]*$", commands[0]), "it ends with a built bundle"
    assert commands[1].endswith('-m pytest -q -m "not slow" -n 2')


def by_tokens(cells: list[dict[str, Any]], ratio: Callable[[dict[str, Any]], float]) -> list[float]:
    """The geometric mean of ``ratio`` for each number of tokens, fewest first."""
    sizes = sorted({cell["tokens"] for cell in cells})
    return [statistics.geometric_mean(ratio(cell) for cell in cells if cell["tokens"] == size) for size in sizes]


def beside(cell: dict[str, Any]) -> float:
    """The fastest of the others' times over ours; where x was quantised beforehand for them, of codes for ours too."""
    ours = ("ours", "ours, of codes", "torch_grouped_mm", "dense_same_flops")
    return min(us for name, us in cell["us"].items() if name not in ours) / cell["us"].get(
        "ours, of codes", cell["us"]["ours"]
    )


def test_the_readmes_speed_is_that_of_the_results() -> None:
    """Each figure of the table, computed anew from the recorded cells."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Speed")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    results = ROOT / "benchmarks" / "results"

    def cells(name: str) -> list[dict[str, Any]]:
        data = (results / name).read_bytes()
        return json.loads(lzma.decompress(data) if name.endswith(".xz") else data)["cells"]

    def figure(of: list[dict[str, Any]], ratio: Callable[[dict[str, Any]], float]) -> str:
        means = by_tokens(of, ratio)
        return f"{min(means):.2f}x to {max(means):.2f}x, lowest {min(map(ratio, of)):.2f}x"

    wanted: list[tuple[str, str]] = []
    kernels = {gpu: cells(f"kernels-{gpu}.json") for gpu in ("h200", "h100")}

    def plain(cell: dict[str, Any]) -> float:
        return cell["torch_grouped_mm_us"] / cell["us"]

    forward = {gpu: [row for row in rows if row["op"] == "forward"] for gpu, rows in kernels.items()}
    wanted.append(tuple(figure(forward[gpu], plain) for gpu in kernels))
    wanted.append(tuple(f"{statistics.geometric_mean(map(plain, rows)):.2f}x" for rows in kernels.values()))
    assert {len(rows) for rows in kernels.values()} == {108}
    for step in ("forward", "step"):
        both = []
        for gpu in kernels:
            timed = [cell for cell in cells(f"layer-{gpu}.json") if f"torch_{step}_us" in cell]
            both.append(figure(timed, lambda cell: cell[f"torch_{step}_us"] / cell[f"{step}_us"]))  # noqa: B023
        wanted.append((both[0], both[1]))
    ratios = [beside(cell) for cell in cells("beside-vllm-h200.json.xz")]
    wanted.append((f"{statistics.geometric_mean(ratios):.2f}x, lowest {min(ratios):.2f}x", "not measured"))
    coded = [
        json.loads(line)
        for name in ("quantised-peers-h100.jsonl", "fp8-peers-h100.jsonl")
        for line in (results / name).read_text(encoding="utf-8").splitlines()
    ]
    for formats, public in (("mxfp4", False), ("int4_g128 int4_g32", False), ("fp8_block", False), ("fp8_block", True)):
        timed = [cell for cell in coded if cell["format"] in formats.split()]
        if public:
            timed = [
                cell | {"us": {name: us for name, us in cell["us"].items() if name != "ours, of codes"}}
                for cell in timed
            ]
        wanted.append(("not measured", figure(timed, beside)))
    assert [(h200, h100) for _, h200, h100, _ in rows[1:] if h200 != "---"] == wanted


def tool(module: str) -> Any:
    """A module of benchmarks."""
    runpy.run_path(str(ROOT / "benchmarks" / "run.py"))["package"]()
    return importlib.import_module(f"benchmarks.{module}")


def test_the_readmes_bullets_are_those_of_the_results() -> None:
    """Cold start, the layers inside vLLM, and the step with LoRA."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").partition("## Quick start")[0].split())
    results = ROOT / "benchmarks" / "results"
    cold = sorted(results.glob("cold-start-*.json"))
    if cold:
        bullet = tool("start.cold_start").bullet(json.loads(cold[0].read_text(encoding="utf-8")))
        assert " ".join(bullet.split()) in text
    else:
        first = json.loads(lzma.decompress((results / "first-result-h100.json.xz").read_bytes()))
        parts = first["installed"]["2e4f14a2"]
        imported, called = parts["pretuned_import_ms"], parts["first_result_ms"]
        assert f"needs {imported + called:.0f} ms to its first result" in text
        assert f"{imported:.0f} ms of import, {called:.0f} ms of a first call" in text
    own = {"bf16": "triton", "fp8": "triton", "mxfp4": "triton", "int4": "marlin"}
    layers = json.loads((results / "layers-in-vllm-h200.json").read_text())["cells"]
    ratios = [layer["us"][own[layer["kind"]]] / layer["us"]["auto"] for layer in layers]
    assert f"{min(ratios):.2f}x to {max(ratios):.2f}x as fast as with vLLM's own kernel" in text
    (block,) = [
        cell["ms"]
        for cell in json.loads((results / "lora-qwen3-30b-h100.json").read_text())["cells"]
        if cell["T"] == 8192
    ]
    assert f"{block['ours']:.2f} ms a step, against {block['whole']:.2f} ms as PEFT does it" in text


def test_the_pictures_are_drawn_from_todays_results() -> None:
    draw = runpy.run_path(str(ROOT / "docs" / "pictures" / "draw.py"))
    files = dict(draw["drawn"]())
    assert set(files) == set((ROOT / "docs" / "pictures").glob("*.svg"))
    stale = [path.name for path, text in files.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run python docs/pictures/draw.py"


def test_ci_finds_the_readmes_test_command() -> None:
    pattern = re.search(r"grep -m1 -E '([^']+)' README.md", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert pattern
    match = re.search(pattern[1], (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert match, f".ci/run looks for a line {pattern[1]} in README.md"
