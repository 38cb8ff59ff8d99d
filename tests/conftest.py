"""Takes the repository's root off sys.path: there, ``import kernels`` would mean our folder."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
sys.path.append(str(ROOT / "tests" / "golden"))  # the synthetic bundles, shared by tests of every layer
