"""x that arrives as codes: the same bits as the call that quantises the same rows, or an error that says why not.

The emulated GPU is that of tests/support/coded_machine.py. Codes and scales are those that torch makes of x,
in the order that a checkpoint or an all-to-all has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_machine import TOP_K, E, H, I, Machine, T, routed
from emulated_driver import emulated

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records.precision import Scale
from pretuned.artifacts.records.problem import RowOp
from pretuned.runtime import ExpertWeights, Lora, QuantizedRows, explain, grouped_gemm, moe_mlp, sort_routing
from pretuned.runtime.weights.order import K_ORDER
from pretuned.runtime.weights.row_codes import codes_of_rows

FORMATS = ["fp8_block", "fp8_channel"]
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def machine(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    with emulated(Machine(clean_places)) as gpu:
        yield gpu  # type: ignore[misc]


def coded(x: torch.Tensor, format: str, *, by_column: bool = False, flat: bool = False) -> QuantizedRows:
    """x as an all-to-all quantises it: codes in their natural order, a scale for each row and group."""
    codes, scale = codes_of_rows(x, Scale("fp32", 1, 128 if format == "fp8_block" else 0))
    bits = codes.view(torch.uint8).view(len(x), x.shape[1] // 64, 64)
    natural = torch.empty_like(bits)
    natural[..., torch.tensor(K_ORDER)] = bits
    scale = scale[:, : len(x)].T if scale.dim() == 2 else scale if flat else scale[:, None]
    if not flat:
        scale = scale.T.contiguous().T if by_column else scale.contiguous()
    return QuantizedRows(natural.view(x.shape).view(E4M3), scale)


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_has_the_bits_of_one_that_quantises_its_rows(machine: Machine, format: str, by_column: bool) -> None:
    up, down = machine.layer(True, format)
    for many in (T, T, 31):
        hidden, ids, weights = routed(many)
        want = moe_mlp(hidden, up, down, ids, weights)
        machine.launches.clear()
        given = coded(hidden, format, by_column=by_column, flat=format == "fp8_channel" and by_column)
        found = moe_mlp(given, up, down, ids, weights)
        assert found.dtype is torch.bfloat16
        assert torch.equal(found, want)
        assert machine.ran[0] is RowOp.ORDER_CODES
        assert not {RowOp.QUANTIZE, RowOp.QUANTIZE_ROWS} & set(machine.ran)
        out = torch.empty_like(hidden)
        assert moe_mlp(given, up, down, ids, weights, out=out) is out
        assert torch.equal(out, want)
        batch = QuantizedRows(given.codes[None], given.scale[None])
        assert torch.equal(moe_mlp(batch, up, down, ids, weights)[0], want)
        assert torch.equal(
            moe_mlp(given, up, down, ids, weights.bfloat16()), moe_mlp(hidden, up, down, ids, weights.bfloat16())
        )


@pytest.mark.parametrize("format", FORMATS)
def test_a_product_has_the_bits_of_one_that_quantises_its_rows(machine: Machine, format: str) -> None:
    """Of sorted rows, fewer of which experts have, and of rows that are gathered."""
    up, _ = machine.layer(True, format)
    hidden, ids, _ = routed(T)
    routing = sort_routing(ids, E)
    rows = hidden[routing.gather_indices // TOP_K]
    plain: dict[str, Any] = {"zero_tail": True}
    gathered: dict[str, Any] = {"topk": TOP_K, "gather_indices": routing.gather_indices, "permute_x": True}
    used = int(routing.m_sizes.sum())
    for x, how in ((rows, plain), (hidden, gathered)):
        want = grouped_gemm(x, up, routing.m_sizes, **how)
        machine.launches.clear()
        found = grouped_gemm(coded(x, format), up, routing.m_sizes, **how)
        assert (found.dtype, found.shape) == (want.dtype, want.shape)
        assert torch.equal(found[:used], want[:used])
        assert machine.ran == [RowOp.ORDER_CODES]
    out = torch.full((len(rows), 2 * I), 7.0).bfloat16()
    assert grouped_gemm(coded(rows, format), up, routing.m_sizes, out=out) is out
    assert torch.equal(out[:used], grouped_gemm(rows, up, routing.m_sizes)[:used])


@pytest.mark.parametrize("format", FORMATS)
def test_x_is_read_as_codes_where_a_plan_would_leave_it_as_it_is(machine: Machine, format: str) -> None:
    up, down = machine.layer(True, format)
    hidden, ids, weights = routed(T)
    want = moe_mlp(hidden, up, down, ids, weights)
    first = grouped_gemm(hidden[:8], up, torch.tensor([8, 0, 0, 0]))
    machine.publish(quantises=False)
    machine.launches.clear()
    found = moe_mlp(coded(hidden, format), up, down, ids, weights)
    assert machine.ran == [RowOp.ORDER_CODES, RowOp.ACTIVATION, RowOp.COMBINE]
    torch.testing.assert_close(found, want, rtol=0.1, atol=0.1)
    found = grouped_gemm(coded(hidden[:8], format), up, torch.tensor([8, 0, 0, 0]))
    torch.testing.assert_close(found, first, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("format", FORMATS)
def test_without_a_gpu_the_reference_takes_codes(format: str) -> None:
    g = torch.Generator().manual_seed(3)
    up, down = (ExpertWeights.quantize(torch.randn(E, *s, generator=g) / 16, format) for s in ((2 * I, H), (H, I)))
    hidden, ids, weights = routed(T)
    for given in (coded(hidden, format), coded(hidden, format, by_column=True)):
        assert torch.equal(moe_mlp(given, up, down, ids, weights), moe_mlp(hidden, up, down, ids, weights))
    sizes = torch.tensor([3, 0, 9, T - 12])
    assert torch.equal(grouped_gemm(coded(hidden, format), up, sizes), grouped_gemm(hidden, up, sizes))
    assert grouped_gemm(coded(hidden[:0], format), up, torch.zeros(E, dtype=torch.int64)).shape == (0, 2 * I)


def test_what_has_no_kernel_for_codes_is_an_error_that_says_why(machine: Machine) -> None:
    hidden, _, _ = routed(T)
    sizes, x = torch.tensor([T, 0, 0, 0]), coded(hidden, "fp8_block")
    up, _ = machine.layer(True)
    stored = ExpertWeights.quantize(torch.randn(E, 2 * I, H), "fp8_block")
    with pytest.raises(InputError, match=r"checkpoint's layout.*w.prepare\(\)"):
        grouped_gemm(x, stored, sizes)
    routing = sort_routing(torch.zeros(T, 1, dtype=torch.int64), E)
    with pytest.raises(InputError, match=r"out of range.*out and zero_tail"):
        grouped_gemm(x, up, routing.m_sizes, 1, routing.gather_indices, permute_x=True, zero_tail=True)
    machine.publish(without=RowOp.ORDER_CODES)
    with pytest.raises(
        InputError, match="no usable bundle has the row kernel that orders its codes; or pass bfloat16 rows"
    ):
        grouped_gemm(x, up, sizes)


def test_what_can_not_be_used_is_an_error_that_says_what_is_wanted() -> None:
    hidden, ids, weights = routed(T)
    up, down = (ExpertWeights.quantize(torch.randn(E, *s), "fp8_block") for s in ((2 * I, H), (H, I)))
    sizes, (codes, scale) = torch.tensor([T, 0, 0, 0]), coded(hidden, "fp8_block")
    wide = torch.zeros(T, 2 * H).to(E4M3)
    for wrong, what in (
        ((codes.float(), scale), "codes is torch.float32, wanted torch.float8_e4m3fn"),
        ((codes, scale.bfloat16()), "scale is torch.bfloat16, wanted torch.float32"),
        ((codes, scale[:, :1]), r"scale is of shape \[24, 1\], wanted \[24, 2\]"),
        ((codes, scale[:-1]), r"scale is of shape \[23, 2\], wanted \[24, 2\]"),
        ((codes, scale.T), r"scale is of shape \[2, 24\], wanted \[24, 2\]"),
        ((wide[:, :H], scale), r"codes is with strides \[512, 1\], wanted a contiguous"),
        ((codes[0], scale[0]), r"codes is of shape \[256\]"),
        ((codes[:, :64].contiguous(), scale[:, :1]), "codes is of shape .*whole 128 columns"),
        ((codes, scale.clone().requires_grad_()), "scale is a tensor that requires grad"),
        (([1], scale), "codes is a list, wanted a torch.Tensor"),
        ((codes, scale.to("meta")), "scale is on meta"),
    ):
        with pytest.raises(InputError, match=f"grouped_gemm: x.{what}"):
            grouped_gemm(QuantizedRows(*wrong), up, sizes)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"moe_mlp: hidden.{what}"):
            moe_mlp(QuantizedRows(*wrong), up, down, ids, weights)  # type: ignore[arg-type]
    x = QuantizedRows(codes, scale)
    as_stored = ExpertWeights.quantize(torch.randn(E, 2 * I, H), "mxfp4")
    others = (
        as_stored,
        ExpertWeights.fp8_block(up.codes, up.scale, quantize_x=False),
        torch.randn(E, 2 * I, H).bfloat16(),
    )
    for other in others:
        with pytest.raises(InputError, match=r"beside .*, whose products do not read x as codes\. Wanted"):
            grouped_gemm(x, other, sizes)
        with pytest.raises(InputError, match=r"beside .*, whose products do not read x as codes\. Wanted"):
            moe_mlp(x, other, down, ids, weights)
    adapter = Lora(torch.randn(E, 4, H).bfloat16(), torch.randn(E, 2 * I, 4).bfloat16())
    for call in (
        lambda: grouped_gemm(x, up, sizes, lora=adapter),
        lambda: grouped_gemm(x, up, sizes, lora=adapter._replace(dropout=0.5)),
        lambda: moe_mlp(x, up, down, ids, weights, lora=(adapter, None)),
        lambda: moe_mlp(x, up, down, ids, weights, weights_on="input"),
        lambda: moe_mlp(x, up, down, ids, weights.clone().requires_grad_()),
        lambda: grouped_gemm(x, up, sizes, bias=torch.zeros(E, 2 * I).bfloat16().requires_grad_()),
        lambda: torch.compile(lambda s: grouped_gemm(x, up, s), backend="eager", fullgraph=True)(sizes),
    ):
        with pytest.raises(Exception, match="QuantizedRows, and there is "):
            call()
    memory = torch.zeros(T, H, dtype=torch.bfloat16)
    shared = QuantizedRows(memory.view(E4M3).view(-1)[: T * H].view(T, H), scale)
    with pytest.raises(InputError, match=r"out is in the memory of hidden\.codes"):
        moe_mlp(shared, up, down, ids, weights, out=memory)


@pytest.mark.parametrize("format", FORMATS)
def test_explain_says_that_codes_are_ordered(machine: Machine, format: str) -> None:
    up, _ = machine.layer(True, format)
    hidden, sizes = routed(T)[0], torch.tensor([T, 0, 0, 0])
    told = explain(coded(hidden, format), up, sizes)
    assert told.steps[0] == f"order the codes of x into codes [{T}, K]"
    assert len(told.steps) == 2
    assert told.raises is None
    assert "x arrives as codes" in told.reason
    assert str(told).count("order the codes") == 1
    assert told.to_dict()["quantised_first"]
    plain = explain(hidden, up, sizes)
    assert plain.chosen is not None
    assert told.chosen is not None
    assert plain.chosen.variant == told.chosen.variant
    machine.publish(quantises=False)
    told = explain(coded(hidden, format), up, sizes)
    assert told.chosen is not None
    assert told.chosen.variant.dtype.quantises_x
    machine.publish(without=RowOp.ORDER_CODES)
    told = explain(coded(hidden, format), up, sizes)
    assert told.raises is not None
    assert "no usable bundle has the row kernel that orders its codes" in told.raises


def test_rows_that_lie_apart_are_no_codes() -> None:
    x = QuantizedRows(torch.zeros(4, 128, dtype=torch.float8_e4m3fn), torch.ones(4, 1))
    starts = torch.tensor([0, 2])
    with pytest.raises(InputError, match="m_starts with QuantizedRows"):
        grouped_gemm(x, torch.zeros(2, 8, 128), starts, m_starts=starts)
