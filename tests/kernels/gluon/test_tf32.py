"""dW in tf32: specialised kernels whose operands go through registers to mma.sync."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compiled import keep_compiled

from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.records import DType, Op, Problem
from pretuned.kernels import registry
from pretuned.kernels.arch import arch_of
from pretuned.kernels.chips import chip_for
from pretuned.kernels.cost import Resources, rejection
from pretuned.kernels.cost_model import estimate_us
from pretuned.kernels.gluon.tf32 import LEFT, RIGHT, STEP
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Config, Edge, Loads, Schedule, Spec

CONFIG = Config(32, 128, 256, 8, 3, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
SPEC = Spec(Op.DW, DType.TF32, CONFIG)
SHIPPED = [CONFIG, CONFIG._replace(block_m=64, num_stages=2)]
MIXED = (0, 2, 4, 6, 1, 3, 5, 7)  # the rows of eight, in the order in which they are multiplied
REGISTERS = 32
TRIAL = Path(__file__).parents[3] / "benchmarks" / "results" / "tf32-dW-h200.json"
TIMED = {
    "special (32, 128, 256, 8, 3)": Resources(CONFIG, 384, 213336, 168),
    "special (64, 128, 256, 8, 2)": Resources(CONFIG._replace(block_m=64, num_stages=2), 384, 229688, 168),
    "plain (32, 64, 128, 2, 3)": Resources(Config(32, 64, 128, 2, 3, loads=Loads.TMA), 64, 49184, 246),
}


def places(layout: Any, warp: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """(lane, register, (row, column)) of a layout of 16 rows."""
    registers = len(layout.reg_bases)
    for lane, register in itertools.product(range(32), range(1 << registers)):
        bases = [base for bit, base in enumerate(layout.lane_bases) if lane >> bit & 1]
        bases += [base for bit, base in enumerate(layout.reg_bases) if register >> bit & 1]
        bases += [base for bit, base in enumerate(layout.warp_bases) if warp >> bit & 1]
        row = column = 0
        for down, right in bases:
            row, column = row ^ down, column ^ right
        yield lane, register, (row, column)


def bank(row: int, column: int) -> int:
    """Of a float32 of a tile in lines of 32, whose 16-byte parts TMA exchanges by row (128-byte swizzle)."""
    inner = column % 32
    return (inner // 4 ^ row % 8) * 4 + inner % 4


@pytest.mark.parametrize("layout", [LEFT.value, RIGHT.value])
def test_each_lane_of_a_load_has_a_bank_of_its_own(layout: Any) -> None:
    for warp in range(4):
        loads: dict[int, list[tuple[int, int]]] = {}
        for _lane, register, place in places(layout, warp):
            loads.setdefault(register, []).append(place)
        assert len(loads) == REGISTERS
        for load in loads.values():
            assert len(load) == 32
            assert len({bank(*place) for place in load}) == 32
            in_order = [(MIXED.index(row % 8), column) for row, column in load]  # as the instruction has them
            assert len({bank(*place) for place in in_order}) == 16


@pytest.mark.parametrize("left", [True, False])
def test_a_lane_holds_what_the_instruction_wants(left: bool) -> None:
    """PTX ISA, mma.m16n8k8 of tf32: in lane 4 g + t the reduction's t and t + 4, of row (column) g, and of a g + 8."""
    layout = (LEFT if left else RIGHT).value
    for warp in range(4):
        for lane, _register, (row, column) in places(layout, warp):
            step = row // 8 * 8 + MIXED.index(row % 8)
            assert step % 4 == lane % 4
            assert column % 8 == lane // 4
        whole = {place for _lane, _register, place in places(layout, warp)}
        mine = range(64) if left else [c for c in range(256) if c // 8 % 4 == warp]
        assert whole == set(itertools.product(range(STEP.value), mine))


@pytest.mark.slow
@pytest.mark.parametrize("config", [SHIPPED[0], pytest.param(SHIPPED[1], marks=pytest.mark.nightly)])
def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """All products are mma.sync of both warpgroups, in lines of 32-bit numbers, and what TMA stores is not rounded."""
    kept = keep_compiled(monkeypatch)
    variant = compile_variant(SPEC._replace(config=config), 90).variant
    ptx, ttgir = kept[0].asm["ptx"], kept[0].asm["ttgir"]
    assert "wgmma" not in ptx
    products = len(re.findall(r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32", ptx))
    words = len(re.findall(r"ld\.shared\.b32", ptx))
    assert products == 2 * 4 * 8 * config.block_m // 8  # two warpgroups, 64 x 64 of a warp
    assert words >= 2 * 2 * 64 * config.block_m // 32  # no wider load has both: they lie in different lines
    assert set(re.findall(r"elementBitWidth = (\d+)", ttgir)) == {"32"}
    assert rejection(variant, arch_of(90)) is None
    assert {tensor_map.argument: tensor_map.element for tensor_map in variant.tensor_maps} == {
        "dy": 11,
        "x": 11,
        "dw": 7,
    }


def test_what_there_is_no_code_for() -> None:
    assert registry.refusal(Spec(Op.DW, DType.TF32, CONFIG)) is None
    rows = Config(128, 256, 64, 8, 3, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
    wrong = [
        (Op.DW, DType.FP32, CONFIG, "its dtypes are bf16, fp16, tf32"),
        (Op.FORWARD, DType.TF32, rows, "its dtypes are bf16, fp16"),
        (Op.DX, DType.FP32, rows._replace(block_n=128), "its dtypes are bf16, fp16"),
        (Op.DW, DType.TF32, CONFIG._replace(edge=Edge.HALF), "edge is HALF, wanted WHOLE"),
        (Op.DW, DType.TF32, CONFIG._replace(block_k=128), "block_k is 128, wanted 256"),
    ]
    for op, dtype, config, message in wrong:
        assert message in str(registry.refusal(Spec(op, dtype, config)))
        assert registry.refusal(Spec(op, DType.BF16, config)) is None
    for dtype in (DType.TF32, DType.BF16):
        narrower = registry.refusal(Spec(Op.DW, dtype, CONFIG._replace(block_n=64)))
        assert "block_n is 64, wanted 128" in str(narrower)


def test_only_sm_90_is_offered_them() -> None:
    for sm in (80, 90, 100, 120):
        configs = [config for config in candidates(Op.DW, DType.TF32, sm) if config.schedule.warp_specialized]
        assert configs == (SHIPPED if sm == 90 else [])
    assert all(registry.refusal(Spec(Op.DW, DType.TF32, config), 90) is None for config in SHIPPED)
    assert "sm_100a has no wgmma" in str(registry.refusal(Spec(Op.DW, DType.TF32, CONFIG), 100))


def test_the_model_prefers_them() -> None:
    """The specialised tiles that ship beside the fastest plain one, in turns on one H200."""
    trial = json.loads(TRIAL.read_text())
    assert len(trial["cells"]) == 6
    for cell in trial["cells"]:
        problem = Problem(Op.DW, DType.TF32, cell["E"], cell["N"], cell["K"])
        us = {name: estimate_us(problem, cell["M"], resources, chip_for(90)) for name, resources in TIMED.items()}
        best = min(us, key=us.__getitem__)
        assert best.startswith("special"), cell
        assert cell["us"][best] <= 1.1 * min(cell["us"][name] for name in TIMED)
        assert all(0.8 < time / cell["us"][name] < 1.3 for name, time in us.items()), cell


def test_no_pointer_tile_is_thought_faster() -> None:
    """OLMoE down dW, T=8192: measured 6051 us with 16 x 128 x 128 through pointers (docs/inside/trials.md)."""
    problem, chip = Problem(Op.DW, DType.TF32, 64, 2048, 1024), chip_for(90)
    pointers = estimate_us(problem, 65536, Resources(Config(16, 128, 128, 4, 3), 128, 36864, 200), chip)
    assert pointers > 2 * estimate_us(problem, 65536, Resources(CONFIG, 384, 213336, 168), chip)
