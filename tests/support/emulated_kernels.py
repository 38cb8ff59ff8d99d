"""Kernels that numpy computes: cubins that say which, their records, and what each stores, by its docstring.

A cubin here is an ELF header as ptxas writes it, then what the kernel is. So the runtime reads it, checks it and gives
it to the driver as any other (``emulated_driver.py``).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rowops_in_numpy import PASSES, at

from pretuned.artifacts.codec import encode
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import (
    Bundle,
    Choice,
    DType,
    Fusion,
    Gpu,
    Kernel,
    Layout,
    Op,
    Problem,
    Producer,
    RowOp,
    Target,
    TensorMap,
    Variant,
)
from pretuned.kernels import registry, rowops
from pretuned.kernels.arch import arch_of
from pretuned.kernels.entry import ZERO_TAIL
from pretuned.kernels.hopper_w8a8_block import ADDS, FP32, places_for
from pretuned.kernels.plans import with_plans
from pretuned.kernels.registry import undeclared, unlaunchable
from pretuned.kernels.rowops import Block, RowOpSpec
from pretuned.kernels.spec import Config, Spec, w_kn
from pretuned.runtime.weights import fp8_codes

DRIVER = 11080  # of CUDA 11.8: shipped bundles need 12.0, so a test's bundles alone are used
_ELEMENTS = {DType.BF16: 9, DType.FP16: 6, DType.FP32: 7, DType.TF32: 11}  # CUtensorMapDataType
_OF_CODES = {"x": 9, "w": 2, "w_scale": 0, "w_zero": 0, "low_x": 9, "low_w": 9}
_OF_BOTH = {"x": 0, "w": 2, "x_scale": 7, "y_map": 9, "dy": 0, "dy_scale": 7, "dw": 9}
_BYTES = {0: 1, 2: 4, 6: 2, 7: 4, 9: 2, 11: 4}
_PLAIN = ("w", "w_scale", "w_zero", "x_scale", "dy_scale")
_SWIZZLES = {128: 3, 64: 2, 32: 1}
_HEADER = struct.Struct("<4sBBBBB7xHHIQQQI")  # of an ELF64 file, up to e_flags
_HEADER_BYTES = 64


class Code(NamedTuple):
    """The spec that a cubin is compiled for."""

    op: Op | RowOp
    dtype: DType
    layout: Layout
    fusion: Fusion
    config: tuple[tuple[str, int], ...]
    arguments: tuple[tuple[str, str], ...]
    entry: str


def cubin(code: Code, sm: int, tag: str) -> bytes:
    """Code for a capability, another for another ``tag``."""
    new = sm >= 100
    flags = sm << 8 if new else sm | (1 << 11 if sm >= 90 else 0)
    header = _HEADER.pack(b"\x7fELF", 2, 1, 1, 0x33, 8 if new else 7, 2, 190, 1, 0, 0, 0, flags)
    what = [code.op.value, code.dtype.value, code.layout.value, code.fusion.value, code.config, code.arguments]
    text = json.dumps([*what, code.entry, tag]).encode()
    return header.ljust(_HEADER_BYTES, b"\0") + struct.pack("<I", len(text)) + text


def code_at(image: int) -> tuple[Code, bytes] | None:
    """The code of a cubin in memory, and the cubin's SHA-256; None where it is none of these."""
    head = ctypes.string_at(image, _HEADER_BYTES + 4)
    (size,) = struct.unpack_from("<I", head, _HEADER_BYTES)
    if head[:4] != b"\x7fELF" or size > 1 << 16:
        return None
    whole = ctypes.string_at(image, _HEADER_BYTES + 4 + size)
    try:
        op, dtype, layout, fusion, config, arguments, entry, _ = json.loads(whole[_HEADER_BYTES + 4 :])
    except ValueError:
        return None
    pairs = tuple(map(tuple, config)), tuple(map(tuple, arguments))
    kind = RowOp(op) if op in {op.value for op in RowOp} else Op(op)
    return Code(kind, DType(dtype), Layout(layout), Fusion(fusion), *pairs, entry), hashlib.sha256(whole).digest()


