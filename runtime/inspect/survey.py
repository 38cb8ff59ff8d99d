"""What is known of the code for a GPU: judged on its capability, proven on it, wrong there, or run by nobody."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ...artifacts.errors import BundleError
from ...artifacts.files.bundle_file import BundleFile
from ...artifacts.records.bundle import Variant
from ...artifacts.records.target import LocalGpu
from ...kernels.contract.launchable import unlaunchable
from ...kernels.contract.words import READS_ABI
from ...kernels.hardware import arch
from .. import verdicts
from ..dispatch.places import Kind
from ..dispatch.snapshot import Snapshot
from ..launch.proof import complaint, judged_on


@dataclass(frozen=True, slots=True)
class Unproven:
    """A variant of a bundle's file that nobody has run on a GPU's capability."""

    bundle: BundleFile
    index: int
    variant: Variant


@dataclass(frozen=True, slots=True)
class Survey:
    """The variants that a GPU could run: how many were ``judged`` elsewhere on its capability or are ``proven`` here.

    ``wrong`` says of each that is wrong what, ``left`` are those that nobody has run.
    """

    judged: int
    proven: int
    wrong: tuple[str, ...]
    left: tuple[Unproven, ...]


def survey(snapshot: Snapshot, local: LocalGpu) -> Survey:
    """What is known of each variant of the bundles that ``local`` can use. Runs nothing."""
    judged: set[Variant] = set()
    proven: set[Variant] = set()
    wrong: dict[Variant, str] = {}
    left: dict[Variant, Unproven] = {}
    for usable in snapshot.view(local, installed=True).usable:
        bundle = usable.bundle
        # (Records that are damaged are another's business, and what this process has made is in no file.)
        with contextlib.suppress(BundleError):
            for index, variant in enumerate(bundle.variants() if usable.place.kind is not Kind.PROCESS else ()):
                if not _runs(variant, local):
                    continue
                if judged_on(bundle, index, variant, local) is not None:
                    judged.add(variant)
                    continue
                found = verdicts.known(variant, local)
                if found is None:
                    left.setdefault(variant, Unproven(bundle, index, variant))
                elif found.right:
                    proven.add(variant)
                else:
                    wrong[variant] = complaint(bundle.path, variant, local, found.why)
    rest = tuple(one for variant, one in left.items() if variant not in judged)
    return Survey(len(judged), len(proven - judged), tuple(wrong.values()), rest)


def _runs(variant: Variant, local: LocalGpu) -> bool:
    first, last = READS_ABI
    known = arch.ARCHS.get(local.sm)
    fits = known is None or variant.shared_bytes <= known.limits.shared_per_block_bytes
    return first <= variant.abi <= last and fits and unlaunchable(variant) is None
