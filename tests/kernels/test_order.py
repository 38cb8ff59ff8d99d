"""In which order kernels sum K: declared of every variant that ships, and held against what is compiled and run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import warm
from compiled import keep_compiled

from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import DType, Fusion, Layout, Op, RowOp, Variant
from pretuned.kernels import registry
from pretuned.kernels.entry import NARROW, TENSOR_MEMORY, WIDE, WIDE_FROM_REGISTERS, WIDE_OR_NARROW, Order
from pretuned.kernels.spec import Config, Loads, Schedule, Spec, TileRows

BUNDLES = Path(__file__).parents[2] / "artifacts" / "bundles"
WORKER = Path(__file__).parents[1] / "support" / "interpret_order.py"
GATHER, SCATTER, WEIGHT, LOW_RANK = 1, 2, 4, 32
DEPTHS = (1024, 4096)  # of a reduction
ONE_SUM = 1, 0, "fp32", True  # accumulators, partial sums, their type, whether the sum is rounded


def order_of(variant: Variant, sm: int, reduction: int) -> Order:
    config, (op, dtype) = Config.from_pairs(variant.config), (variant.op, variant.dtype)
    assert isinstance(op, Op)
    return registry.order_of(Spec(op, dtype, config, variant.layout, variant.fusion, variant.alignment), sm, reduction)


def products(path: Path) -> tuple[int, list[Variant]]:
    """The variants of products of rows in a bundle, and its capability."""
    with open_bundle(path) as bundle:
        variants = [
            variant for variant in bundle.variants() if not isinstance(variant.op, RowOp) and variant.op is not Op.DW
        ]
        return bundle.target.sm, variants


def test_what_ships_has_a_declared_order() -> None:
    """Of 16 and 32 bits one sum over all of K, of every tile; with silu it is not rounded."""
    for path in sorted(BUNDLES.glob("*.msgpack")):
        sm, variants = products(path)
        assert variants or path.stem.startswith("weights")  # which has row kernels alone
        for variant in variants:
            orders = {order_of(variant, sm, reduction) for reduction in DEPTHS}
            if variant.dtype.quantised:
                continue
            (order,) = orders
            assert order[3:4] + order[5:7] + order[8:] == (*ONE_SUM[:3], Fusion.SILU not in variant.fusion)
            assert (order.instruction == WIDE_OR_NARROW) is (sm == 90)


def test_who_shares_out_k() -> None:
    """Tiles of 64 columns of the kernels for prepared codes, and no others."""
    _, variants = products(BUNDLES / "quantised-sm90.msgpack")
    accumulators = {order_of(variant, 90, 4096).accumulators for variant in variants}
    assert accumulators == {1, 2}
    for variant in variants:
        config = Config.from_pairs(variant.config)
        splits = config.block_n == 64 and config.schedule in (Schedule.W4A16, Schedule.W8A8_CHANNEL)
        assert order_of(variant, 90, 4096).accumulators == (2 if splits else 1)


def channel(block_m: int, block_n: int, block_k: int, rows: TileRows) -> Spec:
    config = Config(block_m, block_n, block_k, 8, 2, loads=Loads.TMA, schedule=Schedule.W8A8_CHANNEL, rows=rows)
    return Spec(Op.FORWARD, DType.FP8_CHANNEL, config)


def test_a_long_reduction_is_summed_in_parts() -> None:
    """Of codes by codes with a scale a row: large tiles keep the sums of earlier parts in fp16."""
    large, small = channel(256, 128, 128, TileRows.FITTED), channel(128, 128, 128, TileRows.FITTED)
    few = channel(16, 64, 512, TileRows.FIXED)
    assert registry.order_of(large, 90, 2048) == registry.order_of(small, 90, 2048)
    assert registry.order_of(large, 90, 4096).kept == "fp16"
    assert registry.order_of(small, 90, 4096) == registry.order_of(small, 90, 2048)._replace(partial=2048)
    deeper = channel(16, 64, 1024, TileRows.FIXED)
    assert registry.order_of(few, 90, 1024) != registry.order_of(deeper, 90, 1024)


INSTRUCTIONS = {
    WIDE: {"wgmma"},
    WIDE_FROM_REGISTERS: {"wgmma"},
    TENSOR_MEMORY: {"tcgen05"},
    NARROW: {"mma.sync"},
    WIDE_OR_NARROW: {"wgmma", "mma.sync"},
    "fma": {"fma"},
}
TILES = [(64, 128, 64, 4, 3), (16, 64, 64, 8, 2), (64, 64, 64, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "sm"),
    [
        (dtype, sm)
        if (dtype, sm) in ((DType.BF16, 100), (DType.TF32, 90))
        else pytest.param(dtype, sm, marks=pytest.mark.nightly)
        for dtype in (DType.BF16, DType.TF32, DType.FP32, DType.MXFP4)
        for sm in (80, 90, 100, 120)
    ],
)
def test_the_instruction_is_the_compilers(monkeypatch: pytest.MonkeyPatch, dtype: DType, sm: int) -> None:
    kept = keep_compiled(monkeypatch)
    for tile in TILES:
        if dtype is DType.FP32:
            tile = (tile[0], 32, 32, *tile[3:])
        by_tile = dtype is DType.MXFP4
        config = Config(*tile, schedule=Schedule.TILE if by_tile else Schedule.PERSISTENT)
        spec = Spec(Op.FORWARD, dtype, config, Layout.STORED if by_tile else Layout.KN)
        if sm in (90, 100) and not by_tile and dtype is not DType.FP32:
            spec = spec._replace(config=config._replace(loads=Loads.TMA))
        compile_variant(spec, sm)
        ptx = kept[-1].asm["ptx"]
        names = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mma.sync": r"\bmma\.sync"}
        used = {name for name, text in names.items() if re.search(text, ptx)} or {"fma"}
        order = registry.order_of(spec, sm, 2048)
        assert len(used) == 1
        assert used <= INSTRUCTIONS[order.instruction]
        if order.instruction == WIDE_FROM_REGISTERS:
            assert "wgmma.mma_async.sync.aligned" in ptx
        if used != {"fma"}:
            assert f"k{order.step}" in ptx or used == {"tcgen05"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        Spec(Op.FORWARD, DType.MXFP4, Config(16, 64, 512, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16)),
        Spec(Op.FORWARD, DType.MXFP4, Config(16, 128, 256, 8, 4, loads=Loads.TMA, schedule=Schedule.W4A16)),
        channel(16, 64, 512, TileRows.FIXED),
    ],
    ids=str,
)
def test_a_warpgroup_has_its_share_of_k(monkeypatch: pytest.MonkeyPatch, spec: Spec) -> None:
    """A stage of two warpgroups has as many instructions as the order says."""
    kept = keep_compiled(monkeypatch)
    compile_variant(spec, 90)
    order, ptx = registry.order_of(spec, 90, 1024), kept[-1].asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 2 * spec.config.block_k // order.step // order.accumulators
    assert set(re.findall(r"wgmma\.mma_async\S*\.m64n\d+k(\d+)", ptx)) == {str(order.step)}


# y of 32 bits shows each bit of the sums; the instruction is the worker's.
ROWS: dict[str, Any] = {
    "kernel": "rows",
    "step": 16,
    "m_sizes": [5, 0, 17, 1],
    "M": 23,
    "N": 40,
    "K": 176,
    "dtype": "fp32",
    "op": "forward",
    "layout": "nk",
    "tma": False,
    "persistent": True,
    "programs": 3,
    "wide": False,
    "poison": [],
    "group_m": 2,
    "scan": 0,
    "fusion": 0,
    "top_k": 2,
    "bad_index": False,
    "zero_tail": False,
    "block": [16, 16, 32],
    "seed": 0,
    "filled_up": 0,
}
CODES: dict[str, Any] = {
    "kernel": "coded",
    "step": 16,
    "op": "forward",
    "format": "mxfp4",
    "prepared": False,
    "dtype": "fp32",
    "m_sizes": [3, 0, 4, 2],
    "M": 9,
    "N": 72,
    "K": 224,
    "block": (16, 64, 64),
    "group_m": 8,
    "fusion": 0,
    "top_k": 1,
    "seed": 0,
    "ends": False,
    "one_hot": False,
    "wide": False,
    "zero_tail": False,
    "poison": 0,
    "bad_index": False,
    "bad_code": False,
}
BOTH = CODES | {"kernel": "w8a8", "step": 32, "format": "fp8_block", "block": (16, 64, 128), "K": 300}
# What is run, in how many ways: each way has the same bits, and no two of these have.
WAYS: dict[str, list[dict[str, Any]]] = {
    "16 bits": [
        ROWS,
        ROWS | {"block": [32, 32, 64]},
        ROWS | {"block": [64, 16, 16], "persistent": False},
        ROWS | {"tma": True, "block": [16, 32, 128]},
    ],
    "16 bits, 8 of K at a time": [ROWS | {"step": 8}, ROWS | {"step": 8, "block": [32, 32, 64]}],
    "16 bits, gathered": [ROWS | {"fusion": GATHER}, ROWS | {"fusion": GATHER, "block": [32, 32, 64]}],
    "16 bits, an adapter": [ROWS | {"fusion": LOW_RANK}, ROWS | {"fusion": LOW_RANK, "block": [32, 16, 64]}],
    "32 bits": [
        ROWS | {"step": 1},
        ROWS | {"step": 1, "block": [32, 32, 64]},
        ROWS | {"step": 1, "block": [16, 32, 16], "persistent": False},
    ],
    "codes of w": [CODES, CODES | {"block": (32, 128, 128)}, CODES | {"block": (16, 64, 256), "group_m": 1}],
    "codes of w, 8 of K at a time": [CODES | {"step": 8}],
    "codes of w, scattered and weighted": [
        CODES | {"fusion": SCATTER | WEIGHT},
        CODES | {"fusion": SCATTER | WEIGHT, "block": (32, 64, 128)},
    ],
    "codes of 8 bits": [
        CODES | {"format": "fp8_block_a16"},
        CODES | {"format": "fp8_block_a16", "block": (16, 128, 128)},
    ],
    "codes by codes": [BOTH, BOTH | {"block": (32, 128, 128)}, BOTH | {"block": (64, 64, 128), "group_m": 1}],
}


@pytest.mark.slow
def test_variants_of_one_order_have_the_same_bits() -> None:
    """Whatever the tile, of the kernels that Triton's interpreter runs; of another order they are others."""
    cases = [case for cases in WAYS.values() for case in cases]
    done = warm.run([WORKER], stdin=json.dumps(cases), env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    answers = iter(json.loads(done.stdout))
    bits = {name: {next(answers) for _ in cases} for name, cases in WAYS.items()}
    assert {name: len(results) for name, results in bits.items()} == dict.fromkeys(WAYS, 1)
    assert len(set.union(*bits.values())) == len(WAYS)
