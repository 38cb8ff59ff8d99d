from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton
from compiled import assert_as_shipped, keep_compiled

from pretuned.aot.compile.ptx import cut, fit, rewrites, streamed, written
from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.records import DType, Fusion, Layout, Op
from pretuned.kernels.cost import MAX_SPILL_BYTES
from pretuned.kernels.registry import refusal
from pretuned.kernels.spec import Cache, Config, Loads, Schedule, Spec, TileRows

LOAD = (
    "\t@%p9 cp.async.bulk.tensor.{rank}d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd3, {{%r2, %r4}}], "
    "[%r5];\n"
)


def test_every_load_of_w_gets_the_hint_and_no_other() -> None:
    ptx = LOAD.format(rank=2) + LOAD.format(rank=3) + LOAD.format(rank=3)
    text = streamed(ptx)
    x, *w, end = text.split("\n")
    assert x in ptx
    assert end == ""
    for line in w:
        assert ".mbarrier::complete_tx::bytes.L2::cache_hint [%r1]" in line
        assert line.endswith(", [%r5], 0x12f0000000000000;")
    assert re.sub(r"\.L2::cache_hint|, 0x12f0000000000000", "", text) == ptx


def test_code_that_loads_no_w_or_has_hints_already_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 TMA loads of w"):
        streamed(LOAD.format(rank=2))
    with pytest.raises(ValueError, match="2 have a hint already"):
        streamed(streamed(LOAD.format(rank=3) * 2) + LOAD.format(rank=3))


STORE = "\tcp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%rd1, {%r1, %r2, %r3}], [%r4];\n"


def test_every_store_of_dw_gets_the_hint_and_no_load() -> None:
    load, first, other, end = written(LOAD.format(rank=3) + STORE * 2).split("\n")
    assert load + "\n" == LOAD.format(rank=3)
    assert first == other
    assert ".bulk_group.L2::cache_hint [%rd1, {%r1, %r2, %r3}], [%r4], 0x12f0000000000000;" in first
    assert not end
    with pytest.raises(ValueError, match="0 TMA stores of dw"):
        written(LOAD.format(rank=3))
    with pytest.raises(ValueError, match="1 have a hint already"):
        written(written(STORE))


@pytest.mark.slow
def test_streamed_dw_asks_for_rows_and_marks_its_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Config(
        32, 128, 256, 8, 8, group_m=1, loads=Loads.TMA, schedule=Schedule.COOPERATIVE, cache=Cache.EVICT_FIRST
    )
    assert rewrites(streams) == (written,)
    kept = keep_compiled(monkeypatch)
    spec = Spec(Op.DW, DType.BF16, streams)
    compiled = compile_variant(spec, 90)
    assert_as_shipped(spec, compiled)
    ptx = kept[0].asm["ptx"]
    assert ptx.count("prefetch.global.L2 [") == 2  # x's rows and dy's
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.3d\.global", ptx)) == ptx.count("L2::cache_hint") == 8
    assert compiled.variant.spill_bytes == 0
    assert [name for name, _ in compiled.variant.arguments][5:7] == ["dy_at", "x_at"]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "fusion"), [(Layout.NK, Fusion.NONE), (Layout.KN, Fusion.GATHER)])
def test_a_streamed_variant_is_the_same_code_but_for_the_hints(layout: Layout, fusion: Fusion) -> None:
    plain, hinted = (
        compile_variant(
            Spec(
                Op.FORWARD,
                DType.BF16,
                Config(16, 64, 128, 4, 3, loads=Loads.TMA, schedule=Schedule.TILE, cache=cache),
                layout,
                fusion,
            ),
            90,
        )
        for cache in Cache
    )
    assert hinted.cubin != plain.cubin
    assert hinted.variant.arguments == plain.variant.arguments
    assert hinted.variant.tensor_maps == plain.variant.tensor_maps
    assert (hinted.variant.threads, hinted.variant.shared_bytes) == (plain.variant.threads, plain.variant.shared_bytes)
    again = compile_variant(
        Spec(
            Op.FORWARD, DType.BF16, Config(16, 64, 128, 4, 3, loads=Loads.TMA, schedule=Schedule.TILE), layout, fusion
        ),
        90,
    )
    assert again.cubin == plain.cubin, "the hook is gone after it"


PRODUCT = "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{sums}}}, %rd1, %rd2, p, 1, 1, 0, 1;\n"


