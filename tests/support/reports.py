"""The data that a report's page has for its script, unpacked."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any


def packed(text: str) -> dict[str, Any]:
    """The data of a page, given its text."""
    (match,) = re.findall(r'<script type="text/plain" id="data">(.*?)</script>', text, re.DOTALL)
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(match, validate=True)))
    return data


def cells_of(text: str) -> list[dict[str, Any]]:
    """Its cells, each by its fields' names; texts and GEMMs by what they are, times in microseconds, None of none."""
    data = packed(text)
    columns = data["columns"]
    cells = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for i, cell in enumerate(cells):
        us = cell["us"] or None
        cell |= {
            "rows": 1 << cell["log2_rows"],
            "us": us,
            "torch": cell["torch"] or None,
            "spread": cell["spread"] / 1000,
            "model": (us and us * cell["model"] / 1000) or None,
            "second_us": (us and us * cell["second_us"] / 1000) or None,
            "flop": data["flop"][cell["gemm"]] * (1 << cell["log2_rows"]),
            "failures": data["failures"].get(str(i)),
            "state": data["states"][cell["state"]],
        }
        for name, texts in (
            ("gemm", "gemms"),
            ("form", "forms"),
            ("config", "configs"),
            ("second", "configs"),
            ("gpu", "gpus"),
        ):
            cell[name] = data[texts][cell[name]]
    return cells
