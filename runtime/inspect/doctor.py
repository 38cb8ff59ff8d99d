"""``python -m pretuned.runtime``: what this machine would use, what it would not, why, and the fix."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ...artifacts.errors import BundleError, BundleUntrusted, CudaError, DriverTooOld, TargetMismatch
from ...artifacts.files.signature import Keys, key_id
from ...artifacts.names import printable
from ...artifacts.records.target import LocalGpu, cuda_version
from ...kernels.hardware import arch
from .. import settings
from ..dispatch import snapshot as dispatch_snapshot
from ..dispatch.places import REINSTALL, Found, Kind, Place, unusable
from ..dispatch.snapshot import Snapshot, View
from ..driver.cuda import DriverLacks, device_count, driver_version
from ..driver.device import local_gpu, platform_name, platform_supported
from .survey import survey

_VARIABLES = (
    settings.BUNDLES,
    settings.DISABLE_AUTOTUNE,
    settings.DISABLE_SELF_TEST,
    settings.STRICT,
    settings.TRUSTED_KEYS,
)
_PACKAGES = ("pretuned", "torch", "msgpack", "filelock", "triton")


@dataclass(frozen=True, slots=True)
class BundleReport:
    """One bundle file. ``used_by`` are the indices of the GPUs that can use it; ``why_not`` is empty if one can.

    ``for_other_gpus``: it is not used because it is for other capabilities, and nobody named it.
    """

    path: str
    place: str
    target: str
    problems: int
    variants: int
    measured_on: tuple[str, ...]
    used_by: tuple[int, ...]
    why_not: str
    for_other_gpus: bool = False

    def lines(self) -> tuple[str, ...]:
        """The file, and whether it is used; without a GPU the file alone."""
        if not self.target:
            return self.path, f"  {self.why_not}"
        used = f"used by GPU {', '.join(map(str, self.used_by))}" if self.used_by else self.why_not
        measured = f"measured on {', '.join(self.measured_on)}" if self.measured_on else "modelled"
        line = f"{self.path} ({self.target}, {self.problems} problems, {self.variants} variants, {measured})"
        return (line, f"  {used}") if used else (line,)


@dataclass(frozen=True, slots=True)
class HostReport:
    """What ``examine`` found. ``problems`` are what keeps bundles from being used, with the fix; ``ok`` if none."""

    platform: str
    python: str
    packages: tuple[tuple[str, str], ...]
    driver: str
    gpus: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    trusted_keys: tuple[str, ...]
    overlay: str
    places: tuple[tuple[str, int], ...]
    bundles: tuple[BundleReport, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every GPU has a bundle that it would use; true where there is no GPU."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        plain = asdict(self)
        del plain["places"]
        for name in ("packages", "environment"):
            plain[name] = dict(plain[name])
        plain["search_path"] = [{"place": place, "bundles": count} for place, count in self.places]
        return {"ok": self.ok, **plain}

    def __str__(self) -> str:
        lines = [f"platform  {self.platform}, Python {self.python}"]
        lines += ["packages  " + ", ".join(f"{name} {version}" for name, version in self.packages)]
        lines += [f"driver    {self.driver}"]
        lines += [f"GPU       {gpu}" for gpu in self.gpus] or ["GPU       none"]
        lines += [f"variable  {name}={value}" for name, value in self.environment]
        lines += [f"key       {key}" for key in self.trusted_keys]
        lines += [f"overlay   {self.overlay}"]
        for place, count in self.places:
            lines.append(f"searched  {place}: {count} bundle{'' if count == 1 else 's'}")
            inside = [one for one in self.bundles if one.place == place]
            lines += [f"  {line}" for one in inside if not one.for_other_gpus for line in one.lines()]
            if others := [f"{Path(one.path).name} ({one.target})" for one in inside if one.for_other_gpus]:
                lines.append(f"  not used, as no GPU here is of that capability: {', '.join(others)}")
        lines += [f"note      {note}" for note in self.notes]
        lines += [f"problem   {problem}" for problem in self.problems]
        lines.append("ok        " + ("yes" if self.ok else "no"))
        return "\n".join(map(printable, lines))


def examine() -> HostReport:
    """Look at this machine: initialises CUDA, reads every place, loads nothing."""
    faults: tuple[str, ...] = ()
    try:
        gpus, driver = gpus_and_driver()
        if not gpus:
            faults = tuple(_unseen())
    except CudaError as error:
        gpus, driver = (), str(error)
        faults = (driver,) if isinstance(error, DriverLacks) else ()
    return report(dispatch_snapshot.snapshot(), settings.settings(), gpus, driver, faults)


def _unseen() -> Iterator[str]:
    """What is wrong where the driver has GPUs and torch, which is built for CUDA, sees none."""
    import torch

    count = device_count() if torch.version.cuda is not None else 0
    if count:
        yield (
            f"the driver has {count} GPU{'' if count == 1 else 's'}, of which torch {torch.__version__} (for CUDA "
            f"{torch.version.cuda}) sees none; the driver is for CUDA {cuda_version(driver_version())}. "
            "Update the driver, or install a torch for its CUDA"
        )


def report(
    snapshot: Snapshot, read: settings.Settings, gpus: tuple[LocalGpu, ...], driver: str, faults: Iterable[str] = ()
) -> HostReport:
    """The report on ``snapshot`` for a machine with these GPUs; ``faults`` are problems that were found before."""
    found = snapshot.found(installed=True)
    views = [snapshot.view(local, installed=True) for local in gpus]
    keys = snapshot.keys or Keys("", ())
    counts: dict[str, int] = {str(place): 0 for place in snapshot.places}
    for one in found:
        counts[str(one.place)] = counts.get(str(one.place), 0) + 1
    notes = [note for i, local in enumerate(gpus) for note in _untested(snapshot, i, local)]
    notes += [note for i, local in enumerate(gpus) for note in _reserve(snapshot, i, local)]
    if any(one.place.is_ours() and one.path.parent != one.place.path for one in found):
        notes.append(f"unpacked bundles are not those of this clone, the compressed ones are read. Run: {REINSTALL}")
    faults = tuple(faults)
    notes += [] if gpus or faults else ["no GPU here: nothing would be launched, CPU tensors run the torch reference"]
    if snapshot.keys is not None:
        unsigned = "none is tuned or compiled on demand, and no test result is kept"
        notes.append(f"{settings.TRUSTED_KEYS} wants all code signed: {unsigned}")
    if not platform_supported():
        notes.append(f"bundles run on linux x86_64 and aarch64, this is {platform_name()}: torch runs everything")
    problems = [
        f"GPU {i}, {local}: no usable bundle, torch would run. {_fix(found, local)}"
        for i, (local, view) in enumerate(zip(gpus, views, strict=True))
        if not view.usable
    ]
    problems += faults
    problems += [
        dispatch_snapshot.blamed(str(one.error)) for one in found if one.error is not None and one.place.names(one.path)
    ]
    problems += [f"{settings.TRUSTED_KEYS}: {fault}" for fault in keys.faults]
    problems += list(_refused_directories(snapshot.places, found))
    for view in views:
        problems += [
            dispatch_snapshot.blamed(one.reason)
            for one in view.skipped
            if one.error is not None and one.place.names(one.path)
        ]
    used = {usable.path for view in views for usable in view.usable}
    problems += [damage for one in found if one.path in used and (damage := _damage(one))]
    return HostReport(
        platform=platform_name(),
        python=platform.python_version(),
        packages=tuple((name, _version(name)) for name in _PACKAGES),
        driver=driver,
        gpus=tuple(map(str, gpus)),
        environment=tuple((name, os.environ.get(name, "")) for name in _VARIABLES),
        trusted_keys=tuple(f"{one.name} ({key_id(one.public)})" for one in keys.keys),
        overlay=str(read.overlay) if read.overlay is not None else "none: no absolute path in XDG_CACHE_HOME or HOME",
        places=tuple(counts.items()),
        bundles=tuple(_bundle(one, views) for one in found),
        notes=tuple(notes),
        problems=tuple(dict.fromkeys(problems)),
    )


def _reserve(snapshot: Snapshot, gpu: int, local: LocalGpu) -> Iterator[str]:
    """Which candidates a GPU's calls come to where no bundle has a kernel for them, and which it can't use."""
    view = snapshot.reserve(local)
    yield from (
        f"GPU {gpu}: calls that no bundle has a kernel for run from the candidates in {one.path}" for one in view.usable
    )
    yield from (f"GPU {gpu}: candidates are skipped: {one.reason}" for one in view.skipped)


def _untested(snapshot: Snapshot, gpu: int, local: LocalGpu) -> Iterator[str]:
    """What of the code for a GPU nobody has run on its capability, and what is wrong there."""
    found = survey(snapshot, local)
    yield from (f"GPU {gpu}: {line}" for line in found.wrong)
    if found.left:
        told = f"GPU {gpu}: {len(found.left)} kernels were never run on its capability; "
        if settings.settings().disable_self_test:
            yield f"{told}{settings.DISABLE_SELF_TEST}=1 lets them run untested"
        else:
            yield f"{told}each is tested before its first use. `python -m pretuned.runtime --self-test` tests all now"


def _refused_directories(places: tuple[Place, ...], found: tuple[Found, ...]) -> Iterator[str]:
    """What keeps a directory that PRETUNED_BUNDLES names from giving what was wanted of it.

    It can't be listed, a file in it may be a stranger's, or none of its files can be opened.
    """
    by_place: dict[Place, list[Found]] = {}
    for one in found:
        by_place.setdefault(one.place, []).append(one)
    for place in dict.fromkeys(one for one in places if one.kind is Kind.NAMED):
        inside = [one for one in by_place.get(place, ()) if not place.names(one.path)]
        refused: list[BundleError] = [one.error for one in inside if isinstance(one.error, BundleUntrusted)]
        errors = refused or [one.error for one in inside if one.error is not None]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        if reason := place.unlisted():
            yield f"PRETUNED_BUNDLES names {place.path}, which can't be listed: {reason}"
        elif refused:
            yield f"PRETUNED_BUNDLES names {place.path}, of which a bundle is refused: {errors[0]}{more}"
        elif inside and len(errors) == len(inside):
            yield f"PRETUNED_BUNDLES names {place.path}, of which no bundle can be opened: {errors[0]}{more}"


def gpus_and_driver() -> tuple[tuple[LocalGpu, ...], str]:
    """The GPUs that torch sees, and the CUDA version of the driver; HostError without one."""
    import torch

    driver = f"CUDA {cuda_version(driver_version())}"
    if torch.version.cuda is None:
        return (), f"{driver}, but this torch ({torch.__version__}) is built without CUDA"
    return tuple(map(local_gpu, range(torch.cuda.device_count()))), driver


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
    except Exception as error:  # what importlib meets in another package or in sys.path
        return f"unknown: {error}"


def _fix(found: tuple[Found, ...], local: LocalGpu) -> str:
    """What would make a bundle usable, by what stands in the way of those that are there."""
    errors = [unusable(one.bundle, local) if one.bundle is not None else one.error for one in found]
    if any(isinstance(error, DriverTooOld) for error in errors):
        return "Update the driver, or rebuild with a Triton whose ptxas is older"
    if none := arch.refusal(local.sm):
        return none
    command = f"aot build --models models.txt --sm {local.sm}"
    if any(not isinstance(error, TargetMismatch) for error in errors if error is not None):
        return f"The bundles found can't be opened, see above; or build new ones: {command}"
    return f"Build one with `{command}` and name its directory in PRETUNED_BUNDLES"


def _damage(found: Found) -> str:
    """What of a bundle's own list of problems and models can't be read: its choices may be whole, and run."""
    try:
        if found.bundle is not None:
            found.bundle.problems()
            found.bundle.models()
    except BundleError as error:
        return str(error)
    return ""


def _bundle(found: Found, views: list[View]) -> BundleReport:
    bundle, damage = found.bundle, _damage(found)
    if bundle is None or damage:
        return BundleReport(str(found.path), str(found.place), "", 0, 0, (), (), damage or str(found.error))
    used = tuple(i for i, view in enumerate(views) if any(one.path == found.path for one in view.usable))
    skipped = [one for view in views for one in view.skipped if one.path == found.path]
    mismatched = all(isinstance(one.error, TargetMismatch) for one in skipped) and not found.place.names(found.path)
    return BundleReport(
        str(found.path),
        str(found.place),
        str(bundle.target),
        len(bundle.problems()),
        bundle.variant_count,
        tuple(gpu.name for gpu in bundle.gpus),
        used,
        "" if used or not skipped else skipped[0].reason,
        bool(skipped) and not used and mismatched,
    )
