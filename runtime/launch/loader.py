"""Load variants: each cubin is read, checked and loaded by the driver once for each device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...artifacts.bundle_file import BundleFile
from ...artifacts.errors import BundleError, DriverTooOld
from ...artifacts.records import Gpu, LocalGpu, Problem, RowOp, Variant, cuda_version
from ...artifacts.wire import corrupt
from ...kernels.arch import ARCHS, arch_of
from ...kernels.registry import undeclared
from .. import self_test_results
from ..dispatch import snapshot as dispatch_snapshot
from ..dispatch.decide import Miss, decide
from ..dispatch.snapshot import Rejected, Snapshot, Usable
from ..driver.cuda import CodeUnread, driver_version
from ..driver.device import capturing, devices, local_gpu
from ..driver.device import device as device_of
from ..settings import lock, settings
from .gemm import LoadedKernel, load_kernel

if TYPE_CHECKING:
    from ..dispatch.pin import Pin


def load_decided(
    snapshot: Snapshot,
    problem: Problem,
    M: int,
    local: LocalGpu,
    device: int,
    *,
    aligned: bool,
    strict: bool,
    persistent: bool = False,
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

    def choose() -> tuple[Usable, int] | None:
        decision = decide(snapshot, problem, M, local, aligned=aligned, strict=strict, persistent=persistent)
        return None if isinstance(decision, Miss) else (decision.chosen.usable, decision.chosen.index)

    return load_first(snapshot, choose, local, device)  # a named file's error is raised by the next decision


def load_first(
    snapshot: Snapshot, choose: Callable[[], tuple[Usable, int] | None], local: LocalGpu, device: int
) -> LoadedKernel | None:
    """The variant that ``choose`` returns (a bundle and an index), loaded; None if ``choose`` returns None.

    If a bundle's code is damaged, the bundle is dropped with a warning and ``choose`` is called again; also if a
    variant fails its self-test on this GPU (``self_test.py``). In a graph capture untested code gives None, too.
    """
    while True:  # decide again if a bundle was dropped or a variant failed its test
        chosen = choose()
        if chosen is None:
            return None
        usable, index = chosen
        try:
            kernel = loaded(usable.bundle, index, device, local.gpu.sm_count)
            tested = may_run(usable.bundle, index, kernel, local)
        except BundleError as error:
            snapshot.reject(usable.bundle, error)
            continue
        if tested is None:
            snapshot.put_off += 1
            return None
        if tested:
            return kernel
        snapshot.reconsider()


def tested_on(bundle: BundleFile, index: int, variant: Variant, local: LocalGpu) -> Gpu | None:
    """The GPU of this capability that the variant was measured and tested on before it shipped; None if on none.

    Fallbacks and row kernels, which no choice can name, are tested by this project's own tests, on the capabilities
    that these run on.
    """
    if bundle.target.sm != local.sm or not bundle.gpus:
        return None
    tested = local.sm in ARCHS and ARCHS[local.sm].tested
    if tested and (isinstance(variant.op, RowOp) or variant.alignment == 1):
        return bundle.gpus[0]
    return bundle.tested_on(index)


def self_test_text(bundle: BundleFile, index: int, variant: Variant, local: LocalGpu) -> str:
    """The variant's self-test result on this GPU, as a phrase."""
    gpu = tested_on(bundle, index, variant, local)
    if gpu is not None:
        return f"tested on {gpu.name}"
    if settings().disable_self_test:
        return "never run on this capability, and PRETUNED_DISABLE_SELF_TEST=1 lets it run untested"
    result = self_test_results.recorded(variant, local) if local.gpu.name else None
    if result is None:
        return "never run on this capability: tested before its first use, outside a graph capture"
    if result.right:
        return f"passed its self-test on this GPU on {result.day}"
    return f"failed its self-test on this GPU on {result.day}: {result.why}"


