"""Encode the cells for the page's script: JSON by columns, each text once, deflated, in base64."""

from __future__ import annotations

import base64
import functools
import json
import math
import zlib
from collections.abc import Collection
from typing import Any

from ...artifacts.records.bundle import Model
from ...artifacts.records.problem import Fusion, Op
from ..plan.families import fused
from .cells import Cell, Sheet, State, gemm_key

_STATES = {state: i for i, state in enumerate(State)}


@functools.lru_cache(maxsize=256)
def _form(op: Op, fusion: Fusion) -> tuple[str, tuple[int, int]]:
    return f"{op.value} {fused(fusion)}".rstrip(), (list(Op).index(op), fusion.value)


def form(cell: Cell) -> str:
    """Op and fusion, as in charts and tables."""
    return _form(cell.problem.op, cell.problem.fusion)[0]


def form_order(cell: Cell) -> tuple[int, int]:
    """The sort key of op and fusion: forward, dX, dW, each plain first."""
    return _form(cell.problem.op, cell.problem.fusion)[1]


def gpu_name(cell: Cell) -> str:
    """The GPU that a cell was measured on; empty for other cells."""
    return cell.gpu.name if cell.gpu and cell.state is State.MEASURED else ""


def short_names(gpus: Collection[str]) -> dict[str, str]:
    """Shorten NVIDIA H100 80GB HBM3 to H100, unless two names would become equal."""
    without_brand = {name: name.removeprefix("NVIDIA ") for name in gpus}
    first = {name: (text.split() or [name])[0] for name, text in without_brand.items()}
    return first if len(set(first.values())) == len(first) else without_brand


class _Texts:
    """Numbers for texts, in the order in which they come."""

    def __init__(self) -> None:
        self.all: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.all.setdefault(text, len(self.all))


def embedded(sheet: Sheet) -> str:
    """Encode a sheet for a script element: base64 of deflated JSON.

    ``columns`` has a list for each field, over all cells, GEMM by GEMM. Times are microseconds in five digits, 0 for
    none; ``model`` and ``second_us`` are thousandths of ``us``, ``spread`` is in thousandths. ``gemm``, ``form``,
    ``gpu``, ``config``, ``second`` and ``plan`` are places in lists of names. ``flop`` has 2 N K of each GEMM in
    millions; ``failures`` maps a cell's place to its failures.
    """
    configs, forms, gpus, plans = _Texts(), _Texts(), _Texts(), _Texts()
    cells = sheet.cells
    for _, text in sorted({(form_order(cell), form(cell)) for cell in cells}):
        forms.number(text)
    columns = {
        "gemm": [number for number, gemm in enumerate(sheet.gemms) for _ in gemm.cells],
        "form": [forms.number(form(cell)) for cell in cells],
        "log2_rows": [cell.bucket.bit_length() - 1 for cell in cells],
        "state": [_STATES[cell.state] for cell in cells],
        "us": [_short(cell.time_us) for cell in cells],
        "least": [_short(cell.roofline.least_us) for cell in cells],
        "bound": [int(cell.roofline.compute_us > cell.roofline.memory_us) for cell in cells],
        "model": [_thousandths(cell.model_us, cell.time_us) for cell in cells],
        "torch": [_short(cell.torch_us) for cell in cells],
        "config": [configs.number(cell.config) for cell in cells],
        "second": [configs.number(cell.runner_up) for cell in cells],
        "second_us": [_thousandths(cell.runner_up_us, cell.time_us) for cell in cells],
        "tried": [cell.tried for cell in cells],
        "spread": [_thousandths(cell.spread, 1.0) for cell in cells],
        "gpu": [gpus.number(gpu_name(cell)) for cell in cells],
        "plan": [plans.number(cell.plan) for cell in cells],
    }
    data = {
        "columns": columns,
        "states": [state.value for state in State],
        "configs": list(configs.all),
        "forms": list(forms.all),
        "gpus": list(gpus.all),
        "plans": list(plans.all),
        "short_gpus": _shortened(gpus.all),
        "gemms": [gemm.title for gemm in sheet.gemms],
        "flop": [2e-6 * gemm.N * gemm.K for gemm in sheet.gemms],
        "failures": {i: list(cell.failures) for i, cell in enumerate(cells) if cell.failures},
        "models": _models(sheet),
    }
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _shortened(gpus: Collection[str]) -> list[str]:
    short = short_names({name for name in gpus if name})
    return [short.get(name, "") for name in gpus]


def _models(sheet: Sheet) -> list[list[Any]]:
    """(name, numbers of its GEMMs) of each model."""
    numbers = {gemm.key: i for i, gemm in enumerate(sheet.gemms)}
    by_model: dict[str, dict[int, None]] = {}
    for model in sheet.models:
        by_model.setdefault(model.name, {}).update(dict.fromkeys(_gemms(model, numbers)))
    return [[name, list(gemms)] for name, gemms in by_model.items()]


def _gemms(model: Model, numbers: dict[Any, int]) -> list[int]:
    return [numbers[gemm_key(problem)] for problem in model.problems if gemm_key(problem) in numbers]


def _short(value: float | None) -> float | int:
    """Round to five digits, more than a time has."""
    if value is None or not math.isfinite(value):
        return 0
    short = float(f"{value:.5g}")
    return int(short) if short >= 1e4 else short


def _thousandths(value: float | None, of: float) -> int:
    return 0 if value is None or not math.isfinite(value / of) else round(1000 * value / of)
