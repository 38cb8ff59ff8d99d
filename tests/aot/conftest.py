"""One compile cache for all tests here, and builds small enough for two cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretuned.aot.build.build import build
from pretuned.aot.build.options import BuildOptions
from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.compile.shipped import Shipped
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import Pool
from pretuned.aot.plan.plan import BuildPlan, plan
from pretuned.artifacts.records import DType, Op
from pretuned.kernels.spec import Config, Loads

SMALL = "shape:E=8,H=256,I=128,k=2 tokens=1..64 name=small"
ODD = "shape:E=8,H=250,I=125,k=2 tokens=1..64 name=odd"  # no row is a multiple of 16 bytes


def _aligned(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    loads = Loads.TMA if sm >= 90 else Loads.POINTER
    return (Config(16, 32, 64, 4, 2, loads=loads), Config(64, 64, 32, 4, 2, loads=loads))


def _fallbacks(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    return (Config(16, 32, 32, 4, 2),)


@pytest.fixture(scope="session", autouse=True)
def unpacked_once() -> Iterator[None]:
    """The candidates that ship are unpacked once: each plan or build of a test would do it again."""
    from unpacked import kept  # here, as programs that tests run import this module, too

    with pytest.MonkeyPatch.context() as patch:
        kept(patch)
        yield


@pytest.fixture(scope="session")
def small_space() -> Pool:
    """Two aligned candidates and one fallback."""
    return Pool(_aligned, _fallbacks)


@pytest.fixture(scope="session")
def small_plan() -> BuildPlan:
    """One aligned model and one that isn't, forward."""
    return plan(load_models([SMALL, ODD], (Op.FORWARD,)).shapes)


@pytest.fixture(scope="session")
def training_plan() -> BuildPlan:
    """The aligned model, every op, w in both layouts."""
    return plan(load_models([SMALL + " layout=nk,kn"]).shapes)


@pytest.fixture
def options(compiled_dir: Path, small_space: Pool, tmp_path: Path) -> Callable[..., BuildOptions]:
    """Options for a small build; keywords replace them."""

    def make(**changes: object) -> BuildOptions:
        options = {"out": tmp_path / "out", "cache": CompileCache(compiled_dir), "space": small_space, **changes}
        return BuildOptions(**options)  # type: ignore[arg-type]

    return make


def _shipped(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    """Two aligned configs of the candidates that ship for sm_80."""
    return (Config(32, 128, 64, 4, 4), Config(64, 64, 64, 4, 4))


def _shipped_fallback(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    return (Config(16, 64, 64, 8, 2),)


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory, compiled_dir: Path, small_plan: BuildPlan) -> Path:
    """A real bundle for sm_80, not to be changed: two aligned candidates and one fallback, of code that ships.

    If the code that ships is of other sources, it is compiled.
    """
    from building import alone  # here, as programs that tests run import this module, too

    out, space = tmp_path_factory.mktemp("small"), Pool(_shipped, _shipped_fallback)
    options = BuildOptions(out, cache=CompileCache(compiled_dir), space=space, shipped=Shipped.in_packages)
    with alone(compiled_dir.parent / "small.lock"):
        return build(small_plan, (80,), options).bundles[0].path
