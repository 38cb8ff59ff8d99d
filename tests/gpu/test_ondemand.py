"""The last resort and tuning on demand on a real GPU, with real Triton. No bundle is needed, and none is used."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from installed import without_bundles

import pretuned.aot
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Fusion, Layout
from pretuned.kernels import reference
from pretuned.runtime import ExpertWeights, allow_jit, explain, grouped_gemm, reload
from pretuned.runtime.dispatch import compiled, snapshot
from pretuned.runtime.dispatch.decide import Origin
from pretuned.runtime.driver.device import device
from pretuned.runtime.launch.loader import loaded_count

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

E, H, WIDTH, K = 8, 512, 256, 2
SUPPORT = Path(__file__).parents[1] / "support"

# Every one asks for the same layer at once.
ASK = f"""
import sys, torch, pretuned.aot
from pretuned.aot.demand import api
sys.path.append({str(SUPPORT)!r})
from installed import without_bundles
sys.modules.update(without_bundles())
real = api._default._measure
def counted(*args):
    open(sys.argv[1], "a").write("tuned\\n")
    return real(*args)
api._default._measure = counted
configs = pretuned.aot.get_or_autotune_moe_kernels({E}, {H}, {WIDTH}, {K}, torch.bfloat16, seq_len=512)
print([(pair.op.value, str(pair.first.config), str(pair.second.config)) for pair in configs])
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No bundle anywhere, the shipped ones neither, and an empty home."""
    for name in ("PRETUNED_STRICT", "PRETUNED_DISABLE_AUTOTUNE", "PRETUNED_BUNDLES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, module in without_bundles().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(device(0), "kernels", {})  # nothing is loaded yet, whatever ran before
    snapshot.forget_made()
    compiled.forget()
    reload()
    assert snapshot.snapshot().files(installed=True) == (), "these tests need a machine without bundles"
    yield tmp_path
    allow_jit(False)
    monkeypatch.undo()
    snapshot.forget_made()
    compiled.forget()
    reload()


def layer(T: int = 512) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(T * K, H, device="cuda", generator=generator).bfloat16()
    w = (torch.randn(E, 2 * WIDTH, H, device="cuda", generator=generator) / H**0.5).bfloat16()
    sizes = torch.tensor([T * K // E] * E, dtype=torch.int32, device="cuda")
    return x, w, sizes


def error_of(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor) -> float:
    wanted = reference.forward(x.double(), w.double(), sizes)
    return float((y.double() - wanted).norm() / wanted.norm())


def test_the_jit_runs_through_the_same_launcher(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    x, w, sizes = layer()
    loaded = loaded_count()
    by_torch = grouped_gemm(x, w, sizes)
    assert loaded_count() == loaded
    allow_jit()
    y = torch.empty_like(by_torch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing is compiled here: torch runs
        grouped_gemm(x, w, sizes, out=y)
    assert loaded_count() == loaded
    y = grouped_gemm(x, w, sizes)
    assert loaded_count() == loaded + 1
    assert error_of(y, x, w, sizes) < 1e-2
    explanation = explain(x, w, sizes)
    assert explanation.chosen is not None
    assert explanation.chosen.origin is Origin.COMPILED
    assert "compiled now by Triton" in str(explanation)
    assert "compiling it now with Triton" in caplog.text
    odd = x[:, 1:], w[:, :, 1:]
    assert error_of(grouped_gemm(*odd, sizes), *odd, sizes) < 1e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped_gemm(x, w, sizes)
    graph.replay()
    assert error_of(y, x, w, sizes) < 1e-2


def test_a_layer_is_measured_once_by_processes_that_start_together(home: Path) -> None:
    log = home / "log"
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", ASK, str(log)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    outputs = [process.communicate(timeout=400) for process in asking]
    assert [process.returncode for process in asking] == [0] * 8, outputs[0][1]
    assert len({out for out, _ in outputs}) == 1
    assert log.read_text().splitlines() == ["tuned"]
    reload()
    begun = loaded_count()
    configs = pretuned.aot.get_or_autotune_moe_kernels(E, H, WIDTH, K, torch.bfloat16, seq_len=512)
    assert str([(pair.op.value, str(pair.first.config), str(pair.second.config)) for pair in configs]) == (
        outputs[0][0].strip()
    )
    assert all(half.config is not None for pair in configs for half in (pair.first, pair.second))
    assert configs[0].first.of(Fusion.GATHER) is not None
    forward, dX, dW = configs
    x, w, sizes = layer()
    x.requires_grad_()
    w.requires_grad_()
    y = grouped_gemm(x, w, sizes, kernel_config_fwd=forward, kernel_config_bwd_dX=dX, kernel_config_bwd_dW=dW)
    y.sum().backward()
    assert loaded_count() == begun + 3
    assert error_of(y.detach(), x.detach(), w.detach(), sizes) < 1e-2
    chosen = explain(x.detach(), w.detach(), sizes).chosen
    assert chosen is not None
    assert chosen.origin is Origin.THIS_GPU
    assert chosen.config == forward.first.config


def test_a_call_with_autotune_is_tuned_where_it_stands(home: Path) -> None:
    x, w, sizes = layer(64)
    x.requires_grad_()
    y = grouped_gemm(x, w, sizes, autotune=True)
    assert error_of(y.detach(), x.detach(), w.detach(), sizes) < 1e-2
    chosen = explain(x.detach(), w.detach(), sizes).chosen
    assert chosen is not None
    assert chosen.origin is Origin.THIS_GPU


def test_disabled_it_writes_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETUNED_DISABLE_AUTOTUNE", "1")
    reload()
    configs = pretuned.aot.get_or_autotune_moe_kernels(E, H, WIDTH, K, torch.bfloat16)
    assert all(pair.first.config is None for pair in configs)  # no bundle: torch is the ordinary choice
    x, w, sizes = layer()
    assert error_of(grouped_gemm(x, w, sizes, autotune=True), x, w, sizes) < 1e-2
    assert os.listdir(home) == []  # noqa: PTH208


def test_a_layer_of_quantised_weights_is_measured_and_its_pairs_go_with_them(home: Path) -> None:
    x, dense, sizes = layer()
    w = ExpertWeights.quantize(dense.cpu(), "mxfp4").to("cuda")
    with pytest.raises(InputError, match=r"pass w\.prepare"):
        pretuned.aot.get_or_autotune_moe_kernels(E, H, WIDTH, K, torch.bfloat16, seq_len=512, weights=w)
    w = w.prepare()
    forward, dX, _ = pretuned.aot.get_or_autotune_moe_kernels(E, H, WIDTH, K, torch.bfloat16, seq_len=512, weights=w)
    x.requires_grad_()
    y = grouped_gemm(x, w, sizes, kernel_config_fwd=forward, kernel_config_bwd_dX=dX)
    y.sum().backward()
    assert error_of(y.detach(), x.detach(), w.dequantize(torch.float32), sizes) < 1e-2
    chosen = explain(x.detach(), w, sizes).chosen
    assert chosen is not None
    assert chosen.origin is Origin.THIS_GPU
    assert chosen.config == forward.first.config


def test_autotune_measures_the_kernels_of_quantised_weights(home: Path) -> None:
    x, dense, sizes = layer()
    w = ExpertWeights.quantize(dense.cpu(), "mxfp4").to("cuda")
    values = w.dequantize(torch.float32)
    for _ in range(2):  # the second finds what the first has measured
        assert error_of(grouped_gemm(x, w, sizes, autotune=True), x, values, sizes) < 1e-2
    explanation = explain(x, w, sizes)
    assert explanation.chosen is not None
    assert explanation.chosen.origin is Origin.THIS_GPU
    assert (explanation.problem.layout, explanation.problem.dtype.value) == (Layout.STORED, "mxfp4")
