"""The child process of ``prove.py``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

from ...artifacts.errors import BundleCorrupt
from ...artifacts.files.bundle_file import BundleFile, open_bundle
from ..driver.cuda import Unfinished

LONGEST_S = 60  # for the test of one variant
_MOST_CHARS = 4096  # of a reason

# (device, path, the bundle's digest in hex, variant): the loaded kernel
_Load = Callable[[int, str, str, int], Any]


class Results:
    """What a child writes: a line when a variant begins, and a line with its result."""

    def __init__(self, told: IO[str], mark: str) -> None:
        self._told, self._mark, self._one = told, mark, threading.Lock()

    def write(self, **what: str | None) -> None:
        """A line of its own, whatever was printed before."""
        short = {name: text and text[:_MOST_CHARS] for name, text in what.items()}
        print(f"\n{self._mark}{json.dumps(short)}", file=self._told, flush=True)

    @contextlib.contextmanager
    def watched(self, longest_s: int) -> Iterator[None]:
        """End the process with a result for a test that hangs.

        Seconds in which this process itself ran are counted: stopped, or suspended with its machine, it does not hang.
        """
        done = threading.Event()

        def watch() -> None:
            for _ in range(longest_s):
                if done.wait(1.0):
                    return
            with self._one:
                if not done.is_set():
                    self.write(wrong=f"it did not end within {longest_s} s")
                    os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            with self._one:
                done.set()


def serve(
    given: IO[str], told: IO[str], load: _Load, test: Callable[[Any], str | None], longest_s: int = LONGEST_S
) -> int:
    """Test the variants that are asked for, until one leaves the GPU unusable. Returns the exit code.

    A result is ``wrong``: what the variant computed wrongly, or None; or ``untested``: why nothing can be said of it.
    """
    mark, device, asked = json.load(given)
    results = Results(told, mark)
    for path, digest, index in asked:
        results.write(begin=str(index))
        try:
            kernel = load(device, path, digest, index)
            with results.watched(longest_s):
                wrong = test(kernel)
        except Unfinished as error:
            results.write(wrong=str(error))
            return 1
        except Exception as error:
            results.write(untested=next(iter(str(error).splitlines()), "") or type(error).__name__)
        else:
            results.write(wrong=wrong)
    return 0


@contextlib.contextmanager
def of_digest(path: str, digest: str) -> Iterator[BundleFile]:
    """The bundle of this path, which has to be the one with this digest (hex)."""
    with open_bundle(path) as bundle:
        if bundle.digest.hex() != digest:
            raise BundleCorrupt(f"bundle {path!r}: another file took its place")
        yield bundle


def main() -> int:
    """Test them on the GPU (what imports torch is imported here)."""
    from ..driver.device import local_gpu
    from ..launch.loader import loaded
    from ..launch.proof import tried

    def load(device: int, path: str, digest: str, index: int) -> Any:
        with of_digest(path, digest) as bundle:
            return loaded(bundle, index, device, local_gpu(device).gpu.sm_count)

    return serve(sys.stdin, sys.stdout, load, tried)


if __name__ == "__main__":
    sys.exit(main())
