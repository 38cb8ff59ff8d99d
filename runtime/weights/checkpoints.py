"""Experts' tensors as checkpoints name and pack them, brought to the shapes of ``ExpertWeights``.

The packings are those of compressed-tensors, GPTQ (AutoGPTQ's and GPTQModel's), AWQ (the gemm version), modelopt,
gpt-oss and DeepSeek-V3 and V4: ``packings.py`` has one function for each. ``quantization.py`` finds the settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ...artifacts.limits import printable
from ...artifacts.records import PRECISIONS
from ...artifacts.tuples import NamedTuple
from . import packings, quantization
from .codes import Quantised, cat
from .packings import Int4, Suffixes, bad
from .validate import described, repeated

_GATE, _UP, _BOTH, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("gate_up_proj",), ("down_proj", "w2")
_PART = {**dict.fromkeys((*_GATE, *_UP, *_BOTH), "gate_up"), **dict.fromkeys(_DOWN, "down")}
_SUFFIX = (
    "weight|weight_scale|weight_scale_inv|weight_scale_2|weight_packed|weight_shape|weight_zero_point|weight_g_idx|"
    "weight_global_scale|input_scale|input_global_scale|qweight|qzeros|scales|g_idx|scale|scale_inv|blocks|bias|"
    "pre_quant_scale|w_bf16_to_fp8_scale"
)
_NAME = re.compile(
    rf"(?P<layer>(?:.*\.)?experts\.)(?:(?P<expert>[0-9]{{1,9}})\.)?(?P<projection>{'|'.join(_PART)})"
    rf"(?:[._](?P<suffix>{_SUFFIX}))?"
)
_SHORT = re.compile(rf"(?:(?P<projection>{'|'.join(_PART)})[._])?(?P<suffix>{_SUFFIX})")
# Other names of a method, with equal tensors.
_ALIASES = {
    "fbgemm_fp8": "fp8",
    "deepseek_v4_fp8": "fp8",
    "gpt_oss_mxfp4": "mxfp4",
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
}
_LONGEST_NAME = 1000  # characters
_IGNORED = ("bias", "input_scale", "input_global_scale")  # x's scales are computed in each call
_EMPTY = ("qzeros", "g_idx", "weight_zero_point", "weight_g_idx")  # ignored if empty
_MULTIPLIES = ("pre_quant_scale", "w_bf16_to_fp8_scale")  # tensors that scale x or w once more: no format here has them
_BLOCKS = ([packings.BLOCK] * 2, (packings.BLOCK,) * 2)
_GROUPS = ([1, packings.MX], (1, packings.MX))  # block sizes of mxfp8, in a config
_WHERE = "ExpertWeights.from_tensors: quantization_config"
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_ACT_ORDERS = (True, "group", "dynamic")  # values of compressed-tensors' actorder that need weight_g_idx


class _Reader(NamedTuple):
    """A config's settings: the format's name, how one matrix is read, and whether fp8 products quantise x."""

    format: str
    read: Callable[[Suffixes], Quantised]
    quantizes_x: bool = False


_MXFP8 = _Reader("mxfp8", packings.mxfp8)


class _Matrix(NamedTuple):
    """The tensors of one matrix, or of all experts' where ``expert`` is None.

    ``modules`` are the names that a config may have for it.
    """

    tensors: Suffixes
    modules: tuple[str, ...]
    expert: int | None


def read(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], part: str | None, quantize_x: bool | None
) -> tuple[str, Quantised]:
    """The format (``int4`` without its group), and its tensors; InputError as ``ExpertWeights.from_tensors`` says."""
    if part is not None and part != "gate_up" and part != "down":
        raise bad("part", repr(_said(part)), "'gate_up', 'down' or None")
    named = _matrices(tensors, part)
    readers = _readers(_quantization(config), [matrix.modules for matrices in named for matrix in matrices])
    format, _, quantizes_x = readers[0]
    quantised = _stacked(readers, named)
    if f"{format}_a16" in PRECISIONS:
        return format + ("" if (quantizes_x if quantize_x is None else quantize_x) else "_a16"), quantised
    return format, packings.whole_groups(quantised) if format == "int4" else quantised


def _matrices(tensors: Mapping[str, torch.Tensor], part: str | None) -> list[list[_Matrix]]:
    """The matrices of each expert, gate before up; if they are stacked, of all experts at once."""
    by_expert: dict[int | None, dict[str, Suffixes]] = {}
    layers, parts = set(), set()
    for name, tensor in _mapping("tensors", tensors).items():
        if not isinstance(name, str):
            raise bad("the name of a tensor", _said(name), "a string")
        if len(name) > _LONGEST_NAME:
            raise bad("the name of a tensor", f"{_said(name)} of {len(name):,} characters", f"{_LONGEST_NAME} at most")
        match = _NAME.fullmatch(name) or _SHORT.fullmatch(name)
        if match is None:
            continue
        said = match.groupdict()
        projection, suffix = said["projection"] or "", said["suffix"] or "weight"
        belongs = _PART.get(projection, part)
        if suffix in _IGNORED or (part is not None and belongs != part):
            continue
        parts.add(belongs)
        layers.add(said.get("layer"))
        expert = None if said.get("expert") is None else int(said["expert"])
        suffix = "weight_scale_inv" if suffix == "scale_inv" else suffix
        plain = _plain(name, tensor, may_be_empty=suffix in _EMPTY)
        if suffix in _MULTIPLIES:
            raise bad(_said(name), "among the tensors", "none: no format here multiplies by it")
        matrix = by_expert.setdefault(expert, {}).setdefault(projection, Suffixes(name))
        if plain.numel():
            matrix[suffix] = plain
    if not by_expert:
        some = ", ".join(map(_said, [*_mapping("tensors", tensors)][:3])) or "none"
        raise bad("the tensors", f"{some} ...", f"experts' {part or 'weights'}, such as 'experts.0.down_proj.weight'")
    if len(layers) > 1:
        some = ", ".join(sorted(map(_said, layers))[:3])
        raise bad("the tensors", f"of {len(layers)} layers: {some}", "those of one layer")
    if len(parts) > 1:
        raise bad("the tensors", "of both products", "part='gate_up' or part='down'")
    experts = sorted(by_expert, key=lambda e: -1 if e is None else e)
    if experts != [None] and experts != list(range(experts[0] or 0, (experts[0] or 0) + len(experts))):
        raise bad(
            "the tensors", f"of experts {_said(experts)}", "experts whose numbers follow each other, or all stacked"
        )
    if (
        len(
            {
                tensor.is_meta
                for parts in by_expert.values()
                for suffixes in parts.values()
                for tensor in suffixes.values()
            }
        )
        > 1
    ):
        raise bad("the tensors", "partly on the meta device", "all with data, or all without")
    (layer,) = layers
    return [
        [_Matrix(suffixes, _modules(layer or "", e, name), e) for name, suffixes in _in_order(by_expert[e], e).items()]
        for e in experts
    ]


def _modules(layer: str, expert: int | None, projection: str) -> tuple[str, ...]:
    """The names that a config may have for a matrix; for stacked matrices also the names before stacking."""
    if expert is not None:
        return quantization.names_of(f"{layer}{expert}.{projection}")
    single = {"gate_up_proj": ("gate_proj", "w1"), "": ()}.get(projection, (projection,))
    names = (f"{layer}{projection}", layer[:-1], *(f"{layer}0.{name}" for name in single))
    return tuple(dict.fromkeys(name for module in names if module for name in quantization.names_of(module))) or ("",)


def _plain(name: str, tensor: object, *, may_be_empty: bool) -> torch.Tensor:
    """A checkpoint's tensor; InputError for tensors that no checkpoint has."""
    if not isinstance(tensor, torch.Tensor):
        raise bad(_said(name), f"a {type(tensor).__name__}", "a tensor")
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_complex():
        kind = "nested" if tensor.is_nested else f"{tensor.dtype} and {tensor.layout}"
        raise bad(
            _said(name), kind, "a plain tensor of numbers, which is neither sparse, nested nor quantised by torch"
        )
    if not tensor.numel() and not may_be_empty:
        raise bad(_said(name), f"of shape {list(tensor.shape)}", "one that is not empty")
    if repeated(tensor):
        raise bad(
            _said(name),
            f"of shape {list(tensor.shape)} and strides {list(tensor.stride())}, which repeats elements",
            "memory for each of them: pass .contiguous()",
        )
    return tensor


