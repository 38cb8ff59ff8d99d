"""A model's config.json -> its expert layer, for every family that transformers knows, without transformers."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...artifacts.errors import InputError
from ...artifacts.names import printable
from ...artifacts.records.problem import Layout
from .layer import ExpertLayer

MAX_CONFIG_BYTES = 8 << 20

# The same meaning under every name that a family gives it; "a.b" is b in the object a.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config.moe_num_experts")
PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "ffn_config.moe_top_k",
)
HIDDEN = ("hidden_size", "d_model")
LATENT = ("moe_latent_size", "moe_hidden_size")  # where set, the routed experts' width in place of the hidden one
WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_config.ffn_hidden_size")
SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "share_expert_dim",
)

# Where a multimodal model keeps its language model.
NESTED = ("text_config", "language_config", "llm_config", "thinker_config")


@dataclass(frozen=True, slots=True)
class ConfigFamily:
    """How the model types that begin with ``prefix`` differ from the rest."""

    prefix: str
    widths: tuple[str, ...] = ("moe_intermediate_size",)
    gated: bool = True
    one_shared: bool = False  # one shared expert of width I, which no field names
    layouts: tuple[Layout, ...] = (Layout.NK,)


_DENSE_NAME = ("intermediate_size",)  # elsewhere the dense layers' width; in these families the experts'
_KN_TOO = (Layout.NK, Layout.KN)  # their checkpoints, and transformers, have w as [E, K, N]

FAMILIES = (
    *(
        ConfigFamily(prefix, _DENSE_NAME)
        for prefix in (
            "mixtral",
            "phimoe",
            "granitemoe",
            "minimax",
            "olmoe",
            "flex_olmo",
            "jamba",
        )
    ),
    ConfigFamily("gpt_oss", _DENSE_NAME, layouts=_KN_TOO),
    ConfigFamily("llama4", _DENSE_NAME, one_shared=True, layouts=_KN_TOO),
    ConfigFamily("hunyuan", ("moe_intermediate_size", "intermediate_size")),
    ConfigFamily("dbrx", ("ffn_config.ffn_hidden_size",)),
    ConfigFamily("longcat", ("expert_ffn_hidden_size", "moe_intermediate_size")),
    ConfigFamily("nemotron_h", gated=False),
    *(ConfigFamily(prefix) for prefix in ("qwen", "deepseek", "glm", "kimi", "dots", "mimo", "ernie4_5", "gemma")),
)


@dataclass(frozen=True, slots=True)
class ConfigModel:
    """What a config.json says: a name (from the path), the layer, and remarks for the user."""

    name: str
    layer: ExpertLayer
    remarks: tuple[str, ...]


def read_model(path: Path) -> ConfigModel:
    """The expert layer of a config.json, or of a directory that holds one.

    Raises
    ------
    InputError
        if there is no such file, it is no JSON object, or it describes no mixture of experts.
    """
    inside = False
    try:
        inside = path.is_dir()
        file = path / "config.json" if inside else path
        regular = stat.S_ISREG(file.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: no config.json in this directory" if inside else f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from None
    if not regular:
        raise InputError(f"{file}: no regular file, wanted a config.json")
    layer, remarks = layer_of(_load(file), str(file))
    return ConfigModel(_name(file.absolute()), layer, remarks)


def layer_of(config: Mapping[str, object], where: str) -> tuple[ExpertLayer, tuple[str, ...]]:
    """The expert layer that ``config`` describes, and remarks for the user; ``where`` begins each error.

    Raises
    ------
    InputError
        if a field is missing, contradictory, or of the wrong type.
    """
    fields = _Fields(_language_model(config), where)
    model_type = printable(str(fields.values.get("model_type") or config.get("model_type") or ""))[:80]
    family = next((family for family in FAMILIES if model_type.startswith(family.prefix)), None)
    remarks: list[str] = []

    E = fields.one_of(EXPERTS)
    if E is None or E <= 1:
        raise InputError(_dense(fields, E, model_type))
    k = fields.one_of(PER_TOKEN, largest=True)
    H = fields.one_of(LATENT)
    latent = H is not None
    H = H if latent else fields.one_of(HIDDEN)
    width = fields.first_of(family.widths if family else WIDTHS)
    if width is None and family is None:
        width = fields.one_of(_DENSE_NAME)
        remarks.append(f"{where}: unknown model_type '{model_type}': the expert width is taken from intermediate_size")
    if k is None or H is None or width is None:
        names: list[tuple[str, ...]] = [PER_TOKEN] * (k is None) + [HIDDEN] * (H is None)
        names += [family.widths if family else (*WIDTHS, *_DENSE_NAME)] * (width is None)
        lacking = ", and ".join(" or ".join(one) for one in names)
        raise InputError(f"{where}: model_type '{model_type}' with {E} experts lacks {lacking}")

    shared_width = fields.one_of(SHARED_WIDTHS)
    if shared_width is None:
        count = 1 if family and family.one_shared else fields.one_of(SHARED_COUNTS, largest=True)
        shared_width = (count or 0) * width
    note = ""
    if latent and shared_width:
        shared_width, note = 0, f"the shared expert works at the full hidden width, the routed ones at {H}"

    quantised = _quantised(config, where) or _quantised(fields.values, where)
    gated, layouts = (family.gated, family.layouts) if family else (True, (Layout.NK,))
    layer = ExpertLayer(E, k, H, width, max(shared_width, 0), gated, quantised, note, layouts)
    if problems := layer.contradictions():
        raise InputError(f"{where}: {'; '.join(problems)}")
    published = (one.get(name) for one in (fields.values, config) for name in ("dtype", "torch_dtype"))
    if next(filter(None, published), None) == "float16":
        remarks.append(f"{where}: the checkpoint is fp16 and the default is bf16; dtype=fp16 builds for it")
    return layer, tuple(remarks)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The object that holds the expert fields, with typed look-ups."""

    values: Mapping[str, object]
    where: str

    def get(self, name: str) -> object:
        outer, dot, inner = name.partition(".")
        value = self.values.get(outer)
        if not dot:
            return value
        return value.get(inner) if isinstance(value, dict) else None

    def first_of(self, names: tuple[str, ...]) -> int | None:
        """The first of ``names`` that is set."""
        return next((value for name in names if (value := self._number(name, False)) is not None), None)

    def one_of(self, names: tuple[str, ...], largest: bool = False) -> int | None:
        """What all of ``names`` that are set agree on."""
        found = {name: value for name in names if (value := self._number(name, largest)) is not None}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name}={value}" for name, value in found.items())
            raise InputError(f"{self.where}: {listed} mean the same and disagree")
        return next(iter(found.values()), None)

    def _number(self, name: str, largest: bool) -> int | None:
        """A whole number, or a list with one per layer: all equal, unless the ``largest`` will do."""
        value = self.get(name)
        if value is None:
            return None
        numbers: list[int] = []
        for number in value if isinstance(value, list) and value else [value]:
            if isinstance(number, bool) or not isinstance(number, int):
                raise InputError(f"{self.where}: {name} is {_short(value)}, wanted a whole number")
            numbers.append(number)
        if len(set(numbers)) > 1 and not largest:
            raise InputError(
                f"{self.where}: {name} differs between layers ({', '.join(str(one) for one in sorted(set(numbers)))}); "
                "give each as a spec of its own, shape:E=..,H=..,I=..,k=.."
            )
        return max(numbers)


