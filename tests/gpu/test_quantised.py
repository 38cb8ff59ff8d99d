"""Calls with ExpertWeights on a real GPU, against the reference on the CPU. Needs no bundle."""

from __future__ import annotations

import pytest
import torch

from pretuned.artifacts.records.precision import PRECISIONS
from pretuned.runtime import ExpertWeights, grouped_gemm, moe_mlp, reload, sort_routing
from pretuned.runtime.driver import descriptors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

FORMATS = [name for name, one in PRECISIONS.items() if one.quantised]
E, T, TOPK, H, I = 8, 70, 3, 512, 384  # noqa: E741


def off(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.cpu().double() - want.double()).norm() / want.double().norm())


def limit(format: str) -> float:
    """Kernels leave an x that the reference quantises to e4m3, and are nearer to the truth by that much."""
    return 6e-2 if PRECISIONS[format].math == "fp8" else 8e-3


@pytest.mark.parametrize("format", FORMATS)
def test_it_dequantises_to_the_same_bits_as_on_the_cpu(format: str) -> None:
    w = ExpertWeights.quantize(torch.randn(E, 2 * I, H), format)
    there = w.to("cuda")
    assert there.device.type == "cuda"
    assert torch.equal(there.dequantize().cpu(), w.dequantize())
    again = ExpertWeights.quantize(w.dequantize(torch.float32).cuda(), format)
    assert off(again.dequantize(torch.float32), w.dequantize(torch.float32)) < 1e-2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_product_and_its_gradient(format: str, fused: bool) -> None:
    w = ExpertWeights.quantize(torch.randn(E, I, H) / H**0.5, format)
    index, m_sizes, *_ = sort_routing(torch.randint(-1, E - 1, (T, TOPK)), E)
    x, weights = torch.randn(T if fused else T * TOPK, H).bfloat16(), torch.rand(T, TOPK)
    bias, dy = torch.randn(E, I).bfloat16(), torch.randn(T * TOPK, I).bfloat16()

    def call(device: str) -> list[torch.Tensor]:
        given = x.to(device).requires_grad_()
        how = {
            "topk": TOPK, "gather_indices": index.to(device), "permute_x": True, "permute_y": True,
            "topk_weights": weights.to(device), "fuse_mul_post": True, "bias": bias.to(device),
        } if fused else {"zero_tail": True}  # fmt: skip
        y = grouped_gemm(given, w.to(device), m_sizes.to(device), **how)
        return [y.detach(), *torch.autograd.grad(y, given, dy.to(device))]

    for found, want in zip(call("cuda"), call("cpu"), strict=True):
        assert off(found, want) < limit(format)  # (torch's product is rounded before the bias is added, and weighted)


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer(format: str) -> None:
    up, down = (ExpertWeights.quantize(torch.randn(E, N, K) / K**0.5, format) for N, K in ((2 * I, H), (H, I)))
    given = torch.randn(T, H).bfloat16(), torch.randint(-1, E, (T, TOPK)), torch.rand(T, TOPK)

    def call(device: str) -> torch.Tensor:
        hidden, ids, weights = (one.to(device) for one in given)
        return moe_mlp(hidden, up.to(device), down.to(device), ids, weights, "swiglu_oai", interleaved=True)

    assert off(call("cuda"), call("cpu")) < limit(format)


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_of_one_token_reads_its_row_where_it_lies(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of rows that a pass gathers, also by a plan and for a slot of no expert."""
    up, down = (ExpertWeights.quantize(torch.randn(E, N, K) / K**0.5, format) for N, K in ((2 * I, H), (H, I)))
    up, down = up.to("cuda").prepare(), down.to("cuda").prepare()
    hidden, weights = torch.randn(1, H, device="cuda").bfloat16(), torch.rand(1, TOPK, device="cuda")
    assert descriptors.repeats_rows(0)
    for ids in (torch.tensor([[2, 7, 0]], device="cuda"), torch.tensor([[-1, 7, 0]], device="cuda")):
        found = []
        for repeats in (True, False):
            monkeypatch.setattr(descriptors, "repeats_rows", lambda _device, repeats=repeats: repeats)
            reload()
            found += [moe_mlp(hidden, up, down, ids, weights) for _ in range(3)]
        assert all(torch.equal(one, found[0]) for one in found)
    reload()
