"""A file swapped or rewritten between check and load: what was verified is what loads."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from pathlib import Path

import golden_bundles
import pytest

from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import BundleError

BUNDLES = [golden_bundles.medium(seed=seed) for seed in (0, 1)]
DATA = [codec.encode(bundle) for bundle in BUNDLES]
CUBINS = {data[31:63]: bundle.cubins for data, bundle in zip(DATA, BUNDLES, strict=True)}
PINS = [hashlib.sha256(data).hexdigest() for data in DATA]
ROUNDS = 10_000

pytestmark = pytest.mark.slow


def swapped(path: Path, in_place: bool, pin: str | None, rounds: int) -> tuple[int, int]:
    """Return how often a load of a file that is swapped all the time gave a whole bundle, and how often an error.

    AssertionError where it gave anything else.
    """
    path.write_bytes(DATA[0])
    stop = threading.Event()
    pauses = random.Random(0)

    def swap() -> None:
        turn = 0
        while not stop.is_set():
            turn ^= 1
            if in_place:
                with path.open("r+b") as file:
                    file.write(DATA[turn])
                    file.truncate()
            else:
                path.with_name("new").write_bytes(DATA[turn])
                path.with_name("new").replace(path)
            time.sleep(pauses.choice((0, 0.0002, 0.005, 0.02)))  # now and then long enough for a whole read

    swapper = threading.Thread(target=swap)
    swapper.start()
    loaded = refused = 0
    deadline = time.monotonic() + 30
    try:
        # On a busy machine a whole read may need more rounds to fall between two swaps.
        while loaded + refused < rounds or (not loaded and time.monotonic() < deadline):
            try:
                with open_bundle(path, sha256=pin) as file:
                    cubins = tuple(file.cubin(i) for i in range(file.variant_count))
            except BundleError:
                refused += 1
            else:
                assert cubins == CUBINS[file.digest]
                assert pin is None or file.digest == DATA[0][31:63]
                loaded += 1
    finally:
        stop.set()
        swapper.join()
    return loaded, refused


@pytest.mark.parametrize("in_place", [False, True], ids=["renamed", "rewritten in place"])
@pytest.mark.parametrize("pin", [None, PINS[0]], ids=["place", "pin"])
def test_swapped(tmp_path, in_place, pin):
    loaded, refused = swapped(tmp_path / "b.msgpack", in_place, pin, ROUNDS)
    assert loaded > 0
    if not in_place and pin is None:
        assert refused == 0
