"""A process that proves code as ``pretuned.runtime.inspect.prover`` does, over code that misbehaves by its number.

Its arguments say how each variant is, e.g. ``right hang die exit wrong fault damaged broken``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pretuned.artifacts.errors import BundleCorrupt
from pretuned.runtime.driver.cuda import Unfinished
from pretuned.runtime.inspect.prover import serve


def tried(device: int, path: str, digest: str, index: int) -> str | None:
    assert (device, Path(path).name) == (0, "a.msgpack")
    assert len(digest) == 64
    how = sys.argv[1:][index]
    print("some library's own words on standard output")
    if how == "forge":  # as printf of GPU code does
        print('pretuned-proof {"wrong": null}\npretuned-proof none\npretuned-proof', flush=True)
        return "it forged"
    if how == "flood":
        for stream in (sys.stdout, sys.stderr):
            for _ in range(64):
                stream.write("x" * (1 << 20))
            stream.flush()
        return "a long story " * 100_000
    if how == "hang":
        time.sleep(600)
    if how == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        sys.exit("the driver's last words")
    if how == "fault":
        raise Unfinished("CUDA error: an illegal memory access")
    if how == "damaged":
        raise BundleCorrupt("its cubin is not what the index says")
    if how == "broken":
        raise RuntimeError("no room on the GPU")
    return "y[0, 0] is 1, wanted 2" if how == "wrong" else None


if __name__ == "__main__":
    sys.exit(serve(sys.stdin, sys.stdout, tried))
