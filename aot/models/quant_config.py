"""The format of the routed experts' weights, from a checkpoint's quantization config.

Each library has a ``quantization_config`` of its own. Read here: the format of the routed experts, and whether the
config leaves them out. Formats have the names of ``artifacts/records.py``; a format without a row there gets
a name of the same pattern, so that an error can say exactly which format has no kernels.

What a config leaves out of its quantisation it names by some consecutive parts of a module's name, a glob, or a regular
expression behind ``re:``. ``runtime/weights/patterns.py`` matches globs and regular expressions, within limits.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ...artifacts.errors import InputError
from ...artifacts.limits import printable
from ...artifacts.records import PRECISIONS
from ...runtime.weights import quantization
from ...runtime.weights.patterns import first_matching

PLAIN = tuple(precision.name for precision in PRECISIONS.values() if not precision.quantised)
UNQUANTISED = "bf16"
_MXFP4 = "mxfp4"
_MIXED = "mixed"  # a layer whose experts have several formats
_MOST_LAYERS = 512
_MODELOPT = {  # NVIDIA's names of whole recipes
    "FP8": "fp8_channel",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel",
    "FP8_PB_WO": "fp8_block_a16",
    "FP8_PB_REAL": "fp8_block",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "W4A8_NVFP4_FP8": "nvfp4_a8",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4_a8",
    "W4A16_AWQ": "int4",
    "NVFP4_AWQ": "nvfp4",
    "W4A8_AWQ": "int4_a8",
}
_MOST_NAMES = 1 << 18  # names: large models list every matrix of every expert
# Where a checkpoint keeps its experts, as the exclusions of a config name them.
_ROOTS = ("model.layers.{}", "model.language_model.layers.{}", "language_model.model.layers.{}", "layers.{}")
_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "mixer", "moe")
_PARTS = (
    (("gate_proj", "w1"), "gate_up_proj"),
    (("up_proj", "w3"), "gate_up_proj"),
    (("down_proj", "w2"), "down_proj"),
)
_EXPERT = re.compile(r"\bexperts\\?\.([0-9]{1,6})\b")
_MOST_EXPERTS = 6  # whose matrices are looked up, in each layer
_LEAVES = (
    "experts.0.gate_proj",
    "experts.0.down_proj",
    "experts.0.w1",
    "experts.0.w2",
    "experts.gate_up_proj",
    "experts.down_proj",
    "experts",
)


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """The format of the routed experts in a checkpoint, and remarks for the user."""

    format: str
    remarks: tuple[str, ...] = ()


def expert_weights(
    config: Mapping[str, object],
    where: str,
    layers: int = 1,
    beside: Mapping[str, object] | None = None,
    experts: int = 1,
) -> CheckpointFormat | None:
    """The experts' format that ``config``, the contents of a config.json, declares; None if it declares none.

    ``layers`` is the model's number of layers, each of ``experts`` experts: a config may leave some out, or give some
    other bits. ``beside`` is the contents of modelopt's hf_quant_config.json, which takes precedence. ``where`` begins
    each error and remark.

    Raises
    ------
    InputError
        if a field that decides is missing or of the wrong type.
    """
    quantised = (beside or {}).get("quantization")
    if quantised is None:
        quantised = quantization.find(config)
    if quantised is None:
        return None
    if not isinstance(quantised, Mapping):
        raise InputError(f"{where}: quantization_config is {_short(quantised)}, wanted an object")
    fields = _Quantisation(quantised, where)
    count = max(1, min(layers, _MOST_LAYERS))
    formats = _formats(fields, config, count, experts)
    remarks: tuple[str, ...] = ()
    for layer in left_out(fields.excluded(), count, where):
        formats[layer] = UNQUANTISED
    name = next((format_ for format_, _ in Counter(formats).most_common() if format_ != UNQUANTISED), UNQUANTISED)
    if name == UNQUANTISED:
        remarks = ("the quantisation leaves the experts out: they are bf16",)
    elif name == _MXFP4 and _fp4_experts(config, quantised):
        remarks = ("its own code multiplies mxfp4 by fp8 activations, scaled by 128 of K; here x is bf16",)
    elif name == _MIXED:
        remarks = ("the config gives the experts of a layer several formats: there is no one to build for",)
    for other in dict.fromkeys(formats):
        if other != name:
            those = [layer for layer, format_ in enumerate(formats) if format_ == other]
            some = ", ".join(map(str, those[:8])) + (", ..." if len(those) > 8 else "")
            bare = f"are left out of {name}: they are bf16"
            remarks = (
                *remarks,
                f"the experts of layers {some} {bare if other == UNQUANTISED else f'are {other}, not {name}'}",
            )
    return CheckpointFormat(name, tuple(f"{where}: {remark}" for remark in remarks))


def _formats(fields: _Quantisation, config: Mapping[str, object], layers: int, experts: int) -> list[str]:
    """The format of each layer's experts; ``mixed`` if a layer has several."""
    where = f"{fields.where}: quantization_config"
    words = quantization.exceptions(fields.values, where)
    if not words:
        return [_format(fields, config)] * layers
    by_layer = [matrices(layer, experts, words) for layer in range(layers)]
    flat = [names for layer in by_layer for names in layer]
    by_settings: dict[int, str] = {}
    each: list[str] = []
    for settings in quantization.by_module(fields.values, flat, where):
        if id(settings) not in by_settings:
            format_ = UNQUANTISED if settings is None else _format(_Quantisation(settings, fields.where), config)
            by_settings[id(settings)] = format_
        each.append(by_settings[id(settings)])
    formats, rest = [], iter(each)
    for layer in by_layer:
        layer_formats = {next(rest) for _ in layer}
        formats.append(layer_formats.pop() if len(layer_formats) == 1 else _MIXED)
    return formats


