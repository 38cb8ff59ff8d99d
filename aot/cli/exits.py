"""Turn exceptions into messages and exit codes; this happens nowhere else."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator

import click

from ...artifacts.errors import BundleError, HostError, InputError, PretunedError, ProblemNotInBundle
from ..process.interrupts import interrupted
from .table import echo

OK = 0
ENVIRONMENT = 1  # an error of the machine: no GPU, a full disk, a missing package, a compiler that fails
INPUT = 2  # an error of the input: an option, a spec, a bundle
INTERRUPTED = 130
READER_LEFT = 141  # 128 + SIGPIPE, as shells report a program whose reader (head, less) closed the pipe

_EXTRA = {"click", "rich", "pebble", "platformdirs"}  # the packages of pretuned[aot]


def guarded(command: Callable[[], int], debug: bool) -> int:
    """Run ``command``; print an error in one message on stderr, with a traceback only for ``debug``."""
    try:
        return command()
    except BaseException as error:
        if debug and not isinstance(error, SystemExit):
            traceback.print_exc()
        code, message = exit_of(error)
        if message:
            with contextlib.suppress(OSError):  # stderr can't be written: only the exit code is left
                echo(message, err=True)
        _drop_unwritten()
        return code


def exit_of(error: BaseException) -> tuple[int, str]:
    """(exit code, message) of an exception; unexpected non-errors are raised again."""
    match error:
        case click.exceptions.Exit():
            return error.exit_code, ""
        case click.UsageError():
            usage = f"\nTry '{error.ctx.command_path} --help'." if error.ctx else ""
            return INPUT, f"error: {error.format_message()}{usage}"
        case click.ClickException():
            return INPUT, f"error: {error.format_message()}"
        case click.Abort():  # click's form of a KeyboardInterrupt
            return INTERRUPTED, str(error.__cause__ or "") or "interrupted"
        case KeyboardInterrupt():
            return INTERRUPTED, str(error) or "interrupted"
        case Exception() if interrupted():
            return INTERRUPTED, "interrupted"
        case InputError() | BundleError() | ProblemNotInBundle():
            return INPUT, f"error: {error}"
        case OSError() if not error.filename and _from_echo(error):
            return ENVIRONMENT, f"error: can't write the output: {error.strerror}"
        case ModuleNotFoundError() if (error.name or "").partition(".")[0] in _EXTRA:
            return ENVIRONMENT, f'error: {error.name} is not installed: pip install "pretuned[aot]"'
        case PretunedError() | OSError() | MemoryError():
            return ENVIRONMENT, f"error: {error or type(error).__name__}"
        case Exception():
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(where.filename)}:{where.lineno}"  # noqa: PTH119
            return ENVIRONMENT, (
                f"internal error: {type(error).__name__}: {error} ({place}). Please report it, with the output of the "
                "same command and --debug"
            )
    raise error


@contextlib.contextmanager
def quiet_without_reader() -> Iterator[None]:
    """If the output pipe was closed, end with ``READER_LEFT``, without a message.

    It is needed inside click's ``main``, which would make it exit code 1.
    """
    try:
        yield
    except BrokenPipeError as error:
        if not _from_echo(error):
            raise HostError(f"another process has ended early: {error}") from error
        _drop_unwritten()
        raise click.exceptions.Exit(READER_LEFT) from None


def _drop_unwritten() -> None:
    """Drop unwritten output: else the interpreter's last flush complains, and exits with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _from_echo(error: OSError) -> bool:
    """True if the error came from printing."""
    return any(frame.name == "echo" for frame in traceback.extract_tb(error.__traceback__))
