"""Which layers' experts a checkpoint's config leaves out of its quantisation, by the names that it lists.

A name is some of the parts of a module's, a glob, or a regular expression behind ``re:``. The last two are matched in a
process of their own with little time: who wrote the config may have written one that takes for ever.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence

from ...artifacts.errors import HostError, InputError
from ...artifacts.format.checks import shown

MOST = 1 << 18  # names: as many as experts and their products in large models
_MOST_PATTERNS = 16384
_CPU_S = 2
_LONGEST_S = 120.0  # on a machine that has no time
# Where a checkpoint keeps its experts, as the exclusions of a config name them.
_ROOTS = ("model.layers.{}", "model.language_model.layers.{}", "language_model.model.layers.{}", "layers.{}")
_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "mixer", "moe")
_LEAVES = ("experts.0.gate_proj", "experts.0.down_proj", "experts.0.w1", "experts.0.w2", "experts.gate_up_proj",
           "experts.down_proj", "experts")  # fmt: skip
_CHILD = """
import fnmatch, json, re, resource, sys
patterns, layers, cpu_s = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
found = []
for pattern in patterns:
    if pattern.startswith("re:"):
        try:
            found.append(([], [re.compile(pattern[3:]).match]))
        except (re.error, OverflowError, RecursionError) as error:
            json.dump([pattern, str(error)], sys.stdout)
            sys.exit()
    else:
        parts = [] if re.search("[[?]", pattern) else pattern.split("*")
        globs = (pattern, pattern + ".*", "*." + pattern)
        found.append((parts, [re.compile(fnmatch.translate(glob)).match for glob in globs]))
out = []
for i, names in enumerate(layers):
    text = "\\n".join(names)  # what has not all of a glob's parts is spared the rest
    near = (match for parts, matches in found if all(part in text for part in parts) for match in matches)
    if any(match(name) for match in near for name in names):
        out.append(i)
json.dump([None, out], sys.stdout)
"""


def left_out(names: Iterable[str], layers: int, where: str) -> list[int]:
    """The layers, of so many, whose experts are among ``names``; ``where`` begins an error.

    Raises
    ------
    InputError
        for too many names, one that is no regular expression, or those that take too long.
    HostError
        where no process can be had.
    """
    every = tuple(dict.fromkeys(names))
    patterns = [one for one in every if "*" in one or one.startswith("re:")]
    for what, most in ((every, MOST), (patterns, _MOST_PATTERNS)):
        if len(what) > most:
            kind = "names" if what is every else "patterns"
            raise InputError(
                f"{where}: quantization_config: {len(what):,} {kind} of what is not quantised, the limit is {most:,}"
            )
    plain = set(every).difference(patterns)
    found = {layer for layer in range(layers) if not plain.isdisjoint(_parts(layer))} if plain else set[int]()
    if patterns:
        found.update(_matching(patterns, layers, where))
    return sorted(found)


def _matching(patterns: Sequence[str], layers: int, where: str) -> list[int]:
    """The layers of which a regular expression, or a glob, means a name."""
    given = json.dumps([patterns, [experts(layer) for layer in range(layers)], _CPU_S])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _CHILD], input=given, capture_output=True, text=True, check=False,
            timeout=_LONGEST_S,
        )  # fmt: skip
    except OSError as error:
        raise HostError(f"can't start {sys.executable!r}: {error.strerror or error}") from error
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        raise InputError(
            f"{where}: quantization_config: the patterns of what is not quantised take over {_CPU_S} s, or 1 GiB: "
            f"{shown(list(patterns))}"
        )
    wrong, found = json.loads(done.stdout)
    if wrong is not None:
        raise InputError(f"{where}: quantization_config: {json.dumps(wrong)[:60]} is no regular expression: {found}")
    return [int(layer) for layer in found]


@functools.cache
def experts(layer: int) -> tuple[str, ...]:
    """The names that a layer's experts may have."""
    return tuple(f"{root.format(layer)}.{block}.{leaf}" for root in _ROOTS for block in _BLOCKS for leaf in _LEAVES)


@functools.cache
def _parts(layer: int) -> frozenset[str]:
    """All that is some neighbouring parts of one of these names."""
    heads = {".".join(parts[i:]) for parts in (one.split(".") for one in _ROOTS) for i in range(len(parts))}
    below = [f"{block}.{leaf}".split(".") for block in _BLOCKS for leaf in _LEAVES]
    tails = {"".join(f".{one}" for one in parts[:i]) for parts in below for i in range(len(parts) + 1)}
    without = [*below, *(one.split(".")[:-1] for one in _ROOTS)]  # the layer's number ends a root
    fixed = {".".join(parts[i:j]) for parts in without for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    return frozenset(fixed | {head.format(layer) + tail for head in heads for tail in tails})
