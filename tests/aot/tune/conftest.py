"""Real candidates to tune."""

from __future__ import annotations

from pathlib import Path

import pytest
from building import alone

from pretuned.aot.build.build import compile_candidates
from pretuned.aot.build.options import BuildOptions
from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.plan.families import Pool
from pretuned.aot.plan.plan import BuildPlan


@pytest.fixture(scope="module")
def candidates(
    tmp_path_factory: pytest.TempPathFactory, compiled_dir: Path, small_space: Pool, small_plan: BuildPlan
) -> Path:
    """Real cubins for 90: two aligned configs and a fallback in each form."""
    path = tmp_path_factory.mktemp("candidates") / "candidates.msgpack"
    options = BuildOptions(path.parent, cache=CompileCache(compiled_dir), space=small_space)
    with alone(compiled_dir.parent / "small.lock"):
        compile_candidates(small_plan, (90,), path, options)
    return path


@pytest.fixture
def mine(candidates: Path, tmp_path: Path) -> Path:
    """A copy: some of the workers leave marks beside it."""
    path = tmp_path / "candidates.msgpack"
    path.write_bytes(candidates.read_bytes())
    path.chmod(0o644)
    return path
