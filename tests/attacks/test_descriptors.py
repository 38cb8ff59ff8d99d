"""More bundles than a process may have files open: all are known, and the application keeps its descriptors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import golden_bundles
import pytest

from pretuned.artifacts import codec
from pretuned.artifacts.limits import MAX_FILES
from pretuned.runtime.dispatch.places import Kind, Place

COUNT = 600
LOOK = """
import os, resource, sys
from pathlib import Path
from pretuned.artifacts.records import Gpu, LocalGpu
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
snapshot = Snapshot([Place(Kind.NAMED, Path(sys.argv[1]))])
views = [snapshot.view(LocalGpu(sm, Gpu("x", 1, 1, 13000)), installed=False) for sm in (90, 80)]
files = [open(os.devnull) for _ in range(100)]
for one in views[1].usable:
    one.bundle.cubin(0)
print(len(views[0].usable), len(views[1].usable), len(os.listdir("/proc/self/fd")) - len(files))
"""


def test_more_bundles_than_descriptors(tmp_path: Path) -> None:
    bundle = golden_bundles.small()
    assert bundle.target.sm == 80
    for i in range(COUNT):
        data = codec.encode(bundle._replace(producer=bundle.producer._replace(triton=f"3.7.{i // 2}")))  # each twice
        (tmp_path / f"{i:04d}.msgpack").write_bytes(data)
    done = subprocess.run([sys.executable, "-c", LOOK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sm_90, sm_80, files = map(int, done.stdout.split())
    assert (sm_90, sm_80) == (0, COUNT // 2)  # those that one GPU can not use, another may
    assert files < 80


def test_a_directory_of_a_hundred_thousand_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(MAX_FILES + 10):
        (tmp_path / f"{i:05d}.msgpack").touch()
    files = Place(Kind.NAMED, tmp_path).files()
    assert [len(files), files[-1].name] == [MAX_FILES, f"{MAX_FILES - 1:05d}.msgpack"]
    (record,) = caplog.records
    assert f"holds {MAX_FILES + 10} bundles: the first {MAX_FILES} by name are read" in record.getMessage()
