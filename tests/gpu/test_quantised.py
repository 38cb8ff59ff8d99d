"""Calls with ExpertWeights on a real GPU, against the reference on the CPU. Needs no bundle."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pretuned.artifacts.records import PRECISIONS
from pretuned.runtime import ExpertWeights, activate, grouped_gemm, moe_mlp, reload, sort_routing
from pretuned.runtime.api.layer_plan import LayerPlan
from pretuned.runtime.dispatch.snapshot import snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

FORMATS = [name for name, precision in PRECISIONS.items() if precision.quantised]
E, T, TOPK, H, I = 8, 70, 3, 512, 384  # noqa: E741


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.cpu().double() - want.double()).norm() / want.double().norm())


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
        leaf = x.to(device).requires_grad_()
        how = (
            {
                "topk": TOPK,
                "gather_indices": index.to(device),
                "permute_x": True,
                "permute_y": True,
                "topk_weights": weights.to(device),
                "fuse_mul_post": True,
                "bias": bias.to(device),
            }
            if fused
            else {"zero_tail": True}
        )
        y = grouped_gemm(leaf, w.to(device), m_sizes.to(device), **how)
        return [y.detach(), *torch.autograd.grad(y, leaf, dy.to(device))]

    for got, want in zip(call("cuda"), call("cpu"), strict=True):
        assert off(got, want) < limit(format)  # (torch's product is rounded before the bias is added, and weighted)


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer(format: str) -> None:
    up, down = (ExpertWeights.quantize(torch.randn(E, N, K) / K**0.5, format) for N, K in ((2 * I, H), (H, I)))
    inputs = torch.randn(T, H).bfloat16(), torch.randint(-1, E, (T, TOPK)), torch.rand(T, TOPK)

    def call(device: str) -> torch.Tensor:
        hidden, ids, weights = (tensor.to(device) for tensor in inputs)
        return moe_mlp(hidden, up.to(device), down.to(device), ids, weights, "swiglu_oai", interleaved=True)

    assert off(call("cuda"), call("cpu")) < limit(format)


@pytest.mark.parametrize("format", FORMATS)
def test_one_token_s_row_is_read_where_it_lies(format: str) -> None:
    """The bits are those of rows in memory, also by a plan and for a slot of no expert; no row kernel gathers."""
    up, down = (ExpertWeights.quantize(torch.randn(E, N, K) / K**0.5, format) for N, K in ((2 * I, H), (H, I)))
    up, down = up.to("cuda").prepare(), down.to("cuda").prepare()
    hidden, weights = torch.randn(1, H, device="cuda").bfloat16(), torch.rand(1, TOPK, device="cuda")
    rows = hidden.repeat(TOPK, 1)
    for ids in (torch.tensor([[2, 7, 0]], device="cuda"), torch.tensor([[-1, 7, 0]], device="cuda")):
        reload()
        index, m_sizes, *_ = sort_routing(ids, E)
        used = int((ids >= 0).sum())
        want = grouped_gemm(rows, up, m_sizes)[:used]
        for _ in range(3):
            y = grouped_gemm(hidden, up, m_sizes, topk=TOPK, gather_indices=index, permute_x=True)
            assert torch.equal(y[:used], want)
        a = activate(grouped_gemm(rows, up, m_sizes))
        each = grouped_gemm(a, down, m_sizes)[:used].double()
        sums = (each * weights.flatten()[index[:used]][:, None]).sum(0)
        results = [moe_mlp(hidden, up, down, ids, weights) for _ in range(3)]
        assert all(torch.equal(result, results[0]) for result in results)
        assert off(results[0][0], sums.cpu()) < limit(format)
        layers = [plan for plan in snapshot().plans.values() if isinstance(plan, LayerPlan)]
        steps = [step.name for plan in layers for program in plan.programs.values() for step in program.steps]
        assert steps
        assert not any(name.startswith("gather rows") for name in steps)
    reload()


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "int4_g32", "fp8_block"])
def test_threads_on_their_own_streams_that_make_the_first_calls(format: str) -> None:
    """Four threads call, prepare and call again, each on a stream of its own: all results are one call's, alone."""
    threads, trials = 4, 20
    for trial in range(trials):
        reload()
        w = ExpertWeights.quantize(torch.randn(E, 1024, 2048, device="cuda") / 45, format)
        x = torch.randn(64, 2048, device="cuda").bfloat16()
        m_sizes = torch.full((E,), 64 // E, dtype=torch.int32, device="cuda")
        before = [tensor.view(torch.uint8).clone() for tensor in w.tensors().values()]
        tensors = list(w.tensors().values())
        begin = threading.Barrier(threads)
        torch.cuda.synchronize()

        def work(
            w: ExpertWeights = w, x: torch.Tensor = x, m: torch.Tensor = m_sizes, begin: threading.Barrier = begin
        ) -> list[torch.Tensor]:
            with torch.cuda.stream(torch.cuda.Stream()):
                begin.wait()
                first = grouped_gemm(x, w, m)
                begin.wait()  # weights that another thread has prepared can't be used any more
                prepared = w.prepare()
                results = [first, *(grouped_gemm(x, prepared, m) for _ in range(3))]
                torch.cuda.current_stream().synchronize()
            return results

        with ThreadPoolExecutor(threads) as pool:
            results = [future.result() for future in [pool.submit(work) for _ in range(threads)]]
        assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(tensors, before, strict=True)), trial
        prepared = w.prepare()
        plain, alone = grouped_gemm(x, prepared.restore(), m_sizes), grouped_gemm(x, prepared, m_sizes)
        for first, *later in results:
            assert torch.equal(first, plain), trial
            assert all(torch.equal(result, alone) for result in later), trial
        assert off(alone, plain.double().cpu()) < limit(format)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4", "int4_g32", "int4_g128", "fp8_block", "fp8_channel"])
def test_writes_to_prepared_weights_are_read_also_by_a_graph(format: str) -> None:
    w, other = (ExpertWeights.quantize(torch.randn(E, I + I % 128, H, device="cuda") / 20, format) for _ in range(2))
    wanted = other.dequantize(torch.float32)
    w, x = w.prepare(), torch.randn(T, H, device="cuda").bfloat16()
    m_sizes = torch.tensor([9] * 7 + [7], dtype=torch.int32, device="cuda")
    grouped_gemm(x, w, m_sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped_gemm(x, w, m_sizes)
    for codes in (other.codes, other.codes.view(torch.uint8)):
        with pytest.raises(RuntimeError):
            w.codes.copy_(codes)
    w.copy_(other)
    got = grouped_gemm(x, w, m_sizes)
    graph.replay()
    assert torch.equal(got, y)
    want = torch.cat([rows.float() @ matrix.T for rows, matrix in zip(x.split(m_sizes.tolist()), wanted, strict=True)])
    assert off(got, want.double().cpu()) < limit(format)
    if w.scale.is_floating_point() and w.scale.dtype is not torch.float8_e4m3fn:
        w.scale.mul_(0.5)
        assert torch.equal(grouped_gemm(x, w, m_sizes), got / 2)
        w.scale.data.mul_(2)
        assert torch.equal(grouped_gemm(x, w.refresh(), m_sizes), got)
