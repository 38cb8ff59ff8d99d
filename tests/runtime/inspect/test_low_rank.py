"""The explanation of a product with an adapter, by the shipped bundles: how its low-rank part runs, and why."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pairwise import pairwise

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Fusion, Gpu, Layout, LocalGpu, Op, Problem, bucket_of
from pretuned.runtime import ExpertWeights, explain, reload
from pretuned.runtime.dispatch import snapshot
from pretuned.runtime.dispatch.decide import with_low_part

SIZES = {"E": 128, "N": 1536, "K": 2048}
PRODUCT = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048)


@pytest.fixture(autouse=True)
def shipped() -> None:
    reload()


@pairwise({"weights": [None, "mxfp4", "mxfp8", "int4_g64"], "op": [Op.FORWARD, Op.DX], "M": [64, 8192]})
def test_it_is_in_the_kernel_that_dispatch_takes(weights: str | None, op: Op, M: int) -> None:
    problem = PRODUCT._replace(op=op, dtype=DType(weights or "bf16"))
    explanation = explain(problem, M=M, sm=90, rank=16)
    assert explanation.problem == problem._replace(fusion=Fusion.LOW_RANK)
    local = LocalGpu(90, Gpu("", 132, 80 << 10, 0))
    ran = with_low_part(snapshot.snapshot(), explanation.problem, bucket_of(M), local)
    assert explanation.chosen is not None
    assert ran is not None
    assert explanation.chosen.variant == ran.variant
    assert explanation.low_rank == "in the GEMM's kernel, as part of its reduction: 16 columns"
    assert f"  lora: {explanation.low_rank}\n" in str(explanation)
    assert json.loads(json.dumps(explanation.to_dict()))["low_rank"] == explanation.low_rank
    assert explain(explanation.problem, M=M, sm=90).chosen == explanation.chosen


def test_of_gathered_rows_too() -> None:
    for dtype, first in ((DType.BF16, False), (DType.MXFP4, True)):
        explanation = explain(PRODUCT._replace(dtype=dtype, fusion=Fusion.GATHER), M=8192, sm=90, rank=8, top_k=8)
        assert explanation.low_rank == "in the GEMM's kernel, as part of its reduction: 8 columns"
        assert explanation.gathered_first is first


def test_a_rank_is_rounded_up_to_whole_16_bytes() -> None:
    explanation = explain(**SIZES, M=8192, sm=90, rank=4)
    assert explanation.low_rank == "in the GEMM's kernel, as part of its reduction: 8 columns, 4 of them the adapter's"


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (PRODUCT._replace(dtype=DType.FP16), "its kernels are for bf16, this is fp16"),
        (PRODUCT._replace(dtype=DType.FP32), "its kernels are for bf16, this is fp32"),
        (PRODUCT._replace(fusion=Fusion.GATHER | Fusion.SCATTER), "no code adds it to rows that go elsewhere"),
        (PRODUCT._replace(fusion=Fusion.GATHER | Fusion.WEIGHT), "no code adds it to rows that go elsewhere"),
        (PRODUCT._replace(fusion=Fusion.BIAS), "the low-rank kernels add a bias only if they gather rows"),
        (PRODUCT._replace(dtype=DType.FP8_BLOCK_A16), "the forward of fp8_block quantises x, which is faster"),
        (PRODUCT._replace(dtype=DType.FP8_CHANNEL_A16), "the forward of fp8_channel quantises x, which is faster"),
        (PRODUCT._replace(dtype=DType.MXFP4, layout=Layout.STORED), "only prepared weights have a kernel for it"),
        (PRODUCT._replace(dtype=DType.MXFP4, N=1500), "only prepared weights have a kernel for it"),
        (PRODUCT._replace(K=2044), "rows of x, w or y are no whole 16 bytes"),
        (PRODUCT._replace(E=600), "no shipped kernel for it runs on sm_90"),
    ],
)
def test_why_it_is_a_product_of_its_own(problem: Problem, why: str) -> None:
    """The rest is what the product without it does."""
    explanation = explain(problem, M=8192, sm=90, rank=16)
    assert str(explanation.low_rank).startswith(f"a product of its own, which is added: {why}")
    plain = explain(problem, M=8192, sm=90)
    assert (explanation.chosen, explanation.runs, explanation.build) == (plain.chosen, plain.runs, plain.build)
    assert plain.low_rank is None


@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.GATHER])
@pytest.mark.parametrize("sm", [89, 90])
def test_beside_it_x_is_quantised_as_without_it(sm: int, fusion: Fusion) -> None:
    problem = PRODUCT._replace(dtype=DType.FP8_BLOCK, fusion=fusion)
    explanation, plain = (explain(problem, M=16384, sm=sm, top_k=8, rank=rank) for rank in (16, None))
    assert plain.reason.startswith("quantising x is faster")
    assert (explanation.chosen, explanation.steps, explanation.reason) == (plain.chosen, plain.steps, plain.reason)
    assert explanation.problem == plain.problem._replace(fusion=fusion | Fusion.LOW_RANK)
    assert str(explanation.low_rank).endswith("the forward of fp8_block quantises x, which is faster")


def test_of_fp8_dx_has_code() -> None:
    explanation = explain(PRODUCT._replace(op=Op.DX, dtype=DType.FP8_BLOCK_A16), M=8192, sm=90, rank=16)
    assert str(explanation.low_rank).startswith("in the GEMM's kernel")


def test_strict_mode_has_it_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETUNED_STRICT", "1")
    reload()
    explanation = explain(**SIZES, M=8192, sm=90, rank=16)
    assert str(explanation.low_rank).endswith("strict mode takes nothing of the candidates, which have the code for it")


def test_of_tensors() -> None:
    x, m_sizes = torch.empty(256, 256, dtype=torch.bfloat16), torch.full((4,), 64)
    w = torch.ones(4, 256, 256, dtype=torch.bfloat16)
    assert "in the GEMM's kernel" in str(explain(x, w, m_sizes, sm=90, rank=16))
    four = ExpertWeights.quantize(w, "mxfp4")
    explanation = explain(x, four, m_sizes, sm=90, rank=16)
    assert "only prepared weights have a kernel for it: w = w.prepare()" in str(explanation.low_rank)
    assert "in the GEMM's kernel" in str(explain(x, four.prepare(), m_sizes, sm=90, rank=16))
    eight = explain(x, ExpertWeights.quantize(w, "fp8_block"), m_sizes, sm=90, rank=16)
    assert "quantises x" in str(eight.low_rank)


@pytest.mark.parametrize("rank", [0, 257, 1.5, True])
def test_what_is_no_rank(rank: Any) -> None:
    with pytest.raises(InputError, match=r"explain: rank is .*, wanted the columns of an adapter, an int of 1 to 256"):
        explain(**SIZES, M=8192, sm=90, rank=rank)


def test_dw_has_no_low_rank_part() -> None:
    with pytest.raises(InputError, match="explain: rank of dW"):
        explain(PRODUCT._replace(op=Op.DW), M=8192, sm=90, rank=16)
