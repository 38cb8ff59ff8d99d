"""An ``out`` that is memory of another tensor of the call is refused: its rows would be written while they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_gpu import PERSISTENT, Device

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType
from pretuned.runtime import grouped_gemm
from pretuned.runtime.check.tensors import check_apart
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot

E, N, K, M, TOPK = 2, 8, 8, 8, 2
SIZES = torch.tensor([5, 3])
REFUSED = "out is in the memory of {}, wanted memory of its own"


def weights(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(E, N, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def fused() -> dict[str, Any]:
    return {
        "x": torch.randn(M, K),
        "w": weights(),
        "m_sizes": SIZES,
        "topk": TOPK,
        "gather_indices": torch.arange(M),
        "permute_y": True,
        "topk_weights": torch.ones(M // TOPK, TOPK),
        "fuse_mul_post": True,
        "bias": torch.zeros(E, N),
    }


def inside(buffer: torch.Tensor, begin: int, *shape: int) -> torch.Tensor:
    return buffer[begin : begin + torch.Size(shape).numel()].view(shape)


@pytest.mark.parametrize("begin", [0, 1, M * N - 1, -1, 1 - M * N])
@pytest.mark.parametrize("name", ["x", "w", "bias", "topk_weights"])
def test_memory_of_a_tensor_of_the_call(name: str, begin: int) -> None:
    inputs = fused()
    elements = inputs[name].numel()
    if not -M * N < begin < elements:
        begin = elements - 1
    buffer = torch.zeros(4096)
    inputs[name] = inside(buffer, 1024, *inputs[name].shape)
    for _ in range(2):
        with pytest.raises(InputError, match=REFUSED.format(name)):
            grouped_gemm(**inputs, out=inside(buffer, 1024 + begin, M, N))
    for apart in (1024 - M * N, 1024 + elements):
        grouped_gemm(**inputs, out=inside(buffer, apart, M, N))
        with pytest.raises(InputError, match=REFUSED.format(name)):
            grouped_gemm(**inputs, out=inside(buffer, 1024 + begin, M, N))


@pytest.mark.parametrize("name", ["gather_indices", "m_sizes"])
def test_memory_of_whole_numbers(name: str) -> None:
    inputs = fused()
    buffer = torch.zeros(1024)
    numbers = buffer[: 2 * inputs[name].numel()].view(torch.int64)
    inputs[name] = numbers.copy_(inputs[name])
    with pytest.raises(InputError, match=REFUSED.format(name)):
        grouped_gemm(**inputs, out=inside(buffer, 2 * len(numbers) - 1, M, N))
    assert grouped_gemm(**inputs, out=inside(buffer, 2 * len(numbers), M, N)) is not None


@pytest.mark.parametrize("zero_tail", [False, True])
def test_a_plain_call(zero_tail: bool) -> None:
    w, buffer = weights(), torch.randn(M + 1, K)
    for out in (buffer[:M], buffer[1:]):
        with pytest.raises(InputError, match=REFUSED.format("x")):
            grouped_gemm(buffer[:M], w, SIZES, out=out, zero_tail=zero_tail)
    with pytest.raises(InputError, match=REFUSED.format("w")):
        grouped_gemm(buffer[:M], w, SIZES, out=w[0], zero_tail=zero_tail)


def test_columns_side_by_side_are_apart() -> None:
    w, buffer = weights(), torch.randn(M, K + N)
    x, out = buffer[:, :K], buffer[:, K:]
    wanted = grouped_gemm(x, w, SIZES)
    assert torch.equal(grouped_gemm(x, w, SIZES, out=out), wanted)
    other = torch.randn(M, K + N)
    assert grouped_gemm(other[:, N:], w, SIZES, out=other[:, :N]) is not None
    with pytest.raises(InputError, match=REFUSED.format("x")):
        grouped_gemm(x, w, SIZES, out=buffer[:, K - 1 : -1])
    with pytest.raises(InputError, match=REFUSED.format("x")):
        grouped_gemm(other[:, N:], w, SIZES, out=other[:, 1 : N + 1])


def test_tensors_of_a_transform_tell_no_memory() -> None:
    x, w = torch.randn(3, M, K), weights()

    def call(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(x, w, SIZES, out=out)

    wanted = [grouped_gemm(rows, w, SIZES) for rows in x]
    torch.testing.assert_close(torch.vmap(call)(x, torch.zeros(3, M, N)), torch.stack(wanted))
    torch.testing.assert_close(torch.func.functionalize(call)(x[0], torch.zeros(M, N)), wanted[0])


def test_an_x_that_is_copied_may_be_out() -> None:
    buffer, w = torch.randn(K, M), weights()
    wanted = grouped_gemm(buffer.t().contiguous(), w, SIZES)
    assert torch.equal(grouped_gemm(buffer.t(), w, SIZES, out=buffer), wanted)


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (lambda b: b[:0], False),
        (lambda b: b[:8, :0], False),
        (lambda b: b[5].expand(3, 16), True),
        (lambda b: b[9].expand(3, 16), False),
        (lambda b: b[:8:2, 8:], False),
        (lambda b: b[:8:2, 7:], True),
        (lambda b: b[8:], False),
        (lambda b: b[7:], True),
        (lambda b: b[3, 8:], False),
        (lambda b: b[3, 7:], True),
        (lambda b: b.view(4, 4, 16)[:, :, 8:], False),
        (lambda b: b.view(4, 4, 16)[:, :, 7:], True),
        (lambda b: b.view(16, 2, 8)[:, 1], False),
        (lambda b: b.view(-1)[: 16 * 12].view(16, 12), True),
    ],
)
def test_what_is_apart(other: Callable[[torch.Tensor], torch.Tensor], shared: bool) -> None:
    buffer = torch.zeros(16, 16)
    with pytest.raises(InputError, match="memory of x") if shared else contextlib.nullcontext():
        check_apart(buffer[:8, :8], x=other(buffer))


@pytest.fixture
def gpu(device: Device) -> Device:
    """A GPU with kernels of bf16, which store nothing."""
    device.has(PERSISTENT, DType.BF16)
    device.computes = False
    return device


def test_a_known_call_on_a_gpu_with_other_tensors(gpu: Device) -> None:
    """The kind was met before, these tensors were not."""
    buffer, w, beside = torch.zeros(8, M, K).bfloat16(), weights(torch.bfloat16), torch.zeros(2, M, 16).bfloat16()

    def call(x: torch.Tensor, out: torch.Tensor, w: torch.Tensor = w) -> None:
        assert grouped_gemm(x, w, SIZES, out=out) is out

    call(buffer[0], buffer[1])
    call(buffer[3], buffer[2])
    call(beside[0, :, :K], beside[0, :, K:])
    call(beside[1, :, :K], beside[1, :, K:])
    kinds = len(dispatch_snapshot.snapshot().plans)
    flat = buffer.view(-1)
    call(buffer[4], buffer[5])
    for begin in (0, 8, 56):
        for first, second in ((256, 256 + begin), (256 + begin, 256)):
            with pytest.raises(InputError, match=REFUSED.format("x")):
                call(inside(flat, first, M, K), inside(flat, second, M, N))
    for out in (buffer[4], buffer[5]):
        with pytest.raises(InputError, match=REFUSED.format("w")):
            call(buffer[0], out, buffer[4:6])
    with pytest.raises(InputError, match=REFUSED.format("x")):
        call(beside[0, :, :K], beside[0, :, :N])
    assert len(gpu.launches) == 5
    assert len(dispatch_snapshot.snapshot().plans) == kinds  # all were known


def test_the_stride_of_one_row_means_nothing(gpu: Device) -> None:
    """One row of a matrix whose rows are no multiple of 16 bytes: a TMA descriptor of such a stride is refused."""
    w, x = weights(torch.bfloat16), torch.randn(1, K).bfloat16()
    out = torch.empty(4, N + 1, dtype=torch.bfloat16)[:1, :N]
    for _ in range(2):
        grouped_gemm(x, w, torch.tensor([1, 0]), out=out)
    assert [launch.words["stride_y_m"] for launch in gpu.launches] == [N, N]
