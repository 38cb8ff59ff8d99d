"""A libcuda.so.1 that is no driver, in processes of their own; and one that refuses: what is said of it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_bundles import snapshot

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import CudaError, DriverTooOld
from pretuned.artifacts.records import DType, Gpu, LocalGpu, Op, Problem
from pretuned.runtime.driver import cuda, device
from pretuned.runtime.inspect import doctor
from pretuned.runtime.launch import loader

SHIPPED = Path(__file__).parents[3] / "artifacts" / "bundles" / "catalogue-sm90.msgpack"
# CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_UNSUPPORTED_PTX_VERSION
UNREAD = (200, 209, 222)
LIBC = ctypes.CDLL(None)
SOURCE = """
int cuInit(unsigned flags) { return 34; }
%s
"""


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds a stub as the CUDA toolkit has it: every call returns 34."""
    from pretuned.runtime.driver.cuda import _PROTOTYPES

    folder = tmp_path_factory.mktemp("stubs")
    calls = "\n".join(f"int {name}() {{ return 34; }}" for name in _PROTOTYPES if name != "cuInit")
    (folder / "stub.c").write_text(SOURCE % calls)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "stub.c"], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.mark.slow
def test_the_doctor_names_a_stub(linked: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pretuned.runtime"], env=linked, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "libcuda.so.1 that was found is a stub" in ended.stdout
    assert "LD_LIBRARY_PATH" in ended.stdout


def test_a_build_for_this_machine_names_a_stub(linked: dict[str, str], tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pretuned.aot", "plan", "--models", "shape:E=8,H=256,I=128,k=2"],
        env=linked,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "libcuda.so.1 that was found is a stub" in ended.stderr


def test_no_driver(use: Callable[[Path], None], tmp_path: Path) -> None:
    use(tmp_path / "libcuda.so.1")
    with pytest.raises(CudaError, match=r"no CUDA driver: .*In a container, start it with the GPU passed through"):
        cuda.library()


def test_a_driver_of_cuda_11(use: Callable[[Path], None], compiled: Callable[..., Path]) -> None:
    use(compiled("TOO_OLD"))
    with pytest.raises(CudaError, match=r"has no cuThreadExchangeStreamCaptureMode: .* for CUDA 12 or later"):
        cuda.library()


def test_a_driver_that_loads_functions_by_itself(use: Callable[[Path], None], compiled: Callable[..., Path]) -> None:
    use(compiled("OLDER"))
    assert not hasattr(cuda.library(), "cuFuncLoad")
    assert load().per_sm == 2


def load(cubin: bytes = b"\x7fELF", shared_bytes: int = 0) -> cuda.Function:
    return cuda.load(cubin, "k", threads=128, shared_bytes=shared_bytes, device=0)


def test_what_is_no_code_is_refused_with_the_drivers_words(stub: ctypes.CDLL) -> None:
    with pytest.raises(CudaError, match=r"^cuModuleLoadData\(k, 4 bytes\): CUDA error 200, \?$"):
        load(b"text")
    with pytest.raises(CudaError, match=r"^call: CUDA error 700, unknown$"):
        cuda.check(700, "call")
    with pytest.raises(CudaError, match=r"^cuDeviceGet\(1\): CUDA error 1"):
        cuda.properties(1)


def test_a_kernel_of_which_no_sm_holds_a_block(stub: ctypes.CDLL) -> None:
    stub.stub_blocks(0)
    with pytest.raises(CudaError, match="k: no SM of this GPU holds a block of 128 threads and 4096 bytes"):
        load(shared_bytes=4096)


def test_more_shared_memory_than_every_kernel_has_is_asked_for(
    stub: ctypes.CDLL, capfd: pytest.CaptureFixture[str]
) -> None:
    for shared_bytes, asks in ((48 * 1024, False), (48 * 1024 + 1, True)):
        assert load(shared_bytes=shared_bytes).shared_bytes == shared_bytes
        LIBC.fflush(None)
        said = f'"call": "shared", "attribute": 8, "value": {shared_bytes}'
        assert (said in capfd.readouterr().out) is asks


def test_another_error_is_not_recovered_from(stub: ctypes.CDLL) -> None:
    calls = []
    cuda.recover(201, "what", 0, lambda context: calls.append(context) or 0, 5)  # CUDA_ERROR_INVALID_CONTEXT
    assert calls == [5]
    with pytest.raises(CudaError, match=r"^what: CUDA error 1"):
        cuda.recover(1, "what", 0, lambda context: calls.append(context) or 0, 6)
    with pytest.raises(CudaError, match=r"^what: CUDA error 2"):
        cuda.recover(201, "what", 0, lambda: 2)
    assert calls == [5]


def test_memory_is_the_drivers(stub: ctypes.CDLL) -> None:
    assert cuda.zeroed(1 << 17, 0) > 0
    with pytest.raises(CudaError, match=r"^cuMemAlloc\(131073 bytes\): CUDA error 1"):
        cuda.zeroed((1 << 17) + 1, 0)


@pytest.mark.parametrize(
    "name", ["cuThreadExchangeStreamCaptureMode", "cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuDeviceGetCount"]
)
def test_a_driver_that_lacks_a_function(name: str, use: Callable[[Path], None], compiled: Callable[..., Path]) -> None:
    use(compiled(f"{name}=other"))
    wanted = rf"^the CUDA driver has no {name}: pretuned needs a driver for CUDA 12 or later\. Update the driver$"
    with pytest.raises(cuda.DriverLacks, match=wanted):
        cuda.library()


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad"])
def test_code_that_a_driver_can_not_read(call: str, stub: ctypes.CDLL) -> None:
    """Under lazy loading it is read later than it is loaded."""
    for code in UNREAD:
        stub.stub_fail(call.encode(), code)
        with pytest.raises(cuda.CodeUnread, match=rf"^{call}\(k.*\): CUDA error {code}, \?$"):
            load()
    for code in (2, 208, 210, 221, 223, 700):  # no memory, say
        stub.stub_fail(call.encode(), code)
        with pytest.raises(CudaError, match=rf"^{call}\(k.*\): CUDA error {code}") as caught:
            load()
        assert type(caught.value) is (cuda.OutOfMemory if code == 2 else CudaError)
    assert load().per_sm == 2


@pytest.mark.parametrize("call", ["cuFuncSetAttribute", "cuOccupancyMaxActiveBlocksPerMultiprocessor"])
def test_what_a_driver_refuses_of_code_that_it_read(call: str, stub: ctypes.CDLL) -> None:
    stub.stub_fail(call.encode(), 209)
    with pytest.raises(CudaError, match=rf"^{call}\(k.*\): CUDA error 209") as caught:
        load(shared_bytes=1 << 16)
    assert type(caught.value) is CudaError


def test_what_the_driver_says_of_a_gpu(stub: ctypes.CDLL) -> None:
    assert cuda.properties(0) == cuda.Properties("Stub 0", 90, 132, 141 << 30)


def problem_of() -> Problem:
    with open_bundle(SHIPPED) as bundle:
        return next(
            problem for problem in bundle.problems() if problem.op is Op.FORWARD and problem.dtype is DType.BF16
        )


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    device.devices.clear()
    yield
    device.devices.clear()


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("code", UNREAD)
def test_what_a_driver_can_not_read_is_passed_over_and_told(
    code: int, stub: ctypes.CDLL, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R14: its version was new enough, its answer is not. torch runs; of a file that was named it is an error."""
    path = Path(shutil.copy(SHIPPED, tmp_path))
    message = (
        rf"bundle '{path}': variant \d+: this driver can't read its code \(cuModuleLoadData\(\w+, \d+ bytes\): CUDA "
        rf"error {code}, \?\)\. The bundle is for a driver for CUDA 12\.\d or later, this one says that it is for CUDA "
        r"13\.1\. Update the driver, or rebuild with a Triton whose ptxas is older"
    )
    local = LocalGpu(90, Gpu("NVIDIA H200", 132, 143771, 13010))

    def prepared(*named: Path, installed: tuple[Path, ...] = ()) -> object:
        stub.stub_fail(b"cuModuleLoadData", code)
        there = snapshot(*named, installed=installed)
        return loader.load_decided(there, problem_of(), 64, local, 0, aligned=True, strict=False)

    assert prepared(installed=(tmp_path,)) is None
    assert any(re.search(message, record.getMessage()) for record in caplog.records), caplog.text
    with pytest.raises(DriverTooOld, match=message):
        prepared(path)
    assert loader.loaded_count() == 0
    stub.stub_fail(b"", 0)
    kernel = loader.load_decided(snapshot(path), problem_of(), 64, local, 0, aligned=True, strict=False)
    assert kernel is not None


def doctor_with(library: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(library.parent)}
    command = [sys.executable, "-m", "pretuned.runtime"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow  # a process that imports torch
def test_the_doctor_of_a_driver_of_cuda_11(compiled: Callable[..., Path]) -> None:
    """There is a driver, and so a GPU, that nothing will run on."""
    ended = doctor_with(compiled("TOO_OLD"))
    assert ended.returncode == 1, ended.stderr
    message = "the CUDA driver has no cuThreadExchangeStreamCaptureMode: pretuned needs a driver for CUDA 12 or later"
    assert f"problem   {message}. Update the driver\n" in ended.stdout
    assert "no GPU here" not in ended.stdout
    assert ended.stdout.endswith("ok        no\n")


@pytest.mark.slow  # a process that imports torch
@pytest.mark.parametrize("defined", [("NO_GPU",), pytest.param(("VERSION=12000", "OLDER"), marks=pytest.mark.nightly)])
def test_the_doctor_of_a_torch_without_cuda(defined: tuple[str, ...], compiled: Callable[..., Path]) -> None:
    if torch.version.cuda is not None:
        pytest.skip("needs a torch without CUDA")
    ended = doctor_with(compiled(*defined))
    assert ended.returncode == 0, ended.stderr
    version = "12.0" if "OLDER" in defined else "13.1"
    assert f"driver    CUDA {version}, but this torch ({torch.__version__}) is built without CUDA\n" in ended.stdout


def test_the_doctor_where_torch_sees_no_gpu_and_the_driver_has_one(
    use: Callable[[Path], None], compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch that is built for a later CUDA than the driver's sees no GPU."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    use(compiled("VERSION=12000", "OLDER"))
    report = doctor.examine()
    assert not report.ok
    (problem,) = report.problems
    assert problem == (
        f"the driver has 1 GPU, of which torch {torch.__version__} (for CUDA 12.8) sees none; the driver is for CUDA "
        "12.0. Update the driver, or install a torch for its CUDA"
    )
    use(compiled("NO_GPU"))
    report = doctor.examine()
    assert report.ok
    assert cuda.device_count() == 0


def test_a_count_that_the_driver_refuses(stub: ctypes.CDLL) -> None:
    assert cuda.device_count() == 1
    for call in ("cuInit", "cuDeviceGetCount"):
        stub.stub_fail(call.encode(), 3)
        with pytest.raises(CudaError, match=rf"^{call}: CUDA error 3"):
            cuda.device_count()
