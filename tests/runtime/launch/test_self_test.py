"""Code that was never run on a GPU's capability: tried before its first use, and left out where it is wrong."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated_kernels
import pytest
import self_testing
import torch
from emulated_driver import EmulatedGpu, Launch, emulated, forget
from emulated_kernels import variant_and_code
from host_gpu import SPECIALIZED
from rowops_in_numpy import PASSES, at
from small_bundles import L40S, ON_A100, ON_H200, ON_L40S, Spec, measured, modelled, write

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import CudaError
from pretuned.artifacts.records import DType, Fusion, Gpu, Layout, LocalGpu, Op, Problem, RowOp, Variant
from pretuned.kernels import hopper_w8a8_block, reference, rowops
from pretuned.kernels.activations import KINDS
from pretuned.kernels.rowops import MAKES_CODES, RowOpSpec
from pretuned.kernels.spec import Config
from pretuned.kernels.spec import Spec as KernelSpec
from pretuned.runtime import explain, grouped_gemm, preload, reload, self_test_results
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.dispatch.snapshot import Snapshot
from pretuned.runtime.driver import cuda
from pretuned.runtime.launch import loader, self_test
from pretuned.runtime.launch.gemm import LoadedKernel, load_kernel
from pretuned.runtime.launch.rowops import launcher

SHIPPED = Path(__file__).parents[3] / "artifacts" / "bundles"
TILE, SMALL = Config(64, 64, 32, 4, 2), Config(16, 64, 64, 4, 2)
E, N, K, M = 4, 8, 12, 20
PROBLEM = Problem(Op.FORWARD, DType.FP32, E, N, K)
CODE = "code of a.msgpack"

every_form = pytest.mark.parametrize(
    ("op", "fusion"),
    [
        *((op, fusion) for op in (Op.FORWARD, Op.DX) for fusion in (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)),
        (Op.FORWARD, Fusion.SILU),
        (Op.FORWARD, Fusion.SILU | Fusion.GATHER),
        (Op.DW, Fusion.NONE),
        *((op, Fusion.LOW_RANK | fusion) for op in (Op.FORWARD, Op.DX) for fusion in (Fusion.NONE, Fusion.GATHER)),
    ],
)


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated(EmulatedGpu()) as gpu:
        yield gpu


def code(
    gpu: EmulatedGpu, op: Op, fusion: Fusion, layout: Layout, alignment: int, config: Config = TILE
) -> LoadedKernel:
    """Of float32; warp-specialised code, and code with silu, is of bf16 and aligned."""
    config = SPECIALIZED if Fusion.SILU in fusion else config
    half = config.schedule.warp_specialized
    spec = KernelSpec(op, DType.BF16 if half else DType.FP32, config, layout, fusion, 16 if half else alignment)
    return gpu.load(spec)


@every_form
@pytest.mark.parametrize(
    ("layout", "alignment", "config"),
    [(Layout.NK, 16, SMALL), (Layout.KN, 16, SPECIALIZED), (Layout.NK, 1, SMALL), (Layout.KN, 1, SMALL)],
)
def test_right_code_is_right(
    op: Op, fusion: Fusion, layout: Layout, alignment: int, config: Config, gpu: EmulatedGpu
) -> None:
    """Against the launches of host_gpu.py, which know nothing of the trial: no right code is ever left out."""
    assert self_test.tried(code(gpu, op, fusion, layout, alignment, config)) is None
    assert len(gpu.launches) >= 2


def last_column(result: int, words: dict[str, int]) -> None:
    """One column too many is stored, in the memory beside y."""
    at(result + 4 * (words["stride_y_m"] - 8), 1)[0] = 1.0


def row_before(result: int, words: dict[str, int]) -> None:
    at(result - 4, 1)[0] = 1.0


def nan_of_another(result: int, words: dict[str, int]) -> None:
    """A NaN leaves its row."""
    at(result, 8)[7] = float("nan")


@every_form
def test_wrong_code_is_found_and_what_it_did_is_reported(op: Op, fusion: Fusion, gpu: EmulatedGpu) -> None:
    kernel = code(gpu, op, fusion, Layout.NK, 16)
    self_testing.spoil(gpu, kernel.variant.cubin_sha256, self_testing.one_element)
    assert "elements are wrong" in str(self_test.tried(kernel))


@pytest.mark.parametrize("op", [Op.FORWARD, Op.DW])
@pytest.mark.parametrize(("spoil", "message"), [(row_before, "[-1, "), (nan_of_another, "is nan, wanted")])
def test_memory_beside_the_result_and_rows_of_nan_are_looked_at(
    op: Op, spoil: Callable[..., None], message: str, gpu: EmulatedGpu
) -> None:
    kernel = code(gpu, op, Fusion.NONE, Layout.NK, 16)
    self_testing.spoil(gpu, kernel.variant.cubin_sha256, spoil)
    assert message in str(self_test.tried(kernel))


def test_what_lies_beside_the_rows_stays_and_is_tested(gpu: EmulatedGpu) -> None:
    kernel = code(gpu, Op.FORWARD, Fusion.NONE, Layout.NK, 16)
    self_testing.spoil(gpu, kernel.variant.cubin_sha256, last_column)
    assert "wanted left as it was" in str(self_test.tried(kernel))


def test_an_expert_without_rows_needs_zeros_in_dw(gpu: EmulatedGpu) -> None:
    """A trial of M rows has one without any."""
    kernel = code(gpu, Op.DW, Fusion.NONE, Layout.NK, 16)

    def leaves(result: int, words: dict[str, int]) -> None:
        at(result + 4 * 264 * 200, 1)[0] = 1e-3  # the second expert's

    self_testing.spoil(gpu, kernel.variant.cubin_sha256, leaves)
    assert "wanted 0 (1 of" in str(self_test.tried(kernel))


def test_dw_of_codes(gpu: EmulatedGpu) -> None:
    (config,) = hopper_w8a8_block.WEIGHT_CONFIGS
    kernel = gpu.load(KernelSpec(Op.DW, DType.FP8_BLOCK, config))
    assert self_test.tried(kernel) is None
    self_testing.spoil(gpu, kernel.variant.cubin_sha256, lambda result, _: self_testing.one_bit(result + 1, {}))
    assert "elements are wrong" in str(self_test.tried(kernel))


def row_kernel(gpu: EmulatedGpu, op: RowOp, alignment: int) -> LoadedKernel:
    dtype = DType.FP32 if op not in MAKES_CODES else DType.BF16
    return gpu.load(RowOpSpec(op, dtype, alignment))


def exchanged(first: int, other: int) -> Callable[[list[int]], list[int]]:
    def changed(words: list[int]) -> list[int]:
        words[first], words[other] = words[other], words[first]
        return words

    return changed


def fixed(place: int, value: float) -> Callable[[list[int]], list[int]]:
    return lambda words: [*words[:place], *struct.unpack("i", struct.pack("f", value)), *words[place + 1 :]]


@pytest.mark.parametrize("op", [RowOp.ACTIVATION, RowOp.ACTIVATION_GRAD])
@pytest.mark.parametrize(
    ("kind", "change"),
    [("swiglu", exchanged(first, other)) for first, other in [(0, 1), (0, 2), (1, 2), (2, 3)]]
    + [("situ", exchanged(2, 3)), ("situ", fixed(3, 0.0)), ("swiglustep", fixed(0, float("inf")))]
    + [("swiglu", fixed(place, value)) for place, value in [(0, 7.0), (1, 1.702), (1, 1.0), (2, 1.0), (2, 0.0)]],
)
def test_an_activation_with_another_number_is_found(
    op: RowOp,
    kind: str,
    change: Callable[[list[int]], list[int]],
    gpu: EmulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that takes a number for another, or has gpt-oss's own, fails its self-test."""
    real = PASSES[op]

    def wrong(of: Any, grid: int, block: int, pointers: Any, numbers: Any) -> None:
        *others, flags, limit, alpha, beta, linear_beta = numbers
        words = [limit, alpha, beta, linear_beta]
        if KINDS[flags & rowops.KIND] == kind:
            words = change(words)
        real(of, grid, block, pointers, (*others, flags, *words))

    monkeypatch.setitem(PASSES, op, wrong)
    assert "elements are wrong" in str(self_test.tried(row_kernel(gpu, op, 16)))


