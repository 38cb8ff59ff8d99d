"""dW of codes: its entry, the plans' variants, what its launches are told, its estimates, and the code compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from compiled import assert_as_shipped, keep_compiled
from emulated_driver import EmulatedGpu, emulated

from pretuned.aot.compile.triton import compile_variant
from pretuned.aot.plan.families import Pool, row_kernel_specs, to_compile, training_specs, unmeasured_specs
from pretuned.artifacts.records import DType, Layout, Op, Problem, RowOp
from pretuned.kernels import hopper_w8a8_block, registry
from pretuned.kernels.arch import arch_of
from pretuned.kernels.chips import chip_named
from pretuned.kernels.cost import Resources, rejection
from pretuned.kernels.cost_model import estimate_us
from pretuned.kernels.hopper_w8a8_block import ADDS, FP32, WEIGHT_CONFIGS, places_for
from pretuned.kernels.registry import refusal, unlaunchable
from pretuned.kernels.spec import Config, Spec
from pretuned.runtime.launch.gemm import product_launcher

(CONFIG,) = WEIGHT_CONFIGS
SPEC = Spec(Op.DW, DType.FP8_BLOCK, CONFIG)
FORWARD = Problem(Op.FORWARD, DType.FP8_BLOCK, 8, 256, 256)
H200 = chip_named("NVIDIA H200")
# us on an H200 of dW (E, N, K) of M rows, bfloat16 result.
MEASURED = {
    (128, 1536, 2048, 65536): 459.1,
    (128, 1536, 2048, 262144): 1384.9,
    (32, 4096, 7168, 8192): 705.6,
    (32, 4096, 7168, 32768): 1776.9,
    (8, 28672, 4096, 16384): 3285.9,
    (8, 4096, 14336, 65536): 6532.5,
}


@pytest.mark.slow
def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep_compiled(monkeypatch)
    compiled = compile_variant(SPEC, 90)
    assert_as_shipped(SPEC, compiled)
    variant, ptx = compiled.variant, kept[0].asm["ptx"]
    # 128 rows of an expert are four instructions, of the upper rows of a tile and of the lower, of each warpgroup.
    assert len(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", ptx)) == 16
    assert ptx.count("wgmma.mma_async") == 16
    assert variant.spill_bytes <= 8
    assert rejection(variant, arch_of(90)) is None
    assert unlaunchable(variant) is None
    assert registry.undeclared(variant, arch_of(90).limits) is None
    maps = {tensor_map.argument: (tensor_map.element, tensor_map.swizzle) for tensor_map in variant.tensor_maps}
    assert maps == {"dy": (0, 3), "x": (0, 3), "dy_scale": (7, 0), "dw": (9, 3)}


def test_the_entry() -> None:
    assert refusal(SPEC, 90) is None
    assert "has no " in str(refusal(SPEC, 100))
    assert registry.gemm_entry(SPEC).name == "weight_w8a8"
    assert Config.from_pairs(CONFIG.pairs()) == CONFIG
    for changed in (CONFIG._replace(block_m=64), CONFIG._replace(block_k=128), CONFIG._replace(num_stages=5)):
        assert refusal(SPEC._replace(config=changed), 90) is not None


def test_it_knows_the_flags_of_the_contract() -> None:
    pytest.importorskip("triton")
    from pretuned.kernels.hopper_w8a8_block import weight

    assert (weight.ADDS.value, weight.FP32.value) == (ADDS, FP32)


def test_builds_with_new_weights_compile_it() -> None:
    gemms, rows = training_specs([FORWARD], 90)
    assert gemms == (SPEC,)
    along_m = RowOp.QUANTIZE_COLUMNS, RowOp.QUANTIZE_BOTH, RowOp.ACTIVATION_GRAD_CODES
    assert [spec.op for spec in rows] == [*along_m, RowOp.QUANTIZE_BLOCKS]
    pool = Pool(new_weights=True)
    assert unmeasured_specs([FORWARD], 90, pool) == gemms
    assert set(rows) <= set(row_kernel_specs([FORWARD], 90, pool))
    assert {*gemms, *rows} <= set(to_compile([FORWARD], 90, pool))
    assert not {*gemms, *rows} & set(to_compile([FORWARD], 90, Pool()))
    for problem, sm in (
        (FORWARD, 100),
        (FORWARD._replace(dtype=DType.BF16), 90),
        (FORWARD._replace(layout=Layout.STORED), 90),
    ):
        assert training_specs([problem], sm) == ((), ())


@pytest.mark.parametrize(("M", "E", "most"), [(0, 4, 0), (1, 1, 128), (1, 512, 128), (300, 2, 512), (1000, 4, 1408)])
def test_room_for_whole_groups(M: int, E: int, most: int) -> None:
    assert places_for(M, E) == most


def test_there_is_room_for_all_counts() -> None:
    """The worst: as many experts as can be have one row more than whole groups."""
    for M in range(1, 700):
        for E in (1, 2, 3, 130):
            active = min(E, M)
            assert 128 * (active + (M - active) // 128) <= places_for(M, E)


@pytest.fixture
def driver() -> Iterator[EmulatedGpu]:
    """A GPU whose launches store nothing."""
    with emulated(EmulatedGpu()) as gpu:
        gpu.computes = False
        yield gpu


def test_the_words_of_a_launch(driver: EmulatedGpu) -> None:
    E, N, K, M = 4, 640, 384, 1000
    P = places_for(M, E)
    launch = product_launcher(driver.load(SPEC), N=N, K=K, E=E, m_sizes_step=2)
    operands = {"dy": 4096, "x": 8192, "dy_scale": 12288, "x_scale": 16384}
    for _ in range(2):
        launch(20480, 24576, 0, M=M, dw_flags=ADDS | FP32, **operands)
    launched, again = driver.launches
    assert launched == again
    assert {name: descriptor[:3] for name, descriptor in launched.descriptors.items()} == {
        "dy": (4096, (N, P), (P,)),
        "x": (8192, (K, P), (P,)),
        "dy_scale": (12288, (P // 128, N), (N,)),
        "dw": (20480, (E, N, K), (N * K, K)),
    }
    assert launched.grid == min(132, E * (N // 128) * 2)
    wanted = {"M": M, "N": N, "K": K, "E": E, "dw_at": 20480, "m_sizes": 24576, "x_scale": 16384}
    wanted |= {"m_sizes_step": 2, "stride_dw_e": N * K, "stride_dw_row": K, "dw_flags": ADDS | FP32}
    assert {name: launched.words[name] for name in wanted} == wanted
    assert launched.words["counter"]


def test_estimates_are_near_what_was_measured() -> None:
    assert H200 is not None
    for (E, N, K, M), own_us in MEASURED.items():
        resources = Resources(CONFIG, 384, 231864, 168)
        estimate = estimate_us(Problem(Op.DW, DType.FP8_BLOCK, E, N, K), M, resources, H200)
        assert 0.7 < estimate / own_us < 1.4, (E, N, K, M, estimate, own_us)


def test_the_folder_has_it() -> None:
    assert hopper_w8a8_block.WEIGHT_W8A8 in hopper_w8a8_block.ENTRIES
