"""The kernel for codes with a scale a row, compiled: which products are in its code, and what it takes of an SM."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from compiled import keep_compiled

from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.records import DType, Fusion, Op
from pretuned.kernels import registry
from pretuned.kernels.arch import arch_of
from pretuned.kernels.cost import rejection
from pretuned.kernels.registry import undeclared, unlaunchable
from pretuned.kernels.search import candidates, shared_bytes_at_least
from pretuned.kernels.spec import Config, Loads, Schedule, Spec, TileRows

MOST_SPILLED_BYTES = 64
MANY = Config(256, 128, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W8A8_CHANNEL, rows=TileRows.FITTED)
FEW = Config(16, 64, 512, 8, 3, loads=Loads.TMA, schedule=Schedule.W8A8_CHANNEL)


def test_these_are_among_what_is_built() -> None:
    assert {MANY, FEW} <= set(candidates(Op.FORWARD, DType.FP8_CHANNEL, 90))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "fusion"),
    [(MANY, Fusion.NONE), pytest.param(MANY, Fusion.SCATTER, marks=pytest.mark.nightly), (FEW, Fusion.SCATTER)],
)
def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch, config: Config, fusion: Fusion) -> None:
    spec = Spec(Op.FORWARD, DType.FP8_CHANNEL, config, fusion=fusion)
    kept = keep_compiled(monkeypatch)
    variant = compile_variant(spec, 90).variant
    ptx = kept[0].asm["ptx"]
    widths = Counter(map(int, re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.f32\.e4m3\.e4m3", ptx)))
    assert widths.total() == ptx.count("wgmma.mma_async")
    # Of both warpgroups, 32 of K an instruction; a tile of 64 columns shares out K.
    each = 2 * config.block_k // 32 // (2 if config.block_n == 64 else 1)
    fitted = config.rows is TileRows.FITTED
    heights = range(16, config.block_m + 1, 16) if fitted else (config.block_m,)
    assert widths == dict.fromkeys(heights, each)
    # Sums of more than 128 registers a thread are kept in fp16, two to a register.
    assert ("cvt.rn.f16x2.f32" in ptx) is (config.block_m == 256)
    assert variant.spill_bytes <= MOST_SPILLED_BYTES
    assert rejection(variant, arch_of(90)) is None
    assert unlaunchable(variant) is None
    assert undeclared(variant, arch_of(90).limits) is None
    assert variant.shared_bytes >= shared_bytes_at_least(spec.op, spec.dtype, config, 90)
    maps = {one.argument: (one.element, one.box, one.swizzle) for one in variant.tensor_maps}
    told = {"x": (0, 3), "w": (2, 0), "y_map": (9, 3)}  # CUtensorMapDataType and swizzle
    assert maps == {name: (told[name][0], box, told[name][1]) for name, box in registry.boxes(spec).items()}
