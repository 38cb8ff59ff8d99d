"""A libcuda.so.1 that is no driver, in processes of their own; and one that refuses: what is said of it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pretuned.artifacts.errors import CudaError
from pretuned.runtime.driver import cuda

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
        env=linked, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
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
    made = []
    cuda.recover(cuda.INVALID_CONTEXT, "what", 0, lambda one: made.append(one) or 0, 5)
    assert made == [5]
    with pytest.raises(CudaError, match=r"^what: CUDA error 1"):
        cuda.recover(1, "what", 0, lambda one: made.append(one) or 0, 6)
    with pytest.raises(CudaError, match=r"^what: CUDA error 2"):
        cuda.recover(cuda.INVALID_CONTEXT, "what", 0, lambda: 2)
    assert made == [5]


def test_memory_is_the_drivers(stub: ctypes.CDLL) -> None:
    assert cuda.zeroed(1 << 17, 0) > 0
    with pytest.raises(CudaError, match=r"^cuMemAlloc\(131073 bytes\): CUDA error 1"):
        cuda.zeroed((1 << 17) + 1, 0)
