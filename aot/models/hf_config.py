"""Read a model's config.json into its expert layers, for every family that transformers knows, without transformers."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...artifacts.errors import InputError
from ...artifacts.limits import printable
from ...artifacts.records import Layout
from ...runtime.weights.quantization import NESTED
from .layer import ExpertLayer, activation_in
from .quant_config import UNQUANTISED, expert_weights

# Organisations that republish others' models.
_REPACKAGERS = ("unsloth/", "redhatai/", "nvidia/", "amd/")
# Endings of the names of models in another format; all that match are taken off.
_SUFFIX = re.compile(
    r"-(?:unsloth|bnb|4bit|8bit|bf16|gguf|fp8(?:-?dynamic|-?block)?|nvfp4|mxfp4|fp4|awq|gptq(?:-?int[48])?|int[48]|w[48]a(?:16|8)"
    r"|quantized\.w[48]a(?:16|8))$",
    re.I,
)
_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co|modelscope\.cn/models)/+([^?#]+)", re.I)
_IN_REPOSITORY = ("tree", "blob", "resolve", "raw", "commits", "discussions")


def from_url(word: str) -> str | None:
    """org/model from the address of a model hub's page; None if ``word`` is no such address."""
    match = _URL.fullmatch(word.partition("?")[0].partition("#")[0].rstrip("/"))
    if match is None:
        return None
    parts = [part for part in match[1].split("/") if part]
    end = next((i for i, part in enumerate(parts) if part in _IN_REPOSITORY), len(parts))
    return "/".join(parts[:end][-2:])


def republished(word: str) -> str | None:
    """The last part of the name of the model that ``word`` is another format of, by its name; None if of none.

    ``unsloth/Qwen3-30B-A3B-bnb-4bit`` is ``Qwen3-30B-A3B``.
    """
    name = word.rpartition("/")[2]
    while (shorter := _SUFFIX.sub("", name)) != name:
        name = shorter
    changed = name != word.rpartition("/")[2] or word.lower().startswith(_REPACKAGERS)
    return name if changed and name else None


def cached_config(word: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The config.json of ``org/model`` in the Hugging Face cache: of the revision of ``main``, else the newest.

    If none can be read, a dangling link if there is one: reading it raises an error that says what to do.

    huggingface_hub's environment variables reference says where that cache is (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME).
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", word):
        return None
    xdg = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{xdg}/huggingface"
    try:
        hub = Path(environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
        model = hub / ("models--" + word.replace("/", "--"))
        snapshots = model / "snapshots"
        main = model / "refs" / "main"
        wanted = snapshots / _revision(main) / "config.json" if main.is_file() else None
        if wanted is not None and wanted.is_file():
            return wanted
        configs = sorted(snapshot / "config.json" for snapshot in snapshots.iterdir())  # a glob skips dangling links
        readable = [path for path in configs if path.is_file()]
        return max(readable, key=lambda path: path.stat().st_mtime, default=next(filter(dangling, configs), None))
    except (OSError, RuntimeError, ValueError):
        return None


def dangling(path: Path) -> bool:
    """True for a link to a missing file."""
    return path.is_symlink() and not path.exists()


def _revision(ref: Path) -> str:
    """Read the commit in a file below refs; no more is read than a commit takes."""
    with ref.open(encoding="utf-8") as file:
        return file.read(100).strip()


# Each tuple lists the names of one size in the families' configs; "a.b" is b in the object a.
EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "ffn_config.moe_num_experts",
    "moe.num_experts",
)
PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "ffn_config.moe_top_k",
    "moe.num_experts_per_tok",
)
HIDDEN = ("hidden_size", "d_model", "embed_dim", "dim")
LATENT = (
    "moe_latent_size",
    "moe_hidden_size",
    "routed_expert_hidden_size",
)  # if set, the routed experts' width in place of the hidden one
WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_config.ffn_hidden_size")
SHARED_COUNTS = (
    "n_shared_experts",
    "num_shared_experts",
    "num_shared_expert",
    "moe_num_shared_experts",
    "moe.num_shared_experts",
)
SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "shared_experts_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "share_expert_dim",
)
FFN = "ffn_config"  # dbrx's: fields of the same model, in an object of their own
DENSE_WIDTH = ("intermediate_size",)  # the dense layers' width, or in some families the experts'
DENSE_WIDTH_APART = "dense_intermediate_size"  # a config that has it keeps the experts' width in DENSE_WIDTH

