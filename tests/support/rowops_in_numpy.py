"""The row kernels' results in numpy and torch, as kernels/rowops/__init__.py and their docstrings have them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from pretuned.artifacts.records import PRECISIONS, DType, RowOp
from pretuned.kernels import rowops
from pretuned.kernels.activations import KINDS, Activation
from pretuned.kernels.hopper_w8a8_block import scale_columns
from pretuned.kernels.rowops import RowOpSpec, programs, rows_at_once, tile_of, tiles
from pretuned.runtime.ops.activation import RowActivation, by_torch
from pretuned.runtime.weights import fp8_codes, writing
from pretuned.runtime.weights.codes import Quantised
from pretuned.runtime.weights.expert_weights import ExpertWeights
from pretuned.runtime.weights.prepared_layout import K_ORDER, ORDERS
from pretuned.runtime.weights.row_codes import codes_of_rows


class Elements(Protocol):
    """Elements of a dtype in memory."""

    def read(self, address: int, count: int) -> Any: ...

    def store(self, address: int, values: Any) -> None: ...

    @property
    def size(self) -> int: ...

    @property
    def dtype(self) -> DType: ...


def at(address: int, count: int, kind: Any = ctypes.c_float) -> Any:
    """An array in memory."""
    assert address or not count, "a kernel reads at a null pointer"
    if not count:
        return np.empty(0, kind)
    return np.frombuffer((ctypes.c_uint8 * (count * ctypes.sizeof(kind))).from_address(address), np.dtype(kind))


_COMPUTED: dict[tuple[Any, ...], Any] = {}
_MOST_COMPUTED = 64


def once(name: Hashable, operands: Sequence[torch.Tensor], compute: Callable[[], Any]) -> Any:
    """Compute something of these operands' bytes; of the same bytes it is what was computed before: only read it."""
    key = name, *(hashlib.sha1(tensor.contiguous().view(torch.uint8).numpy()).digest() for tensor in operands)
    if key not in _COMPUTED:
        if len(_COMPUTED) >= _MOST_COMPUTED:
            _COMPUTED.pop(next(iter(_COMPUTED)), None)
        _COMPUTED[key] = compute()
    return _COMPUTED[key]


def indices(address: int, count: int, step: int) -> Any:
    return at(address, count, ctypes.c_int64 if step == 2 else ctypes.c_int32)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """torch without the caller's modes."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), torch.inference_mode(False):
        yield


def activation_of(flags: int, words: Sequence[int]) -> RowActivation:
    """The activation that a row kernel is launched for: its flags, and the bits of its float32 numbers."""
    name = KINDS[flags & rowops.KIND]
    limit, alpha, beta, linear_beta = struct.unpack("<4f", struct.pack("<4i", *words))
    numbers = {"limit": limit, "alpha": alpha, "beta": beta, "linear_beta": linear_beta or None}
    of_name = {"swiglu": ("limit", "alpha", "beta"), "situ": ("beta", "linear_beta"), "swiglustep": ("limit",)}
    function = Activation(name, **{field: numbers[field] for field in of_name.get(name, ())})
    return RowActivation(function, bool(flags & rowops.GATED), bool(flags & rowops.INTERLEAVED))


def _used(used: int, M: int, flags: int) -> int:
    return min(int(at(used, 1, ctypes.c_int32)[0]), M) if flags & rowops.USED else M


def _rows(of: Elements, address: int, rows: int, columns: int) -> torch.Tensor:
    """float32."""
    return torch.from_numpy(np.array(of.read(address, rows * columns)).reshape(rows, columns))


def _activated(of: Elements, h: int, rows: int, columns: int, act: RowActivation) -> torch.Tensor:
    """float32, rounded as h's dtype is."""
    kind = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}.get(of.dtype, torch.float32)
    return by_torch(_rows(of, h, rows, columns * (1 + act.gated)).to(kind), act).float()


