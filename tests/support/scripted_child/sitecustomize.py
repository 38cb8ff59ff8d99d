"""Stands for a process that tests kernels, without torch and a GPU: put this folder first in ``PYTHONPATH``.

``SCRIPT`` is JSON: by the kernel's number how the process ends, or hangs. All other kernels are right.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from pretuned.runtime.inspect.self_test_child import serve


def test(_device: int, _path: str, _digest: str, index: int) -> str | None:
    how = json.loads(os.environ["SCRIPT"])[index]
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        os._exit(7)
    if how == "hang":
        time.sleep(600)
    if how == "broken":
        raise RuntimeError("no room on the GPU\nand advice")
    return "y[0, 0] is 1, wanted 2" if how == "wrong" else None


if "pretuned.runtime.inspect.self_test_child" in sys.orig_argv:
    serve(Connection(int(sys.orig_argv[-1])), test)
    os._exit(0)
