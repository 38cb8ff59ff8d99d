"""The names that the package hands on: each is its module's own, imported when it is first used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from pretuned import artifacts


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    assert sorted(artifacts.__all__) == sorted(artifacts._PUBLIC)
    for name, module in artifacts._PUBLIC.items():
        assert getattr(artifacts, name) is getattr(importlib.import_module(f"pretuned.artifacts.{module}"), name)
        assert name in dir(artifacts)
    with pytest.raises(AttributeError, match="no attribute 'open_bundel'"):
        _ = artifacts.open_bundel


def test_the_package_alone_reads_no_format() -> None:
    code = "import sys, pretuned.artifacts; print([m for m in sys.modules if 'msgpack' in m or 'artifacts.f' in m])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
