"""The examples run as they stand, on a machine without a GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WORDS = {"serve.py": ("--steps", "4"), "finetune.py": ("--steps", "20")}
ELSEWHERE = {"finetune_lora.py"}  # on a checkpoint of its own: runtime/test_finetuning_md.py


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each prints, by its name."""
    found = {}
    for name, words in WORDS.items():
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = warm.run([EXAMPLES / name, *words], cwd=tmp_path_factory.mktemp("here"), env=env)
        assert done.returncode == 0, f"{name}:\n{done.stderr}"
        found[name] = done.stdout
    return found


def test_every_example_is_run_and_listed() -> None:
    assert {one.name for one in EXAMPLES.glob("*.py")} == set(WORDS) | ELSEWHERE
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for one in EXAMPLES.rglob("*"):
        assert one.name == "README.md" or one.is_dir() or f"({one.relative_to(EXAMPLES)})" in page


def test_each_step_is_served_in_the_next_size(told: dict[str, str]) -> None:
    steps = re.findall(r"^(\d+) tokens in a step of (\d+): mean square ([\d.]+)$", told["serve.py"], re.MULTILINE)
    assert len(steps) == 4
    for tokens, size, square in steps:
        assert int(size) == min(one for one in (1, 8, 64) if one >= int(tokens))
        assert float(square) > 0


def test_the_layer_learns(told: dict[str, str]) -> None:
    losses = [float(one) for one in re.findall(r"loss ([\d.]+)", told["finetune.py"])]
    assert len(losses) == 20
    assert losses[-1] < 0.5 * losses[0]
