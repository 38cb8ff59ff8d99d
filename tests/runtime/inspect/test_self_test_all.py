"""All code of a GPU tested in child processes: what hangs, dies or is wrong is left out, and the rest goes on."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import emulated_kernels
import pytest
import torch
from emulated_driver import A100, EmulatedGpu, emulated

from pretuned.artifacts.errors import HostError
from pretuned.artifacts.records import Choice, DType, LocalGpu, Op, Problem, Source
from pretuned.kernels.spec import Config, Spec
from pretuned.runtime import __main__ as command
from pretuned.runtime import reload, self_test_results
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.dispatch.snapshot import Snapshot
from pretuned.runtime.inspect import doctor, self_test_all
from pretuned.runtime.inspect.doctor import report, survey
from pretuned.runtime.settings import Settings

ON_A100 = LocalGpu(80, A100)
PROBLEM = Problem(Op.FORWARD, DType.FP32, 8, 1024, 768)
SUPPORT = Path(__file__).parents[2] / "support"
CONFIGS = [Config(16 << i % 4, 64 << i // 4, 32, 4, 2) for i in range(6)]
# Errors name the config: those of two kernels beside each other are equal.
SPECS = [Spec(Op.FORWARD, DType.FP32, config, alignment=alignment) for config in CONFIGS for alignment in (16, 1)]

Make = Callable[..., Snapshot]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[EmulatedGpu]:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the emulated one is for machines without")
    with emulated(EmulatedGpu(A100, 80)) as gpu:
        yield gpu


@pytest.fixture
def make(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A bundle with a kernel for each argument, which misbehaves as it says on the emulated GPU of child processes.

    If ``scripted``, the processes do so themselves, without a GPU.
    """

    def make(*how: str | int, measured: bool = False, scripted: bool = False) -> Snapshot:
        variants = [emulated_kernels.variant_and_code(spec, 80, str(i)) for i, spec in enumerate(SPECS[: len(how)])]
        choice = Choice(64, 0, Source.MEASURED, 5000, gpu=0) if measured else Choice(64, 0, Source.MODELLED, 10_000)
        path = clean_places / "a.msgpack"
        emulated_kernels.write(path, variants, {PROBLEM: [choice]}, sm=80, gpus=[A100] if measured else [])
        faults = {variant.cubin_sha256.hex(): what for (variant, _), what in zip(variants, how, strict=True)}
        monkeypatch.setenv("EMULATED_FAULTS", json.dumps(faults))
        monkeypatch.setenv("EMULATED_BUNDLE", str(path))
        monkeypatch.setenv("SCRIPT", json.dumps(how))
        monkeypatch.setenv("PYTHONPATH", str(SUPPORT / ("scripted_child" if scripted else "emulated_child")))
        reload()
        return dispatch_snapshot.snapshot()

    return make


@pytest.mark.slow
def test_what_is_wrong_or_faults_is_left_out_and_the_rest_goes_on(make: Make) -> None:
    taken = make("right", "wrong", "fault", "right", "unusable", "right")
    assert len(survey(taken, ON_A100).left) == 6
    report = self_test_all.run([ON_A100])
    (gpu,) = report.gpus
    assert not report.ok
    assert (gpu.tested_before, gpu.passed) == (0, 3)
    assert gpu.untested == ("1 kernel: the GPU can't be used: CUDA error: an uncorrectable ECC error was encountered",)
    reasons = "wanted", "CUDA error: an illegal memory access"
    assert len(gpu.wrong) == len(reasons)
    for line, reason in zip(gpu.wrong, reasons, strict=True):
        assert reason in line
        assert "Please file this line" in line
        assert f"wrong     {line}" in str(report)
    assert [entry.index for entry in survey(taken, ON_A100).left] == [4]
    assert len(self_test_results.left_out(ON_A100)) == 2
    make("die", "die", "die", "die", "right", "die", scripted=True)  # what was tested is not run again
    (gpu,) = self_test_all.run([ON_A100]).gpus
    assert (gpu.passed, len(gpu.wrong), gpu.untested) == (4, 2, ())


@pytest.mark.slow
def test_what_says_nothing_about_the_code_is_reported_once_and_tried_again(make: Make) -> None:
    taken = make("right", "killed", "die", "exit", "broken", "broken", "right", "right", "wrong", scripted=True)
    report = self_test_all.run([ON_A100])
    (gpu,) = report.gpus
    assert not report.ok
    assert gpu.passed == 3
    assert len(gpu.wrong) == 1
    assert sorted(gpu.untested, reverse=True) == [
        "2 kernels: no room on the GPU",
        "1 kernel: the process that tested it ended with exit code 7: it said nothing",
        "1 kernel: the process that tested it ended by SIGSEGV",
        "1 kernel: the process that tested it ended by SIGKILL",
    ]
    assert f"untested  {gpu.untested[0]}. Run this again to test them" in str(report)
    assert len(self_test_results.left_out(ON_A100)) == 1
    assert [entry.index for entry in survey(taken, ON_A100).left] == [1, 2, 3, 4, 5]
    make(*["right"] * 9, scripted=True)
    (gpu,) = self_test_all.run([ON_A100]).gpus
    assert (gpu.passed, gpu.untested) == (8, ())


@pytest.mark.slow
def test_a_kernel_whose_code_is_damaged_is_not_wrong(make: Make, clean_places: Path) -> None:
    taken = make("right", "right")
    path = clean_places / "a.msgpack"
    data, (_, image) = path.read_bytes(), emulated_kernels.variant_and_code(SPECS[1], 80, "1")
    assert image in data
    path.write_bytes(data.replace(image, image[:-1] + b"?"))
    (gpu,) = self_test_all.run([ON_A100]).gpus
    assert (gpu.passed, gpu.wrong) == (1, ())
    (line,) = gpu.untested
    assert line.startswith("1 kernel: bundle ")
    assert self_test_results.left_out(ON_A100) == ()
    assert [entry.index for entry in survey(taken, ON_A100).left] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["republished", "removed"])
