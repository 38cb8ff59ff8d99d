"""What preload would load; loading itself is tested on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made import ON_H200, OTHER, PROBLEM, WIDE, modelled, snapshot, write

from pretuned.artifacts.errors import HostError, InputError
from pretuned.artifacts.types import DType, Model
from pretuned.runtime import preload
from pretuned.runtime.warmup import buckets, problems_of

CHOICES = {PROBLEM: [modelled(64, WIDE)], OTHER: [modelled(64, WIDE)]}
MODELS = (
    Model("acme/large", 1, 1, 2, DType.BF16, (PROBLEM, OTHER)),
    Model("acme/large", 2, 1, 2, DType.BF16, (OTHER,)),
    Model("acme/small", 1, 1, 4, DType.BF16, (PROBLEM,)),
)


def test_a_model_is_all_its_shardings(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", CHOICES, models=MODELS)
    view = snapshot(tmp_path).view(ON_H200, installed=False)
    assert set(problems_of(["acme/large"], view)) == {PROBLEM, OTHER}
    assert problems_of(["acme/small"], view) == [PROBLEM]


def test_an_unknown_model_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", CHOICES, models=MODELS)
    view = snapshot(tmp_path).view(ON_H200, installed=False)
    with pytest.raises(InputError, match=r"'acme/smal' \(2 models are known\); did you mean acme/small"):
        problems_of(["acme/smal"], view)


@pytest.mark.parametrize(
    ("tokens", "most"), [(range(1, 2), 8), (range(1, 1025), 8192), (range(3, 4), 32), (range(5, 1, -1), 64)]
)
def test_the_buckets_of_a_range_of_tokens(tokens: range, most: int) -> None:
    got = buckets(PROBLEM, tokens)
    assert got == [1 << power for power in range(most.bit_length())]


def test_the_buckets_of_no_tokens_and_of_all() -> None:
    assert buckets(PROBLEM, range(0)) == []
    assert buckets(PROBLEM, None)[-1] == 1 << 20
    assert buckets(PROBLEM, range(1, 1 << 40))[-1] == 1 << 31


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu(clean_places: Path) -> None:
    with pytest.raises(HostError, match="no CUDA GPU here"):
        preload()
