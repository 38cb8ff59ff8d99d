"""The result of a build as plain data, for a table or for JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ...artifacts.records import Gpu, Target
from ...kernels.registry import entry_of
from ...kernels.rowops import RowOpSpec
from ...kernels.spec import Spec
from ..choose.incumbents import BaselineComparison
from ..tune.outcome import Outcome

_REASON_CHARS = 160


@dataclass(frozen=True, slots=True)
class Dropped:
    """A variant that does not ship: it ``failed`` to compile, or was ``pruned`` because its cubin needs too much."""

    spec: Spec | RowOpSpec
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelCells:
    """The number of (problem, bucket) cells of a model; ``shipped`` of them have choices of installed bundles."""

    name: str
    cells: int
    shipped: int
    measured: int

    @property
    def ships_measured(self) -> bool:
        """True if the runtime has measured choices for all of this model without the bundle."""
        return self.shipped == self.cells

    def to_dict(self) -> dict[str, object]:
        """The record as plain values for JSON."""
        return {"name": self.name, "cells": self.cells, "shipped_measured": self.shipped, "measured": self.measured}


@dataclass(frozen=True, slots=True)
class Built:
    """One bundle. Of the ``variants`` that ship, ``compiled`` were compiled now, others were ``cached`` or ``shipped``.

    ``measured`` of the ``choices`` were measured, on ``gpus``; ``taken_over`` come from installed bundles. ``tuned`` is
    the outcome of this build's measuring. ``by_model`` has the cells of each model. ``comparison`` compares the
    bundle with the kernels selected before.

    ``worst_loss`` is the largest slowdown of a problem, by the cost model, from shipping so few variants (0.02 is 2 %).
    ``seconds`` runs from the start of the build to the bundle's publication.
    """

    path: Path
    target: Target
    models: int
    shards: int
    problems: int
    choices: int
    measured: int
    gpus: tuple[Gpu, ...]
    variants: int
    compiled: int
    cached: int
    dropped: tuple[Dropped, ...]
    worst_loss: float
    size_bytes: int
    unchanged: bool
    seconds: float
    tuned: Outcome | None = None
    comparison: BaselineComparison | None = None
    shipped: int = 0
    taken_over: int = 0
    by_model: tuple[ModelCells, ...] = ()

    @property
    def modelled(self) -> int:
        """The number of choices that the cost model made."""
        return self.choices - self.measured

    @property
    def source(self) -> str:
        """The source of the choices: ``measured``, ``modelled``, or ``measured and modelled``."""
        if not self.measured:
            return "modelled"
        return "measured" if self.measured == self.choices else "measured and modelled"

    @property
    def pruned(self) -> int:
        """The number of compiled variants that can't run well on this capability."""
        return sum(variant.kind == "pruned" for variant in self.dropped)

    @property
    def failed(self) -> int:
        """The number of variants that failed to compile."""
        return sum(variant.kind == "failed" for variant in self.dropped)

    @property
    def lost(self) -> str:
        """A sentence on the variants that failed to compile, and why; empty if none did."""
        failed = [variant for variant in self.dropped if variant.kind == "failed"]
        if not failed:
            return ""
        kernels = ", ".join(dict.fromkeys(entry_of(variant.spec).name for variant in failed))
        said = Counter(variant.reason.removeprefix(f"{variant.spec} for sm_{self.target.sm}: ") for variant in failed)
        (reason, _), *others = said.most_common()
        reason = reason if len(reason) <= _REASON_CHARS else f"{reason[:_REASON_CHARS]}..."
        more = f", and {len(others)} other reasons" if len(others) > 1 else ", and another reason" if others else ""
        instead = "; what bundles here have of them took part instead" if self.comparison else ""
        total = self.compiled + self.cached + self.shipped + len(failed)
        text = f"{len(failed)} of {total} variants could not be compiled here, of the kernels {kernels}"
        return f"{text} ({reason}{more}){instead}"

    def to_dict(self) -> dict[str, object]:
        """The record as plain values for JSON."""
        return {
            "path": str(self.path),
            "sm": self.target.sm,
            "target": str(self.target),
            "models": self.models,
            "shards": self.shards,
            "problems": self.problems,
            "choices": self.choices,
            "measured": self.measured,
            "taken_over": self.taken_over,
            "modelled": self.modelled,
            "by_model": [model.to_dict() for model in self.by_model],
            "gpus": [gpu.name for gpu in self.gpus],
            "source": self.source,
            "variants": self.variants,
            "compiled": self.compiled,
            "cached": self.cached,
            "shipped": self.shipped,
            "pruned": self.pruned,
            "failed": self.failed,
            "lost": self.lost,
            "dropped": [
                {"variant": str(variant.spec), "kind": variant.kind, "reason": variant.reason}
                for variant in self.dropped
            ],
            "worst_loss": round(self.worst_loss, 6),
            "size_bytes": self.size_bytes,
            "unchanged": self.unchanged,
            "seconds": round(self.seconds, 3),
            "tuned": self.tuned and self.tuned.to_dict(),
            "compared_with_before": self.comparison and self.comparison.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The result of a whole build."""

    bundles: tuple[Built, ...]
    notes: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """The record as plain values for JSON."""
        return {
            "bundles": [bundle.to_dict() for bundle in self.bundles],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }
