"""Check that the launcher can run a variant by its record, before it launches the variant's code.

The bundle format checks a record's form alone. ``unlaunchable`` checks that the launcher knows all of its arguments,
and ``undeclared`` that arguments, TMA boxes, swizzles and threads are those that the kernel's entry declares.
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
_SPAN_BYTES = 128  # of a swizzled box's row, at most: wider tiles take several boxes
_SWIZZLES = {128: 3, 64: 2, 32: 1}  # CUtensorMapSwizzle by the bytes of a box's row
_STORED = ("y_map", "dw")  # descriptors of results: their shared memory was the operands' before


def unlaunchable(variant: Variant) -> str | None:
    """Return why the launcher can't run a variant, None if it can. The caller has checked the launch ABI's number."""
    entry = entry_named(variant.kernel)
    if entry is not None and variant.revision < (since := entry.launched_since):
        return f"its kernel {variant.kernel} is of revision {variant.revision}, this version launches {since} and later"
    if isinstance(variant.op, RowOp):
        return _unlaunchable_row_op(variant, variant.op)
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
    present = dict(variant.arguments)
    lacking = [name for name in required(spec) if name not in present]
    if lacking:
        return f"its arguments lack {', '.join(lacking)}"
    if variant.tensor_maps and config.loads is not Loads.TMA:
        return "it has tensor maps, and a config without TMA"
    for tensor_map in variant.tensor_maps:
        name, element = tensor_map.argument, tensor_map.element
        own = held.get(name)
        elements = (own.code,) if own is not None else _ELEMENTS.get(variant.dtype, _ELEMENTS[DType.BF16])
        if element not in (elements[:1] if name == "dw" else elements):  # results are not rounded to tf32
            return f"the tensor map of {name} has elements of the type {element}, not {variant.dtype.value}"
    return _wrong_threads(variant)


def undeclared(variant: Variant, limits: SmLimits) -> str | None:
    """Return how a record differs from its kernel's declaration for its config, None if it doesn't.

    A box, swizzle or order of arguments other than the compiled code's would read and write other memory. Records of
    other revisions of the kernel are not compared, because their declaration is unknown here. None also for records
    that ``unlaunchable`` refuses.
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
        argument = _listed(variant.arguments[first : first + 1]) or "there are too few"
        return f"its arguments are not those of {variant.kernel}, from argument {first} on: {argument}"
    if variant.threads != threads(spec):
        return f"it has {variant.threads} threads, {variant.kernel} of {config} has {threads(spec)}"
    blocks, held = boxes(spec), gemm_entry(spec).held
    for tensor_map in variant.tensor_maps:
        name = tensor_map.argument
        plain = name in held and not held[name].swizzle
        box, swizzle = _box_and_swizzle(tensor_map, tuple(blocks.get(name, ())), plain=plain)
        if (tensor_map.box, tensor_map.swizzle) != (box, swizzle):
            got = f"boxes of {tensor_map.box}, swizzle {tensor_map.swizzle}"
            return f"the tensor map of {name} has {got}: wanted {box}, swizzle {swizzle}"
    operands = [tensor_map for tensor_map in variant.tensor_maps if tensor_map.argument not in _STORED]
    least = sum(_BYTES.get(tensor_map.element, 1) * math.prod(tensor_map.box) for tensor_map in operands)
    if variant.shared_bytes < least:
        return f"it wants {variant.shared_bytes} bytes of shared memory, its boxes alone take {least}"
    return None


def _box_and_swizzle(tensor_map: TensorMap, block: tuple[int, ...], *, plain: bool) -> tuple[tuple[int, ...], int]:
    """Return the box and the swizzle that a declared block of a descriptor gives."""
    if plain or not block:
        return block, 0
    size = _BYTES.get(tensor_map.element, 1)
    columns = min(block[-1], _SPAN_BYTES // size)
    return (*block[:-1], columns), _SWIZZLES.get(columns * size, 0)


def _unlaunchable_row_op(variant: Variant, op: RowOp) -> str | None:
    from . import rowops  # here, because a plain product needs no row kernel

    try:
        rowops.Block.from_pairs(variant.config)
    except ValueError as error:
        return str(error)
    wanted = rowops.arguments(op)
    if variant.arguments != wanted:
        return f"its arguments are {_listed(variant.arguments)}, launch ABI 1 has {_listed(wanted)} for {op.value}"
    if op in rowops.WEIGHT_OPS:  # whose grid is of the tile that this version has
        if variant.dtype not in rowops.WEIGHT_DTYPES[op]:
            return f"{op.value} has no kernel for {variant.dtype.value}"
        tile = rowops.RowOpSpec(op, variant.dtype).config
        if variant.config != tile.pairs():
            return f"its config is {dict(variant.config)}, this version launches {tile} of {op.value}"
    return _wrong_threads(variant)


def _wrong_threads(variant: Variant) -> str | None:
    return f"it has {variant.threads} threads, wanted whole warps of {_WARP}" if variant.threads % _WARP else None


def _listed(arguments: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in arguments)
