"""``python -m pretuned.runtime [--vllm | --sglang | --prove] [--json]``: what this machine would use, and why not."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from typing import Any

from ..artifacts.errors import PretunedError

_READER_LEFT = 141  # 128 + SIGPIPE: what a shell says of a program whose reader (head, less) closed the pipe


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 where each GPU has a usable bundle or there is no GPU, 141 without a reader, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m pretuned.runtime",
        description="Show what this machine would use, and why not: GPUs, driver, places, bundles.",
        epilog="Examples: python -m pretuned.runtime; python -m pretuned.runtime --json | head -20. "
        "Exit code 0 where a bundle would be used (--prove: where all was tested and nothing is wrong), or the machine "
        "has no GPU; 141 where the reader of the output has left; 1 otherwise.",
    )
    engine = parser.add_mutually_exclusive_group()
    for name, called in (("vllm", "vLLM"), ("sglang", "SGLang")):
        engine.add_argument(f"--{name}", dest="engine", action="store_const", const=name,
                            help=f"print whether {called} in this environment would use it")  # fmt: skip
    engine.add_argument("--prove", action="store_true",
                        help="run all code that was never run on this GPU's capability, in a process of its own, and "
                        "leave out what is wrong")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch without it; nothing here needs it
        from .inspect import doctor, engines, prove  # imports torch

    try:
        report: Any = prove.examine() if given.prove else None
        report = report or (engines.examine(given.engine) if given.engine else doctor.examine())
    except PretunedError as error:
        print(f"pretuned: {error}", file=sys.stderr)
        return 1
    try:
        print(json.dumps(report.to_dict(), indent=2) if given.json else report, flush=True)
    except BrokenPipeError:
        _drop_output()
        return _READER_LEFT
    except OSError as error:
        _drop_output()
        print(f"pretuned: can't write the output: {error.strerror}", file=sys.stderr)
        return 1
    return 0 if report.ok else 1


def _drop_output() -> None:
    """Send what is not written yet nowhere: else the interpreter's last flush would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
