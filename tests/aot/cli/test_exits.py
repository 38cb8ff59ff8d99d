from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from building import MODEL, fill

from pretuned.aot.bundle.verify import verify
from pretuned.aot.cli.exits import exit_of, guarded, quiet_without_reader
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
    _, message = exit_of(ModuleNotFoundError("No module named 'pebble'", name="pebble"))
    assert message == 'error: pebble is not installed: pip install "pretuned[aot]"'


@pytest.mark.slow
def test_closed_standard_streams(tmp_path: Path, compiled_models: Path) -> None:
    fill(tmp_path / "cache", compiled_models, lacking=2)
    for closed in ("2>&-", ">&-", "<&- >&- 2>&-"):
        out = tmp_path / f"{len(closed)}.msgpack"
        words = (
            "-m",
            "pretuned.aot",
            "compile",
            "--models",
            f"'{MODEL}'",
            "--sm",
            "80",
            "--cache-dir",
            tmp_path / "cache",
            "-o",
            out,
            closed,
        )
        command = " ".join(map(str, (sys.executable, *words)))
        done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert verify(str(out)).target == "sm_80"
        assert len(list((tmp_path / "cache").glob("??/*.bin"))) == 15, "the first compiled two"


BUFFERING = pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])


@BUFFERING
def test_an_output_that_is_full(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "pretuned.aot", "models"]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr == "error: can't write the output: No space left on device\n"


@BUFFERING
def test_where_no_message_can_be_written_the_code_tells(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "pretuned.aot", "verify", "none.msgpack", "--sha256", "x", "--no-such-option"]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, b"")


@BUFFERING
def test_an_output_that_ends_within_a_write_is_no_success(tmp_path: Path, unbuffered: str) -> None:
    """A disk fills up: the first bytes are written, the rest is not."""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
    program = f"{limited}import sys; from pretuned.aot.__main__ import main; sys.exit(main())"
    with (tmp_path / "out.json").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-B", "-c", program, "models", "--json"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment,
        )
    assert (done.returncode, done.stderr) == (1, "error: can't write the output: File too large\n")


@pytest.mark.parametrize(
    "arguments",
    [["models"], ["models", "--json"], ["--help"], ["models", "--help"], ["--version"]],
    ids=" ".join,
)
def test_a_reader_that_has_left(arguments: list[str]) -> None:
    """``aot models | head -1`` prints no error and exits with the code that a shell shows for SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "pretuned.aot", *arguments]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_a_reader_that_leaves_a_build_has_its_bundle(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        spec = "shape:E=8,H=256,I=128,k=2 ops=dW tokens=1..64"  # of what ships compiled
        command = [sys.executable, "-m", "pretuned.aot", "build", "--models", spec, "--sm", "80", "--no-cache"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert verify(str(tmp_path / "bundles" / "pretuned-sm80.msgpack"))


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError"])
@pytest.mark.parametrize(("module", "verb"), [("torch", "doctor"), ("click", "models")])
def test_an_interrupt_that_an_import_makes_another_error(module: str, verb: str, error: str, tmp_path: Path) -> None:
    """Native code that imports does so: numpy's and PIL's."""
    (tmp_path / f"{module}.py").write_text(f"""
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    raise {error}("no core") from None
""")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    command = ["env", "--default-signal=INT", sys.executable, "-m", "pretuned.aot", verb]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_pipe_that_broke_elsewhere_is_reported() -> None:
    with pytest.raises(errors.HostError, match="ended early"), quiet_without_reader():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_an_unforeseen_error_says_so_and_where() -> None:
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as error:
        code, message = exit_of(error)
    assert code == 1
    assert message.startswith("internal error: ZeroDivisionError: by zero (test_exits.py:")


def test_an_exit_that_was_asked_for_passes() -> None:
    def command() -> int:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        guarded(command, debug=False)
