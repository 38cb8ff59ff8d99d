"""What a launch of code with silu in its epilogue is told: the descriptor of half of the columns, and flags."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_driver import EmulatedGpu, emulated

from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Layout, Op
from pretuned.kernels.contract.config import Config, Loads, Schedule
from pretuned.kernels.contract.spec import Spec
from pretuned.kernels.contract.words import RAGGED_SIZES, ragged_strides
from pretuned.runtime.launch import gemm

E, N, K, M = 4, 192, 64, 300
CONFIG = Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    """Whose launches store nothing."""
    with emulated(EmulatedGpu()) as found:
        found.computes = False
        yield found


def load(gpu: EmulatedGpu, fusion: Fusion, w_kn: bool = False) -> gemm.LoadedKernel:
    return gpu.load(Spec(Op.FORWARD, DType.BF16, CONFIG, Layout.KN if w_kn else Layout.NK, fusion))


@pytest.mark.parametrize("fusion", [Fusion.SILU, Fusion.SILU | Fusion.GATHER])
def test_y_has_half_of_the_columns_and_flags_are_free_of_silu(gpu: EmulatedGpu, fusion: Fusion) -> None:
    launcher = gemm.row_launcher(
        load(gpu, fusion), columns=N, reduction=K, E=E, w_kn=False, stride_w_e=N * K, stride_w_row=K, m_sizes_step=1,
        fused=gemm.Fused(fusion, 1, 2),
    )  # fmt: skip
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
    launcher = gemm.row_launcher(
        load(gpu, fusion, w_kn), columns=N, reduction=K, E=E, w_kn=w_kn, stride_w_e=N * K,
        stride_w_row=N if w_kn else K, m_sizes_step=1, fused=gemm.Fused(fusion, 1, 2), R=R,
    )  # fmt: skip
    launcher(
        12288, 20480, 0, x=4096, w=8192, stride_x_m=K, stride_y_m=N, M=M, index=16384, index_end=M, low_x=24576,
        low_w=28672,
    )  # fmt: skip
    (launch,) = gpu.launches
    read, encoded = launch.words, launch.descriptors
    assert encoded["low_x"] == (24576, (M, R), (R,))
    assert encoded["low_w"] == (28672, *(((E, R, N), (R * N, N)) if w_kn else ((E, N, R), (N * R, R))))
    assert (read["N"], read["K"], read["R"], read["flags"]) == (N, K, R, 1 if Fusion.GATHER in fusion else 0)
