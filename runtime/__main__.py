"""``python -m pretuned.runtime [--vllm | --sglang | --self-test | --batch-invariance] [--json]``: machine reports."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from typing import Any

from ..artifacts.errors import PretunedError

_INTERRUPTED = 130
_READER_LEFT = 141  # 128 + SIGPIPE: a shell's exit code of a program whose reader (head, less) closed the pipe


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns
    -------
    int
        0 if each GPU has a usable bundle or there is no GPU, 130 if interrupted, 141 if the output pipe was
        closed, else 1.
    """
    try:
        return _main(_parsed(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pretuned.runtime",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show which bundles this machine uses, which it does not, and why: GPUs, driver, bundle search "
        "path, bundles.",
        epilog="examples:\n"
        "  python -m pretuned.runtime\n"
        "  python -m pretuned.runtime --vllm       # with vLLM's own Python\n"
        "  python -m pretuned.runtime --self-test  # once, on a new GPU model\n"
        "  python -m pretuned.runtime --batch-invariance\n"
        "  python -m pretuned.runtime --json | head -20\n\n"
        "exit codes:\n"
        "  0    every GPU has a bundle, or the machine has no GPU; --self-test: all kernels are right;\n"
        "       --batch-invariance: no bit differs\n"
        "  1    a problem is listed\n"
        "  130  interrupted\n"
        "  141  the output pipe was closed",
    )
    engine = parser.add_mutually_exclusive_group()
    for name in importlib.import_module("pretuned.integrations").ENGINES:
        engine.add_argument(
            f"--{name}",
            dest="engine",
            action="store_const",
            const=name,
            help=f"show whether {name} in this environment would use pretuned",
        )
    engine.add_argument(
        "--self-test",
        action="store_true",
        help="test every kernel that was never run on this GPU's capability, in a process of its own; "
        "wrong ones are not used any more",
    )
    engine.add_argument(
        "--batch-invariance",
        action="store_true",
        help="compare tokens' results in batches of many sizes, bit for bit, in the batch-invariant mode",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parser.add_argument("--version", action="store_true", help="show pretuned's version")
    return parser.parse_args(arguments)


def _main(options: argparse.Namespace) -> int:
    if options.version:
        from importlib import metadata  # imported here: an interrupt at this module's import would show a traceback

        print(f"pretuned {metadata.version('pretuned')}")
        return 0
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Failed to initialize NumPy"
        )  # torch without numpy warns; nothing here needs numpy
        from .inspect import doctor, self_test_all

    try:
        report: Any = self_test_all.examine() if options.self_test else None
        if options.batch_invariance:
            from .api import batch_invariance  # imported here: it imports everything that computes

            report = batch_invariance.examine(progress=lambda line: print(line, file=sys.stderr, flush=True))
        report = report or (doctor.examine_engine(options.engine) if options.engine else doctor.examine())
    except PretunedError as error:
        print(f"pretuned: {error}", file=sys.stderr)
        return 1
    return shown(report, as_json=options.json)


def shown(report: Any, *, as_json: bool) -> int:
    """Print a report, and return the exit code."""
    try:
        print(json.dumps(report.to_dict(), indent=2) if as_json else report, flush=True)
    except BrokenPipeError:
        _drop_output()
        return _READER_LEFT
    except OSError as error:
        _drop_output()
        print(f"pretuned: can't write the output: {error.strerror}", file=sys.stderr)
        return 1
    return 0 if report.ok else 1


def _drop_output() -> None:
    """Discard unwritten output, so that the interpreter's last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
