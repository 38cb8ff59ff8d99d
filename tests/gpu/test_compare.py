"""``aot bench`` on a real GPU: every cell has a time of ours and of torch's, each of a result that was right."""

from __future__ import annotations

import json

import pytest
import torch

from pretuned.aot.cli.main import run
from pretuned.aot.compare.result import OURS
from pretuned.aot.compare.run import LOOP, TORCH

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def bench(capsys: pytest.CaptureFixture[str], spec: str) -> list[dict]:
    code = run(["bench", "--models", spec, "--tokens", "1,1024", "--budget-ms", "2", "--json"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)["cells"]


def test_each_cell_has_a_time_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    cells = bench(capsys, "shape:E=8,H=512,I=256,k=2")
    assert len(cells) == 8
    for cell in cells:
        assert set(cell["us"]) >= {OURS, *(name.replace(" ", "_") for name in (TORCH, LOOP))}, cell
        assert all(0 < us < 1e5 for us in cell["us"].values())


def test_what_torch_refuses_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    for cell in bench(capsys, "shape:E=8,H=500,I=333,k=2"):
        assert cell["us"][OURS] > 0
        key = TORCH.replace(" ", "_")
        assert key in cell["us"] or cell["left_out"][key]
