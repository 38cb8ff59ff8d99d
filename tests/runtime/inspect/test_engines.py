"""``python -m pretuned.runtime --vllm``: what keeps an engine from using pretuned, and what it would run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import warm
from emulated_driver import EmulatedGpu, emulated
from small_bundles import A100, H200

from pretuned.runtime.inspect import doctor

Install = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRETUNED_VLLM", "PRETUNED_SGLANG", "VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package's metadata, without entry points, before all others."""

    def put(name: str, version: str) -> None:
        site = tmp_path / f"{name} {version}"
        (site / f"{name}-{version}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
        monkeypatch.syspath_prepend(str(site))

    return put


@pytest.fixture
def machine(install: Install, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One H200, and an engine's package."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the emulated one is for machines without")
    install("vllm", "0.20.2")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with emulated(EmulatedGpu(H200)):
        yield


@pytest.mark.usefixtures("machine")
def test_a_machine_on_which_vllm_uses_it() -> None:
    report = doctor.examine_engine("vllm")
    assert report.ok
    assert report.version == "vllm 0.20.2"
    assert report.plug_in == "pretuned.integrations.vllm:register"
    ((gpu, models),) = report.models
    assert gpu.startswith("NVIDIA H200 (9.0")
    assert "Qwen/Qwen3-30B-A3B bf16" in models
    assert "  Qwen/Qwen3-30B-A3B bf16" in str(report).splitlines()
    plain = report.to_dict()
    assert plain["ok"]
    assert plain["models"] == [{"gpu": gpu, "models": list(models)}]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PRETUNED_VLLM": "0"}, "PRETUNED_VLLM=0 switches it off: unset it"),
        ({"VLLM_PLUGINS": "a, b"}, "VLLM_PLUGINS=a, b leaves it out: add pretuned"),
    ],
)
def test_switches(environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert doctor.examine_engine("vllm").problems == (message,)


@pytest.mark.usefixtures("machine")
def test_a_version_that_was_not_tested(install: Install) -> None:
    install("vllm", "0.16.0")
    assert doctor.examine_engine("vllm").problems == (
        "pretuned was tested with vLLM 0.20.2 to 0.33: install one of these, or another pretuned",
    )


@pytest.mark.usefixtures("machine")
def test_what_is_missing(install: Install) -> None:
    assert doctor.examine_engine("sglang").problems == (
        "no sglang in this Python's environment: install pretuned into the engine's own",
    )
    with emulated(EmulatedGpu(A100, 80)):
        assert (
            doctor.examine_engine("vllm").problems[0].startswith("no bundle was measured on a GPU of this capability")
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_what_is_missing_without_a_driver(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("vllm", "0.20.2")
    problems = doctor.examine_engine("vllm").problems
    assert problems[0].startswith("no CUDA driver")
    assert problems[1].startswith("no GPU: every layer stays with the engine (PRETUNED_VLLM=1 ")
    monkeypatch.setenv("PRETUNED_VLLM", "1")
    assert doctor.examine_engine("vllm").ok  # by the reference, on the CPU
    install("pretuned", "0.0.1")
    assert doctor.examine_engine("vllm").problems[0].startswith("no entry point 'pretuned' in vllm.general_plugins")


@pytest.mark.slow
def test_the_command() -> None:
    done = warm.run(["-m", "pretuned.runtime", "--vllm", "--json"])
    said = json.loads(done.stdout)
    assert (done.returncode == 0) == said["ok"]
    assert said["engine"] == "vllm"
    both = warm.run(["-m", "pretuned.runtime", "--vllm", "--sglang"])
    assert both.returncode == 2
