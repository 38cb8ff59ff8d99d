"""A process that tests code as ``pretuned.runtime.inspect.prover`` does, over code that misbehaves by its number.

Its arguments say how each variant is, e.g. ``right hang die exit wrong fault broken``. The bundle's file is opened and
compared as there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from pretuned.artifacts.errors import BundleCorrupt
from pretuned.runtime.driver.cuda import Unfinished, Unusable
from pretuned.runtime.inspect.prover import of_digest, serve


def test(device: int, path: str, digest: str, index: int) -> str | None:
    assert (device, Path(path).name) == (0, "a.msgpack")
    with of_digest(path, digest) as bundle:
        bundle.variant(index)
    how = sys.argv[1:][index]
    if how == "damaged":
        raise BundleCorrupt("its cubin is not what the index says")
    if how == "republished" or how == "removed":
        Path(path).unlink()
    if how == "republished":
        Path(path).write_bytes(b"another bundle")
    print("some library's own words on standard output")
    if how == "forge":  # as printf of GPU code does
        print("[null, null, false]", flush=True)
        return "it forged"
    if how == "flood":
        for stream in (sys.stdout, sys.stderr):
            for _ in range(64):
                stream.write("x" * (1 << 20))
            stream.flush()
        return "a long story " * 100_000
    if how == "hang":
        time.sleep(600)
    if how in ("killed", "die"):
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSEGV)
    if how == "pause":
        resume = f"import os, signal, time; time.sleep(3); os.kill({os.getpid()}, signal.SIGCONT)"
        subprocess.Popen([sys.executable, "-c", resume])
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "exit":
        os._exit(7)
    if how == "fault":
        raise Unfinished("CUDA error: an illegal memory access")
    if how == "unusable":
        raise Unusable("the GPU can't be used: an uncorrectable ECC error")
    if how.startswith("reason"):
        raise ValueError(how)
    if how == "broken":
        raise RuntimeError("no room on the GPU\nand advice")
    return "y[0, 0] is 1, wanted 2" if how == "wrong" else None


if __name__ == "__main__":
    serve(Connection(int(sys.argv[-1])), test)
