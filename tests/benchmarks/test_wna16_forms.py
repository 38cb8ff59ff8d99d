"""Other forms of the kernel for weights of 4 bits: what they change, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def changes() -> ModuleType:
    from benchmarks.speed import wna16_changes

    return wna16_changes


def test_each_form_finds_its_places_in_todays_sources(changes: ModuleType, tmp_path: Path) -> None:
    from benchmarks.speed import wna16_forms

    for number, changed in enumerate(dict.fromkeys(form.changed for form in wna16_forms.FORMS)):
        changes.changed_copy(ROOT, tmp_path / str(number), changed)
        for one in changed:
            text = (tmp_path / str(number) / "pretuned" / one.file).read_text()
            assert one.new in text
    names = [str(form) for form in wna16_forms.FORMS]
    assert len(set(names)) == len(names)


def test_a_text_that_is_not_there_is_an_error(changes: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 'no such line' 0 times, not 1"):
        changes.changed_copy(ROOT, tmp_path, [changes.Change(changes.WNA16, "no such line", "")])


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[dict[str, object]], str]:
    """Two forms on the host, one that multiplies and one that forgets a row: who is right, the cells, what was said."""
    import time

    from benchmarks.speed import wna16_forms
    from pretuned.aot.measure.calls import Tensors
    from pretuned.aot.measure.clock import HostClock
    from pretuned.runtime.weights.expert_weights import ExpertWeights

    def form(name: str, forgets: int) -> object:
        def on(tensors: Tensors, m_sizes: torch.Tensor) -> object:
            assert isinstance(tensors.weights, ExpertWeights)
            dense = tensors.weights.dequantize(torch.bfloat16).float()

            def call() -> None:
                parts = tensors.rows.float().split(m_sizes.tolist())
                tensors.result.copy_(torch.cat([part @ w.T for part, w in zip(parts, dense, strict=True)]))
                tensors.result[:forgets] = 0.0

            return call

        return wna16_forms.Loaded(wna16_forms.Made(f"{name} 16x64x1024 s3", name, (16, 64, 1024, 3), None, b""), 1, on)

    both = [form("today", 0), form("two", 1)]
    right = wna16_forms.ragged(both, "int4_g32", "cpu")
    cells: list[dict[str, object]] = []
    model = ("tiny", "int4_g32", 4, 2, ())
    wna16_forms.cells(
        both, model, (128, 256), (16,), HostClock(), time.monotonic() + 60.0, cells.append, "cpu"
    )  # fmt: skip
    print(wna16_forms.table(cells[0]))
    return [one.made.form for one in right], cells, capsys.readouterr().out


def test_a_form_that_is_wrong_is_told_and_not_timed_on(told: tuple[list[str], list[dict[str, object]], str]) -> None:
    right, cells, said = told
    assert right == ["today 16x64x1024 s3"]
    assert "WRONG two 16x64x1024 s3 int4_g32, ragged: rows are off by 1.00e+00" in said
    assert "WRONG two 16x64x1024 s3 forward int4_g32" in said
    (cell,) = cells
    today, two = cell["forms"]  # type: ignore[misc]
    assert (cell["E"], cell["T"], cell["active"]) == (4, 16, 4)
    assert today["error"] < 5e-3 < two["error"]
    assert (today["bits_of_today"], two["bits_of_today"]) == (True, False)
    assert "x1.000  1 an SM" in said


def test_compiled_forms_come_back_from_their_file(tmp_path: Path) -> None:
    from benchmarks.speed import wna16_forms

    made = wna16_forms.Made("two 16x64x1024 s3", "two", (16, 64, 1024, 3), None, b"code")
    wna16_forms.written(tmp_path / "forms.xz", [made])
    assert wna16_forms.read(tmp_path / "forms.xz") == [made]
