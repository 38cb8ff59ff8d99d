"""``python -m pretuned.runtime``: reports which bundles this machine uses, which it does not, why, and the fix."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ...artifacts.bundle_file import BundleFile
from ...artifacts.errors import BundleError, BundleUntrusted, CudaError, DriverTooOld, PretunedError, TargetMismatch
from ...artifacts.limits import printable
from ...artifacts.records import LocalGpu, Variant, cuda_version
from ...artifacts.signature import Keys, key_id
from ...kernels import arch
from ...kernels.entry import READS_ABI
from ...kernels.registry import unlaunchable
from .. import self_test_results, settings
from ..dispatch import snapshot as dispatch_snapshot
from ..dispatch.places import REINSTALL, Kind, Place, PlacedBundle, unusable
from ..dispatch.snapshot import Snapshot, View
from ..driver.cuda import DriverLacks, device_count, driver_version
from ..driver.device import local_gpu, platform_name, platform_supported
from ..launch.loader import tested_on
from ..launch.self_test import complaint

INTEGRATIONS = "pretuned.integrations"  # imported by name: the runtime has no imports of integrations
_PLUG_IN = "pretuned"


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The report of ``examine_engine``.

    ``models``: for each GPU the models that a bundle was measured for, with dtype and shards.
    ``problems`` are the faults that keep the engine from using pretuned, with the fix.
    """

    engine: str
    version: str
    plug_in: str
    switch: str
    models: tuple[tuple[str, tuple[str, ...]], ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if the engine would use pretuned."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        models = [{"gpu": gpu, "models": list(names)} for gpu, names in self.models]
        return {"ok": self.ok, **asdict(self), "models": models}

    def __str__(self) -> str:
        lines = [f"engine   {self.version or 'not installed here'}"]
        lines += [f"plug-in  {self.plug_in or 'not found'}", f"switch   {self.switch}"]
        for gpu, models in self.models:
            lines += [f"{gpu}: {len(models)} models have layers measured on its capability"]
            lines += [f"  {model}" for model in models]
        lines += [f"PROBLEM  {problem}" for problem in self.problems]
        return "\n".join(lines)


def examine_engine(engine: str) -> EngineReport:
    """Examine this machine's packages, entry points and environment variables, its GPUs and their bundles."""
    ours = importlib.import_module(f"{INTEGRATIONS}.{engine}").PLUG_IN
    names, group, switch, listed = ours.distributions, ours.group, ours.switch, ours.listed
    problems = []
    version = next((f"{name} {_version_in_use(name)}" for name in names if _version_in_use(name)), "")
    if not version:
        problems.append(f"no {names[0]} in this Python's environment: install pretuned into the engine's own")
    point = next((entry for entry in metadata.entry_points(group=group) if entry.name == _PLUG_IN), None)
    if point is None:
        problems.append(f"no entry point {_PLUG_IN!r} in {group}: install pretuned anew (pip install pretuned)")
    elif version and not ours.was_tried(version.split()[-1]):
        problems.append(f"pretuned was tested with {ours.tested}: install one of these, or another pretuned")
    said, only = os.environ.get(switch, ""), os.environ.get(listed, "")
    if said.strip().lower() in ("0", "false"):
        problems.append(f"{switch}={printable(said)} switches it off: unset it")
    if only and _PLUG_IN not in [name.strip() for name in only.split(",")]:
        problems.append(f"{listed}={printable(only)} leaves it out: add {_PLUG_IN}")
    everywhere = said.strip().lower() in ("1", "true")
    setting = f"{switch}={printable(said)}" if said else f"{switch} is not set: it runs the layers that were measured"
    try:
        here, _ = gpus_and_driver()
    except PretunedError as error:
        here = ()
        if not everywhere:  # ``everywhere`` also runs an engine on the CPU
            problems.append(printable(str(error)))
    models = tuple((str(local), measured_models(local)) for local in here)
    if not here and not everywhere:
        problems.append(f"no GPU: every layer stays with the engine ({switch}=1 runs a slow reference on the CPU)")
    if here and not everywhere and not any(measured for _, measured in models):
        problems.append("no bundle was measured on a GPU of this capability: build one here (aot build)")
    return EngineReport(engine, version, point.value if point else "", setting, models, tuple(problems))


def measured_models(local: LocalGpu) -> tuple[str, ...]:
    """The models of the bundles that were measured on GPUs of this GPU's capability."""
    models: dict[str, None] = {}
    for usable in dispatch_snapshot.snapshot().view(local, installed=True).usable:
        if usable.bundle.target.sm != local.sm or not usable.bundle.gpus:
            continue
        try:
            for model in usable.bundle.models():
                shards = "".join(f" {name}={many}" for name, many in (("tp", model.tp), ("ep", model.ep)) if many > 1)
                models[f"{printable(model.name)} {model.dtype.value}{shards}"] = None
        except BundleError as error:
            models[f"({printable(str(error))})"] = None
    return tuple(sorted(models))


def _version_in_use(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class Untested:
    """A variant of a bundle that was never run on a GPU's capability."""

    bundle: BundleFile
    index: int
    variant: Variant


@dataclass(frozen=True, slots=True)
class Survey:
    """The numbers of variants that were ``tested`` elsewhere on the GPU's capability, and that ``passed`` on this GPU.

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
        # Other code reports damaged records. Bundles that this process made are in no file.
        with contextlib.suppress(BundleError):
            for index, variant in enumerate(bundle.variants() if usable.place.kind is not Kind.PROCESS else ()):
                if not _runs(variant, local):
                    continue
                if tested_on(bundle, index, variant, local) is not None:
                    tested.add(variant)
                    continue
                result = self_test_results.recorded(variant, local)
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
    """One bundle file. ``used_by`` are the indices of the GPUs that can use it; without any, ``why_not`` says why.

    ``for_other_gpus``: the file is for other capabilities, and PRETUNED_BUNDLES does not name it.
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
        """The report's lines on this file: its path and, if there is a GPU, whether the file is used."""
        if not self.target:
            return self.path, f"  {self.why_not}"
        used = f"used by GPU {', '.join(map(str, self.used_by))}" if self.used_by else self.why_not
        measured = f"measured on {', '.join(self.measured_on)}" if self.measured_on else "modelled"
        line = f"{self.path} ({self.target}, {self.problems} problems, {self.variants} variants, {measured})"
        return (line, f"  {used}") if used else (line,)


@dataclass(frozen=True, slots=True)
class HostReport:
    """The report of ``examine``. ``problems`` are the faults that keep bundles from being used, with the fix."""

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
        """True if every GPU has a bundle that it would use; True without a GPU."""
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
            inside = [bundle for bundle in self.bundles if bundle.place == place]
            lines += [f"  {line}" for bundle in inside if not bundle.for_other_gpus for line in bundle.lines()]
            if others := [f"{Path(bundle.path).name} ({bundle.target})" for bundle in inside if bundle.for_other_gpus]:
                lines.append(f"  not used, as no GPU here is of that capability: {', '.join(others)}")
        lines += [f"note      {note}" for note in self.notes]
        lines += [f"problem   {problem}" for problem in self.problems]
        lines.append("ok        " + ("yes" if self.ok else "no"))
        return "\n".join(map(printable, lines))


def examine() -> HostReport:
    """Examine this machine: initialise CUDA, and read the bundle search path; no kernel is loaded."""
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
    """Yield a fault if the driver has GPUs, but torch, which is built for CUDA, sees none."""
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
    """Return the report on ``snapshot`` for a machine with these GPUs; ``faults`` are problems found before."""
    files = snapshot.files(installed=True)
    views = [snapshot.view(local, installed=True) for local in gpus]
    keys = snapshot.keys or Keys("", ())
    counts: dict[str, int] = {str(place): 0 for place in snapshot.places}
    for file in files:
        counts[str(file.place)] = counts.get(str(file.place), 0) + 1
    notes = [note for i, local in enumerate(gpus) for note in _untested(snapshot, i, local)]
    notes += [note for i, local in enumerate(gpus) for note in _reserve(snapshot, i, local)]
    if any(file.place.is_ours() and file.path.parent != file.place.path for file in files):
        notes.append(f"unpacked bundles are not those of this clone, the compressed ones are read. Run: {REINSTALL}")
    faults = tuple(faults)
    notes += [] if gpus or faults else ["no GPU here: nothing would be launched, CPU tensors run the torch reference"]
    if snapshot.keys is not None:
        unsigned = "none is tuned or compiled on demand, and no test result is kept"
        notes.append(f"{settings.TRUSTED_KEYS} wants all code signed: {unsigned}")
    if not platform_supported():
        notes.append(f"bundles run on linux x86_64 and aarch64, this is {platform_name()}: torch runs everything")
    problems = [
        f"GPU {i}, {local}: no usable bundle, torch would run. {_fix(files, local)}"
        for i, (local, view) in enumerate(zip(gpus, views, strict=True))
        if not view.usable
    ]
    problems += faults
    problems += [
        dispatch_snapshot.blamed(str(file.error))
        for file in files
        if file.error is not None and file.place.names(file.path)
    ]
    problems += [f"{settings.TRUSTED_KEYS}: {fault}" for fault in keys.faults]
    problems += list(_refused_directories(snapshot.places, files))
    for view in views:
        problems += [
            dispatch_snapshot.blamed(entry.reason)
            for entry in view.skipped
            if entry.error is not None and entry.place.names(entry.path)
        ]
    used = {usable.path for view in views for usable in view.usable}
    problems += [damage for file in files if file.path in used and (damage := _damage(file))]
    return HostReport(
        platform=platform_name(),
        python=platform.python_version(),
        packages=tuple((name, _version(name)) for name in _PACKAGES),
        driver=driver,
        gpus=tuple(map(str, gpus)),
        environment=tuple((name, os.environ.get(name, "")) for name in _VARIABLES),
        trusted_keys=tuple(f"{key.name} ({key_id(key.public)})" for key in keys.keys),
        overlay=str(read.overlay) if read.overlay is not None else "none: no absolute path in XDG_CACHE_HOME or HOME",
        places=tuple(counts.items()),
        bundles=tuple(_bundle(file, views) for file in files),
        notes=tuple(notes),
        problems=tuple(dict.fromkeys(problems)),
    )


def _reserve(snapshot: Snapshot, gpu: int, local: LocalGpu) -> Iterator[str]:
    """Yield lines on a GPU's shipped candidates, used or skipped; they run calls that no bundle has a kernel for."""
    view = snapshot.reserve(local)
    yield from (
        f"GPU {gpu}: calls that no bundle has a kernel for run from the candidates in {usable.path}"
        for usable in view.usable
    )
    yield from (f"GPU {gpu}: candidates are skipped: {entry.reason}" for entry in view.skipped)


def _untested(snapshot: Snapshot, gpu: int, local: LocalGpu) -> Iterator[str]:
    """Yield lines on the kernels for a GPU that failed a self-test, or were never run on its capability."""
    results = survey(snapshot, local)
    yield from (f"GPU {gpu}: {line}" for line in results.wrong)
    if results.left:
        prefix = f"GPU {gpu}: {len(results.left)} kernels were never run on its capability; "
        if settings.settings().disable_self_test:
            yield f"{prefix}{settings.DISABLE_SELF_TEST}=1 lets them run untested"
        else:
            yield f"{prefix}each is tested before its first use. `python -m pretuned.runtime --self-test` tests all now"


def _refused_directories(places: tuple[Place, ...], files: tuple[PlacedBundle, ...]) -> Iterator[str]:
    """Yield lines on directories in PRETUNED_BUNDLES that can't be used.

    Either the directory can't be listed, or a bundle in it is not trusted, or none of its bundles can be opened.
    """
    by_place: dict[Place, list[PlacedBundle]] = {}
    for file in files:
        by_place.setdefault(file.place, []).append(file)
    for place in dict.fromkeys(place for place in places if place.kind is Kind.NAMED):
        inside = [file for file in by_place.get(place, ()) if not place.names(file.path)]
        refused: list[BundleError] = [file.error for file in inside if isinstance(file.error, BundleUntrusted)]
        errors = refused or [file.error for file in inside if file.error is not None]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        if reason := place.unlisted():
            yield f"PRETUNED_BUNDLES names {place.path}, which can't be listed: {reason}"
        elif refused:
            yield f"PRETUNED_BUNDLES names {place.path}, of which a bundle is refused: {errors[0]}{more}"
        elif inside and len(errors) == len(inside):
            yield f"PRETUNED_BUNDLES names {place.path}, of which no bundle can be opened: {errors[0]}{more}"


def gpus_and_driver() -> tuple[tuple[LocalGpu, ...], str]:
    """Return torch's GPUs and the driver's CUDA version; HostError without a driver."""
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
    except Exception as error:  # importlib raises any error for a broken package or sys.path entry
        return f"unknown: {error}"


def _fix(files: tuple[PlacedBundle, ...], local: LocalGpu) -> str:
    """The advice for a GPU without a usable bundle, by the errors of the existing bundles."""
    errors = [unusable(file.bundle, local) if file.bundle is not None else file.error for file in files]
    if any(isinstance(error, DriverTooOld) for error in errors):
        return "Update the driver, or rebuild with a Triton whose ptxas is older"
    if none := arch.refusal(local.sm):
        return none
    command = f"aot build --models models.txt --sm {local.sm}"
    if any(not isinstance(error, TargetMismatch) for error in errors if error is not None):
        return f"The bundles found can't be opened, see above; or build new ones: {command}"
    return f"Build one with `{command}` and name its directory in PRETUNED_BUNDLES"


def _damage(file: PlacedBundle) -> str:
    """The error of reading a bundle's list of problems or models; "" if there is none. Its choices may run even so."""
    try:
        if file.bundle is not None:
            file.bundle.problems()
            file.bundle.models()
    except BundleError as error:
        return str(error)
    return ""


def _bundle(file: PlacedBundle, views: list[View]) -> BundleReport:
    bundle, damage = file.bundle, _damage(file)
    if bundle is None or damage:
        return BundleReport(str(file.path), str(file.place), "", 0, 0, (), (), damage or str(file.error))
    used = tuple(i for i, view in enumerate(views) if any(usable.path == file.path for usable in view.usable))
    skipped = [entry for view in views for entry in view.skipped if entry.path == file.path]
    mismatched = all(isinstance(entry.error, TargetMismatch) for entry in skipped) and not file.place.names(file.path)
    return BundleReport(
        str(file.path),
        str(file.place),
        str(bundle.target),
        len(bundle.problems()),
        bundle.variant_count,
        tuple(gpu.name for gpu in bundle.gpus),
        used,
        "" if used or not skipped else skipped[0].reason,
        bool(skipped) and not used and mismatched,
    )
