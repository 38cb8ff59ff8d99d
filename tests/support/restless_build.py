"""A build whose compiler makes its temporary folder again and again, as Triton does; "deaf", and hears no signal."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from pretuned.aot.compile.pool import CompileJob, compile_all
from pretuned.artifacts.records import DType, RowOp
from pretuned.kernels.rowops import RowOpSpec


def restless(spec: object, sm: int) -> None:
    folder = Path(tempfile.gettempdir()) / "triton" / "cache"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(os.getpid())).write_text("{}")
        sum(range(20000))  # Python's own lock is held meanwhile


def deaf(spec: object, sm: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
    (Path(tempfile.gettempdir()) / str(os.getpid())).write_text("{}")
    time.sleep(600)


if __name__ == "__main__":
    jobs = [CompileJob(RowOpSpec(value, DType.BF16), 80) for value in (RowOp.GATHER, RowOp.COMBINE)]
    compile_all(jobs, workers=2, compile_one={"restless": restless, "deaf": deaf}[sys.argv[1]])  # type: ignore[dict-item]
