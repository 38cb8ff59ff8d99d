"""Tests with the real engines, each in an environment of its own (.ci/vllm): elsewhere there is nothing to collect."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_engine import Told, generate, lines, run

collect_ignore_glob = [f"test_{engine}*.py" for engine in ("vllm", "sglang") if not importlib.util.find_spec(engine)]

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: its layers' calls are counted here
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


@pytest.fixture(scope="package", autouse=True)
def small_steps_are_not_compiled() -> Iterator[None]:
    """vLLM's own, by torch.compile: that takes longer than they do. torch asks at each call, other tests compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield


class _Models(dict[str, Path]):
    """Where each model lies, saved when it is first wanted."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        from tiny_models import save

        self[name] = save(name, self._folder / name)
        return self[name]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each of the models lies."""
    return _Models(tmp_path_factory.mktemp("models"))


class _Without(dict[str, Told]):
    """Each model's output with vLLM's own experts, generated when it is first wanted."""

    def __init__(self, models: dict[str, Path]) -> None:
        super().__init__()
        self._models = models

    def __missing__(self, name: str) -> Told:
        with lines() as logged:
            self[name] = run(self._models[name], "0", generate)
        assert not logged
        return self[name]


@pytest.fixture(scope="session")
def without(models: dict[str, Path]) -> dict[str, Told]:
    """Return the models' outputs with vLLM's own experts: the plug-in is switched off."""
    return _Without(models)
