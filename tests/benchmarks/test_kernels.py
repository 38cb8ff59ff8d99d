"""benchmarks/speed/kernels.py times the same product by our call and torch's, in both layouts of w."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pretuned.artifacts.records import DType, Layout, Op, Problem

ROOT = Path(__file__).resolve().parents[2]
E, N, K = 3, 32, 16


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from benchmarks.speed import kernels

    return kernels


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize("op", ["forward", "dX", "dW"])
def test_both_calls_are_the_product(kernels: ModuleType, op: str, w_layout: str) -> None:
    method = kernels.method
    torch.manual_seed(1)
    m_sizes = torch.tensor([2, 0, 5], dtype=torch.int32)
    w = torch.randn(E, N, K, dtype=torch.bfloat16)
    w = w if w_layout == "nk" else w.view(E, K, N).transpose(1, 2)
    x, dy = (torch.randn(7, columns, dtype=torch.bfloat16) for columns in (K, N))
    inputs = method.Inputs(x, w, m_sizes, dy)
    ours, torchs = kernels.ours(op, inputs, w_layout), kernels.grouped_mm(op, inputs)
    got = ours().transpose(1, 2) if op == "dW" and w_layout == "kn" else ours()
    for result in (got, torchs()):
        assert result.shape == {"forward": (7, N), "dX": (7, K), "dW": (E, N, K)}[op]
        assert method.relative_error(result, inputs, op) < method.MAX_ERROR


def test_the_picture_is_read_on_any_page(kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn of an earlier run's cells; nothing but grey and the dots' colours, on nothing."""
    from matplotlib import pyplot

    recorded, out = ROOT / "benchmarks" / "results" / "kernels-h200.json", tmp_path / "drawn.png"
    monkeypatch.setattr(sys, "argv", ["kernels", "--of", str(recorded), "--plot", str(out)])
    kernels.main()
    pixels = pyplot.imread(out)
    assert pixels[0, 0, 3] == 0
    solid = pixels[pixels[..., 3] > 0.9][:, :3]
    assert solid.min(axis=1).max() < 0.8, "white"
    assert solid.max(axis=1).min() > 0.4, "black"
    monkeypatch.setattr(sys, "argv", ["kernels"])
    with pytest.raises(SystemExit):
        kernels.main()


def test_what_they_look_up(kernels: ModuleType) -> None:
    assert kernels.problem("forward", E, N, K, "kn") == Problem(Op.FORWARD, DType.BF16, E, N, K, Layout.KN)
    assert kernels.problem("dW", E, N, K, "kn") == Problem(Op.DW, DType.BF16, E, K, N)
    assert kernels.problem("dW", E, N, K, "nk") == Problem(Op.DW, DType.BF16, E, N, K)
