"""A process that opens, reads and closes bundles for long, and one that is ended meanwhile: nothing grows or stays."""

from __future__ import annotations

import gc
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import golden_bundles
import pytest

from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.publishing import publish

pytestmark = pytest.mark.slow

LOAD = """
import sys
from pretuned.artifacts.bundle_file import open_bundle
print("begin", flush=True)
while True:
    with open_bundle(sys.argv[1]) as file:
        file.load()
"""


def cycles(folder: Path, rounds: int) -> dict[str, int]:
    """Open, read and close so often: by how many descriptors, and KiB of memory, the process grew."""
    path = folder / "b.msgpack"
    publish(path, codec.encode(golden_bundles.gpus()))

    def once(turn: int) -> None:
        file = open_bundle(path, later=turn % 2 == 1)
        for problem in file.problems():
            file.find(problem)
        file.cubin(turn % file.variant_count)
        if turn % 3:  # the others are left to the collector
            file.close()

    for turn in range(50):  # what is kept for good is kept by then
        once(turn)
    before = held()
    for turn in range(rounds):
        once(turn)
    return {name: now - before[name] for name, now in held().items()}


def held() -> dict[str, int]:
    """Return the counts of objects in the process, after garbage was collected."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * (resource.getpagesize() >> 10)
    return {"descriptors": len(list(Path("/proc/self/fd").iterdir())), "KiB": resident}


@pytest.mark.parametrize("rounds", [2_500, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_nothing_grows(tmp_path: Path, rounds: int) -> None:
    grown = cycles(tmp_path, rounds)
    assert grown["descriptors"] <= 0
    assert grown["KiB"] < 2048


def test_ended_in_a_load(tmp_path: Path) -> None:
    """By SIGTERM at any time: it ends by that, says nothing, and the next one loads."""
    path = tmp_path / "b.msgpack"
    publish(path, codec.encode(golden_bundles.medium()))
    pauses = random.Random(0)
    for _ in range(10):
        command = ["env", "--default-signal=TERM", sys.executable, "-c", LOAD, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                process.wait(pauses.random() * 0.05)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (-signal.SIGTERM, b"")
    with open_bundle(path) as file:
        assert file.load() == golden_bundles.medium()
    assert list(tmp_path.iterdir()) == [path]
