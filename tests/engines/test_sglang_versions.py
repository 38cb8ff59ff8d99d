"""Methods for MoE layers of older versions of SGLang with pretuned installed: their own runners stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_wheels import unpacked

_SCRIPT = Path(__file__).parents[1] / "support/sglang_methods.py"
_LEFT = ("0.5.12", "0.5.13", "0.5.14", "0.5.15", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22")


@pytest.mark.nightly
@pytest.mark.parametrize("version", _LEFT)
def test_older_versions_run_as_without(version: str) -> None:
    environ = os.environ | {"PYTHONPATH": f"{unpacked('sglang', version)}{os.pathsep}{_SCRIPT.parent}"}
    for mode in ("", "untried"):
        command = [sys.executable, _SCRIPT, mode]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads(done.stdout.splitlines()[-1])
        assert (report["sglang"], report["bf16"], report["fp8"]) == (version, "TritonRunnerCore", "TritonRunnerCore")
        if mode:  # nothing of it breaks, if it were taken for one that was tried
            assert any("WARNING pretuned: MoE layers stay with SGLang" in line for line in report["lines"])
        else:
            assert report["lines"] == [
                f"WARNING pretuned was tested with SGLang 0.5.23 and this is {version}: every MoE layer stays with "
                "SGLang"
            ]
