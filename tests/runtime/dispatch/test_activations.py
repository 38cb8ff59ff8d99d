"""Whether x is quantised for weights whose checkpoints have it so: by what the shipped bundle says, and without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Op, Problem
from pretuned.artifacts.records.target import Gpu, LocalGpu
from pretuned.runtime.dispatch import activations
from pretuned.runtime.dispatch.activations import verdict
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot

BUNDLES = Path(__file__).parents[3] / "artifacts/bundles"
H100 = LocalGpu(90, Gpu("NVIDIA H100 80GB HBM3", 132, 81079, 13000))
GATE_UP = Problem(Op.FORWARD, DType.FP8_BLOCK, 128, 1536, 2048)  # Qwen3-30B-A3B


def snapshot(*names: str) -> Snapshot:
    return Snapshot([Place(Kind.NAMED, BUNDLES / f"{name}.msgpack") for name in names])


def told(problem: Problem, M: int, local: LocalGpu = H100, top_k: int = 0, bundle: str = "quantised-h100-sm90") -> str:
    found = verdict(snapshot(bundle), problem, DType.FP8_BLOCK_A16, M, local, top_k=top_k)
    assert (found.chosen is not None) is found.reason.startswith("x quantised, too, is faster")
    assert found.chosen is None or found.chosen.variant.dtype is DType.FP8_BLOCK
    return found.reason


@pytest.mark.parametrize("top_k", [0, 8])
def test_of_many_rows_it_is_and_of_few_it_is_not(top_k: int) -> None:
    assert told(GATE_UP, 8, top_k=top_k).startswith("x of bf16 is no slower: ")
    assert told(GATE_UP, 1024, top_k=top_k).startswith("x of bf16 is no slower: ")
    many = told(GATE_UP, 65536, top_k=top_k)
    assert many.startswith("x quantised, too, is faster at M near 65536: the product ")
    assert ("and the gather" in many) is bool(top_k)
    assert "us measured and the pass" in many


def test_a_shape_that_no_bundle_has_is_modelled() -> None:
    problem = Problem(Op.FORWARD, DType.FP8_BLOCK, 24, 2560, 3072)
    assert told(problem, 16).startswith("x of bf16 is no slower: ")
    assert "us modelled and the pass" in told(problem, 1 << 17)
    assert told(problem, 1 << 17).startswith("x quantised, too, is faster")


def test_without_the_pass_or_any_product_it_stays() -> None:
    assert (
        told(GATE_UP, 65536, bundle="catalogue-sm90") == "x stays bf16: no usable bundle has the pass that quantises it"
    )


def test_what_the_pass_takes_is_not_known_of_a_gpu_that_is_not() -> None:
    unknown = LocalGpu(90, Gpu("NVIDIA H900", 132, 81079, 13000))
    assert "memory's rate of this GPU is not known" in told(GATE_UP, 65536, unknown) or told(
        GATE_UP, 65536, unknown
    ).startswith("x quantised, too, is faster")  # by the GPU that both were measured on
    assert activations.pass_us(65536, 2048, 8, unknown.gpu) is None


def test_the_pass_takes_longer_for_more_rows_and_less_where_rows_come_again() -> None:
    at = [activations.pass_us(M, 2048, 0, H100.gpu) or 0.0 for M in (8, 8192, 65536)]
    assert 0 < at[0] < at[1] < at[2]
    picked = activations.pass_us(65536, 2048, 8, H100.gpu)
    assert picked is not None
    assert picked <= at[2]
