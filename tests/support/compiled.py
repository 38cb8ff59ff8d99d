"""The output of Triton for a variant: the text of each stage."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pytest
import triton

from pretuned.aot.compile.cache import asked_for, made_of
from pretuned.aot.compile.triton import Compiled, compile_variant
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.kernels import registry
from pretuned.kernels.arch import arch_of
from pretuned.kernels.cost import rejection
from pretuned.kernels.search import shared_bytes_at_least
from pretuned.kernels.spec import Spec
from pretuned.runtime.dispatch.places import candidates_file

BUNDLES = Path(__file__).resolve().parents[2] / "artifacts" / "bundles"
MOST_SPILLED_BYTES = 64


def keep_compiled(patch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of all later compilations, in order: ``asm`` has each stage's text, after pretuned's rewrites."""
    kept: list[Any] = []
    compile_ = triton.compile

    def compiles(*args: Any, **how: Any) -> Any:
        kept.append(compile_(*args, **how))
        return kept[-1]

    patch.setattr(triton, "compile", compiles)
    return kept


@functools.lru_cache(maxsize=1)
def _shipped_for_hopper() -> Mapping[Hashable, bytes]:
    """The digest of each cubin that ships for sm_90."""
    candidates = candidates_file(BUNDLES, 90)
    assert candidates is not None
    shipped = {}
    for path in (candidates, BUNDLES / "weights-sm90.msgpack"):
        with open_bundle(path) as bundle:
            shipped |= {made_of(variant): variant.cubin_sha256 for variant in bundle.variants()}
    return shipped


def assert_as_shipped(spec: Spec, compiled: Compiled) -> None:
    """Check that a variant for sm_90 is compiled to the very bytes that ship. tests/test_shipped.py relies on it."""
    shipped = _shipped_for_hopper()[asked_for(spec)]
    assert compiled.variant.cubin_sha256 == shipped, f"the cubin that ships for sm_90 is stale: {spec}"


def ptx_for_hopper(patch: pytest.MonkeyPatch, spec: Spec, maps: Mapping[str, tuple[int, int]]) -> str:
    """The PTX of a variant for sm_90, once it is checked to be as shipped, to fit an SM, and to have maps of its boxes.

    ``maps`` has CUtensorMapDataType and the swizzle of each argument that may have one.
    """
    kept = keep_compiled(patch)
    compiled = compile_variant(spec, 90)
    assert_as_shipped(spec, compiled)
    variant = compiled.variant
    assert variant.spill_bytes <= MOST_SPILLED_BYTES
    assert rejection(variant, arch_of(90)) is None
    assert registry.unlaunchable(variant) is None
    assert registry.undeclared(variant, arch_of(90).limits) is None
    assert variant.shared_bytes >= shared_bytes_at_least(spec.op, spec.dtype, spec.config, 90)
    boxes = {
        tensor_map.argument: (tensor_map.element, tensor_map.box, tensor_map.swizzle)
        for tensor_map in variant.tensor_maps
    }
    assert boxes == {name: (maps[name][0], box, maps[name][1]) for name, box in registry.boxes(spec).items()}
    text: str = kept[0].asm["ptx"]
    return text
