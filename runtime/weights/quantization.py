"""Find the quantization settings of a module in a checkpoint's config.

A config.json has them in ``quantization_config``, its own or that of the language model inside. Libraries let modules
differ from the rest: ``config_groups`` of compressed-tensors, ``dynamic`` of GPTQModel, ``extra_config`` of AutoRound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...artifacts.errors import InputError
from ...artifacts.tuples import NamedTuple
from .patterns import alternatives, first_matching

# Where the config.json of a composite model keeps its language model's.
NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
_FIELDS = ("quantization_config", "compression_config")
_DEEPEST = 8  # objects inside each other
_MOST_GROUPS = 128  # of compressed-tensors
_UNQUANTISED_BITS = 16
_REGEX = re.compile(r"[*+?^$()\[\]{}|\\]")  # a key of extra_config with one of these is a regular expression
_CLASSES = ("Linear", "RoutedExperts", "FusedMoE")  # experts' classes in config_groups: torch's, vLLM's
_OTHER_CLASSES = ("lm_head", "Embedding")
_LAYER = re.compile(r"(?:^|\.)(layers\.[0-9]+\..*)")
# A config may be older or newer than the names in the checkpoint: transformers moved the layers of composite models.
ROOTS = ("model.", "model.language_model.", "language_model.model.", "")


def find(config: Mapping[str, Any]) -> Any:
    """The quantization_config of a config.json, or of the language model inside it; None if there is none.

    The result includes ``expert_dtype``, which DeepSeek-V4 has next to quantization_config.
    """
    objects = list(_objects(config))
    settings = next((entry[key] for entry in objects for key in _FIELDS if entry.get(key)), None)
    if not isinstance(settings, Mapping):
        return settings
    dtype = next((entry["expert_dtype"] for entry in objects if entry.get("expert_dtype") is not None), None)
    return settings if dtype is None or "expert_dtype" in settings else {**settings, "expert_dtype": dtype}


def _objects(config: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the config, then the configs of language models inside it."""
    yield config
    for key in NESTED if depth < _DEEPEST else ():
        if isinstance(inner := config.get(key), Mapping):
            yield from _objects(inner, depth + 1)


def names_of(module: str) -> tuple[str, ...]:
    """The names that a config may have for a module of a checkpoint."""
    match = _LAYER.search(module)
    return (module,) if match is None else tuple(dict.fromkeys((module, *(root + match[1] for root in ROOTS))))


def by_module(
    settings: Mapping[str, Any], modules: Sequence[Sequence[str]], where: str
) -> list[Mapping[str, Any] | None]:
    """The settings of each module, listed by its possible names; None if the config leaves the module unquantised.

    Modules with equal settings share one object. compressed-tensors' ``config_groups`` is cut to the module's group.
    ``where`` begins an error.

    Raises
    ------
    InputError
        for settings of the wrong type, and patterns of a form that is not known or that take too long.
    """
    by_group = grouped(settings)
    rules, otherwise = _groups(settings, where) if by_group else (_overrides(settings, where), settings)
    what = "of targets" if by_group else "of single modules"
    firsts = _first([rule.word for rule in rules], modules, where, what, parts=not by_group)
    changed = {i: rules[i].of(settings) for i in set(firsts) if i is not None}
    return [otherwise if index is None else changed[index] for index in firsts]


def grouped(settings: Mapping[str, Any]) -> bool:
    """True if ``config_groups`` decides: in compressed-tensors, and in modelopt without a named recipe."""
    method = settings.get("quant_method")
    by_group = method == "compressed-tensors" or (method == "modelopt" and not settings.get("quant_algo"))
    return by_group and bool(settings.get("config_groups"))


