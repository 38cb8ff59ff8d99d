"""MoE layers of several versions of vLLM with pretuned installed: which run on it, and which vLLM runs.

The installed engine is asked, and wheels of others without their compiled code (``engine_wheels``). Each has a process
of its own: tests/support/vllm_layers.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_wheels import unpacked
from vllm_flagships import FLAGSHIPS

_SCRIPT = Path(__file__).parents[1] / "support/vllm_layers.py"
_FLAGSHIPS = _SCRIPT.parent / "vllm_flagships.py"
_FORMATS = _SCRIPT.parent / "vllm_formats.py"
_INSTALLED = "installed"
_TAKEN = (
    "0.20.2",
    "0.21.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)
_LEFT = ("0.16.0", "0.18.1", "0.19.0")
_QUICK = (_INSTALLED, "0.20.2")
_KINDS = ("bf16", "fp8")
_SCENARIOS = ("off", "unset", "on", "prepare", "first_token", "without:msgpack")
# What the modules that vLLM's layers are run by import themselves; by night all that these import, too.
_IMPORTS = (
    "pretuned.integrations.served_layer",
    "pretuned.integrations.vllm.experts",
    "pretuned.integrations.vllm.quantised",
    "pretuned.runtime.api.moe",
    "pretuned.runtime.ops.activation",
    "pretuned.runtime.weights.expert_weights",
    "pretuned.runtime.driver.device",
)


class Told(NamedTuple):
    """The scenarios that a process printed, each as a dict."""

    version: str
    scenarios: dict[str, dict[str, Any]]

    def own(self, kind: str) -> tuple[Any, Any]:
        """vLLM's own experts class and backend of a layer."""
        return chosen(self.scenarios["off"][kind])


def chosen(layer: dict[str, Any]) -> tuple[Any, Any]:
    return layer["experts"], layer["backend"]


