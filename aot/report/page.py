"""A sheet as one HTML page: nothing is loaded from anywhere, and it prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from .cells import Cell, Sheet, State
from .charts import Charts, form
from .gemms import anchor, model_by_model
from .markup import counts, dot, mean, median, percent, strip, table, times, told
from .style import SCRIPT, STYLE

_READING = """<h2>How to read this</h2>
<p>A <b>cell</b> is a problem (op, dtype, E experts, N, K, form) and a bucket: the power of two that the number of
rows M, over all experts, is nearest to. <b>Measured</b>: timed on the GPU with that many rows. <b>Modelled</b>: an
estimate of the cost model, nothing was timed. <b>Missing</b>: a model has it, and nothing is known.</p>
<p>The <b>roofline</b> is the longer of 2&nbsp;M&nbsp;N&nbsp;K over the published dense rate, and the bytes over the
published bandwidth, each read or written once: (active experts)&nbsp;N&nbsp;K (dW: all experts), M&nbsp;N and M&nbsp;K
elements. The active experts are expected ones, for shares p<sub>r</sub> ~ r<sup>-0.5</sup>. A launch alone takes some
microseconds, so few rows can't come near it; rows that fall on fewer experts than expected can pass it.</p>
<p><b>modelled us</b> is this version's estimate for the chosen variant. <b>against torch</b> is the time of torch's
grouped_mm over that of the choice, measured in one turn: above 1 the choice is faster. <b>tried</b> is how many
candidates were measured. Means are geometric.</p>"""

# HTML has no control characters, and half a surrogate pair (of a file's name) can't be written in UTF-8.
_UNPRINTABLE = dict.fromkeys((*range(10), *range(11, 32), *range(127, 160), *range(0xD800, 0xE000)), "\ufffd")
_RANGES = (("% for M near 1 to 128", 1, 128), ("256 to 8192", 129, 8192), ("more", 8193, 1 << 62))


def page(sheet: Sheet, on_chart: Callable[[int, int], None] = lambda done, total: None) -> str:
    """The whole page. ``on_chart`` hears how many of the GEMMs' charts are drawn, of how many."""
    charts = Charts()
    cells = sheet.cells
    body = "\n".join((
        _head(sheet, cells),
        "<h2>At a glance</h2>", _glance(cells), _overall(charts, cells),
        "<h2>Coverage</h2>", _coverage(sheet, cells),
        "<h2>Model by model</h2>" if sheet.models else "<h2>GEMM by GEMM</h2>", model_by_model(sheet, charts, on_chart),
        _READING,
    ))  # fmt: skip
    text = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(sheet.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
    return text.translate(_UNPRINTABLE)


def _head(sheet: Sheet, cells: Sequence[Cell]) -> str:
    chips = (
        f"{one.name}: {one.bf16_tflops:g} bf16 TFLOP/s, {one.bandwidth_gbs:g} GB/s, {one.sm_count} SMs ({one.source})"
        for one in sheet.chips
    )
    facts = {**sheet.facts, "roofline of": "; ".join(chips)}
    rows = [(f"<b>{escape(name)}</b>", escape(value)) for name, value in facts.items() if value]
    notes = "".join(f"<p>Note: {escape(note)}.</p>" for note in sheet.notes)
    return (
        f"<h1>{escape(sheet.title)}</h1>\n"
        f'<p class="soft">{len(cells)} cells (a problem with about so many rows): {told(cells) or "none"}.</p>\n'
        f"{notes}{table((), rows)}"
    )


def _glance(cells: Sequence[Cell]) -> str:
    """One row for each op and form, over all shapes."""
    with_torch = any(cell.against_torch for cell in cells)
    with_model = any(cell.model_ratio for cell in cells)
    head = ["op", "cells", "measured", "% of the roofline, median", *(name for name, _, _ in _RANGES)]
    head += ["against torch"] * with_torch + ["modelled / measured"] * with_model
    rows = []
    for name in dict.fromkeys(form(cell) for cell in sorted(cells, key=_form_order)):
        mine = [cell for cell in cells if form(cell) == name]
        known = [cell for cell in mine if cell.state is not State.MISSING]
        row = [escape(name), str(len(mine)), str(counts(mine)[State.MEASURED])]
        row.append(percent(median(cell.fraction for cell in known)))
        for _, low, high in _RANGES:
            row.append(percent(median(cell.fraction for cell in known if low <= cell.bucket <= high)))
        row += [times(mean(cell.against_torch for cell in mine))] * with_torch
        row += [times(mean(cell.model_ratio for cell in mine))] * with_model
        rows.append(row)
    return table(head, rows, numbers=range(1, len(head)))


def _form_order(cell: Cell) -> tuple[int, int]:
    return (("forward", "dX", "dW").index(cell.problem.op.value), cell.problem.fusion.value)


def _overall(charts: Charts, cells: Sequence[Cell]) -> str:
    if all(cell.state is State.MISSING for cell in cells):
        return ""
    text = f"<h3>Fraction of the roofline</h3>\n{charts.roofline(cells)}"
    torch = charts.torch(cells)
    if torch:
        text += f"<h3>Against torch grouped_mm</h3>\n{torch}"
    model, search = charts.model(cells), charts.search(cells)
    blocks = []
    if model:
        blocks.append(
            f'<div><h3>Modelled against measured</h3><p class="soft">Band: 20 % to either side.</p>{model}</div>'
        )
    if search:
        what = "Every measured candidate; a line is the median of its rank."
        blocks.append(f'<div><h3>The search</h3><p class="soft">{what}</p>{search}</div>')
    if blocks:
        return text + f'<div class="side">{"".join(blocks)}</div>'
    return text + '<p class="soft">Nothing here was measured, so there is nothing to compare the model with.</p>'


def _coverage(sheet: Sheet, cells: Sequence[Cell]) -> str:
    """A row for each model, or GEMM where there is no model, and a strip for each op."""
    ops = list(dict.fromkeys(cell.problem.op for cell in sorted(cells, key=_form_order)))
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
            link = f'<a href="#{anchor(name)}">{escape(name)}</a>'
            groups[link, dtype, shards] = [cell for problem in problems for cell in by_problem.get(problem, ())]
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
