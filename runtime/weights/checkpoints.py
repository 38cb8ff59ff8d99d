"""Experts' tensors as checkpoints name and pack them, brought to the shapes of ``ExpertWeights``.

The packings are those of compressed-tensors, GPTQ (AutoGPTQ's and GPTQModel's), AWQ (the gemm version), modelopt,
gpt-oss and DeepSeek-V3 and V4. ``packings.py`` has one function for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ...artifacts.names import printable
from . import packings
from .codes import Quantised, cat
from .given import repeated, told
from .packings import Suffixes, bad
from .patterns import first_matching

_GATE, _UP, _BOTH, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("gate_up_proj",), ("down_proj", "w2")
_PART = {**dict.fromkeys((*_GATE, *_UP, *_BOTH), "gate_up"), **dict.fromkeys(_DOWN, "down")}
_SUFFIX = (
    "weight|weight_scale|weight_scale_inv|weight_scale_2|weight_packed|weight_shape|weight_zero_point|weight_g_idx|"
    "weight_global_scale|input_scale|input_global_scale|qweight|qzeros|scales|g_idx|scale|scale_inv|blocks|bias"
)
_NAME = re.compile(rf"(?P<layer>(?:.*\.)?experts\.)(?:(?P<expert>[0-9]{{1,9}})\.)?(?P<projection>{'|'.join(_PART)})"
                   rf"(?:[._](?P<suffix>{_SUFFIX}))?")  # fmt: skip
_SHORT = re.compile(rf"(?:(?P<projection>{'|'.join(_PART)})[._])?(?P<suffix>{_SUFFIX})")
# Other names of a method whose tensors are the same.
_ALIASES = {
    "fbgemm_fp8": "fp8", "deepseek_v4_fp8": "fp8", "gpt_oss_mxfp4": "mxfp4", "gptq_marlin": "gptq", "awq_marlin": "awq",
    "auto_round": "auto-round", "intel/auto-round": "auto-round", "modelopt_fp4": "modelopt",
}  # fmt: skip
_LONGEST_NAME = 1000  # characters
_IGNORED = ("bias", "input_scale", "input_global_scale")  # scales of x are made in the call


_BLOCKS = ([packings.BLOCK] * 2, (packings.BLOCK,) * 2)


class _Reader(NamedTuple):
    """What a config says: the format's name, how one matrix is read, and whether fp8 products quantise x."""

    format: str
    read: Callable[[Suffixes], Quantised]
    quantizes_x: bool = False


def read(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], part: str | None, quantize_x: bool | None
) -> tuple[str, Quantised]:
    """The format (``int4`` without its group), and its tensors; InputError as ``ExpertWeights.from_tensors`` says."""
    if part is not None and part != "gate_up" and part != "down":
        raise bad("part", repr(_said(part)), "'gate_up', 'down' or None")
    named = _matrices(tensors, part)
    reader = _reader(_quantization(config), next(iter(named[0].values())).name.rpartition(".")[0])
    found = _stacked(reader, named)
    format = reader.format
    if format.startswith("fp8"):
        return format + ("" if (reader.quantizes_x if quantize_x is None else quantize_x) else "_a16"), found
    return format, packings.whole_groups(found) if format == "int4" else found


def _matrices(tensors: Mapping[str, torch.Tensor], part: str | None) -> list[dict[str, Suffixes]]:
    """For each expert (or once, where they are stacked), the tensors of each matrix by the matrix's name."""
    found: dict[int | None, dict[str, Suffixes]] = {}
    layers, parts = set(), set()
    for name, one in _mapping("tensors", tensors).items():
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
        found.setdefault(expert, {}).setdefault(projection, Suffixes(name))[suffix] = _plain(name, one)
    if not found:
        some = ", ".join(map(_said, [*_mapping("tensors", tensors)][:3])) or "none"
        raise bad("the tensors", f"{some} ...", f"experts' {part or 'weights'}, such as 'experts.0.down_proj.weight'")
    if len(layers) > 1:
        some = ", ".join(sorted(map(_said, layers))[:3])
        raise bad("the tensors", f"of {len(layers)} layers: {some}", "those of one layer")
    if len(parts) > 1:
        raise bad("the tensors", "of both products", "part='gate_up' or part='down'")
    experts = sorted(found, key=lambda e: -1 if e is None else e)
    if experts != [None] and experts != list(range(experts[0] or 0, (experts[0] or 0) + len(experts))):
        raise bad(
            "the tensors", f"of experts {_said(experts)}", "experts whose numbers follow each other, or all stacked"
        )
    if len({one.is_meta for parts in found.values() for suffixes in parts.values() for one in suffixes.values()}) > 1:
        raise bad("the tensors", "partly on the meta device", "all with data, or all without")
    return [_in_order(found[e], e) for e in experts]


