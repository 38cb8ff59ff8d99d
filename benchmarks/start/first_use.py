"""Check on a GPU that a bundle built elsewhere runs correctly at once, without Triton and without a compiler.

    aot build --models models.txt --models catalogue --sm 90 --out bundles        (any machine)
    PRETUNED_BUNDLES=bundles python benchmarks/run.py first_use --out results/proof.json   (the GPU machine)

Each step runs in a process of its own:

- ``correct``: all catalogue models' two GEMMs at T = 1, 16, 128, 1024, 8192, skewed routing, against fp32;
- ``training``: their dX and dW, and the forward with a gather (on load or before), silu in the epilogue, scatter and
  weights, at T = 1 ... 8192;
- ``forms``: other dtypes, unaligned sizes, int64 counts, strides, empty experts, NaN in one expert;
- ``cold``: time of the first call after the context is up, with finding, opening and loading; and from process start;
- ``host``: host time of one call, against torch's;
- ``capture``: the first call inside a CUDA graph capture, replayed with other counts;
- ``bare``: no compiler on PATH, a read-only file system, no HOME, an arbitrary user id.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import provenance

SHAPE = (128, 1536, 2048, 8)  # Qwen3-30B-A3B, gate and up: E, N, K, top_k
RUN = Path(__file__).parents[1] / "run.py"


def cold() -> dict[str, Any]:
    """Return the times of this process's parts in milliseconds. The parent starts several processes."""
    begun = float(os.environ["BEGUN"])
    import torch

    imported = time.time()
    E, N, K, top_k = SHAPE
    x = torch.randn(top_k, K, device="cuda", dtype=torch.bfloat16)  # one token
    w = torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16)
    m_sizes = (torch.arange(E, device="cuda") < top_k).int()
    torch.empty(top_k, N, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    ready = time.time()
    from pretuned.runtime import grouped_gemm

    runtime = time.time()
    start = time.perf_counter()
    grouped_gemm(x, w, m_sizes)
    returned = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    second = time.perf_counter()
    grouped_gemm(x, w, m_sizes)
    torch.cuda.synchronize()
    return {
        "bundle_bytes": sum(file.stat().st_size for file in bundle_files()),
        "torch_import_ms": 1000 * (imported - begun),
        "context_and_inputs_ms": 1000 * (ready - imported),
        "pretuned_import_ms": 1000 * (runtime - ready),
        "first_call_returns_ms": 1000 * (returned - start),
        "first_result_ms": 1000 * (end - start),
        "second_result_ms": 1000 * (time.perf_counter() - second),
        "process_start_to_first_result_ms": 1000 * (time.time() - begun),
        "triton_imported": "triton" in sys.modules,
    }


def host() -> dict[str, Any]:
    import torch

    from pretuned.runtime import grouped_gemm

    E, N, K = 8, 256, 256
    x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16)
    m_sizes = torch.full((E,), 2, dtype=torch.int32, device="cuda")
    out = torch.empty(16, N, device="cuda", dtype=torch.bfloat16)
    offsets = m_sizes.cumsum(0).to(torch.int32)
    wt = w.transpose(1, 2)
    dense = torch.randn(N, K, device="cuda", dtype=torch.bfloat16).T

    def us(call: Callable[[], object]) -> float:
        """The host time of one call, in batches small enough that the launch queue never fills."""
        for _ in range(20):
            call()
        batches = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            batches.append((time.perf_counter() - start) / 200 * 1e6)
        torch.cuda.synchronize()
        return round(statistics.median(batches), 2)

    moving = [torch.randn(16, K, device="cuda", dtype=torch.bfloat16) for _ in range(300)]
    turn = iter(range(10**9))
    return {
        "grouped_gemm_us": us(lambda: grouped_gemm(x, w, m_sizes)),
        "grouped_gemm_out_given_us": us(lambda: grouped_gemm(x, w, m_sizes, out=out)),
        "grouped_gemm_new_x_each_call_us": us(lambda: grouped_gemm(moving[next(turn) % 300], w, m_sizes)),
        "torch_grouped_mm_us": us(lambda: torch._grouped_mm(x, wt, offs=offsets)),
        "torch_mm_us": us(lambda: torch.mm(x, dense)),
        "torch_empty_us": us(lambda: torch.empty((16, N), device="cuda", dtype=torch.bfloat16)),
        "note": "TMA descriptors are encoded in the call, cached by address; 'new_x_each_call' encodes x's each time",
    }


