"""The child process of ``prove.py``: tests the variants that it is asked for, one message each.

Messages are JSON over a pipe of its own: what code prints on the standard output is none. The first, empty one says
that the process is ready. A result is ``wrong``, what the variant computed wrongly or null, or ``untested``, why
nothing can be said of it; ``ends`` is true where the process can't go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from ...artifacts.errors import BundleCorrupt
from ...artifacts.files.bundle_file import BundleFile, open_bundle
from ..driver.cuda import Unfinished, Unusable

_LONGEST_S = 60  # for the test of one variant
_MOST_CHARS = 4096  # of a reason

# (device, path, the bundle's digest in hex, variant): the loaded kernel
_Load = Callable[[int, str, str, int], Any]


def serve(pipe: Connection, load: _Load, test: Callable[[Any], str | None], longest_s: int = _LONGEST_S) -> None:
    """Test the variants that are asked for, until one leaves the GPU unusable or nobody asks any more."""
    pipe.send_bytes(b"")
    with contextlib.suppress(EOFError):
        while True:
            device, path, digest, index = json.loads(pipe.recv_bytes())
            try:
                kernel = load(device, path, digest, index)
                with _watched(pipe, longest_s):
                    wrong = test(kernel)
            except Unfinished as error:
                return _send(pipe, wrong=str(error), ends=True)
            except Exception as error:
                why = next(iter(str(error).splitlines()), "") or type(error).__name__
                _send(pipe, untested=why, ends=isinstance(error, Unusable))
            else:
                _send(pipe, wrong=wrong)


def _send(pipe: Connection, *, ends: bool = False, **result: str | None) -> None:
    short = {name: text and text[:_MOST_CHARS] for name, text in result.items()}
    pipe.send_bytes(json.dumps({**short, "ends": ends}).encode())


@contextlib.contextmanager
def _watched(pipe: Connection, longest_s: int) -> Iterator[None]:
    """End the process with a result for a test that hangs.

    Seconds in which this process itself ran are counted: stopped, or suspended with its machine, it does not hang.
    """
    done, speaking = threading.Event(), threading.Lock()

    def watch() -> None:
        for _ in range(longest_s):
            if done.wait(1.0):
                return
        with speaking:
            if not done.is_set():
                _send(pipe, wrong=f"it did not end within {longest_s} s", ends=True)
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        with speaking:
            done.set()


@contextlib.contextmanager
def of_digest(path: str, digest: str) -> Iterator[BundleFile]:
    """The bundle of this path, which has to be the one with this digest (hex)."""
    with open_bundle(path) as bundle:
        if bundle.digest.hex() != digest:
            raise BundleCorrupt(f"bundle {path!r}: another file took its place")
        yield bundle


def main() -> None:
    """Test on the GPU, by the pipe whose descriptor is the first argument (what imports torch is imported here)."""
    from ..driver.device import local_gpu
    from ..launch.loader import loaded
    from ..launch.proof import tried

    def load(device: int, path: str, digest: str, index: int) -> Any:
        with of_digest(path, digest) as bundle:
            return loaded(bundle, index, device, local_gpu(device).gpu.sm_count)

    serve(Connection(int(sys.argv[1])), load, tried)


if __name__ == "__main__":
    main()
