"""Arguments of launches with quantised weights: addresses, descriptors, sizes and the number of programs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulated_driver import EmulatedGpu, Launch
from emulated_kernels import bundle_of, variant_and_code
from host_gpu import Device, Replay, install_candidates_bundle, replays

from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Fusion, Layout, Op, RowOp, Variant
from pretuned.kernels.codes import CODES
from pretuned.kernels.hopper_w4a16 import ZERO_DTYPES, code_layout, zero_bytes
from pretuned.kernels.registry import unlaunchable
from pretuned.kernels.rowops import RowOpSpec
from pretuned.kernels.spec import Config, Loads, Schedule, Spec, TileRows
from pretuned.runtime import ExpertWeights, Lora, grouped_gemm, moe_mlp, reload
from pretuned.runtime.check.call import Rows
from pretuned.runtime.dispatch.pin import KernelPair, Preference
from pretuned.runtime.launch import gemm
from pretuned.runtime.launch.steps import operands_of
from pretuned.runtime.ops.low_rank import LowRank, product
from pretuned.runtime.ops.products import with_low_part

E, N, K, T, TOPK = 4, 256, 384, 40, 3
FEW = Config(16, 64, 128, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16)
MANY = Config(128, 256, 128, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16, rows=TileRows.FITTED)
ZERO = sorted(ZERO_DTYPES, key=lambda dtype: dtype.value)
QUANTISED = [*map(DType, CODES), *ZERO, DType.MXFP8]
SMS = 132


def spec_of(dtype: DType, fusion: Fusion = Fusion.NONE, config: Config = FEW, op: Op = Op.FORWARD) -> Spec:
    return Spec(op, dtype, config, fusion=fusion)


def record(dtype: DType, fusion: Fusion = Fusion.NONE, config: Config = FEW, op: Op = Op.FORWARD) -> Variant:
    return variant_and_code(spec_of(dtype, fusion, config, op))[0]


@pytest.fixture
def driver(device: Device) -> EmulatedGpu:
    """A GPU whose launches store nothing."""
    device.computes = False
    return device


def test_the_records_here_are_ones_that_could_be_launched() -> None:
    for dtype in QUANTISED:
        for fusion in (Fusion.NONE, Fusion.SCATTER):
            assert unlaunchable(record(dtype, fusion)) is None
            assert unlaunchable(record(dtype, fusion, MANY)) is None
        if dtype is not DType.FP8_CHANNEL_A16:
            for fusion in (Fusion.NONE, Fusion.LOW_RANK):
                assert unlaunchable(record(dtype, fusion, MANY, Op.DX)) is None


@pytest.mark.parametrize("config", [FEW, MANY])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_words_of_a_launch(driver: EmulatedGpu, dtype: DType, config: Config) -> None:
    codes, M = code_layout(dtype), 300
    launcher = gemm.product_launcher(
        driver.load(spec_of(dtype, config=config)), N=N, K=K, E=E, m_sizes_step=2, fused=gemm.PLAIN
    )
    words = {
        "x": 4096,
        "w": 8192,
        "w_scale": 12288,
        "w_zero": 14336,
        "w_outer": 16384,
        "stride_x_m": K + 8,
        "stride_y_m": N + 16,
    }
    launcher(20480, 24576, 0, M=M, **words)
    launcher(20480, 24576, 0, M=M, **words)
    blocks = E * (N // 64) * (K // 64)
    wanted = {"x": (4096, (M, K), (K + 8,)), "w": (8192, (blocks * codes.words, 256), (256,))}
    if codes.scale_bytes:
        count = blocks // codes.blocks_per_scale
        wanted["w_scale"] = 12288, (count, codes.scale_bytes), (codes.scale_bytes,)
    if dtype in ZERO:  # by experts and their lines of blocks
        for name, address, part in (
            ("w", 8192, 256),
            ("w_scale", 12288, codes.scale_bytes),
            ("w_zero", 14336, zero_bytes(dtype)),
        ):
            each = K // 64 * codes.words if name == "w" else K // 64 // codes.blocks_per_scale
            sizes = (E, N // 64, each, part)
            wanted[name] = address, sizes, (N // 64 * each * part, each * part, part)
    first, again = driver.launches
    assert first.descriptors == wanted
    assert len(driver.encoded) == 2 * len(wanted)  # and elsewhere: the second launch fills in the address
    assert again == first
    programs, read = first.grid, first.words
    tiles_n = -(-N // config.block_n)
    active = E
    assert programs == min(SMS, ((M - active) // config.block_m + active) * tiles_n)
    for name, value in {
        "M": M,
        "N": N,
        "K": K,
        "E": E,
        "y": 20480,
        "m_sizes": 24576,
        "m_sizes_step": 2,
        "stride_y_m": N + 16,
        "index": 0,
        "row_weights": 0,
        "bias": 0,
        "index_end": 0,
        "flags": 0,
    }.items():
        assert read[name] == value, name
    assert read["counter"]
    own = None if dtype in ZERO or dtype is DType.MXFP8 else 1  # of rows_wna16 alone
    stride = N if codes.scales == "none" else own
    assert read.get("stride_outer_e") == stride
    assert ("w_zero" in read) is (dtype in ZERO)
    assert read.get("w_outer") == (16384 if codes.outer else None)
    assert ("w_scale" in read) is bool(codes.scale_bytes)


@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
def test_the_words_of_a_low_rank_part(driver: EmulatedGpu, op: Op) -> None:
    """low_w has y's columns contiguous where w's rows have, as dX's do. Of a bias the flags say that it is there."""
    M, R, fused = 300, 24, gemm.Fused(Fusion.BIAS)
    kernel = driver.load(spec_of(DType.MXFP4, Fusion.LOW_RANK, MANY, op))
    columns, reduction = (N, K) if op is Op.FORWARD else (K, N)
    launcher = gemm.product_launcher(kernel, N=columns, K=reduction, E=E, m_sizes_step=1, fused=fused, R=R)
    launcher(
        20480,
        24576,
        0,
        M=M,
        x=4096,
        w=8192,
        w_scale=12288,
        w_outer=0,
        w_zero=0,
        bias=16384,
        stride_x_m=reduction,
        stride_y_m=columns,
        low_x=28672,
        low_w=32768,
    )
    (launch,) = driver.launches
    programs, read = launch.grid, launch.words
    assert launch.descriptors["x"] == (4096, (M, reduction), (reduction,))
    assert launch.descriptors["low_x"] == (28672, (M, R), (R,))
    sizes = (E, columns, R) if op is Op.FORWARD else (E, R, columns)
    assert launch.descriptors["low_w"] == (32768, sizes, (sizes[1] * sizes[2], sizes[2]))
    assert (read["N"], read["K"], read["R"], read["bias"], read["flags"]) == (columns, reduction, R, 16384, 8)
    assert programs == min(SMS, ((M - E) // 128 + E) * -(-columns // 256))


@pytest.mark.slow
def test_blocks_of_codes_are_those_that_prepared_tensors_have(driver: EmulatedGpu) -> None:
    """The descriptors' rows are all of the memory and no more."""
    for dtype in QUANTISED:
        w = ExpertWeights.quantize(torch.randn(E, N, K), dtype.value).prepare()
        launcher = gemm.product_launcher(driver.load(spec_of(dtype)), N=N, K=K, E=E, m_sizes_step=1, fused=gemm.PLAIN)
        launcher(16, 16, 0, x=16, w=32, w_scale=48, w_zero=64, w_outer=80, stride_x_m=K, stride_y_m=N, M=8)
        sizes = driver.launches[-1].sizes()
        assert math.prod(sizes["w"]) * 4 == w.codes.nbytes
        scale = w.kernel_scale
        assert (scale is None) is ("w_scale" not in sizes)
        if scale is not None:
            assert math.prod(sizes["w_scale"]) == scale.nbytes
        assert ("w_zero" in sizes) is (w.zero is not None)
        assert w.zero is None or math.prod(sizes["w_zero"]) == w.zero.nbytes


def test_as_many_programs_as_tiles_or_as_fit(driver: EmulatedGpu) -> None:
    launcher = gemm.product_launcher(driver.load(spec_of(DType.MXFP4)), N=N, K=K, E=E, m_sizes_step=1, fused=gemm.PLAIN)
    words = {"x": 16, "w": 16, "w_scale": 16, "w_outer": 0, "stride_x_m": K, "stride_y_m": N}
    for M, wanted in ((1, 4), (2, 8), (4, 16), (100, 40), (100_000, SMS)):
        launcher(16, 16, 0, M=M, **words)
        assert driver.launches[-1].grid == wanted
    with pytest.raises(InputError, match=r"the most rows of .* is 2\^30: split the batch"):
        launcher(16, 16, 0, M=2**30 + 1, **words)


def test_a_reduction_that_is_too_long_is_refused(driver: EmulatedGpu) -> None:
    kernel = driver.load(spec_of(DType.MXFP4))
    with pytest.raises(InputError, match=r"rows_wna16: the longest reduction of .* is 134217600, this is 134217728"):
        gemm.product_launcher(kernel, N=N, K=2**27, E=E, m_sizes_step=1, fused=gemm.PLAIN)


# Whole calls


Use = Callable[[DType], None]


@pytest.fixture
def use(device: Device, driver: EmulatedGpu) -> Use:
    """Has a bundle of a dtype's forward, of prepared codes alone, and the row kernel that gathers."""

    def only(dtype: DType) -> None:
        specs = [spec_of(dtype, fusion) for fusion in (Fusion.NONE, Fusion.SCATTER)]
        device.publish(encode(bundle_of(map(variant_and_code, [*specs, RowOpSpec(RowOp.GATHER, DType.BF16)]))))

    return only


def gathers(driver: EmulatedGpu) -> list[Launch]:
    return [launch for launch in driver.launches if launch.code.op is RowOp.GATHER]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_plain_call(driver: EmulatedGpu, use: Use, dtype: DType) -> None:
    use(dtype)
    w, codes = ExpertWeights.quantize(torch.randn(E, N, K), dtype.value).prepare(), code_layout(dtype)
    x, m_sizes = torch.randn(T, K).bfloat16(), torch.tensor([10, 0, 30, 0], dtype=torch.int32)
    y = grouped_gemm(x, w, m_sizes)
    (launch,) = driver.products
    read = launch.words
    scale, outer = w.kernel_scale, w.outer_scale
    addresses = {name: descriptor[0] for name, descriptor in launch.descriptors.items()}
    assert addresses["x"] == x.data_ptr()
    assert addresses["w"] == w.codes.data_ptr()
    assert addresses.get("w_scale") == (None if scale is None else scale.data_ptr())
    assert addresses.get("w_zero") == (None if w.zero is None else w.zero.data_ptr())
    assert (w.zero is not None) is (dtype in ZERO)
    assert read.get("w_outer") == (outer.data_ptr() if outer is not None else None)
    assert (outer is not None) is codes.outer
    assert (read["y"], read["m_sizes"]) == (y.data_ptr(), m_sizes.data_ptr())
    assert (read["M"], read["N"], read["K"], read["E"]) == (T, N, K, E)
    assert read.get("stride_outer_e", 1) == (N if dtype is DType.FP8_CHANNEL_A16 else 1)
    assert (read["flags"], read["index"], read["m_sizes_step"]) == (0, 0, 1)
    grouped_gemm(x, w, m_sizes)
    assert len(driver.loads) == 1
    assert driver.products[1] == launch._replace(words=launch.words | {"y": driver.products[1].words["y"]})
    assert not gathers(driver)


@pytest.mark.parametrize("wide", [False, True])
def test_a_call_that_scatters(driver: EmulatedGpu, use: Use, wide: bool) -> None:
    use(DType.MXFP4)
    kind = torch.int64 if wide else torch.int32
    w = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare()
    x, bias, weights = torch.randn(T * TOPK, K).bfloat16(), torch.randn(E, N).bfloat16(), torch.rand(T, TOPK)
    index, m_sizes = torch.randperm(T * TOPK).to(kind), torch.full((E,), T * TOPK // E, dtype=kind)
    y = grouped_gemm(
        x,
        w,
        m_sizes,
        topk=TOPK,
        gather_indices=index,
        permute_y=True,
        topk_weights=weights,
        fuse_mul_post=True,
        bias=bias,
    )
    (launch,) = driver.products
    read = launch.words
    assert launch.code.fusion is Fusion.SCATTER
    assert int(read["flags"]) & 15 == 2 | 4 | 8
    step = 2 if wide else 1
    assert (read["m_sizes_step"], read["index_step"], read["index_end"]) == (step, step, T * TOPK)
    assert (read["index"], read["bias"], read["y"]) == (index.data_ptr(), bias.data_ptr(), y.data_ptr())
    held = (ctypes.c_float * weights.numel()).from_address(read["row_weights"])  # type: ignore[arg-type]
    assert list(held) == weights.flatten().tolist()


def test_rows_are_gathered_before_the_product(driver: EmulatedGpu, use: Use) -> None:
    use(DType.MXFP4)
    w = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare()
    x = torch.randn(T, K).bfloat16()
    index, m_sizes = torch.randperm(T * TOPK).to(torch.int32), torch.full((E,), T * TOPK // E, dtype=torch.int32)
    y = grouped_gemm(x, w, m_sizes, topk=TOPK, gather_indices=index, permute_x=True, permute_y=True)
    (moved,) = gathers(driver)
    assert (moved.grid, moved.words["columns"], moved.words["x"]) == (T * TOPK, K, x.data_ptr())
    (launch,) = driver.products
    read = launch.words
    assert launch.code.fusion is Fusion.SCATTER
    assert (read["M"], int(read["flags"]) & 15, read["index"]) == (T * TOPK, 2, index.data_ptr())
    assert read["y"] == y.data_ptr()
    assert launch.descriptors["x"] == (moved.words["out"], (T * TOPK, K), (K,))
    assert moved.words["out"] != x.data_ptr()


def test_a_preference_is_asked_for_and_leaves_rows_to_be_gathered_before(device: Device, driver: EmulatedGpu) -> None:
    """The pair that tuning on demand has returned: by which config, and nothing else, the kernel is to be."""
    specs = [spec_of(DType.MXFP4, fusion, config) for fusion in (Fusion.NONE, Fusion.SCATTER) for config in (FEW, MANY)]
    device.publish(encode(bundle_of(map(variant_and_code, [*specs, RowOpSpec(RowOp.GATHER, DType.BF16)]))))
    w = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare()
    index, m_sizes = torch.randperm(T * TOPK).to(torch.int32), torch.full((E,), T * TOPK // E, dtype=torch.int32)
    x = torch.randn(T, K).bfloat16()
    for wanted in (FEW, MANY):
        preferred = Preference(((Fusion.NONE, wanted),))
        pair = KernelPair(Op.FORWARD, preferred, preferred)
        for first in (True, False):
            driver.launches.clear()
            for _ in range(2):
                grouped_gemm(
                    x[index // TOPK] if not first else x,
                    w,
                    m_sizes,
                    topk=TOPK,
                    gather_indices=index if first else None,
                    permute_x=first,
                    kernel_config_fwd=pair,
                    is_first_gemm=first,
                )
            assert [product.code.config for product in driver.products] == [wanted.pairs()] * 2
            assert len(gathers(driver)) == 2 * first


def test_a_call_that_only_gathers_runs_the_plain_product(driver: EmulatedGpu, use: Use) -> None:
    use(DType.MXFP4)
    w = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare()
    index, m_sizes = torch.randperm(T * TOPK).to(torch.int32), torch.full((E,), T * TOPK // E, dtype=torch.int32)
    grouped_gemm(torch.randn(T, K).bfloat16(), w, m_sizes, topk=TOPK, gather_indices=index, permute_x=True)
    (launch,) = driver.products
    read = launch.words
    assert len(gathers(driver)) == 1
    assert launch.code.fusion is Fusion.NONE
    assert (int(read["flags"]) & 15, read["index"], read["index_end"]) == (0, 0, 0)


def test_weights_that_do_not_fit_and_other_calls_stay_torch_s(driver: EmulatedGpu, use: Use) -> None:
    use(DType.MXFP4)
    large = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4")
    large.scale[0, 0, 0] = 129
    m_sizes = torch.full((E,), T // E, dtype=torch.int32)
    for w, x in (
        (large, torch.randn(T, K).bfloat16()),
        (ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare(), torch.randn(T, K).half()),
        (ExpertWeights.quantize(torch.randn(E, N, K), "int4_g32_zp").prepare(), torch.randn(T, K).bfloat16()),
    ):
        y = grouped_gemm(x, w, m_sizes)
        assert not driver.products
        assert bool(torch.isfinite(y).all())


def test_calls_that_come_again_are_replayed_of_prepared_weights(driver: EmulatedGpu, use: Use) -> None:
    use(DType.MXFP4)
    replayed: list[int] = []
    w = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare()
    index, m_sizes = torch.randperm(T * TOPK).to(torch.int32), torch.full((E,), T * TOPK // E, dtype=torch.int32)
    x, sorted_x = torch.randn(T, K).bfloat16(), torch.randn(T * TOPK, K).bfloat16()

    def plain() -> torch.Tensor:
        return grouped_gemm(sorted_x, w, m_sizes)

    def gathered() -> torch.Tensor:
        return grouped_gemm(x, w, m_sizes, topk=TOPK, gather_indices=index, permute_x=True, permute_y=True)

    with replays(lambda call: replayed.append(call.M)):
        for call in (plain, gathered):
            replayed.clear()
            call()  # written down
            assert replayed == []
            first = driver.products[-1].words
            y = call()
            assert replayed == [T * TOPK]
            again = driver.products[-1].words
            same = {name: word for name, word in again.items() if name not in ("y", "x", "y_map")}
            assert same == {name: first[name] for name in same}
            assert again["y"] == y.data_ptr()
        replayed.clear()
        w = w.restore()
        plain()  # of the checkpoint's layout there is no kernel here
    assert replayed == []


def test_a_layer_of_quantised_weights_is_replayed(device: Device, driver: EmulatedGpu, use: Use) -> None:
    use(DType.MXFP4)
    ops = (RowOp.GATHER, RowOp.ACTIVATION, RowOp.COMBINE)
    specs = [spec_of(DType.MXFP4, fusion) for fusion in (Fusion.NONE, Fusion.SCATTER)]
    device.publish(encode(bundle_of(map(variant_and_code, [*specs, *(RowOpSpec(op, DType.BF16) for op in ops)]))))
    replayed: list[int] = []
    up = ExpertWeights.quantize(torch.randn(E, 2 * N, K), "mxfp4").prepare()
    down = ExpertWeights.quantize(torch.randn(E, K, N), "mxfp4").prepare()
    ids, weights = torch.randint(0, E, (T, TOPK)), torch.rand(T, TOPK)
    with replays(lambda call: replayed.append(call.M)):
        for tokens in (T, T, T - 1):  # of one bucket
            moe_mlp(torch.randn(tokens, K).bfloat16(), up, down, ids[:tokens], weights[:tokens])
    assert replayed == [T * TOPK, (T - 1) * TOPK]
    words = [product.words for product in driver.products]
    assert len(words) == 6
    assert [read["w"] for read in words[::2]] == [words[0]["w"]] * 3
    assert [read["M"] for read in words] == [T * TOPK] * 4 + [(T - 1) * TOPK] * 2


@pytest.fixture
def adapt(use: Use, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Has products of mxfp4 find code that adds a low-rank part, among the candidates."""
    use(DType.MXFP4)
    specs = [spec_of(DType.MXFP4, Fusion.LOW_RANK, MANY, op) for op in (Op.FORWARD, Op.DX)]
    install_candidates_bundle(monkeypatch, tmp_path, encode(bundle_of(map(variant_and_code, specs))))


@pytest.mark.usefixtures("adapt")
def test_an_adapter_s_columns_are_part_of_a_product_of_codes(driver: EmulatedGpu) -> None:
    """Of gathered rows with a bias, too: they are gathered before."""
    w, M, r = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare(), T * TOPK, 16
    low = LowRank(torch.randn(E, r, K).bfloat16(), torch.randn(E, N, r).bfloat16(), 1.0)
    x, u, bias = torch.randn(T, K).bfloat16(), torch.randn(M, r).bfloat16(), torch.randn(E, N).bfloat16()
    index, m_sizes = torch.randperm(M).to(torch.int32), torch.full((E,), M // E, dtype=torch.int32)
    call = Rows(Op.FORWARD, x, w, m_sizes, Layout.NK, M, index, TOPK, bias=bias, loose=True)
    y = product(call, low, u)
    (launch,) = driver.products
    read = launch.words
    assert (len(gathers(driver)), launch.code.fusion) == (1, Fusion.LOW_RANK)
    assert (read["bias"], read["y"], int(read["flags"]) & 15) == (bias.data_ptr(), y.data_ptr(), 8)
    assert (read["low_x"].address, read["low_w"].address) == (u.data_ptr(), low.B.data_ptr())
    product(call, low, u)
    assert len(driver.products) == 2
    v = torch.randn(M, r).bfloat16()
    product(Rows(Op.DX, torch.randn(M, N).bfloat16(), w, m_sizes, Layout.NK, M), low, v)
    back = driver.products[-1]
    assert back.code.op is Op.DX
    assert (back.words["low_x"].address, back.words["low_w"].address) == (v.data_ptr(), low.A.data_ptr())


@pytest.mark.usefixtures("adapt")
def test_calls_that_two_products_do(driver: EmulatedGpu, use: Use) -> None:
    """Rows of y that move, x or y that starts within 16 bytes, codes not in order in a capture, x to be quantised."""
    w, m_sizes = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4"), torch.full((E,), T // E, dtype=torch.int32)
    u, B = torch.randn(T, 16).bfloat16(), torch.randn(E, N, 16).bfloat16()
    x = torch.randn(T, K).bfloat16()
    y, rest = torch.empty(T, N).bfloat16(), torch.empty(T * N + 1).bfloat16()[1:].view(T, N)
    aligned = Rows(Op.FORWARD, x, w, m_sizes, Layout.NK, T)
    odd = torch.randn(T * K + 1).bfloat16()[1:].view(T, K)
    moved = aligned._replace(scatter=True, index=torch.arange(T))
    for call, to in ((moved, y), (aligned._replace(x=odd), y), (aligned, rest)):
        assert not with_low_part(call, u, B, to)
    assert not with_low_part(aligned, u[:, :4].contiguous(), B[:, :, :4].contiguous(), y)
    held = torch.empty(w.codes.numel() + 1, dtype=torch.int32)[1:].view(w.codes.shape)  # 4 bytes off
    apart = ExpertWeights("mxfp4", held.copy_(w.codes), w.scale)
    assert not with_low_part(aligned._replace(w=apart), u, B, y)
    eight = ExpertWeights.quantize(torch.randn(E, N, K), "fp8_block").prepare()
    assert not with_low_part(aligned._replace(w=eight), u, B, y)
    assert not with_low_part(aligned._replace(w=w.restore()), u, B, y)
    driver.sm = 80  # whose candidates have no such code
    reload()
    assert not with_low_part(aligned._replace(x=x[: T // 2], M=T // 2), u[: T // 2], B, y[: T // 2])
    assert not driver.products


@pytest.mark.usefixtures("adapt")
@pytest.mark.parametrize("zero_tail", [False, True])
def test_a_call_with_an_adapter_is_one_launch_each_way(driver: EmulatedGpu, zero_tail: bool) -> None:
    """``grouped_gemm(lora=)`` of codes: u and B, then v and A, r = 4 columns made 8; rows of no expert are cleared."""
    w, M = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare(), T * TOPK
    x, bias = torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(E, N).bfloat16()
    A, B = torch.randn(E, 4, K).requires_grad_(), torch.randn(E, N, 4).requires_grad_()
    m_sizes = torch.full((E,), (M - 1) // E, dtype=torch.int32)
    y = grouped_gemm(x, w, m_sizes, bias=bias, zero_tail=zero_tail, lora=Lora(A, B, 0.5))
    grads = torch.autograd.grad(y, (x, A, B), torch.randn_like(y))
    assert [grad.shape for grad in grads] == [x.shape, A.shape, B.shape]
    assert [product.kind for product in driver.products] == [(Op.FORWARD, Fusion.LOW_RANK), (Op.DX, Fusion.LOW_RANK)]
    forward, back = (product.words for product in driver.products)
    assert (forward["y"], forward["bias"], forward["R"], forward["M"]) == (y.data_ptr(), bias.data_ptr(), 8, M)
    assert (int(forward["flags"]), int(back["flags"])) == (8 | (16 if zero_tail else 0), 16)
    assert (back["y"], back["bias"], back["R"]) == (grads[0].data_ptr(), 0, 8)


def aligned_as(w: ExpertWeights) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() % 16 for tensor in operands_of(w).values()]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_scales_that_begin_elsewhere_have_no_plan_of_others(driver: EmulatedGpu, use: Use, dtype: DType) -> None:
    use(dtype)
    w = ExpertWeights.quantize(torch.randn(E, N, K), dtype.value).prepare()
    x, m_sizes = torch.randn(T, K).bfloat16(), torch.tensor([10, 0, 30, 0], dtype=torch.int32)
    shifted = torch.empty(w.scale.numel() + 1, dtype=w.scale.dtype)[1:].view(w.scale.shape).copy_(w.scale)
    other = ExpertWeights(w.format, w.codes, shifted, w.zero, w.global_scale)
    replayed: list[Replay] = []
    with replays(replayed.append):
        for _ in range(2):
            grouped_gemm(x, w, m_sizes)
        assert len(replayed) == 1
        grouped_gemm(x, other, m_sizes)
        assert len(replayed) == (2 if aligned_as(other) == aligned_as(w) else 1)
