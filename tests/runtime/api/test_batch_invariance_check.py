"""The check of a GPU's kernels: that it notices, what it runs, and what it says. (On a GPU: tests/gpu.)"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pretuned.artifacts.errors import ProblemNotInBundle
from pretuned.runtime import __main__ as command
from pretuned.runtime import hooks
from pretuned.runtime.api import batch_invariance
from pretuned.runtime.api.batch_invariance import BatchInvarianceReport, Checked, Counted, Experts, compared, forms
from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.settings import Invariance

CPU = torch.device("cpu")


def test_one_bit_of_one_token_is_noticed() -> None:
    x = torch.randn(64, 5)

    def run(some: torch.Tensor) -> dict[str, torch.Tensor]:
        odd = x[some].clone()
        if len(some) == 7:
            odd[3, 2] = torch.nextafter(odd[3, 2], torch.tensor(torch.inf))
        return {"same": x[some], "odd": odd}

    assert compared(run, 64, (1, 7, 8), 0) == {"same": Counted(3, 0), "odd": Counted(3, 1)}
    assert compared(run, 64, (1, 8), 0) == {"same": Counted(2, 0), "odd": Counted(2, 0)}
    assert compared(run, 64, (), 4)["same"] == Counted(4, 0)


@pytest.mark.parametrize("format", ["bf16", "mxfp4"])
def test_what_is_computed(format: str) -> None:
    """On the CPU by the reference; each token's results are about those that it has alone."""
    experts = Experts.drawn(format, 12, CPU, H=128, I=64)
    assert (experts.ids < 0).any()
    for name, run in forms(experts).items():
        whole = run(torch.arange(12))
        assert whole
        for some in (torch.tensor([5]), torch.tensor([7, 2, 11])):
            for key, tensor in run(some).items():
                assert tensor.shape == (len(some), whole[key].shape[1]), (name, key)
                torch.testing.assert_close(tensor, whole[key][some], rtol=0.05, atol=0.05)


def test_each_form_is_run_in_the_mode_and_the_layer_without_it() -> None:
    modes: list[Invariance | None] = []

    class Drawn:
        ids = torch.zeros(16, 1)

        def layer(self, some: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
            modes.append(snapshot().invariance)
            free = torch.ones(len(some), 1) * (len(some) if modes[-1] is None else 1)
            return {"forward": free, "forward with a gradient": free, "dX": free}

        def products(self, some: torch.Tensor) -> dict[str, torch.Tensor]:
            if modes[0] != Invariance():
                raise ProblemNotInBundle("no kernel")
            return {"plain": torch.ones(len(some), 1)}

    drawn: Any = Drawn()
    checked = batch_invariance.check("bf16", drawn, sizes=(1, 16), mixes=0)
    assert checked.ok
    assert checked.results["layer: dX"] == Counted(2, 0)
    assert checked.results["layer: training as serving"] == Counted(1, 0)
    assert checked.results["products: plain"] == Counted(2, 0)
    assert checked.free == Counted(6, 3)
    assert set(modes) == {Invariance(), None}
    assert modes[-1] is None
    modes.clear()
    skipped = batch_invariance.check("bf16", drawn, mode=Invariance(True), sizes=(1,), mixes=0)
    assert skipped.skipped == "no kernel"
    assert hooks.said() is hooks.UNSAID


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    right = Checked("bf16", str(Invariance()), {"layer: dX": Counted(5, 0)}, Counted(5, 2))
    wrong = Checked("mxfp4", str(Invariance()), {"layer: dX": Counted(5, 1)}, Counted(5, 3))
    absent = Checked("nvfp4", str(Invariance()), {}, Counted(0, 0), "no kernel")
    for checked, code in (((right, absent), 0), ((right, wrong), 1)):
        report = BatchInvarianceReport("NVIDIA H200", checked, 2.5)
        assert command.shown(report, as_json=False) == code
        out = capsys.readouterr().out
        assert "ok        bf16   0 of 5 results differ in some bit (without the mode 2 of 5); batch-invariant" in out
        assert out.endswith(f"ok        {'no' if code else 'yes'}\n")
        assert command.shown(report, as_json=True) == code
        assert json.loads(capsys.readouterr().out)["ok"] is not bool(code)
    assert "DIFFERS" in str(report)
    assert "layer: dX: 1 of 5" in str(report)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--batch-invariance"]) == 1
    assert "no CUDA GPU is here" in capsys.readouterr().err
