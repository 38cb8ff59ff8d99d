"""Padded rows that arrive as codes and are read there, by an emulated GPU (tests/support/coded_machine.py).

The result has the bits of the call that orders the codes first, one launch does it, and padding is neither read nor
written. A call that the code can't do, or that it is slower at, goes the way of any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_machine import IN_PLACE, E, H, I, Machine, tensor_at
from emulated_driver import Launch, emulated
from emulated_kernels import variant_and_code

from pretuned.artifacts.records import DType, Fusion, Op, Problem, RowOp
from pretuned.kernels.spec import Spec
from pretuned.runtime import ExpertWeights, QuantizedRows, experts_mlp, explain, grouped_gemm, preload
from pretuned.runtime.dispatch import decide
from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.inspect.explain import explain_on
from pretuned.runtime.launch import self_test

ROOM = 40
COUNTS = ((7, 0, 40, 1), (0, 0, 0, 0), (40, 40, 40, 40), (-3, 5, 99, 2))
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def machine(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    with emulated(Machine(clean_places)) as gpu:
        gpu.publish(in_place=True)
        yield gpu  # type: ignore[misc]


def weights(machine: Machine, N: int, K: int) -> ExpertWeights:
    g = torch.Generator().manual_seed(N)
    w = ExpertWeights.quantize(torch.randn(E, N, K, generator=g) / K**0.5, "fp8_block").prepare()
    machine.dense[w.codes.data_ptr()] = w.dequantize(torch.float32)
    return w


def drawn(used: int, K: int = H) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of rows."""
    g = torch.Generator().manual_seed(used)
    groups = torch.randn(used, K, generator=g).view(used, K // 128, 128)
    factor = groups.abs().amax(-1) / 448
    return (groups / factor[..., None]).to(E4M3).view(torch.uint8).view(used, K), factor


def placed(
    counts: tuple[int, ...], first: list[int], R: int, by_column: bool, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [R, K], scales [R, G], which rows are there, expert by expert, their place), NaN elsewhere."""
    clipped = [min(max(count, 0), most) for count in counts]
    rows = torch.cat([first[e] + torch.arange(count) for e, count in enumerate(clipped)])
    bits, factor = drawn(len(rows))
    codes, scale = torch.full((R, H), 0x7F, dtype=torch.uint8), torch.full((R, H // 128), float("nan"))
    codes[rows], scale[rows] = bits, factor
    return codes.view(E4M3), scale.T.contiguous().T if by_column else scale, rows, torch.tensor(clipped)


def packed(machine: Machine, counts: torch.Tensor, w: ExpertWeights) -> torch.Tensor:
    """The call of the same rows without padding."""
    bits, factor = drawn(int(counts.sum()))
    return grouped_gemm(QuantizedRows(bits.view(E4M3), factor), w, counts.to(torch.int32))


def launched(machine: Machine) -> list[Any]:
    return [launch.code.op if isinstance(launch.code.op, RowOp) else launch.code.fusion for launch in machine.launches]


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_padded_rows_have_the_bits_of_packed_ones(machine: Machine, counts: tuple[int, ...], by_column: bool) -> None:
    w, R = weights(machine, 2 * I, H), E * ROOM
    codes, scale, rows, clipped = placed(counts, [e * ROOM for e in range(E)], R, False, ROOM)
    scale = scale.view(E, ROOM, -1)
    x = QuantizedRows(codes.view(E, ROOM, H), scale.mT.contiguous().mT if by_column else scale)
    want = packed(machine, clipped, w)
    for dtype in (torch.int32, torch.int64):
        out = torch.full((E, ROOM, 2 * I), 7.25, dtype=torch.bfloat16)
        machine.launches.clear()
        y = grouped_gemm(x, w, torch.tensor(counts, dtype=dtype), out=out)
        assert launched(machine) == [Fusion.STARTS]
        assert y is out
        flat = out.view(R, -1)
        assert torch.equal(flat[rows], want[: len(rows)])
        flat[rows] = 7.25
        assert bool((flat == 7.25).all())
        new = grouped_gemm(x, w, torch.tensor(counts, dtype=dtype))
        assert new.shape == (E, ROOM, 2 * I)
        assert new.dtype is torch.bfloat16
        assert torch.equal(new.view(R, -1)[rows], want[: len(rows)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("by_column", [False, True])
def test_rows_at_starts_have_the_bits_of_packed_ones(machine: Machine, dtype: torch.dtype, by_column: bool) -> None:
    w, counts, first, R = weights(machine, 2 * I, H), (7, 0, 40, 1), [60, 3, 9, 2], 70
    codes, scale, rows, clipped = placed(counts, first, R, by_column, R)
    want, out = packed(machine, clipped, w), torch.full((R, 2 * I), 7.25, dtype=torch.bfloat16)
    machine.launches.clear()
    how = {"m_starts": torch.tensor(first, dtype=dtype), "out": out}
    grouped_gemm(QuantizedRows(codes, scale), w, torch.tensor(counts, dtype=torch.int32), **how)
    assert launched(machine) == [Fusion.STARTS]
    assert torch.equal(out[rows], want[: len(rows)])
    out[rows] = 7.25
    assert bool((out == 7.25).all())


@pytest.mark.parametrize("asked", ["bias", "zero_tail", "slower", "nothing", "strides"])
def test_other_calls_order_the_codes(machine: Machine, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """A bias, rows that become zero, code that is slower by the cost model or in no bundle, scales too far apart."""
    w, counts, R = weights(machine, 2 * I, H), (7, 0, 40, 1), E * ROOM
    codes, scale, rows, clipped = placed(counts, [e * ROOM for e in range(E)], R, False, ROOM)
    want, how = packed(machine, clipped, w), {}
    if asked == "bias":
        how = {"bias": torch.zeros(E, 2 * I, dtype=torch.bfloat16)}
    if asked == "zero_tail":
        how = {"zero_tail": True}
    if asked == "slower":
        monkeypatch.setattr("pretuned.kernels.cost_model.in_place_is_faster", lambda *_: False)
    if asked == "nothing":
        machine.publish()
    if asked == "strides":
        monkeypatch.setattr("pretuned.runtime.launch.quantised._MOST_APART", 100)
    machine.launches.clear()
    x = QuantizedRows(codes.view(E, ROOM, H), scale.view(E, ROOM, -1))
    y = grouped_gemm(x, w, torch.tensor(counts, dtype=torch.int32), **how).view(R, -1)
    assert launched(machine)[:2] == [RowOp.PLACE_ROWS, RowOp.ORDER_CODES]
    assert torch.equal(y[rows], want[: len(rows)])
    if asked == "zero_tail":
        y[rows] = 0
        assert not bool(y.any())


def test_the_cost_model_chooses_among_the_tiles(machine: Machine) -> None:
    problem = Problem(Op.FORWARD, DType.FP8_BLOCK, E, 2 * I, H, fusion=Fusion.STARTS)
    chosen = decide.in_place(snapshot(), problem, 64, machine.local)
    assert chosen is not None
    assert chosen.variant.fusion is Fusion.STARTS


@pytest.mark.parametrize("starts", [None, [60, 3, 9, 2]])
def test_a_layers_first_product_reads_codes_where_they_arrive(machine: Machine, starts: list[int] | None) -> None:
    """Its rows are stored without padding, as the activation reads them."""
    up, down = machine.layer(True)
    counts, R = (7, 0, 40, 1), E * ROOM if starts is None else 70
    first = starts or [e * ROOM for e in range(E)]
    codes, scale, rows, _ = placed(counts, first, R, starts is not None, ROOM)
    x, how = QuantizedRows(codes, scale), {"m_starts": torch.tensor(first)}
    if starts is None:
        x, how = QuantizedRows(codes.view(E, ROOM, H), scale.view(E, ROOM, -1)), {}
    m_sizes, results = torch.tensor(counts, dtype=torch.int32), []
    for in_place in (True, False):
        machine.publish(in_place=in_place)
        out = torch.full((*x.codes.shape[:-1], H), 7.25, dtype=torch.bfloat16)
        experts_mlp(x, up, down, m_sizes, out=out, **how)
        ran = launched(machine)
        assert (Fusion.STARTS in ran, RowOp.ORDER_CODES in ran) == (in_place, not in_place)
        results.append(out.view(R, H))
    assert torch.equal(*results)
    results[0][rows] = 7.25
    assert bool((results[0] == 7.25).all())


def off_by_a_row(launch: Launch) -> None:
    """A row of padding is written."""
    words, at = launch.words, launch.addresses()
    tensor_at(at["y"], (words["M"], words["stride_y_m"]), torch.bfloat16)[-1, 0] = 1.0


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("spec", IN_PLACE, ids=str)
def test_its_self_test(machine: Machine, spec: Spec, wrong: bool) -> None:
    """The emulated kernel's result passes at starts of any kind; a row too many is noticed."""

    def spoils(launch: Launch) -> None:
        machine.multiply_in_place(launch)
        off_by_a_row(launch)

    if wrong:
        machine.after[variant_and_code(spec)[0].cubin_sha256] = spoils
    said = self_test.tried(machine.load(spec))
    assert (said is None) == (not wrong), said
    if wrong:
        assert str(said).startswith("y of padded rows[1823, 0] is 1")


def test_explain_and_preload_know_it(machine: Machine) -> None:
    w, counts = weights(machine, 2 * I, H), torch.tensor(COUNTS[0], dtype=torch.int32)
    codes, scale, *_ = placed(COUNTS[0], [e * ROOM for e in range(E)], E * ROOM, False, ROOM)
    x = QuantizedRows(codes.view(E, ROOM, H), scale.view(E, ROOM, -1))
    explanation = explain(x, w, counts, sm=90)
    assert explanation.chosen is not None
    assert explanation.chosen.variant.fusion is Fusion.STARTS
    assert "read in place" in explanation.reason
    assert not explanation.quantised_first
    preload(problems=[Problem(Op.FORWARD, DType.FP8_BLOCK, E, 2 * I, H)], tokens=range(1, 64))
    assert Fusion.STARTS in {code.fusion for code in machine.loads}
    machine.loads.clear()
    grouped_gemm(x, w, counts)
    assert not machine.loads
    machine.publish()
    problem = Problem(Op.FORWARD, DType.FP8_BLOCK, E, 2 * I, H)
    assert explain_on(problem, 64, machine.local, aligned=True, coded=True, padded=True).quantised_first
