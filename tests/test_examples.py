"""The examples run as they stand, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WORDS = {"serve.py": ("--steps", "4"), "finetune.py": ("--steps", "20"), "refit.py": ("--steps", "12")}
ELSEWHERE = {"finetune_lora.py"}  # on a checkpoint of its own: runtime/test_finetuning_md.py


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the output of each example, by its name."""
    results = {}
    for name, words in WORDS.items():
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = warm.run([EXAMPLES / name, *words], cwd=tmp_path_factory.mktemp("here"), env=env)
        assert done.returncode == 0, f"{name}:\n{done.stderr}"
        results[name] = done.stdout
    return results


def test_every_example_is_run_and_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(WORDS) | ELSEWHERE
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.rglob("*"):
        assert path.name == "README.md" or path.is_dir() or f"({path.relative_to(EXAMPLES)})" in page


def test_the_notebook_runs_without_a_gpu(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "cpu.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert not any(cell.get("outputs") for cell in cells)
    done = warm.run(["-c", code], cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert "E=128 N=1536 K=2048 M=8192" in done.stdout


def test_a_deployment_has_probes_and_checks_before_it_starts() -> None:
    yaml = pytest.importorskip("yaml")
    pod = yaml.safe_load((EXAMPLES / "container" / "deployment.yaml").read_text(encoding="utf-8"))["spec"]["template"]
    (check,), (serve,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert check["command"] == ["python3", "-m", "pretuned.runtime", "--vllm"]
    assert check["image"] == serve["image"]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(serve)


def test_each_step_is_served_in_the_next_size(outputs: dict[str, str]) -> None:
    steps = re.findall(r"^(\d+) tokens in a step of (\d+): mean square ([\d.]+)$", outputs["serve.py"], re.MULTILINE)
    assert len(steps) == 4
    for tokens, size, square in steps:
        assert int(size) == min(bucket for bucket in (1, 8, 64) if bucket >= int(tokens))
        assert float(square) > 0


def test_the_twin_follows_the_layer(outputs: dict[str, str]) -> None:
    """It is of the weights after the step, and so ahead of the loss before it."""
    pairs = re.findall(r"loss ([\d.]+), of the fp8_block twin ([\d.]+)", outputs["refit.py"])
    losses, twins = ([float(pair[at]) for pair in pairs] for at in (0, 1))
    assert len(losses) == 12
    assert twins[-1] < 0.7 * losses[0]
    assert all(abs(twin - after) < 0.1 * after for twin, after in zip(twins, losses[1:], strict=False))


def test_the_layer_learns(outputs: dict[str, str]) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", outputs["finetune.py"])]
    assert len(losses) == 20
    assert losses[-1] < 0.5 * losses[0]
