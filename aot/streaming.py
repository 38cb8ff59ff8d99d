"""Weights that are read once: their TMA loads are marked so that L2 gives their lines up first.

Triton has no way to say so of a TMA load, so it is said in the PTX that Triton makes, before it assembles it:
``cp.async.bulk.tensor`` with ``.L2::cache_hint`` and a policy (PTX ISA, "cp.async.bulk.tensor"). The policy is the
64-bit word that ``createpolicy.fractional.L2::evict_first`` yields for all lines (CUTLASS has it in
``cute/arch/copy_sm90_desc.hpp``, ``TMA::CacheHintSm90::EVICT_FIRST``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

EVICT_FIRST = 0x12F0000000000000
# w's descriptor is the only one of three dimensions that is loaded through: x has two, and y_map is stored through.
_LOAD = re.compile(r"(cp\.async\.bulk\.tensor\.3d\.shared::\w+\.global[\w.:]*)( \[[^;]*\]);")


def streamed(ptx: str) -> str:
    """The PTX with a hint on each load of w.

    Raises
    ------
    ValueError
        if it has no such load, or one that has a hint already.
    """
    text, count = _LOAD.subn(lambda load: f"{load[1]}.L2::cache_hint{load[2]}, {EVICT_FIRST:#x};", ptx)
    if not count or text.count(".L2::cache_hint") != count:
        raise ValueError(f"{count} TMA loads of w in the PTX, {ptx.count('.L2::cache_hint')} have a hint already")
    return text


@contextmanager
def streaming() -> Iterator[None]:
    """What Triton compiles meanwhile, in this process, has hinted loads of w."""
    from triton import knobs

    def hook(
        _backend: Any = None, stages: MutableMapping[str, Callable[..., Any]] | None = None, *_: Any
    ) -> tuple[str, str] | None:
        if stages is None:  # Triton asks what to add to the key of its cache
            return "streamed", "streamed"
        make = stages["ptx"]
        stages["ptx"] = lambda source, metadata: streamed(make(source, metadata))
        return None

    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = hook
        yield
