"""Rows of y that nothing is stored to become zero, and where y is large they alone."""

from __future__ import annotations

import pytest
import torch
from host_gpu import PERSISTENT, SPECIALIZED, TILE, TOPK, Device, E, K, N, T
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretuned.artifacts.records import DType, Layout, Op, RowOp
from pretuned.kernels.rowops import MOST_EXPERTS
from pretuned.runtime import grouped_gemm, grouped_gemm_dX
from pretuned.runtime.check.call import Rows
from pretuned.runtime.launch import product_kernels
from pretuned.runtime.ops import zero_rows
from pretuned.runtime.ops.products import rows

M = T * TOPK


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Their rows are whole 16 bytes."""
    generator, columns = torch.Generator().manual_seed(0), K if dtype is torch.float32 else 16
    x, w = torch.randn(M, columns, generator=generator), torch.randn(E, N, columns, generator=generator)
    return x.to(dtype), w.to(dtype)


def clearing(device: Device, specialized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of code that clears rows itself, by programs of their own or by a warp of each."""
    device.has(SPECIALIZED if specialized else TILE, DType.BF16)
    return operands(torch.bfloat16)


@pytest.fixture(autouse=True)
def any_result_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_rows, "LEAST_BYTES", 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    index=st.lists(st.integers(-2, M + 2), min_size=M, max_size=M),
    wide=st.booleans(),
    wide_sizes=st.booleans(),
    sizes=st.lists(st.integers(0, 6), min_size=E, max_size=E),
)
def test_every_row_that_no_index_names_is_zero(
    device: Device, index: list[int], sizes: list[int], wide: bool, wide_sizes: bool
) -> None:
    device.launches.clear()
    x, w = operands()
    flat = torch.tensor(index, dtype=torch.int64 if wide else torch.int32)
    m_sizes = torch.tensor(sizes, dtype=torch.int64 if wide_sizes else torch.int32)
    y = torch.full((M, N), float("nan"))
    got = grouped_gemm(x, w, m_sizes, TOPK, flat, permute_y=True, out=y)
    assert got is y
    named = {slot for slot in index[: min(sum(sizes), M)] if 0 <= slot < M}
    for row in range(M):
        assert (y[row] == 0).all() == (row not in named)
        assert y[row].isfinite().all()
    assert device.cleared == [RowOp.CLEAR] * 2