def product(columns: int, first: int = 1) -> str:
    return PRODUCT.format(columns=columns, sums=",".join(f"%f{first + i}" for i in range(columns // 2)))


def test_a_product_is_cut_to_192_columns() -> None:
    ptx = "mov.b32 %f1, 0f00000000;\n" + product(256) + "add.f32 %f3, %f1, %f2;\n" + product(256, 129)
    assert cut(ptx) == ptx.replace(product(256), product(192)).replace(product(256, 129), product(192, 129))


@pytest.mark.parametrize(
    ("ptx", "why"),
    [
        ("", "0 products of 0 in the PTX"),
        (product(128), "a product of 128 columns, 192 wanted"),
        (product(256) + product(128), "a product of 128 columns, 192 wanted"),
        (product(256) + product(256).replace("m64", "m16"), "1 products of 2 in the PTX"),
    ],
)
def test_code_of_other_products_is_an_error(ptx: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        cut(ptx)


def test_a_product_of_other_sums_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 64 registers"):
        cut(product(128).replace("n128", "n256"))


FURTHER = "\tshr.u32 %r6, %r5, 4; // products of what is so much further: %r6\n"


def further(ptx: str, register: str) -> str:
    """Return PTX in which each product's right operand, %rd2, is moved by a register."""
    there = f"{{\n\t.reg .b64 right;\n\tcvt.u64.u32 right, {register};\n\tadd.s64 right, right, %rd2;\n\twgmma"
    return ptx.replace("wgmma", there).replace("%rd1, %rd2,", "%rd1, right,").replace(", 1;\n", ", 1;\n\t}\n")


def test_products_are_moved_to_where_the_comment_before_them_says() -> None:
    first, other = product(256) + product(256, 129), product(256, 257)
    ptx = f"head;\n{FURTHER}{first}$L__BB0_1:\nmiddle;\n{FURTHER.replace('%r6', '%r16')}\tadd;\n{other}end;\n"
    cut_one, cut_other = product(192) + product(192, 129), product(192, 257)
    assert cut(ptx) == ptx.replace(first, further(cut_one, "%r6")).replace(other, further(cut_other, "%r16"))


def test_a_product_of_which_nothing_is_said_is_an_error_where_something_is_said_of_others() -> None:
    for ptx in (f"{product(256)}{FURTHER}{product(256)}", f"{FURTHER}{product(256)}$L__BB0_1:\n{product(256)}"):
        with pytest.raises(ValueError, match="not said of all products"):
            cut(ptx)


SAID = "mov.b32 %r8, %r7; // products of %r7 times 16 rows, 3 times at most\n"
LOOP = (
    "$L__BB0_7:                // a loop\n\twait;\n"
    + SAID
    + product(256)
    + "\tadd.s32 %r9, %r9, 1;\n\t@%p3 bra \t$L__BB0_7;\n"
)


def test_a_loop_of_products_is_there_once_for_each_number_of_rows() -> None:
    ptx = "head;\n" + LOOP + "after;\n" + LOOP.replace("BB0_7", "BB0_9").replace("%r7", "%r17") + "end;\n"
    fitted = fit(ptx)
    for name, register in (("$L__BB0_7", "%r7"), ("$L__BB0_9", "%r17")):
        for times in (1, 2, 3):
            start = fitted.index(f"{name}_{times}:\n")
            copy = fitted[start : fitted.index("bra.uni", start)]
            assert product(16 * times) in copy
            assert copy.count("wgmma") == 1
            assert copy.endswith(f"@%p3 bra \t{name}_{times};\n\t"), "it goes on with itself"
        for times in (1, 2):
            assert f"setp.eq.s32 fits, {register}, {times};\n\t@fits bra {name}_{times};\n" in fitted
        assert fitted.count(f"bra.uni {name}_end;") == 3
        assert fitted.index(f"{name}_3:") < min(fitted.index(f"{name}_2:"), fitted.index(f"{name}_1:")), (
            "what is left is all"
        )
    assert fitted.startswith("head;\n$L__BB0_7:\n")
    assert "$L__BB0_7_end:\nafter;\n" in fitted
    assert fitted.endswith("end;\n")


def test_a_loop_of_moved_products_is_there_once_for_each_number_of_rows() -> None:
    fitted = fit(LOOP.replace(SAID, SAID + FURTHER))
    for times in (1, 2, 3):
        start = fitted.index(f"$L__BB0_7_{times}:\n")
        copy = fitted[start : fitted.index("bra.uni", start)]
        assert FURTHER + further(product(16 * times), "%r6") in copy


@pytest.mark.parametrize("columns", [48, 64, 128])
def test_products_may_be_written_of_fewer_columns(columns: int) -> None:
    fitted = fit(LOOP.replace(product(256), product(columns)))
    assert [fitted.count(f"m64n{width}k16") for width in (16, 32, 48)] == [1, 1, 1]
    assert fitted.count("wgmma") == 3


@pytest.mark.parametrize(
    ("ptx", "why"),
    [
        ("", "in a loop of one block"),
        (LOOP.replace(SAID, ""), "in a loop of one block"),
        (LOOP + product(256), "in a loop of one block"),
        (LOOP.replace("\twait;\n", "\twait;\n$L__BB0_8:\n"), "in a loop of one block"),
        (LOOP.replace("\tadd", "$L__BB0_8:\n\tadd"), "in a loop of one block"),
        (LOOP.replace("bra \t$L__BB0_7", "bra \t$L__BB0_6"), "in a loop of one block"),
        (LOOP.replace("add.s32 %r9", "add.s32 %r7"), "%r7, of how many rows the products are, is used in their loop"),
        (LOOP.replace("\tadd", "\t@%p2 mov.b32 %r7, %r5;\n\tadd"), "is used in their loop"),
        (LOOP.replace("\tadd", "\tld.shared.v2.b32 {%r6, %r7}, [at];\n\tadd"), "is used in their loop"),
        (LOOP.replace(product(256), ""), "0 products of 0 in the PTX"),
        (LOOP.replace("n256", "n128"), "a product of 128 columns, 48 wanted, has 128 registers of sums"),
        (LOOP.replace(product(256), product(32)), "a product of 32 columns, 48 wanted"),
        (LOOP.replace("times 16 rows", "times 12 rows"), "no product of 36 columns"),
        (LOOP.replace("3 times at most", "17 times at most"), "no product of 272 columns"),
    ],
)
def test_other_loops_are_an_error(ptx: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        fit(ptx)


FITTED = (
    Config(256, 128, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE, rows=TileRows.FITTED),
    Config(192, 128, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG, rows=TileRows.FITTED),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "op", "fusion"),
    [
        pytest.param(config, op, fusion, marks=pytest.mark.nightly if op is Op.DX or fusion else ())
        for config in FITTED
        for op, fusion in ((Op.FORWARD, Fusion.NONE), (Op.DX, Fusion.NONE), (Op.FORWARD, Fusion.SCATTER))
    ],
    ids=str,
)
def test_a_fitted_variant_has_products_of_every_size(
    op: Op, fusion: Fusion, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each in a loop of its own, all sums in registers; ptxas would say (C75..) that it makes products wait."""
    assert rewrites(config) == (fit,)
    kept = keep_compiled(monkeypatch)
    spec = Spec(op, DType.BF16, config, fusion=fusion)
    compiled = compile_variant(spec, 90)
    assert_as_shipped(spec, compiled)
    ptx = kept[0].asm["ptx"]
    sizes = [int(size) for size in re.findall(r"wgmma\.mma_async\.[\w.]*?m64n(\d+)k16", ptx)]
    turns = 2 if config.schedule is Schedule.PINGPONG else 1
    # 64 deep in steps of 16, by each of two warpgroups
    assert sorted(sizes) == sorted([*range(16, config.block_m + 1, 16)] * 2 * 4 * turns)
    assert compiled.variant.spill_bytes <= MAX_SPILL_BYTES
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d)", ptx)
    loops = 2 * config.block_m // 16
    assert sorted(waits) == sorted(["0"] * 2 + [str(turns)] * loops), "a step behind in each loop, all after them"
    (tmp_path / "one.ptx").write_text(ptx)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    call = [tool, "-v", "--gpu-name=sm_90a", tmp_path / "one.ptx", "-o", tmp_path / "one.cubin"]
    assert "C75" not in subprocess.run(call, capture_output=True, text=True, check=True).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        Spec(Op.FORWARD, DType.BF16, Config(128, 192, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG)),
        *(
            pytest.param(spec, marks=pytest.mark.nightly)
            for spec in (
                Spec(Op.DW, DType.FP16, Config(16, 192, 128, 8, 2, loads=Loads.TMA, schedule=Schedule.PINGPONG)),
                Spec(Op.DX, DType.FP16, Config(128, 192, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG)),
                Spec(
                    Op.FORWARD,
                    DType.BF16,
                    Config(128, 192, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG),
                    fusion=Fusion.SCATTER,
                ),
                Spec(Op.DW, DType.BF16, Config(32, 128, 192, 8, 10, loads=Loads.TMA, schedule=Schedule.PINGPONG)),
            )
        ),
    ],
    ids=str,
)
def test_the_sums_of_a_pingpong_variant_stay_in_registers(spec: Spec) -> None:
    """Without ``cut`` they don't: two of 64 rows of 256 columns are all 256 registers that a thread can have."""
    assert rewrites(spec.config) == (cut,)
    compiled = compile_variant(spec, 90)
    assert compiled.variant.spill_bytes <= MAX_SPILL_BYTES
    if spec.dtype is DType.BF16:  # in fp16 a part of it ships
        assert_as_shipped(spec, compiled)


def test_what_can_be_streamed() -> None:
    def refused(op: Op, config: Config) -> str:
        return refusal(Spec(op, DType.BF16, config._replace(cache=Cache.EVICT_FIRST))) or ""

    tile = Config(16, 64, 128, 4, 3, loads=Loads.TMA, schedule=Schedule.TILE)
    assert not refused(Op.FORWARD, tile)
    assert str(tile._replace(cache=Cache.EVICT_FIRST)).endswith(" tma evict-first")
    of_dw = Config(32, 128, 256, 8, 8, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
    assert not refused(Op.DW, of_dw)
    rows = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
    turns = Config(32, 128, 192, 8, 10, loads=Loads.TMA, schedule=Schedule.PINGPONG)
    plain = Config(32, 128, 256, 8, 4, loads=Loads.TMA)
    for op, config in ((Op.FORWARD, rows), (Op.DX, rows), (Op.FORWARD, of_dw), (Op.DW, plain), (Op.DW, turns)):
        assert "cache is EVICT_FIRST, wanted DEFAULT" in refused(op, config)
    assert refused(Op.FORWARD, Config(16, 64, 128, 4, 3))  # through pointers