def _language_model(config: Mapping[str, object]) -> Mapping[str, object]:
    """The object that holds the expert fields: nested ones go first, as they do in transformers."""
    for key in NESTED:
        inner = config.get(key)
        if isinstance(inner, dict):
            found = _language_model(inner)
            if any(_Fields(found, "").get(name) is not None for name in EXPERTS):
                return found
    return config


def _dense(fields: _Fields, E: int | None, model_type: str) -> str:
    found = [name for name in (*HIDDEN, *_DENSE_NAME) if fields.get(name) is not None]
    kind = f" (model_type '{model_type}')" if model_type else ""
    if E is not None:
        names = ", ".join(name for name in EXPERTS if fields.get(name) is not None)
        return f"{fields.where}: no experts: {names} is {E}{kind}; pretuned builds for mixture-of-experts models"
    listed = ", ".join(found) or "none of the fields of a language model"
    return (
        f"{fields.where}: no experts: found {listed} but none of {', '.join(EXPERTS)}{kind}; "
        "pretuned builds for mixture-of-experts models, and this one looks dense"
    )


def _quantised(config: Mapping[str, object], where: str) -> str:
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return ""
    if not isinstance(quantisation, dict):
        raise InputError(f"{where}: quantization_config is {_short(quantisation)}, wanted an object")
    return printable(str(quantisation.get("quant_method") or "quantised"))[:32]


def _load(file: Path) -> Mapping[str, object]:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InputError(f"{file}: can't be read: {error.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise InputError(f"{file}: larger than {MAX_CONFIG_BYTES >> 20} MiB, which no config.json is")
    try:
        config = json.loads(data)
    except RecursionError:
        raise InputError(f"{file}: damaged JSON: nested too deeply") from None
    except ValueError as error:  # also bad UTF-8
        raise InputError(f"{file}: damaged JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{file}: holds {_short(config)}, wanted a JSON object")
    return config


def _name(file: Path) -> str:
    """org/model out of a Hugging Face cache's path, else the directory's name, in a model's letters."""
    for part in file.parts:
        if part.startswith("models--"):
            name = "/".join(part.split("--", 2)[1:])
            break
    else:
        name = file.parent.name if file.name == "config.json" else file.stem
    parts = (re.sub(r"[^A-Za-z0-9._+-]", "-", part).lstrip("._+-") for part in name.split("/"))
    return "/".join(filter(None, parts))[:96].rstrip("/") or "model"


def _short(value: object) -> str:
    text = json.dumps(value) if isinstance(value, (str, int, float, bool, list, dict)) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