def capture() -> dict[str, Any]:
    import torch

    from pretuned.runtime import grouped_gemm

    E, N, K, _ = SHAPE
    x = torch.randn(512, K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16) * 0.05
    m_sizes = torch.full((E,), 4, dtype=torch.int32, device="cuda")
    y = torch.zeros(512, N, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(x, w, m_sizes, out=y)
    from benchmarks import method

    errors = []
    for sizes in ([4] * 128, [0] * 100 + [16] * 28, [512] + [0] * 127):
        m_sizes.copy_(torch.tensor(sizes, dtype=torch.int32))
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        errors.append(method.relative_error(y, method.Inputs(x, w, m_sizes)))
    return {"errors": errors, "wrong": [e for e in errors if not e < method.MAX_ERROR]}


def bare() -> dict[str, Any]:
    """Return a call's error in a stripped container; the parent removed compilers and write access before."""
    import torch

    from pretuned.runtime import grouped_gemm

    writable = []
    for place in ("/", "/tmp", "/var/tmp", "/dev/shm", str(Path.cwd())):
        try:
            (Path(place) / "probe").write_text("x")
            writable.append(place)
        except OSError:
            pass
    from benchmarks import method

    inputs = method.Inputs(
        torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16),
        torch.randn(128, 1536, 2048, device="cuda", dtype=torch.bfloat16) * 0.05,
        torch.tensor([0] * 64 + [1] * 64, dtype=torch.int32, device="cuda"),
    )
    y = grouped_gemm(inputs.x, inputs.w, inputs.m_sizes)
    error = method.relative_error(y, inputs)
    return {
        "error": error,
        "wrong": not error < method.MAX_ERROR,
        "uid": os.getuid(),
        "home": os.environ.get("HOME"),
        "compilers": [c for c in ("cc", "gcc", "clang", "nvcc", "ptxas") if shutil.which(c)],
        "writable": writable,
        "triton_imported": "triton" in sys.modules,
    }


def right(name: str) -> Callable[[], dict[str, Any]]:
    """Return a step of ``rightness.py``, imported late: it imports torch, and ``cold`` times that import."""

    def step() -> dict[str, Any]:
        from benchmarks.start import rightness

        figures: dict[str, Any] = getattr(rightness, name)()
        return figures

    return step


STEPS = {name: right(name) for name in ("correct", "training", "forms")}
STEPS |= {f.__name__: f for f in (cold, host, capture, bare)}


def bundle_files() -> list[Path]:
    """Return the bundles in PRETUNED_BUNDLES, or in the system's directory."""
    places = os.environ.get("PRETUNED_BUNDLES", "/opt/pretuned/bundles").split(":")
    return [
        file for place in places for file in ([Path(place)] if Path(place).is_file() else Path(place).glob("*.msgpack"))
    ]


def run_step(name: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None) -> dict[str, Any]:
    env = dict(os.environ if env is None else env) | {"BEGUN": repr(time.time())}
    done = subprocess.run(
        [*prefix, sys.executable, str(RUN), "first_use", "--step", name],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": f"exit {done.returncode}", "output": done.stdout[-2000:]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def run_bare() -> dict[str, Any]:
    """Run ``bare`` as an unknown user in a mount namespace where every file system is read-only. Needs root."""
    script = (
        "for m in $(awk '{print $2}' /proc/mounts | sort -r); do "
        'case $m in /proc*|/sys*) ;; *) mount -o remount,bind,ro "$m" 2>/dev/null;; esac; done; '
        f'exec {shutil.which("setpriv")} --reuid 54321 --regid 54321 --clear-groups env PATH=/nonexistent "$@"'
    )
    keep = ("PRETUNED_BUNDLES", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    env = {key: os.environ[key] for key in keep if key in os.environ}
    env["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"  # for the script's own tools
    return run_step("bare", ("unshare", "-m", "sh", "-c", script, "sh"), env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--step", choices=STEPS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(STEPS[args.step]()))
        return
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "bundles": os.environ.get("PRETUNED_BUNDLES")}
    for name in args.only.split(","):
        if name == "cold":
            runs = [run_step("cold") for _ in range(6)][1:]
            report["cold"] = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
            report["cold"]["runs"] = runs
        elif name == "bare":
            report["bare"] = run_bare()
        else:
            report[name] = run_step(name)
        shown = {k: v for k, v in report[name].items() if k not in ("cells", "runs")}
        print(f"{name}: {json.dumps(shown)}", flush=True)
    import torch

    import pretuned.runtime.driver.cuda as driver

    properties = torch.cuda.get_device_properties(0)
    report["environment"] = {
        "gpu": properties.name,
        "sm_count": properties.multi_processor_count,
        "driver": driver.driver_version(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "about": provenance.about(),
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    failed = [n for n in args.only.split(",") if report[n].get("failed") or report[n].get("wrong")]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
