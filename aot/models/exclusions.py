"""The layers whose experts a checkpoint's config leaves out of its quantisation.

The config lists names: some consecutive parts of a module's name, a glob, or a regular expression behind ``re:``.
``runtime/weights/patterns.py`` matches globs and regular expressions, within limits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from ...artifacts.errors import InputError
from ...runtime.weights.patterns import first_matching

MOST = 1 << 18  # names: large models list every matrix of every expert
# Where a checkpoint keeps its experts, as the exclusions of a config name them.
_ROOTS = ("model.layers.{}", "model.language_model.layers.{}", "language_model.model.layers.{}", "layers.{}")
_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "mixer", "moe")
_PARTS = (
    (("gate_proj", "w1"), "gate_up_proj"),
    (("up_proj", "w3"), "gate_up_proj"),
    (("down_proj", "w2"), "down_proj"),
)
_EXPERT = re.compile(r"\bexperts\\?\.([0-9]{1,6})\b")
_MOST_EXPERTS = 6  # whose matrices are looked up, in each layer
_LEAVES = (
    "experts.0.gate_proj",
    "experts.0.down_proj",
    "experts.0.w1",
    "experts.0.w2",
    "experts.gate_up_proj",
    "experts.down_proj",
    "experts",
)


def left_out(names: Iterable[str], layers: int, where: str) -> list[int]:
    """The layers, of ``layers`` in all, whose experts are among ``names``; ``where`` begins an error.

    Raises
    ------
    InputError
        for too many names, and for patterns that are not supported or take too long.
    """
    unique = tuple(dict.fromkeys(names))
    patterns = [name for name in unique if "*" in name or name.startswith("re:")]
    if len(unique) > MOST:
        raise InputError(
            f"{where}: quantization_config: {len(unique):,} names of what is not quantised, the limit is {MOST:,}"
        )
    plain = set(unique).difference(patterns)
    excluded = {layer for layer in range(layers) if not plain.isdisjoint(_parts(layer))} if plain else set[int]()
    if patterns:
        groups = [experts(layer) for layer in range(layers)]
        matches = first_matching(patterns, groups, f"{where}: quantization_config", "of what is not quantised")
        excluded.update(layer for layer, match in enumerate(matches) if match is not None)
    return sorted(excluded)


def matrices(layer: int, experts: int, words: Iterable[str]) -> list[tuple[str, ...]]:
    """The names of some of a layer's expert matrices: of the first and last expert, and of experts that ``words`` name.

    One entry for each matrix, with every name that it may have.
    """
    some = dict.fromkeys((0, max(experts, 1) - 1))
    for word in words:
        if len(some) < _MOST_EXPERTS and (match := _EXPERT.search(word)) and int(match[1]) < experts:
            some[int(match[1])] = None
    return [
        tuple(f"{root.format(layer)}.{block}.{leaf}" for root in _ROOTS for block in _BLOCKS for leaf in leaves)
        for expert in some
        for leaves in _matrices(expert)
    ]


@functools.cache
def _matrices(expert: int) -> tuple[tuple[str, ...], ...]:
    """The last parts of the names that an expert's gate, up and down matrices may have."""
    return tuple(
        (*(f"experts.{expert}.{name}" for name in names), f"experts.{stacked}", "experts") for names, stacked in _PARTS
    )


@functools.cache
def experts(layer: int) -> tuple[str, ...]:
    """The names that a layer's experts may have."""
    return tuple(f"{root.format(layer)}.{block}.{leaf}" for root in _ROOTS for block in _BLOCKS for leaf in _LEAVES)


@functools.cache
def _parts(layer: int) -> frozenset[str]:
    """Every run of consecutive parts of the names that a layer's experts may have."""
    heads = {".".join(parts[i:]) for parts in (root.split(".") for root in _ROOTS) for i in range(len(parts))}
    below = [f"{block}.{leaf}".split(".") for block in _BLOCKS for leaf in _LEAVES]
    tails = {"".join(f".{part}" for part in parts[:i]) for parts in below for i in range(len(parts) + 1)}
    without = [*below, *(root.split(".")[:-1] for root in _ROOTS)]  # the layer's number ends a root
    fixed = {".".join(parts[i:j]) for parts in without for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    return frozenset(fixed | {head.format(layer) + tail for head in heads for tail in tails})
