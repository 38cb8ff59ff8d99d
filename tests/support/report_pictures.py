"""Makes the pictures of docs/use/report.md out of what ships: ``python tests/support/report_pictures.py``."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import TELEPHONE, shown, started
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("artifacts/bundles/catalogue-sm90.msgpack", "--journal", "benchmarks/results/catalogue-h200.journal.xz")
PICTURES = {"report-h200.png": (860, 1380, False), "report-narrow.png": (TELEPHONE, 1500, True)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, started() as browser:
        report = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "pretuned.aot", "report", *WORDS, "-o", report], cwd=ROOT, check=True)
        for name, (width, height, dark) in PICTURES.items():
            with shown(browser, report, width, dark) as page:
                page.set_viewport_size({"width": width, "height": height})
                picture = Image.open(io.BytesIO(page.screenshot()))
            picture.convert("RGB").quantize(32).save(ROOT / "docs" / "use" / name, optimize=True)


if __name__ == "__main__":
    main()
