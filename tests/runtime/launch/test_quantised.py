"""Which kernel a product with quantised weights asks for: of codes in order, or as they lie; and what it is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from emulated_driver import H200, EmulatedGpu, emulated
from emulated_kernels import DRIVER, bundle_of, variant_and_code
from host_gpu import publish_alone, warnings

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Choice, DType, Fusion, Gpu, Layout, Op, Problem, Source, Variant
from pretuned.kernels.registry import divisibility, unlaunchable
from pretuned.kernels.spec import Config, Loads, Schedule, Spec
from pretuned.runtime import ExpertWeights, grouped_gemm, grouped_gemm_dX, hooks, reload
from pretuned.runtime.api import torch_library
from pretuned.runtime.launch import gemm, quantised, self_test_problems
from pretuned.runtime.launch.self_test_problems import TrialPlace

E, N, K, T = 4, 256, 384, 40
TILE = Config(16, 64, 128, 4, 4, schedule=Schedule.TILE)
FORMATS = ["mxfp4", "mxfp8", "nvfp4", "int4_g32", "int4_g32_zp", "fp8_block_a16", "fp8_channel_a16"]


GATHERS = [Fusion.NONE, Fusion.GATHER]
A100, L40S = Gpu("NVIDIA A100-SXM4-80GB", 108, 81920, DRIVER), Gpu("NVIDIA L40S", 142, 46068, DRIVER)
FEW = Config(16, 64, 128, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16)


def spec_of(problem: Problem, alignment: int) -> Spec:
    return Spec(problem.op, problem.dtype, TILE, problem.layout, problem.fusion, alignment)


def record(problem: Problem, alignment: int) -> Variant:
    return variant_and_code(spec_of(problem, alignment))[0]


class Gpu80(EmulatedGpu):
    """A GPU of 8.0, whose bundle has the portable kernel alone: of dX for both layouts of w, of the forward for one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(A100, 80)
        self.folder, self.computes = folder, False
        self.publish()

    def publish(self, more: Iterable[Spec] = ()) -> None:
        dtypes = dict.fromkeys(DType(format) for format in (*FORMATS, "fp8_block_a16", "fp8_channel_a16"))
        kinds = [(Op.FORWARD, Layout.STORED), (Op.DX, Layout.STORED), (Op.DX, Layout.NK)]
        specs = [
            Spec(op, dtype, TILE, layout, fusion, alignment)
            for op, layout in kinds
            for dtype in dtypes
            for fusion in GATHERS
            for alignment in ((16, 1) if layout is Layout.STORED else (16,))
        ]
        publish_alone(self.folder, bundle_of([variant_and_code(spec, self.sm) for spec in [*specs, *more]], sm=self.sm))

    def is_hopper(self) -> None:
        """Become an H200, whose bundle has a faster kernel for prepared weights, too."""
        self.gpu, self.sm = H200, 90
        self.publish(Spec(Op.FORWARD, DType(format), FEW) for format in FORMATS)

    @property
    def asked(self) -> list[Problem]:
        """Return the launched problems, with the sizes that the launches had."""
        results = []
        for product in self.products:
            N, K = (product.words[name] for name in (("N", "K") if product.code.op is Op.FORWARD else ("K", "N")))
            code = product.code
            results.append(Problem(Op(code.op), code.dtype, product.words["E"], N, K, code.layout, code.fusion))
        return results


@pytest.fixture
def gpu(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu80]:
    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    with emulated(Gpu80(clean_places)) as gpu:
        yield gpu  # type: ignore[misc]


def weights(format: str, rows: int = N, columns: int = K) -> ExpertWeights:
    return ExpertWeights.quantize(torch.randn(E, rows, columns), format)


