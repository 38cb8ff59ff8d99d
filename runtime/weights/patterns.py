"""Names of modules matched with what a checkpoint's config says: globs, and regular expressions behind ``re:``.

Who wrote the config may have written an expression that takes for ever, so the forms that checkpoints use are known
here, and any other is refused by its text. Of these each match is bounded, and all matches together have 2 s.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import math
import re
import time
from collections.abc import Callable, Sequence

from ...artifacts.errors import InputError

MOST_PATTERNS = 16384
_LONGEST_S = 2.0
_SHOWN = 3
_MOST_CHARS, _MOST_NAME_CHARS = 512, 1024
_MOST_STEPS = 1 << 26  # of one match, at worst: some 0.5 s

# An element is a character or a class of them, which may repeat; a group of alternatives, which may be left out; or a
# text that must not follow. Each kind has its own first character, so these expressions themselves match quickly.
_REPEAT = r"(?:[*+]\??|\?|\{\d{1,2}(?:,\d{0,2})?\})?"
_CHAR = rf"(?:(?:[\w:/ ,-]|\\[dw.:/_-]|\.|\[\^?[\w.-]+\]){_REPEAT})"
_INNER = rf"\((?:\?:)?{_CHAR}+(?:\|{_CHAR}+)*\)\??"
_GROUP = rf"\((?:\?:)?(?:{_CHAR}|{_INNER})+(?:\|(?:{_CHAR}|{_INNER})+)*\)\??"
_UNLIKE = rf"\(\?!{_CHAR}+\)"
_ELEMENTS = rf"\^?(?:{_CHAR}|{_GROUP}|{_UNLIKE})*\$?"
_KNOWN = re.compile(rf"(?:\(\?i\))?{_ELEMENTS}(?:\|{_ELEMENTS})*")
_PLAIN = re.compile(r"(?:[\w:/ ,-]|\\[.:/_-]|\.\*?(?![*+?{]))*")  # for such patterns, a name must contain every word
_MOST_REPEATS = 3


def first_matching(patterns: Sequence[str], groups: Sequence[Sequence[str]], where: str, what: str) -> list[int | None]:
    """For each group of names, the index of the first pattern that matches one of them; None if none does.

    A regular expression must match from a name's beginning; a glob must match a whole name, or its part before or after
    a dot. Errors begin with ``where``, and name the patterns ``what``.

    Raises
    ------
    InputError
        for too many patterns, a regular expression of a form that is not known here, a very long pattern or name,
        and those that take more than 2 s.
    """
    if len(patterns) > MOST_PATTERNS:
        raise InputError(f"{where}: {len(patterns):,} patterns {what}, the limit is {MOST_PATTERNS:,}")
    words = [_words(pattern, where) for pattern in patterns]
    end, out = time.thread_time() + _LONGEST_S, []
    try:
        for names in groups:
            text = "\n".join(names)
            near = (i for i, parts in enumerate(words) if all(part in text for part in parts))
            out.append(next((i for i in near if _matches(patterns[i], names, where, end)), None))
    except TimeoutError:
        some = ", ".join(map(_shown, patterns[:_SHOWN])) + (", ..." if len(patterns) > _SHOWN else "")
        raise InputError(f"{where}: the patterns {what} take over {_LONGEST_S:g} s: {some}") from None
    return out


def _words(pattern: str, where: str) -> list[str]:
    """Texts that are in every name that the pattern matches; InputError for a pattern that is not known here."""
    if len(pattern) > _MOST_CHARS:
        raise InputError(f"{where}: {_shown(pattern)} has {len(pattern):,} characters, the limit is {_MOST_CHARS}")
    if not pattern.startswith("re:"):
        return [] if re.search(r"[\[?]", pattern) else pattern.split("*")
    expression = pattern[3:]
    if _KNOWN.fullmatch(expression) is None or _repeats(expression) > _MOST_REPEATS:
        raise InputError(
            f"{where}: {_shown(pattern)} is no regular expression that pretuned matches: wanted letters, digits, . and "
            "[0-9], each with *, + or ? behind it, (a|b), (?!a), ^ and $, with at most three * and + between two |"
        )
    plain = expression.removeprefix("^").removesuffix("$")
    parts = re.split(r"(?<!\\)\.\*?", plain) if _PLAIN.fullmatch(plain) else []
    return [part.replace("\\", "") for part in parts]


def _matches(pattern: str, names: Sequence[str], where: str, end: float) -> bool:
    expressions, ways, repeats = _compiled(pattern, where), _ways(pattern), _repeats(pattern)
    for name in names:
        if time.thread_time() > end:
            raise TimeoutError
        if len(name) > _MOST_NAME_CHARS or (pattern.startswith("re:") and ways * len(name) ** repeats > _MOST_STEPS):
            raise InputError(f"{where}: {_shown(pattern)} takes too long for a name of {len(name):,} characters")
        if any(match(name) for match in expressions):
            return True
    return False


def alternatives(expression: str) -> list[str]:
    """The parts of an expression between the ``|`` that are in no group."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"\\.|\[[^]]*\]|[()|]", expression):
        depth += (match[0] == "(") - (match[0] == ")")
        if match[0] == "|" and not depth:
            parts.append(expression[start : match.start()])
            start = match.end()
    return [*parts, expression[start:]]


def _repeats(expression: str) -> int:
    """The repeats of one path: alternatives are tried one after another."""
    return max(sum(map(part.count, "*+{")) for part in alternatives(expression))


def _ways(expression: str) -> int:
    """The most paths that a match may take through the groups."""
    groups = math.prod(1 + group.count("|") for group in re.findall(r"\(([^()]*)\)", expression))
    return int(groups * (1 + expression.count("|")) * 2 ** len(re.findall(r"(?<!\()\?", expression)))


@functools.lru_cache(MOST_PATTERNS)
def _compiled(pattern: str, where: str) -> tuple[Callable[[str], object], ...]:
    if not pattern.startswith("re:"):
        globs = (pattern, f"{pattern}.*", f"*.{pattern}")
        return tuple(re.compile(fnmatch.translate(glob)).match for glob in globs)
    try:
        return (re.compile(pattern[3:]).match,)
    except re.error as error:  # [9-0]
        raise InputError(f"{where}: {_shown(pattern)} is no regular expression: {error}") from error


def _shown(pattern: str) -> str:
    return json.dumps(pattern)[:60]
