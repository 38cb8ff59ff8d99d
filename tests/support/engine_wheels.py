"""Wheels of engines, unpacked without their compiled code, for tests that make MoE layers of several versions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_WHEEL = Path(__file__).parents[2] / ".ci/wheel"


def unpacked(name: str, version: str) -> Path:
    """Where a version of an engine lies, fetched if it was not yet, into the folder that PRETUNED_TEST_WHEELS names."""
    folder = os.environ.get("PRETUNED_TEST_WHEELS")  # .ci/vllm sets it
    if not folder:
        pytest.skip("PRETUNED_TEST_WHEELS names no folder into which wheels of engines (300 MB each) may be fetched")
    subprocess.run([_WHEEL, folder, f"{name}=={version}"], check=True, timeout=600)
    return Path(folder, f"{name}-{version}")
