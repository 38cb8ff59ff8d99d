"""Takes the repository's root off sys.path (there, ``import kernels`` would mean our folder), adds tests/support."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Tensors here are small: a second thread of torch or numpy waits for work, and takes another test's core meanwhile.
# torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import torch

gc.disable()  # until all tests are collected
ROOT = Path(__file__).resolve().parents[1]
_ALL_SLOW = re.compile(r"^pytestmark = .*\bmark\.(slow|nightly)\b", re.MULTILINE)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's own background job: processes of tests would have it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("COLUMNS", None)  # a worker of xdist is told its terminal's: output is then as wide as that
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
for pressed in (ROOT / "artifacts" / "pressed").glob("*.xz"):
    if not (ROOT / "artifacts" / "bundles" / pressed.stem).exists():
        pytest.exit(f"artifacts/bundles/{pressed.stem} is not there: pip install -e . in this clone unpacks it", 4)
sys.path.append(str(ROOT / "tests" / "support"))  # spawned workers get this path too
if not torch.cuda.is_available():
    # The runtime takes this function of torch's when it is imported. Without CUDA it can't work; so it asks torch for
    # CUDA memory like any other code, which tests/support/emulated_driver.py emulates.
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, strides, dtype: torch.empty_strided(  # type: ignore[attr-defined]
        size, strides, dtype=dtype, device="cuda"
    )
with contextlib.suppress(ImportError):  # tests/gpu needs no hypothesis
    from hypothesis import settings

    settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
    settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-namespaces",
        action="store_true",
        help="skip, instead of failing, the tests that need root, mounts or strace",
    )


@pytest.fixture(scope="session")
def shared_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all of xdist's workers share, with what was compiled."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def compiled_dir(shared_dir: Path) -> Path:
    """A compile cache for all tests, with the shipped row kernels and the variants that earlier tests compiled."""
    from building import alone, take_row_kernels

    path = shared_dir / "compiled"
    with alone(shared_dir / "compiled.lock"):
        if not path.exists():
            take_row_kernels(path)
    return path


@pytest.fixture(scope="session")
def compiled_models(shared_dir: Path) -> Path:
    """A compile cache that has the models of building.py, for tests that compile nothing or little: only read it."""
    from building import compiled_in

    return compiled_in(shared_dir)


@pytest.fixture(scope="session")
def built_wheel(shared_dir: Path) -> Path:
    """pretuned's wheel: only read it."""
    from building import alone
    from wheels import build_wheel

    with alone(shared_dir / "wheel.lock"):
        if not (folder := shared_dir / "wheel").exists():
            (tree := shared_dir / "tree").mkdir()
            build_wheel(tree, shared_dir / "building").parent.rename(folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Restore the process after a test: settings, registered tuners and compilers, made-up GPUs.

    It is set up first, so it ends last: the environment is by then as it was.
    """
    yield
    loaded: dict[str, Any] = sys.modules
    if hooks := loaded.get("pretuned.runtime.hooks"):
        aot = loaded.get("pretuned.aot")  # it registers its own once, when it is imported
        hooks.register_tuner(aot and aot._tune)
        hooks.register_compiler(aot and aot._compile)
        if hooks._allowed:
            hooks.allow_jit(allowed=False)
        elif hooks.settings._settings not in (None, hooks.settings.read(os.environ)):
            hooks.reload()
    if self_test_results := loaded.get("pretuned.runtime.self_test_results"):
        self_test_results._memory.__init__()
    if (device := loaded.get("pretuned.runtime.driver.device")) and not device.torch.cuda.is_available():
        device.devices.clear()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out tests/gpu without a GPU, and with -m "not slow" files whose tests are all slow.

    They are collected if an argument names them, or a file in tests/gpu. Rewriting a file's assertions takes 50 ms.
    """
    if collection_path == ROOT / "tests" / "gpu":
        return None if torch.cuda.is_available() or asks_for(config, collection_path) else True
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return True if _ALL_SLOW.search(collection_path.read_text()) and not asks_for(config, collection_path) else None


def asks_for(config: pytest.Config, path: Path) -> bool:
    """Return True if an argument is this path or one in it."""
    named = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    return any(path in (name, *name.parents) for name in named)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark nightly tests as slow, too, so that -m "not slow" leaves them out."""
    for item in items:
        if item.get_closest_marker("nightly") and not item.get_closest_marker("slow"):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """From here on the collector does not look at what was imported, and seldom at the rest."""
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()
