"""``aot`` and ``python -m pretuned.aot``: finds what is missing, then hands over to the command line."""

from __future__ import annotations

import io
import os
import sys
import warnings

_NEEDED = ("click", "rich")  # --help needs these; other packages are checked at their use


def main() -> int:
    """The command line's entry point; returns the exit code."""
    if not (__package__ or "").startswith("pretuned."):
        print(
            'this folder is no program by itself: run pip install ".[aot]" in the repository, then aot --help',
            file=sys.stderr,
        )
        return 1
    from importlib.util import find_spec

    _open_standard_streams()
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        if sys.argv[1:] == ["--version"]:
            from importlib.metadata import version

            print(f"pretuned       {version('pretuned')}")
            return 0
        print(
            f'aot needs the builder\'s packages ({", ".join(missing)} missing): pip install "pretuned[aot]"',
            file=sys.stderr,
        )
        return 1
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's; not needed here
    from .process.interrupts import interrupted, tidy_interrupts

    try:
        with tidy_interrupts():
            from .cli.main import run

            return run(sys.argv[1:])
    except BaseException as error:  # while it was still importing
        if not (interrupted() or isinstance(error, KeyboardInterrupt)):
            raise
        print("interrupted", file=sys.stderr)
        return 130


def _open_standard_streams() -> None:
    """Open closed standard streams (``2>&-``) on /dev/null, or the next opened file would become one of them."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is ``number``
            setattr(sys, name, os.fdopen(number, mode))
        raw = getattr(getattr(sys, name), "buffer", None)
        if mode == "w" and isinstance(raw, io.RawIOBase):  # PYTHONUNBUFFERED: a short write would lose the rest
            setattr(sys, name, _whole(getattr(sys, name), raw))


def _whole(stream: io.TextIOWrapper, raw: io.RawIOBase) -> io.TextIOWrapper:
    """``stream`` with a buffer that retries short writes until all is written or an error is raised."""
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True)


if __name__ == "__main__":
    sys.exit(main())
