"""Render a sheet as one HTML page that loads nothing and can be printed. Its script, page.js, draws the cells.

The script's data are JSON by columns, each text once, deflated, in base64. The folded parts on the cost model and the
search show statistics instead of many marks.
"""

from __future__ import annotations

import base64
import functools
import importlib.resources
import json
import math
import statistics
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from ...artifacts.records import Fusion, Model, Op
from ..plan.families import fused
from .cells import Cell, Sheet, State, gemm_key

# HTML allows no control characters, UTF-8 no lone surrogates; file names may have both.
_UNPRINTABLE = dict.fromkeys((*range(10), *range(11, 32), *range(127, 160), *range(0xD800, 0xE000)), "\ufffd")
_RANGES = (("% for M near 1 to 128", 1, 128), ("256 to 8192", 129, 8192), ("more", 8193, 1 << 62))
_NEAR = 0.2
_MODEL_RANGES = (("1 to 128", 1, 128), ("256 to 8192", 129, 8192), ("more", 8193, 1 << 62))
_RANKS = 16
_STATES = {state: i for i, state in enumerate(State)}


def page(sheet: Sheet) -> str:
    """The whole page, from page.html, page.css, cells.html and page.js."""
    cells = sheet.cells
    has_cells = any(cell.state is not State.MISSING for cell in cells)
    drawn = _filled("cells.html", data=embedded(sheet), script=_file("page.js")) if has_cells else ""
    text = _filled(
        "page.html",
        title=escape(sheet.title),
        style=_file("page.css"),
        head=_head(sheet, cells),
        glance=_glance(cells),
        cells=drawn,
        folded="\n".join(
            (
                _folded("Coverage", _coverage(sheet, cells)),
                _folded("Modelled against measured", _model(cells)),
                _folded("The search", _search(cells)),
            )
        ),
    )
    return text.translate(_UNPRINTABLE)


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _filled(name: str, **parts: str) -> str:
    return Template(_file(name)).substitute(parts)


def headline(sheet: Sheet) -> str:
    """The result in a sentence: compared with torch if that was measured, else with the roofline."""
    cells = sheet.cells
    states = counts(cells)
    ratios = [ratio for cell in cells if (ratio := cell.against_torch) is not None]
    parts = []
    if ratios:
        parts.append(f"{mean(ratios):.2f} x torch over {len(ratios):,} cells, worst {min(ratios):.2f}")
    middle = median(cell.fraction for cell in cells if cell.state is not State.MISSING)
    if middle is not None and not ratios:
        parts.append(f"the median cell takes {1 / middle:.1f} times its roofline")
    parts += [f"{count:,} {state.value}" for state, count in states.items() if count]
    text = ", ".join(parts) or "0 cells"
    if states[State.MODELLED] and not states[State.MEASURED]:
        chips = ", ".join(chip.name for chip in sheet.chips)
        text += f". Nothing was timed: all times are modelled for the {chips}"
    return text + "."


def _head(sheet: Sheet, cells: Sequence[Cell]) -> str:
    chips = (
        f"{chip.name}: {chip.bf16_tflops:g} bf16 TFLOP/s, {chip.bandwidth_gbs:g} GB/s, "
        f"{chip.sm_count} SMs ({chip.source})"
        for chip in sheet.chips
    )
    facts = {**sheet.facts, "roofline of": "; ".join(chips)}
    rows = [(f"<b>{escape(name)}</b>", escape(value)) for name, value in facts.items() if value]
    notes = "".join(f"<p>Note: {escape(note)}.</p>" for note in sheet.notes)
    return (
        f"<h1>{escape(sheet.title)}</h1>\n"
        f'<p class="headline">{escape(headline(sheet))}</p>\n{notes}'
        f"<details><summary>What was read</summary>{table((), rows)}</details>"
    )


def _folded(title: str, inner: str) -> str:
    return f"<details><summary>{title}</summary>\n{inner}</details>" if inner else ""


