"""Run work in a child process: compiling, and measuring on the GPU.

A compiler may abort, a kernel under test may fault, and both change process-wide state. Processes that
``multiprocessing`` spawns would run a script without a ``__main__`` guard again. So the child is a plain Python with
this process's sys.path. It ends with its parent, also if that is killed, and removes its files (``end_with_parent``).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...artifacts.errors import BundleError, CompileError, HostError, InputError, PretunedError
from ...artifacts.locking import has_none

_PREFIX = "pretuned-build-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder in the system's temporary directory; remove it afterwards, and folders that killed runs left.

    Its owner holds a lock on it, so that later runs recognise stale folders. It is named before it is made, so that an
    interrupt leaves nothing behind. Names never repeat: a run that took one for stale may still remove it.
    """
    folder, fd = _named(), -1
    try:
        while True:
            folder.mkdir(mode=0o700)
            if (fd := _locked(folder)) >= 0:
                break
            folder = _named()
        _sweep(folder.parent)
        yield folder
    finally:
        remove_tree(folder)
        if fd >= 0:
            os.close(fd)


def _named() -> Path:
    return Path(tempfile.gettempdir(), f"{_PREFIX}{secrets.token_hex(8)}")


def _locked(folder: Path) -> int:
    """Lock the folder and return its descriptor; -1 if another run has removed it as stale."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if not has_none(error):
            os.close(fd)
            raise HostError(f"can't lock '{folder}': {error.strerror}. Name another folder with TMPDIR") from error
        return fd  # this file system has no locks, so no other run removes it as stale
    if folder.exists():
        return fd
    os.close(fd)
    return -1


def remove_tree(folder: Path) -> None:
    """Remove the folder and its contents; whatever can't be removed is left to the next run."""
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(folder)
            finally:
                os.close(fd)


_START = (
    "import json, sys; work = json.load(sys.stdin); sys.path[:] = work['path']; "
    "from pretuned.aot.process.child import work_on; work_on(work)"
)
_CHARS = 2000  # of a dead child's last output
_RAISED = {error.__name__: error for error in (CompileError, HostError, InputError)}
_TIDYING_S = 3.0  # seconds at most for removing the files


def call(
    function: Callable[..., None],
    arguments: Mapping[str, object],
    *,
    timeout_s: float,
    who: str,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> bytes:
    """Run a module's function in a child, and return what it wrote to the file ``answer``.

    The function gets plain keyword arguments and ``answer``. ``files`` are next to ``answer``, by name. ``who`` begins
    the error if there is no temporary directory. If this process is killed, the child ends too and removes the files.

    Raises
    ------
    CompileError, HostError, InputError
        raised by the function; HostError also if the child died or was too slow. Ctrl-C ends the child too.
    """
    if not sys.executable:
        raise HostError("this Python does not know its own executable: nothing can be compiled or tuned on demand")
    try:
        with scratch_folder() as scratch:
            answer = scratch / "answer"
            for name, data in files.items():
                (scratch / name).write_bytes(data)
            _run(f"{function.__module__}:{function.__name__}", arguments, answer, timeout_s)
            return answer.read_bytes()
    except OSError as error:
        if isinstance(error, PretunedError):
            raise
        raise HostError(f"{who} needs a temporary directory: {error}; TMPDIR names another one") from error


def _run(function: str, arguments: Mapping[str, object], answer: Path, timeout_s: float) -> None:
    """Run ``function``, which is MODULE:NAME, in a child process that writes to ``answer``."""
    error_file = answer.with_suffix(".error")
    work = {
        "path": sys.path,
        "function": function,
        "arguments": dict(arguments),
        "answer": str(answer),
        "error": str(error_file),
    }
    try:
        with _sentinel() as sentinel:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _START],
                input=json.dumps({**work, "sentinel": sentinel}),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                start_new_session=True,
                pass_fds=(sentinel,),
            )
    except subprocess.TimeoutExpired:
        raise HostError(f"{function} did not end within {timeout_s:g} s and was stopped") from None
    except OSError as error:
        raise HostError(f"{function}: {sys.executable!r} can't be started: {error.strerror}") from error
    if done.returncode == 0 and answer.is_file():
        return
    if error_file.is_file():
        kind, text = json.loads(error_file.read_text())
        raise _RAISED.get(kind, HostError)(text)
    raise HostError(f"{function}: its process died ({how_ended(done.returncode)}): {done.stderr.strip()[-_CHARS:]}")


@contextlib.contextmanager
def _sentinel() -> Iterator[int]:
    """The reading end of a pipe that is never written: it ends when this process does."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


def work_on(work: Mapping[str, Any]) -> None:
    """The child's part: call the function, and write its error to a file."""
    end_with_parent(work["sentinel"], Path(work["answer"]).parent)
    module, _, name = work["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        function(**work["arguments"], answer=Path(work["answer"]))
    except PretunedError as error:
        kind = InputError if isinstance(error, BundleError) else type(error)
        Path(work["error"]).write_text(json.dumps([kind.__name__, str(error)]))
        sys.exit(1)
    except Exception as error:  # the process's boundary
        trace = traceback.format_exc()[-_CHARS:]
        Path(work["error"]).write_text(json.dumps(["HostError", f"{type(error).__name__}: {error}\n{trace}"]))
        sys.exit(1)


def how_ended(exitcode: int | None) -> str:
    """``exit 3``, or the name of the signal that ended a process."""
    if exitcode is None or exitcode >= 0:
        return f"exit {exitcode}"
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def end_with_parent(sentinel: int, scratch: Path) -> None:
    """End this process and its group when its parent has ended, and remove ``scratch``; call it in the main thread.

    ``sentinel`` is the reading end of a pipe whose other end only the parent holds. The main thread removes the
    folder itself: if it went on working, Triton would make the folder again.
    """
    signal.signal(signal.SIGURG, lambda number, frame: _tidy(scratch))  # a signal that LLVM does not use
    threading.Thread(target=_wait, args=(sentinel, scratch), daemon=True).start()


def _wait(sentinel: int, scratch: Path) -> None:
    connection.wait([sentinel])
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
    time.sleep(2 * _TIDYING_S)
    _tidy(scratch)  # the main thread is in foreign code that does not come back


def _tidy(scratch: Path) -> None:
    """Remove the scratch folder, and end."""
    end = time.monotonic() + _TIDYING_S
    remove_tree(scratch)
    while scratch.exists() and time.monotonic() < end:  # another process was writing there
        time.sleep(0.02)
        remove_tree(scratch)
    os.killpg(0, signal.SIGKILL)
