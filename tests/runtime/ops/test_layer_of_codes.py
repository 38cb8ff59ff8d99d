"""A layer whose products read codes of both operands, on host memory that is said to be a GPU's.

Its passes and its products are made up, and carry out what the real ones do on the very addresses that they are given.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from host_gpu import SLOTS, FakeLauncher, activation_of, fake_sort

from pretuned.artifacts.records.precision import PRECISIONS, DType
from pretuned.artifacts.records.problem import RowOp
from pretuned.artifacts.records.target import Gpu, LocalGpu
from pretuned.kernels.contract import rowops
from pretuned.kernels.contract.activations import Activation
from pretuned.kernels.contract.block_scaled import scale_columns
from pretuned.runtime import ExpertWeights, current, moe_mlp
from pretuned.runtime.check import tensors as check_tensors
from pretuned.runtime.check.operands import Rows
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.launch import program, quantised, ready
from pretuned.runtime.launch import rowops as launch_rowops
from pretuned.runtime.launch.ready import Ready
from pretuned.runtime.ops import products, routing
from pretuned.runtime.ops.activation import by_torch
from pretuned.runtime.replay import layer_plan, plan, programs
from pretuned.runtime.weights.row_codes import codes_of_rows, values_of_rows

E, T, TOP_K, H, I = 4, 24, 2, 256, 128  # noqa: E741
ONE, TWO = [RowOp.ACTIVATION_CODES], [RowOp.ACTIVATION, RowOp.QUANTIZE]


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The memory that begins there."""
    held = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(held, dtype=dtype).view(shape)


def used_of(address: int, M: int, flags: int) -> int:
    return int(tensor_at(address, (1,), torch.int32)) if flags & rowops.USED else M