def _in_order(projections: dict[str, Suffixes], expert: int | None) -> dict[str, Suffixes]:
    """Gate before up."""
    gate, up = [name for name in projections if name in _GATE], [name for name in projections if name in _UP]
    others = [name for name in projections if name not in (*_GATE, *_UP)]
    if len(gate) > len(up) or len(projections) > 2 or (others and len(projections) > 1):
        whose = "" if expert is None else f" of expert {expert}"
        raise bad(
            f"the projections{whose}", " and ".join(map(repr, projections)), "gate and up, up, both in one, or down"
        )
    return {name: projections[name] for name in (*gate, *up, *others)}


def _stacked(readers: list[_Reader], named: list[list[_Matrix]]) -> Quantised:
    """Stack all experts' matrices; copies each once, unless the checkpoint has them stacked."""
    out: list[torch.Tensor | None] = []
    remaining = iter(readers)
    for expert, matrices in enumerate(named):
        merged = _beside([next(remaining).read(matrix.tensors) for matrix in matrices], readers[0].format)
        if merged.codes.dim() > 2:
            if matrices[0].expert is not None:
                name = f"the codes of {_said(matrices[0].tensors.name)}"
                raise bad(name, f"of shape {list(merged.codes.shape)}", "a matrix, as it is one expert's")
            return merged
        if not out:
            out = [None if tensor is None else tensor.new_empty((len(named), *tensor.shape)) for tensor in merged]
        for name, to, tensor in zip(Quantised._fields, out, merged, strict=True):
            if to is None and tensor is None:
                continue
            if to is None or tensor is None:
                raise bad(
                    f"{name} of expert {expert} of those given",
                    "there" if to is None else "missing",
                    "alike for all experts",
                )
            if to[expert].shape != tensor.shape or to.dtype is not tensor.dtype:
                raise bad(
                    f"expert {expert} of those given",
                    f"{tensor.dtype} {list(tensor.shape)}",
                    f"{to.dtype} {list(to[expert].shape)}, as the first has",
                )
            to[expert] = tensor
    return Quantised(*out)  # type: ignore[arg-type]


