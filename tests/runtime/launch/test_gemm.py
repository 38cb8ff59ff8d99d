"""Arguments of a launch with silu in its epilogue: the descriptor of half of the columns, and flags."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from emulated_driver import EmulatedGpu, emulated

from pretuned.artifacts.records import DType, Fusion, Layout, Op
from pretuned.kernels.entry import RAGGED_SIZES, KernelEntry, ragged_strides
from pretuned.kernels.registry import KERNELS, boxes, refusal
from pretuned.kernels.spec import Config, Loads, Schedule, Spec
from pretuned.runtime.launch import gemm

E, N, K, M = 4, 192, 64, 300
CONFIG = Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    """Whose launches store nothing."""
    with emulated(EmulatedGpu()) as gpu:
        gpu.computes = False
        yield gpu


def load(gpu: EmulatedGpu, fusion: Fusion, w_kn: bool = False) -> gemm.LoadedKernel:
    return gpu.load(Spec(Op.FORWARD, DType.BF16, CONFIG, Layout.KN if w_kn else Layout.NK, fusion))


@pytest.mark.parametrize("fusion", [Fusion.SILU, Fusion.SILU | Fusion.GATHER])
def test_y_has_half_of_the_columns_and_flags_are_free_of_silu(gpu: EmulatedGpu, fusion: Fusion) -> None:
    launcher = gemm.product_launcher(load(gpu, fusion), N=N, K=K, E=E, m_sizes_step=1, fused=gemm.Fused(fusion, 1, 2))
    launcher(12288, 20480, 0, x=4096, w=8192, stride_x_m=K, stride_y_m=N // 2, M=M, index=16384, index_end=M)
    (launch,) = gpu.launches
    read, encoded = launch.words, launch.descriptors
    assert encoded["w"] == (8192, (E, N, K), (N * K, K))  # w is whole
    assert (read["N"], read["K"], read["E"], read["x_divisor"]) == (N, K, E, 2)
    assert read["flags"] == (1 if Fusion.GATHER in fusion else 0)
    assert ("x" in encoded) is (Fusion.GATHER not in fusion)
    assert encoded["y_map"][:2] == (12288, (*RAGGED_SIZES, N // 2))
    assert encoded["y_map"][2] == tuple(ragged_strides(N // 2))


@pytest.mark.parametrize("w_kn", [False, True])
@pytest.mark.parametrize("fusion", [Fusion.LOW_RANK, Fusion.LOW_RANK | Fusion.GATHER])
def test_a_low_rank_part_is_described_by_its_own_columns(gpu: EmulatedGpu, fusion: Fusion, w_kn: bool) -> None:
    R = 24
    launcher = gemm.product_launcher(
        load(gpu, fusion, w_kn), N=N, K=K, E=E, m_sizes_step=1, fused=gemm.Fused(fusion, 1, 2), R=R
    )
    launcher(
        12288,
        20480,
        0,
        x=4096,
        w=8192,
        stride_x_m=K,
        stride_y_m=N,
        M=M,
        index=16384,
        index_end=M,
        low_x=24576,
        low_w=28672,
    )
    (launch,) = gpu.launches
    read, encoded = launch.words, launch.descriptors
    assert encoded["low_x"] == (24576, (M, R), (R,))
    assert encoded["low_w"] == (28672, *(((E, R, N), (R * N, N)) if w_kn else ((E, N, R), (N * R, R))))
    assert (read["N"], read["K"], read["R"], read["flags"]) == (N, K, R, 1 if Fusion.GATHER in fusion else 0)


def test_an_argument_that_an_entry_declares_is_given(gpu: EmulatedGpu) -> None:
    """A pointer is the call's operand of its name, a number what the entry makes of the others: by name, and bound."""
    config = Config(16, 64, 128, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16)
    kernel = gpu.load(Spec(Op.FORWARD, DType.FP8_CHANNEL_A16, config))
    launcher = gemm.product_launcher(kernel, N=N, K=2 * K, E=E, m_sizes_step=1)
    at = {"y": 12288, "m_sizes": 20480, "x": 4096, "w": 8192, "w_outer": 24576}
    operands = {name: address for name, address in at.items() if name not in ("y", "m_sizes")}
    launcher(at["y"], at["m_sizes"], 0, **operands, stride_x_m=2 * K, stride_y_m=N, M=M)
    run = launcher.bind(stride_x_m=2 * K, stride_y_m=N)
    run(M, 0, *(at.get(name, 0) for name in launcher.operands))
    by_name, bound = gpu.launches
    assert by_name == bound
    words = [bound.words[name] for name in ("y", "w_outer", "stride_outer_e")]
    assert words == [at["y"], at["w_outer"], N]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_each_descriptor_of_a_kernel_has_a_shape(kernel: KernelEntry) -> None:
    """And what it is of: a row of the descriptor's box has as many dimensions."""
    sizes = dict.fromkeys(("N", "K", "E", "R", "w_rows", "stride_w_e", "stride_w_row"), 1024)
    sizes |= {"stride_dw_e": 1024, "stride_dw_row": 1024}
    for tiles, op, dtype, fusion in product(kernel.tiles, kernel.ops, kernel.dtypes, kernel.fusions):
        knobs = {name: tiles.allowed(name)[0] for name in Config._fields}
        spec = Spec(op, dtype, Config(**knobs), fusion=fusion)  # type: ignore[arg-type]
        if refusal(spec):
            continue
        shapes, blocks = kernel.shapes(spec, sizes), boxes(spec)
        for name, box in blocks.items():
            lengths, strides = shapes[name].of(8, 8)
            assert len(lengths) == len(box) == len(strides) + 1 == kernel.ranks[name], name
            assert shapes[name].stride in ("", *kernel.strides, "stride_x_m")
