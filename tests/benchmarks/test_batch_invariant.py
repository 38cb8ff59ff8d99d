"""The figures of the batch-invariant mode: what is timed, and how it is summed up. (Times are a GPU's.)"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.settings import Invariance


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import batch_invariant

    return batch_invariant


def test_calls_are_made_in_their_modes(tool: ModuleType) -> None:
    results = {}
    for format in ("bf16", "fp8_block"):
        for name, block in tool.modes(format).items():
            call = tool.within(block, lambda: torch.tensor(1.0 if snapshot().invariance is None else 2.0))
            results[format, name] = float(call())
    assert results == {
        ("bf16", "free"): 1.0,
        ("bf16", "mode"): 2.0,
        ("fp8_block", "free"): 1.0,
        ("fp8_block", "mode"): 2.0,
        ("fp8_block", "always"): 2.0,
    }
    with tool.modes("fp8_block")["always"]():
        assert snapshot().invariance == Invariance(quantize_x=True)


def test_every_model_has_sizes(tool: ModuleType) -> None:
    for format, models in tool.MODELS.items():
        for model in models:
            assert len(tool.sizes_of(format, model)) == 4


def test_a_summary(tool: ModuleType) -> None:
    def cell(format: str, T: int, **us: float) -> dict[str, object]:
        return {"format": format, "tokens": T, "us": us}

    rows = [
        cell("bf16", 1, free=10.0, mode=10.0, vllm=20.0),
        cell("bf16", 8192, free=100.0, mode=100.0, vllm=180.0),
        cell("mxfp4", 1, free=10.0, mode=12.1),
        cell("fp8_block", 1, free=10.0, mode=10.0, always=16.0, vllm=24.0),
    ]
    lines = tool.summary(rows)
    assert lines[0] == "bf16           mode   / free   mean 1.000, worst 1.00, over 1.10: 0 of 2"
    assert lines[1] == "mxfp4          mode   / free   mean 1.210, worst 1.21, over 1.10: 1 of 1"
    assert "fp8_block      always / free   mean 1.600, worst 1.60, over 1.10: 1 of 1" in lines
    assert "all but fp8    mode   / free   mean 1.066 (wanted at most 1.03)" in lines
    assert "bf16           vllm   / mode   T=8192  mean 1.80" in lines
    assert "fp8_block      vllm   / always T=1     mean 1.50" in lines
    assert "bf16           vllm   / mode   all T    mean 1.90" in lines