@pytest.mark.parametrize("alignment", [16, 1])
@pytest.mark.parametrize("op", [op for op in RowOp if op not in rowops.WEIGHT_OPS])
def test_passes_over_rows(op: RowOp, alignment: int, gpu: EmulatedGpu) -> None:
    kernel = row_kernel(gpu, op, alignment)
    assert self_test.tried(kernel) is None
    how = self_testing.one_bit if op in MAKES_CODES else self_testing.one_element
    self_testing.spoil(gpu, kernel.variant.cubin_sha256, how)
    assert "elements are wrong" in str(self_test.tried(kernel))


@pytest.fixture
def bf16_by_default() -> Iterator[None]:
    """torch's default dtype while vLLM makes a model in bf16: it is every thread's."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("op", [op for op in RowOp if op not in rowops.WEIGHT_OPS])
def test_row_kernels_are_right_whatever_the_default_dtype(op: RowOp, bf16_by_default: None, gpu: EmulatedGpu) -> None:
    """A right kernel found wrong would be left out for good on this machine."""
    assert self_test.tried(row_kernel(gpu, op, 16)) is None


@pytest.mark.parametrize("spec", rowops.weight_specs(tuple(DType)), ids=str)
def test_kernels_of_weights_are_right_whatever_the_default_dtype(
    spec: RowOpSpec, bf16_by_default: None, gpu: EmulatedGpu
) -> None:
    assert self_test.tried(gpu.load(spec)) is None


@pytest.mark.parametrize("spec", rowops.weight_specs(tuple(DType)), ids=str)
def test_kernels_of_weights(spec: RowOpSpec, gpu: EmulatedGpu) -> None:
    kernel = gpu.load(spec)
    assert self_test.tried(kernel) is None
    self_testing.spoil(gpu, kernel.variant.cubin_sha256, self_testing.one_bit)
    assert "elements are wrong" in str(self_test.tried(kernel))


def test_a_trial_has_none_of_the_callers_modes(gpu: EmulatedGpu) -> None:
    """Its thread is its own: neither autocast, nor a default dtype, nor the generator are its business."""
    seen = []
    kernel = code(gpu, Op.FORWARD, Fusion.NONE, Layout.NK, 16)

    def look(*_: object) -> None:
        modes = torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()
        seen.append((threading.current_thread().name, *modes))

    self_testing.spoil(gpu, kernel.variant.cubin_sha256, look)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            assert self_test.tried(kernel) is None
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(seen) == {("pretuned-self-test", False, False)}
    assert torch.equal(torch.get_rng_state(), before)


def test_a_launch_that_the_driver_refuses_is_no_result(gpu: EmulatedGpu) -> None:
    kernel = code(gpu, Op.FORWARD, Fusion.NONE, Layout.NK, 16)
    gpu.refuses[kernel.variant.cubin_sha256] = 701
    with pytest.raises(CudaError, match="CUDA error 701, too many resources requested for launch"):
        self_test.tried(kernel)


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might", True),
        ("cuStreamSynchronize: CUDA error 715, an illegal instruction was encountered", True),
        ("CUDA error: misaligned address", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: uncorrectable ECC error encountered", False),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", False),
        ("CUDA error: the remote procedural call between the MPS server and the MPS client failed", False),
        ("CUDA error: unknown error", False),
    ],
)
def test_the_errors_of_a_gpu_that_a_kernel_causes(text: str, is_fault: bool) -> None:
    assert cuda.is_fault(RuntimeError(text)) == is_fault


@pytest.mark.parametrize("name", ["catalogue-sm90", "quantised-sm90", "weights-sm90", "catalogue-sm100"])
def test_code_that_does_nothing_is_found_whatever_it_is(name: str) -> None:
    """Every kind of shipped variant, by the runtime's own launchers, on a driver that launches nothing."""
    kinds: set[object] = set()
    with open_bundle(SHIPPED / f"{name}.msgpack") as file, emulated(EmulatedGpu(sm=file.target.sm)) as gpu:
        gpu.know(SHIPPED / f"{name}.msgpack")
        gpu.computes = False
        for i, variant in enumerate(file.variants()):
            kind = variant.op, variant.dtype, variant.layout, variant.fusion, variant.alignment, variant.kernel
            if kind not in kinds:
                kinds.add(kind)
                before = len(gpu.launches)
                wrong = self_test.tried(load_kernel(variant, file.cubin(i), 0, 132, name))
                assert wrong is not None
                assert "wrong" in wrong, wrong
                assert len(gpu.launches) > before, wrong
    assert len(kinds) > 10


