"""What a checkpoint's quantisation says of its experts: the one format that their weights are in.

Each library has a ``quantization_config`` of its own. What counts here is what it makes of the routed experts: their
format, and whether the config leaves them out of it. Formats have the names of ``artifacts/records/precision.py``;
one that has no row there gets a name of the same pattern, so that who asks for it reads what exactly has no code.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ...artifacts.errors import InputError
from ...artifacts.names import printable
from ...artifacts.records.precision import PRECISIONS
from .exclusions import left_out

PLAIN = tuple(one.name for one in PRECISIONS.values() if not one.quantised)
UNQUANTISED = "bf16"
_MOST_LAYERS = 512
_MOST_GROUPS = 128  # of compressed-tensors
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


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """The format of the routed experts in a checkpoint, and remarks for the user."""

    format: str
    remarks: tuple[str, ...] = ()


def expert_weights(
    config: Mapping[str, object], where: str, layers: int = 1, beside: Mapping[str, object] | None = None
) -> CheckpointFormat | None:
    """What ``config``, the object of a config.json, says of the experts; None where it says nothing.

    ``layers`` is how many the model has: a config may leave out the experts of some. ``beside`` is the object of
    modelopt's hf_quant_config.json, which goes first. ``where`` begins each error and remark.

    Raises
    ------
    InputError
        if a field that decides is missing or of the wrong type.
    """
    found = (beside or {}).get("quantization")
    if found is None:
        found = next((config[key] for key in ("quantization_config", "compression_config") if config.get(key)), None)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise InputError(f"{where}: quantization_config is {_short(found)}, wanted an object")
    fields = _Quantisation(found, where)
    method = fields.word("quant_method") or ("modelopt" if "quant_algo" in found else "")
    reader = _READERS.get(method.lower())
    remarks: tuple[str, ...] = ()
    if "fp4" in (config.get("expert_dtype"), found.get("expert_dtype")):  # DeepSeek-V4: the experts apart from the rest
        name = "mxfp4"
        remarks = ("its own code multiplies mxfp4 by fp8 activations, scaled by 128 of K; here x is bf16",)
    else:
        name = _pattern(method or "quantised") if reader is None else reader(fields)
    count = max(1, min(layers, _MOST_LAYERS))
    without = left_out(fields.excluded(), count, where)
    if len(without) == count:
        name, remarks = UNQUANTISED, ("the quantisation leaves the experts out: they are bf16",)
    elif without:
        some = ", ".join(map(str, without[:8])) + (", ..." if len(without) > 8 else "")
        remarks = (*remarks, f"the experts of layers {some} are left out of {name}: they are bf16")
    return CheckpointFormat(name, tuple(f"{where}: {one}" for one in remarks))


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
        """The strings of a list; none where it is no list."""
        value = self.values.get(name)
        return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []

    def inner(self, name: str) -> _Quantisation:
        value = self.values.get(name)
        return _Quantisation(value if isinstance(value, dict) else {}, self.where)

    def excluded(self) -> Iterator[str]:
        """The names of what it leaves as it is."""
        for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude",
                    "llm_int8_skip_modules", "modules_to_not_quantize"):  # fmt: skip
            yield from filter(None, self.strings(key))
        for key in self.inner("dynamic").values:  # GPTQModel: -: takes modules out
            if key.startswith("-:"):
                yield f"re:{key[2:]}"
        for key, value in self.inner("extra_config").values.items():  # AutoRound: bits for each module
            if isinstance(value, dict) and isinstance(bits := value.get("bits"), int) and bits >= 16:
                yield key


def _fp8(fields: _Quantisation) -> str:
    block = fields.values.get("weight_block_size")
    if block is None:
        return "fp8_channel"  # one scale a tensor is one for every row, too
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(one, int) for one in block):
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
        found = {_modelopt(_Quantisation(one, fields.where)) for name, one in layers.items()
                 if isinstance(one, dict) and ".experts" in name}  # fmt: skip
        if len(found) != 1:
            return "mixed" if found else UNQUANTISED
        return found.pop()
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
    """compressed-tensors: the group whose targets are the experts, or every linear layer."""
    found = fields.inner("config_groups").values.values()
    groups = [_Quantisation(one, fields.where) for one in found if isinstance(one, dict)]
    if len(groups) > _MOST_GROUPS:
        raise InputError(
            f"{fields.where}: quantization_config: {len(groups):,} config_groups, the limit is {_MOST_GROUPS}"
        )
    targets = [group.strings("targets") for group in groups]
    named = (group for group, some in zip(groups, targets, strict=True) if left_out(some, 1, fields.where))
    linear = (group for group, some in zip(groups, targets, strict=True) if "Linear" in some)
    group = next(itertools.chain(named, linear), None)
    if group is not None:
        return _scheme(group, fields.word("format") or group.word("format"))
    return UNQUANTISED if groups else "compressed-tensors"


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
    """Any word as the name of a format."""
    return re.sub(r"[^a-z0-9_-]", "_", printable(text).lower())[:32] or "quantised"


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
