"""Python programs in processes of their own that begin with torch imported, which takes seconds by itself.

For tests of what a program does, not of what it imports: each is a fork of one process that imported torch and nothing
of ours, once a session. It is ``subprocess.run`` and ``Popen`` of ``python`` with these words, but for the
interpreter's own options.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

Words = Sequence[str | Path]


class Program:
    """One that runs: what ``subprocess.Popen`` offers of it."""

    def __init__(
        self, words: Words, *, env: Mapping[str, str] | None = None, cwd: Path | str | None = None, stdin: str = ""
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name) / name for name in ("in", "out", "err")]
        for stream, text in zip(self._streams, (stdin, "", ""), strict=True):  # killed at once it has said nothing
            stream.write_text(text)
        self.args = [sys.executable, *map(str, words)]
        streams = [str(stream) for stream in self._streams]
        self._process = context.Process(
            target=_main,
            args=(self.args[1:], dict(os.environ if env is None else env), str(cwd or Path.cwd()), streams),
        )
        self._process.start()

    def send_signal(self, number: int) -> None:
        assert self._process.pid
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """How it ended, and what it said."""
        with self._folder:
            self._process.join(timeout_s)
            if late := self._process.exitcode is None:
                self._process.kill()
                self._process.join()
            outputs = [stream.read_text() for stream in self._streams[1:]]
        if late:
            raise subprocess.TimeoutExpired(self.args, timeout_s, *outputs)
        return subprocess.CompletedProcess(self.args, self._process.exitcode, *outputs)


def run(
    words: Words, *, env: Mapping[str, str] | None = None, cwd: Path | str | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS``, with ``stdin`` on its standard input."""
    return Program(words, env=env, cwd=cwd, stdin=stdin).wait()


def _main(words: list[str], environment: dict[str, str], cwd: str, streams: list[str]) -> None:
    """Run Python's words in the forked process, like ``python`` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, (name, flags) in enumerate(zip(streams, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        opened = os.open(name, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    code: object = 0
    try:
        _as_main(words)
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # as the interpreter would
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _as_main(words: list[str]) -> None:
    match words:
        case ["-c", code, *rest]:
            sys.argv, main = ["-c", *rest], ModuleType("__main__")
            sys.path.insert(0, "")
            sys.modules["__main__"] = main
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case ["-m", name, *rest]:
            sys.argv = [name, *rest]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case [script, *rest]:
            sys.argv = [script, *rest]
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