def _map(dtype: DType, name: str, box: Sequence[int]) -> TensorMap:
    quantised, both = dtype.quantised, dtype.quantises_x
    element = (_OF_BOTH if both else _OF_CODES)[name] if quantised else _ELEMENTS[dtype]
    if name == "dw" and dtype is DType.TF32:
        element = _ELEMENTS[DType.FP32]
    if quantised and name in _PLAIN:
        return TensorMap(name, element, tuple(box), 0)
    columns = min(box[-1], 128 // _BYTES[element])
    return TensorMap(name, element, (*box[:-1], columns), _SWIZZLES.get(columns * _BYTES[element], 0))


@functools.lru_cache(maxsize=4096)
def variant_and_code(
    spec: Spec | RowOpSpec, sm: int = 90, tag: str = "", block: int | None = None, max_experts: int | None = None
) -> tuple[Variant, bytes]:
    """A variant and its cubin. ``block`` and ``max_experts`` are a row kernel's, if they are not the contract's."""
    entry = registry.entry_of(spec)
    if isinstance(spec, RowOpSpec):
        config = (spec.config if block is None else Block(block, spec.config.num_warps)).pairs()
        arguments, maps = rowops.arguments(spec.op), ()
        threads, shared = 32 * spec.config.num_warps, 0
    else:
        config, arguments = spec.config.pairs(), registry.arguments(spec)
        maps = tuple(_map(spec.dtype, name, box) for name, box in registry.boxes(spec).items())
        threads, shared = registry.threads(spec), 49152 if not maps else 220_000 if sm >= 90 else 96_000
    code = Code(spec.op, spec.dtype, spec.layout, spec.fusion, config, arguments, entry.name)
    image = cubin(code, sm, tag)
    variant = Variant(
        entry.name,
        entry.revision,
        1,
        spec.op,
        spec.dtype,
        spec.layout,
        spec.fusion,
        spec.alignment,
        spec.max_experts if max_experts is None else max_experts,
        config,
        entry.name,
        arguments,
        maps,
        threads,
        shared,
        128,
        0,
        0,
        len(image),
        hashlib.sha256(image).digest(),
    )
    wrong = unlaunchable(variant) or undeclared(variant, arch_of(sm).limits)
    assert wrong is None, wrong
    return variant, image


def bundle_of(
    variants: Iterable[tuple[Variant, bytes]],
    choices: Mapping[Problem, Sequence[Choice]] | None = None,
    *,
    sm: int = 90,
    gpus: Sequence[Gpu] = (),
    min_driver: int = DRIVER,
) -> Bundle:
    """A bundle of these variants, in this order."""
    pairs = tuple(variants)
    kernels = {variant.kernel: variant.revision for variant, _ in pairs}
    bundle = Bundle(
        Target(sm, sm >= 90),
        min_driver,
        Producer("0.1.0", "3.7.1", "12.8.93", ()),
        tuple(Kernel(name, kernels[name], hashlib.sha256(name.encode()).digest()) for name in sorted(kernels)),
        tuple(gpus),
        tuple(value for value, _ in pairs),
        tuple(image for _, image in pairs),
        {problem: tuple(rows) for problem, rows in (choices or {}).items()},
        (),
    )
    return with_plans(bundle)


def write(path: Path, variants: Iterable[tuple[Variant, bytes]], *args: Any, **how: Any) -> Path:
    """Publish ``bundle_of`` these at ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, encode(bundle_of(variants, *args, **how)))
    return path


# Memory


_KINDS: dict[DType, Any] = {DType.BF16: ctypes.c_uint16, DType.FP32: ctypes.c_float, DType.TF32: ctypes.c_float}
_KINDS[DType.FP16] = ctypes.c_uint16


class Memory(NamedTuple):
    """Elements of a dtype, read as float32 and stored with rounding to nearest even."""

    dtype: DType

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    def read(self, address: int, count: int) -> Any:
        return self._float32(at(address, count, _KINDS[self.dtype]))

    def store(self, address: int, values: Any) -> None:
        values = np.ascontiguousarray(values, np.float32).reshape(-1)
        at(address, values.size, _KINDS[self.dtype])[:] = self._rounded(values)

    def rows(self, address: int, rows: int, columns: int, stride: int) -> Any:
        """The first rows of a matrix, float32 [rows, columns]."""
        return self.picked(address, np.arange(rows), columns, stride)

    def picked(self, address: int, rows: Any, columns: int, stride: int) -> Any:
        """These rows of a matrix, float32 [rows, columns]."""
        return self._float32(self._matrix(address, rows, columns, stride)[rows])

    def put(self, address: int, rows: Any, stride: int, values: Any) -> None:
        """Store values [rows, columns] as these rows of a matrix."""
        values = np.ascontiguousarray(values, np.float32)
        self._matrix(address, rows, values.shape[1], stride)[rows] = self._rounded(values)

    def _matrix(self, address: int, rows: Any, columns: int, stride: int) -> Any:
        """The memory up to the last of these rows."""
        many = int(rows.max(initial=-1)) + 1
        raw = at(address, (many - 1) * stride + columns if many else 0, _KINDS[self.dtype])
        size = self.dtype.itemsize
        return np.lib.stride_tricks.as_strided(raw, (many, columns), (stride * size, size))

    def _float32(self, raw: Any) -> Any:
        if self.dtype is DType.FP16:
            return raw.view(np.float16).astype(np.float32)
        if self.dtype is DType.BF16:
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw

    def _rounded(self, values: Any) -> Any:
        """Bits of float32 in the dtype."""
        if self.dtype is DType.FP16:
            return values.astype(np.float16).view(np.uint16)
        if self.dtype is DType.BF16:
            bits = values.view(np.uint32)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
        return values


def counts_at(address: int, E: int, step: int) -> list[int]:
    """The rows of each expert: a count below zero is none."""
    return [max(size, 0) for size in at(address, E, ctypes.c_int32 if step == 1 else ctypes.c_int64).tolist()]


def _product(rows: Any, matrix: Any) -> Any:
    """Rows by a matrix, summed in float64 and rounded once.

    A BLAS may sum in another order for another number of rows: of float64 sums that hardly ever changes the result.
    """
    return (rows.astype(np.float64) @ matrix.astype(np.float64)).astype(np.float32)


def compute_rows(code: Code, words: Mapping[str, int], sizes: Mapping[str, tuple[int, ...]]) -> None:
    """y of a product of rows: kernels/portable_plain/rows.py. Past a descriptor's sizes zeros are read."""
    memory, spec = Memory(code.dtype), Spec(code.op, code.dtype, Config.from_pairs(code.config), code.layout)  # type: ignore[arg-type]
    M, N, K, E = (words[name] for name in ("M", "N", "K", "E"))
    x, w, y, size = words["x"], words["w"], words["y"], code.dtype.itemsize
    flags, R = Fusion(words["flags"] & 15), words.get("R", 0)
    low, silu = Fusion.LOW_RANK in code.fusion, Fusion.SILU in code.fusion
    gathers, scatters = Fusion.GATHER in flags, Fusion.SCATTER in flags
    assert gathers == (Fusion.GATHER in code.fusion)
    kn, index_end = w_kn(spec), words["index_end"]
    index = None
    if flags & (Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT):
        index = at(words["index"], M, ctypes.c_int64 if words["index_step"] == 2 else ctypes.c_int32)
    row, named = 0, set()
    for g, count in enumerate(counts_at(words["m_sizes"], E, words["m_sizes_step"])):
        end = min(row + count, M)
        if row < end:
            flat = np.arange(row, end) if index is None else index[row:end]
            here = np.ones(len(flat), bool) if index is None else (flat >= 0) & (flat < index_end)
            sorted_rows, flat = np.arange(row, end)[here], flat[here]
            source = flat // words["x_divisor"] if gathers else sorted_rows
            at_w = w + size * g * words["stride_w_e"]
            _, *there = sizes.get("w", (E, K if kn else N, N if kn else K))
            matrix = np.zeros((K, N), np.float32)
            rows = memory.rows(at_w, *there, words["stride_w_row"])
            matrix[: there[not kn], : there[kn]] = rows if kn else rows.T
            values = _product(memory.picked(x, source, K, words["stride_x_m"]), matrix)
            if low:
                second = memory.read(words["low_w"] + size * g * N * R, N * R)
                second = second.reshape(R, N) if kn else second.reshape(N, R).T
                values = values + _product(memory.picked(words["low_x"], sorted_rows, R, R), second)
            if Fusion.BIAS in flags:
                values = values + memory.read(words["bias"] + size * g * N, N)
            if Fusion.WEIGHT in flags:
                values = values * at(words["row_weights"], index_end)[flat][:, None]
            if silu:
                gate, up = np.split(values, 2, axis=1)
                values = gate / (1 + np.exp(-gate)) * up
            targets = flat if scatters else sorted_rows
            named.update(targets.tolist())
            memory.put(y, targets, words["stride_y_m"], values)
        row += count
    if words["flags"] & ZERO_TAIL:
        rest = set(range(index_end)) - named if scatters else range(row, M)
        targets = np.array(sorted(rest), np.int64)
        memory.put(y, targets, words["stride_y_m"], np.zeros((len(targets), N // 2 if silu else N)))


def compute_weight(code: Code, words: Mapping[str, int]) -> None:
    """dw: kernels/portable_plain/weight.py."""
    memory, size = Memory(code.dtype), code.dtype.itemsize
    M, N, K, E = (words[name] for name in ("M", "N", "K", "E"))
    row = 0
    for g, count in enumerate(counts_at(words["m_sizes"], E, words["m_sizes_step"])):
        end = min(row + count, M)
        total = np.zeros((N, K), np.float32)
        if row < end:
            dy, x = (
                memory.rows(
                    words[name] + size * row * words[f"stride_{name}_m"], end - row, columns, words[f"stride_{name}_m"]
                )
                for name, columns in (("dy", N), ("x", K))
            )
            total = dy.T @ x
        memory.put(words["dw"] + size * g * words["stride_dw_e"], np.arange(N), words["stride_dw_row"], total)
        row += count


def compute_weight_of_codes(words: Mapping[str, int]) -> None:
    """dw: kernels/hopper_w8a8_block/weight.py."""
    M, N, K, E = (words[name] for name in ("M", "N", "K", "E"))
    P = places_for(M, E)

    def codes(name: str, columns: int, scales: int) -> fp8_codes.ColumnCodes:
        bits = torch.from_numpy(at(words[name], columns * P, ctypes.c_uint8)).view(columns, P)
        scale = torch.from_numpy(at(words[f"{name}_scale"], P // 128 * scales)).view(P // 128, scales)
        return fp8_codes.ColumnCodes(bits.view(torch.float8_e4m3fn), scale, M)

    dtype = torch.float32 if words["dw_flags"] & FP32 else torch.bfloat16
    memory = torch.from_numpy(at(words["dw_at"], E * N * K * dtype.itemsize, ctypes.c_uint8))
    sizes = torch.from_numpy(np.array(counts_at(words["m_sizes"], E, words["m_sizes_step"])))
    operands = codes("dy", N, N), codes("x", K, K // 128)
    fp8_codes.grad_weight(*operands, sizes, memory.view(dtype).view(E, N, K), accumulate=bool(words["dw_flags"] & ADDS))


@np.errstate(all="ignore")  # a GPU warns of nothing
def compute(code: Code, words: Mapping[str, int], grid: int, sizes: Mapping[str, tuple[int, ...]]) -> None:
    """Store what a launch stores. Of y of codes nothing is: tests read its words.

    ``sizes`` are those of descriptors.
    """
    if isinstance(code.op, RowOp):
        pointers = tuple(words[name] for name, kind in code.arguments if kind == "ptr")
        numbers = tuple(words[name] for name, kind in code.arguments if kind != "ptr")
        block = dict(code.config)["block"]
        PASSES[code.op](Memory(code.dtype), grid, block, pointers, numbers)
    elif code.dtype.quantised and code.op is Op.DW:
        compute_weight_of_codes(words)
    elif code.dtype.quantised:
        return
    elif code.op is Op.DW:
        compute_weight(code, words)
    else:
        compute_rows(code, words, sizes)