def printed(version: str, script: Path, *args: str) -> list[dict[str, Any]]:
    """The lines of JSON of a script in a process of its own with this vLLM."""
    environ = os.environ | {"PYTHONPATH": str(_SCRIPT.parent)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if version != _INSTALLED:
        environ["PYTHONPATH"] = f"{unpacked('vllm', version)}{os.pathsep}{_SCRIPT.parent}"
    done = subprocess.run([sys.executable, script, *args], env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"scenario"', '{"model"'))]


def ask(version: str, *scenarios: str) -> Told:
    reports = printed(version, _SCRIPT, *scenarios)
    assert version in (_INSTALLED, reports[0]["vllm"])
    failed = {report["scenario"]: report["failed"] for report in reports if "failed" in report}
    assert not failed, failed
    return Told(reports[0]["vllm"], {report["scenario"]: report for report in reports})


def marked(versions: tuple[str, ...]) -> list[Any]:
    return [pytest.param(version, marks=() if version in _QUICK else pytest.mark.nightly) for version in versions]


@pytest.fixture(scope="module", params=marked((_INSTALLED, *_TAKEN)))
def taken(request: pytest.FixtureRequest) -> Told:
    scenarios = ["cost", *_SCENARIOS]
    if request.param == _INSTALLED:
        scenarios += [f"without:{name}" for name in _IMPORTS]
    return ask(request.param, *scenarios)


def warnings(report: dict[str, Any]) -> list[str]:
    return [line for line in report["lines"] if not line.startswith("INFO ")]


def test_registering_costs_next_to_nothing_and_hides_nothing(taken: Told) -> None:
    cost = taken.scenarios["cost"]
    assert cost["cpu_ms"] < 30
    assert {name.split(".")[0] for name in cost["imported"]} == {"pretuned"}
    assert len(cost["imported"]) <= 4
    assert cost["lines"] == [
        "INFO pretuned is active: it runs the MoE layers that it has kernels for. PRETUNED_VLLM=0 switches it off"
    ]


def test_switched_off_there_is_nothing_of_it(taken: Told) -> None:
    off = taken.scenarios["off"]
    assert off["lines"] == []
    assert off["counted"] == [None, None]
    assert [off[kind]["method"] for kind in _KINDS] == ["UnquantizedFusedMoEMethod", "Fp8MoEMethod"]
    assert len(off["imported"]) <= 4


def test_layers_that_it_has_no_kernels_for_stay(taken: Told) -> None:
    unset = taken.scenarios["unset"]
    assert all(chosen(unset[kind]) == taken.own(kind) for kind in _KINDS)
    assert unset["counted"] == [None, 2]
    _, *lines = unset["lines"]
    assert [line.partition(" to vLLM's ")[0] for line in lines] == [
        "INFO pretuned: leaves the MoE layers of E=4 H=128 I=128",
        "INFO pretuned: leaves the MoE layers of E=4 H=128 I=128 fp8_block",
    ]


def test_layers_that_it_takes_compute_what_they_should(taken: Told) -> None:
    on = taken.scenarios["on"]
    assert [on[kind]["loaded"]["kernel"] for kind in _KINDS] == ["PretunedExperts", "PretunedQuantisedExperts"]
    assert on["counted"] == [2, None]
    assert on["bf16"]["error"] < 0.01
    assert on["fp8"]["error"] < 0.1  # whose tokens are quantised, too
    _, *lines = on["lines"]
    assert lines == [
        "INFO pretuned: runs the MoE layers of E=4 H=128 I=128 k=2 bf16 silu",
        "INFO pretuned: runs the MoE layers of E=4 H=128 I=128 k=2 fp8_block silu",
    ]


def test_weights_that_can_not_be_prepared_go_to_vllm_s_own_method(taken: Told) -> None:
    scenario = taken.scenarios["prepare"]
    assert scenario["bf16"]["loaded"]["kernel"] == "PretunedExperts"
    assert scenario["fp8"]["loaded"]["method"] == "Fp8MoEMethod"
    assert scenario["fp8"]["unchanged"]  # the checkpoint's, which vLLM's Triton kernel reads
    assert scenario["counted"] == [1, 1]
    (line,) = warnings(scenario)
    assert line == (
        "WARNING pretuned: MoE layers stay with vLLM, as pretuned could not prepare or run a layer: RuntimeError: made "
        "to fail. PRETUNED_VLLM=0 switches pretuned off"
    )


def test_layers_that_fail_with_their_first_token_go_to_vllm_s_own_method(taken: Told) -> None:
    scenario = taken.scenarios["first_token"]
    assert chosen(scenario["bf16"]["loaded"]) == taken.own("bf16")
    assert scenario["fp8"]["loaded"]["method"] == "Fp8MoEMethod"
    assert scenario["fp8"]["unchanged"]  # they were prepared, and put back
    assert len(warnings(scenario)) == 2
    assert scenario["counted"] == [0, 2]


def test_an_import_of_ours_that_fails_leaves_layers_to_vllm(taken: Told) -> None:
    stays(taken)


def stays(taken: Told) -> None:
    for name, scenario in taken.scenarios.items():
        _, _, module = name.partition(":")
        if not module:
            continue
        lines = warnings(scenario)
        assert len(set(lines)) == len(lines)
        for kind in _KINDS:
            loaded = scenario[kind]["loaded"]
            if "Pretuned" in str(loaded["kernel"]):  # the module is needed by neither
                assert scenario[kind]["error"] < 0.1, name
            else:
                assert chosen(loaded) == taken.own(kind), name
                says = ("ERROR Failed to load plugin pretuned", f"{module} is made to fail")  # the first is vLLM's own
                assert any(line.endswith(says[0]) or says[1] in line for line in lines), (name, lines)


@pytest.mark.nightly
def test_each_import_of_ours_that_fails_leaves_layers_to_vllm() -> None:
    taken = ask(_INSTALLED, "off", "on", "without:*")
    assert len(taken.scenarios) > 50
    stays(taken)


@pytest.mark.nightly
@pytest.mark.parametrize("version", _LEFT)
def test_other_versions_run_as_without(version: str) -> None:
    answer = ask(version, "cost", "off", "unset", "on", "untried")
    assert answer.scenarios["cost"]["cpu_ms"] < 30
    for name in ("unset", "on"):
        scenario = answer.scenarios[name]
        assert scenario["lines"] == [
            f"WARNING pretuned was tested with vLLM 0.20.2 to 0.33 and this is {version}: every MoE layer stays with "
            "vLLM"
        ]
        assert [scenario[kind]["method"] for kind in _KINDS] == ["UnquantizedFusedMoEMethod", "Fp8MoEMethod"]
    # If it were taken for one that was tried, nothing of it would break.
    untried = answer.scenarios["untried"]
    assert chosen(untried["bf16"]) == answer.own("bf16")
    assert untried["fp8"]["ours"] or chosen(untried["fp8"]) == answer.own("fp8")
    assert warnings(untried)


_ALWAYS = {
    "DeepSeek-V4-Flash",
    "DeepSeek-V4-Pro",
    "Step-3.7",
    "Step-3.7, first layers",
    "Nemotron-3-Nano",
    "Nemotron-3-Super",
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("version", "names"), [("0.20.2", _ALWAYS), ("0.22.1", _ALWAYS), ("0.24.0", _ALWAYS), ("0.33.0", set(FLAGSHIPS))]
)
def test_layers_of_models_compute_the_activations_that_the_models_have(version: str, names: set[str]) -> None:
    """(The installed version's: test_vllm_activations.py.)"""
    reports = {report["model"]: report for report in printed(version, _FLAGSHIPS)}
    assert {name for name, report in reports.items() if not report["absent"]} == names
    for name in names:
        report = reports[name]
        (line,) = report["lines"]
        assert line.endswith(f" k=2 {FLAGSHIPS[name].logged}")
        assert report["error"] < (0.08 if "fp8" in line else 0.01), name
        assert report["without"] > 0.15, name


@pytest.mark.parametrize(
    "version",
    [_INSTALLED, *(pytest.param(tensor, marks=pytest.mark.nightly) for tensor in ("0.20.2", "0.26.0", "0.33.0"))],
)
def test_formats_are_loaded_by_its_loader(version: str) -> None:
    """AutoRound's config of the formats, too. (More of the installed version's: test_vllm_quantised.py.)"""
    reports = {report["model"]: report for report in printed(version, _FORMATS)}
    gptq = set() if version == "0.20.2" else {"gptq", "gptq of AutoRound"}
    newer = {"mxfp4 of AutoRound", "mxfp8 of AutoRound"} if version in (_INSTALLED, "0.33.0") else set()
    assert set(reports) == {"fp8 rows", "modelopt fp8", "nvfp4", "modelopt nvfp4"} | gptq | newer
    for name, report in reports.items():
        assert report["method"] == "PretunedQuantisedMethod", name
        assert report["error"] < (0.08 if "fp8" in name else 0.01), name
        assert all(line.startswith("INFO pretuned: runs the MoE layers of E=4 H=128 I=96 ") for line in report["lines"])
