"""Every python block of the README and of the pages runs as it stands, without a GPU, in a process for each page."""

from __future__ import annotations

import json
import lzma
import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    str(page.relative_to(ROOT)) for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "```python\n" in page.read_text(encoding="utf-8")
)  # fmt: skip
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

    made = tmp_path_factory.mktemp("pages")
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(made / MODEL)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_the_python_of_a_page_runs(page: str, folder: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(folder / "cache")}
    done = warm.run(["-c", blocks(page)], cwd=folder, env=environment)
    assert done.returncode == 0, f"{page}:\n{done.stderr}"


def test_the_pages_are_those_that_have_python() -> None:
    assert "README.md" in PAGES
    assert set(PAGES) > ELSEWHERE


@pytest.mark.parametrize("folder", ["use", "runtime"])
def test_a_page_begins_with_whom_it_is_for(folder: str) -> None:
    for page in (ROOT / "docs" / folder).glob("*.md"):
        paragraph = page.read_text(encoding="utf-8").split("\n\n")[1]
        assert re.match(r"For (who|a reader)\b", paragraph), page.name


def test_the_readme_is_read_in_a_few_minutes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 600
    first = text.partition("## What runs where")[2].partition("\n## ")[0]
    assert re.search(r"measured.*modelled.*torch", first, re.DOTALL | re.IGNORECASE)


def by_tokens(cells: list[dict[str, Any]], ratio: Callable[[dict[str, Any]], float]) -> list[float]:
    """The geometric mean of ``ratio`` for each number of tokens, fewest first."""
    sizes = sorted({one["tokens"] for one in cells})
    return [statistics.geometric_mean(ratio(one) for one in cells if one["tokens"] == size) for size in sizes]


def beside(one: dict[str, Any]) -> float:
    """The fastest of the others' times over ours; where x was quantised beforehand for them, of codes for ours too."""
    ours = ("ours", "ours, of codes", "torch_grouped_mm", "dense_same_flops")
    return min(us for name, us in one["us"].items() if name not in ours) / one["us"].get(
        "ours, of codes", one["us"]["ours"]
    )


def test_the_readmes_costs_are_those_of_the_results() -> None:
    """Each figure of its last table, made anew of the cells."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it costs")[2].partition("\n## ")[0]
    results = ROOT / "benchmarks" / "results"

    def cells(name: str) -> list[dict[str, Any]]:
        data = (results / name).read_bytes()
        return json.loads(lzma.decompress(data) if name.endswith(".xz") else data)["cells"]

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (results / name).read_text(encoding="utf-8").splitlines()]

    every = cells("kernels-h200.json")
    plain = by_tokens(
        [one for one in every if one["op"] == "forward"], lambda one: one["torch_grouped_mm_us"] / one["us"]
    )
    assert f"forward {plain[0]:.2f} to {plain[-1]:.2f} x as fast at 1 to 8192 tokens" in text
    assert plain == sorted(plain, reverse=True)
    assert f"no cell of {len(every)} slower" in text
    assert all(one["us"] < one["torch_grouped_mm_us"] for one in every)
    every = cells("beside-vllm-h200.json.xz")
    ratios = [beside(one) for one in every]
    assert f"| {statistics.geometric_mean(ratios):.2f} x, none of {len(ratios)} behind by over 3 % |" in text
    assert min(ratios) > 1 / 1.03
    every = cells("layer-h200.json")
    layer = by_tokens(every, lambda one: one["torch_forward_us"] / one["forward_us"])
    trained = [one for one in every if "torch_step_us" in one]
    both = by_tokens(trained, lambda one: one["torch_step_us"] / one["step_us"])
    assert f"forward {min(layer):.2f} to {max(layer):.2f} x, with backward {both[0]:.2f}, {both[1]:.2f} x" in text
    assert f"{len({one['model'] for one in every})} models" in text
    coded = lines("quantised-peers-h100.jsonl") + lines("fp8-peers-h100.jsonl")
    for name, formats in (("mxfp4", "mxfp4"), ("int4", "int4_g128 int4_g32"), ("fp8 blocks of fp8 x", "fp8_block")):
        means = by_tokens([one for one in coded if one["format"] in formats.split()], beside)
        assert f"{name} {min(means):.2f} to {max(means):.2f}" in text


def test_ci_finds_the_readmes_test_command() -> None:
    pattern = re.search(r"grep -m1 -E '([^']+)' README.md", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert pattern
    found = re.search(pattern[1], (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f".ci/run looks for a line {pattern[1]} in README.md"
