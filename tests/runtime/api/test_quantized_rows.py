"""x that arrives as codes: the same bits as the call that quantises the same rows, or an error that says why not.

The emulated GPU is that of tests/support/coded_machine.py. Codes and scales are those that torch makes of x,
in the order that a checkpoint or an all-to-all has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_machine import TOP_K, E, H, I, Machine, T, layer_of, routed
from emulated_driver import emulated

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import RowOp, Scale
from pretuned.runtime import (
    ExpertWeights,
    Lora,
    QuantizedRows,
    experts_mlp,
    explain,
    grouped_gemm,
    moe_mlp,
    sort_routing,
)
from pretuned.runtime.weights.prepared_layout import K_ORDER
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
        coded_rows = coded(hidden, format, by_column=by_column, flat=format == "fp8_channel" and by_column)
        got = moe_mlp(coded_rows, up, down, ids, weights)
        assert got.dtype is torch.bfloat16
        assert torch.equal(got, want)
        assert machine.ran[0] is RowOp.ORDER_CODES
        assert not {RowOp.QUANTIZE, RowOp.QUANTIZE_ROWS} & set(machine.ran)
        out = torch.empty_like(hidden)
        assert moe_mlp(coded_rows, up, down, ids, weights, out=out) is out
        assert torch.equal(out, want)
        batch = QuantizedRows(coded_rows.codes[None], coded_rows.scale[None])
        assert torch.equal(moe_mlp(batch, up, down, ids, weights)[0], want)
        assert torch.equal(
            moe_mlp(coded_rows, up, down, ids, weights.bfloat16()), moe_mlp(hidden, up, down, ids, weights.bfloat16())
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
        got = grouped_gemm(coded(x, format), up, routing.m_sizes, **how)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got[:used], want[:used])
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
    got = moe_mlp(coded(hidden, format), up, down, ids, weights)
    assert machine.ran == [RowOp.ORDER_CODES, RowOp.ACTIVATION, RowOp.COMBINE]
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)
    got = grouped_gemm(coded(hidden[:8], format), up, torch.tensor([8, 0, 0, 0]))
    torch.testing.assert_close(got, first, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("format", FORMATS)
def test_without_a_gpu_the_reference_takes_codes(format: str) -> None:
    g = torch.Generator().manual_seed(3)
    up, down = (ExpertWeights.quantize(torch.randn(E, *s, generator=g) / 16, format) for s in ((2 * I, H), (H, I)))
    hidden, ids, weights = routed(T)
    for coded_rows in (coded(hidden, format), coded(hidden, format, by_column=True)):
        assert torch.equal(moe_mlp(coded_rows, up, down, ids, weights), moe_mlp(hidden, up, down, ids, weights))
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
    apart = QuantizedRows(codes.view(E, -1, H), scale.view(E, T // E, 2))
    adapter = Lora(torch.randn(E, 4, H).bfloat16(), torch.randn(E, 2 * I, 4).bfloat16())
    for call in (
        lambda: grouped_gemm(x, up, sizes, lora=adapter),
        lambda: grouped_gemm(x, up, sizes, lora=adapter._replace(dropout=0.5)),
        lambda: moe_mlp(x, up, down, ids, weights, lora=(adapter, None)),
        lambda: moe_mlp(x, up, down, ids, weights, weights_on="input"),
        lambda: moe_mlp(x, up, down, ids, weights.clone().requires_grad_()),
        lambda: grouped_gemm(x, up, sizes, bias=torch.zeros(E, 2 * I).bfloat16().requires_grad_()),
        lambda: torch.compile(lambda s: grouped_gemm(x, up, s), backend="eager", fullgraph=True)(sizes),
        lambda: torch.compile(lambda s: grouped_gemm(apart, up, s), backend="eager", fullgraph=True)(sizes),
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
    explanation = explain(coded(hidden, format), up, sizes)
    assert explanation.steps[0] == f"order the codes of x into codes [{T}, K]"
    assert len(explanation.steps) == 2
    assert explanation.raises is None
    assert "x arrives as codes" in explanation.reason
    assert str(explanation).count("order the codes") == 1
    assert explanation.to_dict()["quantised_first"]
    plain = explain(hidden, up, sizes)
    assert plain.chosen is not None
    assert explanation.chosen is not None
    assert plain.chosen.variant == explanation.chosen.variant
    machine.publish(quantises=False)
    explanation = explain(coded(hidden, format), up, sizes)
    assert explanation.chosen is not None
    assert explanation.chosen.variant.dtype.quantises_x
    machine.publish(without=RowOp.ORDER_CODES)
    explanation = explain(coded(hidden, format), up, sizes)
    assert explanation.raises is not None
    assert "no usable bundle has the row kernel that orders its codes" in explanation.raises


ROOM, COUNTS = 11, ([3, 0, 11, 5], [0, 0, 0, 0], [11, 11, 11, 11], [20, -1, 1, 2])
STARTS = torch.tensor([33, 0, 20, 10])  # in another order, with room between them


def apart(x: torch.Tensor, format: str, counts: list[int], *, starts: bool, by_column: bool) -> QuantizedRows:
    """Codes of x [E, ROOM, H], with NaN for the codes and scales that no expert has, as DeepEP's buffers have them."""
    codes, scale = coded(x.view(-1, H), format)
    codes, scale = codes.view(E, ROOM, H).clone(), scale.view(E, ROOM, -1).clone()
    for e, count in enumerate(counts):
        codes.view(torch.uint8)[e, max(0, count) :], scale[e, max(0, count) :] = 0x7F, float("nan")
    if not starts:
        return QuantizedRows(codes, scale.mT.contiguous().mT if by_column else scale)
    flat, of_row = torch.full((E * ROOM, H), 0x7F, dtype=torch.uint8), torch.full((E * ROOM, scale.shape[2]), math.nan)
    for e, start in enumerate(STARTS.tolist()):
        count = min(max(counts[e], 0), E * ROOM - start, 10)
        flat[start : start + count], of_row[start : start + count] = (
            codes.view(torch.uint8)[e, :count],
            scale[e, :count],
        )
    return QuantizedRows(flat.view(E4M3), of_row.T.contiguous().T if by_column else of_row)


