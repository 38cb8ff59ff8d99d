"""Puts the helpers of these tests where they import them from."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "making"))
