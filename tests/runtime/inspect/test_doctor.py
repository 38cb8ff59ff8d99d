"""The report on a machine, and its command."""

from __future__ import annotations

import errno
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import craft
import pytest
import torch
import warm
from small_bundles import H200, ON_A100, ON_H200, OTHER, PROBLEM, WIDE, bundle, measured, modelled, snapshot, write

from pretuned.artifacts.codec import encode
from pretuned.artifacts.packed import pack
from pretuned.artifacts.records import Gpu, LocalGpu
from pretuned.runtime import __main__ as command
from pretuned.runtime.dispatch.places import candidates_name
from pretuned.runtime.inspect.doctor import report
from pretuned.runtime.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
READ = Settings(overlay=Path("/home/me/.cache/pretuned"))


def test_a_machine_that_would_use_a_bundle(tmp_path: Path) -> None:
    write(tmp_path / "sm90.msgpack", {PROBLEM: [measured(64, WIDE, 5)]}, gpus=[H200])
    write(tmp_path / "sm80.msgpack", {PROBLEM: [modelled(64, WIDE)], OTHER: [modelled(64, WIDE)]}, sm=80)
    doctor_report = report(snapshot(tmp_path), READ, (ON_H200,), "CUDA 12.8")
    assert doctor_report.ok
    text = str(doctor_report)
    for wanted in (
        "NVIDIA H200 (9.0, 132 SMs",
        "sm90.msgpack (sm_90a, 1 problems, 3 variants, measured on",
        "used by GPU 0",
        "not used, as no GPU here is of that capability: sm80.msgpack (sm_80)\n",
        "/home/me/.cache/pretuned",
        "2 bundles",
        "ok        yes",
    ):
        assert wanted in text
    plain = json.loads(json.dumps(doctor_report.to_dict()))
    assert plain["ok"] is True
    assert [bundle["used_by"] for bundle in plain["bundles"]] == [[], [0]]


def test_without_a_gpu_each_bundle_has_a_line(tmp_path: Path) -> None:
    write(tmp_path / "sm90.msgpack", {PROBLEM: [measured(64, WIDE, 5)]}, gpus=[H200])
    text = str(report(snapshot(tmp_path), READ, (), "none"))
    (line,) = [line for line in text.splitlines() if "sm90.msgpack" in line]
    assert line.endswith("(sm_90a, 1 problems, 3 variants, measured on NVIDIA H200)")
    assert "not used" not in text


def test_places_are_listed_in_json(tmp_path: Path) -> None:
    write(tmp_path / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    plain = report(snapshot(tmp_path), READ, (), "none").to_dict()
    assert plain["search_path"][0] == {"place": f"{tmp_path} (PRETUNED_BUNDLES)", "bundles": 1}


def test_the_version() -> None:
    command = [sys.executable, "-m", "pretuned.runtime", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"pretuned {metadata.version('pretuned')}\n"


@pytest.mark.slow  # processes that import torch
@pytest.mark.parametrize("wait_s", [0.0, 0.1])
def test_an_interrupt_shows_no_traceback(wait_s: float) -> None:
    command = [sys.executable, "-m", "pretuned.runtime"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    time.sleep(wait_s)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    ended = (0, "") if wait_s else None  # on a fast machine it has said all by then
    assert (process.returncode, err) in ((130, "interrupted\n"), ended), (out, err)


def test_the_candidates_that_a_gpu_runs_or_skips(tmp_path: Path) -> None:
    write(tmp_path / "a" / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]}, sm=80)
    path = tmp_path / "a" / candidates_name(80)
    path.write_bytes(pack(encode(bundle({}, sm=80, tag="candidates"))))
    doctor_report = report(snapshot(installed=[tmp_path / "a"]), READ, (ON_A100,), "CUDA 12.8")
    assert f"GPU 0: calls that no bundle has a kernel for run from the candidates in {path}" in doctor_report.notes
    path.write_bytes(b"junk")
    doctor_report = report(snapshot(installed=[tmp_path / "a"]), READ, (ON_A100,), "CUDA 12.8")
    (note,) = [note for note in doctor_report.notes if "candidates are skipped" in note]
    assert str(path) in note
    assert doctor_report.ok


@pytest.mark.parametrize(
    ("local", "how", "fix"),
    [
        (ON_A100, {}, "aot build --models models.txt --sm 80"),
        (LocalGpu(90, Gpu("NVIDIA H200", 132, 143771, 12000)), {}, "Update the driver"),
        (LocalGpu(75, Gpu("NVIDIA T4", 40, 15360, 12080)), {}, "No kernels are built for sm_75"),
    ],
)
def test_a_machine_that_would_not_and_the_fix(
    local: LocalGpu, how: dict[str, object], fix: str, tmp_path: Path
) -> None:
    write(tmp_path / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]}, **how)
    doctor_report = report(snapshot(tmp_path), READ, (local,), "CUDA 12.8")
    assert not doctor_report.ok
    (problem,) = doctor_report.problems
    assert fix in problem
    assert f"problem   {problem}" in str(doctor_report)
    assert doctor_report.to_dict()["ok"] is False


