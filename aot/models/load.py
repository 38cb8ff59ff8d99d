"""Load models.txt, or specs given directly, as the shards to build for."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ...artifacts.errors import InputError
from ...artifacts.limits import MAX_EXPERTS, MAX_WIDTH, PART
from ...artifacts.records import PLAIN_DTYPES, PLAIN_LAYOUTS, PRECISIONS, DType, Layout, Op, dtypes_of
from .catalogue import CLASS, DEFAULT, catalogue, find, nearest_ids
from .hf_config import SHARED, cached_config, dangling, from_url, read_model, republished
from .layer import MAX_TOKENS, ExpertLayer, LayerShard
from .quant_config import PLAIN

T = TypeVar("T")

SHAPE = "shape:"
SHAPE_KEYS = ("E", "H", "I", "k")
MAX_DEGREE = 4096  # of tp and ep
MAX_NAME = 96

_WORD = re.compile(r"""\s*(?:(?P<comment>\#.*)|(?P<word>(?:[^\s"']|"[^"]*"|'[^']*')+))""")
_QUOTED = re.compile(r""""([^"]*)"|'([^']*)'""")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*(?:/[A-Za-z0-9][A-Za-z0-9._+-]*)?")


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """The options after a spec. ``None`` stands for the model's own value."""

    tp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    dtype: tuple[DType, ...] | None = None
    ops: tuple[Op, ...] | None = None
    layout: tuple[Layout, ...] | None = None
    weights: tuple[str, ...] | None = None
    training: str | None = None
    tokens: tuple[int, int] = (1, 65_536)
    gated: bool | None = None
    shared: bool = False
    name: str | None = None


OPTION_KEYS = tuple(field.name for field in dataclasses.fields(SpecOptions))


def words(line: str) -> list[str]:
    """Split a line into words. A ``#`` that begins a word begins a comment; quotes keep blanks and ``#`` in a word.

    Raises
    ------
    InputError
        for an open quote or a control character.
    """
    parts: list[str] = []
    position, line = 0, line.strip()
    if bad := re.search(r"[\x00-\x08\x0a-\x1f\x7f]", line):
        raise InputError(f"control character {bad.group()!r}; this must be plain text")
    while position < len(line):
        match = _WORD.match(line, position)
        if match is None:
            raise InputError(f"a quote is opened and never closed: {line[position:].strip()[:40]}")
        if match["comment"] is not None:
            break
        parts.append(_QUOTED.sub(lambda quoted: quoted[1] or quoted[2] or "", match["word"]))
        position = match.end()
    return parts


def parse_options(options: Sequence[str]) -> tuple[SpecOptions, list[str]]:
    """Parse ``key=value`` words into options, and list every mistake in them."""
    values: dict[str, object] = {}
    problems: list[str] = []
    parsers: dict[str, Callable[[str, str], object]] = {
        "tp": _degrees,
        "ep": _degrees,
        "dtype": lambda key, text: _choices_of(
            key, text, {dtype.value: dtype for dtype in DType if dtype in PLAIN_DTYPES}
        ),
        "ops": lambda key, text: _choices_of(key, text, {op.value: op for op in Op}),
        "layout": lambda key, text: _choices_of(key, text, {layout.value: layout for layout in PLAIN_LAYOUTS}),
        "weights": lambda key, text: _choices_of(key, text, {name: name for name in PRECISIONS}),
        "training": lambda key, text: _choice(key, text, {"fp8": "fp8"}),
        "tokens": _tokens,
        "gated": lambda key, text: _choice(key, text, {"1": True, "0": False}),
        "shared": lambda key, text: _choice(key, text, {"fuse": True, "no": False}),
        "name": _model_name,
    }
    for word in options:
        key, equals, text = word.partition("=")
        if key in SHAPE_KEYS and equals:
            problems.append(
                f"'{word}' is a word of its own; sizes are one word, shape:E=..,H=..,I=..,k=.. with no blanks"
            )
        elif not equals:
            problems.append(f"'{word}' is no option, wanted key=value{nearest(word, OPTION_KEYS)}")
        elif key not in parsers:
            problems.append(f"unknown key '{key}'{nearest(key, OPTION_KEYS)}")
        elif key in values:
            problems.append(f"{key}= is given twice; list the values: {key}=a,b")
        else:
            values[key] = None
            try:
                values[key] = parsers[key](key, text)
            except InputError as error:
                problems.append(str(error))
    return dataclasses.replace(SpecOptions(), **({} if problems else values)), problems  # type: ignore[arg-type]


def parse_shape(word: str) -> ExpertLayer:
    """Parse ``shape:E=128,H=2048,I=768,k=8`` into a layer.

    Raises
    ------
    InputError
        with every mistake in it.
    """
    sizes: dict[str, int] = {}
    problems: list[str] = []
    for part in word[len(SHAPE) :].split(","):
        key, equals, text = part.partition("=")
        if key not in SHAPE_KEYS or not equals:
            problems.append(f"'{part}' in a shape, wanted one of {', '.join(f'{name}=' for name in SHAPE_KEYS)}")
            if equals and (hint := next((name for name in SHAPE_KEYS if name.lower() == key.lower()), None)):
                problems[-1] += f"; did you mean '{hint}={text}'?"
        elif key in sizes:
            problems.append(f"{key}= is given twice")
        elif not re.fullmatch(r"-?[0-9]{1,12}", text):
            most = MAX_EXPERTS if key in "Ek" else MAX_WIDTH
            over = re.fullmatch(r"[0-9]{1,200}", text)
            problems.append(f"{key}={text}: {'too large, wanted' if over else 'wanted a whole number,'} 1 to {most}")
            sizes[key] = 1
        else:
            sizes[key] = int(text)
    missing = [key for key in SHAPE_KEYS if key not in sizes]
    if missing:
        problems.append(f"the shape lacks {', '.join(missing)}; wanted shape:E=..,H=..,I=..,k=..")
    if problems:
        raise InputError("; ".join(problems))
    layer = ExpertLayer(E=sizes["E"], k=sizes["k"], H=sizes["H"], I=sizes["I"])
    if contradictions := layer.contradictions():
        raise InputError("; ".join(contradictions))
    return layer


def nearest(word: str, choices: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or a list of the choices if none is near."""
    forms = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), forms, n=1, cutoff=0.6)
    return f"; did you mean '{forms[close[0]]}'?" if close else f", wanted one of {', '.join(forms.values())}"


def _degrees(key: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    for part in parts:
        if not re.fullmatch(r"[0-9]{1,6}", part) or not 1 <= int(part) <= MAX_DEGREE:
            raise InputError(f"{key}={text}: '{part}' is no whole number from 1 to {MAX_DEGREE}")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _choices_of(key: str, text: str, choices: dict[str, T]) -> tuple[T, ...]:
    forms = {name.lower(): value for name, value in choices.items()}
    for part in text.split(","):
        if part.lower() not in forms:
            note = nearest(part, choices)
            if begun := [name for name in choices if part and name.startswith(part.lower())]:
                note = f"; did you mean {' or '.join(begun)}?"
            elif key == "dtype" and re.search(r"fp8|fp4|int8|int4|e4m3|e5m2", part.lower()):
                note = (
                    "; it is the products' element type. The format of the weights is weights=, e.g. weights=fp8_block"
                )
            raise InputError(f"{key}={text}: unknown {key} '{part}'{note}")
    return tuple(dict.fromkeys(forms[part.lower()] for part in text.split(",")))


def _tokens(key: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,200})(?:\.\.([0-9]{1,200}))?", text)
    if match is None:
        raise InputError(f"{key}={text}: wanted least..most, e.g. tokens=1..65536, at most {MAX_TOKENS}")
    least, most = int(match[1]), int(match[2] or match[1])
    if most > MAX_TOKENS:
        raise InputError(f"{key}={text}: too large, wanted at most {MAX_TOKENS}")
    if not 1 <= least <= most:
        raise InputError(f"{key}={text}: wanted 1 <= least <= most <= {MAX_TOKENS}")
    return least, most


def _choice(key: str, text: str, choices: dict[str, T]) -> T:
    if text not in choices:
        raise InputError(f"{key}={text}: wanted {' or '.join(choices)}")
    return choices[text]


def _model_name(key: str, text: str) -> str:
    if not _NAME.fullmatch(text) or len(text) > MAX_NAME:
        raise InputError(
            f"{key}={text[:100]}: wanted up to {MAX_NAME} letters, digits and . _ + - with at most one / between"
        )
    return text


MAX_FILE_BYTES = 4 << 20
MAX_SHARDS_OF_A_SPEC = 1024
MAX_SHARDS = 65_536
MAX_MISTAKES = 50  # in a listing
_LONGEST_MISTAKE = 2000  # characters
CATALOGUE = "catalogue"  # the spec that names every model of the catalogue
_GIVE = "give its config.json"
_SHAPE = f"{SHAPE}E=128,H=2048,I=768,k=8"  # an example


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The shards to build for, in the order given, and notes for the user."""

    shapes: tuple[LayerShard, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """One spec as given: ``where`` begins its errors, its paths are relative to ``base``."""

    where: str
    text: str
    base: Path


@dataclass(frozen=True, slots=True)
class _Meaning:
    """The model that a spec's first word names."""

    name: str
    layers: tuple[ExpertLayer, ...]
    remarks: tuple[str, ...]


def load_models(values: Sequence[str], only: Sequence[Op] = tuple(Op)) -> LoadedModels:
    """Load the values of ``--models``, each the path of a models.txt or a spec with its options.

    With ``only``, just those ops are built.

    Raises
    ------
    InputError
        with every mistake of every value, a line each (``models.txt:7: what is wrong``).
    """
    problems: list[str] = []
    notes: list[str] = []
    seen: dict[LayerShard, str] = {}
    layers: dict[str, tuple[tuple[object, ...], str]] = {}
    plain: dict[tuple[str, str], dict[str, None]] = {}
    unread = 0
    for line in itertools.chain.from_iterable(_each_of_catalogue(line, problems) for line in _lines(values, problems)):
        if len(problems) >= MAX_MISTAKES:
            unread += 1
            continue
        try:
            meaning, options = _resolve(line)
            shards = list(_shards(meaning, options, only))
            if len(seen) + len(shards) > MAX_SHARDS:
                raise InputError(f"over {MAX_SHARDS} shards in all, which is the limit; build them in parts")
        except InputError as error:
            problems.extend(f"{line.where}: {problem}" for problem in str(error).split("\n"))
            continue
        notes.extend(f"{line.where}: {remark}" for remark in meaning.remarks)
        for shard in shards:
            for name in shard.weights:
                if name not in PLAIN and not (dtypes_of(name) and set(dtypes_of(name)) <= set(shard.dtypes)):
                    built = ",".join(dtype.value for dtype in shard.dtypes if not dtype.quantised)
                    plain.setdefault((name, built), {})[shard.name] = None
            facts = (shard.E, shard.k, shard.H, shard.I, shard.gated, shard.shared_experts)
            other_facts, first = layers.setdefault(shard.name, (facts, line.where))
            if other_facts != facts:
                problems.append(
                    f"{line.where}: '{shard.name}' has other sizes at {first}; give one of them another name="
                )
                break
            if shard in seen:
                notes.append(f"{line.where}: {shard} is there already ({seen[shard]}); counted once")
            seen.setdefault(shard, line.where)
    if not problems and not seen:
        problems.append("no models are given; name a models.txt, or a model, e.g. --models Qwen/Qwen3-30B-A3B")
    if problems:
        raise InputError(_listed(problems, unread))
    for (name, built), models in plain.items():
        if not dtypes_of(name):
            notes.append(f"no kernels for {name} yet: {built} is built instead for {', '.join(models)}")
        elif built:
            notes.append(f"{built} is built for {', '.join(models)}; weights={name} builds the checkpoint's format")
    return LoadedModels(tuple(seen), tuple(notes))


def _listed(problems: Sequence[str], unread: int) -> str:
    """List mistakes, a line each: the first of many, long ones shortened in the middle."""
    ends = _LONGEST_MISTAKE // 2
    shown = problems[:MAX_MISTAKES]
    lines = [text if len(text) <= _LONGEST_MISTAKE else f"{text[:ends]} [...] {text[-ends:]}" for text in shown]
    if len(problems) > len(lines):
        lines.append(f"and {len(problems) - len(lines):,} more")
    if unread:
        lines.append(f"(the {unread:,} lines after these were not looked at)")
    head = [] if len(lines) == 1 else [f"{len(problems)} mistakes in what to build for:"]
    return "\n".join(head + lines)


def _lines(values: Sequence[str], problems: list[str]) -> Iterator[_Line]:
    for value in values:
        path = _expanded(value)
        if not _is_file_of_specs(value, path):
            blank = re.search(r"\s", value) and _exists(path)  # a path with blanks, not a word and its options
            yield _Line(f"--models '{_short(value)}'", _quoted(value) if blank else value, Path())
            continue
        try:
            with path.open("rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise InputError(f"larger than {MAX_FILE_BYTES >> 20} MiB; this is no models.txt")
            text = data.decode("utf-8-sig")
        except FileNotFoundError:
            problems.append(f"{value}: no such file (looked in {Path.cwd()})")
        except (OSError, InputError) as error:
            problems.append(f"{value}: {getattr(error, 'strerror', None) or error}")
        except UnicodeDecodeError as error:
            problems.append(f"{value}: byte {error.start} is no UTF-8; save the file as UTF-8 text")
        else:
            lines = [
                _Line(f"{value}:{number}", line, path.parent)
                for number, line in enumerate(text.split("\n"), 1)
                if line.strip() and not line.lstrip().startswith("#")
            ]
            if not lines:
                problems.append(f"{value}: no models in it; write one a line, e.g. Qwen/Qwen3-30B-A3B tp=1,2")
            yield from lines


def _quoted(value: str) -> str:
    """Quote a path so that ``spec.words`` reads it as one word."""
    return f"'{value}'" if '"' in value else f'"{value}"'


def _each_of_catalogue(line: _Line, problems: list[str]) -> Iterator[_Line]:
    """Replace ``catalogue tp=1,2`` by a line for every model of the catalogue with these options."""
    word, options = (*line.text.split(None, 1), "", "")[:2]
    if word.strip("\"'").lower() != CATALOGUE:
        yield line
        return
    if re.search(r"(^|\s)name=", options):
        problems.append(f"{line.where}: name= can't be given for {CATALOGUE}, whose models have names of their own")
        return
    for model, entry in catalogue().items():
        if PART not in model and entry.source != DEFAULT:  # a part comes with its model
            yield _Line(line.where, f"{model} {options}", line.base)


def _is_file_of_specs(value: str, path: Path) -> bool:
    """True for a file other than a config.json, and for a missing .txt."""
    if "\0" in value:
        return False
    if _exists(path):
        return not path.is_dir() and path.suffix != ".json"
    return path.suffix == ".txt" and "=" not in value


def _resolve(line: _Line) -> tuple[_Meaning, SpecOptions]:
    parts = words(line.text)
    if not parts:
        raise InputError("no model is named")
    options, problems = parse_options(parts[1:])
    try:
        meaning = _find(parts[0], line.base)
    except InputError as error:
        problems.insert(0, str(error))
    if problems:
        raise InputError("\n".join(problems))
    return meaning, options


def _find(word: str, base: Path) -> _Meaning:
    """Find the model that a word names. A catalogue id takes precedence over a path; ``./`` makes it a path."""
    if word.startswith(SHAPE):
        layer = parse_shape(word)
        return _Meaning(f"E{layer.E}-H{layer.H}-I{layer.I}-k{layer.k}", (layer,), ())
    word = from_url(word) or word
    if match := find(word):
        remarks = [] if "/" in word else [f"'{word}' is taken as {match.id}"]
        if match.entry.source in (CLASS, DEFAULT):
            remarks.append(f"the sizes of {match.id} are its class's defaults, maybe not the checkpoint's: {_GIVE}")
        return _Meaning(match.id, match.layers, tuple(remarks))
    path = base / _expanded(word)
    if _exists(path) and path.is_file() and path.suffix != ".json":
        raise InputError(
            f"'{_short(word)}': no config.json, as its name does not end so. A file of specs, one a line, is given "
            "alone: each spec has its options in it"
        )
    if word.startswith((".", "/", "~")) or word.endswith(".json") or _exists(path):
        config = read_model(path)
        return _Meaning(config.name, config.layers, config.remarks)
    if word.lower().startswith("shape"):
        raise InputError(f"'{word}': a shape is written {_SHAPE}")
    cached, name = cached_config(word), republished(word)
    match = find(name) if name else None
    if cached and not (match and dangling(cached)):
        config = read_model(cached)
        return _Meaning(config.name, config.layers, (f"'{word}' is read from {cached}", *config.remarks))
    if match:
        unknown = "its own format is not known here: weights= names it"
        return _Meaning(match.id, match.layers, (f"'{word}' is taken to have the sizes of {match.id}; {unknown}",))
    near = " or ".join(f"'{id_}'" for id_ in nearest_ids(word))
    other = f"`aot models` lists the catalogue; else give its config.json, or {_SHAPE}"
    hint = f"did you mean {near}?" if near else other
    raise InputError(f"unknown model '{_short(word)}': neither in the catalogue nor a path; {hint}")


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _expanded(text: str) -> Path:
    """The path, with ~ and ~user expanded if that user has a home."""
    try:
        return Path(text).expanduser() if text.startswith("~") else Path(text)
    except (RuntimeError, ValueError):
        return Path(text)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # e.g. a name that is too long
        return False


def _shards(meaning: _Meaning, options: SpecOptions, only: Sequence[Op]) -> Iterator[LayerShard]:
    """Yield the shards: kinds of experts x tp x ep. Raises InputError with every contradiction, a line each."""
    problems: list[str] = []
    shards: list[LayerShard] = []
    count = len(meaning.layers) * len(options.tp) * len(options.ep)
    if count > MAX_SHARDS_OF_A_SPEC:
        raise InputError(
            f"{meaning.name}: {count:,} shards of one spec ({len(options.tp)} of tp x {len(options.ep)} of ep), wanted "
            f"at most {MAX_SHARDS_OF_A_SPEC}; give the degrees that are deployed"
        )
    ops = tuple(op for op in options.ops or Op if op in only)
    if not ops:
        requested, wanted = (",".join(op.value for op in some) for some in (options.ops or Op, only))
        problems.append(f"ops={requested}: --ops {wanted} leaves nothing of it")
    plain = [weights for weights in options.weights or () if weights in PLAIN]
    if options.dtype and plain and {dtype.value for dtype in options.dtype} != set(plain):
        dtypes = ",".join(dtype.value for dtype in options.dtype)
        problems.append(
            f"weights={','.join(plain)} and dtype={dtypes} disagree: plain weights are of the products' dtype"
        )
    for layer in meaning.layers:
        fused = _fused(layer, problems) if options.shared else 0
        weights = options.weights or (layer.weights,)
        built = options.dtype or _dtypes(weights)
        if options.training:
            built = tuple(dict.fromkeys((*built, DType.FP8_BLOCK)))
        for tp, ep in itertools.product(options.tp, options.ep):
            shard = LayerShard(
                name=_name(options.name or meaning.name, layer.part),
                E=layer.E,
                k=layer.k,
                H=layer.H,
                I=layer.I,
                shared_experts=fused,
                gated=layer.gated if options.gated is None else options.gated,
                dtypes=built,
                tp=tp,
                ep=ep,
                tokens=options.tokens,
                ops=ops,
                note=layer.note,
                layouts=options.layout or layer.layouts,
                zero_experts=layer.zero_experts,
                weights=weights,
                activation=layer.activation,
                trains_in_fp8=options.training == "fp8",
            )
            problems.extend(shard.contradictions())
            shards.append(shard if options.dtype or options.weights else _as_published(shard))
    if problems:
        raise InputError("\n".join(dict.fromkeys(f"{meaning.name}: {problem}" for problem in problems)))
    yield from shards


def _as_published(shard: LayerShard) -> LayerShard:
    """The shard of a spec that names no format: bf16 if a capability has no code for the checkpoint's format."""
    quantised = any(dtype.quantised for dtype in shard.dtypes)
    return replace(shard, instead=(DType.BF16,)) if quantised else shard


def _dtypes(weights: tuple[str, ...]) -> tuple[DType, ...]:
    """The dtypes that are built for weights of these formats."""
    return tuple(dict.fromkeys(dtype for name in weights for dtype in dtypes_of(name))) or (DType.BF16,)


def _name(model: str, part: str) -> str:
    """The model's name, with the kind of experts if the model has several."""
    return f"{model[: MAX_NAME - len(part) - 1]}{PART}{part}" if part else model


def _fused(layer: ExpertLayer, problems: list[str]) -> int:
    """The number of experts of width I that the shared experts are equal to."""
    if not layer.shared_width:
        if not layer.part:  # the other kinds have none of their own
            reason = "the model has no shared experts, or the spec does not tell; add them to E and k"
            problems.append(f"shared=fuse: {layer.note if SHARED in layer.note else reason}")
    elif layer.shared_width % layer.I:
        problems.append(
            f"shared=fuse: the shared experts are {layer.shared_width} wide, no multiple of I={layer.I}: "
            "they can't be experts of the same GEMM"
        )
    return layer.shared_width // layer.I