def exceptions(settings: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The names and patterns of the modules that differ from the rest; none if all modules are alike."""
    rules = _groups(settings, where)[0] if grouped(settings) else _overrides(settings, where)
    return tuple(rule.word for rule in rules)


class _Rule(NamedTuple):
    """A config's changes for the modules that ``word`` names: a name, or a regular expression after ``re:``.

    ``changes`` is None if it leaves them unquantised.
    """

    word: str
    changes: Mapping[str, Any] | None

    def of(self, settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The settings of these modules."""
        bits = None if self.changes is None else self.changes.get("bits")
        if self.changes is None or (isinstance(bits, int) and bits >= _UNQUANTISED_BITS):
            return None
        return {**settings, **{key: value for key, value in self.changes.items() if value is not None}}


def _overrides(settings: Mapping[str, Any], where: str) -> list[_Rule]:
    """The rules of ``dynamic`` and ``extra_config``, in the order in which they apply."""
    rules = []
    # GPTQModel: the first regular expression that matches from the name's beginning; "-:" leaves modules out.
    for key, value in _mapping(settings.get("dynamic"), "dynamic", where).items():
        changes = None if key.startswith("-:") else _mapping(value, f"dynamic of {_short(key)}", where)
        rules.append(_Rule("re:" + key.removeprefix("-:").removeprefix("+:"), changes))
    # AutoRound: a module's own name goes before regular expressions, which match anywhere in a name.
    extra = _mapping(settings.get("extra_config"), "extra_config", where)
    for key in sorted(extra, key=lambda key: _REGEX.search(key) is not None):
        word = f"re:{_anywhere(key)}" if _REGEX.search(key) else key
        if changes := _mapping(extra[key], f"extra_config of {_short(key)}", where):
            rules.append(_Rule(word, changes))
    return rules


def _anywhere(expression: str) -> str:
    """A regular expression that matches, from a name's beginning, wherever this one matches in the name."""
    flags = "(?i)" if expression.startswith("(?i)") else ""
    parts = alternatives(expression.removeprefix(flags))
    return flags + "|".join(part if part.startswith(("^", ".*")) else f".*{part}" for part in parts)


def _groups(settings: Mapping[str, Any], where: str) -> tuple[list[_Rule], Mapping[str, Any] | None]:
    """The rules of ``config_groups`` by module, and what holds for all other modules by their class."""
    groups = _mapping(settings.get("config_groups"), "config_groups", where)
    if len(groups) > _MOST_GROUPS:
        raise InputError(f"{where}: {len(groups):,} config_groups, the limit is {_MOST_GROUPS}")
    targets: dict[str, Mapping[str, Any]] = {}
    for name, value in groups.items():
        group = _mapping(value, "a group of the config", where)
        narrowed = {"config_groups": {name: group}}
        targets.update(dict.fromkeys(_strings(group, where), narrowed))  # of two groups with one target the later
    modules = [_Rule(word, group) for word, group in targets.items() if word.startswith("re:") or "." in word]
    classes = {word: group for word, group in targets.items() if not word.startswith("re:") and "." not in word}
    otherwise = next((classes[name] for name in _CLASSES if name in classes), None)
    rest = [group for word, group in classes.items() if word not in _OTHER_CLASSES and not word.endswith("Attention")]
    if otherwise is None and len(rest) == 1:
        otherwise = rest[0]
    return modules, None if otherwise is None else {**settings, **otherwise}


def _first(
    words: Sequence[str], modules: Sequence[Sequence[str]], where: str, what: str, *, parts: bool
) -> list[int | None]:
    """The index of the first word that names each module. With ``parts`` a word may be a name's first or last parts."""
    plain = {word: i for i, word in reversed(list(enumerate(words))) if not word.startswith("re:")}
    patterns = [(word, i) for i, word in enumerate(words) if word.startswith("re:")]
    matching = first_matching([word for word, _ in patterns], modules, where, what)
    out: list[int | None] = []
    for names, pattern in zip(modules, matching, strict=True):
        places = [] if pattern is None else [patterns[pattern][1]]
        if plain:
            places += [plain[part] for name in names for part in (_ends(name) if parts else (name,)) if part in plain]
        out.append(min(places, default=None))
    return out


def _ends(name: str) -> Iterable[str]:
    """A dotted name, and its parts before and after each dot."""
    yield name
    for i, letter in enumerate(name):
        if letter == ".":
            yield name[:i]
            yield name[i + 1 :]


def _mapping(value: object, what: str, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {what} is a {type(value).__name__}, wanted a dict")
    for key in value:
        if not isinstance(key, str):
            raise InputError(f"{where}: {what} has {_short(key)}, wanted strings as names")
    return value


def _strings(group: Mapping[str, Any], where: str) -> list[str]:
    value = group.get("targets")
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{where}: the config's targets of a group is {_short(value)}, wanted a list of strings")
    return list(value)


def _short(value: object) -> str:
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # very deep, or a number of very many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
