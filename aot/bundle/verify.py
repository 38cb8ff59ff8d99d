"""Check a bundle whole: every digest and record, and the headers of its code."""

from __future__ import annotations

from dataclasses import dataclass

from ...artifacts.bundle_file import BundleFile, open_bundle
from ...artifacts.cubin import fault
from ...artifacts.errors import BundleCorrupt, BundleTooNew, BundleTooOld
from ...artifacts.packed import is_packed
from ...artifacts.records import Bundle
from ...artifacts.signature import Keys, check
from ...kernels.arch import arch_of
from ...kernels.entry import READS_ABI, parameter_bytes
from ...kernels.registry import undeclared, unlaunchable


@dataclass(frozen=True, slots=True)
class Verified:
    """The counts of what was checked in a sound bundle."""

    path: str
    target: str
    variants: int
    problems: int
    choices: int
    signed_by: str | None = None

    def to_dict(self) -> dict[str, object]:
        """The counts as plain values for JSON."""
        return {
            "path": self.path,
            "ok": True,
            "target": self.target,
            "variants": self.variants,
            "problems": self.problems,
            "choices": self.choices,
            "signed_by": self.signed_by,
        }


def verify(path: str, sha256: str | None = None, keys: Keys | None = None) -> Verified:
    """Check all of a bundle; ``sha256`` pins the whole file, and one of ``keys`` must have signed it.

    Raises
    ------
    BundleError
        naming the first thing that is wrong.
    """
    with open_bundle(path, sha256=sha256) as opened:
        bundle = sound_one(opened, pruned=is_packed(path))
        key = None if keys is None else check(path, opened.digest, keys).name
    choices = sum(map(len, bundle.choices.values()))
    return Verified(path, str(bundle.target), len(bundle.variants), len(bundle.choices), choices, key)


def sound(path: str, sha256: str | None = None, *, pruned: bool = False) -> Bundle:
    """Read a whole bundle, all of it checked as ``verify`` does.

    With ``pruned``, variants may need more shared memory than a block has, as shipped candidates may.

    Raises
    ------
    BundleError
    """
    with open_bundle(path, sha256=sha256) as opened:
        return sound_one(opened, pruned=pruned)


def sound_one(opened: BundleFile, *, pruned: bool = False) -> Bundle:
    """Like ``sound``, for an open file.

    Raises
    ------
    BundleError
    """
    bundle, path = opened.load(), opened.path
    for i, (variant, cubin) in enumerate(zip(bundle.variants, bundle.cubins, strict=True)):
        where = f"bundle {path!r}, variant {i}"
        if variant.abi > READS_ABI[1]:
            raise BundleTooNew(f"{where}: launch ABI {variant.abi}, this version reads {_reads()}. Upgrade pretuned")
        if variant.abi < READS_ABI[0]:
            raise BundleTooOld(f"{where}: launch ABI {variant.abi}, this version reads {_reads()}. Build it again")
        wrong = unlaunchable(variant)
        sizes = parameter_bytes(variant.arguments)
        wrong = wrong or fault(cubin, bundle.target, variant.entry, sizes, variant.threads, variant.registers)
        limits = arch_of(bundle.target.sm).limits
        if pruned:
            limits = limits._replace(shared_per_block_bytes=max(limits.shared_per_block_bytes, variant.shared_bytes))
        wrong = wrong or undeclared(variant, limits)
        if wrong:
            raise BundleCorrupt(f"{where}: {wrong}. Build it again with aot build, or upgrade pretuned")
    return bundle


def _reads() -> str:
    return "-".join(map(str, dict.fromkeys(READS_ABI)))