def _beside(parts: list[Quantised], format: str) -> Quantised:
    """Gate and up joined into one matrix: gate's rows, then up's."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        for name, mine, other in zip(Quantised._fields, first, part, strict=True):
            if _form(mine, name, format) != _form(other, name, format):
                raise bad(
                    f"{name} of gate and up", " and ".join(map(described, (mine, other))), "alike, but for their rows"
                )
    if format == "fp8_block" and first.codes.shape[-2] % packings.BLOCK:
        raise bad(
            "gate",
            f"of {first.codes.shape[-2]} rows",
            f"a multiple of {packings.BLOCK}: up's blocks of scales would begin inside one of gate's",
        )
    outer = first.global_scale
    if outer is not None and not all(torch.equal(outer, part.global_scale) for part in parts):  # type: ignore[arg-type]
        raise bad("the global scales of gate and up", "two", "one for both: calibrate them together")
    rows = -1 if format == "fp8_channel" else -2
    zeros = [part.zero for part in parts if part.zero is not None]
    codes, scale = cat([part.codes for part in parts], -2), cat([part.scale for part in parts], rows)
    return Quantised(codes, scale, cat(zeros, -2) if zeros else None, outer)


def _form(tensor: torch.Tensor | None, name: str, format: str) -> object:
    """The properties of a tensor in which gate and up must agree: all but their rows."""
    if tensor is None or name == "global_scale":
        return tensor is None or tensor.shape
    rows = tensor.dim() - (1 if name == "scale" and format == "fp8_channel" else 2)
    return tensor.dtype, tensor.device, *tensor.shape[:rows], *tensor.shape[rows + 1 :]


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json or hf_quant_config.json that says how weights are quantised."""
    if not isinstance(config, Mapping):
        raise bad("quantization_config", f"a {type(config).__name__}", "that of a config.json, a dict")
    settings = quantization.find(config)
    if settings is not None:
        if not isinstance(settings, Mapping):
            raise bad("quantization_config", f"a {type(settings).__name__}", "a dict")
        return settings
    if isinstance(config.get("quantization"), Mapping):  # hf_quant_config.json
        return {"quant_method": "modelopt", **config["quantization"]}
    return config


