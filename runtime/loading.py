"""Variants made ready to launch: each cubin is read, checked and given to the driver once a device."""

from __future__ import annotations

from ..artifacts.cubin import mismatch, other_parameters
from ..artifacts.errors import BundleError
from ..artifacts.store import BundleFile
from ..artifacts.types import Problem
from ..artifacts.wire import corrupt
from ..kernels.abi import parameter_bytes
from .device import LocalGpu
from .discover import Snapshot
from .dispatch import Miss, decide
from .launch import LoadedKernel, load_kernel
from .locks import lock

_loaded: dict[tuple[bytes, int, int], LoadedKernel] = {}  # by bundle, variant, device


def prepare(
    snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, device: int, *, aligned: bool, strict: bool
) -> LoadedKernel | None:
    """The variant that dispatch decides on, loaded on ``cuda:device``; None where torch has to run it.

    A bundle whose cubin turns out damaged is dropped with a warning, and the next best is taken.

    Raises
    ------
    ProblemNotInBundle, TargetMismatch, DriverTooOld, BundleError
        as ``decide`` does.
    CudaError
        if the driver refuses the code.
    """
    while True:  # each turn drops a bundle
        decision = decide(snapshot, problem, M, local, aligned=aligned, strict=strict)
        if isinstance(decision, Miss):
            return None
        chosen = decision.chosen
        try:
            return loaded(chosen.usable.bundle, chosen.index, device, local.gpu.sm_count)
        except BundleError as error:
            snapshot.reject(chosen.usable.bundle, error)  # a named file's error is raised by the next decision


def loaded(bundle: BundleFile, index: int, device: int, sm_count: int) -> LoadedKernel:
    """Variant ``index`` of a bundle on ``cuda:device``. Legal inside a graph capture.

    Raises
    ------
    BundleCorrupt
        if the cubin is not the one that the index describes, or the variant is none that can be launched.
    CudaError
        if the driver refuses the code.
    """
    key = (bundle.digest, index, device)
    kernel = _loaded.get(key)
    if kernel is None:
        with lock("loading"):
            kernel = _loaded.get(key)
            if kernel is None:
                variant = bundle.variant(index)
                cubin = bundle.cubin(index)
                wrong = mismatch(cubin, bundle.target, later_abi=True)
                wrong = wrong or other_parameters(cubin, variant.entry, parameter_bytes(variant.arguments))
                if wrong:
                    raise corrupt(bundle.path, f"variant {index}: {wrong}")
                where = f"bundle {bundle.path!r}: variant {index}"
                kernel = _loaded[key] = load_kernel(variant, cubin, device, sm_count, where)
    return kernel


def loaded_count() -> int:
    """How many cubins this process has loaded, over all devices."""
    return len(_loaded)
