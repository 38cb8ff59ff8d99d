"""The launches of row kernels that ``quantised_layer`` times by themselves."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from benchmarks import method
from benchmarks.speed import quantised_layer
from pretuned.artifacts.records.problem import RowOp
from pretuned.kernels import rowops
from pretuned.runtime.launch import rowops as launch_rowops


def test_each_row_kernel_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[RowOp] = []

    def launch(op: RowOp, rows: int, stream: int, words: dict[str, int]) -> None:
        assert words.keys() == dict(rowops.arguments(op)).keys()
        launched.append(op)

    monkeypatch.setattr(launch_rowops, "launcher", lambda op, *_, **__: functools.partial(launch, op))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(method, "activations", lambda *sizes: torch.zeros(sizes[:2], dtype=torch.bfloat16))
    for call in quantised_layer.passes(9, 256, "cpu")[0]:
        call()
    one, two = RowOp.ACTIVATION_CODES, [RowOp.ACTIVATION, RowOp.QUANTIZE]
    assert launched == [one, *two, *two]
