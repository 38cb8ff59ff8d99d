"""Libraries beside ours: how a run is judged, what of vLLM's file is taken, and what rows its kernel is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import warm
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def tools() -> tuple[ModuleType, ModuleType, ModuleType]:
    from benchmarks.peers import beside, beside_vllm, vllm_kernels

    return beside, beside_vllm, vllm_kernels


def test_a_run_is_tested(tools):
    beside, _, _ = tools
    cells = [
        beside.judged(
            {
                "model": "m",
                "gemm": "down",
                "op": "dX",
                "tokens": 1024,
                "us": {"ours": 100.0, "a": 96.0, "b": 90.0, "torch_grouped_mm": 150.0, "dense_same_flops": 80.0},
            }
        ),
        beside.judged(
            {
                "model": "m",
                "gemm": "gate_up",
                "op": "dX",
                "tokens": 1024,
                "us": {"ours": 100.0, "a": 160.0, "torch_grouped_mm": 150.0, "dense_same_flops": 80.0},
            }
        ),
        beside.judged(
            {
                "model": "m",
                "gemm": "down",
                "op": "dW",
                "tokens": 8192,
                "us": {"ours": 100.0},
                "failed": {"a": "Traceback\n  ...\nValueError: too wide"},
            }
        ),
    ]
    assert (cells[0]["rival"], cells[0]["ratio"]) == ("b", 0.9)
    lines = beside.summary(cells, "QuACK")
    assert lines[0].startswith("dX       T=1024  x QuACK 1.200, behind by over 3 %: 1 of 2   x grouped_mm 1.500")
    assert lines[1].startswith("dW       T=8192  x QuACK nan, behind by over 3 %: 0 of 0")
    assert "behind: m down dX T=1024 0.900 (b)" in lines
    assert "failed: m down dW T=8192 a: ValueError: too wide" in lines
    assert [len(beside.table_line(cell).split()) for cell in cells] == [9, 9, 9]


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), block=st.sampled_from([16, 32, 64]))
def test_every_row_is_in_a_block_of_its_expert(tools, sizes, block):
    """Blocks are like moe_align_block_size's: of one expert each, filled up with M, then blocks of no expert."""
    _, _, kernels = tools
    M, E = sum(sizes), len(sizes)
    slots, experts, padded = kernels.assignment(torch.tensor(sizes, dtype=torch.int32), M, block)
    owner = [e for e, n in enumerate(sizes) for _ in range(n)]
    if M * kernels.FEW_ROWS <= E:
        assert slots is None
        assert experts.tolist() == owner
        assert padded.tolist() == [M * block]
        return
    used = padded.item()
    assert used == sum(-(-n // block) * block for n in sizes) <= len(slots)
    assert slots.dtype is experts.dtype is padded.dtype is torch.int32
    assert [slot for slot in slots.tolist() if slot < M] == list(range(M))
    assert (slots[used:] == M).all()
    for number, expert in enumerate(experts[: used // block].tolist()):
        here = [slot for slot in slots[number * block : (number + 1) * block].tolist() if slot < M]
        assert here
        assert {owner[row] for row in here} == {expert}
    assert len(experts) == -(-len(slots) // block)
    most = M + E * (block - 1)  # what the grid is made for
    assert len(slots) == max(used, min(M * block, most) if M < E else most)


@given(sizes=st.lists(st.integers(0, 150), min_size=1, max_size=8))
def test_padded_rows_begin_at_whole_steps(sizes):
    from pretuned.aot.compare import run

    rows = torch.arange(1, sum(sizes) + 1).float()[:, None].expand(-1, 3)
    padded, start, begun = run.padded(rows, torch.tensor(sizes, dtype=torch.int32)), 0, 0
    for n in sizes:
        assert padded[start : start + n, 0].tolist() == list(range(begun + 1, begun + n + 1))
        whole = -(-n // 64) * 64
        assert (padded[start + n : start + whole] == 0).all()
        start, begun = start + whole, begun + n
    assert len(padded) == start


FILE = """
import something_that_is_not_here
from . import another

def write_zeros_to_output(): return triton

def fused_moe_kernel(a: tl.constexpr): return write_zeros_to_output()

def invoke_fused_moe_triton_kernel(kernel: "dict[str, Any]"): return fused_moe_kernel(1)

def get_default_config(M, E, N, K, topk, dtype, block_shape=None):
    return {"BLOCK_SIZE_M": 16 if M <= 32 and not current_platform.is_rocm() else 64, "of": [M, E, N, K, topk, dtype]}

raise SystemExit("only the functions are run")
"""


def unpacked(folder: Path, text: str = FILE) -> Path:
    place = folder / "vllm" / "model_executor" / "layers" / "fused_moe"
    (place / "configs").mkdir(parents=True)
    (place / "fused_moe.py").write_text(text)
    return folder


def test_of_vllms_file_four_functions_are_run(tools, tmp_path):
    _, _, kernels = tools
    place = kernels.package(unpacked(tmp_path))
    assert kernels.package(place) == place == tmp_path / "vllm"
    language = SimpleNamespace(constexpr=int)
    taken = kernels.functions(place / kernels.KERNEL_FILE, "the module triton", language)
    assert set(taken) == set(kernels.TAKEN)
    assert taken["invoke_fused_moe_triton_kernel"]("a") == "the module triton"
    assert "something_that_is_not_here" not in sys.modules


def test_another_vllm_is_reported(tools, tmp_path):
    _, _, kernels = tools
    unpacked(tmp_path, FILE.replace("def get_default_config", "def another_name"))
    with pytest.raises(ValueError, match="has no get_default_config: this is written for vLLM"):
        kernels.functions(tmp_path / "vllm" / kernels.KERNEL_FILE, None, SimpleNamespace(constexpr=int))
    with pytest.raises(FileNotFoundError, match=r"no vLLM in .*elsewhere.*pip download --no-deps vllm=="):
        kernels.package(tmp_path / "elsewhere")


def test_the_nearest_tuned_batch_and_the_heuristic(tools, tmp_path):
    _, _, kernels = tools
    place = kernels.package(unpacked(tmp_path))
    theirs = object.__new__(kernels.Kernels)
    theirs.configs = place / Path(kernels.KERNEL_FILE).parent / "configs"
    theirs.fused_moe = kernels.functions(place / kernels.KERNEL_FILE, None, SimpleNamespace(constexpr=int))
    heuristic = {"heuristic": {"BLOCK_SIZE_M": 16, "of": [20, 8, 64, 64, 2, None]}}
    assert theirs.configs_of(8, 128, 64, 64, 2, 20) == heuristic
    tuned = {"1": {"BLOCK_SIZE_M": 1}, "16": {"BLOCK_SIZE_M": 2}, "64": {"BLOCK_SIZE_M": 3}, "triton_version": "3.6.0"}
    (theirs.configs / "E=8,N=64,device_name=NVIDIA_H200.json").write_text(json.dumps(tuned))
    assert theirs.configs_of(8, 128, 64, 64, 2, 20) == heuristic | {"tuned": {"BLOCK_SIZE_M": 2}}


def test_the_version_is_the_packages_own(tools, tmp_path):
    _, _, kernels = tools
    place = kernels.package(unpacked(tmp_path))
    assert kernels.version_of(place) == "unknown"
    (tmp_path / "vllm-0.19.1.dist-info").mkdir()
    assert kernels.version_of(place) == "0.19.1"


def test_vllms_kernel_is_for_the_forward_alone_and_gradients_begin_at_1024(tools):
    _, script, _ = tools
    theirs = SimpleNamespace(
        configs_of=lambda *sizes: {"heuristic": sizes},
        vllm=lambda _inputs, config: config,
        triton_kernels=lambda op, _inputs: op,
    )
    inputs = SimpleNamespace(w=torch.empty(4, 6, 8))
    built = {
        op: {name: make() for name, make in script.calls(theirs, op, inputs, 3, 2, 16).items()} for op in script.OPS
    }
    assert built["forward"] == {"triton_kernels": "forward", "vllm heuristic": (4, 6, 8, 3, 2, 16)}
    assert (built["dX"], built["dW"]) == ({"triton_kernels": "dX"}, {"triton_kernels": "dW"})
    asked = SimpleNamespace(op=["forward", "dW"], tokens=[16, 1024])
    assert script.few(asked) == [("forward", 16)]
    assert script.many(asked) == [("forward", 1024), ("dW", 1024)]


@pytest.mark.slow  # a process that imports torch
def test_with_nothing_to_time_it_says_so(tmp_path):
    ended = warm.run([BENCHMARKS / "run.py", "beside_vllm", "--op", "dX", "--tokens", "16"])
    assert ended.returncode == 2
    assert "nothing is left to time: dX and dW begin at 1024 tokens" in ended.stderr


@pytest.mark.slow  # a process that imports torch
def test_without_vllm_it_says_what_to_fetch(tmp_path):
    ended = warm.run([BENCHMARKS / "run.py", "beside_vllm", "--vllm", tmp_path])
    assert ended.returncode == 2
    assert "pip download --no-deps vllm==" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow  # a process that imports torch
@pytest.mark.parametrize("lacks", ["get_default_config", pytest.param("triton_kernels", marks=pytest.mark.slow)])
def test_a_wheel_that_lacks_something_is_reported(tmp_path, lacks):
    unpacked(tmp_path, FILE.replace(f"def {lacks}", "def another_name"))
    ended = warm.run([BENCHMARKS / "run.py", "beside_vllm", "--vllm", tmp_path])
    assert ended.returncode == 2
    assert lacks in ended.stderr.splitlines()[-1]
    assert "pip download --no-deps vllm==" in ended.stderr
    assert "Traceback" not in ended.stderr
