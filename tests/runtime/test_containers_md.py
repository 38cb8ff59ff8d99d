"""docs/use/containers.md's rules for owners of bundles, in processes of a user that no passwd file lists."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "artifacts" / "bundles" / "catalogue-sm80.msgpack"
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to groups: needs root")


def doctor(bundles: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """The doctor, without a home directory and with these bundles named."""
    env = {"PATH": os.environ["PATH"], "PRETUNED_BUNDLES": str(bundles), "CUDA_VISIBLE_DEVICES": ""}
    words = ["-m", "pretuned.runtime"]
    if not before:
        return warm.run(words, env=env, cwd="/")
    command = [*before, sys.executable, "-B", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=env)


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    folder = tmp_path / "bundles"
    folder.mkdir()
    shutil.copy(BUNDLE, folder)
    (folder / BUNDLE.name).chmod(0o644)
    folder.chmod(0o755)
    return folder


def test_any_user_uses_what_is_in_the_image(bundles: Path) -> None:
    done = doctor(bundles, "unshare", "--map-user=12345", "--map-group=12345")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{bundles / BUNDLE.name} (sm_80" in done.stdout


@ROOT_ONLY
def test_a_volume_with_an_fsgroup_is_refused_and_zero_is_not(bundles: Path) -> None:
    """The kubelet leaves it so: the group's, writable by it, set-group-ID."""
    os.chown(bundles, 0, 2000)
    bundles.chmod(0o2775)
    done = doctor(bundles)
    assert done.returncode == 1
    assert "group 2000 can write it" in done.stdout
    assert "ok        no" in done.stdout
    os.chown(bundles, 0, 0)
    bundles.chmod(0o2775)
    done = doctor(bundles)
    assert done.returncode == 0, done.stdout


def test_what_everybody_can_write_is_refused(bundles: Path) -> None:
    bundles.chmod(0o777)
    done = doctor(bundles)
    assert done.returncode == 1
    assert "everybody can write it" in done.stdout


def test_the_dockerfile_keeps_what_the_page_says() -> None:
    text = (ROOT / "examples" / "container" / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[:2] == ["ARG BASE=python:3.12-slim", "FROM ${BASE}"]
    assert "COPY --chown=0:0 --chmod=0755 bundles /opt/pretuned/bundles" in lines
    assert lines.index("RUN python -m pretuned.runtime") < lines.index("USER 12345")
    assert not any("apt-get" in line or "gcc" in line for line in lines)


def test_the_dockerfile_for_vllm_checks_its_bundles_when_it_is_built() -> None:
    text = (ROOT / "examples" / "container" / "vllm.Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[:2] == ["ARG BASE=vllm/vllm-openai", "FROM ${BASE}"]
    copied = lines.index("COPY --chown=0:0 --chmod=0755 bundles /opt/pretuned/bundles")
    named = lines.index("ENV PRETUNED_BUNDLES=/opt/pretuned/bundles")
    assert copied < named < lines.index("RUN python3 -m pretuned.runtime")