def _plain(name: str, one: object) -> torch.Tensor:
    """What a checkpoint's tensor may be."""
    if not isinstance(one, torch.Tensor):
        raise bad(_said(name), f"a {type(one).__name__}", "a tensor")
    if one.is_nested or one.layout is not torch.strided or one.is_quantized or one.is_complex():
        kind = "nested" if one.is_nested else f"{one.dtype} and {one.layout}"
        raise bad(
            _said(name), kind, "a plain tensor of numbers, which is neither sparse, nested nor quantised by torch"
        )
    if not one.numel():
        raise bad(_said(name), f"of shape {list(one.shape)}", "one that is not empty")
    if repeated(one):
        raise bad(_said(name), f"of shape {list(one.shape)} and strides {list(one.stride())}, which repeats elements",
                  "memory for each of them: pass .contiguous()")  # fmt: skip
    return one


def _in_order(found: dict[str, Suffixes], expert: int | None) -> dict[str, Suffixes]:
    """Gate before up."""
    gate, up = [name for name in found if name in _GATE], [name for name in found if name in _UP]
    others = [name for name in found if name not in (*_GATE, *_UP)]
    if len(gate) > len(up) or len(found) > 2 or (others and len(found) > 1):
        whose = "" if expert is None else f" of expert {expert}"
        raise bad(f"the projections{whose}", " and ".join(map(repr, found)), "gate and up, up, both in one, or down")
    return {name: found[name] for name in (*gate, *up, *others)}


def _stacked(reader: _Reader, named: list[dict[str, Suffixes]]) -> Quantised:
    """All experts' matrices in one, each copied once where they are not one already."""
    out: list[torch.Tensor | None] = []
    for expert, matrices in enumerate(named):
        found = _beside([reader.read(one) for one in matrices.values()], reader.format)
        if next(iter(matrices.values())).stacked:
            return found
        if not out:
            out = [None if one is None else one.new_empty((len(named), *one.shape)) for one in found]
        for to, one in zip(out, found, strict=True):
            if to is None or one is None:
                continue
            if to[expert].shape != one.shape or to.dtype is not one.dtype:
                raise bad(f"expert {expert} of those given", f"{one.dtype} {list(one.shape)}",
                    f"{to.dtype} {list(to[expert].shape)}, as the first has")  # fmt: skip
            to[expert] = one
    return Quantised(*out)  # type: ignore[arg-type]


def _beside(parts: list[Quantised], format: str) -> Quantised:
    """Gate and up in one matrix: the rows of the one, then those of the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for one in parts[1:]:
        for name, mine, other in zip(Quantised._fields, first, one, strict=True):
            if _form(mine, name, format) != _form(other, name, format):
                raise bad(f"{name} of gate and up", " and ".join(map(told, (mine, other))), "alike, but for their rows")
    if format == "fp8_block" and first.codes.shape[-2] % packings.BLOCK:
        raise bad("gate", f"of {first.codes.shape[-2]} rows", f"a multiple of {packings.BLOCK}: up's blocks of scales "
                  "would begin inside one of gate's")  # fmt: skip
    outer = first.global_scale
    if outer is not None and not all(torch.equal(outer, one.global_scale) for one in parts):  # type: ignore[arg-type]
        raise bad("the global scales of gate and up", "two", "one for both: calibrate them together")
    rows = -1 if format == "fp8_channel" else -2
    zeros = [one.zero for one in parts if one.zero is not None]
    codes, scale = cat([one.codes for one in parts], -2), cat([one.scale for one in parts], rows)
    return Quantised(codes, scale, cat(zeros, -2) if zeros else None, outer)


def _form(one: torch.Tensor | None, name: str, format: str) -> object:
    """What gate and up have in common of a tensor: all but their rows."""
    if one is None or name == "global_scale":
        return one is None or one.shape
    rows = one.dim() - (1 if name == "scale" and format == "fp8_channel" else 2)
    return one.dtype, one.device, *one.shape[:rows], *one.shape[rows + 1 :]


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json or hf_quant_config.json that says how weights are quantised."""
    if not isinstance(config, Mapping):
        raise bad("quantization_config", f"a {type(config).__name__}", "that of a config.json, a dict")
    for name in ("quantization_config", "compression_config"):
        if isinstance(config.get(name), Mapping):
            return {"expert_dtype": config.get("expert_dtype"), **config[name]}  # (DeepSeek-V4 has it outside)
    if isinstance(config.get("quantization"), Mapping):  # hf_quant_config.json
        return {"quant_method": "modelopt", **config["quantization"]}
    return config