def may_run(bundle: BundleFile, index: int, kernel: LoadedKernel, local: LocalGpu) -> bool | None:
    """True if a variant may be used: it was measured on this capability, or passes its self-test, run now if necessary.

    False if it is wrong or can't be tested; None during a graph capture, where no test can run.

    Raises
    ------
    CudaError
        if the test made the GPU unusable in this process. The next process skips that variant.
    torch.cuda.OutOfMemoryError, OutOfMemory
        where the GPU has no room for the trial. The next call tests it again.
    """
    variant, there = kernel.variant, device_of(kernel.function.device)
    key = (bundle.digest, index)
    if key in there.trusted:
        return True
    if settings().disable_self_test:
        return True
    if tested_on(bundle, index, variant, local) is None:
        result = self_test_results.recorded(variant, local)
        if result is None:
            if capturing():
                return None
            from .self_test import self_test  # here, as most code was tested before it was shipped

            with lock("self-test"):
                result = self_test_results.recorded(variant, local)
                if result is None and not self_test_results.is_wrong(variant, local):
                    result = self_test(bundle, kernel, local)
        if result is None or not result.right:
            return False
    there.trusted.add(key)
    return True


def loaded(bundle: BundleFile, index: int, device: int, sm_count: int) -> LoadedKernel:
    """Variant ``index`` of a bundle on ``cuda:device``. Legal inside a graph capture.

    If another bundle with an equal variant is loaded, like one built from the same candidates, its kernel is used, and
    this bundle's copy of the code is not read.

    Raises
    ------
    BundleCorrupt
        if the cubin is not the one that the index describes, or the variant is none that can be launched.
    DriverTooOld
        if the driver can't read the code, whatever version it says that it has.
    CudaError
        if the driver refuses the code for another reason.
    """
    there, key = device_of(device), (bundle.digest, index)
    kernel: LoadedKernel | None = there.places.get(key)
    if kernel is None:
        with lock("loading"):
            kernel = there.places.get(key)
            if kernel is None:
                variant = bundle.variant(index)  # the whole record, with its cubin's sha256
                kernel = there.kernels.get(variant)
                if kernel is None:
                    kernel = there.kernels[variant] = _load(bundle, index, variant, device, sm_count)
                there.places[key] = kernel
    return kernel


def _load(bundle: BundleFile, index: int, variant: Variant, device: int, sm_count: int) -> LoadedKernel:
    cubin = bundle.cubin(index)
    wrong = undeclared(variant, arch_of(bundle.target.sm).limits)  # aot verify compares the code itself, too
    if wrong:
        raise corrupt(bundle.path, f"variant {index}: {wrong}")
    where = f"bundle {bundle.path!r}: variant {index}"
    try:
        return load_kernel(variant, cubin, device, sm_count, where)
    except CodeUnread as error:
        raise DriverTooOld(
            f"{where}: this driver can't read its code ({error}). The bundle is for a driver for CUDA "
            f"{cuda_version(bundle.min_driver)} or later, this one says that it is for CUDA "
            f"{cuda_version(driver_version())}. Update the driver, or rebuild with a Triton whose ptxas is older"
        ) from error


def loaded_count() -> int:
    """The number of cubins that this process has loaded, on all GPUs."""
    return sum(len(device.kernels) for device in devices.values())


def pinned_kernel(pin: Pin, problem: Problem, device: int, *, aligned: bool) -> LoadedKernel | None:
    """The variant that ``pin`` names, loaded on ``cuda:device``; None where a preference has none.

    Raises
    ------
    InputError
        if no usable bundle has it for this kind of problem; the message lists the nearest.
    """
    from ..dispatch.pin import Preference, find, preferred  # here, as few calls name a kernel

    snapshot, local = dispatch_snapshot.snapshot(), local_gpu(device)
    if isinstance(pin, Preference):
        config = preferred(snapshot, pin, problem, local, aligned=aligned)
        if config is None:
            return None
        pin = config
    named = pin

    def choose() -> tuple[Usable, int]:
        while True:  # again if ``Rejected`` has dropped a bundle
            with contextlib.suppress(Rejected):
                return find(snapshot, named, problem, local, aligned=aligned)

    return load_first(snapshot, choose, local, device)
