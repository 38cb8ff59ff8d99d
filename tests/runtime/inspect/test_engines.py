"""``python -m pretuned.runtime --vllm``: what keeps an engine from using pretuned, and what it would run."""

from __future__ import annotations

import json

import pytest
import warm
from made import ON_A100, ON_H200

from pretuned.artifacts.errors import HostError
from pretuned.runtime.inspect import engines


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One H200, and an engine's package."""
    for name in ("PRETUNED_VLLM", "PRETUNED_SGLANG", "VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(engines, "gpus_and_driver", lambda: ((ON_H200,), "CUDA 13.0"))
    monkeypatch.setattr(engines, "_version", lambda name: "0.20.2" if name == "vllm" else "")
    found = engines.metadata.EntryPoint("pretuned", "pretuned.integrations.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr(engines.metadata, "entry_points", lambda group: [found])


def test_a_machine_on_which_vllm_uses_it() -> None:
    found = engines.examine("vllm")
    assert found.ok
    assert found.version == "vllm 0.20.2"
    assert found.plug_in == "pretuned.integrations.vllm:register"
    ((gpu, models),) = found.models
    assert gpu.startswith("NVIDIA H200 (9.0")
    assert "Qwen/Qwen3-30B-A3B bf16" in models
    assert "  Qwen/Qwen3-30B-A3B bf16" in str(found).splitlines()
    plain = found.to_dict()
    assert plain["ok"]
    assert plain["models"] == [{"gpu": gpu, "models": list(models)}]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"PRETUNED_VLLM": "0"}, "PRETUNED_VLLM=0 switches it off: unset it"),
        ({"VLLM_PLUGINS": "a, b"}, "VLLM_PLUGINS=a, b leaves it out: add pretuned"),
    ],
)
def test_switches(environ: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert engines.examine("vllm").problems == (told,)


def test_a_version_that_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_version", lambda name: "0.16.0" if name == "vllm" else "")
    assert engines.examine("vllm").problems == (
        "pretuned was tested with vLLM 0.20.2 to 0.33: install one of these, or another pretuned",
    )


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.examine("sglang").problems == (
        "no sglang in this Python's environment: install pretuned into the engine's own",
    )
    monkeypatch.setattr(engines, "gpus_and_driver", lambda: ((ON_A100,), ""))
    assert engines.examine("vllm").problems[0].startswith("no bundle was measured on a GPU of this capability")

    def nothing() -> None:
        raise HostError("no CUDA driver")

    monkeypatch.setattr(engines, "gpus_and_driver", nothing)
    problems = engines.examine("vllm").problems
    assert problems[0] == "no CUDA driver"
    assert problems[1].startswith("no GPU: every layer stays with the engine (PRETUNED_VLLM=1 ")
    monkeypatch.setenv("PRETUNED_VLLM", "1")
    assert engines.examine("vllm").ok  # by the reference, on the CPU
    monkeypatch.setattr(engines.metadata, "entry_points", lambda group: [])
    assert engines.examine("vllm").problems[0].startswith("no entry point 'pretuned' in vllm.general_plugins")


@pytest.mark.slow
def test_the_command() -> None:
    done = warm.run(["-m", "pretuned.runtime", "--vllm", "--json"])
    said = json.loads(done.stdout)
    assert (done.returncode == 0) == said["ok"]
    assert said["engine"] == "vllm"
    both = warm.run(["-m", "pretuned.runtime", "--vllm", "--sglang"])
    assert both.returncode == 2
