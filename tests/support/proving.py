"""Trials of code on a GPU that is host memory: launches are carried out by ``host_gpu.py``, right or wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import host_gpu
import pytest
import torch
from made import Spec, variant

from pretuned.artifacts.records.bundle import Variant
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import RowOp
from pretuned.runtime.driver.cuda import Function
from pretuned.runtime.launch import gemm as launch_gemm
from pretuned.runtime.launch import proof, trials
from pretuned.runtime.launch.gemm import LoadedKernel

_RESULTS = {RowOp.ACTIVATION: 1, RowOp.SORT_SLOTS: 2, RowOp.CLEAR: 0}  # among a pass's pointers; else the last
FUNCTION = Function(5, 6, 0, 256, 0, 8)


class Faults:
    """What is wrong with code, by its cubin's digest: ``spoil`` is called with the words of a launch after it."""

    def __init__(self) -> None:
        self.spoilt: dict[bytes, Callable[..., None]] = {}
        self.tried: list[Variant] = []
        self.launches = 0

    def after(self, variant: Variant, result: int, words: dict[str, int]) -> None:
        self.launches += 1
        spoil = self.spoilt.get(variant.cubin_sha256)
        if spoil is not None:
            spoil(result, words)


def one_element(result: int, words: dict[str, int]) -> None:
    """One element of the result is off by a half."""
    host_gpu.at(result, 3)[2] += 0.5


@contextlib.contextmanager
def on_host(_device: int) -> Iterator[trials.TrialPlace]:
    yield trials.TrialPlace(torch.device("cpu"), 0, lambda: None)


def install(patch: pytest.MonkeyPatch) -> Faults:
    """Have trials and calls run on the host."""
    faults = Faults()

    def made(real: Callable[..., Any]) -> Callable[..., Any]:
        def launcher(kernel: LoadedKernel, **how: Any) -> host_gpu.FakeLauncher:
            carries_out = real(kernel, **how)

            def run(result: int, m_sizes: int, **words: int) -> None:
                carries_out.run(result, m_sizes, **words)
                faults.after(kernel.variant, result, words)

            return host_gpu.FakeLauncher(run, carries_out.zeroes)

        return launcher

    class Pass:
        """As ``RowOpLauncher``."""

        block, most_experts = host_gpu.SLOTS, 512

        def __init__(self, variant: Variant, function: Function, op: RowOp) -> None:
            self.variant, self.op = variant, op

        def __call__(self, rows: int, columns: int, pointers: Any, numbers: Any, stream: int) -> None:
            host_gpu.FAKES[self.op](rows, columns, pointers, numbers)
            faults.after(self.variant, pointers[_RESULTS.get(self.op, len(pointers) - 1)], {})

    real = proof.trial

    def trial(kernel: LoadedKernel, here: trials.TrialPlace) -> str | None:
        faults.tried.append(kernel.variant)
        return real(kernel, here)

    patch.setattr(launch_gemm, "row_launcher", made(host_gpu.fake_rows))
    patch.setattr(launch_gemm, "weight_launcher", made(host_gpu.fake_weight))
    patch.setattr(trials, "RowOpLauncher", Pass)
    patch.setattr(proof, "trial_place", on_host)
    patch.setattr(proof, "trial", trial)
    return faults


def kernel(spec: Spec, cubin: bytes = b"code") -> LoadedKernel:
    """Loaded code of float32."""
    assert spec.dtype is DType.FP32
    return LoadedKernel(variant(spec, cubin), FUNCTION, 132)
