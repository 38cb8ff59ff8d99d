"""Makes ``benchmarks.*`` importable, as benchmarks/run.py does."""

from __future__ import annotations

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "run.py"))["package"]()
