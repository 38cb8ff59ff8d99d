"""SGLang's own layers beside the same with the plug-in: what is asked for, and which times count."""

from __future__ import annotations

import json
import logging
import lzma
from pathlib import Path
from types import ModuleType

import pytest
import torch

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import layers_in_sglang

    return layers_in_sglang


def test_what_is_asked_for(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = tool.arguments(["--json", "o.json", "--tokens", "1,16"])
    assert (options.kinds, options.tokens) == (["bf16", "fp8", "mxfp4", "int4"], [1, 16])
    assert set(options.kinds) == set(tool.KINDS)
    assert tool.arguments(["--json", "o.json", "--kinds", "mxfp4", "--sides", "marlin"]).sides == ["marlin"]
    for wrong, message in (
        (["--kinds", "fp3"], "'fp3' is none of bf16, fp8"),
        (["--sglang", "."], "no folder sglang"),
        (["--kinds", "mxfp4,fp8", "--sides", "marlin"], "'marlin' is none of fp8's: own, pretuned"),
        (["--built", "absent"], "absent is no folder"),
        (["--build", "."], "wanted one of --json"),
    ):
        with pytest.raises(SystemExit):
            tool.arguments(["--json", "o.json", *wrong])
        assert message in capsys.readouterr().err


def test_tokens_that_a_call_wrote_over_are_reported(tool: ModuleType) -> None:
    """SGLang's Triton runner puts its result there by default, and its next call is of that."""
    x = torch.randn(3, 4)
    assert torch.equal(tool.result_of(lambda: x * 2, x), x * 2)
    with pytest.raises(ValueError, match="wrote over the tokens"):
        tool.result_of(lambda: x.mul_(2), x)


def test_the_time_of_a_far_result_is_not_kept(tool: ModuleType) -> None:
    cell = {
        "us": {"own": 1.0, "marlin": 3.0, "pretuned": 2.0},
        "failed": {},
        "distance": {"own": 2.5e6, "marlin": 0.07, "pretuned": 0.0},
    }
    tool.drop_far(cell)
    assert cell["us"] == {"marlin": 3.0, "pretuned": 2.0}
    assert "2500000.0 of pretuned's away" in cell["failed"]["own"]
    cell = {"us": {"own": 1.0}, "failed": {}, "distance": {"own": float("nan")}}
    tool.drop_far(cell)
    assert not cell["us"]


def test_a_layer_without_a_tuned_configuration_is_reported(tool: ModuleType) -> None:
    untuned = tool.Untuned()
    log = logging.getLogger("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config")
    try:
        log.warning("Down MoE config file not found at %s; reusing the tuned one", "a.json")
        assert not untuned.is_told
        log.warning("Using default MoE kernel config. Performance might be sub-optimal! ... %s", "a.json")
        assert untuned.is_told
    finally:
        log.removeHandler(untuned)


def test_no_layer_that_was_measured_costs_over_3_percent(tool: ModuleType) -> None:
    """The plug-in's promise compared with SGLang's choice, and the page's statement of each cell."""
    page = (RESULTS.parents[1] / "docs/use/serving-figures.md").read_text()
    calls = 0
    for cell in json.loads(lzma.decompress((RESULTS / "layers-in-sglang-h200.json.xz").read_bytes()))["cells"]:
        us, runner = cell["us"], cell["runners"]
        assert not cell["failed"]
        if tool.OWN in us:
            ratio = us[tool.OWN] / us[tool.OURS]
            assert ratio > 0.97
            times = f"{us[tool.OWN]:,.1f} | {us[tool.OURS]:,.1f} | {ratio:.2f}"
            assert f"| {cell['tokens']:,} | {runner[tool.OWN]} | {times} |" in page
            calls += 1
    assert calls == 24


@pytest.mark.slow
def test_a_process_that_fails_is_reported(tool: ModuleType, tmp_path: Path) -> None:
    """(There is no SGLang in the folder.)"""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    out = tmp_path / "cells.json"
    assert tool.main(["--sglang", str(tmp_path), "--json", str(out), "--kinds", "bf16,int4", "--tokens", "1"]) == 1
    cells = json.loads(out.read_text())["cells"]
    assert [cell["kind"] for cell in cells] == ["bf16", "int4"]
    assert all("sglang" in cell["failed"]["all"] for cell in cells)
