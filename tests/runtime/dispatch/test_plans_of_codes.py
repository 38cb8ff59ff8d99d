"""Quantising x for checkpoints that quantise x: by the shipped bundle's plans, and without any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import shipped

from pretuned.artifacts.codec import encode
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import DType, Fusion, Gpu, Layout, LocalGpu, Op, Problem, RowOp, Variant
from pretuned.kernels.chips import chip_named
from pretuned.kernels.plans import quantise_us, with_plans
from pretuned.runtime.dispatch.places import Kind, Place, installed_places
from pretuned.runtime.dispatch.snapshot import Snapshot
from pretuned.runtime.inspect.explain import Ruled, quantised_x

BUNDLES = Path(__file__).parents[3] / "artifacts/bundles"
H100 = LocalGpu(90, Gpu("NVIDIA H100 80GB HBM3", 132, 81079, 13000))
GATE_UP = Problem(Op.FORWARD, DType.FP8_BLOCK, 128, 1536, 2048)  # Qwen3-30B-A3B


def snapshot(*names: str) -> Snapshot:
    return Snapshot([Place(Kind.NAMED, BUNDLES / f"{name}.msgpack") for name in names])


def decided(problem: Problem, M: int, local: LocalGpu = H100, top_k: int = 0, bundle: str = "quantised-sm90") -> str:
    decision = quantised_x(snapshot(bundle), problem, DType.FP8_BLOCK_A16, M, local, top_k=top_k, aligned=True)
    assert (decision.chosen is not None) is decision.reason.startswith("quantising x is faster")
    assert decision.chosen is None or decision.chosen.variant.dtype is DType.FP8_BLOCK
    return decision.reason


@pytest.mark.parametrize("top_k", [0, 8])
def test_of_many_rows_it_is_and_of_few_it_is_not(top_k: int) -> None:
    assert decided(GATE_UP, 8, top_k=top_k).startswith("quantising x is not faster: ")
    assert decided(GATE_UP, 1024, top_k=top_k).startswith("quantising x is not faster: ")
    many = decided(GATE_UP, 65536, top_k=top_k)
    assert many.startswith("quantising x is faster at M near 65536: the GEMM ")
    assert ("and the gather" in many) is bool(top_k)
    assert "us measured and the row kernel" in many


@pytest.mark.parametrize(("N", "K"), [(1536, 2048), (2048, 768)])
def test_with_a_scale_a_row_it_is_as_well(N: int, K: int) -> None:
    """By the times of an H100, of Qwen3-30B-A3B."""
    for M, quantises in ((8, False), (8192, False), (65536, True)):
        problem = Problem(Op.FORWARD, DType.FP8_CHANNEL, 128, N, K)
        decision = quantised_x(
            snapshot("quantised-sm90"), problem, DType.FP8_CHANNEL_A16, M, H100, top_k=0, aligned=True
        )
        assert (decision.chosen is not None) is quantises, decision.reason
        assert "us measured and the row kernel" in decision.reason
        assert decision.chosen is None or decision.chosen.variant.kernel == "rows_w8a8_channel"


def test_a_shape_that_no_bundle_has_is_modelled() -> None:
    problem = Problem(Op.FORWARD, DType.FP8_BLOCK, 24, 2560, 3072)
    assert decided(problem, 16).startswith("quantising x is not faster: ")
    assert "us modelled and the row kernel" in decided(problem, 1 << 17)
    assert decided(problem, 1 << 17).startswith("quantising x is faster")


def test_without_the_pass_or_any_product_it_stays() -> None:
    assert (
        decided(GATE_UP, 65536, bundle="catalogue-sm90")
        == "x stays bf16: no usable bundle has the row kernel that quantises it"
    )


UNKNOWN = LocalGpu(90, Gpu("NVIDIA H900", 132, 81079, 13000))


def test_what_the_pass_takes_is_not_known_of_a_gpu_that_is_not() -> None:
    assert quantise_us(64, 2048, 0, chip_named(UNKNOWN.gpu.name)) is None
    modelled = Problem(Op.FORWARD, DType.FP8_BLOCK, 24, 2560, 3072)
    assert decided(modelled, 1 << 17, UNKNOWN) == "x stays bf16: the bandwidth of this GPU is not known"
    assert decided(GATE_UP, 65536, UNKNOWN).startswith("quantising x is faster")  # by the one that measured both


def part_of(
    path: Path, choices: Callable[[Problem], bool], variants: Callable[[Variant], bool] = lambda variant: True
) -> Path:
    """The shipped bundle with some of its choices, and of its variants."""
    whole = shipped.whole("quantised-sm90")
    kept = [i for i, variant in enumerate(whole.variants) if variants(variant)]
    at = {old: new for new, old in enumerate(kept)}
    rows = {
        problem: tuple(
            choice._replace(variant=at[choice.variant], runner_up=None, runner_up_ns=None, plan=()) for choice in row
        )
        for problem, row in whole.choices.items()
        if choices(problem)
    }
    names = {whole.variants[i].kernel for i in kept}
    part = whole._replace(
        variants=tuple(whole.variants[i] for i in kept),
        cubins=tuple(whole.cubins[i] for i in kept),
        choices=rows,
        models=(),
        kernels=tuple(kernel for kernel in whole.kernels if kernel.name in names),
    )
    publish(path, encode(with_plans(part)))
    return path


def of_part(path: Path) -> str:
    bundle_set = Snapshot([Place(Kind.NAMED, path)])
    return quantised_x(bundle_set, GATE_UP, DType.FP8_BLOCK_A16, 65536, H100, top_k=0, aligned=True).reason


def test_where_one_product_alone_is_there_it_runs(tmp_path: Path) -> None:
    codes = part_of(
        tmp_path / "codes.msgpack",
        lambda problem: problem.dtype is DType.FP8_BLOCK,
        lambda variant: isinstance(variant.op, RowOp) or variant.dtype is DType.FP8_BLOCK,
    )
    assert of_part(codes) == "x is quantised: no bundle has the GEMM with bf16 x"
    neither = part_of(tmp_path / "passes.msgpack", lambda problem: False, lambda variant: isinstance(variant.op, RowOp))
    assert of_part(neither) == "no bundle has this GEMM"
    plain = part_of(
        tmp_path / "plain.msgpack",
        lambda problem: problem.dtype is DType.FP8_BLOCK_A16,
        lambda variant: isinstance(variant.op, RowOp) or variant.dtype is DType.FP8_BLOCK_A16,
    )
    assert of_part(plain).startswith("x stays bf16: for the GEMM with quantised x, the bundle has no choice for it")


def test_a_measured_time_and_a_modelled_one_are_not_compared(tmp_path: Path) -> None:
    half = part_of(tmp_path / "half.msgpack", lambda problem: problem.dtype is DType.FP8_BLOCK)
    why = "its time and the time with bf16 x are not from one source"
    assert of_part(half) == f"x stays bf16: for the GEMM with quantised x, {why}"


STORED = GATE_UP._replace(layout=Layout.STORED)


def of_candidates(problem: Problem, M: int, sm: int, *, aligned: bool = True) -> Ruled:
    """By the candidates that ship, on a GPU of the capability that nobody names."""
    other, local = DType(f"{problem.dtype.value}_a16"), LocalGpu(sm, Gpu("", 100, 40 << 10, 0))
    return quantised_x(Snapshot((), installed_places), problem, other, M, local, top_k=0, aligned=aligned)


@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER, Fusion.GATHER])
@pytest.mark.parametrize("sm", [89, 100, 103, 120])
def test_a_kernel_that_quantises_x_itself_runs_many_rows(sm: int, fusion: Fusion) -> None:
    """Where a GPU multiplies e4m3; no pass is asked for, and no GPU's memory has to be known."""
    ruling = of_candidates(STORED._replace(fusion=fusion), 1 << 16, sm)
    assert ruling.chosen is not None, ruling.reason
    assert (ruling.chosen.variant.kernel, ruling.chosen.variant.alignment) == ("w8a8", 16)
    assert ruling.reason.startswith("quantising x is faster at M near 65536: the GEMM ")
    assert "row kernel" not in ruling.reason
    unaligned = of_candidates(STORED._replace(fusion=fusion), 1 << 16, sm, aligned=False)
    assert unaligned.chosen is None or unaligned.chosen.variant.alignment == 1


@pytest.mark.parametrize(
    ("sm", "problem", "message"),
    [
        (80, STORED, "x stays bf16: sm_80 has no products of e4m3, so w becomes bf16"),
        (86, GATE_UP, "x stays bf16: sm_86 has no products of e4m3, so w becomes bf16"),
        (89, STORED._replace(dtype=DType.FP8_CHANNEL), "x stays bf16: no bundle has the GEMM with quantised x"),
        (89, GATE_UP, "x stays bf16: no kernel for sm_89 multiplies codes by codes of such w"),
    ],
)
def test_why_x_stays_where_nothing_multiplies_codes(sm: int, problem: Problem, message: str) -> None:
    ruling = of_candidates(problem, 1 << 16, sm)
    assert ruling == (None, message)
