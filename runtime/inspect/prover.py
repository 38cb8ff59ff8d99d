"""The child process of ``prove.py``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import IO

from ...artifacts.errors import BundleCorrupt, BundleError, DriverTooOld
from ...artifacts.files.bundle_file import open_bundle
from ..driver.cuda import Unfinished

_MOST_CHARS = 4096  # of what a variant gets wrong

# (device, path, the bundle's digest in hex, variant): what it gets wrong
_Tried = Callable[[int, str, str, int], "str | None"]


def serve(given: IO[str], told: IO[str], one_tried: _Tried) -> int:
    """What a child does: try what it is asked, until something leaves the GPU unusable. Returns its exit code."""
    mark, device, asked = json.load(given)

    def tell(what: dict[str, object]) -> None:
        print(f"\n{mark}{json.dumps(what)}", file=told, flush=True)  # on a line of its own, whatever was printed before

    for path, digest, index in asked:
        tell({"begin": index})
        try:
            wrong, goes_on = one_tried(device, path, digest, index), True
        except Unfinished as error:
            wrong, goes_on = str(error), False
        except DriverTooOld as error:  # no fault of the code's: another driver may read it
            tell({"stopped": str(error)[:_MOST_CHARS]})
            return 1
        except BundleError as error:  # its code is damaged: the runtime drops the bundle
            wrong, goes_on = str(error), True
        except Exception as error:  # no fault of the code's: there is no room on the GPU, say
            tell({"stopped": f"{type(error).__name__}: {error}"[:_MOST_CHARS]})
            return 1
        tell({"wrong": wrong and wrong[:_MOST_CHARS]})
        if not goes_on:
            return 1
    return 0


def main() -> int:
    """Try them on the GPU (what imports torch is imported here)."""
    from ..driver.device import local_gpu
    from ..launch.loader import loaded
    from ..launch.proof import tried

    def tried_here(device: int, path: str, digest: str, index: int) -> str | None:
        with open_bundle(path) as bundle:
            if bundle.digest.hex() != digest:
                raise BundleCorrupt(f"bundle {path!r}: another file took its place while it was being proven")
            return tried(loaded(bundle, index, device, local_gpu(device).gpu.sm_count))

    return serve(sys.stdin, sys.stdout, tried_here)


if __name__ == "__main__":
    sys.exit(main())
