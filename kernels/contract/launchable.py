"""Whether a variant's record is one that a launcher can carry out: its revision, arguments, descriptors and threads.

A bundle's own checks end at what the format says. What the names mean is launch ABI 1 (kernels/contract/registry.py):
an argument that no launcher fills, or fills with something else, must be found before a kernel is launched with it.
What a kernel declares of its launches (boxes, swizzles, words, threads) stands in its entry: a record says the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...artifacts.records.bundle import TensorMap, Variant
from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op, RowOp
from ..hardware.arch import SmLimits
from .coded import CODED, W8A8
from .config import Config, Loads
from .registry import ENTRIES, arguments, boxes, refusal, required, threads
from .rowops import Block
from .rowops import arguments as arguments_of_pass
from .spec import Spec

_NUMBERS = dict.fromkeys(
    ("M", "N", "K", "E", "m_sizes_step", "index_step", "index_end", "x_divisor", "flags"), ("i32",)
) | dict.fromkeys(("m_sizes", "index", "row_weights", "bias", "counter"), ("ptr",))  # fmt: skip
_ROWS = _NUMBERS | {
    "x": ("ptr", "desc2"), "w": ("ptr", "desc3"), "y": ("ptr",), "y_map": ("desc4",), "low_x": ("ptr", "desc2"),
    "low_w": ("ptr", "desc3"), "R": ("i32",),
} | dict.fromkeys(
    ("stride_x_m", "stride_y_m", "stride_w_e", "stride_w_row"), ("i64",)
)  # fmt: skip
_WEIGHT = _NUMBERS | {
    "dy": ("ptr", "desc4"), "x": ("ptr", "desc4"), "dw": ("ptr", "desc3"), "dy_at": ("ptr",), "x_at": ("ptr",),
} | dict.fromkeys(
    ("stride_dy_m", "stride_x_m", "stride_dw_e", "stride_dw_row"), ("i64",)
)  # fmt: skip
_CODES = _NUMBERS | {
    "x": ("desc2",), "w": ("desc2", "desc4"), "w_scale": ("desc2", "desc4"), "w_zero": ("desc4",),
    "w_outer": ("ptr",), "y": ("ptr",), "stride_y_m": ("i64",), "stride_outer_e": ("i64",), "low_x": ("desc2",),
    "low_w": ("desc3",), "R": ("i32",),
}  # fmt: skip
_PLAIN_CODES = _NUMBERS | dict.fromkeys(
    ("x", "w", "w_scale", "w_zero", "w_outer", "y"), ("ptr",)
) | dict.fromkeys(("stride_x_m", "stride_y_m"), ("i64",))  # fmt: skip
_SCALED = _NUMBERS | {
    "x": ("desc2",), "w": ("desc3", "desc4"), "x_scale": ("ptr", "desc2"), "w_scale": ("ptr",), "y": ("ptr",),
    "y_map": ("desc4",), "stride_y_m": ("i64",),
}  # fmt: skip
_ELEMENTS_OF_CODES = {"x": (9,), "w": (2,), "w_scale": (0,), "w_zero": (0,), "low_x": (9,), "low_w": (9,)}
_ELEMENTS_OF_BOTH = {"x": (0,), "w": (2,), "x_scale": (7,), "y_map": (9,)}
_ELEMENTS = {DType.BF16: (9,), DType.FP16: (6,), DType.FP32: (7,), DType.TF32: (7, 11)}  # CUtensorMapDataType
_WARP = 32
_BYTES = {0: 1, 2: 4, 6: 2, 7: 4, 9: 2, 11: 4}  # of an element, by CUtensorMapDataType
_SPAN_BYTES = 128  # the widest that rows of a box are swizzled over: wider tiles take several boxes
_SWIZZLES = {128: 3, 64: 2, 32: 1}  # CUtensorMapSwizzle by the bytes of a box's row
_PLAIN = ("w", "w_scale", "w_zero", "x_scale")  # of codes: their rows are laid out for the hardware, and not swizzled
_STORED = ("y_map", "dw")  # descriptors that results go through, in shared memory that others have left


def unlaunchable(variant: Variant) -> str | None:
    """Why no launcher can run this variant, or None. Its launch ABI is one that this version reads."""
    entry = ENTRIES.get(variant.kernel)
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
    words = _words_of(variant)
    given = dict(variant.arguments)
    for name, kind in variant.arguments:
        if kind not in words.get(name, ()):
            wanted = " or ".join(words.get(name, ())) or "none of that name"
            return f"argument {name} is of the kind {kind}, launch ABI 1 has {wanted} for {variant.op.value}"
    lacking = [name for name in required(spec) if name not in given]
    if lacking:
        return f"its arguments lack {', '.join(lacking)}"
    if variant.op is Op.DW and given["dy"] != given["x"]:
        return f"dy is of the kind {given['dy']} and x of {given['x']}, wanted the same"
    if variant.tensor_maps and config.loads is not Loads.TMA:
        return "it has tensor maps, and a config without TMA"
    for one in variant.tensor_maps:
        if variant.dtype.quantised:
            of_codes = _ELEMENTS_OF_BOTH if variant.dtype.quantises_x else _ELEMENTS_OF_CODES
            elements: tuple[int, ...] = of_codes.get(one.argument, ())
        else:
            elements = _ELEMENTS[variant.dtype]
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
    entry = ENTRIES.get(variant.kernel)
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
    blocks = boxes(spec)
    for one in variant.tensor_maps:
        quantised = variant.dtype.quantised
        box, swizzle = _map(one, tuple(blocks.get(one.argument, ())), plain=quantised and one.argument in _PLAIN)
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


def _words_of(variant: Variant) -> Mapping[str, tuple[str, ...]]:
    if variant.dtype.quantised:
        if variant.kernel in (CODED.name, W8A8.name):
            return _PLAIN_CODES
        return _SCALED if variant.dtype.quantises_x else _CODES
    return _WEIGHT if variant.op is Op.DW else _ROWS


def _unlaunchable_pass(variant: Variant, op: RowOp) -> str | None:
    try:
        Block.from_pairs(variant.config)
    except ValueError as error:
        return str(error)
    wanted = arguments_of_pass(op)
    if variant.arguments != wanted:
        return f"its arguments are {_told(variant.arguments)}, launch ABI 1 has {_told(wanted)} for {op.value}"
    return _wrong_threads(variant)


def _wrong_threads(variant: Variant) -> str | None:
    return f"it has {variant.threads} threads, wanted whole warps of {_WARP}" if variant.threads % _WARP else None


def _told(arguments: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in arguments)