def _glance(cells: Sequence[Cell]) -> str:
    """The summary table: a row for each op and fusion, and for each GPU if several were measured, over all shapes."""
    with_torch = any(cell.against_torch for cell in cells)
    with_model = any(cell.model_ratio for cell in cells)
    gpus = short_names({gpu_name(cell) for cell in cells} - {""})
    several = len(gpus) > 1
    first = ["op", "GPU"][: 1 + several]
    head = [*first, *["x torch", "worst"] * with_torch, "% of the roofline, median", *(name for name, _, _ in _RANGES)]
    head += ["modelled / measured"] * with_model + ["cells", "measured"]
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: (form_order(cell), gpu_name(cell))):
        groups.setdefault((form(cell), gpu_name(cell))[: len(first)], []).append(cell)
    rows = []
    measured = {names[0] for names in groups if several and names[1]}
    for names, mine in groups.items():
        if names[0] in measured and not names[1]:
            continue  # unmeasured cells are under Coverage
        fractions = [(cell.bucket, cell.fraction) for cell in mine if cell.state is not State.MISSING]
        row = [escape(names[0]), *(escape(gpus.get(name, "not measured")) for name in names[1:])]
        if with_torch:
            ratios = [ratio for cell in mine if (ratio := cell.against_torch) is not None]
            row += [times(mean(ratios)), times(min(ratios, default=None))]
        row.append(percent(median(fraction for _, fraction in fractions)))
        for _, low, high in _RANGES:
            row.append(percent(median(fraction for bucket, fraction in fractions if low <= bucket <= high)))
        row += [times(mean(cell.model_ratio for cell in mine))] * with_model
        row += [f"{len(mine):,}", f"{counts(mine)[State.MEASURED]:,}"]
        rows.append(row)
    return f'<div class="wide">{table(head, rows, numbers=range(len(first), len(head)))}</div>'


def _model(cells: Sequence[Cell]) -> str:
    rows = model_against_measured(cells)
    what = "The cost model's estimate over the measured time, of every measured choice, and of all candidates of some."
    return f'<p class="soft">{what}</p><div class="wide">{rows}</div>' if rows else ""


def _search(cells: Sequence[Cell]) -> str:
    rows = by_rank(cells)
    what = (
        "Of a sample of cells, each measured candidate by its rank in the cost model's order. Where the first is near "
        "1, a modelled choice loses little."
    )
    return f'<p class="soft">{what}</p><div class="wide">{rows}</div>' if rows else ""


def _coverage(sheet: Sheet, cells: Sequence[Cell]) -> str:
    """The coverage table: a row for each model, or for each GEMM without models, and a strip for each op."""
    ops = list(dict.fromkeys(cell.problem.op for cell in sorted(cells, key=form_order)))
    groups: dict[tuple[str, ...], list[Cell]] = {}
    by_problem: dict[object, list[Cell]] = {}
    for cell in cells:
        by_problem.setdefault(cell.problem, []).append(cell)
    for name in dict.fromkeys(model.name for model in sheet.models):
        models = [model for model in sheet.models if model.name == name]
        for dtype in dict.fromkeys(model.dtype.value for model in models):
            mine = [model for model in models if model.dtype.value == dtype]
            shards = ", ".join(f"tp={model.tp} ep={model.ep}" for model in mine)
            problems = dict.fromkeys(problem for model in mine for problem in model.problems)
            groups[escape(name), dtype, shards] = [cell for problem in problems for cell in by_problem.get(problem, ())]
    first: tuple[str, ...] = ("model", "dtype", "shards")
    if not sheet.models:
        first = ("GEMM",)
        groups = {(escape(gemm.title),): list(gemm.cells) for gemm in sheet.gemms}
    rows = [
        (*key, *(strip([cell for cell in mine if cell.problem.op is op]) for op in ops)) for key, mine in groups.items()
    ]
    head = (*first, *(op.value for op in ops))
    legend = " &nbsp; ".join(map(dot, State))
    return f'<p>{legend}</p>\n<div class="wide">{table(head, rows)}</div>'


def percent(fraction: float | None) -> str:
    """A fraction in percent, without the sign."""
    return "" if fraction is None else f"{100 * fraction:.0f}" if fraction >= 0.1 else f"{100 * fraction:.1f}"


def times(ratio: float | None) -> str:
    """A ratio, e.g. ``1.07 x``."""
    return "" if ratio is None else f"{ratio:.2f} x"


def median(values: Iterable[float]) -> float | None:
    """The median; None if there are no values."""
    numbers = list(values)
    return statistics.median(numbers) if numbers else None


def mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the values that are not None; None if there are none."""
    ratios = [value for value in values if value is not None]
    return statistics.geometric_mean(ratios) if ratios else None


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """An HTML table; the columns in ``numbers`` are right-aligned."""
    right = set(numbers)

    def line(tag: str, cells: Sequence[str]) -> str:
        return (
            "<tr>"
            + "".join(f"<{tag}{' class=n' if i in right else ''}>{cell}</{tag}>" for i, cell in enumerate(cells))
            + "</tr>"
        )

    top = f"<thead>{line('th', head)}</thead>" if head else ""
    return f"<table>{top}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"


def counts(cells: Iterable[Cell]) -> dict[State, int]:
    """The number of cells in each state."""
    by_state = Counter(cell.state for cell in cells)
    return {state: by_state[state] for state in State}


def count_text(numbers: Mapping[State, int]) -> str:
    """The counts in words, e.g. ``34 measured, 2 missing``."""
    return ", ".join(f"{count} {state.value}" for state, count in numbers.items() if count)


def dot(state: State) -> str:
    """A state with its coloured dot."""
    return f'<span class="dot {state.value}"></span>{state.value}'


def strip(cells: Sequence[Cell]) -> str:
    """The states as one bar, and in words."""
    if not cells:
        return ""
    by_state = counts(cells)
    inner = "".join(
        f'<i class="{state.value}" style="width:{100 * count / len(cells):.1f}%"></i>'
        for state, count in by_state.items()
        if count
    )
    text = count_text(by_state)
    return f'<span class="strip" title="{text}">{inner}</span><br><span class="soft">{text}</span>'


def model_against_measured(cells: Sequence[Cell]) -> str:
    """A table by op and rows: modelled over measured time of all choices and candidates with both; else empty."""
    by_rows: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        ratios = [timed.model_us / timed.time_us for timed in cell.candidates if timed.model_us is not None]
        if (ratio := cell.model_ratio) is not None:
            ratios.append(ratio)
        if ratios:
            rows = next(name for name, low, high in _MODEL_RANGES if low <= cell.bucket <= high)
            by_rows.setdefault((form(cell), rows), []).extend(ratios)
    if not by_rows:
        return ""
    lines = []
    for (name, rows), ratios in by_rows.items():
        near = sum(1 - _NEAR <= ratio <= 1 + _NEAR for ratio in ratios) / len(ratios)
        tenths = statistics.quantiles(ratios, n=10) if len(ratios) > 1 else [ratios[0]] * 9
        lines.append(
            [name, rows, f"{len(ratios):,}", times(mean(ratios)), times(tenths[0]), times(tenths[-1]), f"{near:.0%}"]
        )
    head = ("op", "M near", "times", "modelled / measured", "a tenth is below", "a tenth is above", "within 20 %")
    return table(head, lines, numbers=range(2, len(head)))


def by_rank(cells: Sequence[Cell]) -> str:
    """A table by the cost model's rank: the candidate's measured time over the cell's fastest; empty without ranks."""
    ranked: dict[int, list[float]] = {}
    for cell in cells:
        order = sorted((timed.model_us, timed.time_us) for timed in cell.candidates if timed.model_us is not None)
        if len(order) > 1:
            best = min(candidate.time_us for candidate in cell.candidates)
            for rank, (_, time_us) in enumerate(order, 1):
                ranked.setdefault(rank, []).append(time_us / best)
    if not ranked:
        return ""
    lines = []
    for rank in sorted(ranked)[:_RANKS]:
        ratios = ranked[rank]
        tenths = statistics.quantiles(ratios, n=10) if len(ratios) > 1 else [ratios[0]] * 9
        won = sum(ratio == 1 for ratio in ratios) / len(ratios)
        lines.append([str(rank), f"{len(ratios):,}", f"{won:.0%}", times(statistics.median(ratios)), times(tenths[-1])])
    head = ("rank by the model", "cells", "it was the fastest", "median time / fastest", "a tenth is above")
    return table(head, lines, numbers=range(len(head)))


@functools.lru_cache(maxsize=256)
def _form(op: Op, fusion: Fusion) -> tuple[str, tuple[int, int]]:
    return f"{op.value} {fused(fusion)}".rstrip(), (list(Op).index(op), fusion.value)


def form(cell: Cell) -> str:
    """Op and fusion, as in charts and tables."""
    return _form(cell.problem.op, cell.problem.fusion)[0]


def form_order(cell: Cell) -> tuple[int, int]:
    """The sort key of op and fusion: forward, dX, dW, each plain first."""
    return _form(cell.problem.op, cell.problem.fusion)[1]