def _readers(config: Mapping[str, Any], modules: list[tuple[str, ...]]) -> list[_Reader]:
    """Return a reader for each module by its settings in the config; InputError if the settings give two formats."""
    readers: dict[int, _Reader] = {}
    out = []
    for names, settings in zip(modules, _settings(config, modules), strict=True):
        if settings is None:
            if "config_groups" in config:
                got, wanted = f"of {len(config['config_groups'])} config_groups", "one whose targets name"
                raise bad("the config", got, f"{wanted} {_said(names[0])}, or a class")
            raise bad("the config", f"one that leaves {_said(names[0])} unquantised", "quantised experts")
        if id(settings) not in readers:
            readers[id(settings)] = _reader(settings, names[0])
        out.append(readers[id(settings)])
        if (out[-1].format, out[-1].quantizes_x) != (out[0].format, out[0].quantizes_x):
            raise bad(
                f"the config's format of {_said(names[0])}",
                out[-1].format,
                f"{out[0].format}, as {_said(modules[0][0])} has: one for all",
            )
    return out


def _settings(config: Mapping[str, Any], modules: list[tuple[str, ...]]) -> list[Mapping[str, Any] | None]:
    """The settings of each module; None if the config leaves it out."""
    if config.get("quant_algo") != "MIXED_PRECISION":
        return quantization.by_module(config, modules, _WHERE)
    layers = _mapping("the config's quantized_layers", config.get("quantized_layers"))
    one_by_one = {"extra_config": layers, "quant_method": "modelopt", "quant_algo": None}
    settings = quantization.by_module(one_by_one, modules, _WHERE)
    return [entry if entry is not None and entry.get("quant_algo") else None for entry in settings]


def _reader(config: Mapping[str, Any], module: str) -> _Reader:
    """The reader of a module with these settings."""
    method = config.get("quant_method") or ("modelopt" if "quant_algo" in config else None)
    if config.get("expert_dtype") == "fp4":
        return _Reader("mxfp4", packings.deepseek_fp4)
    method = _ALIASES.get(method, method) if isinstance(method, str) else method
    if method == "auto-round":
        return _auto_round(config, module)
    if method == "gptq":
        return _gptq(config, module)
    if method == "awq":
        return _awq(config, module)
    if method == "mxfp4":
        return _Reader("mxfp4", packings.blocks)
    if method == "fp8":
        return _fp8(config)
    if method == "mxfp8":
        return _MXFP8
    if method == "compressed-tensors":
        return _compressed(config)
    if method == "modelopt":
        algo = config.get("quant_algo")
        if algo in ("NVFP4", "W4A16_NVFP4"):
            return _Reader("nvfp4", packings.modelopt_nvfp4)
        if algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
            return _Reader("fp8_channel", packings.fp8_rows, quantizes_x=True)
        if algo == "MXFP8":
            return _MXFP8
        wanted = "NVFP4, W4A16_NVFP4, MXFP8, FP8 or FP8_PER_CHANNEL_PER_TOKEN"
        raise bad("the config", f"modelopt's {_said(algo)}", wanted)
    supported = "fp8, mxfp4, mxfp8, compressed-tensors, gptq, awq, auto-round or modelopt"
    raise bad("the config's quant_method", repr(_said(method)), supported)


def _fp8(config: Mapping[str, Any]) -> _Reader:
    block, ue8m0 = config.get("weight_block_size"), "e8m0" in _said(config.get("scale_fmt")).lower()
    if block is None:
        return _Reader("fp8_channel", partial(packings.fp8_rows, ue8m0=ue8m0), quantizes_x=True)
    if block in _GROUPS:
        return _MXFP8
    if block not in _BLOCKS:
        raise bad("the config's weight_block_size", _said(block), f"{_BLOCKS[0]} or {_GROUPS[0]}")
    return _Reader("fp8_block", partial(packings.fp8_blocks, ue8m0=ue8m0), quantizes_x=True)


