"""Which layers' experts a checkpoint's config leaves out of its quantisation, by the names that it lists.

A name is some of the parts of a module's, a glob, or a regular expression behind ``re:``: the last two are matched by
``runtime/weights/patterns.py``, within limits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from ...artifacts.errors import InputError
from ...runtime.weights.patterns import first_matching

MOST = 1 << 18  # names: as many as experts and their products in large models
# Where a checkpoint keeps its experts, as the exclusions of a config name them.
_ROOTS = ("model.layers.{}", "model.language_model.layers.{}", "language_model.model.layers.{}", "layers.{}")
_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "mixer", "moe")
_PARTS = (
    (("gate_proj", "w1"), "gate_up_proj"),
    (("up_proj", "w3"), "gate_up_proj"),
    (("down_proj", "w2"), "down_proj"),
)
_EXPERT = re.compile(r"\bexperts\\?\.([0-9]{1,6})\b")
_MOST_EXPERTS = 6  # of a layer
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
    """The layers, of so many, whose experts are among ``names``; ``where`` begins an error.

    Raises
    ------
    InputError
        for too many names, and patterns of a form that is not known or that take too long.
    """
    every = tuple(dict.fromkeys(names))
    patterns = [one for one in every if "*" in one or one.startswith("re:")]
    if len(every) > MOST:
        raise InputError(
            f"{where}: quantization_config: {len(every):,} names of what is not quantised, the limit is {MOST:,}"
        )
    plain = set(every).difference(patterns)
    found = {layer for layer in range(layers) if not plain.isdisjoint(_parts(layer))} if plain else set[int]()
    if patterns:
        groups = [experts(layer) for layer in range(layers)]
        matching = first_matching(patterns, groups, f"{where}: quantization_config", "of what is not quantised")
        found.update(layer for layer, one in enumerate(matching) if one is not None)
    return sorted(found)


def matrices(layer: int, experts: int, words: Iterable[str]) -> list[tuple[str, ...]]:
    """The names of some of a layer's expert matrices: those of the first, the last, and experts that ``words`` name.

    One entry for each matrix, with every name that it may have.
    """
    some = dict.fromkeys((0, max(experts, 1) - 1))
    for word in words:
        if len(some) < _MOST_EXPERTS and (found := _EXPERT.search(word)) and int(found[1]) < experts:
            some[int(found[1])] = None
    return [
        tuple(f"{root.format(layer)}.{block}.{leaf}" for root in _ROOTS for block in _BLOCKS for leaf in leaves)
        for one in some
        for leaves in _matrices(one)
    ]


@functools.cache
def _matrices(expert: int) -> tuple[tuple[str, ...], ...]:
    """The last parts of the names of an expert's gate, up and down."""
    return tuple(
        (*(f"experts.{expert}.{name}" for name in names), f"experts.{stacked}", "experts") for names, stacked in _PARTS
    )


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
