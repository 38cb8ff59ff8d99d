"""vLLM's plug-in where there is no vLLM. (With it: tests/engines.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

from pretuned.integrations.vllm import register


def test_nothing_else_is_imported() -> None:
    code = (
        "import pretuned.integrations.vllm, sys; "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'pretuned')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['pretuned', 'pretuned.integrations', 'pretuned.integrations.vllm']"


@pytest.mark.parametrize(("switch", "lines"), [("0", 0), ("false", 0), ("", 1), ("1", 1), ("perhaps", 2)])
def test_a_vllm_that_has_no_place_for_it_runs_as_without(
    switch: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("PRETUNED_VLLM", switch)
    register()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == lines
    if lines:
        assert told[-1].startswith("pretuned: this vLLM has no place for MoE layers of others (")
    if switch == "perhaps":
        assert told[0] == "pretuned: PRETUNED_VLLM='perhaps' is neither 1, true, 0, false nor empty: taken as empty"
