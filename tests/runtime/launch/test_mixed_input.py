"""What launches of products with quantised weights are told: addresses, descriptors, sizes and how many programs.

The kernels are made up and the driver is read; on the CPU, as in test_gemm.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from cudaconfig import Launch, LaunchConfig, read_launches, words_of
from host_gpu import watch_programs

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records.bundle import TensorMap, Variant
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Layout, Op, Problem, RowOp
from pretuned.artifacts.records.target import Gpu, LocalGpu
from pretuned.kernels.codes import CODES
from pretuned.kernels.contract.config import Config, Loads, Schedule, TileRows
from pretuned.kernels.contract.launchable import unlaunchable
from pretuned.kernels.contract.mixed_input import ZERO_DTYPES, code_layout, zero_bytes
from pretuned.kernels.contract.registry import arguments, boxes, entry_of
from pretuned.kernels.contract.spec import Spec
from pretuned.runtime import ExpertWeights, Lora, current, grouped_gemm, moe_mlp
from pretuned.runtime.check import tensors as check_tensors
from pretuned.runtime.check.operands import Rows
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.dispatch.pin import KernelPair, Preference
from pretuned.runtime.driver import cuda
from pretuned.runtime.driver.descriptors import MAP_BYTES, TensorMaps
from pretuned.runtime.launch import gemm, program, quantised, ready
from pretuned.runtime.launch import rowops as launch_rowops
from pretuned.runtime.launch.mixed_input import mixed_input_launcher
from pretuned.runtime.ops import products as ops_products
from pretuned.runtime.ops import routing, zero_rows
from pretuned.runtime.ops.low_rank import LowRank, product
from pretuned.runtime.ops.products import with_low_part
from pretuned.runtime.replay import layer_plan, plan, programs

E, N, K, T, TOPK = 4, 256, 384, 40, 3
FEW = Config(16, 64, 128, 8, 3, loads=Loads.TMA, schedule=Schedule.MIXED_INPUT)
MANY = Config(128, 256, 128, 8, 3, loads=Loads.TMA, schedule=Schedule.MIXED_INPUT, rows=TileRows.FITTED)
ZERO = sorted(ZERO_DTYPES, key=lambda one: one.value)
QUANTISED = [*map(DType, CODES), *ZERO, DType.MXFP8]
_ELEMENTS = {
    "x": (9, 3),
    "w": (2, 0),
    "w_scale": (0, 0),
    "w_zero": (0, 0),
    "low_x": (9, 3),
    "low_w": (9, 3),
}  # CUtensorMapDataType and swizzle
SMS = 132


def record(dtype: DType, fusion: Fusion = Fusion.NONE, config: Config = FEW, op: Op = Op.FORWARD) -> Variant:
    spec = Spec(op, dtype, config, fusion=fusion)
    entry = entry_of(spec)
    return Variant(
        entry.name, entry.revision, 1, spec.op, spec.dtype, spec.layout, fusion, 16, 512, config.pairs(), entry.name,
        arguments(spec),
        tuple(TensorMap(name, _ELEMENTS[name][0], box, _ELEMENTS[name][1]) for name, box in boxes(spec).items()),
        384, 220_000, 168, 0, 0, 4, hashlib.sha256(b"code").digest(),
    )  # fmt: skip


def loaded(variant: Variant) -> gemm.LoadedKernel:
    return gemm.LoadedKernel(variant, cuda.Function(1, 1, 0, variant.threads, variant.shared_bytes, 1), SMS)


class Encoded(NamedTuple):
    """A descriptor that was made: of which argument, at which address, with which sizes and strides in elements."""

    argument: str
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Driver:
    """What the driver was given, of variants that ``running`` names in turn."""

    def __init__(self) -> None:
        self.encoded: list[Encoded] = []
        self.launched: list[tuple[int, dict[str, int | bytes]]] = []
        self.running: list[Variant] = []
        self.gathers: list[tuple[Any, ...]] = []

    def read(self, launch: Launch) -> None:
        programs = LaunchConfig.from_address(launch.config).grid_x
        self.launched.append((programs, words_of(self.running[-1].arguments, launch)))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()

    def encode(self: TensorMaps, key: tuple[int, int, int], sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        found.encoded.append(Encoded(self._plan.argument, key[0], sizes, strides))
        made = f"{self._plan.argument} {key}".encode()
        self.known[key] = made.ljust(MAP_BYTES, b"\0")
        return self.known[key]

    with monkeypatch.context() as patch:
        read_launches(patch, found.read)
        patch.setattr(TensorMaps, "encode", encode)
        patch.setattr(cuda, "zeroed", lambda size_bytes, device: 4096)
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
        yield found


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
def test_the_words_of_a_launch(driver: Driver, dtype: DType, config: Config) -> None:
    variant, codes, M = record(dtype, config=config), code_layout(dtype), 300
    driver.running.append(variant)
    launcher = mixed_input_launcher(
        loaded(variant), N=N, K=K, E=E, m_sizes_step=2, fused=gemm.PLAIN
    )  # fmt: skip
    words = {"x": 4096, "w": 8192, "w_scale": 12288, "w_zero": 14336, "w_outer": 16384, "stride_x_m": K + 8,
             "stride_y_m": N + 16}  # fmt: skip
    launcher(20480, 24576, 0, M=M, **words)
    launcher(20480, 24576, 0, M=M, **words)
    blocks = E * (N // 64) * (K // 64)
    wanted = [
        Encoded("x", 4096, (M, K), (K + 8,)),
        Encoded("w", 8192, (blocks * codes.words, 256), (256,)),
    ]
    if codes.scale_bytes:
        count = blocks // codes.blocks_per_scale
        wanted.append(Encoded("w_scale", 12288, (count, codes.scale_bytes), (codes.scale_bytes,)))
    if dtype in ZERO:  # by experts and their lines of blocks
        for i, (name, address, part) in enumerate((("w", 8192, 256), ("w_scale", 12288, codes.scale_bytes),
                                                   ("w_zero", 14336, zero_bytes(dtype)))):  # fmt: skip
            each = K // 64 * codes.words if name == "w" else K // 64 // codes.blocks_per_scale
            sizes = (E, N // 64, each, part)
            wanted[i + 1 :] = [Encoded(name, address, sizes, (N // 64 * each * part, each * part, part))]
    assert driver.encoded == wanted  # once: the second launch knows them
    (programs, read), again = driver.launched
    assert again == (programs, read)
    tiles_n = -(-N // config.block_n)
    active = E
    assert programs == min(SMS, ((M - active) // config.block_m + active) * tiles_n)
    for name, value in {"M": M, "N": N, "K": K, "E": E, "y": 20480, "m_sizes": 24576, "m_sizes_step": 2,
                        "stride_y_m": N + 16, "index": 0,
                        "row_weights": 0, "bias": 0, "index_end": 0, "flags": 0, "counter": 4096}.items():  # fmt: skip
        assert read[name] == value, name
    own = None if dtype in ZERO or dtype is DType.MXFP8 else 1  # of rows_wna16 alone
    stride = N if codes.scales == "none" else own
    assert read.get("stride_outer_e") == stride
    assert ("w_zero" in read) is (dtype in ZERO)
    assert dtype not in ZERO or bytes(read["w_zero"]).startswith(b"w_zero (14336")  # type: ignore[arg-type]
    assert read.get("w_outer") == (16384 if codes.outer else None)
    assert bytes(read["x"]).startswith(b"x (4096")  # type: ignore[arg-type]
    assert bytes(read["w"]).startswith(b"w (8192")  # type: ignore[arg-type]
    assert ("w_scale" in read) is bool(codes.scale_bytes)


@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
def test_the_words_of_a_low_rank_part(driver: Driver, op: Op) -> None:
    """low_w has y's columns contiguous where w's rows have, as dX's do. Of a bias the flags say that it is there."""
    variant, M, R = record(DType.MXFP4, Fusion.LOW_RANK, MANY, op), 300, 24
    driver.running.append(variant)
    fused = gemm.Fused(Fusion.BIAS)
    launcher = mixed_input_launcher(loaded(variant), N=N, K=K, E=E, m_sizes_step=1, fused=fused, R=R)
    columns, reduction = (N, K) if op is Op.FORWARD else (K, N)
    launcher(
        20480, 24576, 0, M=M, x=4096, w=8192, w_scale=12288, w_outer=0, w_zero=0, bias=16384, stride_x_m=reduction,
        stride_y_m=columns, low_x=28672, low_w=32768,
    )  # fmt: skip
    assert Encoded("x", 4096, (M, reduction), (reduction,)) in driver.encoded
    assert Encoded("low_x", 28672, (M, R), (R,)) in driver.encoded
    sizes = (E, columns, R) if op is Op.FORWARD else (E, R, columns)
    assert Encoded("low_w", 32768, sizes, (sizes[1] * sizes[2], sizes[2])) in driver.encoded
    ((programs, read),) = driver.launched
    assert (read["N"], read["K"], read["R"], read["bias"], read["flags"]) == (columns, reduction, R, 16384, 8)
    assert programs == min(SMS, ((M - E) // 128 + E) * -(-columns // 256))


@pytest.mark.slow
def test_blocks_of_codes_are_those_that_prepared_tensors_have(driver: Driver) -> None:
    """The descriptors' rows are all of the memory and no more."""
    for dtype in QUANTISED:
        w = ExpertWeights.quantize(torch.randn(E, N, K), dtype.value).prepare()
        variant = record(dtype)
        driver.running.append(variant)
        driver.encoded.clear()
        launcher = mixed_input_launcher(loaded(variant), N=N, K=K, E=E, m_sizes_step=1, fused=gemm.PLAIN)
        launcher.pack(x=16, w=32, w_scale=48, w_zero=56, w_outer=64, stride_x_m=K, stride_y_m=N, M=8)
        sizes = {one.argument: one.sizes for one in driver.encoded}
        assert math.prod(sizes["w"]) * 4 == w.codes.nbytes
        scale = w.kernel_scale
        assert (scale is None) is ("w_scale" not in sizes)
        if scale is not None:
            assert math.prod(sizes["w_scale"]) == scale.nbytes
        assert ("w_zero" in sizes) is (w.zero is not None)
        assert w.zero is None or math.prod(sizes["w_zero"]) == w.zero.nbytes


def test_as_many_programs_as_tiles_or_as_fit(driver: Driver) -> None:
    variant = record(DType.MXFP4)
    launcher = mixed_input_launcher(
        loaded(variant), N=N, K=K, E=E, m_sizes_step=1, fused=gemm.PLAIN
    )  # fmt: skip
    driver.running.append(variant)
    words = {"x": 16, "w": 16, "w_scale": 16, "w_outer": 0, "stride_x_m": K, "stride_y_m": N}
    for M, wanted in ((1, 4), (2, 8), (4, 16), (100, 40), (100_000, SMS)):
        launcher(16, 16, 0, M=M, **words)
        assert driver.launched.pop()[0] == wanted
    with pytest.raises(InputError, match=r"the most rows of .* is 2\^30: split the batch"):
        launcher.pack(M=2**30 + 1, **words)


def test_a_reduction_that_is_too_long_is_refused(driver: Driver) -> None:
    variant = record(DType.MXFP4)
    with pytest.raises(InputError, match=r"rows_wna16: the longest reduction of .* is 134217600, this is 134217728"):
        mixed_input_launcher(
            loaded(variant), N=N, K=2**27, E=E, m_sizes_step=1, fused=gemm.PLAIN
        )  # fmt: skip


# Whole calls, on host memory that is said to be a GPU's.


Use = Callable[[DType], None]


@pytest.fixture
def use(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Has calls find a made-up kernel for a dtype's forward, of codes in order alone."""

    def gather(
        rows: int, columns: int, pointers: tuple[int, ...], numbers: tuple[int, ...], _stream: int
    ) -> None:  # fmt: skip
        driver.gathers.append((rows, columns, pointers, numbers))

    def passes(op: RowOp, dtype: DType, device: int, *, aligned: bool) -> Callable[..., None] | None:
        assert dtype is DType.BF16
        return gather if op is RowOp.GATHER else None

    def only(dtype: DType) -> None:
        def kernel(problem: Problem, *_: object) -> gemm.LoadedKernel | None:
            if problem.dtype is not dtype or problem.op is Op.DX or problem.layout is Layout.STORED:
                return None
            driver.running.append(record(dtype, problem.fusion))
            return loaded(driver.running[-1])

        monkeypatch.setattr(ready, "_kernel", kernel)
        monkeypatch.setattr(current, "snapshot", dispatch_snapshot.Snapshot(()))  # without earlier calls

    monkeypatch.setattr(dispatch_snapshot.Snapshot, "serves", lambda *_: True)
    monkeypatch.setattr(launch_rowops, "launcher", passes)
    monkeypatch.setattr(zero_rows, "LEAST_BYTES", 0)
    for module in (program, programs, plan, layer_plan):
        monkeypatch.setattr(module, "stream_of", lambda _device: 0)
    for module in (routing, zero_rows):
        monkeypatch.setattr(module, "current_stream", lambda _device: 0)
    for module in (ops_products, quantised, ready):
        monkeypatch.setattr(module, "local_gpu", lambda _device: LocalGpu(90, Gpu("", SMS, 1 << 17, 0)))
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(check_tensors, "on_gpu", lambda tensor: not tensor.is_meta)
    return only


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_plain_call(driver: Driver, use: Use, dtype: DType) -> None:
    use(dtype)
    w, codes = ExpertWeights.quantize(torch.randn(E, N, K), dtype.value).prepare(), code_layout(dtype)
    x, m_sizes = torch.randn(T, K).bfloat16(), torch.tensor([10, 0, 30, 0], dtype=torch.int32)
    y = grouped_gemm(x, w, m_sizes)
    ((_, read),) = driver.launched
    scale, outer = w.kernel_scale, w.outer_scale
    addresses = {one.argument: one.address for one in driver.encoded}
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
    assert len(driver.running) == 1  # a call like an earlier one chooses nothing
    assert not driver.gathers


@pytest.mark.parametrize("wide", [False, True])
def test_a_call_that_scatters(driver: Driver, use: Use, wide: bool) -> None:
    use(DType.MXFP4)
    kind = torch.int64 if wide else torch.int32
    w = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare()
    x, bias, weights = torch.randn(T * TOPK, K).bfloat16(), torch.randn(E, N).bfloat16(), torch.rand(T, TOPK)
    index, m_sizes = torch.randperm(T * TOPK).to(kind), torch.full((E,), T * TOPK // E, dtype=kind)
    y = grouped_gemm(
        x, w, m_sizes, topk=TOPK, gather_indices=index, permute_y=True, topk_weights=weights, fuse_mul_post=True,
        bias=bias,
    )  # fmt: skip
    ((_, read),) = driver.launched
    assert driver.running[-1].fusion is Fusion.SCATTER
    assert int(read["flags"]) & 15 == 2 | 4 | 8
    step = 2 if wide else 1
    assert (read["m_sizes_step"], read["index_step"], read["index_end"]) == (step, step, T * TOPK)
    assert (read["index"], read["bias"], read["y"]) == (index.data_ptr(), bias.data_ptr(), y.data_ptr())
    held = (ctypes.c_float * weights.numel()).from_address(read["row_weights"])  # type: ignore[arg-type]
    assert list(held) == weights.flatten().tolist()


def test_rows_are_gathered_before_the_product(driver: Driver, use: Use) -> None:
    use(DType.MXFP4)
    w = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare()
    x = torch.randn(T, K).bfloat16()
    index, m_sizes = torch.randperm(T * TOPK).to(torch.int32), torch.full((E,), T * TOPK // E, dtype=torch.int32)
    y = grouped_gemm(x, w, m_sizes, topk=TOPK, gather_indices=index, permute_x=True, permute_y=True)
    ((rows_moved, columns, pointers, _),) = driver.gathers
    assert (rows_moved, columns, pointers[0]) == (T * TOPK, K, x.data_ptr())
    ((_, read),) = driver.launched
    assert driver.running[-1].fusion is Fusion.SCATTER
    assert (read["M"], int(read["flags"]) & 15, read["index"]) == (T * TOPK, 2, index.data_ptr())
    assert read["y"] == y.data_ptr()
    (rows,) = [one for one in driver.encoded if one.argument == "x"]
    assert rows.sizes == (T * TOPK, K)
    assert rows.strides == (K,)
    assert rows.address == pointers[-1] != x.data_ptr()


def test_a_preference_is_asked_for_and_leaves_rows_to_be_gathered_before(
    driver: Driver, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pair that tuning on demand has returned: by which config, and nothing else, the kernel is to be."""
    use(DType.MXFP4)
    asked: list[object] = []
    kernel = ready._kernel
    monkeypatch.setattr(ready, "_kernel", lambda *given: [asked.append(given[4]), kernel(*given)][1])
    w = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare()
    index, m_sizes = torch.randperm(T * TOPK).to(torch.int32), torch.full((E,), T * TOPK // E, dtype=torch.int32)
    pair = KernelPair(Op.FORWARD, Preference(((Fusion.NONE, Config(128, 128, 128, 8, 3)),)))
    x = torch.randn(T, K).bfloat16()
    for first in (True, False):
        for config in (None, pair, pair):
            grouped_gemm(
                x[index // TOPK] if not first else x, w, m_sizes, topk=TOPK, gather_indices=index if first else None,
                permute_x=first, kernel_config_fwd=config, is_first_gemm=first,
            )  # fmt: skip
    assert asked == [None, pair.first, None, pair.second]  # a call like an earlier one asks no more
    assert len(driver.gathers) == 3
    assert len(driver.launched) == 6


def test_a_call_that_only_gathers_runs_the_plain_product(driver: Driver, use: Use) -> None:
    use(DType.MXFP4)
    w = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare()
    index, m_sizes = torch.randperm(T * TOPK).to(torch.int32), torch.full((E,), T * TOPK // E, dtype=torch.int32)
    grouped_gemm(torch.randn(T, K).bfloat16(), w, m_sizes, topk=TOPK, gather_indices=index, permute_x=True)
    ((_, read),) = driver.launched
    assert len(driver.gathers) == 1
    assert driver.running[-1].fusion is Fusion.NONE
    assert (int(read["flags"]) & 15, read["index"], read["index_end"]) == (0, 0, 0)


def test_weights_that_do_not_fit_and_other_calls_stay_torch_s(driver: Driver, use: Use) -> None:
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
        assert not driver.launched
        assert bool(torch.isfinite(y).all())


def test_calls_that_come_again_are_replayed_of_prepared_weights(
    driver: Driver, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(DType.MXFP4)
    replayed: list[int] = []
    watch_programs(monkeypatch, lambda _, M: replayed.append(M))
    w = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare()
    index, m_sizes = torch.randperm(T * TOPK).to(torch.int32), torch.full((E,), T * TOPK // E, dtype=torch.int32)
    x, sorted_x = torch.randn(T, K).bfloat16(), torch.randn(T * TOPK, K).bfloat16()

    def plain() -> torch.Tensor:
        return grouped_gemm(sorted_x, w, m_sizes)

    def gathered() -> torch.Tensor:
        return grouped_gemm(x, w, m_sizes, topk=TOPK, gather_indices=index, permute_x=True, permute_y=True)

    for call in (plain, gathered):
        replayed.clear()
        call()  # written down
        assert replayed == []
        _, first = driver.launched[-1]
        y = call()
        assert replayed == [T * TOPK]
        _, again = driver.launched[-1]
        changes = {"y", "x", *(name for name in again if name.endswith("_map"))}
        same = {name: one for name, one in again.items() if name not in changes}
        assert same == {name: first[name] for name in same}
        assert again["y"] == y.data_ptr()
    replayed.clear()
    w = w.restore()
    plain()  # of the checkpoint's layout there is no kernel here
    assert replayed == []


def test_a_layer_of_quantised_weights_is_replayed(driver: Driver, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use(DType.MXFP4)
    replayed: list[int] = []
    watch_programs(monkeypatch, lambda _, M: replayed.append(M))

    class Pass:
        block, most_experts = 1 << 20, 1 << 16

        def __call__(self, *_: object) -> None: ...

    monkeypatch.setattr(launch_rowops, "launcher", lambda op, *_, **__: None if op is RowOp.SORT_SLOTS else Pass())
    up = ExpertWeights.quantize(torch.randn(E, 2 * N, K), "mxfp4").prepare()
    down = ExpertWeights.quantize(torch.randn(E, K, N), "mxfp4").prepare()
    ids, weights = torch.randint(0, E, (T, TOPK)), torch.rand(T, TOPK)
    for tokens in (T, T, T - 1):  # of one bucket
        moe_mlp(torch.randn(tokens, K).bfloat16(), up, down, ids[:tokens], weights[:tokens])
    assert replayed == [T * TOPK, (T - 1) * TOPK]
    assert len(driver.launched) == 6
    assert [read["w"] for _, read in driver.launched[::2]] == [driver.launched[0][1]["w"]] * 3
    assert [read["M"] for _, read in driver.launched] == [T * TOPK] * 4 + [(T - 1) * TOPK] * 2


@pytest.fixture
def adapt(driver: Driver, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has products of mxfp4 find code that adds a low-rank part."""

    def kernel(problem: Problem, M: int, device: int) -> gemm.LoadedKernel:
        driver.running.append(record(problem.dtype, problem.fusion, MANY, problem.op))
        return loaded(driver.running[-1])

    use(DType.MXFP4)
    monkeypatch.setattr(quantised, "low_rank_kernel", kernel)


@pytest.mark.usefixtures("adapt")
def test_an_adapter_s_columns_are_part_of_a_product_of_codes(driver: Driver) -> None:
    """Of gathered rows with a bias, too: they are gathered before."""
    w, M, r = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare(), T * TOPK, 16
    one = LowRank(torch.randn(E, r, K).bfloat16(), torch.randn(E, N, r).bfloat16(), 1.0)
    x, u, bias = torch.randn(T, K).bfloat16(), torch.randn(M, r).bfloat16(), torch.randn(E, N).bfloat16()
    index, m_sizes = torch.randperm(M).to(torch.int32), torch.full((E,), M // E, dtype=torch.int32)
    call = Rows(Op.FORWARD, x, w, m_sizes, Layout.NK, M, index, TOPK, bias=bias, loose=True)
    y = product(call, one, u)
    ((_, read),) = driver.launched
    assert (len(driver.gathers), driver.running[-1].fusion) == (1, Fusion.LOW_RANK)
    assert (read["bias"], read["y"], int(read["flags"]) & 15) == (bias.data_ptr(), y.data_ptr(), 8)
    addresses = {one.argument: one.address for one in driver.encoded}
    assert (addresses["low_x"], addresses["low_w"]) == (u.data_ptr(), one.B.data_ptr())
    product(call, one, u)
    assert len(driver.running) == 1  # a call like an earlier one chooses nothing
    v = torch.randn(M, r).bfloat16()
    product(Rows(Op.DX, torch.randn(M, N).bfloat16(), w, m_sizes, Layout.NK, M), one, v)
    assert driver.running[-1].op is Op.DX
    addresses = {one.argument: one.address for one in driver.encoded}
    assert (addresses["low_x"], addresses["low_w"]) == (v.data_ptr(), one.A.data_ptr())


@pytest.mark.usefixtures("adapt")
def test_calls_that_two_products_do(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of y that move, x or y that starts within 16 bytes, codes not in order in a capture, x to be quantised."""
    w, m_sizes = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4"), torch.full((E,), T // E, dtype=torch.int32)
    u, B = torch.randn(T, 16).bfloat16(), torch.randn(E, N, 16).bfloat16()
    x = torch.randn(T, K).bfloat16()
    y, rest = torch.empty(T, N).bfloat16(), torch.empty(T * N + 1).bfloat16()[1:].view(T, N)
    aligned = Rows(Op.FORWARD, x, w, m_sizes, Layout.NK, T)
    odd = torch.randn(T * K + 1).bfloat16()[1:].view(T, K)
    moved = replace(aligned, scatter=True, index=torch.arange(T))
    for call, to in ((moved, y), (replace(aligned, x=odd), y), (aligned, rest)):
        assert not with_low_part(call, u, B, to)
    assert not with_low_part(aligned, u[:, :4].contiguous(), B[:, :, :4].contiguous(), y)
    held = torch.empty(w.codes.numel() + 1, dtype=torch.int32)[1:].view(w.codes.shape)  # 4 bytes off
    apart = ExpertWeights("mxfp4", held.copy_(w.codes), w.scale)
    assert not with_low_part(replace(aligned, w=apart), u, B, y)
    eight = ExpertWeights.quantize(torch.randn(E, N, K), "fp8_block").prepare()
    assert not with_low_part(replace(aligned, w=eight), u, B, y)
    assert not with_low_part(replace(aligned, w=w.restore()), u, B, y)
    monkeypatch.setattr(quantised, "low_rank_kernel", lambda *_: None)
    assert not with_low_part(replace(aligned, x=x[: T // 2], M=T // 2), u[: T // 2], B, y[: T // 2])
    assert not driver.launched


@pytest.mark.usefixtures("adapt")
@pytest.mark.parametrize("zero_tail", [False, True])
def test_a_call_with_an_adapter_is_one_launch_each_way(driver: Driver, zero_tail: bool) -> None:
    """``grouped_gemm(lora=)`` of codes: u and B, then v and A, r = 4 columns made 8; rows of no expert are cleared."""
    w, M = ExpertWeights.quantize(torch.randn(E, N, K), "mxfp4").prepare(), T * TOPK
    x, bias = torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(E, N).bfloat16()
    A, B = torch.randn(E, 4, K).requires_grad_(), torch.randn(E, N, 4).requires_grad_()
    m_sizes = torch.full((E,), (M - 1) // E, dtype=torch.int32)
    y = grouped_gemm(x, w, m_sizes, bias=bias, zero_tail=zero_tail, lora=Lora(A, B, 0.5))
    grads = torch.autograd.grad(y, (x, A, B), torch.randn_like(y))
    assert [one.shape for one in grads] == [x.shape, A.shape, B.shape]
    assert [(one.op, one.fusion) for one in driver.running] == [(Op.FORWARD, Fusion.LOW_RANK), (Op.DX, Fusion.LOW_RANK)]
    (_, forward), (_, back) = driver.launched
    assert (forward["y"], forward["bias"], forward["R"], forward["M"]) == (y.data_ptr(), bias.data_ptr(), 8, M)
    assert (int(forward["flags"]), int(back["flags"])) == (8 | (16 if zero_tail else 0), 16)
    assert (back["y"], back["bias"], back["R"]) == (grads[0].data_ptr(), 0, 8)