@pytest.mark.parametrize(
    "what", ["small", "no kernel", "of fewer experts", "of odd columns", "begins elsewhere", "with gaps", "no expert"]
)
def test_else_all_of_it_becomes_zero_first(device: Device, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    y = torch.full((M, N), float("nan"))
    index, m_sizes = torch.arange(M), torch.tensor([M])
    if what == "small":
        monkeypatch.setattr(zero_rows, "LEAST_BYTES", y.nbytes + 1)
    if what == "no kernel":
        device.there -= {RowOp.CLEAR}
    if what == "of fewer experts":
        m_sizes = torch.zeros(MOST_EXPERTS + 1, dtype=torch.int32)
    if what == "of odd columns":
        y = torch.full((M, N - 1), float("nan"))
    if what == "begins elsewhere":
        y = torch.full((M * N + 1,), float("nan"))[1:].view(M, N)
    if what == "with gaps":
        y = torch.full((M, 2 * N), float("nan"))[:, :N]
    if what == "no expert":
        m_sizes = m_sizes[:0]
    assert (zero_rows.clear(y, index, m_sizes) == 0).all()
    assert device.cleared == []


def test_what_is_large_enough_is_looked_at(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.full((M, N), float("nan"))
    monkeypatch.setattr(zero_rows, "LEAST_BYTES", y.nbytes)
    zero_rows.clear(y, torch.arange(M), torch.tensor([1, 0, 2]))
    assert y.isnan().all(1).tolist() == [True] * 3 + [False] * (M - 3)
    assert (y[3:] == 0).all()


def test_the_gradient_of_gathered_rows_is_cleared_so_too(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, w = operands()
    dy = torch.randn(M, N)
    sizes = torch.tensor([3, 0, 5, 2])
    index = torch.randperm(M, generator=torch.Generator().manual_seed(1))
    dx = grouped_gemm_dX(dy, w, sizes, TOPK, index, permute_x=True)
    assert device.cleared == [RowOp.CLEAR] * 2
    device.visible = False
    torch.testing.assert_close(dx, grouped_gemm_dX(dy, w, sizes, TOPK, index, permute_x=True), rtol=1e-4, atol=1e-5)


def test_under_a_transform_torch_clears_all_of_it(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operands()
    index, m_sizes = torch.randperm(M), torch.tensor([3, 0, 5, 2])
    device.visible = False

    def call(rows: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(rows, w, m_sizes, TOPK, index, permute_y=True)

    got = torch.func.vmap(call)(torch.stack([x, 2 * x]))
    torch.testing.assert_close(got, torch.stack([call(x), call(2 * x)]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    index=st.lists(st.integers(-2, M + 2), min_size=M, max_size=M, unique=True),
    wide=st.booleans(),
    sizes=st.lists(st.integers(0, 6), min_size=E, max_size=E),
    again=st.booleans(),
    specialized=st.booleans(),
)
def test_code_that_clears_does_it_itself(
    device: Device, index: list[int], sizes: list[int], wide: bool, again: bool, specialized: bool
) -> None:
    x, w = clearing(device, specialized)
    device.launches.clear()
    flat = torch.tensor(index, dtype=torch.int64 if wide else torch.int32)
    m_sizes = torch.tensor(sizes, dtype=torch.int32)
    y = torch.full((M, N), float("nan"), dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "zero_", lambda _one: pytest.fail("it was zeroed"))
        grouped_gemm(x, w, m_sizes, TOPK, flat, permute_y=True, out=y)
        if again:  # a plan's call
            y = grouped_gemm(x, w, m_sizes, TOPK, flat, permute_y=True)
    named = {slot for slot in index[: min(sum(sizes), M)] if 0 <= slot < M}
    for row in range(M):
        assert (y[row] == 0).all() == (row not in named)
        assert y[row].isfinite().all()
    assert device.cleared == []


@pytest.mark.parametrize("specialized", [False, True])
@pytest.mark.parametrize("what", ["many rows", "persistent", "fewer weights", "gathered too"])
def test_else_it_is_done_before(device: Device, monkeypatch: pytest.MonkeyPatch, what: str, specialized: bool) -> None:
    x, w = clearing(device, specialized)
    if what == "persistent":
        device.has(PERSISTENT, DType.BF16)
    index, m_sizes = torch.randperm(M), torch.tensor([3, 0, 5, 2])
    form: dict[str, object] = {"permute_y": True}
    if what == "many rows":
        monkeypatch.setattr(product_kernels, "_SHORT_TO_CLEAR" if specialized else "_FEW_TO_CLEAR", M - 1)
    if what == "gathered too":
        x, form = x[:T], form | {"permute_x": True}
    if what == "fewer weights":  # of y's rows those without a weight take no part
        product = Rows(Op.FORWARD, x, w, m_sizes, Layout.NK, M, index, 0, True, torch.ones(M - 2), zero_tail=True)
        y = rows(product, torch.full((M, N), float("nan"), dtype=torch.bfloat16))
        named = [slot for slot in index[:10].tolist() if slot < M - 2]
    else:
        y = grouped_gemm(x, w, m_sizes, TOPK, index, **form)  # type: ignore[arg-type]
        named = index[:10].tolist()
    assert sorted(named) == y.any(1).nonzero().flatten().tolist()
    assert y.isfinite().all()
    assert device.cleared == [RowOp.CLEAR] * 2


@pytest.mark.parametrize(
    ("what", "clears"),
    [
        ("more", True),
        ("of large matrices", True),
        ("of small ones", False),
        ("too many", False),
        ("most unnamed", False),
    ],
)
def test_a_warp_of_specialised_code_clears_more_rows(
    device: Device, monkeypatch: pytest.MonkeyPatch, what: str, clears: bool
) -> None:
    """Than code that has programs for it: as many as the product hides."""
    monkeypatch.setattr(product_kernels, "_FEW_TO_CLEAR", 1)
    x, w = clearing(device, True)
    limits = {
        "of large matrices": {"_SHORT_TO_CLEAR": 1, "_LARGE_MATRIX": w[0].numel()},
        "of small ones": {"_SHORT_TO_CLEAR": 1, "_LARGE_MATRIX": w[0].numel() + 1},
        "too many": {"_SHORT_TO_CLEAR": 1, "_LARGE_MATRIX": 1, "_MOST_TO_CLEAR": M - 1},
        "most unnamed": {"_MOST_PER_ROW": 0, "_FEW_TO_CLEAR": M},
    }
    for name, value in limits.get(what, {}).items():
        monkeypatch.setattr(product_kernels, name, value)
    grouped_gemm(x, w, torch.tensor([3, 0, 5, 2]), TOPK, torch.randperm(M), permute_y=True)
    assert device.cleared == ([] if clears else [RowOp.CLEAR] * 2)


@pytest.mark.parametrize("specialized", [False, True])
def test_rows_gathered_beforehand_leave_it_to_the_product(device: Device, specialized: bool) -> None:
    """Its code scatters alone."""
    x, w = clearing(device, specialized)
    device.gathers_first((N, 16))
    index, m_sizes = torch.randperm(M), torch.tensor([3, 0, 5, 2])
    y = grouped_gemm(x[:T], w, m_sizes, TOPK, index, permute_x=True, permute_y=True)
    assert sorted(index[:10].tolist()) == y.any(1).nonzero().flatten().tolist()
    assert y.isfinite().all()
    assert device.cleared == []
