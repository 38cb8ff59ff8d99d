"""benchmarks/speed/dtypes.py: wrong results and slow dtypes are told, right ones are not."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

E, N, K, M = 4, 48, 64, 300


@pytest.fixture
def tool() -> ModuleType:
    from benchmarks.speed import dtypes

    return dtypes


def inputs_of(tool: ModuleType, dtype: str) -> Any:
    """Rows of four experts, one of them without any."""
    kind, method = tool.TORCH[dtype], tool.method
    m_sizes = torch.tensor([100, 0, 150, 50], dtype=torch.int32)
    x, dy = (method.activations(M, columns, kind, "cpu") for columns in (K, N))
    return method.Inputs(x, method.weights(E, N, K, kind, "cpu"), m_sizes, dy)


def cell(us: dict[str, float], loop_us: dict[str, float], errors: dict[str, float]) -> dict[str, Any]:
    some = {d: {"us": us[d], "loop_us": loop_us[d], "error": errors[d]} for d in us}
    return {"model": "one", "gemm": "down", "op": "dX", "tokens": 1024, "dtypes": some}


RIGHT = {"bf16": 1.7e-3, "fp16": 2e-4, "tf32": 3e-4, "fp32": 5e-7}
EQUAL = dict.fromkeys(RIGHT, 10.0)


@pytest.mark.parametrize("op", ["forward", "dX", "dW"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_right_result_is_within_its_dtypes_bound_and_a_wrong_row_is_not(
    tool: ModuleType, op: str, dtype: str
) -> None:
    inputs = inputs_of(tool, dtype)
    result = tool.ours(op, inputs)()
    assert tool.fault(dtype, tool.error_of(result, op, inputs)) is None
    wrong = result.clone()
    wrong[0] *= 2  # an expert of dw, or a row of y: most rows are drawn here
    wrong[1:120] = 0
    assert "wanted below" in tool.fault(dtype, tool.error_of(wrong, op, inputs))
    wrong = result.clone()
    wrong.view(-1)[-1] = float("nan")  # in a row that need not be drawn
    assert "nan" in tool.fault(dtype, tool.error_of(wrong, op, inputs))


def test_tf32s_bound_takes_rounded_factors_and_tells_them_from_ieee(tool: ModuleType) -> None:
    def rounded(values: torch.Tensor) -> torch.Tensor:  # to 10 bits of mantissa
        bits = values.view(torch.int32)
        return (bits + 0x1000 & ~0x1FFF).view(torch.float32)

    inputs = inputs_of(tool, "tf32")
    coarse = tool.method.Inputs(rounded(inputs.x), rounded(inputs.w), inputs.m_sizes)
    assert tool.fault("tf32", tool.error_of(tool.torchs("forward", coarse), "forward", inputs)) is None
    exact = tool.error_of(tool.torchs("forward", inputs), "forward", inputs)
    assert "not tf32" in tool.fault("tf32", exact)
    assert tool.fault("fp32", exact) is None


def test_the_precision_is_as_it_was_afterwards(tool: ModuleType) -> None:
    def allowed() -> bool:
        return torch.backends.cuda.matmul.allow_tf32

    before = allowed()
    assert [tool.under(dtype, allowed)() for dtype in ("tf32", "fp32")] == [True, False]
    with pytest.raises(ZeroDivisionError), tool.precision("tf32"):
        raise ZeroDivisionError
    assert allowed() == before


def test_the_verdict_tells_a_slow_dtype_and_a_wrong_result(tool: ModuleType) -> None:
    def outcomes(cells: list[dict[str, Any]]) -> list[str]:
        return tool.verdict(cells, tool.summary(cells))

    assert outcomes([cell(EQUAL, EQUAL, RIGHT)]) == []
    assert outcomes([cell(EQUAL | {"fp16": 10.2, "tf32": 10.9, "fp32": 20.0}, EQUAL, RIGHT)]) == []
    (slow,) = outcomes([cell(EQUAL | {"fp16": 10.4}, EQUAL, RIGHT)])
    assert slow == "fp16 x bf16 (all): 0.962, wanted at least 0.971"
    (slow,) = outcomes([cell(EQUAL | {"tf32": 11.2}, EQUAL, RIGHT)])
    assert slow.startswith("tf32 x loop (T >= 1024): 0.893")
    (wrong,) = outcomes([cell(EQUAL, EQUAL, RIGHT | {"fp32": 3e-4})])
    assert wrong == "one down dX T=1024 fp32: error 3.00e-04, wanted below 1.00e-05"
    without = cell(EQUAL, EQUAL, RIGHT)
    del without["dtypes"]["fp32"]  # left out: the other cell's counts
    twice = tool.summary([without, cell(EQUAL, EQUAL | {"fp32": 5.0}, RIGHT)])
    assert twice["all"]["fp32 x loop"] == pytest.approx(0.5)