def activation(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (h, a, used), (M, I, flags, *words) = pointers, numbers  # noqa: E741
    assert 0 < grid <= programs(RowOp.ACTIVATION, M, I, block, rows_at_once(RowOp.ACTIVATION))
    act, end = activation_of(flags, words), _used(used, M, flags)
    with plain_torch():
        of.store(a, _activated(of, h, end, I, act).numpy())


def activation_grad(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (h, da, row_weights, index, used, dh, a, dweights), (M, I, step, flags, *words) = pointers, numbers  # noqa: E741
    assert 0 < grid <= programs(RowOp.ACTIVATION_GRAD, M, I, block)
    act, end = activation_of(flags, words), _used(used, M, flags)
    with plain_torch(), torch.enable_grad():
        leaf = _rows(of, h, end, I * (1 + act.gated)).requires_grad_()
        out = by_torch(leaf, act)
        grad = _rows(of, da, end, I)
        scale, flat = torch.ones(end, 1), np.arange(M)
        if flags & (rowops.WEIGHTED | rowops.WRITES_DWEIGHTS):
            flat = indices(index, M, step)
        if flags & rowops.WEIGHTED:
            values = of.read(row_weights, M) if flags & rowops.NARROW else at(row_weights, M)
            scale = torch.from_numpy(values[flat])[:end, None]
        if flags & rowops.WRITES_DH:
            of.store(dh, torch.autograd.grad(out, leaf, grad * scale)[0].flatten().numpy())
        if flags & rowops.WRITES_A:
            of.store(a, (out.detach() * scale).flatten().numpy())
        if flags & rowops.WRITES_DWEIGHTS:
            dots = np.zeros(M, np.float32)
            dots[:end] = (out.detach() * grad).sum(1).numpy()
            placed = np.zeros(M, np.float32)
            placed[flat] = dots
            if flags & rowops.NARROW_DWEIGHTS:
                of.store(dweights, placed)
            else:
                at(dweights, M)[flat] = dots


def _codes_at(address: int, M: int, K: int) -> torch.Tensor:
    return torch.from_numpy(at(address, M * K, ctypes.c_uint8)).view(M, K)


def _store_codes(rows: torch.Tensor, codes: int, scale: int, M: int, by_row: bool) -> None:
    K, of_x = rows.shape[1], PRECISIONS["fp8_channel" if by_row else "fp8_block"].x.scale
    assert of_x is not None
    of_rows, factors = codes_of_rows(rows.bfloat16(), of_x)
    _codes_at(codes, M, K)[: len(rows)] = of_rows.view(torch.uint8)
    shape = (M,) if by_row else (K // 128, scale_columns(M))
    placed = torch.from_numpy(at(scale, math.prod(shape))).view(shape)
    placed[..., : len(rows)] = factors[..., : len(rows)]


def activation_codes(
    of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int], by_row: bool = False
) -> None:
    (h, used, codes, scale), (M, I, flags, *words) = pointers, numbers  # noqa: E741
    act, end = activation_of(flags, words), _used(used, M, flags)
    with plain_torch():
        _store_codes(_activated(of, h, end, I, act), codes, scale, M, by_row)


def quantize(
    of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int], by_row: bool = False
) -> None:
    (x, index, used, codes, scale), (M, K, top_k, step, flags) = pointers, numbers
    source = np.arange(_used(used, M, flags))
    if flags & rowops.PICKED:
        source = indices(index, M, step)[: len(source)] // top_k
    with plain_torch():
        _store_codes(_rows(of, x, int(source.max(initial=-1)) + 1, K)[source], codes, scale, M, by_row)


def quantize_columns(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (x, index, m_sizes, codes, scale, *of_rows), (M, C, P, E, top_k, index_step, step, flags) = pointers, numbers
    counts, source = torch.from_numpy(np.array(indices(m_sizes, E, step))), np.arange(M)
    if flags & rowops.PICKED:
        source = indices(index, M, index_step) // top_k
    end, shared = min(M, int(counts.clamp(min=0).sum())), bool(flags & rowops.BLOCKS)
    with plain_torch():
        rows = torch.zeros(M, C)
        rows[:end] = _rows(of, x, int(source[:end].max(initial=-1)) + 1, C)[source[:end]]
        _store_columns(rows, counts, P, codes, scale, shared)
        if of_rows:
            _store_codes(rows[:end], *of_rows, M, by_row=False)


def _store_columns(rows: torch.Tensor, counts: torch.Tensor, P: int, codes: int, scale: int, shared: bool) -> None:
    M, C = rows.shape
    built = fp8_codes.column_codes(rows, counts, blocks=shared)
    used = int((-(-counts.clamp(0, M) // 128)).sum())
    _codes_at(codes, C, P)[:, : 128 * used] = built.codes.view(torch.uint8)[:, : 128 * used]
    placed = torch.from_numpy(at(scale, built.scale.numel())).view(built.scale.shape)
    placed[:used] = built.scale[:used]


def activation_grad_codes(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    """``activation_grad`` into memory of its own, then the codes. The first launch stores the sums of all columns."""
    (h, da, row_weights, index, m_sizes, *outputs, dots, dweights), numbers = pointers, tuple(numbers)
    (M, I, P, E, index_step, step, flags), words = numbers[:7], numbers[7:]  # noqa: E741
    counts = torch.from_numpy(np.array(indices(m_sizes, E, step)))
    used, shared = np.array([min(M, int(counts.clamp(min=0).sum()))], np.int32), bool(flags & rowops.BLOCKS)
    if flags & rowops.NOTES:
        sums, flat = at(dots, I // 128 * M).reshape(-1, M).sum(0), indices(index, M, index_step)
        sums[used[0] :] = 0
        placed = np.zeros(M, np.float32)
        placed[flat] = sums
        if flags & rowops.NARROW_DWEIGHTS:
            of.store(dweights, placed)
        else:
            at(dweights, M)[:] = placed
        return
    dh, a, dot = (torch.zeros(M, C, dtype=torch.bfloat16) for C in (2 * I, I, 2))
    order = torch.arange(M, dtype=torch.int32)
    weights, how = np.ones(M, np.float32), flags & ~(rowops.NARROW | rowops.NARROW_DWEIGHTS | rowops.WRITES_DWEIGHTS)
    if flags & rowops.WEIGHTED:
        operands = of.read(row_weights, M) if flags & rowops.NARROW else at(row_weights, M)
        weights = np.ascontiguousarray(operands[indices(index, M, index_step)], np.float32)
    dots_fp32 = dot.view(torch.float32)
    flags = how | rowops.USED | rowops.WRITES_DH | rowops.WRITES_A | rowops.WRITES_DWEIGHTS | rowops.WEIGHTED
    operands = (
        h,
        da,
        weights.ctypes.data,
        order.data_ptr(),
        used.ctypes.data,
        dh.data_ptr(),
        a.data_ptr(),
        dots_fp32.data_ptr(),
    )
    activation_grad(of, 1, block, operands, (M, I, 1, flags, *words))
    with plain_torch():
        _store_columns(dh.float(), counts, P, *outputs[:2], shared)
        _store_codes(dh[: used[0]].float(), *outputs[2:4], M, by_row=False)
        _store_columns(a.float(), counts, P, *outputs[4:], not shared)
    if numbers[6] & rowops.WRITES_DWEIGHTS:
        sums = at(dots, I // 128 * M).reshape(-1, M)
        sums[:, : used[0]], sums[0, : used[0]] = 0, dots_fp32.numpy()[: used[0], 0]


def order_codes(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (x, x_scale, index, used, codes, scale), (M, K, groups, *strides, top_k, step, flags) = pointers, numbers
    by_row, by_group, by_expert, room = strides
    assert 0 < grid <= M
    source = np.arange(_used(used, M, flags))
    if flags & rowops.PICKED:
        source = indices(index, M, step)[: len(source)] // top_k
    rows = int(source.max(initial=-1)) + 1
    natural = torch.from_numpy(np.array(at(x, rows * K, ctypes.c_uint8))).view(rows, K // 64, 64)
    _codes_at(codes, M, K)[: len(source)] = natural[..., torch.tensor(K_ORDER)].view(rows, K)[source]
    of_row = source // room * by_expert + source % room * by_row
    scales = at(x_scale, int(of_row.max(initial=0)) + (groups - 1) * by_group + 1)
    placed = at(scale, (groups - 1) * scale_columns(M) + M)
    for g in range(groups):
        placed[g * scale_columns(M) :][: len(source)] = scales[of_row + g * by_group]


def gather(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (x, index, used, out), (M, H, top_k, step, flags) = pointers, numbers
    end = _used(used, M, flags)
    flat = indices(index, M, step)
    looks = -(-M // rowops.NOTED_ROWS)
    if flags & rowops.NOTES:  # (top_k is the number of slots)
        assert grid == looks
        noted = at(out, 1 + top_k, ctypes.c_int32)
        assert flat[:end].min(initial=0) >= 0
        assert flat[:end].max(initial=0) < top_k
        noted[0], noted[1 + flat[:end]] = end, range(end)
        return
    if flags & rowops.BY_TOKEN:
        end = int(at(used, 1, ctypes.c_int32)[0])
        noted = at(used + 4, (grid - looks) * top_k, ctypes.c_int32)
        assert set(noted[flat[:end]]) <= set(range(end))
    else:
        assert 0 < grid <= M
    source = flat[:end] // top_k
    of.store(out, of.read(x, (int(source.max(initial=-1)) + 1) * H).reshape(-1, H)[source])


def combine(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (y, places, row_weights, experts, bias, out), (T, H, top_k, flags) = pointers, numbers
    assert 0 < grid <= programs(RowOp.COMBINE, T, H, block)
    M, place = T * top_k, at(places, T * top_k, ctypes.c_int32)
    here = (place >= 0)[:, None]
    rows = np.zeros((max(int(place.max(initial=-1)) + 1, 1), H), np.float32)
    if here.any():
        rows = of.read(y, rows.size).reshape(rows.shape)
    taken = np.where(here, rows[np.maximum(place, 0)], 0).astype(np.float32)
    if flags & rowops.BIASED:
        assert flags & rowops.WEIGHTED
        expert = np.where(here[:, 0], at(experts, M, ctypes.c_int32), 0)
        taken = taken + of.read(bias, (int(expert.max(initial=0)) + 1) * H).reshape(-1, H)[expert]
    if flags & rowops.WEIGHTED:
        weights = of.read(row_weights, M) if flags & rowops.NARROW else at(row_weights, M)
        taken = taken * weights[:, None]
    of.store(out, np.where(here, taken, 0).reshape(T, top_k, H).sum(1))


def sort_slots(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (ids, experts, order, places, bounds, m_sizes, counts), (M, E, step, flags) = pointers, numbers
    chunks = -(-M // block)
    assert grid == (-(-(E + 1) // rowops.SORTED_EXPERTS) if flags == rowops.ADDS else chunks)
    assert (flags == rowops.COUNTS | rowops.PLACES) == (chunks == 1)
    at(experts, chunks * block, ctypes.c_int32)[M:] = E + 1
    of_slot = at(experts, M, ctypes.c_int32)
    if flags & rowops.COUNTS:
        slots = indices(ids, M, step)
        of_slot[:] = np.where((slots >= 0) & (slots < E), slots, E)
    if flags & rowops.PLACES:
        sizes = np.bincount(of_slot, minlength=E + 1)[:E]
        at(m_sizes, E, ctypes.c_int32)[:] = sizes
        at(bounds, E + 1, ctypes.c_int32)[:] = np.concatenate([[0], sizes.cumsum()])
        at(order, M, ctypes.c_int64)[:] = np.argsort(of_slot, kind="stable")
        at(places, M, ctypes.c_int32)[at(order, M, ctypes.c_int64)] = [i if i < sizes.sum() else -1 for i in range(M)]
    if chunks > 1:
        at(counts, chunks * (E + 1), ctypes.c_int32)[:] = 0  # it is as large as the contract says


def place_rows(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (m_sizes, starts, index, counts, bounds), (M, E, room, m_sizes_step, starts_step) = pointers, numbers
    assert grid == E
    sizes = indices(m_sizes, E, m_sizes_step).tolist()
    first = indices(starts, E, starts_step).tolist() if starts_step else [e * room for e in range(E)]
    sorted_slots: list[int] = []
    at(bounds, E + 1, ctypes.c_int32)[0] = 0
    for e in range(E):
        most = min(M - first[e], room) if 0 <= first[e] < M else 0
        own = min(max(sizes[e], 0), most, M - len(sorted_slots))
        sorted_slots += range(first[e], first[e] + own)
        at(counts, E, ctypes.c_int32)[e] = own
        at(bounds, E + 1, ctypes.c_int32)[e + 1] = len(sorted_slots)
    at(index, M, ctypes.c_int32)[:] = sorted_slots + [0] * (M - len(sorted_slots))


def clear(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (y, index, m_sizes, named), (M, rows, columns, E, index_end, m_sizes_step, index_step, flags) = pointers, numbers
    marks = at(named, rows, ctypes.c_int8)
    if flags & rowops.NAMES:
        assert grid == -(-M // block)
        assert not marks.any()
        counts = at(m_sizes, E, ctypes.c_int32 if m_sizes_step == 1 else ctypes.c_int64).tolist()
        used = min(M, sum(min(max(count, 0), M) for count in counts))
        slots = indices(index, M, index_step)[:used]
        marks[slots[(slots >= 0) & (slots < index_end)]] = 1
    else:
        assert grid == -(-rows // rowops.CLEARED_ROWS)
        at(y, rows * columns).reshape(rows, columns)[marks == 0] = 0


def _experts(of: Elements, op: RowOp, grid: int, N: int, K: int) -> int:
    each = tiles(RowOpSpec(op, of.dtype), 1, N, K)
    assert grid % each == 0
    return grid // each


_KINDS = {0: torch.bfloat16, rowops.FP16_WEIGHTS: torch.float16, rowops.FP32_WEIGHTS: torch.float32}


def _raw(address: int, count: int) -> torch.Tensor:
    return torch.from_numpy(at(address, count, ctypes.c_uint8))


def _w_at(address: int, E: int, N: int, K: int, step_expert: int, step_row: int, flags: int) -> torch.Tensor:
    dtype = _KINDS[flags & (rowops.FP16_WEIGHTS | rowops.FP32_WEIGHTS)]
    count = (E - 1) * step_expert + (N - 1) * step_row + K
    return _raw(address, count * dtype.itemsize).view(dtype).as_strided((E, N, K), (step_expert, step_row, 1))


def _beside(of: Elements, E: int, N: int, K: int, pointers: Sequence[int], flags: int) -> Quantised:
    """The tensors of weights, over the memory that a kernel is given, in either layout."""
    format, addresses = of.dtype.value, iter(pointers)
    plain = writing.empty(format, E, N, K, torch.device("cpu"))
    if flags & rowops.PREPARED:
        order, first = ORDERS[format], [None if tensor is None else tensor[0] for tensor in plain]
        moves = (order.prepared, order.prepared_scale, order.prepared_zero, None)
        each = [
            tensor if tensor is None or move is None else move(tensor)
            for tensor, move in zip(first, moves, strict=True)
        ]
        plain = Quantised(*(None if tensor is None else tensor[None].expand(E, *tensor.shape) for tensor in each))
    return Quantised(
        *(
            None
            if tensor is None
            else _raw(address, tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
            for tensor, address in zip(plain, addresses, strict=True)
        )
    )


def quantize_weights(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (w, *beside), (N, K, step_expert, step_row, flags) = pointers, numbers
    E = _experts(of, RowOp.QUANTIZE_WEIGHTS, grid, N, K)
    with plain_torch():
        into = _beside(of, E, N, K, beside, flags)
        outer = None if into.global_scale is None else into.global_scale.clone()
        matrix = _w_at(w, E, N, K, step_expert, step_row, flags)
        writing.quantise_into(
            of.dtype.value, into, matrix.clone(), prepared=bool(flags & rowops.PREPARED), by_torch=True
        )
        assert outer is None or torch.equal(outer, into.global_scale)


def quantize_blocks(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (w, *ways), (N, K, step_expert, step_row, flags) = pointers, numbers
    E = grid // (N // 128 * (K // 128))
    with plain_torch():
        matrix = _w_at(w, E, N, K, step_expert, step_row, flags)
        both = (rowops.ALONG_K, matrix), (rowops.ALONG_N, matrix.transpose(1, 2))
        for (flag, way), words, scales in zip(both, ways[::2], ways[1::2], strict=True):
            if flags & flag:
                both_tensors = once(
                    ("blocks", flag, E, N, K, matrix.dtype), [matrix], lambda way=way: fp8_codes.blocks(way)
                )
                for tensor, address in zip(both_tensors, (words, scales), strict=True):
                    _raw(address, tensor.numel() * 4)[:] = tensor.view(-1).view(torch.uint8)


def dequantize_weights(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (w, *beside), (N, K, flags) = pointers, numbers
    E = _experts(of, RowOp.DEQUANTIZE_WEIGHTS, grid, N, K)
    with plain_torch():
        weights = ExpertWeights(of.dtype.value, *_beside(of, E, N, K, beside, flags))
        for expert, to in enumerate(_w_at(w, E, N, K, N * K, K, flags)):
            to.copy_(weights.dequantize(to.dtype, expert))


def move_codes(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (stored, words, most), (N, K, flags) = pointers, numbers
    E, order = _experts(of, RowOp.MOVE_CODES, grid, N, K), ORDERS[of.dtype.value]
    tile = tile_of(RowOp.MOVE_CODES, of.dtype)
    with plain_torch():
        code = writing.empty(of.dtype.value, 1, N, K, torch.device("cpu")).codes[0]
        other, size = order.prepared(code), code.numel() * code.element_size()
        results = []
        for expert in range(E):
            plain = _raw(stored + expert * size, size).view(code.dtype).view(code.shape)
            tensor = _raw(words + expert * size, size).view(torch.int32).view(other.shape)
            is_nan = plain.view(torch.uint8) & 0x7F == 0x7F
            results += [part.any() for rows in is_nan.split(tile.rows) for part in rows.split(tile.columns, 1)]
            _ = plain.copy_(order.stored(tensor)) if flags & rowops.BACK else tensor.copy_(order.prepared(plain))
        if flags & rowops.LOOKS:
            _raw(most, 4 * grid).view(torch.int32).copy_(torch.stack(results))


def largest_weight(of: Elements, grid: int, block: int, pointers: Sequence[int], numbers: Sequence[int]) -> None:
    (w, most), (N, K, step_expert, step_row, flags) = pointers, numbers
    E, rows = _experts(of, RowOp.LARGEST_WEIGHT, grid, N, K), tile_of(RowOp.LARGEST_WEIGHT, of.dtype).rows
    with plain_torch():
        bits = _w_at(w, E, N, K, step_expert, step_row, flags).float().contiguous().view(torch.int32) & 0x7FFFFFFF
        maxima = [part.amax().clamp(max=0x7F800001) for of_expert in bits for part in of_expert.split(rows)]
        _raw(most, 4 * grid).view(torch.int32).copy_(torch.stack(maxima))


Pass = Callable[[Elements, int, int, Sequence[int], Sequence[int]], None]
PASSES: dict[RowOp, Pass] = {
    RowOp.GATHER: gather,
    RowOp.ACTIVATION: activation,
    RowOp.ACTIVATION_GRAD: activation_grad,
    RowOp.COMBINE: combine,
    RowOp.PLACE_ROWS: place_rows,
    RowOp.SORT_SLOTS: sort_slots,
    RowOp.CLEAR: clear,
    RowOp.QUANTIZE: quantize,
    RowOp.ACTIVATION_CODES: activation_codes,
    RowOp.QUANTIZE_ROWS: functools.partial(quantize, by_row=True),
    RowOp.QUANTIZE_COLUMNS: quantize_columns,
    RowOp.QUANTIZE_BOTH: quantize_columns,
    RowOp.ACTIVATION_GRAD_CODES: activation_grad_codes,
    RowOp.ORDER_CODES: order_codes,
    RowOp.ACTIVATION_ROW_CODES: functools.partial(activation_codes, by_row=True),
    RowOp.QUANTIZE_WEIGHTS: quantize_weights,
    RowOp.QUANTIZE_BLOCKS: quantize_blocks,
    RowOp.DEQUANTIZE_WEIGHTS: dequantize_weights,
    RowOp.MOVE_CODES: move_codes,
    RowOp.LARGEST_WEIGHT: largest_weight,
}
