"""The examples of docs/runtime/training.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "runtime" / "training.md"


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {"__name__": "example"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # our own page
    assert all(parameter.grad is not None for parameter in names["layer"].parameters())
    assert names["y"].shape == (200, 64)
    assert torch.isfinite(names["loss"])