def test_shipped_code_for_tested_capabilities_is_tested_and_other_code_is_not() -> None:
    """Every variant of a bundle that was measured costs nothing on its capability; all the others are to be tested."""
    for path in sorted(SHIPPED.glob("*.msgpack")):
        with open_bundle(path) as file:
            here = LocalGpu(file.target.sm, Gpu("a GPU", 100, 1 << 16, 13000))
            results = {loader.tested_on(file, i, variant, here) for i, variant in enumerate(file.variants())}
            assert results == (set(file.gpus) if file.gpus else {None}), path.name
            untested = path.stem == "weights-sm90"  # whose self-tests run before their first use
            assert bool(file.gpus) == (file.target.sm == 90 and not untested), path.name


def test_a_measured_choice_judges_its_variant_and_its_runner_up_alone(tmp_path: Path) -> None:
    specs = [Spec(config, alignment) for config, alignment in ((TILE, 16), (SMALL, 16), (SPECIALIZED, 16), (TILE, 1))]
    other = host_problem()._replace(N=2048)
    rows = {host_problem(): [measured(64, 1, 5, second=0)], other: [modelled(64, 2)]}
    for sm, there in ((90, ON_H200), (80, ON_A100)):
        path = write(tmp_path / f"{sm}.msgpack", rows, specs=specs, gpus=[there.gpu], sm=sm)
        for asked in (True, False):  # whether its choices were read before
            with open_bundle(path) as file:
                if asked:
                    file.find(host_problem())
                results = [loader.tested_on(file, i, variant, there) for i, variant in enumerate(file.variants())]
                # What no choice names is run by this project's own tests on 9.0.
                assert results == [there.gpu, there.gpu, None, there.gpu if sm == 90 else None]
                for elsewhere in (ON_L40S, LocalGpu(86, there.gpu)):
                    assert loader.tested_on(file, 0, file.variant(0), elsewhere) is None


