"""Which layers of an engine the bundles are for. (That their kernels are loaded is tested on a GPU.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made import DRIVER, H200, ON_A100, ON_H200, WIDE, measured, modelled, write

from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.artifacts.records.precision import PLAIN_DTYPES, DType
from pretuned.artifacts.records.problem import Op, Problem
from pretuned.artifacts.records.target import Gpu, LocalGpu
from pretuned.integrations.served_layer import ServedLayer, lacks
from pretuned.runtime import reload
from pretuned.runtime.ops.activation import Activation

SILU = Activation("silu", gated=True, interleaved=False)
LAYER = ServedLayer(E=8, H=768, I=512, top_k=2, dtype=DType.BF16, act=SILU)


def test_its_products() -> None:
    assert LAYER.problems == (
        Problem(Op.FORWARD, DType.BF16, 8, 1024, 768),
        Problem(Op.FORWARD, DType.BF16, 8, 768, 512),
    )
    ungated = LAYER._replace(act=Activation("relu2", gated=False, interleaved=False))
    assert [one.N for one in ungated.problems] == [512, 768]


def test_a_layer_is_served_where_both_products_were_measured(clean_places: Path) -> None:
    first, second = LAYER.problems
    path = clean_places / "a.msgpack"
    missing = "no bundle was measured for {} on NVIDIA H200 (9.0, 132 SMs, 143771 MiB). Build one here with: aot build"
    assert lacks(LAYER, ON_H200) is not None
    for choices, lacking in (
        ({first: [measured(64, WIDE, 9)], second: [measured(64, WIDE, 9)]}, None),
        ({first: [measured(64, WIDE, 9)]}, second),
        ({second: [measured(64, WIDE, 9)], first: [modelled(64, WIDE)]}, first),
        ({replace(first, E=9): [measured(64, WIDE, 9)], second: [measured(64, WIDE, 9)]}, first),
    ):
        write(path, choices, gpus=[H200])
        reload()
        told = lacks(LAYER, ON_H200)
        assert told is None if lacking is None else str(told).startswith(missing.format(lacking))
        assert lacks(LAYER, ON_H200, any_variant=True) is None
        assert "was measured for" in str(lacks(LAYER, ON_A100))


def test_a_gpu_for_which_there_is_no_code_is_told() -> None:
    told = lacks(LAYER, LocalGpu(70, Gpu("Tesla V100-SXM2-16GB", 80, 16160, DRIVER)), any_variant=True)
    assert str(told).startswith("no bundle has code for forward bf16 E=8 N=1024 K=768 on Tesla V100-SXM2-16GB (7.0, ")


@pytest.mark.parametrize("dtype", [one for one in DType if one in PLAIN_DTYPES])
@pytest.mark.parametrize("act", [SILU, Activation("relu2", gated=False, interleaved=False)])
def test_the_command_that_it_names_is_one(dtype: DType, act: Activation) -> None:
    layer = LAYER._replace(dtype=dtype, act=act)
    spec = layer.build_line.removeprefix('aot build --models "').removesuffix('"')
    assert set(layer.problems) <= set(plan(load_models([spec]).shapes).problems)


def test_the_bundles_that_ship_are_for_this() -> None:
    layer = ServedLayer(E=128, H=2048, I=768, top_k=8, dtype=DType.BF16, act=SILU)
    assert lacks(layer, ON_H200) is None
