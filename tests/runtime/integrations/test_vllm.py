"""vLLM's plug-in where there is no vLLM. (With it: tests/engines.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

from pretuned.integrations.vllm import PLUG_IN, register


def test_nothing_else_is_imported() -> None:
    code = (
        "import pretuned.integrations.vllm, sys; "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'pretuned')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = "['pretuned', 'pretuned.integrations', 'pretuned.integrations.plug_in', 'pretuned.integrations.vllm']"
    assert done.stdout.strip() == ours


@pytest.mark.parametrize(("switch", "lines"), [("0", 0), ("false", 0), ("", 1), ("1", 1), ("perhaps", 2)])
def test_whatever_fails_while_it_registers_the_engine_goes_on(
    switch: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("PRETUNED_VLLM", switch)
    PLUG_IN._logged.clear()
    register()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == lines
    if lines:
        assert messages[-1].startswith("pretuned: MoE layers stay with vLLM, as pretuned could not register: Mod")
        assert messages[-1].endswith(". PRETUNED_VLLM=0 switches pretuned off")
    if switch == "perhaps":
        assert messages[0] == "pretuned: PRETUNED_VLLM='perhaps' is neither 1, true, 0, false nor empty: taken as empty"