def counts() -> torch.Tensor:
    return torch.full((E,), T // E, dtype=torch.int32)


@pytest.mark.parametrize("format", FORMATS)
def test_a_forward_reads_the_checkpoint_s_codes(gpu: Gpu80, format: str) -> None:
    w, x, m_sizes = weights(format), torch.randn(T, K).bfloat16(), counts()
    before = w.codes.clone().view(torch.uint8)
    y = grouped_gemm(x, w, m_sizes)
    (problem,), (launch,) = gpu.asked, gpu.products
    programs, read = launch.grid, launch.words
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
    assert {name: read[name] for name in wanted} == {name: tensor.data_ptr() for name, tensor in wanted.items()}
    assert {"w_zero", "w_outer"} & read.keys() == {"w_zero", "w_outer"} & wanted.keys()
    assert [read[name] for name in ("M", "N", "K", "E", "stride_x_m", "stride_y_m")] == [T, N, K, E, K, N]
    assert programs == ((T - E) // 16 + E) * (N // 64)


@pytest.mark.parametrize("format", FORMATS)
def test_dx_reads_them_too(gpu: Gpu80, format: str) -> None:
    """In the kernel's words N is dx's columns, and K the reduction."""
    w, dy = weights(format), torch.randn(T, N).bfloat16()
    dx = grouped_gemm_dX(dy, w, counts())
    (problem,), (launch,) = gpu.asked, gpu.products
    programs, read = launch.grid, launch.words
    assert (problem.op, problem.layout, problem.N, problem.K) == (Op.DX, Layout.STORED, N, K)
    assert [read[name] for name in ("M", "N", "K", "x", "y")] == [T, K, N, dy.data_ptr(), dx.data_ptr()]
    assert programs == ((T - E) // 16 + E) * (K // 64)
    assert w.order == 0


def test_rows_are_gathered_on_load(gpu: Gpu80) -> None:
    w, x = weights("mxfp4"), torch.randn(T // 2, K).bfloat16()
    index = torch.randperm(T).int()
    grouped_gemm(x, w, counts(), topk=2, gather_indices=index, permute_x=True)
    (problem,), (launch,) = gpu.asked, gpu.products
    read = launch.words
    assert problem.fusion is Fusion.GATHER
    assert (read["x"], read["index"], read["x_divisor"]) == (x.data_ptr(), index.data_ptr(), 2)


def test_weights_prepared_for_another_gpu_stay_and_torch_multiplies(gpu: Gpu80) -> None:
    w = weights("mxfp4").prepare()
    before, x = w.codes.clone(), torch.randn(T, K).bfloat16()
    y = grouped_gemm(x, w, counts())
    assert torch.equal(w.codes, before)
    assert not gpu.products
    wanted = torch.bmm(x.view(E, T // E, K).float(), w.dequantize(torch.float32).mT).flatten(0, 1)
    torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-1)
    grouped_gemm(x, w.restore(), counts())
    assert [problem.layout for problem in gpu.asked] == [Layout.STORED]


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "int4_g32_zp"])
def test_dx_reads_prepared_codes(gpu: Gpu80, format: str) -> None:
    w = weights(format).prepare()
    grouped_gemm_dX(torch.randn(T, N).bfloat16(), w, counts())
    assert [(problem.op, problem.layout) for problem in gpu.asked] == [(Op.DX, Layout.NK)]
    (launch,) = gpu.products
    read = launch.words
    assert (read["w"], read["w_scale"]) == (w.codes.data_ptr(), w.plain_scale.data_ptr())  # type: ignore[union-attr]
    assert read.get("w_zero") == (None if w.zero is None else w.zero.data_ptr())


@pytest.mark.parametrize("adapter", [False, True])
def test_an_operator_leaves_codes_as_they_are(gpu: Gpu80, monkeypatch: pytest.MonkeyPatch, adapter: bool) -> None:
    assert torch_library  # which has the operators
    gpu.is_hopper()
    w, x = weights("mxfp4"), torch.randn(T, K).bfloat16()
    before, parts = w.codes.clone(), (w.format, w.codes, w.scale, w.zero, w.global_scale)
    rest = (counts(), None, None, None, 1, False, False, False, "nk", False)
    for _ in range(2):
        if adapter:
            low = torch.randn(E, 8, K).bfloat16(), torch.randn(E, N, 8).bfloat16(), 1.0
            torch.ops.pretuned.grouped_gemm_lora(x, *low, None, *parts, None, *rest)
        else:
            torch.ops.pretuned.grouped_gemm_quantised(x, *parts, None, *rest, False, False)
        assert torch.equal(w.codes, before)
    assert Layout.STORED in {problem.layout for problem in gpu.asked if problem.dtype is DType.MXFP4}


@pytest.mark.parametrize("format", FORMATS)
def test_no_call_changes_weights_and_a_line_says_that_prepared_ones_are_faster(
    gpu: Gpu80, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    gpu.is_hopper()
    quantised._advised.clear()
    w = weights(format)
    before = [tensor.view(torch.uint8).clone() for tensor in w.tensors().values()]
    at = [tensor.data_ptr() for tensor in w.tensors().values()]
    with caplog.at_level("WARNING"):
        for _ in range(2):
            grouped_gemm(torch.randn(T, K).bfloat16(), w, counts())
            grouped_gemm_dX(torch.randn(T, N).bfloat16(), w, counts())
    assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(w.tensors().values(), before, strict=True))
    assert at == [tensor.data_ptr() for tensor in w.tensors().values()]
    assert {problem.layout for problem in gpu.asked} == {Layout.STORED}
    wanted = [
        f"pretuned: {format} weights run on the portable kernel; w = w.prepare(), once after loading, has a faster"
    ]
    assert [line.rpartition(" ")[0] for line in warnings(caplog)] == (wanted if w.can_be_prepared else [])


def test_weights_that_cannot_be_prepared_are_read_as_they_are_in_silence(
    gpu: Gpu80, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A scale of 2^113 has no room in a kernel's operand."""
    gpu.is_hopper()
    quantised._advised.clear()
    w = weights("mxfp4")
    w.scale[0, 0, 0] = 240
    with caplog.at_level("WARNING"):
        grouped_gemm(torch.randn(T, K).bfloat16(), w, counts())
    assert not warnings(caplog)
    assert [problem.layout for problem in gpu.asked] == [Layout.STORED]
    w.scale[0, 0, 0] = 120
    assert w.prepare().order == 1


@pytest.mark.parametrize(("rows", "columns", "alignment"), [(272, 224, 16), (150, 74, 1)])
def test_what_is_no_whole_line_has_code_of_its_own(gpu: Gpu80, rows: int, columns: int, alignment: int) -> None:
    w = weights("mxfp4", rows, columns)
    grouped_gemm(torch.randn(T, columns).bfloat16(), w, counts())
    (launch,) = gpu.products
    spec = Spec(Op.FORWARD, DType.MXFP4, TILE, Layout.STORED, alignment=alignment)
    assert launch.digest == variant_and_code(spec, 80)[0].cubin_sha256


def test_other_x_is_torch_s(gpu: Gpu80) -> None:
    y = grouped_gemm(torch.randn(T, K).half(), weights("mxfp4"), counts())
    assert not gpu.asked
    assert bool(torch.isfinite(y).all())


def test_too_much_for_one_launch_is_refused(gpu: Gpu80) -> None:
    kernel = gpu.load(spec_of(Problem(Op.FORWARD, DType.MXFP4, E, N, K, Layout.STORED), 16))
    launcher = gemm.product_launcher(kernel, N=N, K=K, E=E, m_sizes_step=1)
    assert launcher.plain_scales
    words = {"x": 16, "w": 16, "w_scale": 16, "stride_x_m": K, "stride_y_m": N}
    with pytest.raises(InputError, match=r"make 268435\d\d\d tiles of .*, the most is 67108864: split the batch"):
        launcher(16, 16, 0, M=2**30, **words)


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
def test_codes_of_w_are_tested_in_the_order_and_of_the_sizes_that_their_code_is_for(
    op: Op, layout: Layout, alignment: int, dtype: DType
) -> None:
    problem = Problem(op, dtype, E, N, K, layout)
    place = TrialPlace(torch.device("cpu"), 0, lambda: None)
    on = self_test_problems._operands(record(problem, alignment), place)
    columns, reduction = on.w_values.shape[1:]
    assert isinstance(on.w, ExpertWeights)
    assert bool(on.w.order) is (layout is Layout.NK)
    wanted = on.w.dequantize(torch.float32)
    assert torch.equal(on.w_values, wanted.transpose(1, 2) if op is Op.DX else wanted)
    multiples = divisibility(Spec(op, dtype, TILE, layout, Fusion.NONE, alignment))
    assert columns % multiples.get("N", 1) == reduction % multiples.get("K", 1) == 0
    if alignment == 1:  # what no aligned code takes
        assert columns % 8
        assert reduction % 8
        assert on.x.data_ptr() % 16


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel"])
def test_codes_by_codes_where_that_is_faster(gpu: Gpu80, format: str) -> None:
    """One launch, of x as it is: the kernel quantises it. dX, and weights with ``quantize_x=False``, leave it."""
    problem, other = Problem(Op.FORWARD, DType(format), E, N, K, Layout.STORED), DType(f"{format}_a16")
    gpu.gpu, gpu.sm = L40S, 89  # which multiplies e4m3
    specs = [spec_of(problem, 16), *(Spec(op, other, TILE, Layout.STORED) for op in (Op.FORWARD, Op.DX))]
    times = {problem: (0, 1.0), problem._replace(dtype=other): (1, 1000.0)}
    choices = {
        problem: [Choice(32, index, Source.MEASURED, int(us * 1000), gpu=0)] for problem, (index, us) in times.items()
    }
    publish_alone(gpu.folder, bundle_of([variant_and_code(spec, 89) for spec in specs], choices, sm=89, gpus=[L40S]))
    w, x, m_sizes = weights(format), torch.randn(T, K).bfloat16(), counts()
    y = grouped_gemm(x, w, m_sizes)
    (launch,) = gpu.products
    programs, read = launch.grid, launch.words
    assert launch.code.entry == "w8a8"
    wanted = {"x": x, "w": w.codes, "w_scale": w.scale, "y": y, "m_sizes": m_sizes}
    assert {name: read[name] for name in wanted} == {name: tensor.data_ptr() for name, tensor in wanted.items()}
    assert [read[name] for name in ("M", "N", "K", "E", "stride_x_m", "stride_y_m")] == [T, N, K, E, K, N]
    assert programs == ((T - E) // 16 + E) * (N // 64)
    assert w.order == 0
    grouped_gemm_dX(torch.randn(T, N).bfloat16(), w, m_sizes)
    grouped_gemm(x, weights(other.value), m_sizes)
    assert [problem.dtype for problem in gpu.asked] == [DType(format), other, other]


@pytest.mark.parametrize("alignment", [16, 1])
@pytest.mark.parametrize("dtype", [DType.FP8_BLOCK, DType.FP8_CHANNEL])
def test_codes_by_codes_are_tested_of_an_x_that_the_kernel_quantises(dtype: DType, alignment: int) -> None:
    """x is given as it is, and its values are those of its codes: off by what quantising loses."""
    place = TrialPlace(torch.device("cpu"), 0, lambda: None)
    on = self_test_problems._operands(record(Problem(Op.FORWARD, dtype, E, N, K, Layout.STORED), alignment), place)
    columns, reduction = on.w_values.shape[1:]
    assert isinstance(on.w, ExpertWeights)
    assert (on.w.order, on.w.format, on.scale, on.x.dtype) == (0, dtype.value, None, torch.bfloat16)
    multiples = divisibility(Spec(Op.FORWARD, dtype, TILE, Layout.STORED, Fusion.NONE, alignment))
    assert columns % multiples.get("N", 1) == reduction % multiples.get("K", 1) == 0
    plain, read = on.x.float(), on.x_values
    assert torch.equal(plain.isnan().any(1), read.isnan().any(1))
    rows = ~plain.isnan().any(1)
    assert 1e-2 < float((plain - read)[rows].norm() / plain[rows].norm()) < 4e-2
    # Midway between two codes either is right: a division has the one, a product with the inverse the other.
    wide = 128 if dtype is DType.FP8_BLOCK else reduction
    groups = torch.nn.functional.pad(plain[rows], (0, -reduction % wide)).abs().unflatten(1, (-1, wide))
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
)
def test_what_autotune_measures_of_quantised_weights(
    sm: int, format: str, ordered: bool, forwards: list[str], layout: Layout
) -> None:
    """Each kind of forward that may run, and dX; before a forward with prepared weights rows are gathered."""
    w, x = weights(format), torch.randn(T, K).bfloat16()
    w = w.prepare() if ordered else w
    with emulated(EmulatedGpu(sm=sm)):
        *problems, dx = quantised.problems_of(w, x, Fusion.GATHER, Fusion.NONE)
        assert quantised.problems_of(w, x.half(), Fusion.GATHER, Fusion.NONE) == ()
    form = Fusion.NONE if ordered else Fusion.GATHER
    assert problems == [Problem(Op.FORWARD, DType(name), E, N, K, layout, form) for name in forwards]
    assert (dx.op, dx.dtype, dx.layout) == (Op.DX, DType(forwards[-1]), layout)


def test_each_dtype_is_tuned_by_itself(gpu: Gpu80) -> None:
    """Of each the choices are of one model."""
    gpu.gpu, gpu.sm = L40S, 89
    reload()
    asked: list[tuple[tuple[Problem, ...], int, int]] = []
    hooks.register_tuner(lambda *args: asked.append(args))
    grouped_gemm(torch.randn(T, K).bfloat16(), weights("fp8_block"), counts(), autotune=True)
    result = tuple(
        Problem(op, DType(dtype), E, N, K, Layout.STORED)
        for op, dtype in ((Op.FORWARD, "fp8_block"), (Op.FORWARD, "fp8_block_a16"), (Op.DX, "fp8_block_a16"))
    )
    assert asked == [(result[:1], T, 0), (result[1:], T, 0)]


def test_a_first_call_in_a_capture_derives_scales_as_a_part_of_it(gpu: Gpu80) -> None:
    """Each look at them makes others then: a launch names them without one."""
    gpu.capturing = True
    built = weights("int4_g32")
    w = ExpertWeights.int4(built.codes, built.scale.half())
    grouped_gemm(torch.randn(T, K).bfloat16(), w, counts())
    assert w.derived is None
    (launch,) = gpu.products
    read = launch.words
    assert read["w_scale"] not in (0, w.scale.data_ptr())
