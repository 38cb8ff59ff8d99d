"""Self-test of kernels that were never run on a GPU's capability: a small GEMM, compared with torch.

A bundle says where a variant was measured, and so tested (``BundleFile.tested_on``). On any other capability, and for
code that was never measured, ``loader.may_run`` runs a self-test before the first use on a machine: some milliseconds
on that GPU. ``self_test_problems.py`` has the problems, ``runtime/self_test_results.py`` keeps the result. A wrong
variant is not used from then on: dispatch selects another, or torch. In a graph capture no test can run, so untested
code is not used.

Only a wrong result, a fault of the GPU or a hang makes code wrong. A test that fails otherwise says nothing about the
code: this process leaves it out, and the next process tests it again.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future

import torch

from ...artifacts.bundle_file import BundleFile
from ...artifacts.errors import CudaError
from ...artifacts.limits import printable
from ...artifacts.records import LocalGpu, Variant, cuda_version
from .. import self_test_results
from ..driver import cuda
from ..driver.cuda import Unfinished
from ..driver.device import device as device_of
from ..weights.writing import without_kernels
from . import gemm
from .self_test_problems import TrialPlace, trial, trial_place

_log = logging.getLogger(__name__)


def self_test(bundle: BundleFile, kernel: gemm.LoadedKernel, local: LocalGpu) -> self_test_results.Result | None:
    """Test a kernel, keep the result, and log a wrong kernel; None, with a log line, if it could not be tested."""
    began = time.perf_counter()
    broken = None
    try:
        wrong = tried(kernel)
    except Unfinished as error:
        wrong, broken = str(error), error
    except (torch.cuda.OutOfMemoryError, cuda.OutOfMemory, cuda.Unusable):
        raise
    except Exception as error:
        self_test_results.leave_out(kernel.variant, local)
        _log.warning(
            "pretuned: could not test %s of %s on %s: %s. This process runs another kernel, or torch, instead; "
            "the next process tests it again",
            _named(kernel.variant),
            printable(bundle.path),
            local.gpu.name,
            first_line(error),
        )
        return None
    result = self_test_results.result_of_today(wrong is None, wrong or "")
    self_test_results.note(kernel.variant, local, result)
    if wrong is None:
        _log.info(
            "pretuned: %s passed its self-test on %s, in %.1f ms",
            _named(kernel.variant),
            local.gpu.name,
            (time.perf_counter() - began) * 1e3,
        )
        return result
    _log.error("%s", complaint(bundle.path, kernel.variant, local, wrong))
    if broken is not None:
        raise CudaError(f"{broken}. It is left out from now on: start this process anew") from broken
    return result


def complaint(path: str, variant: Variant, local: LocalGpu, why: str) -> str:
    """The log line about a wrong kernel, with all that a maintainer needs."""
    name = path.rpartition("/")[2]
    return printable(
        f"pretuned: wrong on this GPU and left out from now on (another kernel, or torch, runs instead): "
        f"{_named(variant)}, revision {variant.revision}, of {name}, cubin sha256 {variant.cubin_sha256.hex()}, "
        f"on {local}, driver for CUDA {cuda_version(local.gpu.driver)}: {why}. "
        "Please file this line as an issue of pretuned"
    )


def _named(variant: Variant) -> str:
    config = " ".join(f"{name}={value}" for name, value in variant.config)
    what = f"{variant.entry} {variant.op.value} {variant.dtype.value} w={variant.layout.value}"
    fused = f" {variant.fusion}" if variant.fusion else ""
    return f"{what}{fused} {config}" + (" unaligned" if variant.alignment == 1 else "")


def tried(kernel: gemm.LoadedKernel) -> str | None:
    """Test the variant on its GPU; return its fault in words, None if it is right.

    It runs in a thread of its own, which has none of the caller's modes: autocast, gradients, a trace, another stream.

    Raises
    ------
    Unfinished
        where it faults, or does not end.
    Unusable
        where the GPU could not be used before the trial began.
    Exception
        any other: the trial could not be made, and says nothing about the code.
    """
    outcome: Future[str | None] = Future()

    def work() -> None:
        try:
            with without_kernels(), trial_place(kernel.function.device) as here:
                outcome.set_result(_tried(kernel, here))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="pretuned-self-test", daemon=True).start()
    return outcome.result()


def _tried(kernel: gemm.LoadedKernel, here: TrialPlace) -> str | None:
    try:
        here.wait()
    except Exception as error:  # an earlier launch's error, not the tested kernel's
        raise cuda.Unusable(f"the GPU can't be used: {first_line(error)}") from error
    try:
        return trial(kernel, here)
    except Unfinished:
        raise
    except Exception as error:
        try:
            here.wait()
        except Exception as after:
            if isinstance(after, Unfinished) or cuda.is_fault(after):
                raise Unfinished(f"{_named(kernel.variant)}: {first_line(after)}") from error
        raise
    finally:
        device_of(kernel.function.device).counters.forget(here.stream)  # a wrong kernel may have changed counters


def first_line(error: BaseException) -> str:
    """The first line of an error's text (torch adds advice in further lines), or its type where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
