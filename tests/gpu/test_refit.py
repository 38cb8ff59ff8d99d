"""New weights in a captured graph's, on a real GPU; the bits of row kernels, where a bundle has them, are torch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import PRECISIONS, DType, RowOp
from pretuned.kernels import rowops
from pretuned.runtime import ExpertWeights, moe_mlp
from pretuned.runtime.launch import rowops as launch_rowops
from pretuned.runtime.weights import writing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

FORMATS = [name for name, precision in PRECISIONS.items() if precision.quantised]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
E, T, TOPK, H, I = 8, 40, 2, 512, 384  # noqa: E741


@pytest.fixture
def by_torch() -> Iterator[None]:
    """Without row kernels."""
    kept, writing.kernels = writing.kernels, None
    yield
    writing.kernels = kept


def numbers(N: int, K: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    w = torch.randn(E, N, K, device="cuda", generator=g) * 0.05
    w[0, :64] = torch.randint(-64, 65, (64, K), device="cuda", generator=g) / 16  # many are between two codes
    w[1, :, :128] = 0
    w[1, 1, :64] = -0.0
    w[2, :8] *= 2.0**-130  # subnormal
    return w.to(dtype)


def bits(w: ExpertWeights) -> dict[str, torch.Tensor]:
    return {name: tensor.reshape(-1).view(torch.uint8).clone() for name, tensor in w.tensors().items()}


def same(w: ExpertWeights, want: dict[str, torch.Tensor]) -> bool:
    now = bits(w)
    return now.keys() == want.keys() and all(torch.equal(tensor, want[name]) for name, tensor in now.items())


@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_that_was_captured_before_reads_the_new_weights(format: str) -> None:
    """By quantised w, by weights of either layout, and by one that is refused: that changes nothing."""
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    ids, weights = torch.randint(0, E, (T, TOPK), device="cuda"), torch.rand(T, TOPK, device="cuda")

    def matrices(seed: int) -> list[ExpertWeights]:
        sizes = ((2 * I, H), (H, I))
        return [ExpertWeights.quantize(numbers(N, K, seed), format).prepare() for N, K in sizes]

    def layer(of: list[ExpertWeights]) -> torch.Tensor:
        return moe_mlp(hidden, *of, ids, weights, "silu")

    w = matrices(0)
    layer(w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(w)
    want = [layer(matrices(seed)) for seed in range(4)]
    graph.replay()
    assert torch.equal(out, want[0])
    for matrix, (N, K) in zip(w, ((2 * I, H), (H, I)), strict=True):
        matrix.copy_(numbers(N, K, 1))
    graph.replay()
    assert torch.equal(out, want[1])
    for matrix, new in zip(w, matrices(2), strict=True):
        matrix.copy_(new)
    graph.replay()
    assert torch.equal(out, want[2])
    for matrix, new in zip(w, matrices(3), strict=True):
        matrix.copy_(new.restore(), check=False)
    graph.replay()
    assert torch.equal(out, want[3])
    wrong = numbers(2 * I, H, 1)
    wrong[E - 1, -1, -1] = float("nan")
    with pytest.raises(InputError, match="NaN or infinite"):
        w[0].copy_(wrong)
    graph.replay()
    assert torch.equal(out, want[3])


@pytest.mark.parametrize("format", FORMATS)
def test_a_copy_in_a_graph(format: str) -> None:
    """Its replay quantises what w holds by then, on any stream that is ordered after it."""
    N, K = 256, 512
    w, new = ExpertWeights.quantize(numbers(N, K, 0), format).prepare(), numbers(N, K, 1)
    w.copy_(new, check=False)  # kernels are loaded and tested
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w.copy_(new, check=False)
    for seed in (2, 3):
        new.copy_(numbers(N, K, seed))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.replay()
        torch.cuda.current_stream().wait_stream(side)
        want = ExpertWeights.quantize(numbers(N, K, seed), format).prepare()
        assert same(w, bits(want))
        if want.derived is not None:
            assert w.derived is not None
            assert torch.equal(w.derived, want.derived)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_the_bits_are_those_of_the_cpu(format: str, dtype: torch.dtype) -> None:
    """Whoever computes them: torch here, row kernels, torch on the CPU."""
    N, K = 256, 1152
    w = numbers(N, K, 5, dtype)
    apart = torch.cat([w, w], 1)[:, N:]  # experts that are further apart
    want = ExpertWeights.quantize(w.cpu(), format)
    weights = ExpertWeights.quantize(apart, format)
    assert same(weights.to("cpu"), bits(want))
    values = want.dequantize(dtype)
    assert torch.equal(weights.dequantize(dtype).cpu(), values)
    prepared = weights.prepare()
    assert prepared.is_prepared
    assert torch.equal(prepared.dequantize(dtype).cpu(), values)
    assert same(prepared.restore().to("cpu"), bits(want))
    other = ExpertWeights.quantize(torch.zeros_like(w), format).prepare()
    assert same(other.copy_(apart, check=False), bits(prepared))
    assert same(other.to("cpu"), bits(want.prepare()))


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("format", FORMATS)
def test_torch_s_bits_on_a_gpu_are_those_of_the_cpu(format: str) -> None:
    test_the_bits_are_those_of_the_cpu(format, torch.bfloat16)


@pytest.mark.parametrize("format", FORMATS)
def test_the_kernels_pass_their_self_tests(format: str) -> None:
    """Each that a bundle has is loaded, and so tested: a wrong one would be left out."""
    for op in rowops.WEIGHT_OPS:
        if launch_rowops.launcher(op, rowops.dtype_of(DType(format), op), 0, aligned=True) is None:
            pytest.skip(f"no bundle has {op.value} (RowOp.{RowOp(op.value).name}) for {format}")
