"""What a launch of code with silu in its epilogue is told: the descriptor of half of the columns, and flags."""

from __future__ import annotations

import hashlib

import pytest

from pretuned.artifacts.records.bundle import TensorMap, Variant
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Op
from pretuned.kernels.contract.config import Config, Loads, Schedule
from pretuned.kernels.contract.registry import arguments, boxes, entry_of
from pretuned.kernels.contract.spec import Spec
from pretuned.kernels.contract.words import RAGGED_SIZES, ragged_strides
from pretuned.runtime.driver import cuda
from pretuned.runtime.driver.block import SIZES
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

    def encode(self: TensorMaps, key: tuple[int, int, int], *rest: object) -> bytes:
        encoded[key] = rest
        return bytes(MAP_BYTES)

    monkeypatch.setattr(cuda, "launch_kernel", lambda: None)
    monkeypatch.setattr(TensorMaps, "encode", encode)
    variant = record(fusion)
    kernel = gemm.LoadedKernel(variant, cuda.Function(1, 1, 0, variant.threads, variant.shared_bytes, 1), 132)
    launcher = gemm.row_launcher(
        kernel, columns=N, reduction=K, E=E, w_kn=False, stride_w_e=N * K, stride_w_row=K, m_sizes_step=1,
        fused=gemm.Fused(fusion, 1, 2),
    )  # fmt: skip
    prepared = launcher.prepare(4096, 8192, K, N // 2, M, 16384, 0, 0, M)
    assert encoded.pop((8192, 0, 0)) == ((E, N, K), (N * K, K))  # w is whole
    columns, reduction, experts, _, _, divisor, flags, _ = SIZES.unpack_from(prepared, 344)
    assert (columns, reduction, experts, divisor) == (N, K, E, 2)
    assert flags == (1 if Fusion.GATHER in fusion else 0)
    assert ((4096, M, K) in encoded) is (Fusion.GATHER not in fusion)
    map_of = gemm._map_of_rows(variant, N // 2)
    assert map_of is not None
    map_of(12288, prepared)
    assert encoded[12288, 0, N // 2] == ((*RAGGED_SIZES, N // 2), ragged_strides(N // 2))


def test_the_launcher_describes_y_by_its_own_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cuda, "launch_kernel", lambda: None)
    monkeypatch.setattr(gemm, "_map_of_rows", lambda _variant, columns: asked.append(columns))
    for fusion, columns in ((Fusion.SILU, N // 2), (Fusion.NONE, N)):
        variant = record(fusion)
        kernel = gemm.LoadedKernel(variant, cuda.Function(1, 1, 0, variant.threads, variant.shared_bytes, 1), 132)
        gemm.row_launcher(
            kernel, columns=N, reduction=K, E=E, w_kn=False, stride_w_e=N * K, stride_w_row=K, m_sizes_step=1
        )
        assert asked.pop() == columns
