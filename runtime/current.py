"""The snapshot of the bundles that this process has taken, if it has.

Alone here, so that a call can look for what it may repeat before anything else is imported:
``dispatch/snapshot.py`` takes it.
"""

from __future__ import annotations

from typing import Any

# A ``dispatch.snapshot.Snapshot``; None before its first use and after a reload.
snapshot: Any = None
