"""A process that uses a GPU for long: calls of threads on streams of their own, graphs captured beside, and ``reload``.

Results stay the same bits, and nothing grows: descriptors, the host's memory, the GPUs'. Where there are two GPUs each
has its threads and graphs, and one thread more goes from GPU to GPU.

    python tests/gpu/soak.py --minutes 20 --json soak.json

Exit code 1 where something was wrong, or grew by more than ``MOST_MIB`` or ``MOST_DESCRIPTORS``: ``grown``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pretuned.runtime import Lora, grouped_gemm, moe_mlp, reload, sort_routing

MOST_MIB = {"host": 64.0, "gpu": 16.0}
MOST_DESCRIPTORS = 8
E, H, I, TOP_K = 16, 512, 256, 2  # noqa: E741
TOKENS = (1, 7, 64, 300, 1024)


class Layer(NamedTuple):
    gate_up: torch.Tensor
    down: torch.Tensor
    lora: tuple[Lora, Lora]
    hidden: dict[int, torch.Tensor]
    ids: dict[int, torch.Tensor]
    weights: dict[int, torch.Tensor]


def layer_on(gpu: int) -> Layer:
    """Return a layer with equal numbers on every GPU."""
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape: int, spread: float = 1.0) -> torch.Tensor:
        return (spread * torch.randn(shape, generator=draw)).to(f"cuda:{gpu}", torch.bfloat16)

    lora = (
        Lora(tensor(E, 16, H, spread=H**-0.5), tensor(E, 2 * I, 16), 0.1),
        Lora(tensor(E, 16, I, spread=I**-0.5), tensor(E, H, 16), 0.1),
    )
    routed = {T: torch.rand(T, E, generator=draw).to(f"cuda:{gpu}").topk(TOP_K, -1) for T in TOKENS}
    return Layer(
        tensor(E, 2 * I, H, spread=H**-0.5),
        tensor(E, H, I, spread=I**-0.5),
        lora,
        {T: tensor(T, H) for T in TOKENS},
        {T: routed[T].indices for T in TOKENS},
        {T: routed[T].values for T in TOKENS},
    )


def results(layer: Layer, T: int) -> list[torch.Tensor]:
    """Of a product, a layer, one with adapters and the gradients of these."""
    hidden, ids, weights = layer.hidden[T], layer.ids[T], layer.weights[T]
    index, m_sizes, *_ = sort_routing(ids, E)
    y = grouped_gemm(hidden, layer.gate_up, m_sizes, TOP_K, index, permute_x=True)
    out = moe_mlp(hidden, layer.gate_up, layer.down, ids, weights)
    x = hidden.detach().requires_grad_()
    adapted = moe_mlp(x, layer.gate_up, layer.down, ids, weights, lora=layer.lora)
    return [y, out, adapted.detach(), *torch.autograd.grad(adapted, [x], torch.ones_like(adapted))]


def held() -> dict[str, float]:
    """Descriptors, and MiB of the host and of all GPUs that are in use: what is free in this process is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    used = 0
    for gpu in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(gpu)
        used += total - free
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    host = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {"descriptors": descriptors, "host": host, "gpu": used / 2**20}


def grown(tenths: list[dict[str, float]]) -> dict[str, float]:
    """The least that was held at the last three counts less the least at the first three.

    The threads run while it is counted, and what they hold for a moment goes up and down: on an H100 by 68
    MiB, in steps of 22, in a run that ended as it began. What is never given back is in the least, too.
    """
    first, last = tenths[:3], tenths[-3:]
    return {
        name: round(min(sample[name] for sample in last) - min(sample[name] for sample in first), 1)
        for name in tenths[0]
    }


