"""The report of what ships, in a real browser: by day and by night, at a desk and on a telephone, with a mouse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import TELEPHONE, shown, started

from pretuned.aot.report.page import page as written
from pretuned.aot.report.sources import read

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


def cells(page: Any) -> list[dict[str, Any]]:
    """The page's data, each cell by its fields' names; product and form by what they are."""
    data = json.loads(page.text_content("#data"))
    found = [dict(zip(data["fields"], row, strict=True)) for row in data["cells"]]
    for one in found:
        one |= {"gemm": data["gemms"][one["gemm"]], "form": data["forms"][one["form"]]}
    return found


def test_every_cell_is_drawn_and_the_slowest_beside_torch_is_first(browser: Any, report: Path) -> None:
    with shown(browser, report) as page:
        known = cells(page)
        gains = sorted(one["torch"] / one["us"] for one in known if one["torch"])
        assert page.locator("#chart circle").count() == sum(bool(one["us"]) for one in known)  # the rest is missing
        assert page.locator("#torch circle").count() == len(gains)
        assert f"{len(known):,} cells; " in page.text_content("#said")
        head = page.locator("#rows th").all_text_contents()
        column = page.locator(f"#rows td:nth-child({head.index('x torch') + 1})").all_text_contents()
        assert column == [f"{gain:.2f}" for gain in gains[:50]]
        page.click("#more")
        assert page.locator("#rows tbody tr").count() == 550


def test_cells_are_filtered_sorted_and_told_in_other_units(browser: Any, report: Path) -> None:
    with shown(browser, report) as page:
        known = cells(page)
        product, form = known[0]["gemm"], "dX"
        page.select_option("#gemm", label=product)
        page.select_option("#form", label=form)
        page.select_option("#gpu", label="NVIDIA H200")
        page.select_option("#order", label="longest time")
        page.select_option("#unit", label="microseconds")
        gpu = json.loads(page.text_content("#data"))["gpus"].index("NVIDIA H200")
        mine = [one for one in known if (one["gemm"], one["form"], one["gpu"]) == (product, form, gpu)]
        assert 10 < len(mine) < 50
        assert page.locator("#chart circle").count() == len(mine)
        assert page.text_content("#above").startswith("Microseconds")
        head = page.locator("#rows th").all_text_contents()
        assert "TFLOP/s" not in head
        times = [float(one) for one in page.locator(f"#rows td:nth-child({head.index('us') + 1})").all_text_contents()]
        assert times == sorted(times, reverse=True)
        assert times[0] == pytest.approx(max(one["us"] for one in mine), abs=0.06)
        page.select_option("#unit", label="TFLOP/s")
        assert page.text_content("#above").startswith("TFLOP/s")


@pytest.mark.parametrize("width", [1200, TELEPHONE])
def test_a_mark_that_is_pointed_at_says_what_it_is(browser: Any, report: Path, width: int) -> None:
    with shown(browser, report, width) as page:
        known = cells(page)
        page.select_option("#gemm", label=known[0]["gemm"])
        page.select_option("#form", label="forward")
        page.select_option("#gpu", label="NVIDIA H200")
        dots = page.locator("#torch circle")
        assert dots.count() > 5
        assert not page.is_visible("#tip")
        for place in (0, dots.count() - 1):
            dots.nth(place).hover()
            first, *rest = page.inner_text("#tip").splitlines()
            (one,) = [one for one in known if one["torch"]
                      and first == f"{one['gemm']}, {one['form']}, M near {one['rows']}"]  # fmt: skip
            text = "\n".join(rest)
            assert f"{one['us']:.{2 if one['us'] < 100 else 1}f} us measured on NVIDIA H200" in text
            assert f"{one['flop'] / one['us']:.1f} TFLOP/s" in text
            assert f"{100 * one['least'] / one['us']:.0f} % of the roofline" in text
            assert f": {one['torch'] / one['us']:.2f} x" in text
            box = page.locator("#tip").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
            assert box["y"] + box["height"] <= 900
        page.mouse.move(1, 1)
        assert not page.is_visible("#tip")


def luminance(colour: str) -> float:
    """WCAG's, of the browser's ``rgb(r, g, b)``."""
    parts = [int(one) / 255 for one in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_marks_stand_out_by_day_and_by_night(browser: Any, report: Path, dark: bool) -> None:
    """WCAG's contrast: 4.5 for text, 3 for what is drawn."""
    with shown(browser, report, dark=dark) as page:

        def colour(selector: str, of: str = "color") -> float:
            return luminance(page.eval_on_selector(selector, f"one => getComputedStyle(one).{of}"))

        paper = colour("body", "backgroundColor")
        assert (paper < 0.05) == dark

        def contrast(one: float) -> float:
            return (max(one, paper) + 0.05) / (min(one, paper) + 0.05)

        for text in (".headline", ".soft", "#rows td", "th", "summary"):
            assert contrast(colour(text)) > 4.5, text
        assert contrast(colour("#chart text", "fill")) > 4.5
        for place in range(1, page.locator("#above + .chart .key").count() + 1):
            assert contrast(colour(f"#chart .key:nth-of-type({place}) i", "backgroundColor")) > 3, place


def test_a_telephone_shows_it_without_scrolling_sideways(browser: Any, report: Path) -> None:
    """Wide tables scroll in themselves; the first columns of what is told of each op have the answer."""
    with shown(browser, report, TELEPHONE, dark=True) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= TELEPHONE
        for one in page.locator("select:visible, svg, .headline, figcaption").all():
            box = one.bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= TELEPHONE
        seen = [one.text_content() for one in page.locator("h2:has-text('At a glance') + .wide th").all()
                if (box := one.bounding_box())["x"] + box["width"] <= TELEPHONE]  # fmt: skip
        assert {"op", "x torch", "worst", "% of the roofline, median"} <= set(seen)
        assert float(page.eval_on_selector("#rows td", "one => parseFloat(getComputedStyle(one).fontSize)")) >= 11
