"""A sheet as one HTML page: nothing is loaded from anywhere, and it prints. Its script draws the cells (script.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

from .cells import Cell, Sheet, State
from .data import embedded, form, form_order, gpu_name
from .folded import model_against_measured, search
from .markup import counts, dot, mean, median, percent, strip, table, times
from .script import SCRIPT
from .style import STYLE

_READING = """<details id="reading"><summary>How to read this</summary>
<p>A <b>cell</b> is a problem (op, dtype, E experts, N, K, form) and a bucket: the power of two that the number of
rows M, over all experts, is nearest to; what was measured on several GPUs is a cell of each. <b>Measured</b>: timed on
the GPU with that many rows. <b>Modelled</b>: an estimate of the cost model, nothing was timed. <b>Missing</b>: a model
has it, and nothing is known.</p>
<p>The <b>roofline</b> is the longer of 2&nbsp;M&nbsp;N&nbsp;K over the published dense rate, and the bytes over the
published bandwidth, each read or written once: (active experts)&nbsp;N&nbsp;K (dW: all experts), M&nbsp;N and M&nbsp;K
elements. The active experts are expected ones, for shares p<sub>r</sub> ~ r<sup>-0.5</sup>. A launch alone takes some
microseconds, so few rows can't come near it; rows that fall on fewer experts than expected can pass it.</p>
<p><b>modelled us</b> is this version's estimate for the chosen variant. <b>x torch</b> is the time of torch's
grouped_mm over that of the choice, measured in one turn: above 1 the choice is faster. <b>tried</b> is how many
candidates were measured. Means are geometric.</p></details>"""

_CELLS = """<div class="controls">
<label>model <select id="model"></select></label> <label>product <select id="gemm"></select></label>
<label>op <select id="form"></select></label> <label>state <select id="state"></select></label>
<label id="gpus">GPU <select id="gpu"></select></label>
<label>show <select id="unit"><option value="part">% of the roofline</option><option value="us">microseconds</option>
<option value="rate">TFLOP/s</option></select></label>
<label>first <select id="order"></select></label></div>
<p id="said" class="soft" aria-live="polite"></p>
<figure><figcaption id="above"></figcaption><div id="chart" class="chart"></div></figure>
<figure id="against"><figcaption>Times as fast as torch's grouped_mm, by rows</figcaption>
<div id="torch" class="chart"></div></figure>
<div id="ring" hidden></div><div id="tip" role="status"></div>
<div class="wide" id="rows"></div>
<p><button id="more">show more</button></p>
<noscript><p>The charts and the table of cells are drawn by the page's own script, which this browser does not run.</p>
</noscript>"""

# HTML has no control characters, and half a surrogate pair (of a file's name) can't be written in UTF-8.
_UNPRINTABLE = dict.fromkeys((*range(10), *range(11, 32), *range(127, 160), *range(0xD800, 0xE000)), "\ufffd")
_RANGES = (("% for M near 1 to 128", 1, 128), ("256 to 8192", 129, 8192), ("more", 8193, 1 << 62))


def page(sheet: Sheet) -> str:
    """The whole page."""
    cells = sheet.cells
    known = any(cell.state is not State.MISSING for cell in cells)
    body = "\n".join((
        _head(sheet, cells),
        "<h2>At a glance</h2>", _glance(cells),
        "<h2>Cells</h2>" if cells else "", _CELLS if known else "",
        _folded("Coverage", _coverage(sheet, cells)),
        _folded("Modelled against measured", _model(cells)), _folded("The search", _search(cells)),
        _READING,
    ))  # fmt: skip
    script = f'<script type="text/plain" id="data">{embedded(sheet)}</script>\n<script>{SCRIPT}</script>\n'
    text = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(sheet.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        f"{script if known else ''}</body>\n</html>\n"
    )
    return text.translate(_UNPRINTABLE)


def headline(sheet: Sheet) -> str:
    """The answer in a sentence: against torch where that was measured, else against the roofline, and of which GPU."""
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
        chips = ", ".join(one.name for one in sheet.chips)
        text += f". Nothing was timed: all is modelled for, and drawn against, the {chips}"
    return text + "."


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
        f'<p class="headline">{escape(headline(sheet))}</p>\n{notes}'
        f"<details><summary>What was read</summary>{table((), rows)}</details>"
    )


def _folded(title: str, inner: str) -> str:
    return f"<details><summary>{title}</summary>\n{inner}</details>" if inner else ""


def _glance(cells: Sequence[Cell]) -> str:
    """One row for each op and form, and GPU that it was measured on where there are several, over all shapes."""
    with_torch = any(cell.against_torch for cell in cells)
    with_model = any(cell.model_ratio for cell in cells)
    gpus = _short_names({gpu_name(cell) for cell in cells} - {""})
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
            continue  # what was not measured is under Coverage
        known = [(cell.bucket, cell.fraction) for cell in mine if cell.state is not State.MISSING]
        row = [escape(names[0]), *(escape(gpus.get(name, "not measured")) for name in names[1:])]
        if with_torch:
            ratios = [ratio for cell in mine if (ratio := cell.against_torch) is not None]
            row += [times(mean(ratios)), times(min(ratios, default=None))]
        row.append(percent(median(fraction for _, fraction in known)))
        for _, low, high in _RANGES:
            row.append(percent(median(fraction for bucket, fraction in known if low <= bucket <= high)))
        row += [times(mean(cell.model_ratio for cell in mine))] * with_model
        row += [f"{len(mine):,}", f"{counts(mine)[State.MEASURED]:,}"]
        rows.append(row)
    return f'<div class="wide">{table(head, rows, numbers=range(len(first), len(head)))}</div>'


def _short_names(gpus: Collection[str]) -> dict[str, str]:
    """NVIDIA H100 80GB HBM3 is H100, unless another one would be, too."""
    found = {name: name.removeprefix("NVIDIA ") for name in gpus}
    first = {name: (text.split() or [name])[0] for name, text in found.items()}
    return first if len(set(first.values())) == len(first) else found


def _model(cells: Sequence[Cell]) -> str:
    found = model_against_measured(cells)
    what = "The cost model's estimate over the measured time, of every measured choice, and of all candidates of some."
    return f'<p class="soft">{what}</p><div class="wide">{found}</div>' if found else ""


def _search(cells: Sequence[Cell]) -> str:
    found = search(cells)
    what = (
        "Of a sample of cells, each measured candidate by its rank in the cost model's order. Where the first is near "
        "1, a modelled choice loses little."
    )
    return f'<p class="soft">{what}</p><div class="wide">{found}</div>' if found else ""


def _coverage(sheet: Sheet, cells: Sequence[Cell]) -> str:
    """A row for each model, or GEMM where there is no model, and a strip for each op."""
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
            groups[escape(name), dtype, shards] = [cell for one in problems for cell in by_problem.get(one, ())]
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
