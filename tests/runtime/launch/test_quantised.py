"""Which kernel a product with quantised weights asks for: of codes in order, or as they lie; and what it is told.

The kernels are made up and the driver is read, on host memory that is said to be a GPU's, as in test_mixed_input.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from cudaconfig import Launch, LaunchConfig, read_launches, words_of

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records.bundle import Variant
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Layout, Op, Problem
from pretuned.artifacts.records.target import Gpu, LocalGpu
from pretuned.kernels.contract.config import Config, Schedule
from pretuned.kernels.contract.launchable import unlaunchable
from pretuned.kernels.contract.registry import arguments, divisibility, entry_of
from pretuned.kernels.contract.spec import Spec
from pretuned.runtime import ExpertWeights, current, grouped_gemm, grouped_gemm_dX
from pretuned.runtime.api import call as api_call
from pretuned.runtime.api import lora_library, torch_library
from pretuned.runtime.check import tensors as check_tensors
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.driver import cuda
from pretuned.runtime.launch import gemm, program, proof, quantised, ready
from pretuned.runtime.launch.mixed_input import mixed_input_launcher, reads_scales_as_they_are
from pretuned.runtime.launch.trials import TrialPlace
from pretuned.runtime.ops import products as ops_products
from pretuned.runtime.ops import routing, zero_rows
from pretuned.runtime.replay import layer_plan, plan, programs

E, N, K, T = 4, 256, 384, 40
TILE = Config(16, 64, 128, 4, 4, schedule=Schedule.TILE)
FORMATS = ["mxfp4", "mxfp8", "nvfp4", "int4_g32", "int4_g32_zp", "fp8_block_a16", "fp8_channel_a16"]


def record(problem: Problem, alignment: int) -> Variant:
    spec = Spec(problem.op, problem.dtype, TILE, problem.layout, problem.fusion, alignment)
    entry = entry_of(spec)
    return Variant(
        entry.name, entry.revision, 1, spec.op, spec.dtype, spec.layout, spec.fusion, alignment, 512, TILE.pairs(),
        entry.name, arguments(spec), (), 128, 40_000, 128, 0, 0, 4, hashlib.sha256(b"code").digest(),
    )  # fmt: skip


def loaded(variant: Variant) -> gemm.LoadedKernel:
    return gemm.LoadedKernel(variant, cuda.Function(1, 1, 0, variant.threads, variant.shared_bytes, 1), 108)


class Gpu80:
    """A GPU of 8.0, whose bundles have the kernel for every GPU alone: what was asked for, and what ran."""

    def __init__(self) -> None:
        self.asked: list[Problem] = []
        self.alignments: list[int] = []
        self.launched: list[tuple[int, dict[str, int | bytes]]] = []
        self._running: Variant | None = None

    def serves(self, problem: Problem) -> bool:
        return problem.op is Op.DX or problem.layout is Layout.STORED

    def kernel(self, problem: Problem, M: int, device: int, aligned: bool, *_: object) -> gemm.LoadedKernel:
        self.asked.append(problem)
        self.alignments.append(16 if aligned else 1)
        self._running = record(problem, self.alignments[-1])
        return loaded(self._running)

    def read(self, launch: Launch) -> None:
        assert self._running is not None
        grid = LaunchConfig.from_address(launch.config).grid_x
        self.launched.append((grid, words_of(self._running.arguments, launch)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu80]:
    found = Gpu80()
    with monkeypatch.context() as patch:
        read_launches(patch, found.read)
        patch.setattr(ready, "_kernel", found.kernel)
        patch.setattr(quantised, "platform_supported", lambda: True)
        patch.setattr(current, "snapshot", dispatch_snapshot.Snapshot(()))
        patch.setattr(dispatch_snapshot.Snapshot, "serves", lambda _self, problem, _gpu: found.serves(problem))
        patch.setattr(zero_rows, "LEAST_BYTES", 0)
        for module in (program, programs, plan, layer_plan):
            patch.setattr(module, "stream_of", lambda _device: 0)
        for module in (routing, zero_rows):
            patch.setattr(module, "current_stream", lambda _device: 0)
        for module in (ops_products, quantised, ready):
            patch.setattr(module, "local_gpu", lambda _device: LocalGpu(80, Gpu("", 108, 1 << 17, 0)))
        patch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
        patch.setattr(check_tensors, "on_gpu", lambda tensor: not tensor.is_meta)
        yield found


def weights(format: str, rows: int = N, columns: int = K) -> ExpertWeights:
    return ExpertWeights.quantize(torch.randn(E, rows, columns), format)


def counts() -> torch.Tensor:
    return torch.full((E,), T // E, dtype=torch.int32)


@pytest.mark.parametrize("format", FORMATS)
def test_a_forward_reads_the_checkpoint_s_codes(gpu: Gpu80, format: str) -> None:
    w, x, m_sizes = weights(format), torch.randn(T, K).bfloat16(), counts()
    before = w.codes.clone().view(torch.uint8)
    y = grouped_gemm(x, w, m_sizes)
    (problem,), ((programs, read),) = gpu.asked, gpu.launched
    assert (problem.op, problem.layout, problem.dtype) == (Op.FORWARD, Layout.STORED, DType(format))
    assert torch.equal(w.codes.view(torch.uint8), before)
    assert w.order == 0
    assert unlaunchable(record(problem, 16)) is None
    scale = w.plain_scale
    assert scale is not None
    assert scale.dtype is (torch.bfloat16 if format.startswith("int4") else w.scale.dtype)
    wanted = {"x": x, "w": w.codes, "w_scale": scale, "y": y, "m_sizes": m_sizes}
    wanted |= {"w_zero": w.zero} if w.zero is not None else {}
    wanted |= {"w_outer": w.global_scale} if w.global_scale is not None else {}
    assert {name: read[name] for name in wanted} == {name: one.data_ptr() for name, one in wanted.items()}
    assert {"w_zero", "w_outer"} & read.keys() == {"w_zero", "w_outer"} & wanted.keys()
    assert [read[name] for name in ("M", "N", "K", "E", "stride_x_m", "stride_y_m")] == [T, N, K, E, K, N]
    assert programs == ((T - E) // 16 + E) * (N // 64)


@pytest.mark.parametrize("format", FORMATS)
def test_dx_reads_them_too(gpu: Gpu80, format: str) -> None:
    """In the kernel's words N is dx's columns, and K the reduction."""
    w, dy = weights(format), torch.randn(T, N).bfloat16()
    dx = grouped_gemm_dX(dy, w, counts())
    (problem,), ((programs, read),) = gpu.asked, gpu.launched
    assert (problem.op, problem.layout, problem.N, problem.K) == (Op.DX, Layout.STORED, N, K)
    assert [read[name] for name in ("M", "N", "K", "x", "y")] == [T, K, N, dy.data_ptr(), dx.data_ptr()]
    assert programs == ((T - E) // 16 + E) * (K // 64)
    assert w.order == 0


def test_rows_are_gathered_on_load(gpu: Gpu80) -> None:
    w, x = weights("mxfp4"), torch.randn(T // 2, K).bfloat16()
    index = torch.randperm(T).int()
    grouped_gemm(x, w, counts(), topk=2, gather_indices=index, permute_x=True)
    (problem,), ((_, read),) = gpu.asked, gpu.launched
    assert problem.fusion is Fusion.GATHER
    assert (read["x"], read["index"], read["x_divisor"]) == (x.data_ptr(), index.data_ptr(), 2)


def test_weights_prepared_for_another_gpu_stay_and_torch_multiplies(gpu: Gpu80) -> None:
    w = weights("mxfp4").prepare()
    before, x = w.codes.clone(), torch.randn(T, K).bfloat16()
    y = grouped_gemm(x, w, counts())
    assert torch.equal(w.codes, before)
    assert not gpu.launched
    wanted = torch.bmm(x.view(E, T // E, K).float(), w.dequantize(torch.float32).mT).flatten(0, 1)
    torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-1)
    grouped_gemm(x, w.restore(), counts())
    assert [one.layout for one in gpu.asked] == [Layout.STORED]


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "int4_g32_zp"])
def test_dx_reads_prepared_codes(gpu: Gpu80, format: str) -> None:
    w = weights(format).prepare()
    grouped_gemm_dX(torch.randn(T, N).bfloat16(), w, counts())
    assert [(one.op, one.layout) for one in gpu.asked] == [(Op.DX, Layout.NK)]
    ((_, read),) = gpu.launched
    assert (read["w"], read["w_scale"]) == (w.codes.data_ptr(), w.plain_scale.data_ptr())  # type: ignore[union-attr]
    assert read.get("w_zero") == (None if w.zero is None else w.zero.data_ptr())


@pytest.mark.parametrize("adapter", [False, True])
def test_an_operator_leaves_codes_as_they_are(gpu: Gpu80, monkeypatch: pytest.MonkeyPatch, adapter: bool) -> None:
    assert {lora_library, torch_library}  # which have the operators
    monkeypatch.setattr(gpu, "serves", lambda _problem: True)
    w, x = weights("mxfp4"), torch.randn(T, K).bfloat16()
    before, parts = w.codes.clone(), (w.format, w.codes, w.scale, w.zero, w.global_scale)
    rest = (counts(), None, None, None, 1, False, False, False, "nk", False)
    for _ in range(1 if adapter else 2):  # (this driver reads a launch as of what was asked for last)
        if adapter:
            low = torch.randn(E, 8, K).bfloat16(), torch.randn(E, N, 8).bfloat16(), 1.0
            torch.ops.pretuned.grouped_gemm_lora(x, *low, None, *parts, None, *rest)
        else:
            torch.ops.pretuned.grouped_gemm_quantised(x, *parts, None, *rest, False, False)
        assert torch.equal(w.codes, before)
    assert Layout.STORED in {one.layout for one in gpu.asked if one.dtype is DType.MXFP4}


@pytest.mark.parametrize("format", FORMATS)
def test_no_call_changes_weights_and_a_line_says_that_prepared_ones_are_faster(
    gpu: Gpu80, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    monkeypatch.setattr(gpu, "serves", lambda _problem: True)
    monkeypatch.setattr(quantised, "_advised", set())
    w = weights(format)
    before = [one.view(torch.uint8).clone() for one in w.tensors().values()]
    at = [one.data_ptr() for one in w.tensors().values()]
    with caplog.at_level("WARNING"):
        for _ in range(2):
            grouped_gemm(torch.randn(T, K).bfloat16(), w, counts())
            grouped_gemm_dX(torch.randn(T, N).bfloat16(), w, counts())
    assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(w.tensors().values(), before, strict=True))
    assert at == [one.data_ptr() for one in w.tensors().values()]
    assert {one.layout for one in gpu.asked} == {Layout.STORED}
    wanted = [
        f"pretuned: {format} weights run on the portable kernel; w = w.prepare(), once after loading, has a faster"
    ]
    assert [line.rpartition(" ")[0] for line in caplog.messages] == (wanted if w.can_be_prepared else [])


def test_weights_that_cannot_be_prepared_are_read_as_they_are_in_silence(
    gpu: Gpu80, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A scale of 2^113 has no room in a kernel's operand."""
    monkeypatch.setattr(gpu, "serves", lambda _problem: True)
    monkeypatch.setattr(quantised, "_advised", set())
    w = weights("mxfp4")
    w.scale[0, 0, 0] = 240
    with caplog.at_level("WARNING"):
        grouped_gemm(torch.randn(T, K).bfloat16(), w, counts())
    assert not caplog.messages
    assert [one.layout for one in gpu.asked] == [Layout.STORED]
    w.scale[0, 0, 0] = 120
    assert w.prepare().order == 1