def test_a_bundle_whose_file_goes_is_not_wrong(how: str, make: Make) -> None:
    taken = make("right", how, *["right"] * 8)
    (gpu,) = self_test_all.run([ON_A100]).gpus
    assert (gpu.passed, gpu.wrong) == (2, ())
    (line,) = gpu.untested
    assert line.startswith("8 kernels: ")
    assert "a.msgpack" in line
    assert self_test_results.left_out(ON_A100) == ()
    assert len(survey(taken, ON_A100).left) == 8


@pytest.mark.slow
def test_of_many_reasons_some_are_listed(make: Make) -> None:
    make(300, 300, *range(301, 311))  # CUDA's errors of launches
    (gpu,) = self_test_all.run([ON_A100]).gpus
    assert gpu.untested[0].startswith("2 kernels: cuLaunchKernelEx")
    assert "CUDA error 300" in gpu.untested[0]
    assert "CUDA error 301" in gpu.untested[1]
    assert len(gpu.untested) == 11
    assert gpu.untested[-1] == "1 more, for other reasons"


@pytest.mark.slow
def test_the_process_itself_without_a_gpu(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make("right", "right")
    monkeypatch.delenv("PYTHONPATH")
    (gpu,) = self_test_all.run([ON_A100]).gpus
    (line,) = gpu.untested
    assert line.startswith("2 kernels: no CUDA driver")


@pytest.mark.slow
def test_where_three_processes_are_killed_it_gives_up_and_nothing_is_wrong(make: Make) -> None:
    taken = make(*["killed"] * 3, *["right"] * 3, scripted=True)
    (gpu,) = self_test_all.run([ON_A100]).gpus
    assert gpu.untested == ("6 kernels: the process that tested it ended by SIGKILL",)
    assert len(survey(taken, ON_A100).left) == 6


@pytest.mark.slow
def test_a_process_that_says_nothing_is_ended_and_its_variant_tested_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that hangs is a result of launch/self_test_problems.py; a process that hangs otherwise is none."""
    monkeypatch.setattr(self_test_all, "SILENT_S", 10.0)  # of five minutes
    monkeypatch.setattr(self_test_all, "_END_S", 0.2)
    taken = make("right", "hang", "right", scripted=True)
    (gpu,) = self_test_all.run([ON_A100]).gpus
    assert (gpu.passed, gpu.wrong) == (2, ())
    assert gpu.untested == ("1 kernel: the process that tested it said nothing for 10 s",)
    assert [entry.index for entry in survey(taken, ON_A100).left] == [1]


@pytest.mark.slow
def test_what_code_prints_is_no_verdict_and_a_pause_no_hang(make: Make) -> None:
    """It has the process's standard output, too; and 64 MiB without a line's end are not kept.

    A process is stopped where its container is paused.
    """
    taken = make("pause", "forge", "flood", "right")
    assert len(survey(taken, ON_A100).left) == 4  # what ships was unpacked
    tracemalloc.start()
    try:
        (gpu,) = self_test_all.run([ON_A100]).gpus
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert (gpu.passed, gpu.untested) == (2, ())
    assert ["wanted" in line for line in gpu.wrong] in ([True, False], [False, True])
    assert survey(taken, ON_A100).left == ()


def test_a_child_that_cannot_begin_proves_nothing(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make("right")
    (tmp_path / "sitecustomize.py").write_text("import os\nos.write(2, b'no torch here')\nos._exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(HostError, match="could not begin: no torch here"):
        self_test_all.run([ON_A100])
    monkeypatch.setenv("TOO_LONG", "x" * (1 << 20))  # for an environment of Linux
    with pytest.raises(HostError, match=f"can't start '{sys.executable}': Argument list too long"):
        self_test_all.run([ON_A100])
    assert self_test_results.left_out(ON_A100) == ()


def test_what_was_measured_elsewhere_on_the_capability_is_not_run(make: Make) -> None:
    surveyed = survey(make("right", "right", measured=True), ON_A100)
    assert surveyed.tested == 1
    assert [entry.index for entry in surveyed.left] == [1]


@pytest.mark.slow
def test_the_report_and_the_command(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    taken = make("right", "wrong")
    message = str(report(taken, Settings(), (ON_A100,), ""))
    assert "note      GPU 0: 2 kernels were never run on its capability; each is tested before its first use" in message
    assert command.main(["--self-test"]) == 1
    text = capsys.readouterr().out
    assert "passed    1 kernels, on this GPU" in text
    assert "ok        no" in text
    assert command.main(["--self-test", "--json"]) == 1
    (gpu,) = json.loads(capsys.readouterr().out)["gpus"]
    assert (gpu["passed"], len(gpu["wrong"])) == (1, 1)
    doctor_report = report(taken, Settings(), (ON_A100,), "")
    assert doctor_report.ok  # other code, or torch, runs
    assert doctor_report.notes[0].startswith("GPU 0: pretuned: wrong on this GPU and left out")


@pytest.mark.parametrize("driver", ["none", "no GPU"])
def test_without_a_gpu_there_is_nothing_to_prove(
    driver: str, clean_places: Path, gpu: EmulatedGpu, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.count = 0
    if driver == "none":
        gpu.fails["cuInit"] = 100
    assert command.main(["--self-test"]) == 0
    assert "nothing to test" in capsys.readouterr().out
    assert doctor.examine().ok
