"""All code of a GPU proven in child processes: what hangs, dies or is wrong is left out, and the rest goes on."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import proving_child
import pytest
import torch
from made import A100, ON_A100, SPECS, Spec, measured, modelled, places, write

from pretuned.artifacts.errors import CudaError, HostError
from pretuned.artifacts.records.problem import Op, Problem
from pretuned.kernels.contract.config import Config
from pretuned.runtime import __main__ as command
from pretuned.runtime import current, verdicts
from pretuned.runtime.dispatch.snapshot import Snapshot
from pretuned.runtime.inspect import doctor, prove
from pretuned.runtime.inspect import survey as inspect_survey
from pretuned.runtime.inspect.doctor import report
from pretuned.runtime.inspect.survey import survey
from pretuned.runtime.settings import Settings

CHILD = prove.CHILD
PROBLEM = Problem(Op.FORWARD, SPECS[0].dtype, 8, 1024, 768)

Make = Callable[..., Snapshot]


@pytest.fixture
def made(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A bundle of so many variants, and children over which each is as it is told."""
    monkeypatch.setattr(inspect_survey, "unlaunchable", lambda variant: None)  # they have few arguments
    monkeypatch.setattr(verdicts, "_memory", verdicts._Memory())

    def make(*how: str) -> Snapshot:
        specs = [Spec(Config(16 << i % 4, 64 << i // 4, 64, 4, 3)) for i in range(len(how))]
        write(clean_places / "a.msgpack", {PROBLEM: [modelled(64, 0)]}, sm=80, specs=specs)
        monkeypatch.setattr(prove, "CHILD", (sys.executable, proving_child.__file__, *how))
        taken = Snapshot(places(clean_places))
        monkeypatch.setattr(current, "snapshot", taken)
        return taken

    return make


@pytest.mark.slow
def test_what_is_right_is_proven_and_not_again(made: Make) -> None:
    taken = made("right", "right", "right")
    assert len(survey(taken, ON_A100).left) == 3
    (found,) = prove.prove([ON_A100]).gpus
    assert (found.tested_before, found.passed, found.wrong) == (0, 3, ())
    assert survey(taken, ON_A100).left == ()
    made("die", "die", "die")  # nothing is run again
    assert prove.prove([ON_A100]).ok


@pytest.mark.slow
def test_what_is_wrong_or_faults_is_left_out_and_the_rest_goes_on(made: Make) -> None:
    taken = made("right", "wrong", "fault", "right")
    told = prove.prove([ON_A100])
    (found,) = told.gpus
    assert not told.ok
    assert (found.passed, found.untested) == (2, ())
    reasons = "y[0, 0] is 1, wanted 2", "CUDA error: an illegal memory access"
    assert len(found.wrong) == len(reasons)
    for line, reason in zip(found.wrong, reasons, strict=True):
        assert reason in line
        assert "Please file this line" in line
        assert f"wrong     {line}" in str(told)
    assert survey(taken, ON_A100).left == ()
    assert len(verdicts.left_out(ON_A100)) == 2


@pytest.mark.slow
def test_what_says_nothing_about_the_code_is_told_once_and_tried_again(made: Make, clean_places: Path) -> None:
    taken = made("right", "killed", "die", "exit", "right", "damaged", "broken", "broken", "right", "wrong")
    told = prove.prove([ON_A100])
    (found,) = told.gpus
    assert not told.ok
    assert found.passed == 3
    assert len(found.wrong) == 1
    assert sorted(found.untested) == [
        "1 kernel: its cubin is not what the index says",
        "1 kernel: the process that tested it ended by SIGKILL",
        "1 kernel: the process that tested it ended by SIGSEGV",
        "1 kernel: the process that tested it ended with exit code 7: it said nothing",
        "2 kernels: no room on the GPU",
    ]
    assert f"untested  {found.untested[0]}. Run this again to test them" in str(told)
    assert len(verdicts.left_out(ON_A100)) == 1
    assert [one.index for one in survey(taken, ON_A100).left] == [1, 2, 3, 5, 6, 7]
    made(*["right"] * 10)
    (found,) = prove.prove([ON_A100]).gpus
    assert (found.passed, found.untested) == (9, ())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["republished", "removed"])
def test_a_bundle_whose_file_goes_is_not_wrong(how: str, made: Make) -> None:
    taken = made("right", how, *["right"] * 8)
    (found,) = prove.prove([ON_A100]).gpus
    assert (found.passed, found.wrong) == (2, ())
    (line,) = found.untested
    assert line.startswith("8 kernels: ")
    assert "a.msgpack" in line
    assert verdicts.left_out(ON_A100) == ()
    assert len(survey(taken, ON_A100).left) == 8


@pytest.mark.slow
def test_a_gpu_that_a_process_can_not_use_any_more_costs_one_variant(made: Make) -> None:
    """Another process goes on."""
    made("right", "unusable", "right", "wrong", "right")
    (found,) = prove.prove([ON_A100]).gpus
    assert (found.passed, len(found.wrong)) == (3, 1)
    assert found.untested == ("1 kernel: the GPU can't be used: an uncorrectable ECC error",)
    made("right", *["unusable"] * 9, "right")  # four are known by now; after three processes it gives up
    (found,) = prove.prove([ON_A100]).gpus
    assert found.untested == ("7 kernels: the GPU can't be used: an uncorrectable ECC error",)


@pytest.mark.slow
def test_of_many_reasons_some_are_listed(made: Make) -> None:
    made(*[f"reason {i:02}" for i in range(14)], "reason 13", "right")
    (found,) = prove.prove([ON_A100]).gpus
    assert found.untested[:2] == ("2 kernels: reason 13", "1 kernel: reason 00")
    assert len(found.untested) == 11
    assert found.untested[-1] == "4 more, for other reasons"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_process_itself_without_a_gpu(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made("right", "right")
    monkeypatch.setattr(prove, "CHILD", CHILD)
    (found,) = prove.prove([ON_A100]).gpus
    (line,) = found.untested
    assert line.startswith("2 kernels: no CUDA driver")


@pytest.mark.slow
def test_where_every_process_is_killed_it_gives_up_and_nothing_is_wrong(made: Make) -> None:
    taken = made(*["killed"] * 12)
    (found,) = prove.prove([ON_A100]).gpus
    assert found.untested == ("12 kernels: the process that tested it ended by SIGKILL",)
    assert len(survey(taken, ON_A100).left) == 12


@pytest.mark.slow
def test_a_process_that_says_nothing_is_ended_and_its_variant_tested_again(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that hangs is a result of launch/trials.py; a process that hangs otherwise is none."""
    monkeypatch.setattr(prove, "SILENT_S", 6.0)
    monkeypatch.setattr(prove, "_END_S", 0.2)
    taken = made("right", "hang", "right")
    (found,) = prove.prove([ON_A100]).gpus
    assert (found.passed, found.wrong) == (2, ())
    assert found.untested == ("1 kernel: the process that tested it said nothing for 6 s",)
    assert [one.index for one in survey(taken, ON_A100).left] == [1]


@pytest.mark.slow
def test_a_process_that_was_stopped_does_not_hang(made: Make) -> None:
    """As a container that is paused."""
    taken = made("pause")
    (found,) = prove.prove([ON_A100]).gpus
    assert (found.passed, found.wrong, found.untested) == (1, (), ())
    assert survey(taken, ON_A100).left == ()


@pytest.mark.slow
def test_what_code_prints_is_no_verdict(made: Make) -> None:
    """It has the process's standard output, too; and 64 MiB without a line's end are not kept."""
    taken = made("forge", "flood", "right")
    tracemalloc.start()
    try:
        (found,) = prove.prove([ON_A100]).gpus
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert found.passed == 1
    assert ["it forged" in line for line in found.wrong] in ([True, False], [False, True])
    assert survey(taken, ON_A100).left == ()


def test_a_child_that_cannot_begin_proves_nothing(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made("right")
    monkeypatch.setattr(prove, "CHILD", (sys.executable, "-c", "raise SystemExit('no torch here')"))
    with pytest.raises(HostError, match="could not begin: no torch here"):
        prove.prove([ON_A100])
    monkeypatch.setattr(prove, "CHILD", ("/no/such/python",))
    with pytest.raises(HostError, match="can't start '/no/such/python'"):
        prove.prove([ON_A100])
    assert verdicts.left_out(ON_A100) == ()


def test_what_was_measured_elsewhere_on_the_capability_is_not_run(made: Make, clean_places: Path) -> None:
    specs = [Spec(Config(16, 64, 64, 4, 3)), Spec(Config(32, 64, 64, 4, 3))]
    made("right")
    write(clean_places / "a.msgpack", {PROBLEM: [measured(64, 0, 5)]}, sm=80, specs=specs, gpus=[A100])
    found = survey(Snapshot(places(clean_places)), ON_A100)
    assert found.tested == 1
    assert [one.index for one in found.left] == [1]


@pytest.mark.slow
def test_the_report_on_a_machine_says_what_is_left_and_what_is_wrong(made: Make) -> None:
    taken = made("right", "wrong")
    told = str(report(taken, Settings(), (ON_A100,), ""))
    assert "note      GPU 0: 2 kernels were never run on its capability; each is tested before its first use" in told
    prove.prove([ON_A100])
    found = report(taken, Settings(), (ON_A100,), "")
    assert found.ok  # other code, or torch, runs
    (note,) = found.notes
    assert note.startswith("GPU 0: pretuned: wrong on this GPU and left out")


@pytest.mark.slow
def test_the_command(made: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made("right", "wrong")
    monkeypatch.setattr(prove, "gpus_and_driver", lambda: ((ON_A100,), "CUDA 13.0"))
    assert command.main(["--self-test"]) == 1
    text = capsys.readouterr().out
    assert "passed    1 kernels, on this GPU" in text
    assert "ok        no" in text
    assert command.main(["--self-test", "--json"]) == 1
    (gpu,) = json.loads(capsys.readouterr().out)["gpus"]
    assert (gpu["passed"], len(gpu["wrong"])) == (1, 1)


def test_without_a_gpu_there_is_nothing_to_prove(
    clean_places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> None:
        raise CudaError("no CUDA driver")

    monkeypatch.setattr(prove, "gpus_and_driver", none)
    assert command.main(["--self-test"]) == 0
    assert "nothing to test" in capsys.readouterr().out
    assert doctor.examine().ok
