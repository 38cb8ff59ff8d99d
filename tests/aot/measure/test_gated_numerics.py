"""The judge of products with silu in the epilogue; on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from pretuned.aot.measure.bench import GatedNumericsCheck
from pretuned.aot.measure.inputs import Tensors, activations, routed_rows, weights
from pretuned.artifacts.records import PLAIN_LAYOUTS, DType, Fusion, Layout, Op, Problem
from pretuned.kernels import reference

E, N, K = 16, 784, 512  # 392 columns of y: the last group of 64 is cut off
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def check_and_inputs(
    M: int, layout: Layout, fusion: Fusion, device: torch.device
) -> tuple[GatedNumericsCheck, Tensors, list[int]]:
    problem = Problem(Op.FORWARD, DType.BF16, E, N, K, layout, fusion)
    w = weights(E, N, K, torch.bfloat16, device)
    w = w if layout is Layout.NK else w.view(E, K, N)
    m_sizes = routed_rows(E, 1, M)
    top_k = 2 if M % 2 == 0 else 1
    gathers = Fusion.GATHER in fusion
    index = torch.randperm(M, device=device).to(torch.int32) if gathers else None
    rows = activations(M // top_k if gathers else M, K, torch.bfloat16, device)
    y = torch.full((M, N // 2), float("nan"), dtype=torch.bfloat16, device=device)
    reference.rows(
        rows,
        w,
        m_sizes.to(device),
        y,
        M=M,
        layout=layout,
        index=index,
        index_end=M,
        gather_divisor=top_k if gathers else 0,
        silu=True,
    )
    return GatedNumericsCheck(problem, w), Tensors(problem, M, rows, w, y, index, top_k), m_sizes.tolist()


@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
@pytest.mark.parametrize("fusion", [Fusion.SILU, Fusion.SILU | Fusion.GATHER])
@pytest.mark.parametrize("M", [1, 100, 1000])
def test_rounding_is_no_mistake_and_eight_wrong_columns_are(
    device_type: str, layout: Layout, fusion: Fusion, M: int
) -> None:
    judge, on, counts = check_and_inputs(M, layout, fusion, torch.device(device_type))
    wanted = judge.reference(on, counts)
    assert wanted.shape == (M, N // 16)
    assert 2e-4 < judge.error(on, wanted) < 6e-3
    y, row = on.result, M // 2
    for here in (slice(0, 8), slice(200, 208), slice(384, 392)):
        right = y[row, here].clone()
        y[row, here] += 4 * y.float().square().mean().sqrt()
        assert judge.error(on, wanted) == float("inf")
        y[row, here] = right
    right = y[row].clone()
    y[row] = y[row].roll(1)  # columns mixed up
    assert judge.error(on, wanted) == float("inf")
    y[row] = right
    y[row, 77] = float("nan")  # any element
    assert judge.error(on, wanted) != judge.error(on, wanted)
    y[row] = right
    assert judge.error(on, wanted) < 6e-3


def test_a_part_that_was_never_stored_is_seen() -> None:
    judge, on, counts = check_and_inputs(300, Layout.NK, Fusion.SILU, torch.device("cpu"))
    wanted = judge.reference(on, counts)
    on.result[64:128, 64:128] = 0
    assert judge.error(on, wanted) == float("inf")


def test_up_in_place_of_gate_is_seen() -> None:
    judge, on, counts = check_and_inputs(300, Layout.NK, Fusion.SILU, torch.device("cpu"))
    swapped = on.weights.roll(N // 2, 1)
    y = torch.empty_like(on.result)
    reference.rows(on.rows, swapped, torch.tensor(counts), y, M=300, layout=Layout.NK, silu=True)
    on.result.copy_(y)
    assert judge.error(on, judge.reference(on, counts)) > 0.1
