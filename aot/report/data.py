"""The cells as the page's script reads them: one JSON object, each text once, each cell a row of numbers."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from ...artifacts.records.bundle import Model
from ...artifacts.records.problem import Op
from ..plan.families import fused
from .cells import Cell, Sheet, State, gemm_key

# A row of the script's ``cells``; names and places are told apart by number.
FIELDS = (
    "gemm", "form", "rows", "state", "us", "least", "bound", "model", "torch", "config", "second", "second_us", "tried",
    "spread", "gpu", "failures", "flop",
)  # fmt: skip
_STATES = tuple(State)


def form(cell: Cell) -> str:
    """Op and form, as charts and tables say it."""
    one = cell.problem
    return f"{one.op.value} {fused(one.fusion)}".rstrip()


def form_order(cell: Cell) -> tuple[int, int]:
    """The order in which forms are told: forward, dX, dW, each plain first."""
    return (list(Op).index(cell.problem.op), cell.problem.fusion.value)


def gpu_name(cell: Cell) -> str:
    """The GPU that a cell was measured on; "" of any other."""
    return cell.gpu.name if cell.gpu and cell.state is State.MEASURED else ""


class _Texts:
    """Texts by number, in the order in which they came."""

    def __init__(self) -> None:
        self.all: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.all.setdefault(text, len(self.all))


def embedded(sheet: Sheet) -> str:
    """JSON that may stand in a script element."""
    configs, forms, gpus = _Texts(), _Texts(), _Texts()
    for cell in sorted(sheet.cells, key=form_order):
        forms.number(form(cell))
    cells = [_row(cell, number, configs, forms, gpus) for number, gemm in enumerate(sheet.gemms) for cell in gemm.cells]
    found = {
        "fields": FIELDS, "states": [one.value for one in State], "cells": cells, "configs": list(configs.all),
        "forms": list(forms.all), "gpus": list(gpus.all), "gemms": [gemm.title for gemm in sheet.gemms],
        "models": _models(sheet),
    }  # fmt: skip
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


def _row(cell: Cell, gemm: int, configs: _Texts, forms: _Texts, gpus: _Texts) -> list[Any]:
    tried = [one.time_us for one in cell.candidates]
    one = cell.problem
    return [
        gemm,
        forms.number(form(cell)),
        cell.bucket,
        _STATES.index(cell.state),
        _short(cell.time_us),
        _short(cell.roofline.least_us),
        int(cell.roofline.bound == "compute"),
        _short(cell.model_us),
        _short(cell.torch_us),
        configs.number(cell.config),
        configs.number(cell.runner_up),
        _short(cell.runner_up_us),
        len(tried),
        _short(statistics.median(tried) / min(tried) if tried else None),
        gpus.number(gpu_name(cell)),
        list(cell.failures) or 0,
        _short(2e-6 * cell.bucket * one.N * one.K),
    ]


def _models(sheet: Sheet) -> list[list[Any]]:
    """(name, its GEMMs by number)."""
    numbers = {gemm.key: i for i, gemm in enumerate(sheet.gemms)}
    found: dict[str, dict[int, None]] = {}
    for model in sheet.models:
        found.setdefault(model.name, {}).update(dict.fromkeys(_gemms(model, numbers)))
    return [[name, list(gemms)] for name, gemms in found.items()]


def _gemms(model: Model, numbers: dict[Any, int]) -> list[int]:
    return [numbers[gemm_key(one)] for one in model.problems if gemm_key(one) in numbers]


def _short(value: float | None) -> float | int | None:
    """Five digits are more than a time has."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
