"""The page's larger part: model by model, GEMM by GEMM, every chart and every number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from ...artifacts.records.bundle import Model
from .cells import Cell, GemmKey, Sheet, State, WeightCells, gemm_key
from .charts import Charts, form
from .markup import boxes, dot, percent, summary, table, times, us


@dataclass(slots=True)
class _Section:
    """The GEMMs written so far: each is written once, and linked to from then on."""

    gemms: dict[GemmKey, WeightCells]
    charts: Charts
    on_chart: Callable[[int, int], None]
    shown: dict[GemmKey, str] = field(default_factory=dict)

    def anchor(self, key: GemmKey) -> str:
        """The id of a GEMM's element."""
        return "g-" + "-".join(str(part) for part in (*key[:3], key[3].value, key[4].value))

    def one(self, key: GemmKey, name: str, where: str) -> str:
        """A GEMM under the heading ``name``, or a link to it."""
        gemm = self.gemms[key]
        if key in self.shown:
            return (
                f'<p><a href="#{self.anchor(key)}">{escape(gemm.title)}</a> '
                f'<span class="soft">{escape(where)}; shown with {escape(self.shown[key])}</span></p>'
            )
        self.shown[key] = name
        known = any(cell.state is not State.MISSING for cell in gemm.cells)
        drawn = self.charts.gemm(gemm) if known else ""
        self.on_chart(len(self.shown), len(self.gemms))
        about = f"{escape(where)}; {summary(gemm.cells)}" if where else summary(gemm.cells)
        return (
            f'<details id="{self.anchor(key)}" open><summary>{escape(gemm.title)} <span class="soft">{about}</span>'
            f"</summary>\n{drawn}\n{_tables(gemm)}</details>\n"
        )


def model_by_model(sheet: Sheet, charts: Charts, on_chart: Callable[[int, int], None]) -> str:
    """Every GEMM once, under the first model that has it; other models link to it."""
    section = _Section({gemm.key: gemm for gemm in sheet.gemms}, charts, on_chart)
    text = ['<p><button id="open">open all</button> <button id="close">close all</button></p>']
    names: dict[str, list[Model]] = {}
    for model in sheet.models:
        names.setdefault(model.name, []).append(model)
    for name, models in names.items():
        shards = _shards(models)
        wanted = [key for key in section.gemms if key in shards]
        inner = "".join(section.one(key, name, f"for {', '.join(shards[key])}") for key in wanted)
        cells = [cell for key in wanted for cell in section.gemms[key].cells]
        text.append(
            f'<details id="{anchor(name)}"><summary>{escape(name)} <span class="soft">{len(wanted)} GEMMs, '
            f"{summary(cells)}</span></summary>\n{inner}</details>"
        )
    rest = [key for key in section.gemms if key not in section.shown]
    if names and rest:
        inner = "".join(section.one(key, "no model", "no model names it") for key in rest)
        text.append(f"<details><summary>Of no model</summary>\n{inner}</details>")
    elif rest:
        text += [section.one(key, "", "").replace(" open>", ">", 1) for key in rest]
    return "\n".join(text)


def anchor(name: str) -> str:
    """The id of a model's element."""
    return "m-" + "".join(letter if letter.isalnum() else "-" for letter in name)


def _shards(models: Iterable[Model]) -> dict[GemmKey, list[str]]:
    """Which shardings of a model need a GEMM."""
    found: dict[GemmKey, dict[str, None]] = {}
    for model in models:
        for problem in model.problems:
            found.setdefault(gemm_key(problem), {})[f"tp={model.tp} ep={model.ep}"] = None
    return {key: list(shards) for key, shards in found.items()}


def _tables(gemm: WeightCells) -> str:
    """For each op and form what is covered, and behind it the numbers."""
    groups: dict[str, list[Cell]] = {}
    for cell in gemm.cells:
        groups.setdefault(form(cell), []).append(cell)
    return "".join(_form(name, mine) for name, mine in groups.items())


def _form(name: str, cells: Sequence[Cell]) -> str:
    head = f'{escape(name)} <span class="soft">{boxes(cells)} {summary(cells)}</span>'
    if all(cell.state is State.MISSING and not cell.failures for cell in cells):
        return f'<p class="none"><b>{head}</b></p>'
    return f'<details><summary>{head}</summary><div class="wide">{_figures(cells)}</div></details>'


_COLUMNS: dict[str, Callable[[Cell], str]] = {
    "M near": lambda one: str(one.bucket),
    "source": lambda one: dot(one.state),
    "us": lambda one: us(one.time_us),
    "roofline us": lambda one: us(one.roofline.least_us),
    "bound by": lambda one: one.roofline.bound,
    "% of it": lambda one: _bar(one.fraction),
    "modelled us": lambda one: us(one.model_us),
    "torch us": lambda one: us(one.torch_us),
    "against torch": lambda one: times(one.against_torch),
    "GPU": lambda one: escape(one.gpu.name) if one.gpu and one.state is State.MEASURED else "",
    "variant": lambda one: escape(one.config),
    "runner-up": lambda one: _runner_up(one),
    "tried": lambda one: str(len(one.candidates) or ""),
}
_NUMBERS = {"M near", "us", "roofline us", "modelled us", "torch us", "against torch", "tried"}


def _figures(cells: Sequence[Cell]) -> str:
    """Every number of one op and form of a GEMM; columns that would be empty are left out."""
    gpus = {cell.gpu.name for cell in cells if cell.gpu and cell.state is State.MEASURED}
    dropped = set() if any(cell.torch_us for cell in cells) else {"torch us", "against torch"}
    dropped |= set() if any(cell.candidates for cell in cells) else {"tried"}
    dropped |= set() if len(gpus) > 1 else {"GPU"}
    shown = {name: value for name, value in _COLUMNS.items() if name not in dropped}
    numbers = [i for i, name in enumerate(shown) if name in _NUMBERS]
    rows = [[value(cell) for value in shown.values()] for cell in cells]
    failures = [f"<li>M near {cell.bucket}: {escape(text)}</li>" for cell in cells for text in cell.failures]
    listed = f"<p>Failed while measuring, and not chosen:</p><ul>{''.join(failures)}</ul>" if failures else ""
    return table(tuple(shown), rows, numbers) + listed


def _runner_up(cell: Cell) -> str:
    if cell.runner_up_us is None:
        return ""
    return f'<span class="wrap">{escape(cell.runner_up)} ({100 * (cell.runner_up_us / cell.time_us - 1):+.1f} %)</span>'


def _bar(fraction: float) -> str:
    if math.isnan(fraction):
        return ""
    return f'<span class="bar" style="width:{min(1.0, fraction) * 4:.2f}rem"></span>{percent(fraction)}'