@pytest.mark.parametrize("where", ["gpu", "cpu"])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("format", FORMATS)
def test_padded_codes_have_the_bits_of_packed_ones(
    request: pytest.FixtureRequest, format: str, counts: list[int], where: str
) -> None:
    """Of every layout of scales, with experts' rows in turn or at starts; padding is neither read nor written."""
    if where == "gpu":
        up, down = request.getfixturevalue("machine").layer(True, format)
    else:
        up, down = (matrix.restore() for matrix in layer_of(True, format))
    x = torch.randn(E, ROOM, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    for starts, by_column in ((False, False), (False, True), (True, False), (True, True)):
        coded_rows = apart(x, format, counts, starts=starts, by_column=by_column)
        there = [min(max(count, 0), 10 if starts else ROOM) for count in counts]
        rows = torch.cat([x[e, :count] for e, count in enumerate(there)])
        sizes = torch.tensor(there if starts else counts, dtype=torch.int32)
        at = STARTS.tolist() if starts else [e * ROOM for e in range(E)]
        index = torch.cat([torch.arange(start, start + count) for start, count in zip(at, there, strict=True)])
        m_starts = STARTS if starts else None
        packed, many = QuantizedRows(*coded(rows, format)), torch.tensor(there, dtype=torch.int32)
        shape = (E * ROOM,) if starts else (E, ROOM)
        hint: dict[str, Any] = {"expected_rows": len(rows)}
        want = grouped_gemm(packed, up, many) if len(rows) else rows.new_empty(0, 2 * I)
        for _ in range(2):
            y = grouped_gemm(coded_rows, up, sizes, m_starts=m_starts, **hint)
            assert (y.shape, y.dtype) == ((*shape, 2 * I), torch.bfloat16)
            assert torch.equal(y.view(-1, 2 * I)[index], want)
            out = torch.full_like(y, 7.0)
            assert grouped_gemm(coded_rows, up, sizes, m_starts=m_starts, out=out, **hint) is out
            filled = torch.full_like(out, 7.0)
            filled.view(-1, 2 * I)[index] = want
            assert torch.equal(out, filled)
            zeroed = grouped_gemm(coded_rows, up, sizes, m_starts=m_starts, zero_tail=True, **hint)
            assert torch.equal(
                zeroed.view(-1, 2 * I), torch.zeros(E * ROOM, 2 * I).bfloat16().index_put_((index,), want)
            )
        layer = experts_mlp(coded_rows, up, down, sizes, m_starts=m_starts, **hint)
        padded = torch.zeros(E * ROOM, H).bfloat16()
        padded[index] = rows
        same = experts_mlp(padded.view(*shape, H), up, down, sizes, m_starts=m_starts, **hint)
        assert (layer.shape, layer.dtype) == ((*shape, H), torch.bfloat16)
        assert torch.equal(layer.view(-1, H)[index], same.view(-1, H)[index]) or where == "gpu"
        out = torch.full_like(layer, 7.0)
        assert experts_mlp(coded_rows, up, down, sizes, m_starts=m_starts, out=out, **hint) is out
        filled = torch.full_like(out, 7.0)
        filled.view(-1, H)[index] = layer.view(-1, H)[index]
        assert torch.equal(out, filled)


@pytest.mark.parametrize("format", FORMATS)
def test_padded_codes_are_ordered_once(machine: Machine, format: str) -> None:
    up, down = machine.layer(True, format)
    x = torch.randn(E, ROOM, H).bfloat16()
    coded_rows = apart(x, format, [ROOM] * E, starts=False, by_column=True)
    machine.launches.clear()
    y = experts_mlp(coded_rows, up, down, torch.tensor([ROOM] * E))
    op = RowOp.ACTIVATION_CODES if format == "fp8_block" else RowOp.ACTIVATION_ROW_CODES
    assert machine.ran == [RowOp.ORDER_CODES, op]
    assert torch.equal(y, experts_mlp(x, up, down, torch.tensor([ROOM] * E)))
    flat = apart(x, format, [ROOM] * E, starts=False, by_column=False)
    if format == "fp8_channel":
        assert torch.equal(
            experts_mlp(QuantizedRows(flat.codes, flat.scale[..., 0]), up, down, torch.tensor([11] * E)), y
        )


def test_padded_codes_that_can_not_be_used(machine: Machine) -> None:
    up, down = machine.layer(True)
    x = torch.randn(E, ROOM, H).bfloat16()
    codes, scale = apart(x, "fp8_block", [ROOM] * E, starts=False, by_column=False)
    coded_rows, sizes = QuantizedRows(codes, scale), torch.tensor([1] * E)
    adapter = Lora(torch.randn(E, 4, H).bfloat16(), torch.randn(E, 2 * I, 4).bfloat16())
    bias = torch.zeros(E, 2 * I).bfloat16().requires_grad_()
    for match, call in (
        (r"x.scale is of shape \[4, 11, 1\], wanted \[4, 11, 2\]", lambda: QuantizedRows(codes, scale[..., :1])),
        (r"x is of shape \[3, 11, 256\], wanted \[E, M_max, K\]", lambda: QuantizedRows(codes[:3], scale[:3])),
        (r"x.codes is torch.bfloat16, wanted torch.float8_e4m3fn", lambda: QuantizedRows(x, scale)),
    ):
        with pytest.raises(InputError, match=f"grouped_gemm: {match}"):
            grouped_gemm(call(), up, sizes)
        with pytest.raises(InputError, match=f"experts_mlp: {match}"):
            experts_mlp(call(), up, down, sizes)
    with pytest.raises(InputError, match="leave one of the two away"):
        grouped_gemm(coded_rows, up, sizes, m_starts=STARTS)
    flat = QuantizedRows(codes.view(-1, H), scale.view(-1, 2))
    with pytest.raises(InputError, match=r"m_starts is torch\.float32"):
        grouped_gemm(flat, up, sizes, m_starts=STARTS.float())
    with pytest.raises(InputError, match="topk with x"):
        grouped_gemm(coded_rows, up, sizes, 2)
    with pytest.raises(InputError, match=r"expected_rows is 45, wanted an int of 0 to E\*M_max"):
        experts_mlp(coded_rows, up, down, sizes, expected_rows=45)
    with pytest.raises(InputError, match=r"out is torch.float32"):
        experts_mlp(coded_rows, up, down, sizes, out=torch.empty(E, ROOM, H))
    memory = torch.zeros(E, ROOM, H).bfloat16()
    shared = QuantizedRows(memory.view(E4M3).view(-1)[: codes.numel()].view(codes.shape), scale)
    with pytest.raises(InputError, match=r"out is in the memory of x\.codes"):
        experts_mlp(shared, up, down, sizes, out=memory)
    for what, call in (
        ("lora", lambda: grouped_gemm(coded_rows, up, sizes, lora=adapter)),
        ("lora", lambda: grouped_gemm(coded_rows, up, sizes, lora=adapter._replace(dropout=0.5))),
        ("lora", lambda: experts_mlp(coded_rows, up, down, sizes, lora=(adapter, None))),
        ("a gradient", lambda: grouped_gemm(coded_rows, up, sizes, bias=bias)),
        ("a gradient", lambda: experts_mlp(coded_rows, up, down, sizes, gate_up_bias=bias)),
    ):
        with pytest.raises(Exception, match=f"QuantizedRows, and there is {what}"):
            call()
    machine.publish(without=RowOp.ORDER_CODES)
    with pytest.raises(InputError, match="no usable bundle has the row kernel that orders its codes"):
        experts_mlp(coded_rows, up, down, sizes)
