from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pretuned.aot.cli.exits import guarded, told
from pretuned.artifacts import errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InputError("x"), 2),
        (errors.BundleCorrupt("x"), 2),
        (errors.BundleUntrusted("x"), 2),  # a PermissionError too: the bundle decides
        (errors.BundleUnreadable("x"), 2),
        (errors.TargetMismatch("x"), 2),
        (errors.ProblemNotInBundle("x"), 2),
        (errors.HostError("x"), 1),
        (errors.CudaError("x"), 1),
        (errors.CompileError("x"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (MemoryError(), 1),
        (ModuleNotFoundError("No module named 'pebble'", name="pebble"), 1),
        (click.UsageError("x"), 2),
        (click.BadParameter("x"), 2),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (ZeroDivisionError("x"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise error

    assert guarded(command, debug=False) == code
    message = capsys.readouterr().err
    assert message.strip()
    assert "Traceback" not in message


def test_a_missing_package_names_the_extra() -> None:
    _, message = told(ModuleNotFoundError("No module named 'pebble'", name="pebble"))
    assert message == 'error: pebble is not installed: pip install "pretuned[aot]"'


def test_an_output_that_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "pretuned.aot", "models"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: can't write the output: No space left on device\n"


def test_an_unforeseen_error_says_so_and_where() -> None:
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as error:
        code, message = told(error)
    assert code == 1
    assert message.startswith("internal error: ZeroDivisionError: by zero (test_exits.py:")


def test_an_exit_that_was_asked_for_passes() -> None:
    def command() -> int:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        guarded(command, debug=False)
