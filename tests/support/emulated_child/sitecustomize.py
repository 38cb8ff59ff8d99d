"""Gives a child process an emulated GPU on which kernels misbehave: put this folder first in ``PYTHONPATH``.

``EMULATED_FAULTS`` is JSON: what the kernels of a bundle do, by the SHA-256 of their cubins (hex), as in ``MISBEHAVES``
below, or a CUDA error code. ``EMULATED_BUNDLE`` is the bundle's path.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import emulated_driver
import pytest
import torch
from self_testing import one_element, result_of

GPU = emulated_driver.EmulatedGpu(emulated_driver.A100, 80)
BUNDLE = Path(os.environ["EMULATED_BUNDLE"])
PAUSED: list[bool] = []


def _wrong(launch: emulated_driver.Launch) -> None:
    one_element(result_of(launch), launch.words)


def _fault(_launch: object) -> None:
    GPU.broken = "an illegal memory access was encountered"


def _pause(_launch: object) -> None:
    """The process is stopped for 3 s, once."""
    if PAUSED:
        return
    PAUSED.append(True)
    resume = f"import os, signal, time; time.sleep(3); os.kill({os.getpid()}, signal.SIGCONT)"
    subprocess.Popen([sys.executable, "-S", "-c", resume], env={})
    os.kill(os.getpid(), signal.SIGSTOP)


def _forge(launch: emulated_driver.Launch) -> None:
    """A wrong kernel prints a result that says that it is right, as printf of GPU code could."""
    os.write(1, b"[null, null, false]\n")
    _wrong(launch)


def _flood(_launch: object) -> None:
    """64 MiB without a line's end on both outputs, and a fault with a long text."""
    for stream in (1, 2):
        for _ in range(64):
            os.write(stream, b"x" * (1 << 20))
    GPU.broken = "an illegal memory access was encountered" + " in a long story" * 100_000


def _remove(_launch: object) -> None:
    BUNDLE.unlink(missing_ok=True)


def _republish(_launch: object) -> None:
    _remove(_launch)
    BUNDLE.write_bytes(b"another bundle")


MISBEHAVES = {
    "wrong": _wrong,
    "fault": _fault,
    "pause": _pause,
    "forge": _forge,
    "flood": _flood,
    "removed": _remove,
    "republished": _republish,
}


def _loaded() -> None:
    """This process has lost the GPU, for good, once a kernel of these is loaded."""
    if FAULTS[GPU.loaded[-1].digest.hex()] == "unusable":
        GPU.broken = "an uncorrectable ECC error was encountered"


FAULTS: dict[str, str | int] = json.loads(os.environ["EMULATED_FAULTS"])
for digest, how in FAULTS.items():
    if isinstance(how, int):
        GPU.refuses[bytes.fromhex(digest)] = how
    elif how in MISBEHAVES:
        GPU.after[bytes.fromhex(digest)] = MISBEHAVES[how]
GPU.on_load = _loaded
if not torch.cuda.is_available():
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, strides, dtype: torch.empty_strided(  # type: ignore[attr-defined]
        size, strides, dtype=dtype, device="cuda"
    )
    emulated_driver.install(pytest.MonkeyPatch(), GPU)
