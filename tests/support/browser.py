"""A real browser, for what a page's own script and style do: Debian's chromium, led by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TELEPHONE = 420  # pixels


@contextmanager
def started() -> Iterator[Browser]:
    """Chromium; a test of it is skipped where there is none."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not here: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not here: pip install -e '.[browser]'"
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@contextmanager
def shown(browser: Browser, path: Path, width: int = 1200, dark: bool = False) -> Iterator[Page]:
    """The page in ``path``, once its script has drawn it. Its script may say nothing, and it may load nothing else."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("#chart canvas")
    yield page
    page.close()
    assert said == [path.as_uri()]
