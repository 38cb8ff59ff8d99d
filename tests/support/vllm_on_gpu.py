"""vLLM's wheel unpacked, imported on a real GPU: PRETUNED_TEST_VLLM=FOLDER, with ``packages`` that vLLM imports.

``benchmarks/run.py carry`` makes such a folder.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = os.environ.get("PRETUNED_TEST_VLLM")
marks = [
    pytest.mark.filterwarnings("ignore"),  # vLLM imports parts of torch that warn
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(FOLDER is None, reason="PRETUNED_TEST_VLLM names no folder with vLLM's wheel unpacked"),
]


@pytest.fixture(scope="module")
def layers() -> Iterator[Any]:
    """The benchmark's module that makes vLLM's layers, with the plug-in registered."""
    runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "run.py"))["package"]()  # makes it importable
    from benchmarks.peers import layers_in_vllm

    with pytest.MonkeyPatch.context() as patch:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            patch.setenv(name, "lo")
        patch.setenv("PRETUNED_VLLM", "1")
        folder = Path(FOLDER or "")
        layers_in_vllm.find_vllm(folder, folder / "packages")
        from pretuned.integrations.vllm import register

        register()
        with layers_in_vllm.vllm_of_one("cuda"):
            yield layers_in_vllm