def gpu_name(cell: Cell) -> str:
    """The GPU that a cell was measured on; empty for other cells."""
    return cell.gpu.name if cell.gpu and cell.state is State.MEASURED else ""


def short_names(gpus: Collection[str]) -> dict[str, str]:
    """Shorten NVIDIA H100 80GB HBM3 to H100, unless two names would become equal."""
    without_brand = {name: name.removeprefix("NVIDIA ") for name in gpus}
    first = {name: (text.split() or [name])[0] for name, text in without_brand.items()}
    return first if len(set(first.values())) == len(first) else without_brand


class _Texts:
    """Numbers for texts, in the order in which they come."""

    def __init__(self) -> None:
        self.all: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.all.setdefault(text, len(self.all))


def embedded(sheet: Sheet) -> str:
    """Encode a sheet for a script element: base64 of deflated JSON.

    ``columns`` has a list for each field, over all cells, GEMM by GEMM. Times are microseconds in five digits, 0 for
    none; ``model`` and ``second_us`` are thousandths of ``us``, ``spread`` is in thousandths. ``gemm``, ``form``,
    ``gpu``, ``config``, ``second`` and ``plan`` are indices into lists of names. ``flop`` has 2 N K of each GEMM in
    millions; ``failures`` maps a cell's index to its failures.
    """
    configs, forms, gpus, plans = _Texts(), _Texts(), _Texts(), _Texts()
    cells = sheet.cells
    for _, text in sorted({(form_order(cell), form(cell)) for cell in cells}):
        forms.number(text)
    columns = {
        "gemm": [number for number, gemm in enumerate(sheet.gemms) for _ in gemm.cells],
        "form": [forms.number(form(cell)) for cell in cells],
        "log2_rows": [cell.bucket.bit_length() - 1 for cell in cells],
        "state": [_STATES[cell.state] for cell in cells],
        "us": [_short(cell.time_us) for cell in cells],
        "least": [_short(cell.roofline.least_us) for cell in cells],
        "bound": [int(cell.roofline.compute_us > cell.roofline.memory_us) for cell in cells],
        "model": [_thousandths(cell.model_us, cell.time_us) for cell in cells],
        "torch": [_short(cell.torch_us) for cell in cells],
        "config": [configs.number(cell.config) for cell in cells],
        "second": [configs.number(cell.runner_up) for cell in cells],
        "second_us": [_thousandths(cell.runner_up_us, cell.time_us) for cell in cells],
        "tried": [cell.tried for cell in cells],
        "spread": [_thousandths(cell.spread, 1.0) for cell in cells],
        "gpu": [gpus.number(gpu_name(cell)) for cell in cells],
        "plan": [plans.number(cell.plan) for cell in cells],
    }
    data = {
        "columns": columns,
        "states": [state.value for state in State],
        "configs": list(configs.all),
        "forms": list(forms.all),
        "gpus": list(gpus.all),
        "plans": list(plans.all),
        "short_gpus": _shortened(gpus.all),
        "gemms": [gemm.title for gemm in sheet.gemms],
        "flop": [2e-6 * gemm.N * gemm.K for gemm in sheet.gemms],
        "failures": {i: list(cell.failures) for i, cell in enumerate(cells) if cell.failures},
        "models": _models(sheet),
    }
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _shortened(gpus: Collection[str]) -> list[str]:
    short = short_names({name for name in gpus if name})
    return [short.get(name, "") for name in gpus]


def _models(sheet: Sheet) -> list[list[Any]]:
    """(name, numbers of its GEMMs) of each model."""
    numbers = {gemm.key: i for i, gemm in enumerate(sheet.gemms)}
    by_model: dict[str, dict[int, None]] = {}
    for model in sheet.models:
        by_model.setdefault(model.name, {}).update(dict.fromkeys(_gemms(model, numbers)))
    return [[name, list(gemms)] for name, gemms in by_model.items()]


def _gemms(model: Model, numbers: dict[Any, int]) -> list[int]:
    return [numbers[gemm_key(problem)] for problem in model.problems if gemm_key(problem) in numbers]


def _short(value: float | None) -> float | int:
    """Round to five digits, more than a time has."""
    if value is None or not math.isfinite(value):
        return 0
    short = float(f"{value:.5g}")
    return int(short) if short >= 1e4 else short


def _thousandths(value: float | None, of: float) -> int:
    return 0 if value is None or not math.isfinite(value / of) else round(1000 * value / of)