def _gptq(config: Mapping[str, Any], module: str) -> _Reader:
    how = _int4(config, "gptq", module, _flag(config, "sym"))
    less_one, by_word = gptq_zeros(config)
    return _Reader("int4", partial(packings.gptq, how=how, less_one=less_one, by_word=by_word))


def gptq_zeros(config: Mapping[str, Any]) -> tuple[bool, bool]:
    """(``less_one``, ``by_word``) of ``packings.gptq``: how a checkpoint with this config stores zero points.

    AutoGPTQ's and GPTQModel's tensors. https://github.com/ModelCloud/GPTQModel, quantization/config.py
    """
    stored = config.get("format") or config.get("checkpoint_format") or _GPTQ_FORMATS[0]
    if not isinstance(stored, str) or stored.lower() not in _GPTQ_FORMATS or _flag(config, "is_marlin_format"):
        raise bad("the config's checkpoint_format", repr(_said(stored)), " or ".join(map(repr, _GPTQ_FORMATS)))
    meta = config.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    writers = quantizer if isinstance(quantizer, list) else [quantizer]
    by_gptqmodel = any(
        isinstance(writer, str) and "gptqmodel" in writer.lower() for writer in writers
    )  # else another library wrote the checkpoint
    return stored.lower() == _GPTQ_FORMATS[0], by_gptqmodel


def _awq(config: Mapping[str, Any], module: str) -> _Reader:
    for name in ("version", "format", "checkpoint_format"):
        version = config.get(name) or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise bad("the config", f"awq of {name} {_said(version)!r}", "'gemm'")
    symmetric, zero_point = _flag(config, "sym"), _flag(config, "zero_point")
    if symmetric is None and zero_point is not None:
        symmetric = not zero_point
    return _Reader("int4", partial(packings.awq, how=_int4(config, "awq", module, symmetric)))


def _auto_round(config: Mapping[str, Any], module: str) -> _Reader:
    """AutoRound's tensors in GPTQ's order or AWQ's. https://github.com/intel/auto-round, export/export_to_autoround"""
    packing, kind, act_bits = config.get("packing_format"), config.get("data_type"), config.get("act_bits")
    if isinstance(kind, str) and kind.startswith("mx_fp") and config.get("bits") == 8:
        return _MXFP8
    packing = "auto_round:auto_gptq" if packing is None else packing
    if not isinstance(packing, str) or any(word in packing for word in ("llm_compressor", "fp8", "fake", "mlx")):
        raise bad("the config's packing_format", repr(_said(packing)), "GPTQ's or AWQ's, as 'auto_round:auto_gptq'")
    if kind is not None and not (isinstance(kind, str) and kind.startswith("int")):
        raise bad("the config's data_type", repr(_said(kind)), "'int'")
    if act_bits is not None and not (isinstance(act_bits, int) and act_bits >= 16):
        raise bad("the config's act_bits", _said(act_bits), "16: activations that are not quantised")
    if config.get("rotation_config"):
        raise bad("the config", "of rotated weights (rotation_config)", "weights that x is multiplied by as it is")
    symmetric = _flag(config, "sym")
    if "awq" in packing:
        return _Reader("int4", partial(packings.awq, how=_int4(config, "auto-round", module, symmetric)))
    # "auto_round" and "auto_round:gptqmodel" store zero points as they are, "auto_round:auto_gptq" less one.
    less_one = "gptq" in packing and "gptqmodel" not in packing
    how = _int4(config, "auto-round", module, symmetric)
    return _Reader("int4", partial(packings.gptq, how=how, less_one=less_one))


def _int4(config: Mapping[str, Any], method: str, module: str, symmetric: bool | None) -> Int4:
    bits, group = (
        config.get(name, config.get(other)) for name, other in (("bits", "w_bit"), ("group_size", "q_group_size"))
    )
    if bits != 4 or isinstance(bits, bool):
        raise bad("the config", f"{method} of {_said(bits)} bits for {_said(module)}", "4 bits")
    return Int4(_group_size(group), bool(symmetric), bool(_flag(config, "desc_act")))


