"""The report of what ships, in a real browser: by day and by night, at a desk and on a telephone, with a mouse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import TELEPHONE, shown, started
from reports import cells_of, packed

from pretuned.aot.report.page import page as written
from pretuned.aot.report.sheets import read

ROOT = Path(__file__).resolve().parents[3]
BUNDLE = ROOT / "artifacts" / "bundles" / "catalogue-sm90.msgpack"
JOURNAL = ROOT / "benchmarks" / "results" / "catalogue-h200.journal.xz"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def report(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(written(read(str(BUNDLE), True, [JOURNAL], None, None)), encoding="utf-8")
    return path


def count(page: Any, chart: str) -> int:
    """How many marks are drawn."""
    return int(page.eval_on_selector(f"{chart} canvas", "one => one.marks.points.length"))


def painted(page: Any, chart: str) -> float:
    """How much of a chart has a colour."""
    script = """one => { const all = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
        let found = 0; for (let i = 3; i < all.length; i += 4) found += all[i] > 0; return 4 * found / all.length; }"""
    return float(page.eval_on_selector(f"{chart} canvas", script))


def test_every_cell_is_drawn_and_the_slowest_beside_torch_is_first(browser: Any, report: Path) -> None:
    with shown(browser, report) as page:
        cells = cells_of(report.read_text(encoding="utf-8"))
        gains = sorted(cell["torch"] / cell["us"] for cell in cells if cell["torch"])
        assert count(page, "#chart") == sum(bool(cell["us"]) for cell in cells)  # the rest is missing
        assert count(page, "#torch") == len(gains)
        assert painted(page, "#chart") > painted(page, "#torch") > 0.01
        assert f"{len(cells):,} cells; " in page.text_content("#said")
        head = page.locator("#rows th").all_text_contents()
        column = page.locator(f"#rows td:nth-child({head.index('x torch') + 1})").all_text_contents()
        assert column == [f"{gain:.2f}" for gain in gains[:50]]
        page.click("#more")
        assert page.locator("#rows tbody tr").count() == 550


def test_cells_are_filtered_sorted_and_told_in_other_units(browser: Any, report: Path) -> None:
    with shown(browser, report) as page:
        cells = cells_of(report.read_text(encoding="utf-8"))
        product, form = cells[0]["gemm"], "dX"
        page.select_option("#gemm", label=product)
        page.select_option("#form", label=form)
        page.select_option("#gpu", label="NVIDIA H200")
        page.select_option("#order", label="longest time")
        page.select_option("#unit", label="microseconds")
        mine = [cell for cell in cells if (cell["gemm"], cell["form"], cell["gpu"]) == (product, form, "NVIDIA H200")]
        assert 10 < len(mine) < 50
        assert count(page, "#chart") == len(mine)
        assert page.text_content("#above").startswith("Microseconds")
        head = page.locator("#rows th").all_text_contents()
        assert "TFLOP/s" not in head
        times = [
            float(text) for text in page.locator(f"#rows td:nth-child({head.index('us') + 1})").all_text_contents()
        ]
        assert times == sorted(times, reverse=True)
        assert times[0] == pytest.approx(max(cell["us"] for cell in mine), abs=0.06)
        page.select_option("#unit", label="TFLOP/s")
        assert page.text_content("#above").startswith("TFLOP/s")


def test_rows_name_models(browser: Any, report: Path) -> None:
    """Of models that share a GEMM the first, or the one that is filtered for, and how many more."""
    with shown(browser, report) as page:
        data = packed(report.read_text(encoding="utf-8"))
        users = {title: [name for name, gemms in data["models"] if i in gemms] for i, title in enumerate(data["gemms"])}
        for text in page.locator("#rows td:first-child").all_inner_texts():
            name, title = text.split("\n")
            first, *more = users[title]
            assert name == first.split("/")[-1] + (f" +{len(more)}" if more else "")
        page.select_option("#model", label="Qwen/Qwen3-30B-A3B")
        names = {text.split("\n")[0].split(" +")[0] for text in page.locator("#rows td:first-child").all_inner_texts()}
        assert names == {"Qwen3-30B-A3B"}


def test_a_desk_shows_every_column(browser: Any, report: Path) -> None:
    with shown(browser, report, 1280) as page:
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert page.locator("table").count() >= 5
        for element in page.locator("th, .wide td:last-child").all()[:200]:
            box = element.bounding_box()
            assert box["x"] + box["width"] <= 1280, element.text_content()


@pytest.mark.parametrize("width", [1280, TELEPHONE])
def test_what_is_hidden_is_not_shown(browser: Any, tmp_path: Path, width: int) -> None:
    """A filter by GPU where there is one GPU."""
    path = tmp_path / "one.html"
    path.write_text(written(read(str(BUNDLE.with_name("fp16-sm90.msgpack")), True, [], None, None)), encoding="utf-8")
    with shown(browser, path, width) as page:
        assert page.locator("[hidden]").count() > 0
        assert not [element.inner_text() for element in page.locator("[hidden]").all() if element.is_visible()]
        assert page.is_visible("#model")
        assert not page.is_visible("#gpu")


@pytest.mark.parametrize("width", [1200, TELEPHONE])
def test_a_mark_that_is_pointed_at_says_what_it_is(browser: Any, report: Path, width: int) -> None:
    with shown(browser, report, width) as page:
        cells = cells_of(report.read_text(encoding="utf-8"))
        beside = Counter(cell["gemm"] for cell in cells if cell["torch"] and cell["form"] == "forward")
        page.select_option("#gemm", label=beside.most_common(1)[0][0])
        page.select_option("#form", label="forward")
        page.select_option("#gpu", label="NVIDIA H200")
        canvas = page.locator("#torch canvas")
        canvas.scroll_into_view_if_needed()
        marks = canvas.evaluate("one => one.marks.xs.map((x, i) => [x, one.marks.ys[i]])")
        assert len(marks) > 5
        assert not page.is_visible("#tip")
        assert not page.is_visible("#ring")
        for x, y in (marks[0], marks[-1]):
            box = canvas.bounding_box()
            page.mouse.move(box["x"] + x + 1, box["y"] + y - 1)
            first, *rest = page.inner_text("#tip").splitlines()
            (cell,) = [
                cell
                for cell in cells
                if cell["torch"] and first == f"{cell['gemm']}, {cell['form']}, M near {cell['rows']}"
            ]
            text = "\n".join(rest)
            assert f"{cell['us']:.{2 if cell['us'] < 100 else 1}f} us measured on NVIDIA H200" in text
            assert f"{cell['flop'] / cell['us']:.1f} TFLOP/s" in text
            assert f"{100 * cell['least'] / cell['us']:.0f} % of the roofline" in text
            assert f": {cell['torch'] / cell['us']:.2f} x" in text
            ring = page.locator("#ring").bounding_box()
            assert abs(ring["x"] + ring["width"] / 2 - box["x"] - x) < 2
            assert abs(ring["y"] + ring["height"] / 2 - box["y"] - y) < 2
            box = page.locator("#tip").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
            assert box["y"] + box["height"] <= 900
        page.mouse.move(1, 1)
        assert not page.is_visible("#tip")


def luminance(colour: str) -> float:
    """WCAG's, of the browser's ``rgb(r, g, b)``."""
    parts = [int(channel) / 255 for channel in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_marks_stand_out_by_day_and_by_night(browser: Any, report: Path, dark: bool) -> None:
    """WCAG's contrast: 4.5 for text, 3 for what is drawn."""
    with shown(browser, report, dark=dark) as page:

        def colour(selector: str, of: str = "color") -> float:
            return luminance(page.eval_on_selector(selector, f"one => getComputedStyle(one).{of}"))

        paper = colour("body", "backgroundColor")
        assert (paper < 0.05) == dark

        def contrast(luminance: float) -> float:
            return (max(luminance, paper) + 0.05) / (min(luminance, paper) + 0.05)

        for text in (".headline", ".soft", "#rows td", "th", "summary"):
            assert contrast(colour(text)) > 4.5, text
        assert contrast(colour("#chart text", "fill")) > 4.5
        for place in range(1, page.locator("#above + .chart .key").count() + 1):
            assert contrast(colour(f"#chart .key:nth-of-type({place}) i", "backgroundColor")) > 3, place


def test_a_telephone_shows_it_without_scrolling_sideways(browser: Any, report: Path) -> None:
    """Wide tables scroll in themselves; the first columns of what is told of each op have the answer."""
    with shown(browser, report, TELEPHONE, dark=True) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= TELEPHONE
        for element in page.locator("select:visible, svg, canvas, .headline, figcaption").all():
            box = element.bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= TELEPHONE
        seen = [
            heading.text_content()
            for heading in page.locator("h2:has-text('At a glance') + .wide th").all()
            if (box := heading.bounding_box())["x"] + box["width"] <= TELEPHONE
        ]
        assert {"op", "x torch", "worst", "% of the roofline, median"} <= set(seen)
        assert float(page.eval_on_selector("#rows td", "one => parseFloat(getComputedStyle(one).fontSize)")) >= 11
