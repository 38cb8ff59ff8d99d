"""Names of modules matched with what a checkpoint's config says: globs, and regular expressions behind ``re:``.

In a process of their own, which has little time: who wrote the config may have written one that takes for ever.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

from ...artifacts.errors import HostError, InputError

MOST_PATTERNS = 16384
_CPU_S = 2
_LONGEST_S = 120.0  # on a machine that has no time
_SHOWN = 3
# What is matched here, for it can't take long: no repeats but some ``.*``, and short names.
_SHORT = re.compile(r"re:\^?(?:[\w:/ -]|\\?\.(?![*+?{])|\.\*(?![*+?{])){1,100}\$?")
_MOST_STARS, _MOST_CHARS = 3, 200
_STEPS_OF_A_MATCH, _MOST_STEPS = 256, 1 << 29  # at worst: some 0.5 s
_CHILD = """
import fnmatch, json, re, resource, sys
patterns, groups, cpu_s = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
SIMPLE = r"(?:[\\w:/ -]|\\\\\\.|\\.\\*?(?![*+?{]))*"
found = []
for pattern in patterns:
    if pattern.startswith("re:"):
        plain = pattern[3:].removeprefix("^").removesuffix("$")  # what it has to find word by word, if that is plain
        parts = re.split(r"(?<!\\\\)\\.\\*?", plain) if re.fullmatch(SIMPLE, plain) else []
        try:
            found.append(([one.replace("\\\\.", ".") for one in parts], [re.compile(pattern[3:]).match]))
        except (re.error, OverflowError, RecursionError) as error:
            json.dump([pattern, str(error)], sys.stdout)
            sys.exit()
    else:
        parts = [] if re.search("[[?]", pattern) else pattern.split("*")
        globs = (pattern, pattern + ".*", "*." + pattern)
        found.append((parts, [re.compile(fnmatch.translate(glob)).match for glob in globs]))
out = []
for names in groups:
    text = "\\n".join(names)  # what has not all of a glob's parts is spared the rest
    near = ((i, match) for i, (parts, matches) in enumerate(found) if all(part in text for part in parts)
            for match in matches)
    out.append(next((i for i, match in near if any(match(name) for name in names)), None))
json.dump([None, out], sys.stdout)
"""


def first_matching(patterns: Sequence[str], groups: Sequence[Sequence[str]], where: str, what: str) -> list[int | None]:
    """Of each group of names, which is the first pattern that matches one of them; None where none does.

    A regular expression has to match from a name's beginning; a glob a whole name, or what stands before or behind a
    dot. Errors begin with ``where``, and name the patterns ``what``.

    Raises
    ------
    InputError
        for too many, one that is no regular expression, or those that take more than 2 s of the CPU or 1 GiB.
    HostError
        where no process can be had.
    """
    if len(patterns) > MOST_PATTERNS:
        raise InputError(f"{where}: {len(patterns):,} patterns {what}, the limit is {MOST_PATTERNS:,}")
    if not patterns:
        return [None] * len(groups)
    if all(map(_is_short, patterns)) and _steps(patterns, groups) <= _MOST_STEPS:
        found = [re.compile(one[3:]).match for one in patterns]
        return [next((i for i, match in enumerate(found) if any(map(match, names))), None) for names in groups]
    try:
        done = subprocess.run(
            [sys.executable or "python3", "-I", "-c", _CHILD], input=json.dumps([patterns, groups, _CPU_S]),
            capture_output=True, text=True, check=False, timeout=_LONGEST_S,
        )  # fmt: skip
    except OSError as error:
        raise HostError(f"can't start {sys.executable!r}: {error.strerror or error}") from error
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        some = ", ".join(map(_shown, patterns[:_SHOWN])) + (", ..." if len(patterns) > _SHOWN else "")
        raise InputError(f"{where}: the patterns {what} take over {_CPU_S} s, or 1 GiB: {some}")
    wrong, answer = json.loads(done.stdout)
    if wrong is not None:
        raise InputError(f"{where}: {_shown(wrong)} is no regular expression: {answer}")
    return list(answer)


def _steps(patterns: Sequence[str], groups: Sequence[Sequence[str]]) -> int:
    """How much it takes at worst to match each short pattern with each name: a star tries every place."""
    stars, steps = Counter(one.count("*") for one in patterns), 0
    for length, times in Counter(len(name) for names in groups for name in names).items():
        if length > _MOST_CHARS:
            return _MOST_STEPS + 1
        steps += times * sum(many * (_STEPS_OF_A_MATCH + length**power) for power, many in stars.items())
    return steps


def _is_short(pattern: str) -> bool:
    return pattern.count("*") <= _MOST_STARS and _SHORT.fullmatch(pattern) is not None


def _shown(pattern: str) -> str:
    return json.dumps(pattern)[:60]
