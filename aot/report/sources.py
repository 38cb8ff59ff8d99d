"""Read the files of a report: a bundle or journals, and the facts about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...artifacts.errors import InputError
from ...artifacts.records.bundle import Bundle
from ...artifacts.records.target import Gpu, cuda_version
from ...kernels.hardware.arch import supported
from ..bundle.verify import sound
from ..journal.file import Contents, read_journal
from ..plan.plan import BuildPlan, planned_on
from .cells import Sheet
from .sheets import sheet


def read(
    source: str, is_bundle: bool, journals: Sequence[Path], candidates: str | None, plan: BuildPlan | None
) -> Sheet:
    """Read the sheet of a bundle or journal; further ``journals`` add times, ``candidates`` names, ``plan`` cells.

    Raises
    ------
    BundleError, InputError
        if a file can't be read, or they are for different capabilities.
    """
    bundle = sound(source) if is_bundle else None
    paths = [*([] if is_bundle else [Path(source)]), *journals]
    contents = [read_journal(path) for path in paths]
    named = sound(candidates) if candidates is not None else None
    sm = _capability(source, bundle, dict(zip(paths, contents, strict=True)), candidates, named)
    name = Path(source).name
    title = f"{name}: what the {'bundle' if bundle else 'journal'} holds"
    wanted = None if plan is None else planned_on(plan, (sm,))
    return sheet(title, _facts(source, bundle, contents), bundle, contents, wanted, named.variants if named else ())


def _capability(
    source: str, bundle: Bundle | None, journals: dict[Path, Contents], candidates: str | None, named: Bundle | None
) -> int:
    """The capability of all of these; InputError if there are several, or it is not supported."""
    sms = {source: bundle.target.sm} if bundle is not None else {}
    sms |= {str(path): journal.header.sm for path, journal in journals.items()}
    if candidates is not None and named is not None:
        sms[candidates] = named.target.sm
    (first, wanted), *rest = sms.items()
    if wanted not in supported():
        listed = ", ".join(map(str, supported()))
        raise InputError(f"'{first}' is for sm_{wanted}, of which no GPU's figures are known; known are {listed}")
    for path, sm in rest:
        if sm != wanted:
            raise InputError(f"'{path}' is for sm_{sm}, '{first}' for sm_{wanted}: a report is of one capability")
    return wanted


def _facts(source: str, bundle: Bundle | None, journals: Sequence[Contents]) -> dict[str, str]:
    gpus = [journal.header.gpu for journal in journals] + list(bundle.gpus if bundle else ())
    facts = {
        "file": source,
        "target": str(bundle.target) if bundle else f"sm_{journals[0].header.sm}",
        "measured on": "; ".join(dict.fromkeys(map(_gpu, gpus))),
    }
    if bundle is not None:
        producer = bundle.producer
        facts["built by"] = f"pretuned {producer.pretuned}, Triton {producer.triton}, ptxas {producer.ptxas}"
        facts["kernels"] = ", ".join(f"{kernel.name} revision {kernel.revision}" for kernel in bundle.kernels)
        facts["variants"] = f"{len(bundle.variants)}, {sum(map(len, bundle.cubins)) / (1 << 20):.2f} MiB of code"
    else:
        header = journals[0].header
        facts["built by"] = f"pretuned {header.pretuned}"
        facts["kernels"] = ", ".join(f"{kernel.name} revision {kernel.revision}" for kernel in header.kernels)
    return facts


def _gpu(gpu: Gpu) -> str:
    return f"{gpu.name}, {gpu.sm_count} SMs, {gpu.memory_mib} MiB, CUDA driver {cuda_version(gpu.driver)}"
