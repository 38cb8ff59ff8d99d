"""What a launch of code with silu in its epilogue is told: the descriptor of half of the columns, and flags."""

from __future__ import annotations

import hashlib

import pytest
from cudaconfig import read_launches, words_of

from pretuned.artifacts.records.bundle import TensorMap, Variant
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Op
from pretuned.kernels.contract.config import Config, Loads, Schedule
from pretuned.kernels.contract.registry import arguments, boxes, entry_of
from pretuned.kernels.contract.spec import Spec
from pretuned.kernels.contract.words import RAGGED_SIZES, ragged_strides
from pretuned.runtime.driver import cuda
from pretuned.runtime.driver.descriptors import MAP_BYTES, TensorMaps
from pretuned.runtime.launch import gemm

E, N, K, M = 4, 192, 64, 300
CONFIG = Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)


def record(fusion: Fusion) -> Variant:
    spec = Spec(Op.FORWARD, DType.BF16, CONFIG, fusion=fusion)
    entry = entry_of(spec)
    return Variant(
        entry.name, entry.revision, 1, spec.op, spec.dtype, spec.layout, fusion, 16, 512,
        CONFIG.pairs(), entry.name,
        arguments(spec), tuple(TensorMap(name, 9, box, 3) for name, box in boxes(spec).items()), 384, 220_000, 168,
        0, 0, 4, hashlib.sha256(b"code").digest(),
    )  # fmt: skip


@pytest.mark.parametrize("fusion", [Fusion.SILU, Fusion.SILU | Fusion.GATHER])
def test_y_has_half_of_the_columns_and_flags_are_free_of_silu(monkeypatch: pytest.MonkeyPatch, fusion: Fusion) -> None:
    encoded: dict[tuple[int, ...], tuple[object, ...]] = {}
    words: list[dict[str, int | bytes]] = []
    variant = record(fusion)

    def encode(self: TensorMaps, key: tuple[int, int, int], *rest: object) -> bytes:
        encoded[key] = rest
        return bytes(MAP_BYTES)

    read_launches(monkeypatch, lambda launch: words.append(words_of(variant.arguments, launch)))
    monkeypatch.setattr(TensorMaps, "encode", encode)
    monkeypatch.setattr(cuda, "zeroed", lambda size_bytes, device: 4096)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    kernel = gemm.LoadedKernel(variant, cuda.Function(1, 1, 0, variant.threads, variant.shared_bytes, 1), 132)
    launcher = gemm.row_launcher(
        kernel, columns=N, reduction=K, E=E, w_kn=False, stride_w_e=N * K, stride_w_row=K, m_sizes_step=1,
        fused=gemm.Fused(fusion, 1, 2),
    )  # fmt: skip
    launcher(12288, 20480, 0, x=4096, w=8192, stride_x_m=K, stride_y_m=N // 2, M=M, index=16384, index_end=M)
    assert encoded.pop((8192, 0, 0)) == ((E, N, K), (N * K, K))  # w is whole
    (read,) = words
    assert (read["N"], read["K"], read["E"], read["x_divisor"]) == (N, K, E, 2)
    assert read["flags"] == (1 if Fusion.GATHER in fusion else 0)
    assert ((4096, M, K) in encoded) is (Fusion.GATHER not in fusion)
    assert encoded[12288, 0, N // 2] == ((*RAGGED_SIZES, N // 2), ragged_strides(N // 2))


@pytest.mark.parametrize("w_kn", [False, True])
@pytest.mark.parametrize("fusion", [Fusion.LOW_RANK, Fusion.LOW_RANK | Fusion.GATHER])
def test_a_low_rank_part_is_described_by_its_own_columns(
    monkeypatch: pytest.MonkeyPatch, fusion: Fusion, w_kn: bool
) -> None:
    encoded: dict[tuple[int, ...], tuple[object, ...]] = {}
    words: list[dict[str, int | bytes]] = []
    variant, R = record(fusion), 24

    def encode(self: TensorMaps, key: tuple[int, int, int], *rest: object) -> bytes:
        encoded[key] = rest
        return bytes([key[0] >> 12]) * MAP_BYTES

    read_launches(monkeypatch, lambda launch: words.append(words_of(variant.arguments, launch)))
    monkeypatch.setattr(TensorMaps, "encode", encode)
    monkeypatch.setattr(cuda, "zeroed", lambda size_bytes, device: 4096)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    kernel = gemm.LoadedKernel(variant, cuda.Function(1, 1, 0, variant.threads, variant.shared_bytes, 1), 132)
    launcher = gemm.row_launcher(
        kernel, columns=N, reduction=K, E=E, w_kn=w_kn, stride_w_e=N * K, stride_w_row=N if w_kn else K, m_sizes_step=1,
        fused=gemm.Fused(fusion, 1, 2), R=R,
    )  # fmt: skip
    launcher(
        12288, 20480, 0, x=4096, w=8192, stride_x_m=K, stride_y_m=N, M=M, index=16384, index_end=M, low_x=24576,
        low_w=28672,
    )  # fmt: skip
    assert encoded[24576, M, R] == ((M, R), (R,))
    assert encoded[28672, 0, 0] == (((E, R, N), (R * N, N)) if w_kn else ((E, N, R), (N * R, R)))
    (read,) = words
    assert (read["N"], read["K"], read["R"], read["flags"]) == (N, K, R, 1 if Fusion.GATHER in fusion else 0)
    assert (read["low_x"], read["low_w"]) == (bytes([6]) * MAP_BYTES, bytes([7]) * MAP_BYTES)


def test_the_launcher_describes_y_by_its_own_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cuda, "launch_kernel", lambda: None)
    monkeypatch.setattr(gemm, "map_of_rows", lambda _kernel, columns, _stride_at: asked.append(columns))
    for fusion, columns in ((Fusion.SILU, N // 2), (Fusion.NONE, N)):
        variant = record(fusion)
        kernel = gemm.LoadedKernel(variant, cuda.Function(1, 1, 0, variant.threads, variant.shared_bytes, 1), 132)
        gemm.row_launcher(
            kernel, columns=N, reduction=K, E=E, w_kn=False, stride_w_e=N * K, stride_w_row=K, m_sizes_step=1
        )
        assert asked.pop() == columns
