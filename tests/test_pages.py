"""Every python block of the README and of the pages runs as it stands, without a GPU, in a process for each page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    done = subprocess.run(
        [sys.executable, "-c", blocks(page)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
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


def test_ci_finds_the_readmes_test_command() -> None:
    pattern = re.search(r"grep -m1 -E '([^']+)' README.md", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert pattern
    found = re.search(pattern[1], (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f".ci/run looks for a line {pattern[1]} in README.md"