BY_LAYER = "block_configs"  # an object for each layer, in models found by a search for sizes
SWITCH = "enable_moe_block"  # if false, there are no experts, whatever their number


@dataclass(frozen=True, slots=True)
class ConfigFamily:
    """How the model types that begin with ``prefix`` differ from the rest."""

    prefix: str
    widths: tuple[str, ...] = ("moe_intermediate_size",)
    gated: bool = True
    one_shared: bool = False  # one shared expert of width I, which no field names
    layouts: tuple[Layout, ...] = (Layout.NK,)
    kinds: tuple[str, ...] = ("",)  # kinds of experts in a layer: a field with a list has a value for each
    attention: tuple[str, ...] = ()  # the fields whose product is the width of experts in attention, without a gate
    zero_experts: str = ""  # the field that counts experts without weights
    note: str = ""
    refused: str = ""  # why there is nothing to build


_KN_TOO = (Layout.NK, Layout.KN)  # their checkpoints, and transformers, have w as [E, K, N]

FAMILIES = (
    *(
        ConfigFamily(prefix, DENSE_WIDTH)
        for prefix in ("mixtral", "phimoe", "granitemoe", "minimax", "olmoe", "flex_olmo", "jamba", "cohere2_moe")
    ),
    ConfigFamily("gpt_oss", DENSE_WIDTH, layouts=_KN_TOO, note="bias; gate and up interleaved"),
    ConfigFamily("openai_privacy_filter", DENSE_WIDTH, layouts=_KN_TOO, note="bias"),
    ConfigFamily("aria", DENSE_WIDTH, layouts=_KN_TOO),
    ConfigFamily("llama4", DENSE_WIDTH, one_shared=True, layouts=_KN_TOO),
    ConfigFamily("jetmoe", DENSE_WIDTH, attention=("kv_channels", "num_key_value_heads")),
    ConfigFamily("hunyuan", ("moe_intermediate_size", "intermediate_size")),
    ConfigFamily("dbrx", ("ffn_config.ffn_hidden_size",)),
    ConfigFamily("longcat", ("expert_ffn_hidden_size", "moe_intermediate_size"), zero_experts="zero_expert_num"),
    ConfigFamily("nemotron_h", gated=False),
    ConfigFamily("muse_spark", note="a norm after each expert"),
    *(ConfigFamily(prefix, kinds=("", "vision")) for prefix in ("ernie4_5_vl_moe", "ernie4_5_moe_vl")),
    ConfigFamily("doge", refused="its experts are rows of two embeddings, not matrices: no grouped GEMM computes them"),
    *(ConfigFamily(prefix) for prefix in ("qwen", "deepseek", "glm", "kimi", "dots", "mimo", "ernie4_5", "gemma")),
)


# Mistral's own params.json: no model_type, the sizes of the experts in an object "moe".
PARAMS = ConfigFamily("", ("moe.expert_hidden_dim", "hidden_dim"))


def family_of(model_type: str) -> ConfigFamily | None:
    """The family of a model type; None if no family matches, and fields are then recognised by their names."""
    return next((family for family in FAMILIES if model_type.startswith(family.prefix)), None)


MAX_CONFIG_BYTES = 8 << 20
_SIZES = (*EXPERTS, *PER_TOKEN, *WIDTHS, *LATENT)  # that may differ between layers
QUANTISATION = "hf_quant_config.json"  # modelopt's record of the quantisation
SHARED = "the shared expert works at"  # begins the note on a shared expert that can't be fused


@dataclass(frozen=True, slots=True)
class ConfigModel:
    """The contents of a config.json: a name (from the path), a layer for each kind of experts, and remarks."""

    name: str
    layers: tuple[ExpertLayer, ...]
    remarks: tuple[str, ...]


