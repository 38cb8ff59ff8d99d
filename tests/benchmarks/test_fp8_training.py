"""benchmarks/speed/fp8_training.py: its checks hold without a GPU, and notice what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.speed import fp8_training
from benchmarks.speed.fp8_training import MAX_LAYER, MAX_PRODUCT, check_products, measure_layer, measure_products
from pretuned.runtime.ops import fp8_products


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_training, "DEVICE", "cpu")

    def timed(calls: list[Callable[[], object]], rounds: int) -> list[float]:
        for call in calls:
            call()
        return [float(rounds)] * len(calls)

    host_us = fp8_training.host_us
    monkeypatch.setattr(fp8_training, "host_us", lambda step: host_us(step, steps=1, rounds=2))
    monkeypatch.setattr(fp8_training, "eager_us", timed)
    monkeypatch.setattr(fp8_training, "sustained_us", lambda steps: timed(steps, 1))
    monkeypatch.setattr(fp8_training, "most_mb", lambda step: float(len(step())))


@pytest.mark.slow
def test_products_are_those_of_quantised_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    for least in (0, fp8_products.LEAST):  # dW of codes, and of bf16
        monkeypatch.setattr(fp8_products, "LEAST", least)
        result = check_products(1, 512, 768)
        assert all(result[name] < MAX_PRODUCT for name in ("y", "dx", "dw"))
        assert (result["dw_beside_bf16"] > 10 * MAX_PRODUCT) == (not least)
    monkeypatch.setattr(fp8_training, "quantised", lambda w: w.detach().float())
    assert check_products(1, 512, 768)["y"] > 10 * MAX_PRODUCT


def test_a_layer_is_compared_with_bf16() -> None:
    cell = measure_layer("small", 4, 256, 128, 2, 64, 3)
    assert cell["same_bits"]
    assert cell["gain"] == cell["gain_kept"] == cell["gain_sustained"] == 1
    assert set(cell["apart"]) == {"out", "dhidden", "dgate_up", "ddown", "dweights"}
    assert all(0 < error < MAX_LAYER for error in cell["apart"].values())


def test_products_apart() -> None:
    def theirs(*operands: torch.Tensor) -> dict[str, Any]:
        return {"peer_dw": lambda: operands[0].no_such_thing}  # type: ignore[attr-defined]

    row = measure_products("small", 4, 256, 128, 2, 64, theirs)
    assert row["up_forward8_us"] == row["down_quantise_both_us"] == 9
    assert "no_such_thing" in row["up_peer_dw_failed"]


def test_gaps_between_kernels() -> None:
    def event(name: str, start: float, end: float) -> Any:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    idle = fp8_training.gaps([event("c", 30, 31), event("a", 0, 10), event("b", 5, 12), event("d", 32, 40)])
    assert idle == [(18, "b -> c"), (1, "c -> d")]
