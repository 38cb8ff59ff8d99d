"""A libcuda in the test's own process: tests/support/libcuda.c, compiled, whose next call can be told to fail."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretuned.runtime.driver import cuda

SOURCE = Path(__file__).parents[2] / "support" / "libcuda.c"
KEPT = (cuda.library, cuda.launch_kernel, cuda.driver_version, cuda.primary_context)
LOAD = ctypes.CDLL
Compiled = Callable[..., Path]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The library, with words defined for the C compiler."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    built: dict[tuple[str, ...], Path] = {}

    def library(*defined: str) -> Path:
        if defined not in built:
            path = tmp_path_factory.mktemp("libcuda") / "libcuda.so.1"
            options = [f"-D{define}" for define in defined]
            subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", path, SOURCE], check=True)
            built[defined] = path
        return built[defined]

    return library


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Have ``runtime/driver/cuda.py`` find this libcuda, and nothing of another that it keeps."""

    def checked(path: Path) -> None:
        for name in KEPT:
            name.cache_clear()
        named = {"libcuda.so.1": str(path)}
        monkeypatch.setattr(ctypes, "CDLL", lambda name: LOAD(named.get(name, name)))

    yield checked
    monkeypatch.undo()
    for name in KEPT:
        name.cache_clear()


@pytest.fixture
def stub(compiled: Compiled, use: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The library, in use: ``stub_fail``, ``stub_blocks``, ``stub_without_context``. torch captures nothing."""
    use(compiled())
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    library = cuda.library()
    library.stub_blocks(2)
    library.stub_fail(b"", 0)
    library.stub_without_context()
    return library
