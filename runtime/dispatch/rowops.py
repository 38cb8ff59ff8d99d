"""Ranks the row kernels of a snapshot's bundles for a GPU."""

from __future__ import annotations

import contextlib
from functools import partial

from ...artifacts.records import DType, LocalGpu, RowOp, Variant
from ...kernels import arch
from ...kernels.entry import READS_ABI
from ...kernels.registry import entry_named, unlaunchable
from ...kernels.rowops import RowOpSpec
from .. import self_test_results
from .snapshot import Rejected, Snapshot, Usable


def ranked(snapshot: Snapshot, op: RowOp, dtype: DType, local: LocalGpu, *, aligned: bool) -> list[tuple[Usable, int]]:
    """The variants of the row kernel ``op`` that ``local`` can run, best first: (bundle, variant's index).

    They rank by exact capability, aligned code, later revision, then the bundle's position in the search path.
    Installed packages are read only if no other bundle has the revision of this version, so a bundle that an earlier
    version built does not hide theirs. Of the packages, those measured on this GPU are read first.
    """
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            kernels: list[tuple[Usable, int, Variant]] = []
            for asked in (
                partial(snapshot.view, installed=False),
                snapshot.nearer_view,
                partial(snapshot.view, installed=True),
            ):
                kernels = [
                    (usable, i, variant)
                    for usable in asked(local).usable
                    for i, variant in snapshot.variants(usable.bundle, RowOpSpec(op, dtype))
                    if _runs(variant, local, aligned)
                ]
                kernels.sort(key=lambda kernel: _rank(kernel[0], kernel[1], kernel[2], local))
                if kernels and _is_current(kernels[0][0], kernels[0][2], local):
                    break
            return [(usable, i) for usable, i, _ in kernels]


def _is_current(usable: Usable, variant: Variant, local: LocalGpu) -> bool:
    """True if a kernel is for exactly this capability, and not older than the revision that this version compiles."""
    entry = entry_named(variant.kernel)
    return usable.bundle.target.sm == local.sm and (entry is None or variant.revision >= entry.revision)


def _rank(usable: Usable, index: int, variant: Variant, local: LocalGpu) -> tuple[int, ...]:
    native = usable.bundle.target.sm == local.sm
    return (not native, -variant.alignment, -variant.revision, usable.order, index)


def _runs(variant: Variant, local: LocalGpu, aligned: bool) -> bool:
    first, last = READS_ABI
    target = arch.ARCHS.get(local.sm)
    fits = target is None or variant.shared_bytes <= target.limits.shared_per_block_bytes
    could = first <= variant.abi <= last and (aligned or variant.alignment == 1) and fits and not unlaunchable(variant)
    return could and not self_test_results.is_wrong(variant, local)