def _reader(config: Mapping[str, Any], module: str) -> _Reader:
    method = config.get("quant_method") or ("modelopt" if "quant_algo" in config else None)
    if config.get("expert_dtype") == "fp4":
        return _Reader("mxfp4", packings.deepseek_fp4)
    method = _ALIASES.get(method, method) if isinstance(method, str) else method
    if method == "auto-round":
        method = "awq" if "awq" in _said(config.get("packing_format")) else "gptq"
    if method in ("gptq", "awq") and config.get("bits", config.get("w_bit")) != 4:
        raise bad("the config", f"{method} of {_said(config.get('bits', config.get('w_bit')))} bits", "4 bits")
    if method == "gptq":
        newer = config.get("checkpoint_format") == "gptq_v2"
        return _Reader("int4", lambda one: packings.gptq(one, config.get("group_size"), newer=newer))
    if method == "awq":
        version = config.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise bad("the config", f"awq of version {_said(version)!r}", "'gemm'")
        return _Reader("int4", packings.awq)
    if method == "mxfp4":
        return _Reader("mxfp4", packings.blocks)
    if method == "fp8":
        return _fp8(config)
    if method == "compressed-tensors":
        return _compressed(config, module)
    if method == "modelopt":
        algo = config.get("quant_algo")
        if algo in ("NVFP4", "W4A16_NVFP4"):
            return _Reader("nvfp4", packings.modelopt_nvfp4)
        if algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
            return _Reader("fp8_channel", packings.fp8_rows, quantizes_x=True)
        raise bad("the config", f"modelopt's {_said(algo)}", "NVFP4, W4A16_NVFP4, FP8 or FP8_PER_CHANNEL_PER_TOKEN")
    known = "fp8, mxfp4, compressed-tensors, gptq, awq, auto-round or modelopt"
    raise bad("the config's quant_method", repr(_said(method)), known)


def _fp8(config: Mapping[str, Any]) -> _Reader:
    block = config.get("weight_block_size")
    if block is None:
        return _Reader("fp8_channel", packings.fp8_rows, quantizes_x=True)
    if block not in _BLOCKS:
        raise bad("the config's weight_block_size", _said(block), f"[{packings.BLOCK}, {packings.BLOCK}]")
    return _Reader("fp8_block", packings.fp8_blocks, quantizes_x=True)


def _compressed(config: Mapping[str, Any], module: str) -> _Reader:
    group = _group_of(config, module)
    weights = _mapping("the config's weights of a group", group.get("weights"))
    packing = group.get("format") or config.get("format")
    said = tuple(weights.get(one) for one in ("type", "num_bits", "strategy"))
    quantizes_x = bool(group.get("input_activations"))
    if packing == "mxfp4-pack-quantized":
        return _Reader("mxfp4", packings.packed_mxfp4)
    if packing == "nvfp4-pack-quantized":
        return _Reader("nvfp4", packings.packed_nvfp4)
    if packing == "pack-quantized" and said[:2] == ("int", 4):
        return _Reader("int4", packings.packed_int4)
    if packing in ("float-quantized", "naive-quantized") and said[:2] == ("float", 8):
        if said[2] == "block" and weights.get("block_structure") in _BLOCKS:
            return _Reader("fp8_block", packings.fp8_blocks, quantizes_x)
        if said[2] in ("channel", "tensor"):
            return _Reader("fp8_channel", packings.fp8_rows, quantizes_x)
    found = f"compressed-tensors' {_said(packing)} with weights of {_said(said)}"
    raise bad("the config", found, "pack-quantized int 4, "
              "float-quantized float 8 by block [128, 128], channel or tensor, mxfp4-pack-quantized or "
              "nvfp4-pack-quantized")  # fmt: skip


def _group_of(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The group of the config whose targets name the module; one that names a class, where none does."""
    groups = [_mapping("a group of the config", one) for one in
              _mapping("the config's config_groups", config.get("config_groups")).values()]  # fmt: skip
    targets = [_strings("targets of a group", one.get("targets")) for one in groups]
    ends = next((i for i, some in enumerate(targets) if any(map(module.endswith, some))), len(groups))
    patterns = [(one, i) for i, some in enumerate(targets[:ends]) for one in some if one.startswith("re:")]
    (first,) = first_matching([one for one, _ in patterns], [[module]], "quantization_config", "of targets")
    found = ends if first is None else patterns[first][1]
    if found < len(groups):
        return groups[found]
    classes = [one for one, some in zip(groups, targets, strict=True) if not all(t.startswith("re:") for t in some)]
    if len(classes) == 1:
        return classes[0]
    raise bad("the config", f"of {len(groups)} config_groups", f"one whose targets name {_said(module)}, or a class")


def _mapping(name: str, said: object) -> Mapping[str, Any]:
    """A part of the config that has parts itself; none is as good as one without any."""
    if said is None:
        return {}
    if not isinstance(said, Mapping):
        raise bad(name, f"a {type(said).__name__}", "a dict")
    return said


def _strings(name: str, said: object) -> list[str]:
    """A list of words of the config."""
    if said is None:
        return []
    if not isinstance(said, (list, tuple)) or not all(isinstance(one, str) for one in said):
        raise bad(f"the config's {name}", _said(said), "a list of strings")
    return list(said)


def _said(value: object) -> str:
    """A value of a stranger's for a message, in 60 characters, whatever it is."""
    try:
        text = printable(value) if isinstance(value, str) else ascii(value)
    except (RecursionError, ValueError):  # very deep, or a number of very many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