class Soak:
    """The state that the threads share."""

    def __init__(self, seconds: float) -> None:
        self.gpus = range(torch.cuda.device_count())
        self.layers = [layer_on(gpu) for gpu in self.gpus]
        self.counts = {"steps": 0, "steps of the one that goes": 0, "reloads": 0, "graphs": 0, "replays": 0}
        self.wrong: list[str] = []
        self.wanted = [{T: [tensor.clone() for tensor in results(layer, T)] for T in TOKENS} for layer in self.layers]
        for gpu in self.gpus:
            torch.cuda.synchronize(gpu)
        self.lock = threading.Lock()
        self.quiet = threading.Lock()  # none asks how much memory is free while one captures
        self.end = time.monotonic() + seconds

    def runs(self) -> bool:
        return time.monotonic() < self.end and not self.wrong

    def add(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def compare(self, tensors: list[torch.Tensor], gpu: int, T: int, who: str) -> None:
        for i, (got, want) in enumerate(zip(tensors, self.wanted[gpu][T], strict=True)):
            if not torch.equal(got, want):
                self.wrong.append(f"{who}: result {i} of {T} tokens on GPU {gpu} is another")

    def step(self, gpu: int, number: int, stream: torch.cuda.Stream, who: str, current: int) -> None:
        T = TOKENS[number % len(TOKENS)]
        with torch.cuda.stream(stream):
            torch.cuda.set_device(current)
            tensors = results(self.layers[gpu], T)
            stream.synchronize()
            self.compare(tensors, gpu, T, who)

    def caller(self, seed: int, gpu: int) -> None:
        stream, number = torch.cuda.Stream(gpu), seed
        while self.runs():
            self.step(gpu, number, stream, f"thread {seed}", gpu)
            number += 1
            self.add("steps")

    def goer(self) -> None:
        """From GPU to GPU; every other time the last one is the current one."""
        streams, number = [torch.cuda.Stream(gpu) for gpu in self.gpus], 0
        while self.runs():
            gpu, last = number % len(self.gpus), (number // len(self.gpus)) % 2
            self.step(gpu, number, streams[gpu], "the thread that goes", -1 % len(self.gpus) if last else gpu)
            number += 1
            self.add("steps of the one that goes")

    def reloader(self) -> None:
        while self.runs():
            reload()
            self.add("reloads")
            time.sleep(0.5)

    def capturer(self, gpu: int) -> None:
        torch.cuda.set_device(gpu)
        number, layer, stream = 0, self.layers[gpu], torch.cuda.Stream()  # (torch has 32, and gives them out in turns)
        while self.runs():
            T, number = TOKENS[number % len(TOKENS)], number + 1
            graph = torch.cuda.CUDAGraph()
            with self.quiet, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = moe_mlp(layer.hidden[T], layer.gate_up, layer.down, layer.ids[T], layer.weights[T])
            for _ in range(3):
                graph.replay()
                self.add("replays")
            torch.cuda.current_stream().synchronize()
            if not torch.equal(out, self.wanted[gpu][T][1]):
                self.wrong.append(f"a graph of {T} tokens on GPU {gpu} has another result")
            self.add("graphs")
            del graph, out

    def guarded(self, work: Any, *args: int) -> None:
        try:
            work(*args)
        except BaseException as error:
            self.wrong.append(f"{work.__name__}: {type(error).__name__}: {error}")
            traceback.print_exc()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here")
    soak = Soak(60 * args.minutes)
    works: list[tuple[Any, ...]] = [(soak.caller, seed, gpu) for gpu in soak.gpus for seed in range(3)]
    works += [(soak.reloader,), *((soak.capturer, gpu) for gpu in soak.gpus)]
    if len(soak.gpus) > 1:
        works.append((soak.goer,))
    threads = [threading.Thread(target=soak.guarded, args=work) for work in works]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    tenths = []
    for tenth in range(1, 11):
        while soak.runs() and time.monotonic() < begun + 6 * args.minutes * tenth - 1:
            time.sleep(0.5)
        with soak.quiet:
            tenths.append({name: round(value, 1) for name, value in held().items()})
    for thread in threads:
        thread.join()
    more = grown(tenths)
    for name, most in {**MOST_MIB, "descriptors": MOST_DESCRIPTORS}.items():
        if more[name] > most:
            soak.wrong.append(f"{name} grew by {more[name]:.1f}, at most {most} may be")
    names = [torch.cuda.get_device_name(gpu) for gpu in soak.gpus]
    report = {
        "gpus": names,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        **soak.counts,
        "grown": more,
        "held after each tenth": tenths,
        "wrong": soak.wrong,
    }
    print(json.dumps(report, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
