"""The kernel for codes of x and of w, compiled: which products are in its code, and what it takes of an SM."""

from __future__ import annotations

import re

import pytest
from compiled import keep_compiled

from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.records import DType, Fusion, Op
from pretuned.kernels import registry
from pretuned.kernels.arch import arch_of
from pretuned.kernels.cost import rejection
from pretuned.kernels.registry import unlaunchable
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Spec

MOST_SPILLED_BYTES = 64


@pytest.mark.slow
@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER])
def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch, fusion: Fusion) -> None:
    spec = Spec(Op.FORWARD, DType.FP8_BLOCK, candidates(Op.FORWARD, DType.FP8_BLOCK, 90)[0], fusion=fusion)
    kept = keep_compiled(monkeypatch)
    variant = compile_variant(spec, 90).variant
    ptx = kept[0].asm["ptx"]
    # 128 of K are four instructions, of the upper rows of a tile and of the lower, of each of two warpgroups.
    assert len(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", ptx)) == 16
    assert ptx.count("wgmma.mma_async") == 16
    assert variant.spill_bytes <= MOST_SPILLED_BYTES
    assert rejection(variant, arch_of(90)) is None
    assert unlaunchable(variant) is None
    maps = {one.argument: (one.element, one.box, one.swizzle) for one in variant.tensor_maps}
    told = {"x": (0, 3), "w": (2, 0), "x_scale": (7, 0), "y_map": (9, 3)}  # CUtensorMapDataType and swizzle
    assert maps == {name: (told[name][0], box, told[name][1]) for name, box in registry.boxes(spec).items()}