def host_problem() -> Problem:
    return Problem(Op.FORWARD, DType.BF16, 8, 1024, 768)


# Calls, through dispatch and the loader


class Machine(EmulatedGpu):
    """An L40S with one directory of bundles, whose kernels were never run on it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(L40S, 89)
        self.folder = folder

    @property
    def snapshot(self) -> Snapshot:
        return dispatch_snapshot.snapshot()

    @property
    def tried(self) -> list[Launch]:
        """The first launch of each self-test, which has a stream of its own."""
        return list({launch.stream: launch for launch in reversed(self.launches) if launch.stream}.values())[::-1]

    def anew(self, *, driver: int = L40S.driver) -> None:
        """Another process begins."""
        self_test_results._memory.__init__()  # type: ignore[misc]
        forget()
        self.gpu = L40S._replace(driver=driver)
        self.launches.clear()
        reload()

    def spoil(self, *indices: int, tag: str = "a", spoil: Callable[..., None] = self_testing.one_element) -> None:
        for index in indices:
            self_testing.spoil(self, digest(tag, index), spoil)

    def call(self, rows: int = M) -> bool:
        """Return True if a product is right."""
        x, w, m_sizes = operands(rows)
        y = grouped_gemm(x, w, m_sizes)
        return torch.allclose(y, reference.forward(x, w, m_sizes), rtol=1e-4, atol=1e-4)


def product_code(index: int, tag: str = "a") -> tuple[Variant, bytes]:
    return variant_and_code(KernelSpec(Op.FORWARD, DType.FP32, (TILE, SMALL)[index]), 89, tag)


def digest(tag: str, index: int) -> bytes:
    return product_code(index, tag)[0].cubin_sha256


def operands(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, K, generator=generator), torch.randn(E, N, K, generator=generator)
    return x, w, torch.tensor([rows - 7, 0, 7, 0], dtype=torch.int32)


@pytest.fixture
def machine(clean_places: Path) -> Iterator[Machine]:
    bundle = [product_code(0), product_code(1)]
    emulated_kernels.write(clean_places / "a.msgpack", bundle, {PROBLEM: [modelled(16, 0, second=1)]}, sm=89)
    with emulated(Machine(clean_places)) as gpu:
        gpu.anew()  # type: ignore[attr-defined]
        yield gpu  # type: ignore[misc]


def configs(machine: Machine) -> list[Config]:
    return [Config.from_pairs(launch.code.config) for launch in machine.tried]


def test_a_first_use_proves_code_and_no_later_one_does(machine: Machine) -> None:
    assert machine.call()
    assert configs(machine) == [TILE]
    assert machine.call()
    assert machine.call(rows=21)  # of the same bucket
    assert len(machine.tried) == 1


def test_another_process_remembers_and_another_driver_does_not(machine: Machine) -> None:
    assert machine.call()
    machine.anew()
    assert machine.call()
    assert configs(machine) == []
    machine.anew(driver=13000)
    assert machine.call()
    assert configs(machine) == [TILE]


def test_wrong_code_is_left_out_told_once_and_remembered(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.spoil(0)
    assert machine.call()  # by the runner-up
    assert machine.call(rows=300)  # another bucket
    assert configs(machine) == [TILE, SMALL]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    for message in (
        "left out from now on",
        "rows forward fp32 w=nk",
        "block_m=64",
        "a.msgpack",
        "NVIDIA L40S",
        "(8.9, ",
        "driver for CUDA 12.8",
        digest("a", 0).hex(),
        "y[0, 2] is",
        "Please file this line",
    ):
        assert message in line
    assert "\n" not in line
    caplog.clear()
    machine.anew()
    assert machine.call()
    assert configs(machine) == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_where_all_is_wrong_torch_runs(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.spoil(0, 1)
    assert machine.call()
    assert machine.call()
    assert len(machine.tried) == 2
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line for line in lines if "grouped GEMM runs on torch" in line]
    assert len([line for line in lines if "left out" in line]) == 2


def test_in_a_graph_capture_nothing_is_tried_and_nothing_unproven_runs(machine: Machine) -> None:
    launches = len(machine.launches)
    machine.capturing = True
    with pytest.raises(Exception, match="graph capture"):  # float32: torch's own loop can't be captured
        machine.call()
    assert len(machine.launches) == launches
    assert machine.tried == []
    machine.capturing = False
    assert machine.call()  # the next call outside proves it: nothing was kept of the capture
    assert configs(machine) == [TILE]
    machine.anew()
    machine.capturing = True
    assert machine.call()  # what is remembered may run
    assert machine.tried == []


def test_a_pass_that_is_not_tested_is_asked_for_again_after_a_capture(machine: Machine) -> None:
    combine = variant_and_code(RowOpSpec(RowOp.COMBINE, DType.FP32), 89)
    emulated_kernels.write(machine.folder / "b.msgpack", [combine], sm=89)
    machine.anew()
    machine.capturing = True
    assert launcher(RowOp.COMBINE, DType.FP32, 0, aligned=True) is None
    assert machine.snapshot.passes == {}
    machine.capturing = False
    with open_bundle(machine.folder / "b.msgpack") as file:
        assert loader.tested_on(file, 0, combine[0], machine.local) is None
    assert launcher(RowOp.COMBINE, DType.FP32, 0, aligned=True) is not None
    assert [launch.code.op for launch in machine.tried] == [RowOp.COMBINE]


def test_it_can_be_switched_off(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    machine.anew()
    machine.spoil(0)
    assert not machine.call()
    assert machine.tried == []
    assert "PRETUNED_DISABLE_SELF_TEST" in str(explain(PROBLEM, M=M))


def test_what_was_measured_on_this_capability_is_used_as_it_is(machine: Machine) -> None:
    """On another GPU of it, too; and no result is looked for."""
    emulated_kernels.write(
        machine.folder / "a.msgpack",
        [product_code(0, "m")],
        {PROBLEM: [measured(16, 0, 5)]},
        sm=89,
        gpus=[Gpu("NVIDIA L4", 58, 23034, 12080)],
    )
    machine.anew()
    assert machine.call()
    assert machine.tried == []
    assert self_test_results._memory.read == set()
    assert "tested on NVIDIA L4" in str(explain(PROBLEM, M=M))


def test_explain_says_what_is_known(machine: Machine) -> None:
    explanation = explain(PROBLEM, M=M)
    assert explanation.self_test == "never run on this capability: tested before its first use, outside a graph capture"
    assert machine.call()
    explanation = explain(PROBLEM, M=M)
    assert explanation.self_test is not None
    assert explanation.self_test.startswith("passed its self-test on this GPU on 20")
    assert f"test: {explanation.self_test}" in str(explanation)
    assert explanation.to_dict()["self_test"] == explanation.self_test


def test_preload_proves_what_it_loads(machine: Machine) -> None:
    machine.spoil(0)
    done = preload(problems=[PROBLEM], tokens=range(1, 5))
    assert done.count == 1
    assert configs(machine) == [TILE, SMALL]
    tried = len(machine.tried)
    machine.capturing = True
    assert machine.call(rows=16)
    assert len(machine.tried) == tried


def test_a_fault_names_the_code_and_the_next_process_leaves_it_out(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    def faults(*_: object) -> None:
        machine.broken = "an illegal memory access was encountered"

    machine.spoil(0, spoil=faults)
    with pytest.raises(CudaError, match=r"illegal memory access.*left out from now on: start this process anew"):
        machine.call()
    assert "Please file this line" in caplog.text
    with pytest.raises(CudaError, match="illegal memory access"):  # no other code is blamed
        machine.call()
    machine.broken = ""
    machine.anew()
    assert machine.call()
    assert configs(machine) == [SMALL]


@pytest.mark.parametrize(
    "error",
    ["CUDA error 701, too many resources requested for launch", "CUDA error: uncorrectable ECC error encountered"],
)
def test_what_is_no_result_is_reported_once_and_tried_by_the_next_process(
    error: str, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Other code runs in this process; nothing is written about the code that could not be tested."""
    if "701" in error:
        machine.refuses[digest("a", 0)] = 701
    else:
        machine.spoil(0, spoil=lambda *_: machine.raises.append(RuntimeError(f"{error}\nmore")))
    assert machine.call()
    machine.raises.clear()
    assert machine.call(rows=300)
    assert configs(machine) == [TILE, SMALL]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("pretuned: could not test rows forward fp32 w=nk")
    assert error in line
    assert line.endswith("the next process tests it again")
    machine.refuses.clear()
    machine.after.clear()
    machine.anew()
    assert machine.call()
    assert configs(machine) == [TILE]


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, cuda.OutOfMemory])
def test_without_room_for_a_trial_the_call_fails_and_the_next_one_tries_again(
    error: type[Exception], machine: Machine
) -> None:
    if error is cuda.OutOfMemory:
        machine.refuses[digest("a", 0)] = 2
    else:
        machine.spoil(0, spoil=lambda *_: machine.raises.append(error("no room")))
    with pytest.raises(error):
        machine.call()
    machine.refuses.clear()
    machine.after.clear()
    machine.raises.clear()
    assert machine.call()
    assert configs(machine) == [TILE, TILE]


def test_ranks_that_leave_out_other_code_have_other_fingerprints(machine: Machine) -> None:
    before = machine.snapshot.fingerprint(machine.local)
    machine.spoil(0)
    assert machine.call()
    assert machine.snapshot.fingerprint(machine.local) != before


def test_two_threads_prove_code_once(machine: Machine) -> None:
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(machine.call())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert configs(machine) == [TILE]
