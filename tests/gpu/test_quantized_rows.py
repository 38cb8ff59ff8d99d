"""x that arrives as codes on a real GPU. PRETUNED_BUNDLES is as for test_training.py."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from selected import failed

from pretuned.artifacts.records import DType, Fusion, Op, Problem, Scale, Variant
from pretuned.runtime import (
    ExpertWeights,
    QuantizedRows,
    activate,
    experts_mlp,
    explain,
    grouped_gemm,
    moe_mlp,
    sort_routing,
)
from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.weights.prepared_layout import K_ORDER
from pretuned.runtime.weights.row_codes import codes_of_rows

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a GPU of sm_90"
    ),
    pytest.mark.skipif(
        not os.environ.get("PRETUNED_BUNDLES"), reason="needs PRETUNED_BUNDLES to name bundles for this GPU"
    ),
]

E, H, I, TOPK = 16, 2048, 768, 8  # noqa: E741
FORMATS = ["fp8_block", "fp8_channel"]


def weights(format: str) -> list[ExpertWeights]:
    generator = torch.Generator("cuda").manual_seed(5)
    shapes = (2 * I, H), (H, I)
    matrices = (torch.randn(E, *s, device="cuda", generator=generator).bfloat16() * s[1] ** -0.5 for s in shapes)
    return [ExpertWeights.quantize(matrix, format).prepare() for matrix in matrices]


def exact(T: int, format: str, *, by_column: bool) -> tuple[torch.Tensor, QuantizedRows]:
    """Rows of bfloat16, and the codes and scales that stand for exactly them: those that quantising them gives."""
    generator = torch.Generator("cuda").manual_seed(T)
    group = 128 if format == "fp8_block" else H
    numbers = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    values = numbers[torch.randint(0, len(numbers), (T, H // group, group), device="cuda", generator=generator)]
    values[:, :, 0] = 448.0
    factor = 2.0 ** torch.randint(-12, -7, (T, H // group, 1), device="cuda", generator=generator).float()
    x = (values * factor).view(T, H).bfloat16()
    codes, scale = codes_of_rows(x, Scale("fp32", 1, 128 if format == "fp8_block" else 0))
    bits = codes.view(torch.uint8).view(T, H // 64, 64)
    natural = torch.empty_like(bits)
    natural[..., torch.tensor(K_ORDER, device="cuda")] = bits
    scale = scale[:, :T].T if scale.dim() == 2 else scale[:, None]
    scale = scale.T.contiguous().T if by_column else scale.contiguous()
    return x, QuantizedRows(natural.view(T, H).view(torch.float8_e4m3fn), scale)


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("T", [1, 300, 4096])
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_has_the_bits_of_one_that_quantises_its_rows(format: str, T: int, by_column: bool) -> None:
    """With many rows. With few it leaves x as it is, and is near. In a graph it is the same."""
    up, down = weights(format)
    x, coded = exact(T, format, by_column=by_column)
    generator = torch.Generator("cuda").manual_seed(T)
    ids = torch.rand(T, E, device="cuda", generator=generator).topk(TOPK).indices
    ids[torch.rand(T, TOPK, device="cuda", generator=generator) < 0.5] = -1
    share = torch.rand(T, TOPK, device="cuda", generator=generator)
    with torch.no_grad():
        want, got = moe_mlp(x, up, down, ids, share), moe_mlp(coded, up, down, ids, share)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = moe_mlp(coded, up, down, ids, share)
    graph.replay()
    assert torch.equal(got, again)
    if T == 4096:  # 1,024 rows an expert: x is quantised
        assert torch.equal(got, want)
    error = (got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30)
    assert float(error) < 1e-2


@pytest.mark.parametrize("format", FORMATS)
def test_products(format: str) -> None:
    """Of sorted rows and of rows that are gathered, scattered and weighted: as of the rows that the codes stand for."""
    T = 4096
    up, _ = weights(format)
    x, coded = exact(T, format, by_column=True)
    routing = sort_routing(torch.rand(T, E, device="cuda").topk(TOPK).indices, E)
    share = torch.rand(T, TOPK, device="cuda")
    gathered: dict[str, Any] = {"topk": TOPK, "gather_indices": routing.gather_indices, "permute_x": True}
    moved = gathered | {"permute_y": True, "topk_weights": share, "fuse_mul_post": True}
    for how in (gathered, moved):
        got, want = grouped_gemm(coded, up, routing.m_sizes, **how), grouped_gemm(x, up, routing.m_sizes, **how)
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert float(error) < 1e-2
    sizes = torch.full((E,), T // E - 9, dtype=torch.int32, device="cuda")
    got, want = (grouped_gemm(rows, up, sizes, zero_tail=True) for rows in (coded, x))
    assert float((got.float() - want.float()).norm() / want.float().norm()) < 1e-2
    assert not got[int(sizes.sum()) :].any()
    assert explain(coded, up, sizes).coded


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_padded_codes_have_the_bits_of_packed_ones(format: str, by_column: bool) -> None:
    """Each expert's scales row by row or column by column; padding is poisoned and left alone, also in a graph."""
    most, (up, down) = 96, weights(format)
    _, (codes, scale) = exact(E * most, format, by_column=False)
    codes, scale = codes.view(E, most, H), scale.view(E, most, -1)
    counts = torch.zeros(E, dtype=torch.int32, device="cuda")
    poisoned, factors = torch.empty_like(codes), torch.empty_like(scale)
    factors = factors.mT.contiguous().mT if by_column else factors
    coded = QuantizedRows(poisoned, factors)
    y, layer = torch.empty(E, most, 2 * I, device="cuda").bfloat16(), torch.empty(E, most, H, device="cuda").bfloat16()

    def place(seed: int) -> torch.Tensor:
        drawn = torch.randint(0, most + 1, (E,), generator=torch.Generator().manual_seed(seed))
        drawn[1], drawn[2] = 0, most
        counts.copy_(drawn)
        there = torch.arange(most, device="cuda") < counts[:, None]
        poisoned.view(torch.uint8).copy_(torch.where(there[..., None], codes.view(torch.uint8), 0x7F))
        factors.copy_(torch.where(there[..., None], scale, float("nan")))
        y.fill_(7.0)
        layer.fill_(7.0)
        return there

    def run() -> None:
        grouped_gemm(coded, up, counts, out=y, expected_rows=E * most // 2)
        experts_mlp(coded, up, down, counts, out=layer, expected_rows=E * most // 2)

    def judge(there: torch.Tensor) -> None:
        packed = QuantizedRows(codes[there], scale[there])
        assert torch.equal(
            y[there], grouped_gemm(packed, up, counts, expected_rows=min(E * most // 2, int(there.sum())))
        )
        assert bool((y[~there] == 7.0).all())
        assert bool((layer[~there] == 7.0).all())
        want = grouped_gemm(activate(y[there]), down, counts)
        assert float((layer[there].float() - want.float()).norm() / want.float().norm()) < 5e-2

    with torch.no_grad():
        there = place(1)
        run()
        judge(there)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for seed in (2, 3):
            there = place(seed)
            graph.replay()
            judge(there)


@pytest.mark.parametrize("starts", [None, torch.int32, torch.int64])
def test_codes_in_place_have_the_bits_of_ordered_ones(starts: torch.dtype | None) -> None:
    """Whatever the cost model prefers: boxes of rows reach into the next expert's, which are NaN."""
    most, counts = 133, [0, 133, 1, 16, 17, 63, 64, 65, 127, 128, 129, 2, 0, 100, 33, 5]
    up = weights("fp8_block")[0]
    _, packed = exact(sum(counts), "fp8_block", by_column=False)
    first, R = [e * most for e in range(E)], E * most
    if starts is not None:  # the last expert's rows come first, with few rows between
        ends = [5 + sum(counts[e:]) + E - e for e in range(E)]
        first, R = [end - count for end, count in zip(ends, counts, strict=True)], max(ends) + 3
    rows = torch.cat([first[e] + torch.arange(count) for e, count in enumerate(counts)]).cuda()
    codes = torch.full((R, H), 0x7F, dtype=torch.uint8, device="cuda")
    scale = torch.full((R, H // 128), float("nan"), device="cuda")
    codes[rows], scale[rows] = packed.codes.view(torch.uint8), packed.scale
    how: dict[str, Any] = {"out": torch.full((R, 2 * I), 7.0, device="cuda").bfloat16()}
    x = QuantizedRows(codes.view(torch.float8_e4m3fn), scale.mT.contiguous().mT)
    if starts is None:
        how["out"] = how["out"].view(E, most, -1)
        x = QuantizedRows(x.codes.view(E, most, H), scale.view(E, most, -1))
    else:
        how["m_starts"] = torch.tensor(first, dtype=starts, device="cuda")
    m_sizes = torch.tensor(counts, dtype=starts or torch.int32, device="cuda")
    in_place = Problem(Op.FORWARD, DType.FP8_BLOCK, E, 2 * I, H, fusion=Fusion.STARTS)
    if not snapshot().serves(in_place, local_gpu(0)):
        pytest.skip("no bundle here has such code")

    def other_way(variant: Variant) -> bool:
        return variant.dtype is DType.FP8_BLOCK and variant.fusion is Fusion.SCATTER

    with torch.no_grad():
        want = grouped_gemm(packed, up, m_sizes.to(torch.int32))
        with failed(other_way):
            grouped_gemm(x, up, m_sizes, **how)
            kernels = [ready.name for ready in snapshot().launchers.values() if ready is not None]
    y = how["out"].view(R, -1)
    assert any(name.startswith(str(in_place)) for name in kernels), kernels
    assert torch.equal(y[rows], want)
    y[rows] = 7.0
    assert bool((y == 7.0).all())
