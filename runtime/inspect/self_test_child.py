"""The child process of ``self_test_all.py``: tests variants one after another, and sends a message of JSON after each.

Messages have a pipe of their own, as kernels may print on the standard output. The first message is empty and says that
the process is ready; then the process receives a list of variants.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from ...artifacts.bundle_file import BundleFile, open_bundle
from ...artifacts.errors import BundleCorrupt
from ..driver.cuda import Unfinished, Unusable

_MOST_CHARS = 4096  # most characters of a reason

# (device, path, the bundle's digest in hex, variant) -> the fault, or None
Test = Callable[[int, str, str, int], "str | None"]


def serve(pipe: Connection, test: Test) -> None:
    """Test the requested variants until one leaves the GPU unusable. Send [wrong, untested, ends] for each."""
    pipe.send_bytes(b"")
    for job in json.loads(pipe.recv_bytes()):
        wrong = untested = None
        ends = False
        try:
            wrong = test(*job)
        except Unfinished as error:
            wrong, ends = str(error), True
        except Exception as error:
            untested = next(iter(str(error).splitlines()), "") or type(error).__name__
            ends = isinstance(error, Unusable)
        pipe.send_bytes(json.dumps([wrong and wrong[:_MOST_CHARS], untested and untested[:_MOST_CHARS], ends]).encode())
        if ends:
            return


@contextlib.contextmanager
def of_digest(path: str, digest: str) -> Iterator[BundleFile]:
    """Open the bundle at this path, which must have this digest (hex)."""
    with open_bundle(path) as bundle:
        if bundle.digest.hex() != digest:
            raise BundleCorrupt(f"bundle {path!r}: another file took its place")
        yield bundle


def main() -> None:
    """Test on the GPU, with messages through the pipe whose descriptor is the first argument."""
    from ..driver.device import local_gpu
    from ..launch.loader import loaded
    from ..launch.self_test import tried

    def test(device: int, path: str, digest: str, index: int) -> str | None:
        with of_digest(path, digest) as bundle:
            return tried(loaded(bundle, index, device, local_gpu(device).gpu.sm_count))

    serve(Connection(int(sys.argv[1])), test)


if __name__ == "__main__":
    main()
