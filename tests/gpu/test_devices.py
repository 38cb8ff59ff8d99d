"""Two GPUs of one host: the current one is not always the tensors' own. PRETUNED_BUNDLES names a bundle for them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.kernels import reference
from pretuned.runtime import ExpertWeights, explain, grouped_gemm, moe_mlp, reload

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    pytest.mark.skipif(
        not os.environ.get("PRETUNED_BUNDLES"), reason="needs PRETUNED_BUNDLES to name bundles for these GPUs"
    ),
]

E, N, K, H, I, TOPK = 8, 1024, 768, 768, 512, 2  # noqa: E741
SIZES = (0, 5, 130, 1, 0, 64, 17, 300)


def inputs(device: int, *, seed: int = 1, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs with equal numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(SIZES), K, generator=generator).bfloat16()
    w = (torch.randn(E, N, K, generator=generator) / K**0.5).bfloat16()
    m_sizes = torch.tensor(SIZES, dtype=torch.int32)
    x, w, m_sizes = (tensor.to(f"cuda:{device}") for tensor in (x, w, m_sizes))
    return x.requires_grad_(grad), w.requires_grad_(grad), m_sizes


def results(device: int, times: int = 3) -> list[list[torch.Tensor]]:
    """Every way of calling, ``times`` times: plain, with out, with gradients, and a layer's."""
    x, w, m_sizes = inputs(device)
    out = torch.empty(x.shape[0], N, dtype=x.dtype, device=x.device)
    xg, wg, _ = inputs(device, grad=True)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, **how: Any) -> torch.Tensor:
        tensor = torch.randn(*shape, generator=generator).to(f"cuda:{device}", **how)
        return tensor.requires_grad_()

    hidden = random(100, H, dtype=torch.bfloat16)
    up, down = random(E, 2 * I, H, dtype=torch.bfloat16), random(E, H, I, dtype=torch.bfloat16)
    weights = random(100, TOPK)
    ids = torch.randint(0, E, (100, TOPK), generator=generator).to(f"cuda:{device}")
    rounds = []
    for _ in range(times):
        y = grouped_gemm(xg, wg, m_sizes)
        layer = moe_mlp(hidden, up, down, ids, weights)
        rounds.append(
            [
                grouped_gemm(x, w, m_sizes),
                grouped_gemm(x, w, m_sizes, out=out).clone(),
                y.detach(),
                *torch.autograd.grad(y, [xg, wg], torch.ones_like(y)),
                layer.detach(),
                *torch.autograd.grad(layer, [hidden, up, down, weights], torch.ones_like(layer)),
            ]
        )
    return rounds


def assert_all_equal(rounds: list[list[torch.Tensor]], wanted: list[torch.Tensor], device: int) -> None:
    for got in rounds:
        for tensor, other in zip(got, wanted, strict=True):
            assert tensor.device == torch.device("cuda", device)
            assert torch.equal(tensor.cpu(), other.cpu())


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("device", [0, 1])
def test_the_tensors_device_need_not_be_the_current_one(device: int, current: int) -> None:
    reload()
    with torch.cuda.device(device):
        wanted = results(device, 1)[0]
    x, w, m_sizes = inputs(device)
    assert explain(x, w, m_sizes).chosen is not None
    right = reference.forward(x.double(), w.double(), m_sizes)
    assert (wanted[0].double() - right).norm() < 1e-2 * right.norm()
    with torch.cuda.device(current):
        assert_all_equal(results(device), wanted, device)
        assert torch.cuda.current_device() == current


def test_one_device_after_the_other() -> None:
    reload()
    wanted = results(0, 1)[0]
    for _ in range(3):
        for device in (1, 0):
            assert_all_equal(results(device, 2), wanted, device)


def test_threads_on_both_devices() -> None:
    reload()
    wanted = results(0, 1)[0]
    torch.cuda.synchronize()
    failures: list[object] = []

    def work(device: int, current: int) -> None:
        try:
            torch.cuda.set_device(current)
            with torch.cuda.stream(torch.cuda.Stream(device)):
                torch.cuda.set_device(current)
                got = results(device, 10)
                torch.cuda.synchronize(device)
            assert_all_equal(got, wanted, device)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in ((0, 0), (1, 1), (0, 1), (1, 0)) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4"])
def test_weights_of_a_device_that_is_not_current(format: str) -> None:
    """They are written and read by kernels of their own device."""
    w = torch.randn(4, 256, 384, device="cuda:1").bfloat16()
    want = ExpertWeights.quantize(w.cpu(), format)
    weights = ExpertWeights.quantize(w, format)
    assert torch.equal(weights.codes.cpu().view(torch.uint8), want.codes.view(torch.uint8))
    ready = ExpertWeights.quantize(torch.zeros_like(w), format).prepare().copy_(weights)
    assert torch.equal(ready.copy_(w).restore().codes.cpu().view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(ready.dequantize().cpu(), want.dequantize())


def test_tensors_of_two_devices_are_refused() -> None:
    here, there = inputs(0), inputs(1)
    for _ in range(3):  # the short ways too
        grouped_gemm(*here)
        grouped_gemm(*there)
        for x, w, m_sizes, words in (
            (here[0], there[1], here[2], "w is on cuda:1, wanted x's device, cuda:0"),
            (here[0], here[1], there[2], "m_sizes is on cuda:1"),
            (there[0], here[1], here[2], "is on cuda:0, wanted x's device, cuda:1"),
        ):
            with pytest.raises(InputError, match=words):
                grouped_gemm(x, w, m_sizes)
            with pytest.raises(InputError, match=words):
                grouped_gemm(x.clone().requires_grad_(), w, m_sizes)
        out = torch.empty(here[0].shape[0], N, dtype=torch.bfloat16, device="cuda:1")
        with pytest.raises(InputError, match="on cuda:1, wanted x's"):
            grouped_gemm(*here, out=out)
        index = torch.arange(here[0].shape[0], device="cuda:1")
        with pytest.raises(InputError, match="gather_indices is on cuda:1"):
            grouped_gemm(*here, gather_indices=index, permute_x=True)
        with pytest.raises(InputError, match="bias is on cuda:1"):
            grouped_gemm(*here, bias=torch.zeros(E, N, dtype=torch.bfloat16, device="cuda:1"))


@pytest.mark.parametrize("when", ["never", "before", "call"])
def test_quantised_experts_under_fsdp2(tmp_path: Path, when: str) -> None:
    """Forward, gradient, state_dict and load_state_dict, as of the model that is not sharded."""
    pytest.importorskip("transformers", minversion="5.23")
    import sharded_experts

    sharded_experts.run_ranks(tmp_path / "store", when)
