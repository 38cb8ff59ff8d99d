"""Formats that torch and the portable kernel alone run: no prepared weights, no row kernels of weights."""

from __future__ import annotations

PORTABLE: frozenset[str] = frozenset()