def read_model(path: Path) -> ConfigModel:
    """Read the expert layers of a config.json, or of a directory that holds one.

    Raises
    ------
    InputError
        if there is no such file, it is no JSON object, or it describes no mixture of experts.
    """
    inside, file = False, path
    try:
        inside = path.is_dir()
        file = path / "config.json" if inside else path
        if inside and not file.exists() and (path / "params.json").exists():  # as Mistral publishes its own
            file = path / "params.json"
        regular = stat.S_ISREG(file.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        _refuse_dangling(file)
        wanted = "no config.json in this directory; wanted a model's directory, a models.txt or a spec"
        raise InputError(f"{path}: {wanted if inside else 'no such file'}") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from None
    if not regular:
        raise InputError(f"{file}: no regular file, wanted a config.json")
    beside = file.with_name(QUANTISATION)
    _refuse_dangling(beside)
    quantised = _load(beside) if file.name == "config.json" and beside.is_file() else None
    layers, remarks = layers_of(_load(file), str(file), quantised)
    return ConfigModel(_name(file.absolute()), layers, remarks)


def _refuse_dangling(file: Path) -> None:
    """Raise InputError for a link to a missing file, as in a Hugging Face cache without its blobs."""
    if dangling(file):
        model = _name(file.absolute())
        again = f". Download it again: hf download {model} {file.name}" if "/" in model else ""
        raise InputError(f"{file}: a link to '{file.readlink()}', which is not there{again}")


def layers_of(
    config: Mapping[str, object], where: str, beside: Mapping[str, object] | None = None
) -> tuple[tuple[ExpertLayer, ...], tuple[str, ...]]:
    """The expert layers that ``config`` describes, and remarks for the user; ``where`` begins each error.

    ``beside`` is the contents of the hf_quant_config.json next to the config.json.

    The language model's experts come first. All others have a ``part``: experts in attention, of another modality, of
    a second model inside, or of layers with another number of experts.

    Raises
    ------
    InputError
        if a field is missing, contradictory, or of the wrong type.
    """
    main = _language_model(config)
    remarks: list[str] = []
    weights = _weights(main, config, where, remarks, beside)
    layers = [replace(layer, weights=weights) for layer in _layers_in(main, config, where, remarks)]
    for part, inner in _others(config, main):
        try:
            own = _weights(inner, inner, where, remarks)
            inner_layers = [replace(layer, weights=own) for layer in _layers_in(inner, inner, where, remarks)]
            layers += [replace(layer, part=_joined(part, layer.part)) for layer in inner_layers]
        except InputError as error:
            reason = str(error).removeprefix(f"{where}: ")
            remarks.append(f"{where}: the experts of {part}_config are left out: {reason}")
    published = (values.get(name) for values in (main, config) for name in ("dtype", "torch_dtype"))
    if next(filter(None, published), None) == "float16":
        remarks.append(f"{where}: the checkpoint is fp16 and the default is bf16; dtype=fp16 builds for it")
    return tuple(layers), tuple(dict.fromkeys(remarks))


def _weights(
    values: Mapping[str, object],
    config: Mapping[str, object],
    where: str,
    remarks: list[str],
    beside: Mapping[str, object] | None = None,
) -> str:
    """The format of the experts' weights, from the whole config or else from the language model's object."""
    layers = values.get("num_hidden_layers")
    count = layers if isinstance(layers, int) else 1
    fields = _Fields(values, where)
    experts = next((number for name in EXPERTS if isinstance(number := fields.get(name), int)), 1)
    checkpoint = expert_weights(config, where, count, beside, experts) or expert_weights(
        values, where, count, None, experts
    )
    remarks += checkpoint.remarks if checkpoint else ()
    return checkpoint.format if checkpoint else UNQUANTISED


def _layers_in(
    values: Mapping[str, object], config: Mapping[str, object], where: str, remarks: list[str]
) -> Iterator[ExpertLayer]:
    """Yield every kind of experts in one object."""
    model_type = printable(str(values.get("model_type") or config.get("model_type") or ""))[:80]
    family = family_of(model_type)
    if family is not None and family.refused:
        raise InputError(f"{where}: model_type '{model_type}': {family.refused}")
    if not model_type and isinstance(values.get("moe"), dict):
        family = PARAMS
    rules = family or ConfigFamily("", WIDTHS)
    for part, changed in _variants(values):
        for at, kind in enumerate(rules.kinds):
            fields = _Fields({**changed, **_of_kind(changed, at, len(rules.kinds))}, where)
            layer = _layer(fields, family, model_type, remarks)
            if at:  # shared experts are the language model's
                layer = replace(layer, shared_width=0)
            yield replace(layer, part=_joined(kind, part))
            if rules.attention:
                width = math.prod(fields.one_of((name,)) or 0 for name in rules.attention)
                attention = ExpertLayer(layer.E, layer.k, layer.H, width, gated=False, part="attention")
                yield _sound(replace(attention, note="queries in, outputs out: no activation between"), where)


def _layer(fields: _Fields, family: ConfigFamily | None, model_type: str, remarks: list[str]) -> ExpertLayer:
    where = fields.where
    E = fields.one_of(EXPERTS)
    if E is None or E <= 1 or fields.get(SWITCH) is False:
        raise InputError(_no_experts(fields, E, model_type))
    k = fields.one_of(PER_TOKEN, largest=True)
    H = fields.one_of(LATENT)
    latent = H is not None
    H = H if latent else fields.first_of(HIDDEN)
    width = fields.first_of(family.widths if family else WIDTHS)
    if width is None and family is None:
        width = fields.one_of(DENSE_WIDTH)
        if width is not None and fields.get(DENSE_WIDTH_APART) is None:
            remarks.append(
                f"{where}: unknown model_type '{model_type}': the expert width is taken from intermediate_size"
            )
    if k is None or H is None or width is None:
        names: list[tuple[str, ...]] = [PER_TOKEN] * (k is None) + [HIDDEN] * (H is None)
        names += [family.widths if family else (*WIDTHS, *DENSE_WIDTH)] * (width is None)
        lacking = ", and ".join(" or ".join(alternatives) for alternatives in names)
        raise InputError(f"{where}: model_type '{model_type}' with {E} experts lacks {lacking}")

    rules = family or ConfigFamily("")
    shared_width = fields.one_of(SHARED_WIDTHS)
    if shared_width is None:
        count = 1 if rules.one_shared else fields.one_of(SHARED_COUNTS, largest=True)
        shared_width = (count or 0) * width
    notes = [rules.note] * bool(rules.note)
    if latent and shared_width:
        shared_width = 0
        notes.append(f"{SHARED} the full hidden width, the routed ones at {H}")
    zero = (fields.one_of((rules.zero_experts,)) or 0) if rules.zero_experts else 0
    if zero > 0:
        notes.append(f"{zero} more experts without weights")
    activation, exceptions = activation_in(fields.values, model_type)
    notes += filter(None, (exceptions,))
    layer = ExpertLayer(E, k, H, width, max(shared_width, 0), rules.gated, note="; ".join(notes), layouts=rules.layouts)
    return _sound(replace(layer, zero_experts=max(zero, 0), activation=activation), where)


def _sound(layer: ExpertLayer, where: str) -> ExpertLayer:
    if problems := layer.contradictions():
        raise InputError(f"{where}: {'; '.join(problems)}")
    return layer


def _variants(values: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield (part, fields) for each kind of layer: one pair, or a pair for each number of experts that layers have."""
    variants: dict[str, Mapping[str, object]] = {}
    by_layer = values.get("per_layer_config")  # the layers that differ from the rest
    if isinstance(by_layer, dict):
        for changes in by_layer.values():
            sizes = (
                {name: changes.get(name) for name in EXPERTS if name in changes} if isinstance(changes, dict) else {}
            )
            for count in sizes.values():
                variants.setdefault(f"E{count}"[:12], {**values, **changes})
    pyramid = values.get("pyramid_num_routed")
    if isinstance(pyramid, list):
        most = values.get("capacity_factor", 2)
        for count in pyramid:
            if isinstance(count, int) and isinstance(most, int) and count > 1:
                sizes = {"num_local_experts": count, "num_experts_per_tok": min(most, count)}
                variants.setdefault(f"E{count}", {**values, **sizes})
    blocks = list(_blocks(values))
    if not blocks and not isinstance(pyramid, list):
        yield "", values
    yield from blocks if len(blocks) == 1 else ((f"layers{i}", block) for i, (_, block) in enumerate(blocks, 1))
    yield from variants.items()


def _blocks(values: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the fields as each kind of layer sees them, if layers have experts of their own sizes."""
    blocks = values.get(BY_LAYER)
    kinds: set[str] = set()
    for block in blocks if isinstance(blocks, list) else ():
        if not isinstance(block, dict):
            continue
        inner = [value for value in block.values() if isinstance(value, dict)]  # {"ffn": {...}}, or the sizes at once
        own = {name: value for part in (block, *inner) for name, value in part.items()}
        sizes = {name: own[name] for name in _SIZES if isinstance(own.get(name), (int, float))}
        if any(sizes.get(name, 0) > 1 for name in EXPERTS) and str(sizes) not in kinds:
            kinds.add(str(sizes))
            yield "", {**values, **sizes}


def _of_kind(values: Mapping[str, object], at: int, kinds: int) -> Mapping[str, object]:
    """The fields that list a value for each kind of experts, reduced to the value at ``at``."""
    if kinds == 1:
        return {}
    return {name: value[at] for name, value in values.items() if isinstance(value, list) and len(value) == kinds}


def _others(config: Mapping[str, object], main: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the other objects of a config that have experts, each by its name."""
    for key, value in config.items():
        part = key.removesuffix("_config")
        if part == key or key == FFN or not isinstance(value, dict):
            continue
        inner = _language_model(value)
        if inner is not main and _has_experts(inner):
            yield re.sub(r"[^A-Za-z0-9._-]", "-", part)[:24] or "other", inner


def _has_experts(values: Mapping[str, object]) -> bool:
    fields = _Fields(values, "")
    by_layer = isinstance(values.get("pyramid_num_routed"), list) or any(_blocks(values))
    return by_layer or any(fields.get(name) is not None for name in EXPERTS)


def _joined(*parts: str) -> str:
    return "-".join(filter(None, parts))


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
        """The value on which all of ``names`` that are set agree; InputError if they disagree."""
        values = {name: value for name in names if (value := self._number(name, largest)) is not None}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name}={value}" for name, value in values.items())
            raise InputError(f"{self.where}: {listed} mean the same and disagree")
        return next(iter(values.values()), None)

    def _number(self, name: str, largest: bool) -> int | None:
        """A whole number, or a list of a number a layer: all equal, or with ``largest`` the largest.

        In a list, 0 and null mark layers without experts. A number may be written 8.0.
        """
        value = self.get(name)
        if value is None:
            return None
        numbers: list[int] = []
        for number in value if isinstance(value, list) and value else [value]:
            if isinstance(value, list) and number is None:
                continue
            if isinstance(number, float) and number.is_integer():
                number = int(number)
            if isinstance(number, bool) or not isinstance(number, int):
                raise InputError(f"{self.where}: {name} is {_short(value)}, wanted a whole number")
            numbers.append(number)
        if isinstance(value, list):
            numbers = [number for number in numbers if number] or numbers or [0]
        if len(set(numbers)) > 1 and not largest:
            raise InputError(
                f"{self.where}: {name} differs between layers ({_few(sorted(set(numbers)))}); "
                "give each as a spec of its own, shape:E=..,H=..,I=..,k=.."
            )
        return max(numbers)


def _few(numbers: list[int]) -> str:
    """List numbers, at most the first 20."""
    more = f" and {len(numbers) - 20:,} more" if len(numbers) > 20 else ""
    return ", ".join(_short(number) for number in numbers[:20]) + more


def _language_model(config: Mapping[str, object]) -> Mapping[str, object]:
    """The object that holds the expert fields; nested objects take precedence, as in transformers."""
    for key in NESTED:
        inner = config.get(key)
        if isinstance(inner, dict):
            nested = _language_model(inner)
            if _has_experts(nested):
                return nested
    return config


def _no_experts(fields: _Fields, E: int | None, model_type: str) -> str:
    """The error for a config without experts."""
    fields_there = [name for name in (*HIDDEN, *DENSE_WIDTH) if fields.get(name) is not None]
    kind = f" (model_type '{model_type}')" if model_type else ""
    if E is not None:
        names = ", ".join(name for name in EXPERTS if fields.get(name) is not None)
        if E > 1:
            return f"{fields.where}: no experts: {names} is {E}, and {SWITCH} is false{kind}"
        return f"{fields.where}: no experts: {names} is {E}{kind}; pretuned builds for mixture-of-experts models"
    listed = ", ".join(fields_there) or "none of the fields of a language model"
    return (
        f"{fields.where}: no experts: found {listed} but none of {', '.join(EXPERTS)}{kind}; "
        "pretuned builds for mixture-of-experts models, and this one looks dense"
    )


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
    """org/model from a Hugging Face cache's path, else the directory's name, in a model name's letters."""
    for part in file.parts:
        if part.startswith("models--"):
            name = "/".join(part.split("--", 2)[1:])
            break
    else:
        name = file.parent.name if file.name in ("config.json", "params.json") else file.stem
    parts = (re.sub(r"[^A-Za-z0-9._+-]", "-", part).lstrip("._+-") for part in name.split("/"))
    return "/".join(filter(None, parts))[:96].rstrip("/") or "model"


def _short(value: object) -> str:
    text = json.dumps(value) if isinstance(value, (str, int, float, bool, list, dict)) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
