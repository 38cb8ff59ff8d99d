"""Whether a variant's record is one that a launcher can carry out: its revision, arguments, descriptors and threads.

A bundle's own checks end at what the format says. What the names mean is launch ABI 1 (kernels/registry.py):
an argument that no launcher fills, or fills with something else, must be found before a kernel is launched with it.
What a kernel declares of its launches (boxes, swizzles, words, threads) stands in its entry: a record says the same.
"""

from __future__ import annotations

import math

from ..artifacts.records.bundle import TensorMap, Variant
from ..artifacts.records.precision import DType
from ..artifacts.records.problem import RowOp
from .contract.config import Config, Loads
from .contract.spec import Spec
from .hardware.arch import SmLimits
from .registry import arguments, boxes, entry_named, gemm_entry, refusal, required, threads

_ELEMENTS = {DType.BF16: (9,), DType.FP16: (6,), DType.FP32: (7,), DType.TF32: (7, 11)}  # CUtensorMapDataType
_WARP = 32
_BYTES = {0: 1, 2: 4, 6: 2, 7: 4, 9: 2, 11: 4}  # of an element, by CUtensorMapDataType
_SPAN_BYTES = 128  # the widest that rows of a box are swizzled over: wider tiles take several boxes
_SWIZZLES = {128: 3, 64: 2, 32: 1}  # CUtensorMapSwizzle by the bytes of a box's row
_STORED = ("y_map", "dw")  # descriptors that results go through, in shared memory that others have left


def unlaunchable(variant: Variant) -> str | None:
    """Why no launcher can run this variant, or None. Its launch ABI is one that this version reads."""
    entry = entry_named(variant.kernel)
    if entry is not None and variant.revision < (since := entry.launched_since):
        return f"its kernel {variant.kernel} is of revision {variant.revision}, this version launches {since} and later"
    if isinstance(variant.op, RowOp):
        return _unlaunchable_pass(variant, variant.op)
    try:
        config = Config.from_pairs(variant.config)
    except ValueError as error:
        return str(error)
    spec = Spec(variant.op, variant.dtype, config, variant.layout, variant.fusion, max_experts=variant.max_experts)
    refused = refusal(spec)
    if refused:
        return refused
    declared, held = dict(arguments(spec)), gemm_entry(spec).held
    for name, kind in variant.arguments:
        if kind != (wanted := declared.get(name, "none of that name")):
            return f"argument {name} is of the kind {kind}, launch ABI 1 has {wanted} for {variant.op.value}"
    given = dict(variant.arguments)
    lacking = [name for name in required(spec) if name not in given]
    if lacking:
        return f"its arguments lack {', '.join(lacking)}"
    if variant.tensor_maps and config.loads is not Loads.TMA:
        return "it has tensor maps, and a config without TMA"
    for one in variant.tensor_maps:
        own = held.get(one.argument)
        elements = (own.code,) if own is not None else _ELEMENTS.get(variant.dtype, _ELEMENTS[DType.BF16])
        if one.element not in (elements[:1] if one.argument == "dw" else elements):  # results are not rounded to tf32
            return f"the tensor map of {one.argument} has elements of the type {one.element}, not {variant.dtype.value}"
    return _wrong_threads(variant)


def undeclared(variant: Variant, limits: SmLimits) -> str | None:
    """Why a record is not what its kernel declares for its config, or None, also where ``unlaunchable`` says why.

    The record is data: a box, a swizzle or an order of words other than those that the code was compiled with reads
    and writes other memory. One of another revision of the kernel is passed: what that declared nobody here knows.
    """
    if variant.shared_bytes > limits.shared_per_block_bytes:
        return f"it wants {variant.shared_bytes} bytes of shared memory, a block has {limits.shared_per_block_bytes}"
    entry = entry_named(variant.kernel)
    if isinstance(variant.op, RowOp) or entry is None or variant.revision != entry.revision:
        return None
    try:
        config = Config.from_pairs(variant.config)
    except ValueError:
        return None
    spec = Spec(
        variant.op, variant.dtype, config, variant.layout, variant.fusion, variant.alignment, variant.max_experts
    )
    if refusal(spec):
        return None
    if variant.arguments != (wanted := arguments(spec)):
        pairs = zip(variant.arguments, wanted, strict=False)
        first = next(
            (i for i, (got, want) in enumerate(pairs) if got != want), min(len(variant.arguments), len(wanted))
        )
        told = _told(variant.arguments[first : first + 1]) or "there are too few"
        return f"its arguments are not those of {variant.kernel}, from argument {first} on: {told}"
    if variant.threads != threads(spec):
        return f"it has {variant.threads} threads, {variant.kernel} of {config} has {threads(spec)}"
    blocks, held = boxes(spec), gemm_entry(spec).held
    for one in variant.tensor_maps:
        plain = one.argument in held and not held[one.argument].swizzle
        box, swizzle = _map(one, tuple(blocks.get(one.argument, ())), plain=plain)
        if (one.box, one.swizzle) != (box, swizzle):
            got = f"boxes of {one.box}, swizzle {one.swizzle}"
            return f"the tensor map of {one.argument} has {got}: wanted {box}, swizzle {swizzle}"
    least = sum(
        _BYTES.get(one.element, 1) * math.prod(one.box) for one in variant.tensor_maps if one.argument not in _STORED
    )
    if variant.shared_bytes < least:
        return f"it wants {variant.shared_bytes} bytes of shared memory, its boxes alone take {least}"
    return None


def _map(one: TensorMap, block: tuple[int, ...], *, plain: bool) -> tuple[tuple[int, ...], int]:
    """The box of a descriptor's block, and how its rows are swizzled."""
    if plain or not block:
        return block, 0
    size = _BYTES.get(one.element, 1)
    columns = min(block[-1], _SPAN_BYTES // size)
    return (*block[:-1], columns), _SWIZZLES.get(columns * size, 0)


def _unlaunchable_pass(variant: Variant, op: RowOp) -> str | None:
    from . import rowops  # here, as a plain product needs none

    try:
        rowops.Block.from_pairs(variant.config)
    except ValueError as error:
        return str(error)
    wanted = rowops.arguments(op)
    if variant.arguments != wanted:
        return f"its arguments are {_told(variant.arguments)}, launch ABI 1 has {_told(wanted)} for {op.value}"
    return _wrong_threads(variant)


def _wrong_threads(variant: Variant) -> str | None:
    return f"it has {variant.threads} threads, wanted whole warps of {_WARP}" if variant.threads % _WARP else None


def _told(arguments: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in arguments)