@pytest.mark.parametrize(("rows", "columns", "alignment"), [(272, 224, 16), (150, 74, 1)])
def test_what_is_no_whole_line_has_code_of_its_own(gpu: Gpu80, rows: int, columns: int, alignment: int) -> None:
    w = weights("mxfp4", rows, columns)
    grouped_gemm(torch.randn(T, columns).bfloat16(), w, counts())
    assert gpu.alignments == [alignment]


def test_other_x_is_torch_s(gpu: Gpu80) -> None:
    y = grouped_gemm(torch.randn(T, K).half(), weights("mxfp4"), counts())
    assert not gpu.asked
    assert bool(torch.isfinite(y).all())


def test_too_much_for_one_launch_is_refused(gpu: Gpu80) -> None:
    kernel = loaded(record(Problem(Op.FORWARD, DType.MXFP4, E, N, K, Layout.STORED), 16))
    assert reads_scales_as_they_are(kernel)
    pack = mixed_input_launcher(kernel, N=N, K=K, E=E, m_sizes_step=1, fused=gemm.PLAIN).pack
    words = {"x": 16, "w": 16, "w_scale": 16, "stride_x_m": K, "stride_y_m": N}
    with pytest.raises(InputError, match=r"make 268435\d\d\d tiles of .*, the most is 67108864: split the batch"):
        pack(M=2**30, **words)