def scales_at(address: int, M: int, K: int, by_row: bool) -> torch.Tensor:
    return tensor_at(address, (M,) if by_row else (K // 128, scale_columns(M)), torch.float32)


def store_codes(rows: torch.Tensor, codes: int, scale: int, M: int, by_row: bool) -> None:
    K, of_x = rows.shape[1], PRECISIONS["fp8_channel" if by_row else "fp8_block"].x.scale
    assert of_x is not None
    made, factors = codes_of_rows(rows, of_x)
    tensor_at(codes, (M, K), torch.uint8)[: len(rows)] = made.view(torch.uint8)
    scales_at(scale, M, K, by_row)[..., : len(rows)] = factors[..., : len(rows)]


def activated(h: int, used: int, M: int, columns: int, flags: int, words: list[int]) -> torch.Tensor:
    act = activation_of(flags, words)
    return by_torch(tensor_at(h, (M, columns * (1 + act.gated)), torch.bfloat16)[: used_of(used, M, flags)], act)


def activate(rows: int, columns: int, pointers: Any, numbers: Any) -> None:
    (h, a, used), (M, _, flags, *words) = pointers, numbers
    made = activated(h, used, M, columns, flags, words)
    tensor_at(a, (M, columns), torch.bfloat16)[: len(made)] = made


def activate_to_codes(rows: int, columns: int, pointers: Any, numbers: Any, by_row: bool = False) -> None:
    (h, used, codes, scale), (M, _, flags, *words) = pointers, numbers
    store_codes(activated(h, used, M, columns, flags, words), codes, scale, M, by_row)


def quantize(rows: int, columns: int, pointers: Any, numbers: Any, by_row: bool = False) -> None:
    (x, index, used, codes, scale), (M, _, top_k, step, flags) = pointers, numbers
    source = torch.arange(used_of(used, M, flags))
    if flags & rowops.PICKED:
        source = tensor_at(index, (M,), torch.int64 if step == 2 else torch.int32)[: len(source)].long() // top_k
    store_codes(tensor_at(x, (int(source.max()) + 1, columns), torch.bfloat16)[source], codes, scale, M, by_row)


def combine(rows: int, columns: int, pointers: Any, numbers: Any) -> None:
    (y, places, weights, _, _, out), (T, _, top_k, flags) = pointers, numbers
    assert not flags & (rowops.NARROW | rowops.BIASED)
    place = tensor_at(places, (T * top_k,), torch.int32).long()
    every = tensor_at(y, (T * top_k, columns), torch.bfloat16).float()[place.clamp(min=0)]
    every = torch.where((place >= 0)[:, None], every * tensor_at(weights, (T * top_k, 1), torch.float32), 0.0)
    tensor_at(out, (T, columns), torch.bfloat16)[:] = every.view(T, top_k, columns).sum(1)


PASSES = {
    RowOp.ACTIVATION: activate, RowOp.ACTIVATION_CODES: activate_to_codes, RowOp.QUANTIZE: quantize,
    RowOp.QUANTIZE_ROWS: partial(quantize, by_row=True),
    RowOp.ACTIVATION_ROW_CODES: partial(activate_to_codes, by_row=True), RowOp.COMBINE: combine,
    RowOp.SORT_SLOTS: fake_sort,
}  # fmt: skip


class Machine:
    """A GPU whose bundle has the products of codes: which passes it has, and which ran."""

    def __init__(self) -> None:
        self.there = set(PASSES)
        self.ran: list[RowOp] = []
        self.resolved = 0
        self.quantises = True

    def passes(self, op: RowOp, dtype: DType, device: int, *, aligned: bool) -> Callable[..., None] | None:
        assert aligned
        if op not in self.there:
            return None

        def launch(rows: int, columns: int, pointers: Any, numbers: Any, stream: int) -> None:
            self.ran += [op] if op is not RowOp.SORT_SLOTS else []
            PASSES[op](rows, columns, pointers, numbers)

        launch.block, launch.most_experts = SLOTS, 512  # type: ignore[attr-defined]
        return launch

    def of_ordered(self, call: Rows, w: ExpertWeights, y: torch.Tensor) -> Ready | None:
        """A product of codes, or where x is not to be quantised none at all."""
        self.resolved += 1
        if not self.quantises:
            return None
        dense, (_, N, K), by_row = w.dequantize(torch.float32), w.shape, w.format == "fp8_channel"
        op = RowOp.QUANTIZE_ROWS if by_row else RowOp.QUANTIZE

        def run(result: int, m_sizes: int, *, x: int, x_scale: int, M: int, **_: int) -> None:
            codes = tensor_at(x, (M, K), torch.float8_e4m3fn)
            values = values_of_rows(codes, scales_at(x_scale, M, K, by_row), slice(0, M))
            sizes = tensor_at(m_sizes, (E,), torch.int32).tolist()
            stored, row = tensor_at(result, (M, N), torch.bfloat16), 0
            for e, count in enumerate(sizes):
                stored[row : row + count] = values[row : row + count] @ dense[e].T
                row += count

        return Ready(FakeLauncher(run, True), "a product", quantize=self.passes(op, DType.BF16, 0, aligned=True))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    found = Machine()
    with monkeypatch.context() as patch:
        patch.setattr(quantised, "_of_prepared", found.of_ordered)
        patch.setattr(quantised, "_of_codes_as_they_are", lambda *_: None)
        patch.setattr(quantised, "wants_order", lambda w, _device: w.is_prepared)
        patch.setattr(ready, "_kernel", lambda *_: None)  # of no w that is not quantised
        patch.setattr(launch_rowops, "launcher", found.passes)
        patch.setattr(check_tensors, "on_gpu", lambda tensor: not tensor.is_meta)
        patch.setattr(current, "snapshot", dispatch_snapshot.Snapshot(()))
        for module in (program, programs, plan, layer_plan):
            patch.setattr(module, "stream_of", lambda _device: 0)
        patch.setattr(routing, "current_stream", lambda _device: 0)
        patch.setattr(products, "local_gpu", lambda _device: LocalGpu(90, Gpu("", 132, 1 << 17, 0)))
        patch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield found


def layer_of(gated: bool, format: str = "fp8_block") -> tuple[ExpertWeights, ExpertWeights]:
    g = torch.Generator().manual_seed(3)
    pairs = ((1 + gated) * I, H), (H, I)
    up, down = (ExpertWeights.quantize(torch.randn(E, N, K, generator=g) / K**0.5, format) for N, K in pairs)
    return up.prepare(), down.prepare()


def routed(T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(T)
    ids = torch.rand(T, E, generator=g).topk(TOP_K).indices
    ids[T // 2 :, 1] = -1  # of no expert
    return torch.randn(T, H, generator=g).bfloat16(), ids, torch.rand(T, TOP_K, generator=g)


ACTS: list[tuple[str | Activation, bool, bool]] = [
    ("silu", True, False), ("swiglu_oai", True, True), ("relu2", False, False),
    (Activation("situ", beta=1.5, linear_beta=2.0), True, False),
]  # fmt: skip


@pytest.mark.parametrize(("act", "gated", "interleaved"), ACTS)
def test_one_pass_does_what_two_did(machine: Machine, act: str | Activation, gated: bool, interleaved: bool) -> None:
    """Also in a call that comes again, of another number of rows, which is a program's."""
    up, down = layer_of(gated)

    def run(T: int) -> torch.Tensor:
        hidden, ids, weights = routed(T)
        return moe_mlp(hidden, up, down, ids, weights, activation=act, gated=gated, interleaved=interleaved)

    found = []
    for T in (24, 24, 23):
        machine.ran.clear()
        found.append(run(T))
        assert machine.ran == [RowOp.QUANTIZE, *ONE, RowOp.COMBINE]
    assert machine.resolved == 2  # of the first call alone: one for each product
    machine.there.discard(RowOp.ACTIVATION_CODES)
    current.snapshot = dispatch_snapshot.Snapshot(())
    for one, T in zip(found, (24, 24, 23), strict=True):
        machine.ran.clear()
        assert torch.equal(run(T), one)
        assert machine.ran == [RowOp.QUANTIZE, *TWO, RowOp.COMBINE]


@pytest.mark.parametrize(("act", "gated", "interleaved"), ACTS[:3])
def test_weights_with_a_scale_a_row_have_row_kernels_of_their_own(
    machine: Machine, act: str | Activation, gated: bool, interleaved: bool
) -> None:
    up, down = layer_of(gated, "fp8_channel")
    hidden, ids, weights = routed(T)

    def run() -> torch.Tensor:
        machine.ran.clear()
        return moe_mlp(hidden, up, down, ids, weights, activation=act, gated=gated, interleaved=interleaved)

    first = [run() for _ in range(2)]
    assert machine.ran == [RowOp.QUANTIZE_ROWS, RowOp.ACTIVATION_ROW_CODES, RowOp.COMBINE]
    machine.there.discard(RowOp.ACTIVATION_ROW_CODES)
    current.snapshot = dispatch_snapshot.Snapshot(())
    assert torch.equal(run(), first[0])
    assert machine.ran == [RowOp.QUANTIZE_ROWS, RowOp.ACTIVATION, RowOp.QUANTIZE_ROWS, RowOp.COMBINE]
    assert torch.equal(*first)


def test_a_bundle_without_the_pass_runs_as_before(machine: Machine) -> None:
    machine.there.discard(RowOp.ACTIVATION_CODES)
    up, down = layer_of(True)
    hidden, ids, weights = routed(T)
    moe_mlp(hidden, up, down, ids, weights)
    assert machine.ran == [RowOp.QUANTIZE, *TWO, RowOp.COMBINE]


def test_x_that_stays_as_it_is_is_activated_alone(machine: Machine) -> None:
    """Where the second product reads no codes the activation is stored."""
    machine.quantises = False
    up, down = layer_of(True)
    hidden, ids, weights = routed(T)
    moe_mlp(hidden, up, down, ids, weights)
    assert machine.ran == [RowOp.ACTIVATION, RowOp.COMBINE]
    machine.quantises = True
    current.snapshot = dispatch_snapshot.Snapshot(())
    machine.ran.clear()
    dense = ExpertWeights.dequantize(down, torch.bfloat16)
    moe_mlp(hidden, up, dense, ids, weights)
    assert RowOp.ACTIVATION in machine.ran
    assert RowOp.ACTIVATION_CODES not in machine.ran


def test_what_a_gradient_needs_is_kept(machine: Machine) -> None:
    """That is h, which the pass reads; the activation itself is nowhere."""
    up, down = layer_of(True)
    hidden, ids, weights = routed(T)
    want = moe_mlp(hidden, up, down, ids, weights)
    machine.ran.clear()
    found = moe_mlp(hidden.requires_grad_(), up, down, ids, weights)
    assert torch.equal(found, want)
    assert machine.ran == [RowOp.QUANTIZE, *ONE, RowOp.COMBINE]
    assert found.grad_fn is not None
