"""Time the Python part of a call's host time: on a CPU, with launches that do nothing.

    python benchmarks/run.py host_python
    python benchmarks/run.py host_trees --without-gpu --old ../old  # to compare two checkouts: see its --help

The GPU is the tests' emulated GPU (tests/support/emulated_driver.py of the measured tree), without its arithmetic. The
times cover the checks of tensors, the memory, autograd, and the path to the driver's launch function. They are in
microseconds, the least and the median of batches; on a machine with other work use the least.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.speed import host_turns, host_work

ROOT = Path(__file__).resolve().parents[2]
BATCHES, CALLS = 60, 50
TURN = {"layer": 10, "layer_autograd": 10, "autograd_and_backward": 10, "layer_autograd_and_backward": 3}


def calls() -> dict[str, Callable[[], object]]:
    """The calls, by their names in benchmarks/speed/host.py, and two torch calls, which are equal in both trees."""
    from pretuned.runtime import grouped_gemm, moe_mlp

    E, N, K, M, T, top_k, half = 8, 256, 128, 64, 16, 2, torch.bfloat16
    x, w, dy = (torch.zeros(*size, dtype=half) for size in ((M, K), (E, N, K), (M, N)))
    hidden, up, down = (torch.zeros(*size, dtype=half) for size in ((T, K), (E, N, K), (E, K, N // 2)))
    m_sizes, index = torch.full((E,), M // E, dtype=torch.int32), torch.randperm(M)
    tokens, by_slot = torch.zeros(M // top_k, K, dtype=half), torch.rand(M // top_k, top_k)
    ids, weights = torch.zeros(T, top_k, dtype=torch.int64), torch.rand(T, top_k)
    out, moving = torch.zeros(M, N, dtype=half), itertools.cycle([torch.zeros_like(x) for _ in range(300)])
    left, right = torch.zeros(16, 16), torch.zeros(16, 16, requires_grad=True)
    xg, wg, *layer = (leaf.clone().requires_grad_() for leaf in (x, w, hidden, up, down, weights))

    def learning() -> torch.Tensor:
        return moe_mlp(*layer[:3], ids, layer[3])

    def step(forward: Callable[[], torch.Tensor], grad: torch.Tensor) -> Callable[[], None]:
        def both() -> None:
            for leaf in (xg, wg, right, *layer):
                leaf.grad = None
            forward().backward(grad)  # type: ignore[no-untyped-call]

        return both

    def autograd() -> torch.Tensor:
        return grouped_gemm(xg, wg, m_sizes)

    return {
        "call": lambda: grouped_gemm(x, w, m_sizes),
        "out_given": lambda: grouped_gemm(x, w, m_sizes, out=out),
        "new_x_each_call": lambda: grouped_gemm(next(moving), w, m_sizes),
        "gather": lambda: grouped_gemm(tokens, w, m_sizes, top_k, index, permute_x=True),
        "scatter_weight": lambda: grouped_gemm(
            x, w, m_sizes, top_k, index, permute_y=True, topk_weights=by_slot, fuse_mul_post=True
        ),
        "autograd": autograd,
        "autograd_and_backward": step(autograd, dy),
        "layer": lambda: moe_mlp(hidden, up, down, ids, weights),
        "layer_autograd": learning,
        "layer_autograd_and_backward": step(learning, torch.zeros_like(hidden)),
        "torch_mm": lambda: torch.mm(left, left),
        "torch_mm_autograd_and_backward": step(lambda: torch.mm(left, right), left),
    }


def host_us(timed: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Times of each call, in batches that take turns, so that other load on the machine slows all calls alike."""
    batches: dict[str, list[float]] = {name: [] for name in timed}
    for call in timed.values():
        for _ in range(100):
            call()
    gc.collect()
    gc.disable()
    for _ in range(BATCHES):
        for name, call in timed.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            batches[name].append((time.perf_counter() - start) / CALLS * 1e6)
    gc.enable()
    return {
        name: {"least": round(min(times), 2), "median": round(statistics.median(times), 2)}
        for name, times in batches.items()
    }


@contextmanager
def made_up_gpu(support: Path, noted: list[object] | None = None) -> Iterator[None]:
    """Emulate a GPU with the tests' driver, whose launches do nothing, with bf16 kernels and one thread.

    ``noted`` gets an entry for each launch, which takes time, too.
    """
    sys.path.append(str(support))
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same tensors in both trees
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda *how: torch.empty_strided(how[0], how[1], dtype=how[2])  # see tests/conftest.py
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        settings = {"PRETUNED_BUNDLES": folder, "XDG_CACHE_HOME": folder, "PRETUNED_DISABLE_SELF_TEST": "1"}
        for name, value in settings.items():
            patch.setenv(name, value)
        from emulated_driver import emulated
        from host_gpu import PERSISTENT, Device

        from pretuned.artifacts.records import DType

        class Quiet(Device):  # type: ignore[misc]
            def cuLaunchKernelEx(self, config: int, function: int, parameters: int, extra: int | None) -> int:
                if noted is not None:
                    noted.append(function)
                return 0

        gpu = Quiet(Path(folder))
        gpu.has(PERSISTENT, DType.BF16)
        with emulated(gpu):
            yield


def asked(what: str, support: Path) -> None:
    """Serve host_trees: time ``batches``, or report the ``work`` of each call."""
    to = host_turns.answers()
    noted: list[object] | None = None if what == "batches" else []
    with made_up_gpu(support, noted):
        timed = {name: (call, TURN.get(name, CALLS)) for name, call in calls().items()}
        if what == "work":
            host_turns.tell(to, host_work.work(timed, noted, lambda: None))
            return
        import pretuned.runtime

        about = {"python": platform.python_version(), "torch": torch.__version__, "runtime": pretuned.runtime.__file__}
        host_turns.serve(timed, lambda: None, about, to)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--support", type=Path, default=ROOT / "tests/support", help="that of the tree in PYTHONPATH")
    parser.add_argument("--serve", choices=host_turns.ASKED, help="answer host_trees on stdin and stdout")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    args = parser.parse_args()
    if args.serve:
        asked(args.serve, args.support)
        return
    with made_up_gpu(args.support):
        figures = host_us(calls())
    print(f"{'call':30} {'least':>8} {'median':>8} us")
    for name, figure in figures.items():
        print(f"{name:30} {figure['least']:8.2f} {figure['median']:8.2f}")
    if args.out:
        args.out.write_text(
            json.dumps({"unit": "us", "python": sys.version.split()[0], "calls": figures}, indent=1) + "\n"
        )