@pytest.mark.parametrize("gpus", [(), (ON_H200,)])
def test_a_named_file_that_is_missing(gpus: tuple[LocalGpu, ...], tmp_path: Path) -> None:
    write(tmp_path / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    doctor_report = report(snapshot(tmp_path / "gone.msgpack", tmp_path), READ, gpus, "CUDA 12.8")
    assert not doctor_report.ok
    (problem,) = doctor_report.problems
    assert "gone.msgpack" in problem
    assert "No such file" in problem
    assert "PRETUNED_BUNDLES names this file" in problem


def test_a_damaged_bundle(tmp_path: Path) -> None:
    (tmp_path / "bad.msgpack").write_bytes(b"nothing")
    doctor_report = report(snapshot(tmp_path), READ, (ON_H200,), "CUDA 12.8")
    assert not doctor_report.ok
    assert "can't be opened" in doctor_report.problems[0]
    assert doctor_report.bundles[0].why_not in str(doctor_report)
    assert "bad.msgpack" in doctor_report.bundles[0].why_not


def test_a_bundle_that_is_cut_off_ends_the_command(clean_places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And so the build of an image: tests/test_dockerfile.py."""
    path = write(clean_places / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    path.write_bytes(path.read_bytes()[:-1])
    assert command.main([]) == 1
    assert "ok        no" in capsys.readouterr().out


def test_a_damaged_bundle_for_another_gpu_is_reported_too(tmp_path: Path) -> None:
    write(tmp_path / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    path = write(tmp_path / "sm80.msgpack", {PROBLEM: [modelled(64, WIDE)]}, sm=80)
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    doctor_report = report(snapshot(tmp_path), READ, (ON_H200,), "CUDA 12.8")
    assert doctor_report.ok
    assert "header and index have sha256" in doctor_report.bundles[0].why_not


def test_a_bundle_with_a_damaged_record_is_reported(tmp_path: Path) -> None:
    """Under a right digest: what wrote it is broken."""
    path = write(tmp_path / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    (choices,) = craft.parts(path.read_bytes())[0]["problems"].values()
    path.write_bytes(craft.changed(path.read_bytes(), problems={b"\x90": choices}))
    doctor_report = report(snapshot(tmp_path), READ, (ON_H200,), "CUDA 12.8")
    assert not doctor_report.ok
    assert "problem 0: problem has 0 items" in doctor_report.bundles[0].why_not
    assert "problem 0: problem has 0 items" in doctor_report.problems[0]


def test_a_named_file_that_cannot_be_used_is_a_problem_beside_a_good_one(tmp_path: Path) -> None:
    good = write(tmp_path / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    other = write(tmp_path / "sm80.msgpack", {PROBLEM: [modelled(64, WIDE)]}, sm=80)
    assert report(snapshot(good), READ, (ON_H200,), "").ok
    doctor_report = report(snapshot(good, other), READ, (ON_H200,), "")
    assert not doctor_report.ok
    assert "sm80.msgpack" in doctor_report.problems[0]


@pytest.mark.parametrize("gpus", [(), (ON_H200,)])
def test_a_named_directory_of_which_nothing_can_be_opened(gpus: tuple[LocalGpu, ...], tmp_path: Path) -> None:
    pointer = tmp_path / "named" / "sm90.msgpack"
    pointer.parent.mkdir()
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 5200000\n")
    write(tmp_path / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    doctor_report = report(snapshot(pointer.parent, tmp_path), READ, gpus, "CUDA 12.8")
    assert not doctor_report.ok
    assert "PRETUNED_BUNDLES names" in doctor_report.problems[0]
    assert "it is a Git LFS pointer, not the bundle itself. Get that with: git lfs pull" in doctor_report.problems[0]


def test_a_named_directory_that_others_can_write(tmp_path: Path) -> None:
    """Without a GPU too: a container is checked where it is made."""
    named = tmp_path / "named"
    write(named / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    named.chmod(0o777)
    doctor_report = report(snapshot(named), READ, (), "CUDA 12.8")
    assert not doctor_report.ok
    assert f"everybody can write it. Move the bundle, or run: chmod go-w {named}" in doctor_report.problems[0]


def test_a_named_directory_of_which_one_file_is_refused(tmp_path: Path) -> None:
    """A named file is wanted: a file that a stranger can write, or that root alone can read, is reported."""
    write(tmp_path / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    other = write(tmp_path / "other.msgpack", {OTHER: [modelled(64, WIDE)]})
    other.chmod(0o666)
    doctor_report = report(snapshot(tmp_path), READ, (ON_H200,), "CUDA 12.8")
    assert not doctor_report.ok
    assert f"Move the bundle, or run: chmod go-w {other}" in doctor_report.problems[0]


def test_a_named_directory_that_can_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("os.listdir", denied)  # root lists every directory
    doctor_report = report(snapshot(tmp_path), READ, (), "CUDA 12.8")
    assert not doctor_report.ok
    assert f"PRETUNED_BUNDLES names {tmp_path}, which can't be listed: Permission denied" in doctor_report.problems[0]


def test_one_gpu_of_two_without_a_bundle(tmp_path: Path) -> None:
    write(tmp_path / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    doctor_report = report(snapshot(tmp_path), READ, (ON_H200, ON_A100), "")
    assert doctor_report.bundles[0].used_by == (0,)
    assert len(doctor_report.problems) == 1
    assert doctor_report.problems[0].startswith("GPU 1, NVIDIA A100")


def test_very_many_names_cost_what_each_costs(tmp_path: Path) -> None:
    """PRETUNED_BUNDLES may hold many names: the cost is linear, not each compared with each other."""
    named = [tmp_path / f"{i}.msgpack" for i in range(4000)]
    bundle_set = snapshot(*named)
    bundle_set.files(installed=True)
    began = time.process_time()
    text = str(report(bundle_set, READ, (), "CUDA 12.8"))
    assert time.process_time() - began < 15
    assert text.count("PRETUNED_BUNDLES names this file") == 4000


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "pretuned.runtime", *arguments], env={"PATH": os.environ["PATH"], **environment})


@pytest.mark.slow  # a process that imports torch
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_command_without_a_gpu(tmp_path: Path) -> None:
    write(tmp_path / "sm90.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    done = run({"PRETUNED_BUNDLES": str(tmp_path), "PRETUNED_STRICT": "1"}, "--json")
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout)
    assert plain["gpus"] == []
    assert plain["environment"]["PRETUNED_STRICT"] == "1"
    assert plain["overlay"] == "none: no absolute path in XDG_CACHE_HOME or HOME"
    assert Path(plain["bundles"][0]["path"]).name == "sm90.msgpack"  # then those that ship
    assert any("no GPU here" in note for note in plain["notes"])
    assert run({}, "--nonsense").returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_command_among_packages_that_end_a_process(tmp_path: Path) -> None:
    (tmp_path / "bad-1.0.dist-info").mkdir()
    (tmp_path / "bad-1.0.dist-info" / "entry_points.txt").write_text("[pretuned.bundles]\nbad = leaves.bundles\n")
    (tmp_path / "leaves").mkdir()
    (tmp_path / "leaves" / "__init__.py").write_text("import sys; sys.exit(7)")
    done = run({"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "bad = leaves.bundles can't be found: 7" in done.stderr
    assert "ok        yes" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], pytest.param(["--json"], marks=pytest.mark.nightly)], ids=" ".join)
def test_a_reader_that_has_left(tmp_path: Path, arguments: list[str]) -> None:
    """``python -m pretuned.runtime --json | head -5`` prints no error and exits with the code of SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "pretuned.runtime", *arguments]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "unbuffered", ["", pytest.param("1", marks=pytest.mark.nightly)], ids=["buffered", "unbuffered"]
)
def test_an_output_that_is_full(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "pretuned.runtime"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (1, "pretuned: can't write the output: No space left on device\n")


INTEGRATIONS = "integrations", "runtime/integrations"  # a package's name, and its folder


@pytest.mark.slow  # two processes
def test_a_clone_that_was_pulled_after_it_was_installed(tmp_path: Path) -> None:
    """The bundles that it holds compressed are read, not what an earlier commit's were unpacked to."""
    package = tmp_path / "site" / "pretuned"
    for name, layer in (*((name, name) for name in ("artifacts", "kernels", "runtime")), INTEGRATIONS):
        for path in (ROOT / layer).rglob("*.py"):
            target = package / name / path.relative_to(ROOT / layer)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (package / "__init__.py").write_bytes((ROOT / "package/__init__.py").read_bytes())
    unpacked, compressed = package / "artifacts/bundles", package / "artifacts/pressed"
    compressed.mkdir()

    def hold(name: str, tag: str, *, unpack: bool) -> None:
        data = encode(bundle({PROBLEM: [modelled(64, WIDE)]}, tag=tag))
        (compressed / f"{name}.msgpack.xz").write_bytes(lzma.compress(data))
        if unpack:
            (unpacked / f"{name}.msgpack").write_bytes(data)

    def look() -> tuple[list[str], list[str], str]:
        environment = os.environ | {"PYTHONPATH": str(package.parent), "HOME": str(tmp_path), "PRETUNED_BUNDLES": ""}
        done = warm.run(["-m", "pretuned.runtime", "--json"], env=environment, cwd=tmp_path)
        report = json.loads(done.stdout)
        paths = [Path(bundle["path"]) for bundle in report["bundles"] if bundle["place"].startswith(str(unpacked))]
        assert all(bundle["variants"] == 3 for bundle in report["bundles"])
        return [str(path.relative_to(package / "artifacts")) for path in paths], report["notes"], done.stderr

    for name in ("changed", "gone", "same"):
        hold(name, f"first {name}", unpack=True)
    paths, notes, said = look()
    assert paths == ["bundles/changed.msgpack", "bundles/gone.msgpack", "bundles/same.msgpack"]
    assert "pip install -e" not in said + "".join(notes)
    hold("changed", "second", unpack=False)
    hold("new", "second", unpack=False)
    (compressed / "gone.msgpack.xz").unlink()
    paths, notes, said = look()
    assert paths == ["pressed/changed.msgpack.xz", "pressed/new.msgpack.xz", "bundles/same.msgpack"]
    assert "unpacked bundles are not those of this clone, the compressed ones are read. Run: pip install -e ." in notes
    assert "pretuned: changed.msgpack in " in said
    assert "takes longer. Run: pip install -e ." in said
    assert f"gone.msgpack in {unpacked}: not used: this clone holds no such bundle in {compressed}" in said
