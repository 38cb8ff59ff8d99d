"""Arguments of launches that multiply codes, and of the row kernel before them: addresses, descriptors, sizes.

The kernels are made up and the driver is read; on the CPU, as in test_hopper_w4a16.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from emulated_driver import EmulatedGpu, emulated
from emulated_kernels import variant_and_code

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Fusion, Op, RowOp
from pretuned.kernels.entry import RAGGED_SIZES
from pretuned.kernels.registry import unlaunchable
from pretuned.kernels.rowops import PICKED, USED, RowOpSpec
from pretuned.kernels.spec import Config, Loads, Schedule, Spec, TileRows
from pretuned.runtime import ExpertWeights
from pretuned.runtime.driver.launcher import Launcher
from pretuned.runtime.driver.rowops import RowOpLauncher
from pretuned.runtime.launch import gemm
from pretuned.runtime.launch.quantised import bytes_of_row, quantize_step
from pretuned.runtime.launch.steps import operands_of

E, N, K, SMS = 4, 640, 384, 132
CONFIG = Config(128, 256, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W8A8_BLOCK)
BY_ROW = Config(256, 128, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W8A8_CHANNEL, rows=TileRows.FITTED)
FEW = Config(16, 64, 512, 8, 3, loads=Loads.TMA, schedule=Schedule.W8A8_CHANNEL)


def spec_of(fusion: Fusion = Fusion.NONE, config: Config = CONFIG) -> Spec:
    dtype = DType.FP8_BLOCK if config is CONFIG else DType.FP8_CHANNEL
    return Spec(Op.FORWARD, dtype, config, fusion=fusion)


@pytest.fixture
def driver() -> Iterator[EmulatedGpu]:
    """A GPU whose launches store nothing."""
    with emulated(EmulatedGpu()) as gpu:
        gpu.computes = False
        yield gpu


def launcher(
    driver: EmulatedGpu, fused: gemm.Fused = gemm.PLAIN, fusion: Fusion = Fusion.NONE, config: Config = CONFIG
) -> Launcher:
    return gemm.product_launcher(driver.load(spec_of(fusion, config)), N=N, K=K, E=E, m_sizes_step=2, fused=fused)


def test_the_records_here_are_ones_that_could_be_launched() -> None:
    for config in (CONFIG, BY_ROW, FEW):
        for fusion in (Fusion.NONE, Fusion.SCATTER):
            assert unlaunchable(variant_and_code(spec_of(fusion, config))[0]) is None


@pytest.mark.parametrize("any_address", [True, False])
def test_descriptors_of_tensors_that_move(driver: EmulatedGpu, any_address: bool) -> None:
    """Each launch has its own addresses and rows, also where more than one word of a descriptor tells the address."""
    driver.repeats_addresses = not any_address
    launch, seen = launcher(driver), []
    for M in (301, 64, 301):
        for move in (0, 65536, 1 << 40):
            moved = {"x": 4096 + move, "x_scale": 8192 + move}
            launch(20480 + move, 24576, 0, **moved, w=12288, w_scale=16384, stride_y_m=N + 16, M=M)
            descriptors = driver.launches[-1].descriptors
            assert {name: descriptor[0] for name, descriptor in descriptors.items()} == moved | {
                "w": 12288,
                "y_map": 20480 + move,
            }
            assert descriptors["x"][1] == (M, K)
            seen.append(len(driver.encoded))
    assert seen == ([8, 8, 8, 10, 10, 10, 10, 10, 10] if any_address else [8, 11, 14, 16, 18, 20, 20, 20, 20])


def test_the_words_of_a_launch(driver: EmulatedGpu) -> None:
    M, launch = 301, launcher(driver)
    for _ in range(2):
        launch(20480, 24576, 0, x=4096, x_scale=8192, w=12288, w_scale=16384, stride_y_m=N + 16, M=M)
    launched, again = driver.launches
    assert launched == again
    assert len(driver.encoded) == 8  # and elsewhere, if only the address differs: the second launch fills it in
    programs, read = launched.grid, launched.words
    assert {name: descriptor[:2] for name, descriptor in launched.descriptors.items()} == {
        "x": (4096, (M, K)),
        "w": (12288, (K // 64, E * N // 64, 4, 256)),
        "x_scale": (8192, (K // 128, 304)),
        "y_map": (20480, (*RAGGED_SIZES, N)),
    }
    strides = {name: descriptor[2] for name, descriptor in launched.descriptors.items()}
    assert (strides["x"], strides["x_scale"]) == ((K,), (304,))
    assert strides["w"] == (1024, K // 64 * 1024, 256)
    assert programs == min(SMS, ((M - E) // 128 + E) * 3)
    for name, value in {
        "M": M,
        "N": N,
        "K": K,
        "E": E,
        "y": 20480,
        "m_sizes": 24576,
        "m_sizes_step": 2,
        "stride_y_m": N + 16,
        "w_scale": 16384,
        "flags": 0,
    }.items():
        assert read[name] == value, name
    assert read["counter"]


@pytest.mark.parametrize("config", [BY_ROW, FEW])
def test_the_words_of_a_launch_with_a_scale_a_row(driver: EmulatedGpu, config: Config) -> None:
    """The scales of x are at an address; y has a descriptor where a tile has 64 rows."""
    M, launch = 301, launcher(driver, config=config)
    for _ in range(2):
        launch(20480, 24576, 0, x=4096, x_scale=8196, w=12288, w_scale=16384, stride_y_m=N + 16, M=M)
    launched, again = driver.launches
    assert launched == again
    blocks = (E * N // 64, K // 64 * 4, 256)
    y_map = {"y_map": (20480, (*RAGGED_SIZES, N))} if config is BY_ROW else {}
    wanted = {"x": (4096, (M, K)), "w": (12288, blocks), **y_map}
    assert {name: descriptor[:2] for name, descriptor in launched.descriptors.items()} == wanted
    assert len(driver.encoded) == 2 * len(wanted)  # and elsewhere: the second launch fills in the address
    assert launched.descriptors["w"][2] == (K // 64 * 1024, 256)
    tiles = ((M - E) // config.block_m + E) * -(-N // config.block_n)
    assert launched.grid == min(SMS, tiles)
    read = launched.words
    for name, value in {
        "M": M,
        "N": N,
        "K": K,
        "E": E,
        "y": 20480,
        "x_scale": 8196,
        "w_scale": 16384,
        "stride_y_m": N + 16,
        "flags": 0,
    }.items():
        assert read[name] == value, name
    assert read["counter"]


def test_a_reduction_that_sums_have_no_room_for_is_refused(driver: EmulatedGpu) -> None:
    kernel = driver.load(spec_of(config=BY_ROW))
    with pytest.raises(InputError, match=r"the longest reduction of .* is 32768, this is 32832"):
        gemm.product_launcher(kernel, N=N, K=32832, E=E, m_sizes_step=1, fused=gemm.PLAIN)


def test_a_call_that_scatters(driver: EmulatedGpu) -> None:
    fused = gemm.Fused(Fusion.SCATTER | Fusion.WEIGHT | Fusion.BIAS, 2)
    launch = launcher(driver, fused, Fusion.SCATTER)
    launch(
        20480,
        24576,
        0,
        x=16,
        x_scale=32,
        w=48,
        w_scale=64,
        stride_y_m=N,
        M=8,
        index=80,
        row_weights=96,
        bias=112,
        index_end=8,
    )
    (launched,) = driver.launches
    read = launched.words
    assert int(read["flags"]) & 15 == 2 | 4 | 8
    words = ("index", "row_weights", "bias", "index_end", "index_step")
    assert [read[name] for name in words] == [80, 96, 112, 8, 2]


def test_blocks_of_codes_are_those_that_prepared_tensors_have(driver: EmulatedGpu) -> None:
    """The descriptor's blocks are all of the memory and no more; block (k, n) lies where the order has it."""
    w = ExpertWeights.quantize(torch.randn(E, N, K), "fp8_block").prepare()
    launcher(driver)(128, 256, 0, x=16, x_scale=32, w=48, w_scale=64, stride_y_m=N, M=8)
    _, sizes, strides = driver.launches[-1].descriptors["w"]
    assert sizes[0] * sizes[1] * sizes[2] * sizes[3] * 4 == w.codes.nbytes
    words = w.codes.view(torch.uint8).flatten().view(torch.int32)
    seen = words.as_strided(sizes, (*strides, 1))
    e, nb, kb = 2, 3, 5
    wanted = words.view(E, N // 64, K // 64, 1024)[e, nb, kb]
    assert torch.equal(seen[kb, e * (N // 64) + nb].flatten(), wanted)


def test_blocks_of_codes_with_a_scale_a_row_are_those_that_prepared_tensors_have(driver: EmulatedGpu) -> None:
    w = ExpertWeights.quantize(torch.randn(E, N, K), "fp8_channel").prepare()
    launcher(driver, config=BY_ROW)(128, 256, 0, x=16, x_scale=32, w=48, w_scale=64, stride_y_m=N, M=8)
    _, sizes, strides = driver.launches[-1].descriptors["w"]
    words = w.codes.view(torch.uint8).flatten().view(torch.int32)
    seen, (e, nb, kb) = words.as_strided(sizes, (*strides, 1)), (2, 3, 5)
    assert seen.numel() == words.numel()
    wanted = words.view(E, N // 64, K // 64, 1024)[e, nb, kb]
    assert torch.equal(seen[e * (N // 64) + nb, 4 * kb : 4 * kb + 4].flatten(), wanted)


def test_too_many_rows_are_refused(driver: EmulatedGpu) -> None:
    with pytest.raises(InputError, match=r"the most rows of .* is 2\^30: split the batch"):
        launcher(driver)(16, 16, 0, x=16, x_scale=32, w=48, w_scale=64, stride_y_m=N, M=2**30 + 1)


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_words_of_the_pass(driver: EmulatedGpu, top_k: int) -> None:
    kernel = driver.load(RowOpSpec(RowOp.QUANTIZE, DType.BF16))
    x = torch.empty(5, K, dtype=torch.bfloat16)
    step = quantize_step(
        RowOpLauncher(kernel.variant, kernel.function, RowOp.QUANTIZE),
        x,
        top_k=top_k,
        index_step=2,
        used=(16, USED),
        index="index" if top_k else "",
    )
    at = {"x": 4096, "index": 8192, "": 8192, "bounds": 12288, "codes": 1 << 20}
    step.run(15, 7, *map(at.get, step.operands))
    (launch,) = driver.launches
    flags = USED | (PICKED if top_k else 0)
    wanted = {
        "x": 4096,
        "index": 8192,
        "used": 12288 + 16,
        "codes": 1 << 20,
        "scale": (1 << 20) + 15 * K,
        "M": 15,
        "columns": K,
        "top_k": top_k or 1,
        "index_step": 2,
        "flags": flags,
    }
    assert launch.stream == 7
    assert {name: launch.words[name] for name in wanted} == wanted


def test_codes_and_their_scales_fit_the_memory_that_is_made_for_them() -> None:
    for M in range(1, 9):
        assert M * bytes_of_row(K) >= M * K + (K // 128) * 4 * (-(-M // 4) * 4)
        assert M * bytes_of_row(64) >= M * 64 + 4 * M  # with a scale a row


def test_a_product_of_codes_reads_the_scales_as_they_are() -> None:
    w = ExpertWeights.quantize(torch.randn(E, N, K), "fp8_block").prepare()
    assert operands_of(w)["w_plain_scale"] is w.scale
    tensors = [tensor for tensor in operands_of(w).values() if tensor is not None]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)  # a program tells its tensors apart by that
    as_stored = ExpertWeights.quantize(torch.randn(E, N, K), "fp8_channel")
    tensors = [tensor for tensor in operands_of(as_stored).values() if tensor is not None]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
