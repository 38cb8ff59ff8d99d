"""Stand-ins for the compiler: what may go wrong in a worker. A spawned worker imports this by name."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

from pretuned.aot.compile.triton import Compiled, compile_variant
from pretuned.artifacts.errors import CompileError
from pretuned.kernels.rowops import RowOpSpec
from pretuned.kernels.spec import Spec


def _odd(spec: Spec | RowOpSpec) -> bool:
    """The jobs that go wrong; the others compile."""
    return isinstance(spec, Spec) and spec.config.num_stages == 5


def without_torch(spec: Spec | RowOpSpec, sm: int) -> Compiled:
    compiled = compile_variant(spec, sm)
    if "torch" in sys.modules:
        raise CompileError("the worker imported torch")
    return compiled


def aborts(spec: Spec | RowOpSpec, sm: int) -> Compiled:
    if _odd(spec):
        os.abort()
    return compile_variant(spec, sm)


def hangs(spec: Spec | RowOpSpec, sm: int) -> Compiled:
    """Hangs in a child of its own, as an assembler would."""
    if _odd(spec):
        child = subprocess.Popen(["sleep", "600"])
        Path(os.environ["PRETUNED_TEST_PID"]).write_text(str(child.pid))
        child.wait()
    return compile_variant(spec, sm)


def refuses(spec: Spec | RowOpSpec, sm: int) -> Compiled:
    if _odd(spec):
        raise CompileError(f"{spec} for sm_{sm}: no such instruction")
    return compile_variant(spec, sm)


def refuses_all(spec: Spec | RowOpSpec, sm: int) -> Compiled:
    raise CompileError(f"{spec} for sm_{sm}: no such instruction")


def refuses_80(spec: Spec | RowOpSpec, sm: int) -> Compiled:
    return refuses_all(spec, sm) if sm == 80 else compile_variant(spec, sm)


def disk_is_full(spec: Spec | RowOpSpec, sm: int) -> Compiled:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/variant.ptx")


def must_not_run(spec: Spec | RowOpSpec, sm: int) -> Compiled:
    raise CompileError("compiled although it is in the cache")


def slowly(spec: Spec | RowOpSpec, sm: int) -> Compiled:
    time.sleep(600)
    return compile_variant(spec, sm)