def _format(fields: _Quantisation, config: Mapping[str, object]) -> str:
    method = fields.word("quant_method") or ("modelopt" if "quant_algo" in fields.values else "")
    reader = _READERS.get(method.lower())
    if _fp4_experts(config, fields.values):  # DeepSeek-V4: the experts apart from the rest
        return _MXFP4
    return _pattern(method or "quantised") if reader is None else reader(fields)


def _fp4_experts(config: Mapping[str, object], quantised: Mapping[str, object]) -> bool:
    return "fp4" in (config.get("expert_dtype"), quantised.get("expert_dtype"))


@dataclass(frozen=True, slots=True)
class _Quantisation:
    """A quantization_config, with typed look-ups."""

    values: Mapping[str, object]
    where: str

    def word(self, name: str) -> str:
        value = self.values.get(name)
        return value if isinstance(value, str) else ""

    def number(self, *names: str) -> int | None:
        """The first of ``names`` that is set."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise InputError(f"{self.where}: quantization_config: {name} is {_short(value)}, wanted a number")
                return value
        return None

    def strings(self, name: str) -> list[str]:
        """The strings of a list; empty if the value is no list."""
        value = self.values.get(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def inner(self, name: str) -> _Quantisation:
        value = self.values.get(name)
        return _Quantisation(value if isinstance(value, dict) else {}, self.where)

    def excluded(self) -> Iterator[str]:
        """Yield the names of the modules that are not quantised."""
        for key in (
            "modules_to_not_convert",
            "ignore",
            "ignored_layers",
            "exclude_modules",
            "exclude",
            "llm_int8_skip_modules",
            "modules_to_not_quantize",
        ):
            yield from filter(None, self.strings(key))


def _fp8(fields: _Quantisation) -> str:
    block = fields.values.get("weight_block_size")
    if block is None:
        return "fp8_channel"  # one scale a tensor is one for every row, too
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) for size in block):
        raise InputError(
            f"{fields.where}: quantization_config: weight_block_size is {_short(block)}, wanted [128, 128]"
        )
    if block == [1, 32] and fields.word("scale_fmt") == "ue8m0":
        return "mxfp8"
    return "fp8_block" if block == [128, 128] else f"fp8_block{block[0]}x{block[1]}"


def _gptq(fields: _Quantisation) -> str:
    symmetric = fields.values.get("sym") is not False
    return _grouped(fields, "gptq", symmetric)


def _grouped(fields: _Quantisation, method: str, symmetric: bool) -> str:
    bits, group = fields.number("bits", "w_bit"), fields.number("group_size", "q_group_size")
    return method if bits is None else _int(bits, group, symmetric)


def _awq(fields: _Quantisation) -> str:
    zero = fields.values.get("zero_point") is not False
    return _grouped(fields, "awq", not zero)


def _auto_round(fields: _Quantisation) -> str:
    kind = fields.word("data_type").lower()
    if kind.startswith(("mx_fp", "nv_fp")):
        bits = fields.number("bits") or 4
        return f"{'mx' if kind.startswith('mx') else 'nv'}fp{bits}"
    return _gptq(fields)


def _bitsandbytes(fields: _Quantisation) -> str:
    if fields.values.get("load_in_8bit"):
        return "int8_bnb"
    return fields.word("bnb_4bit_quant_type") or "nf4"


def _modelopt(fields: _Quantisation) -> str:
    algorithm = fields.word("quant_algo").upper()
    if algorithm == "MIXED_PRECISION":
        layers = fields.inner("quantized_layers").values
        formats = {
            _modelopt(_Quantisation(settings, fields.where))
            for name, settings in layers.items()
            if isinstance(settings, dict) and ".experts" in name
        }
        if len(formats) != 1:
            return "mixed" if formats else UNQUANTISED
        return formats.pop()
    if not algorithm and fields.inner("config_groups").values:
        return _compressed(fields)
    name = _MODELOPT.get(algorithm, _pattern(algorithm or "modelopt"))
    if name.startswith("int4"):
        return name.replace("int4", f"int4_g{fields.number('group_size') or 128}")
    return name


def _quark(fields: _Quantisation) -> str:
    weight = fields.inner("global_quant_config").inner("weight")
    kind, scheme = weight.word("dtype").lower(), weight.word("qscheme")
    if kind == "fp4" and weight.number("group_size") == 32:
        return "mxfp4"
    if kind.startswith("fp8"):
        return "fp8_channel" if scheme in ("per_tensor", "per_channel") else f"fp8_{_pattern(scheme or 'group')}"
    if kind in ("int4", "uint4"):
        return _int(4, weight.number("group_size"), kind == "int4")
    return _pattern(f"quark_{kind or 'mixed'}")


def _compressed(fields: _Quantisation) -> str:
    """The format in compressed-tensors' config, whose first group is the experts'."""
    groups = [
        _Quantisation(group, fields.where)
        for group in fields.inner("config_groups").values.values()
        if isinstance(group, dict)
    ]
    if not groups:
        return "compressed-tensors"
    return _scheme(groups[0], fields.word("format") or groups[0].word("format"))


def _scheme(group: _Quantisation, packed: str) -> str:
    weights, inputs = group.inner("weights"), group.inner("input_activations")
    bits, kind = weights.number("num_bits") or 0, weights.word("type") or "int"
    strategy, size = weights.word("strategy"), weights.number("group_size")
    packed = group.word("format") or packed
    narrow = "" if inputs.values else "_a16"
    if kind == "float" and bits == 8:
        if strategy == "block":
            block = weights.values.get("block_structure")
            return (_fp8(_Quantisation({"weight_block_size": block or [128, 128]}, group.where))) + narrow
        if strategy in ("channel", "tensor"):
            return "fp8_channel" + narrow
        return "mxfp8" if size == 32 else f"fp8_g{size}"
    if kind == "float" and bits == 4:
        return "nvfp4" if size == 16 or "nvfp4" in packed else "mxfp4" if size == 32 or "mxfp4" in packed else "fp4"
    if inputs.values:
        return f"w{bits}a{inputs.number('num_bits') or 8}_int"
    return _int(bits, size if strategy == "group" else -1, weights.values.get("symmetric") is not False)


def _int(bits: int, group: int | None, symmetric: bool) -> str:
    size = "channel" if group is None or group <= 0 else f"g{group}"
    return f"int{bits}_{size}" + ("" if symmetric else "_zp")


_READERS: Mapping[str, Callable[[_Quantisation], str]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "deepseek_v4_fp8": _fp8,
    "mxfp4": lambda fields: "mxfp4",
    "gpt_oss_mxfp4": lambda fields: "mxfp4",
    "mxfp8": lambda fields: "mxfp8",
    "gptq": _gptq,
    "gptq_marlin": _gptq,
    "awq": _awq,
    "awq_marlin": _awq,
    "auto-round": _auto_round,
    "auto_round": _auto_round,
    "intel/auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed,
    "quark": _quark,
}


def _pattern(text: str) -> str:
    """Turn any text into the name of a format."""
    return re.sub(r"[^a-z0-9_-]", "_", printable(text).lower())[:32] or "quantised"


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def left_out(names: Iterable[str], layers: int, where: str) -> list[int]:
    """The layers, of ``layers`` in all, whose experts are among ``names``; ``where`` begins an error.

    Raises
    ------
    InputError
        for too many names, and for patterns that are not supported or take too long.
    """
    unique = tuple(dict.fromkeys(names))
    patterns = [name for name in unique if "*" in name or name.startswith("re:")]
    if len(unique) > _MOST_NAMES:
        raise InputError(
            f"{where}: quantization_config: {len(unique):,} names of what is not quantised, "
            f"the limit is {_MOST_NAMES:,}"
        )
    plain = set(unique).difference(patterns)
    excluded = {layer for layer in range(layers) if not plain.isdisjoint(_parts(layer))} if plain else set[int]()
    if patterns:
        groups = [experts(layer) for layer in range(layers)]
        matches = first_matching(patterns, groups, f"{where}: quantization_config", "of what is not quantised")
        excluded.update(layer for layer, match in enumerate(matches) if match is not None)
    return sorted(excluded)


def matrices(layer: int, experts: int, words: Iterable[str]) -> list[tuple[str, ...]]:
    """The names of some of a layer's expert matrices: of the first and last expert, and of experts that ``words`` name.

    One entry for each matrix, with every name that it may have.
    """
    some = dict.fromkeys((0, max(experts, 1) - 1))
    for word in words:
        if len(some) < _MOST_EXPERTS and (match := _EXPERT.search(word)) and int(match[1]) < experts:
            some[int(match[1])] = None
    return [
        tuple(f"{root.format(layer)}.{block}.{leaf}" for root in _ROOTS for block in _BLOCKS for leaf in leaves)
        for expert in some
        for leaves in _matrices(expert)
    ]


@functools.cache
def _matrices(expert: int) -> tuple[tuple[str, ...], ...]:
    """The last parts of the names that an expert's gate, up and down matrices may have."""
    return tuple(
        (*(f"experts.{expert}.{name}" for name in names), f"experts.{stacked}", "experts") for names, stacked in _PARTS
    )


@functools.cache
def experts(layer: int) -> tuple[str, ...]:
    """The names that a layer's experts may have."""
    return tuple(f"{root.format(layer)}.{block}.{leaf}" for root in _ROOTS for block in _BLOCKS for leaf in _LEAVES)


@functools.cache
def _parts(layer: int) -> frozenset[str]:
    """Every run of consecutive parts of the names that a layer's experts may have."""
    heads = {".".join(parts[i:]) for parts in (root.split(".") for root in _ROOTS) for i in range(len(parts))}
    below = [f"{block}.{leaf}".split(".") for block in _BLOCKS for leaf in _LEAVES]
    tails = {"".join(f".{part}" for part in parts[:i]) for parts in below for i in range(len(parts) + 1)}
    without = [*below, *(root.split(".")[:-1] for root in _ROOTS)]  # the layer's number ends a root
    fixed = {".".join(parts[i:j]) for parts in without for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    return frozenset(fixed | {head.format(layer) + tail for head in heads for tail in tails})