@pytest.mark.parametrize("dtype", [DType.MXFP4, DType.MXFP8, DType.INT4_G64_ZP, DType.NVFP4, DType.FP8_BLOCK_A16])
@pytest.mark.parametrize(
    ("op", "layout", "alignment"),
    [
        (Op.FORWARD, Layout.STORED, 16),
        (Op.FORWARD, Layout.STORED, 1),
        (Op.DX, Layout.STORED, 16),
        (Op.DX, Layout.NK, 16),
    ],
)
def test_codes_of_w_are_proven_in_the_order_and_of_the_sizes_that_their_code_is_for(
    op: Op, layout: Layout, alignment: int, dtype: DType
) -> None:
    problem = Problem(op, dtype, E, N, K, layout)
    place = TrialPlace(torch.device("cpu"), 0, lambda: None)
    on = proof._operands(record(problem, alignment), place)
    assert isinstance(on.w, ExpertWeights)
    assert bool(on.w.order) is (layout is Layout.NK)
    wanted = on.w.dequantize(torch.float32)
    assert torch.equal(on.w_values, wanted.transpose(1, 2) if op is Op.DX else wanted)
    assert on.w_values.shape[1:] == (on.columns, on.reduction)
    multiples = divisibility(Spec(op, dtype, TILE, layout, Fusion.NONE, alignment))
    assert on.columns % multiples.get("N", 1) == on.reduction % multiples.get("K", 1) == 0
    if alignment == 1:  # what no aligned code takes
        assert on.columns % 8
        assert on.reduction % 8
        assert on.x.data_ptr() % 16


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel"])
def test_codes_by_codes_where_that_is_faster(gpu: Gpu80, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """One launch, of x as it is: the kernel quantises it. dX, and weights with ``quantize_x=False``, leave it."""
    asked: list[tuple[Problem, DType, bool]] = []

    def chosen(problem: Problem, other: DType, *_: object, aligned: bool = True) -> gemm.LoadedKernel | None:
        if problem.layout is Layout.NK:
            return None
        asked.append((problem, other, aligned))
        gpu._running = record(problem, 16)
        return loaded(gpu._running)

    monkeypatch.setattr(quantised, "_verdicts_kernel", chosen)
    w, x, m_sizes = weights(format), torch.randn(T, K).bfloat16(), counts()
    y = grouped_gemm(x, w, m_sizes)
    problem, other = Problem(Op.FORWARD, DType(format), E, N, K, Layout.STORED), DType(f"{format}_a16")
    assert asked == [(problem, other, True)]
    assert gpu.asked == []
    ((programs, read),) = gpu.launched
    assert gpu._running is not None
    assert gpu._running.kernel == "w8a8"
    wanted = {"x": x, "w": w.codes, "w_scale": w.scale, "y": y, "m_sizes": m_sizes}
    assert {name: read[name] for name in wanted} == {name: one.data_ptr() for name, one in wanted.items()}
    assert [read[name] for name in ("M", "N", "K", "E", "stride_x_m", "stride_y_m")] == [T, N, K, E, K, N]
    assert programs == ((T - E) // 16 + E) * (N // 64)
    assert w.order == 0
    grouped_gemm_dX(torch.randn(T, N).bfloat16(), w, m_sizes)
    grouped_gemm(x, weights(other.value), m_sizes)
    assert [one.dtype for one in gpu.asked] == [other, other]
    assert len(asked) == 1


@pytest.mark.parametrize("alignment", [16, 1])
@pytest.mark.parametrize("dtype", [DType.FP8_BLOCK, DType.FP8_CHANNEL])
def test_codes_by_codes_are_proven_of_an_x_that_the_kernel_quantises(dtype: DType, alignment: int) -> None:
    """x is given as it is, and its values are those of its codes: off by what quantising loses."""
    place = TrialPlace(torch.device("cpu"), 0, lambda: None)
    on = proof._operands(record(Problem(Op.FORWARD, dtype, E, N, K, Layout.STORED), alignment), place)
    assert isinstance(on.w, ExpertWeights)
    assert (on.w.order, on.w.format, on.scale, on.x.dtype) == (0, dtype.value, None, torch.bfloat16)
    multiples = divisibility(Spec(Op.FORWARD, dtype, TILE, Layout.STORED, Fusion.NONE, alignment))
    assert on.columns % multiples.get("N", 1) == on.reduction % multiples.get("K", 1) == 0
    given, read = on.x.float(), on.x_values
    assert torch.equal(given.isnan().any(1), read.isnan().any(1))
    rows = ~given.isnan().any(1)
    assert 1e-2 < float((given - read)[rows].norm() / given[rows].norm()) < 4e-2
    # Midway between two codes either is right: a division has the one, a product with the inverse the other.
    wide = 128 if dtype is DType.FP8_BLOCK else on.reduction
    groups = torch.nn.functional.pad(given[rows], (0, -on.reduction % wide)).abs().unflatten(1, (-1, wide))
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (codes[1:] + codes[:-1]) / 2
    scaled = (groups / groups.amax(2, keepdim=True) * 448).flatten()
    assert float(((scaled[:, None] - between).abs() / between).min()) > 2**-8


@pytest.mark.parametrize(
    ("sm", "format", "ordered", "forwards", "layout"),
    [
        (80, "fp8_block", False, ["fp8_block_a16"], Layout.STORED),
        (89, "fp8_block", False, ["fp8_block", "fp8_block_a16"], Layout.STORED),
        (89, "fp8_channel", False, ["fp8_channel", "fp8_channel_a16"], Layout.STORED),
        (89, "fp8_block_a16", False, ["fp8_block_a16"], Layout.STORED),
        (90, "fp8_block", True, ["fp8_block", "fp8_block_a16"], Layout.NK),
        (90, "fp8_channel", True, ["fp8_channel", "fp8_channel_a16"], Layout.NK),
        (90, "fp8_channel", False, ["fp8_channel_a16"], Layout.STORED),
        (90, "mxfp4", True, ["mxfp4"], Layout.NK),
        (120, "int4_g32_zp", False, ["int4_g32_zp"], Layout.STORED),
    ],
)  # fmt: skip
def test_what_autotune_measures_of_quantised_weights(
    monkeypatch: pytest.MonkeyPatch, sm: int, format: str, ordered: bool, forwards: list[str], layout: Layout
) -> None:
    """Each kind of forward that may run, and dX; before a forward with prepared weights rows are gathered."""
    monkeypatch.setattr(quantised, "local_gpu", lambda _device: LocalGpu(sm, Gpu("", 100, 1 << 17, 0)))
    w, x = weights(format), torch.randn(T, K).bfloat16()
    w = w.prepare() if ordered else w
    *found, dx = quantised.problems_of(w, x, Fusion.GATHER, Fusion.NONE)
    form = Fusion.NONE if ordered else Fusion.GATHER
    assert found == [Problem(Op.FORWARD, DType(one), E, N, K, layout, form) for one in forwards]
    assert (dx.op, dx.dtype, dx.layout) == (Op.DX, DType(forwards[-1]), layout)
    assert quantised.problems_of(w, x.half(), Fusion.GATHER, Fusion.NONE) == ()


def test_each_dtype_is_tuned_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each the choices are of one model."""
    asked: list[tuple[tuple[Problem, ...], int, int]] = []
    monkeypatch.setattr(api_call, "demand_tuner", lambda: lambda *given: asked.append(given))
    found = tuple(Problem(op, DType(dtype), E, N, K, Layout.STORED) for op, dtype in
                  ((Op.FORWARD, "fp8_block"), (Op.FORWARD, "fp8_block_a16"), (Op.DX, "fp8_block_a16")))  # fmt: skip
    monkeypatch.setattr(api_call, "problems", lambda _call, _x: found)
    on_gpu = SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    api_call._tune(SimpleNamespace(M=T), on_gpu)  # type: ignore[arg-type]
    assert asked == [(found[:1], T, 1), (found[1:], T, 1)]


def test_a_first_call_in_a_capture_derives_scales_as_a_part_of_it(gpu: Gpu80, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at them makes others then: a launch names them without one."""
    monkeypatch.setattr(sys.modules[ExpertWeights.__module__], "is_captured", lambda tensor: True)
    made = weights("int4_g32")
    w = ExpertWeights.int4(made.codes, made.scale.half())
    grouped_gemm(torch.randn(T, K).bfloat16(), w, counts())
    assert w.derived is None
    ((_, read),) = gpu.launched
    assert read["w_scale"] not in (0, w.scale.data_ptr())
