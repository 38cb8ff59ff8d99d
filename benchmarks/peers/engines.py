"""Functions for benchmarks inside an engine: import an unpacked engine, and run processes with a time limit.

Also the folders of all caches, so that a process can start with empty ones.
"""

from __future__ import annotations

import compileall
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

RUN = Path(__file__).parents[1] / "run.py"
GRACE = 10.0  # seconds that a process has to end after a signal
CACHES = {  # environment variables, and folders below a run's own folder
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "home",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "DG_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "FLASHINFER_CACHE_DIR": "flashinfer",
    "VLLM_CACHE_ROOT": "vllm",
    "HUMMING_CACHE_DIR": "humming",
    "HUMMING_TMP_DIR": "humming-tmp",
    "CUDA_CACHE_PATH": "nv",
    "TVM_FFI_CACHE_DIR": "tvm",
    "XDG_CACHE_HOME": "cache",
    "HOME": "home",
}


def find(folders: list[Path], packages: Path | None) -> None:
    """Make an engine importable: its folders first on the path, ``packages`` last, so installed packages precede them.

    Child processes get the same folders.
    """
    first, last = [str(folder.resolve()) for folder in folders], [] if packages is None else [str(packages.resolve())]
    sys.path[:0] = first
    sys.path += last
    # In a child the folder comes before installed packages: PYTHONPATH can't put it behind them.
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")]), *last])


def stand_in(*names: str) -> None:
    """Install stub modules with these names, whose every function returns False, for parts that never run."""
    for name in names:
        absent = types.ModuleType(name)
        absent.__path__ = []  # type: ignore[attr-defined]
        absent.__getattr__ = lambda name: (lambda *_, **__: False) if not name.startswith("__") else _none(name)  # type: ignore[method-assign]
        sys.modules[name] = absent


def _none(name: str) -> NoReturn:
    raise AttributeError(name)


def caches_in(folder: Path) -> dict[str, str]:
    """Environment variables that put all caches below ``folder``; makes missing folders."""
    for cache in set(CACHES.values()):
        (folder / cache).mkdir(parents=True, exist_ok=True)
    return {variable: str(folder / cache) for variable, cache in CACHES.items()}


def ready_files(folders: Iterable[Path], packages: Iterable[str] = ("pretuned",)) -> None:
    """Compile Python files to .pyc, as installing does, and read all files once, including nvcc's.

    Takes folders, and installed packages by name; imports none of them. Otherwise the first timed process would pay
    for both.
    """
    specs = [importlib.util.find_spec(package) for package in packages]
    all_folders = [
        *folders,
        *(Path(location) for spec in specs if spec for location in spec.submodule_search_locations or ()),
    ]
    for folder in all_folders:
        compileall.compile_dir(str(folder), quiet=2, workers=0)
    nvcc = shutil.which("nvcc")
    all_folders += [] if nvcc is None else [Path(nvcc).resolve().parents[1] / part for part in ("bin", "nvvm")]
    for path in (file for folder in all_folders for file in folder.rglob("*")):
        if path.is_file():
            path.read_bytes()


def child(words: list[str], seconds: float, environ: Mapping[str, str] | None = None) -> str:
    """Run a benchmark in a process of its own; return how it failed, empty if it did not.

    After ``seconds`` the process and all that it started are ended.
    """
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(RUN), *words], start_new_session=True, env={**os.environ, **(environ or {})}
    )
    try:
        code = process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        _end(process)
        return f"it took over {time.monotonic() - begun:.0f} s and was ended"
    finally:
        _end(process)
    return f"its process ended with {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def leave(code: int) -> NoReturn:
    """End this process at once, as threads that an engine leaves (NCCL's) could block a normal exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
