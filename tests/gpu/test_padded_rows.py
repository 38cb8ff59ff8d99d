"""Rows of experts with room between them on a real GPU: padding is NaN in what is read, and stays what it is elsewhere.

In at most 40 s. Needs no bundle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pretuned.artifacts.records import PRECISIONS
from pretuned.runtime import ExpertWeights, Lora, experts_mlp, grouped_gemm
from pretuned.runtime.ops.padded_rows import place

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

E, MOST, H, I = 8, 96, 512, 384  # noqa: E741
COUNTS = ([3, 0, 96, 1, 64, 17, 0, 33], [0] * 8, [96] * 8, [200, -5, 2**31 - 1, 1, 0, 0, 0, 2])
FORMATS = ["bf16", *(name for name, precision in PRECISIONS.items() if precision.quantised)]
CANARY = 7.25


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.cpu().double() - want.cpu().double()).norm() / max(1e-9, float(want.double().norm())))


def limit(format: str) -> float:
    """Kernels leave an x that the reference quantises to e4m3, and the other way round."""
    return 6e-2 if format != "bf16" and PRECISIONS[format].math == "fp8" else 1e-2


def weights(format: str, N: int, K: int, seed: int) -> Any:
    w = torch.randn(E, N, K, generator=torch.Generator().manual_seed(seed)) / K**0.5
    return w.bfloat16() if format == "bf16" else ExpertWeights.quantize(w, format)


def placed(counts: list[int]) -> torch.Tensor:
    return torch.arange(MOST) < torch.tensor(counts)[:, None]


def rows(counts: list[int], columns: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(E, MOST, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    values[~placed(counts)] = float("nan")
    return values


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_product_and_a_layer(format: str, prepared: bool) -> None:
    up, down = weights(format, 2 * I, H, 1), weights(format, H, I, 2)
    there = [tensor.to("cuda") for tensor in (up, down)]
    if prepared and format != "bf16":
        there = [matrix.prepare() for matrix in there]
    for counts in COUNTS:
        x, here = rows(counts, H), placed(counts)
        sizes = torch.tensor(counts, dtype=torch.int64 if counts[0] == 3 else torch.int32)
        for call, most in ((_product, 2 * I), (_layer, H)):
            want = call(x, (up, down), sizes, zero_tail=True)
            out = torch.full((E, MOST, most), CANARY, device="cuda", dtype=torch.bfloat16)
            for expected in (None, 16):
                got = call(x.cuda(), there, sizes.cuda(), zero_tail=True, expected_rows=expected)
                assert off(got, want) < limit(format)
                call(x.cuda(), there, sizes.cuda(), out=out, expected_rows=expected)
                assert off(out.cpu()[here], want[here]) < limit(format)
                assert bool((out.cpu()[~here] == CANARY).all())


def _product(x: torch.Tensor, w: Any, m_sizes: torch.Tensor, **how: Any) -> torch.Tensor:
    return grouped_gemm(x, w[0], m_sizes, **how)


def _layer(x: torch.Tensor, w: Any, m_sizes: torch.Tensor, **how: Any) -> torch.Tensor:
    return experts_mlp(x, w[0], w[1], m_sizes, **how)


@pytest.mark.parametrize("low", [False, True])
def test_gradients(low: bool) -> None:
    counts = COUNTS[0]
    up, down = weights("bf16", 2 * I, H, 1), weights("bf16", H, I, 2)
    shapes = ((E, 16, H), (E, 2 * I, 16), (E, 16, I), (E, H, 16))
    matrices = [torch.randn(shape).bfloat16() / 8 for shape in shapes] if low else []
    x, dy = rows(counts, H), rows(counts, H, 3)

    def call(device: str) -> list[torch.Tensor]:
        leaves = [tensor.to(device).requires_grad_() for tensor in (x, up, down, *matrices)]
        lora = (Lora(*leaves[3:5], 0.5), Lora(*leaves[5:], 2.0)) if low else None
        y = experts_mlp(*leaves[:3], torch.tensor(counts, device=device), lora=lora)
        return [y.detach()[placed(counts).to(device)], *torch.autograd.grad(y, leaves, dy.to(device))]

    for got, want in zip(call("cuda"), call("cpu"), strict=True):
        assert bool(got.isfinite().all())
        assert off(got, want) < 2e-2


def test_rows_at_starts_of_their_own() -> None:
    w, starts = weights("bf16", I, H, 1), torch.tensor([640, 0, 128, 130, 512, 256, 7, 400])
    sizes = torch.tensor([60, 5, 2, 100, 120, 128, 0, 33])
    x, here = torch.full((704, H), float("nan")).bfloat16(), torch.zeros(704, dtype=torch.bool)
    for start, count in zip(starts.tolist(), sizes.tolist(), strict=True):
        x[start : start + count], here[start : start + count] = torch.randn(count, H).bfloat16(), True
    want = grouped_gemm(x, w, sizes, m_starts=starts, zero_tail=True)
    out = torch.full((704, I), CANARY, device="cuda", dtype=torch.bfloat16)
    grouped_gemm(x.cuda(), w.cuda(), sizes.cuda(), m_starts=starts.cuda(), out=out)
    assert off(out.cpu()[here], want[here]) < 1e-2
    assert bool((out.cpu()[~here] == CANARY).all())


@pytest.mark.parametrize("format", ["bf16", "fp8_block", "mxfp4"])
def test_a_graph_replays_with_other_counts(format: str) -> None:
    there = [weights(format, 2 * I, H, 1).to("cuda"), weights(format, H, I, 2).to("cuda")]
    if format != "bf16":
        there = [matrix.prepare() for matrix in there]
    x, sizes = rows(COUNTS[0], H).cuda(), torch.tensor(COUNTS[0], dtype=torch.int32, device="cuda")
    out = torch.full((E, MOST, H), CANARY, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        _layer(x, there, sizes, out=out, expected_rows=32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _layer(x, there, sizes, out=out, expected_rows=32)
    for counts in COUNTS:
        x.copy_(rows(counts, H, 5))
        sizes.copy_(torch.tensor(counts).clamp(-(2**31), 2**31 - 1))
        out.fill_(CANARY)
        graph.replay()
        got, here = out.cpu(), placed(counts)
        assert bool((got[~here] == CANARY).all())
        assert torch.equal(got[here], _layer(x, there, sizes, expected_rows=32).cpu()[here])


def test_the_row_kernel_lists_what_torch_does() -> None:
    sizes, starts = torch.tensor([300, 0, -1, 2**40, 7]), torch.tensor([5000, 3, 1, 100, 2**40])
    for m_starts, room, R in ((None, 250, 1250), (starts, 6000, 6000)):
        want = place(sizes, m_starts, room, R)
        got = place(sizes.cuda(), None if m_starts is None else m_starts.cuda(), room, R)
        for tensor, other in zip(got, want, strict=True):
            assert torch.equal(tensor.cpu(), other)