def _group_size(group: object) -> int | None:
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or not (group > 0 or group == -1)):
        raise bad("the config's group_size", _said(group), "a number of columns, or -1")
    return group


def _flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(f"the config's {name}", _said(value), "true or false")
    return value


def _compressed(config: Mapping[str, Any]) -> _Reader:
    """compressed-tensors, of a config with one group. https://github.com/vllm-project/compressed-tensors"""
    groups = list(_mapping("the config's config_groups", config.get("config_groups")).values())
    if len(groups) != 1:
        raise bad("the config", f"of {len(groups)} config_groups", "one whose targets name the experts, or a class")
    group = _mapping("a group of the config", groups[0])
    weights = _mapping("the config's weights of a group", group.get("weights"))
    packing = group.get("format") or config.get("format")
    said = tuple(weights.get(key) for key in ("type", "num_bits", "strategy"))
    quantizes_x = bool(group.get("input_activations"))
    symmetric, ue8m0 = _flag(weights, "symmetric"), "e8m0" in _said(weights.get("scale_dtype"))
    _check_transforms(config)
    if packing == "pack-quantized" and said[:2] == ("int", 4) and said[2] in ("group", "channel"):
        size = _group_size(weights.get("group_size")) if said[2] == "group" else -1
        order = weights.get("actorder")
        how = Int4(size, symmetric is not False, isinstance(order, (bool, str)) and order in _ACT_ORDERS)
        return _Reader("int4", partial(packings.packed_int4, how=how))
    if symmetric is False:
        raise bad(
            "the config",
            f"compressed-tensors' {_said(packing)} with symmetric false",
            "true: but for int4 no format here has zero points",
        )
    if packing == "mxfp4-pack-quantized":
        return _Reader("mxfp4", packings.packed_mxfp4)
    if packing == "nvfp4-pack-quantized":
        return _Reader("nvfp4", packings.packed_nvfp4)
    if packing == "mxfp8-quantized" and said == ("float", 8, "group") and weights.get("group_size") == packings.MX:
        return _MXFP8
    if packing in ("float-quantized", "naive-quantized") and said[:2] == ("float", 8):
        if said[2] == "block" and weights.get("block_structure") in _BLOCKS:
            return _Reader("fp8_block", partial(packings.fp8_blocks, ue8m0=ue8m0), quantizes_x)
        if said[2] in ("channel", "tensor"):
            return _Reader("fp8_channel", partial(packings.fp8_rows, ue8m0=ue8m0), quantizes_x)
    got = f"compressed-tensors' {_said(packing)} with weights of {_said(said)}"
    raise bad(
        "the config",
        got,
        "pack-quantized int 4 by group or channel, "
        "float-quantized float 8 by block [128, 128], channel or tensor, mxfp8-quantized in groups of 32, "
        "mxfp4-pack-quantized or nvfp4-pack-quantized",
    )


def _check_transforms(config: Mapping[str, Any]) -> None:
    """Raise InputError if x has to be rotated in each call: in compressed-tensors' transform_config."""
    transforms = _mapping("the config's transform_config", config.get("transform_config"))
    for transform in _mapping("the config's transforms", transforms.get("config_groups")).values():
        applied = transform.get("apply") if isinstance(transform, Mapping) else None
        for place in applied if isinstance(applied, (list, tuple)) else ():
            where = place.get("location") if isinstance(place, Mapping) else None
            if where in ("input", "output"):
                raise bad("the config", f"with a transform of each {where} (transform_config)", "weights alone")


def _mapping(name: str, said: object) -> Mapping[str, Any]:
    """A nested part of the config; a missing part, or None, counts as an empty one."""
    if said is None:
        return {}
    if not isinstance(said, Mapping):
        raise bad(name, f"a {type(said).__name__}", "a dict")
    return said


def _said(value: object) -> str:
    """Any value as text for a message, in at most 60 characters."""
    try:
        text = printable(value) if isinstance(value, str) else ascii(value)
    except (RecursionError, ValueError):  # very deep, or a number of very many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
