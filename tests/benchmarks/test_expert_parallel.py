"""The expert-parallel benchmark: its calls are one layer, and its table says what was measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed import expert_parallel
from benchmarks.speed.expert_parallel import KINDS, RANKS, TOKENS, Kind
from pretuned.artifacts.records import DType


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_eighth_of_the_slots_is_there_and_is_the_compact_calls(kind: Kind, T: int) -> None:
    many, few = expert_parallel.ids_of(kind, T)
    assert many.shape == (T, kind.top_k)
    assert few.shape == (T // RANKS, kind.top_k)
    assert int((many >= 0).sum()) == few.numel() == T * kind.top_k // RANKS
    E = kind.E // RANKS
    assert int(few.min()) >= 0
    assert int(few.max()) < E
    assert torch.equal(many[many >= 0].bincount(minlength=E), few.flatten().bincount(minlength=E))
    assert all(len(set(row)) == kind.top_k for row in few.tolist())


@pytest.mark.parametrize("format", [None, DType.MXFP4, DType.FP8_BLOCK, DType.INT4_G32])
def test_the_calls_are_one_layer(format: DType | None) -> None:
    kind = Kind("small", 64, 128, 128, 4, format, "swiglu_oai", True)
    weights = expert_parallel.weights_of(kind, "cpu")
    assert all(len(weight.shape) < 3 or weight.shape[0] == 8 for weight in weights.values())
    calls = expert_parallel.calls_of(kind, weights, 16, "cpu")
    for call in (calls.hint, calls.none, calls.single):
        assert expert_parallel.difference(calls, call) < expert_parallel.MAX_DIFFERENCE
    assert calls.hint().shape == (16, 128)


def test_the_table_has_the_ratios_and_counts_the_slow_cells() -> None:
    cells = [
        {"model": "a", "tokens": 16, "hint_us": 1.0, "none_us": 1.5, "single_us": 1.1, "compact_us": 1.0},
        {"model": "a", "tokens": 128, "hint_us": 2.2, "none_us": 3.0, "single_us": 2.0, "compact_us": 2.0},
        {"model": "b", "tokens": 16, "hint_us": 4.12, "none_us": 4.0, "single_us": 4.4, "compact_us": 4.0},
    ]
    assert expert_parallel.table(cells) == [
        "| layer | x compact | 16 | 128 |",
        "|---|---|---|---|",
        "| a | hint | 1.00 | 1.10 |",
        "| a | none | 1.50 | 1.50 |",
        "| a | single | 1.10 | 1.00 |",
        "| b | hint | 1.03 |  |",
        "| b | none | 1.00 |  |",
        "| b | single | 1.10 |  |",
        "",
        "2 of 3 cells at most x 1.03 of the compact call",
    ]
