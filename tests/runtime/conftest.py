"""Bundles made for these tests, and no bundle or setting of the machine's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from host_gpu import Device


@pytest.fixture(scope="session", autouse=True)
def unpacked_once() -> Iterator[None]:
    """The candidates that ship are unpacked once: each test that makes a snapshot of them would do it again."""
    from unpacked import kept

    with pytest.MonkeyPatch.context() as patch:
        kept(patch)
        yield


@pytest.fixture
def clean_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The process's snapshot and settings, read anew from an empty home; returns an empty directory of bundles."""
    from pretuned.runtime import reload

    bundles = tmp_path / "bundles"
    bundles.mkdir()
    switches = ("BATCH_INVARIANT", "STRICT", "DISABLE_AUTOTUNE", "DISABLE_SELF_TEST", "TRUSTED_KEYS")
    for name in (*(f"PRETUNED_{switch}" for switch in switches), "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PRETUNED_BUNDLES", str(bundles))
    reload()
    yield bundles
    monkeypatch.undo()
    reload()


@pytest.fixture
def device(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """An emulated GPU, and one bundle for it (tests/support/host_gpu.py). Its kernels run without a self-test."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the emulated one is for machines without")
    from emulated_driver import emulated
    from host_gpu import Device

    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    with emulated(Device(clean_places)) as gpu:
        yield gpu  # type: ignore[misc]
