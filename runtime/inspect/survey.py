"""Test results of the kernels that a GPU can run: tested on its capability, passed here, wrong here, or untested."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ...artifacts.bundle_file import BundleFile
from ...artifacts.errors import BundleError
from ...artifacts.records import LocalGpu, Variant
from ...kernels import arch
from ...kernels.entry import READS_ABI
from ...kernels.registry import unlaunchable
from .. import verdicts
from ..dispatch.places import Kind
from ..dispatch.snapshot import Snapshot
from ..launch.loader import judged_on
from ..launch.proof import complaint


@dataclass(frozen=True, slots=True)
class Untested:
    """A variant of a bundle that was never run on a GPU's capability."""

    bundle: BundleFile
    index: int
    variant: Variant


@dataclass(frozen=True, slots=True)
class Survey:
    """Numbers of variants: ``tested`` on another GPU of this capability, ``passed`` on this GPU.

    ``wrong`` has one line for each variant that failed. ``left`` are the untested variants.
    """

    tested: int
    passed: int
    wrong: tuple[str, ...]
    left: tuple[Untested, ...]


def survey(snapshot: Snapshot, local: LocalGpu) -> Survey:
    """Collect the test results of each variant of the bundles that ``local`` can use. Runs nothing."""
    tested: set[Variant] = set()
    passed: set[Variant] = set()
    wrong: dict[Variant, str] = {}
    left: dict[Variant, Untested] = {}
    for usable in snapshot.view(local, installed=True).usable:
        bundle = usable.bundle
        # (Records that are damaged are another's business, and what this process has made is in no file.)
        with contextlib.suppress(BundleError):
            for index, variant in enumerate(bundle.variants() if usable.place.kind is not Kind.PROCESS else ()):
                if not _runs(variant, local):
                    continue
                if judged_on(bundle, index, variant, local) is not None:
                    tested.add(variant)
                    continue
                result = verdicts.known(variant, local)
                if result is None:
                    left.setdefault(variant, Untested(bundle, index, variant))
                elif result.right:
                    passed.add(variant)
                else:
                    wrong[variant] = complaint(bundle.path, variant, local, result.why)
    rest = tuple(entry for variant, entry in left.items() if variant not in tested)
    return Survey(len(tested), len(passed - tested), tuple(wrong.values()), rest)


def _runs(variant: Variant, local: LocalGpu) -> bool:
    first, last = READS_ABI
    chip = arch.ARCHS.get(local.sm)
    fits = chip is None or variant.shared_bytes <= chip.limits.shared_per_block_bytes
    return first <= variant.abi <= last and fits and unlaunchable(variant) is None
