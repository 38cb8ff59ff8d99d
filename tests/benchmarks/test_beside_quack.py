"""The table of QuACK's configurations, what is tried of it, and how a run is judged; QuACK itself needs a GPU."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
import weakref
from pathlib import Path
from types import ModuleType

import pytest
import torch
import warm
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def tools() -> tuple[ModuleType, ModuleType]:
    from benchmarks.peers import beside_quack, quack_configs

    return beside_quack, quack_configs


@given(
    m=st.sampled_from([64, 128, 192, 256]),
    n=st.sampled_from([128, 160, 192, 208, 224, 256]),
    pingpong=st.booleans(),
    cluster=st.sampled_from([(1, 1), (1, 2), (2, 1)]),
    dynamic=st.booleans(),
    tile_k=st.sampled_from([None, 32, 128]),
)
def test_what_is_written_is_read(tools, m, n, pingpong, cluster, dynamic, tile_k):
    _, configs = tools
    config = configs.Config(m, n, pingpong, *cluster, dynamic, tile_k)
    assert configs.Config.parse(str(config)) == config


def test_the_notation(tools):
    _, configs = tools
    assert configs.Config.parse("128x192pp12") == configs.Config(128, 192, True, 1, 2, False, None)
    assert configs.Config.parse("128x256co21dk32") == configs.Config(128, 256, False, 2, 1, True, 32)
    for wrong in ("", "128x192", "128x192pp", "128x192xx12", "128x192pp12k", "128x192pp12 ", "-128x192pp12"):
        with pytest.raises(ValueError, match="is no configuration of QuACK: wanted one like"):
            configs.Config.parse(wrong)


def test_the_table_has_every_cell_that_is_compared(tools):
    beside, configs = tools
    best = configs.read()
    wanted = {
        (name, gemm, op, T)
        for name, gemms, _, _ in beside.layers_of(",".join(model[0] for model in beside.MODELS))
        for gemm, _, _ in gemms
        for op in beside.OPS
        for T in (1024, 8192)
    }
    assert set(best) == wanted
    assert len(wanted) == 72
    rows = [json.loads(line) for line in configs.TABLE.read_text().splitlines()]
    assert all(row["us"] > 0 for row in rows)
    assert [row["config"] for row in rows] == [
        str(best[row["model"], row["gemm"], row["op"], row["tokens"]]) for row in rows
    ]


def test_a_bad_line_is_reported(tools, tmp_path):
    _, configs = tools
    table = tmp_path / "table.jsonl"
    good = {"model": "m", "gemm": "down", "op": "dW", "tokens": 8, "config": "128x192pp12"}
    for second, why in (
        (good | {"config": "odd"}, "'odd' is no configuration"),
        ({"model": "m"}, "gemm"),
        (good, "m down dW 8 a second time"),
    ):
        table.write_text(f"{json.dumps(good)}\n{json.dumps(second)}\n")
        with pytest.raises(ValueError, match=f"table.jsonl:2: .*{why}"):
            configs.read(table)


def test_the_fastest_comes_first_and_none_twice(tools):
    _, configs = tools
    best = configs.read()
    for cell, config in best.items():
        tried = configs.to_try(best, cell, 3)
        assert tried[0] == config
        assert len(tried) == len(set(tried)) == 4
        assert configs.to_try(best, cell, 0) == [config]
    assert len(configs.to_try(best, ("another", "down", "dX", 1024), 0)) == 3
    # Most often the fastest for dW: counted by hand in the table.
    assert str(configs.usual(best, "dW", 1)[0]) == "128x256co11dk32"


class Product:
    """Takes what quack.gemm.gemm takes, and does it in torch: D[g] = A[g] @ B[g].T."""

    def __init__(self, shared: set[int]) -> None:
        self.shared = shared  # the storages that A and B may lie in

    def gemm(
        self, A, B, D, C, counter, tile_M, tile_N, cluster_M, cluster_N, *, tile_K, is_dynamic_persistent, **kwargs
    ):
        assert C is None
        assert (counter is not None) == is_dynamic_persistent
        assert {A.untyped_storage().data_ptr(), B.untyped_storage().data_ptr()} <= self.shared
        (name,) = (name for name in kwargs if name.startswith("cu_seqlens"))
        assert kwargs[name].dtype is torch.int32
        offsets = kwargs[name].tolist()
        if tile_M == 64:
            raise ValueError("a tile too low")
        for g, (start, end) in enumerate(itertools.pairwise(offsets)):
            here = slice(start, end)
            if name == "cu_seqlens_k":
                D[g] = A[:, here] @ B[:, here].T
            elif tile_M == 128 or g:
                D[here] = A[here] @ B[g].T


class ClockOfCalls:
    """A clock whose graphs are calls that write where the captured one did, for a machine without a GPU."""

    def __init__(self) -> None:
        self.flush = torch.zeros(64, dtype=torch.int8)

    def capture(self, call):
        result = call()

        class Graph:
            replay = staticmethod(lambda: result.copy_(call()))

        return Graph

    def rounds_us(self, graphs, rounds):
        taken = []
        for graph in graphs:
            begun = time.perf_counter()
            graph.replay()
            taken.append([1e6 * (time.perf_counter() - begun)] * rounds)
        return taken


def test_the_call_is_on_views(tools):
    """Shapes, strides and addresses as QuACK is given them: nothing is copied."""
    beside, configs = tools
    E, N, K, M = 3, 16, 8, 12
    inputs = beside.method.Inputs(
        torch.randn(M, K), torch.randn(E, N, K), torch.tensor([5, 0, 7], dtype=torch.int32), torch.randn(M, N)
    )
    shared = {t.untyped_storage().data_ptr() for t in (inputs.x, inputs.w, inputs.dy)}
    out, counter = torch.empty(E * N * K), torch.zeros(1, dtype=torch.int32)

    for op in beside.OPS:
        for text in ("128x192pp12", "128x256co11dk32"):
            out.fill_(float("nan"))
            product = Product(shared)
            result = beside.quack_call(product, configs.Config.parse(text), op, inputs, out, counter)()
            assert beside.method.relative_error(result, inputs, op) < 1e-6


@pytest.mark.parametrize("op", ["forward", "dX", "dW"])
def test_a_cell_leaves_out_what_fails_or_is_wrong(tools, monkeypatch, op):
    beside, configs = tools
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    E, N, K, M, dtype = 3, 16, 32, 24, torch.bfloat16
    inputs = beside.method.Inputs(
        torch.randn(M, K).to(dtype),
        torch.randn(E, N, K).to(dtype),
        torch.tensor([9, 0, 15], dtype=torch.int32),
        torch.randn(M, N).to(dtype),
    )
    shared = {t.untyped_storage().data_ptr() for t in (inputs.x, inputs.w, inputs.dy)}
    tried = [configs.Config.parse(text) for text in ("128x192pp12", "192x128pp12", "64x256pp12d")]
    out = torch.empty(E * N * K, dtype=dtype)
    clock = ClockOfCalls()
    calls = beside.quack_calls(Product(shared), clock, op, inputs, out, tried)
    cell = beside.beside.measure_cell(clock, op, inputs, calls, budget_ms=1.0)
    assert "ValueError: a tile too low" in cell["failed"]["64x256pp12d"]
    right = {"ours", "128x192pp12", "torch_grouped_mm", "dense_same_flops"}
    if op == "dW":
        right |= {"192x128pp12"}
        assert len(cell["failed"]) == 1
    else:  # 192 leaves out the first expert: what was NaN stays NaN
        assert cell["failed"]["192x128pp12"] == "wrong: relative error nan"
    assert set(cell["us"]) == right
    assert all(cell["error"][name] < beside.method.MAX_ERROR for name in right)
    assert beside.beside.judged({"model": "m", "gemm": "down", "op": op, "tokens": 3} | cell)["ratio"] > 0


def test_what_a_call_reads_is_kept_while_it_is_timed(tools, monkeypatch):
    """A graph does not hold the tensors that it reads: without the call they would be another's memory."""
    beside, _ = tools
    inputs = beside.method.Inputs(
        torch.randn(6, 8), torch.randn(2, 4, 8), torch.tensor([2, 4], dtype=torch.int32), None
    )
    read = weakref.WeakSet()

    class Clock(ClockOfCalls):
        def capture(self, call):
            call()
            return lambda: None  # holds nothing

        def rounds_us(self, graphs, rounds):
            gc.collect()
            assert len(read) == 2
            return [[1.0] * rounds for _ in graphs]

    def maker():
        offsets = torch.tensor([0, 2, 6])
        read.add(offsets)
        return lambda: torch.cat(
            [x @ w.T for x, w in zip(inputs.x.split(offsets.diff().tolist()), inputs.w, strict=True)]
        )

    monkeypatch.setattr(beside.beside, "replayed_error", lambda *_: 0.0)
    cell = beside.beside.measure_cell(Clock(), "forward", inputs, {"a": maker, "b": maker}, budget_ms=1.0)
    assert set(cell["us"]) == {"ours", "a", "b", "torch_grouped_mm", "dense_same_flops"}


@pytest.mark.slow  # a process that imports torch
def test_without_quack_it_says_what_to_install(tmp_path):
    (tmp_path / "quack.py").write_text("raise ModuleNotFoundError(\"No module named 'quack'\", name='quack')\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    ended = warm.run([BENCHMARKS / "run.py", "beside_quack", "--smoke"], env=env)
    assert ended.returncode == 2
    assert "pip install quack-kernels==0.6.5" in ended.stderr
    assert "Traceback" not in ended.stderr
