"""Candidates that ship compiled: variants that the package's builder compiled from today's sources.

Each file is a bundle of one capability's variants, or of several like capabilities, compressed with xz, in a folder
that an installed package names under the entry points ``pretuned.bundles``. The runtime uses them for calls that no
bundle has code for.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path

from ...artifacts.bundle_file import BundleFile, open_bundle
from ...artifacts.cubin import fault
from ...artifacts.errors import BundleError, InputError
from ...artifacts.wire import corrupt
from ...kernels.entry import LAUNCH_ABI, parameter_bytes
from ...kernels.registry import ENTRIES, unlaunchable
from ...kernels.rowops import RowOpSpec
from ...kernels.spec import Spec
from ...runtime.dispatch.places import Place, candidates_file, installed_places
from ..process.gpus import driver_version
from .cache import asked_for, made_of
from .revisions import source_sha256
from .triton import Compiled, Maker


def shipped_file(sm: int | None) -> Path:
    """The file of a capability's shipped candidates; InputError if none ship."""
    if sm is None:
        raise InputError("no candidates are named, and there is no GPU here: name a file that aot compile made")
    for place in installed_places():
        path = candidates_file(place.path, sm)
        if path is not None:
            return path
    raise InputError(f"no candidates are named, and none ship for sm_{sm}: name a file that aot compile made")


class Shipped:
    """The variants of shipped candidates that are of today's sources and that this machine's driver, if any, loads.

    Of equal variants the first counts. ``trouble`` lists the files and variants that can't be used, and why.
    """

    def __init__(self, bundles: Sequence[BundleFile] = (), trouble: Sequence[str] = ()) -> None:
        self.trouble = list(trouble)
        self._places: dict[Hashable, tuple[BundleFile, int]] = {}
        for bundle in bundles:
            try:
                self._add(bundle)
            except BundleError as error:
                self.trouble.append(str(error))

    @classmethod
    def in_packages(cls, sm: int, places: Sequence[Place] | None = None) -> Shipped:
        """The candidates of a capability in the installed packages."""
        bundles: list[BundleFile] = []
        trouble: list[str] = []
        for place in installed_places() if places is None else places:
            path = candidates_file(place.path, sm)
            if path is not None:
                try:
                    bundles.append(open_bundle(path))
                except BundleError as error:
                    trouble.append(str(error))
        return cls([bundle for bundle in bundles if bundle.target.sm == sm], trouble)

    def __len__(self) -> int:
        return len(self._places)

    def has(self, spec: Spec | RowOpSpec, sm: int) -> bool:
        """True if there is a variant for ``sm``; its code is not checked."""
        return (sm, asked_for(spec)) in self._places

    def get(self, spec: Spec | RowOpSpec, sm: int) -> Compiled | None:
        """The variant for ``sm``, its code checked as by ``aot verify``; None if there is none."""
        bundle, i = self._places.get((sm, asked_for(spec)), (None, 0))
        if bundle is None:
            return None
        try:
            variant, cubin = bundle.variant(i), bundle.cubin(i)
            sizes = parameter_bytes(variant.arguments)
            wrong = fault(cubin, bundle.target, variant.entry, sizes, variant.threads, variant.registers)
            if wrong:
                raise corrupt(bundle.path, f"variant {i}: {wrong}")
        except BundleError as error:
            self.trouble.append(str(error))
            return None
        return Compiled(variant, cubin, Maker(bundle.min_driver, bundle.producer))

    def _add(self, bundle: BundleFile) -> None:
        if 0 < driver_version() < bundle.min_driver:
            return
        current = {
            (kernel.name, kernel.revision)
            for kernel in bundle.kernels
            if kernel.name in ENTRIES and source_sha256(kernel.name) == kernel.source_sha256.hex()
        }
        for i, variant in enumerate(bundle.variants()):
            current_code = (variant.kernel, variant.revision) in current and variant.abi == LAUNCH_ABI
            if current_code and unlaunchable(variant) is None:
                self._places.setdefault((bundle.target.sm, made_of(variant)), (bundle, i))
