"""A GPU that is host memory: launches are carried out on it as the kernels' docstrings say."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Op, RowOp
from pretuned.artifacts.records.target import Gpu, LocalGpu
from pretuned.kernels.contract import rowops
from pretuned.kernels.contract.activations import KINDS, Activation
from pretuned.kernels.contract.config import Config, Loads, Schedule
from pretuned.kernels.contract.registry import clears
from pretuned.kernels.contract.rowops import MOST_SORTED_EXPERTS
from pretuned.kernels.contract.spec import code_of
from pretuned.runtime import current, grouped_gemm, sort_routing
from pretuned.runtime.check import tensors as check_tensors
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.driver import descriptors
from pretuned.runtime.launch import gemm as launch_gemm
from pretuned.runtime.launch import program, ready
from pretuned.runtime.launch import rowops as launch_rowops
from pretuned.runtime.ops import products, routing, zero_rows
from pretuned.runtime.ops.activation import RowActivation, by_torch
from pretuned.runtime.replay import layer_plan, plan, programs

T, TOPK, E, N, K = 7, 2, 4, 8, 12
SLOTS = 5  # of a chunk that is sorted
ALL = {(op, fusion) for op in Op for fusion in (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)}
LOW_RANK = {(op, Fusion.LOW_RANK | fusion) for op in (Op.FORWARD, Op.DX) for fusion in (Fusion.NONE, Fusion.GATHER)}


def at(address: int, count: int, kind: Any = ctypes.c_float) -> Any:
    assert address or not count, "a kernel reads at a null pointer"
    return np.ctypeslib.as_array((kind * count).from_address(address))


def counts_at(address: int, E: int, step: int) -> list[int]:
    return at(address, E, ctypes.c_int32 if step == 1 else ctypes.c_int64).tolist()


INDEXED = Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT
SPECIALIZED = Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)


class FakeLauncher:
    """A launcher of the host: ``run(result, m_sizes, **words)`` computes the result."""

    def __init__(self, run: Callable[..., None], zeroes: bool = False) -> None:
        self.run, self.zeroes = run, zeroes

    def pack(self, **words: int) -> dict[str, int]:
        return words

    def start(self, packed: dict[str, int], result: int, m_sizes: int, stream: int) -> None:
        self.run(result, m_sizes, **packed)

    def __call__(self, result: int, m_sizes: int, stream: int, **words: int) -> None:
        self.run(result, m_sizes, **words)


def fake_rows(
    kernel: Any, *, columns: int, reduction: int, E: int, w_kn: bool, stride_w_e: int, stride_w_row: int,
    m_sizes_step: int, fused: Any, R: int = 0,
) -> FakeLauncher:  # fmt: skip
    can = clears(kernel.variant.fusion, kernel.config)
    if fused.fusion & INDEXED and not (
        can and (fused.beside if kernel.config.schedule.warp_specialized else fused.few)
    ):
        fused = fused._replace(zero_tail=False)

    def run(
        y: int, m_sizes: int, *, x: int, w: int, stride_x_m: int, stride_y_m: int, M: int,
        index: int = 0, row_weights: int = 0, bias: int = 0, index_end: int = 0, low_x: int = 0, low_w: int = 0,
    ) -> None:  # fmt: skip
        assert bool(R) == (Fusion.LOW_RANK in fused.fusion)
        flags, row, named = fused.fusion, 0, set()
        for g, count in enumerate(counts_at(m_sizes, E, m_sizes_step)):
            outer = reduction if w_kn else columns
            lines = [
                at(w + 4 * (g * stride_w_e + i * stride_w_row), columns if w_kn else reduction) for i in range(outer)
            ]
            matrix = np.stack(lines) if w_kn else np.stack(lines).T
            for m in range(row, min(row + count, M)):
                flat = m
                if flags & INDEXED:
                    kind = ctypes.c_int64 if fused.index_step == 2 else ctypes.c_int32
                    flat = int(at(index, M, kind)[m])
                    if not 0 <= flat < index_end:
                        continue
                source = flat // fused.x_divisor if Fusion.GATHER in flags else m
                target = flat if Fusion.SCATTER in flags else m
                value = at(x + 4 * source * stride_x_m, reduction) @ matrix
                if R:
                    second = at(low_w + 4 * g * columns * R, columns * R)
                    second = second.reshape(R, columns) if w_kn else second.reshape(columns, R).T
                    value = value + at(low_x + 4 * m * R, R) @ second
                if Fusion.BIAS in flags:
                    value = value + at(bias + 4 * g * columns, columns)
                if Fusion.WEIGHT in flags:
                    value = value * at(row_weights, index_end)[flat]
                if Fusion.SILU in flags:
                    gate, up = np.split(value, 2)
                    value = gate / (1 + np.exp(-gate)) * up
                named.add(target)
                at(y + 4 * target * stride_y_m, len(value))[:] = value
            row += count
        if fused.zero_tail:
            rest = set(range(index_end)) - named if Fusion.SCATTER in flags else range(row, M)
            for m in rest:
                at(y + 4 * m * stride_y_m, columns)[:] = 0

    return FakeLauncher(run, fused.zero_tail)


def fake_weight(
    kernel: object, *, N: int, K: int, E: int, stride_dw_e: int, stride_dw_row: int, m_sizes_step: int
) -> FakeLauncher:
    def run(dw: int, m_sizes: int, *, dy: int, x: int, stride_dy_m: int, stride_x_m: int, M: int) -> None:
        row = 0
        for g, count in enumerate(counts_at(m_sizes, E, m_sizes_step)):
            total = np.zeros((N, K), np.float32)
            for m in range(row, min(row + count, M)):
                total += np.outer(at(dy + 4 * m * stride_dy_m, N), at(x + 4 * m * stride_x_m, K))
            for n in range(N):
                at(dw + 4 * (g * stride_dw_e + n * stride_dw_row), K)[:] = total[n]
            row += count

    return FakeLauncher(run)


def rows_at(address: int, rows: int, columns: int) -> torch.Tensor:
    """float32 [rows, columns] there."""
    return torch.from_numpy(at(address, rows * columns)).view(rows, columns)


def activation_of(flags: int, words: Sequence[int]) -> RowActivation:
    """The activation that a row kernel is launched for: its flags, and the bits of its float32 numbers."""
    name = KINDS[flags & rowops.KIND]
    limit, alpha, beta, linear_beta = struct.unpack("<4f", struct.pack("<4i", *words))
    numbers = {"limit": limit, "alpha": alpha, "beta": beta, "linear_beta": linear_beta or None}
    of_name = {"swiglu": ("limit", "alpha", "beta"), "situ": ("beta", "linear_beta"), "swiglustep": ("limit",)}
    function = Activation(name, **{one: numbers[one] for one in of_name.get(name, ())})
    return RowActivation(function, bool(flags & rowops.GATED), bool(flags & rowops.INTERLEAVED))


def fake_activation(rows: int, columns: int, pointers: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    (h, a, used), (M, I, flags, *words) = pointers, numbers  # noqa: E741
    assert (rows, columns) == (M, I)
    act = activation_of(flags, words)
    end = min(int(at(used, 1, ctypes.c_int32)[0]), M) if flags & rowops.USED else M
    rows_at(a, M, I)[:end] = by_torch(rows_at(h, M, I * (1 + act.gated)), act)[:end]


def fake_activation_grad(rows: int, columns: int, pointers: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    (h, da, row_weights, index, used, dh, a, dweights), (M, I, step, flags, *words) = pointers, numbers  # noqa: E741
    assert (rows, columns) == (M, I)
    act = activation_of(flags, words)
    end = min(int(at(used, 1, ctypes.c_int32)[0]), M) if flags & rowops.USED else M
    given = rows_at(h, M, I * (1 + act.gated))[:end].clone().requires_grad_()
    with torch.enable_grad():
        made = by_torch(given, act)
    grad = rows_at(da, M, I)[:end]
    scale, flat = torch.ones(end, 1), np.arange(M)
    if flags & (rowops.WEIGHTED | rowops.WRITES_DWEIGHTS):
        flat = at(index, M, ctypes.c_int64 if step == 2 else ctypes.c_int32)
    if flags & rowops.WEIGHTED:
        scale = torch.from_numpy(at(row_weights, M)[flat])[:end, None]
    if flags & rowops.WRITES_DH:
        rows_at(dh, M, given.shape[1])[:end] = torch.autograd.grad(made, given, grad * scale)[0]
    if flags & rowops.WRITES_A:
        rows_at(a, M, I)[:end] = made.detach() * scale
    if flags & rowops.WRITES_DWEIGHTS:
        dots = np.zeros(M, np.float32)
        dots[:end] = (made.detach() * grad).sum(1).numpy()
        at(dweights, M)[flat] = dots


def fake_gather(rows: int, columns: int, pointers: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    (x, index, used, out), (M, H, top_k, step, flags) = pointers, numbers
    assert columns == H
    end = min(int(at(used, 1, ctypes.c_int32)[0]), M) if flags & rowops.USED else M
    flat = at(index, M, ctypes.c_int64 if step == 2 else ctypes.c_int32)
    looks = -(-M // rowops.NOTED_ROWS)
    if flags & rowops.NOTES:  # (top_k is the number of slots)
        assert rows == looks
        noted = at(out, 1 + top_k, ctypes.c_int32)
        assert flat[:end].min(initial=0) >= 0
        assert flat[:end].max(initial=0) < top_k
        noted[0], noted[1 + flat[:end]] = end, range(end)
        return
    if flags & rowops.BY_TOKEN:
        end = int(at(used, 1, ctypes.c_int32)[0])
        noted = at(used + 4, (rows - looks) * top_k, ctypes.c_int32)
        assert set(noted[flat[:end]]) <= set(range(end))
    else:
        assert rows == M
    for i in range(end):
        at(out + 4 * i * H, H)[:] = at(x + 4 * (int(flat[i]) // top_k) * H, H)


def fake_combine(rows: int, columns: int, pointers: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    (y, places, row_weights, experts, bias, out), (T, H, top_k, flags) = pointers, numbers
    assert (rows, columns) == (T, H)
    M, place = T * top_k, torch.from_numpy(at(places, T * top_k, ctypes.c_int32))
    here = (place >= 0)[:, None]
    given = torch.where(here, rows_at(y, M, H)[place.clamp(min=0).long()], 0)
    if flags & rowops.BIASED:
        assert flags & rowops.WEIGHTED
        expert = torch.where(here[:, 0], torch.from_numpy(at(experts, M, ctypes.c_int32)), 0)
        given = given + rows_at(bias, int(expert.max()) + 1, H)[expert.long()]
    if flags & rowops.WEIGHTED:
        assert not flags & rowops.NARROW
        given = given * torch.from_numpy(at(row_weights, M))[:, None]
    rows_at(out, T, H)[:] = torch.where(here, given, 0).view(T, top_k, H).sum(1)


def fake_sort(rows: int, columns: int, pointers: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    (ids, experts, order, places, bounds, m_sizes, counts), (M, E, step, flags) = pointers, numbers
    chunks = -(-M // SLOTS)
    assert (rows, columns) == (-(-(E + 1) // rowops.SORTED_EXPERTS) if flags == rowops.ADDS else chunks, 0)
    assert (flags == rowops.COUNTS | rowops.PLACES) == (chunks == 1)
    at(experts, chunks * SLOTS, ctypes.c_int32)[M:] = E + 1
    of_slot = at(experts, M, ctypes.c_int32)
    if flags & rowops.COUNTS:
        given = at(ids, M, ctypes.c_int64 if step == 2 else ctypes.c_int32)
        of_slot[:] = np.where((given >= 0) & (given < E), given, E)
    if flags & rowops.PLACES:
        sizes = np.bincount(of_slot, minlength=E + 1)[:E]
        at(m_sizes, E, ctypes.c_int32)[:] = sizes
        at(bounds, E + 1, ctypes.c_int32)[:] = np.concatenate([[0], sizes.cumsum()])
        at(order, M, ctypes.c_int64)[:] = np.argsort(of_slot, kind="stable")
        at(places, M, ctypes.c_int32)[at(order, M, ctypes.c_int64)] = [i if i < sizes.sum() else -1 for i in range(M)]
    if chunks > 1:
        at(counts, chunks * (E + 1), ctypes.c_int32)[:] = 0  # it is as large as the contract says


def fake_clear(programs: int, _: int, pointers: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    (y, index, m_sizes, named), (M, rows, columns, E, index_end, m_sizes_step, index_step, flags) = pointers, numbers
    marks = at(named, rows, ctypes.c_int8)
    if flags & rowops.NAMES:
        assert programs == -(-M // SLOTS)
        assert not marks.any()
        used = min(M, sum(min(max(one, 0), M) for one in counts_at(m_sizes, E, m_sizes_step)))
        given = at(index, M, ctypes.c_int64 if index_step == 2 else ctypes.c_int32)[:used]
        marks[given[(given >= 0) & (given < index_end)]] = 1
    else:
        assert programs == -(-rows // rowops.CLEARED_ROWS)
        at(y, rows * columns).reshape(rows, columns)[marks == 0] = 0


FAKES = {
    RowOp.GATHER: fake_gather, RowOp.ACTIVATION: fake_activation, RowOp.ACTIVATION_GRAD: fake_activation_grad,
    RowOp.COMBINE: fake_combine, RowOp.SORT_SLOTS: fake_sort, RowOp.CLEAR: fake_clear,
}  # fmt: skip


class Device:
    """A GPU that is host memory. ``there`` says which kernels its bundle has; ``launched`` which ones ran.

    ``first`` says that rows gathered beforehand are faster, ``clears`` that code that scatters clears the other rows,
    few of them, or if it is ``specialized`` many, ``repeats`` that rows may have a stride of 0. torch's grouped_mm was
    measured faster for the ops of ``by_torch``; ``grouped`` counts its calls.
    """

    def __init__(self) -> None:
        self.there: set[object] = {*ALL, *RowOp}
        self.launched: list[tuple[Op, Fusion]] = []
        self.passed: list[RowOp] = []  # of rows
        self.sorted: list[RowOp] = []
        self.cleared: list[RowOp] = []
        self.first = self.clears = self.specialized = False
        self.repeats = True
        self.by_torch: set[Op] = set()
        self.grouped = 0

    def grouped_mm(self, x: torch.Tensor, w: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        """torch's, in float32: what is past the last expert's end is no number."""
        assert offs.dtype is torch.int32
        self.grouped += 1
        y = x.new_full((x.shape[0], w.shape[2]), float("nan"))
        for g, (start, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
            assert 0 <= start <= end <= x.shape[0]
            y[start:end] = x[start:end] @ w[g]
        return y

    def passes(self, op: RowOp, dtype: DType, device: int, *, aligned: bool) -> Callable[..., None] | None:
        if op not in self.there:
            return None
        assert dtype is DType.FP32

        def launch(*given: Any) -> None:
            *given, stream = given
            assert stream == 0
            {RowOp.SORT_SLOTS: self.sorted, RowOp.CLEAR: self.cleared}.get(op, self.passed).append(op)
            FAKES[op](*given)

        launch.block, launch.most_experts = SLOTS, MOST_SORTED_EXPERTS  # type: ignore[attr-defined]
        return launch

    def gated(self, problem: Any, *_: object) -> object | None:
        if self.first and (problem.op, Fusion.SILU) in self.there:
            return self.kernel(replace(problem, fusion=Fusion.SILU))
        return self.kernel(problem)

    def gathered(self, problem: Any, call: Any, *_: object) -> object | None:
        if not self.first:
            return None
        return self.kernel(replace(problem, fusion=code_of(problem.op, call.fusion & ~Fusion.GATHER)))

    def kernel(self, problem: Any, *_: object) -> object | None:
        if (problem.op, problem.fusion) not in self.there:
            return None
        self.launched.append((problem.op, problem.fusion))
        return SimpleNamespace(
            variant=SimpleNamespace(fusion=problem.fusion),
            config=SPECIALIZED if self.specialized else Config(16, 64, 64, 4, 2, schedule=Schedule(not self.clears)),
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    simulated = Device()
    patch = monkeypatch  # (undone with a test's own patches, in order: no context of its own)
    patch.setattr(current, "snapshot", dispatch_snapshot.Snapshot(()))
    patch.setattr(ready, "_kernel", simulated.kernel)
    patch.setattr(ready, "is_by_torch", lambda problem, *_: problem.op in simulated.by_torch)
    patch.setattr(ready, "grouped_mm", lambda *_: simulated.grouped_mm)
    patch.setattr(ready, "_gated_kernel", simulated.gated)
    patch.setattr(ready, "_gathered_kernel", simulated.gathered)
    patch.setattr(ready, "low_rank_kernel", simulated.kernel)
    patch.setattr(ready, "_LOW_RANK_DTYPES", (torch.float32,))  # the only one of this GPU
    patch.setattr(launch_gemm, "row_launcher", fake_rows)
    patch.setattr(launch_gemm, "weight_launcher", fake_weight)
    patch.setattr(launch_rowops, "launcher", simulated.passes)
    patch.setattr(descriptors, "repeats_rows", lambda _device: simulated.repeats)
    patch.setattr(zero_rows, "LEAST_BYTES", 0)
    for module in (program, programs, plan, layer_plan):
        patch.setattr(module, "stream_of", lambda _device: 0)
    for module in (routing, zero_rows):
        patch.setattr(module, "current_stream", lambda _device: 0)
    for module in (products, ready):
        patch.setattr(module, "local_gpu", lambda _device: LocalGpu(90, Gpu("", 132, 1 << 17, 0)))
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    return simulated


def on(patch: pytest.MonkeyPatch, simulated: bool) -> None:
    patch.setattr(check_tensors, "on_gpu", lambda tensor: simulated and not tensor.is_meta)


def watch_programs(patch: pytest.MonkeyPatch, noted: Callable[[program.Program, int], None]) -> None:
    """Whenever a program that is made from now on runs, it and the number of its rows are noted first."""
    real = program.Program.__init__

    def init(self: program.Program, *given: Any) -> None:
        real(self, *given)
        run = self.run

        def watched(M: int, stream: int, tensors: Any) -> Any:
            noted(self, M)
            return run(M, stream, tensors)

        self.run = watched

    patch.setattr(program.Program, "__init__", init)


def tensors(
    *, permute_x: bool, weights: bool, bias: bool, layout: str, seed: int = 0
) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    return {
        "x": random(T if permute_x else T * TOPK, K),
        "w": random(E, N, K) if layout == "nk" else random(E, K, N),
        "topk_weights": random(T, TOPK) if weights else None,
        "bias": random(E, N) if bias else None,
    }


def ran(form: dict[str, Any], given: dict[str, torch.Tensor | None], wide: bool) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(-1, E + 1, (T, TOPK), generator=torch.Generator().manual_seed(5))  # some on other ranks
    routing = sort_routing(ids, E)
    kind = torch.int64 if wide else torch.int32
    y = grouped_gemm(
        **given, m_sizes=routing.m_sizes.to(kind), topk=TOPK, gather_indices=routing.gather_indices.to(kind),
        fuse_mul_post=given["topk_weights"] is not None, zero_tail=True, **form,
    )  # fmt: skip
    check_tensors = [tensor for tensor in given.values() if tensor is not None]
    dy = torch.linspace(-1, 1, y.numel()).view_as(y)
    return y, *torch.autograd.grad(y, check_tensors, dy)
