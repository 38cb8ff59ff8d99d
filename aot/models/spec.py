"""Parse one line of models.txt into words and options. What a word means is decided elsewhere."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...artifacts.errors import InputError
from ...artifacts.limits import MAX_EXPERTS, MAX_WIDTH
from ...artifacts.records import PLAIN_DTYPES, PLAIN_LAYOUTS, PRECISIONS, DType, Layout, Op
from .layer import MAX_TOKENS, ExpertLayer

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
        "dtype": lambda key, text: _listed(key, text, {dtype.value: dtype for dtype in DType if dtype in PLAIN_DTYPES}),
        "ops": lambda key, text: _listed(key, text, {op.value: op for op in Op}),
        "layout": lambda key, text: _listed(key, text, {layout.value: layout for layout in PLAIN_LAYOUTS}),
        "weights": lambda key, text: _listed(key, text, {name: name for name in PRECISIONS}),
        "tokens": _tokens,
        "gated": lambda key, text: _choice(key, text, {"1": True, "0": False}),
        "shared": lambda key, text: _choice(key, text, {"fuse": True, "no": False}),
        "name": _name,
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


def _listed(key: str, text: str, choices: dict[str, T]) -> tuple[T, ...]:
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


def _choice(key: str, text: str, choices: dict[str, bool]) -> bool:
    if text not in choices:
        raise InputError(f"{key}={text}: wanted {' or '.join(choices)}")
    return choices[text]


def _name(key: str, text: str) -> str:
    if not _NAME.fullmatch(text) or len(text) > MAX_NAME:
        raise InputError(
            f"{key}={text[:100]}: wanted up to {MAX_NAME} letters, digits and . _ + - with at most one / between"
        )
    return text
