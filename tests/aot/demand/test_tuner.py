"""Tuning on demand: the order of what is asked, one tuner among many processes, and faults that cost no run.

What a GPU would measure is made up (fakemeasure.py); locks, files, processes and the runtime are real.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakemeasure
import pytest
import torch
import warm
from fakemeasure import CONFIG, H100, H200, ON_H200
from steps import steps

import pretuned.aot
from pretuned.aot.demand import api, tuner
from pretuned.aot.demand.api import key_for
from pretuned.aot.demand.tuner import CacheKey, OnDemand
from pretuned.artifacts import codec
from pretuned.artifacts.errors import HostError, InputError, ProblemNotInBundle
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import DType, Fusion, LocalGpu, Op, Problem
from pretuned.kernels.registry import ENTRIES
from pretuned.kernels.spec import Config, Loads, Schedule
from pretuned.runtime import ExpertWeights, grouped_gemm, reload
from pretuned.runtime.config_cache import MAX_FILES
from pretuned.runtime.dispatch import snapshot
from pretuned.runtime.dispatch.pin import KernelPair, Preference

ASK = Path(__file__).parents[2] / "support" / "askconfigs.py"
OTHER = Config(128, 128, 64, 8, 3, loads=Loads.TMA)
DECIDED = str(CONFIG)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty home and directory of bundles; returns the overlay."""
    (tmp_path / "bundles").mkdir()
    for name in ("PRETUNED_STRICT", "PRETUNED_DISABLE_AUTOTUNE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PRETUNED_BUNDLES", str(tmp_path / "bundles"))
    snapshot.forget_made()
    reload()
    yield tmp_path / ".cache" / "pretuned"
    monkeypatch.undo()
    snapshot.forget_made()
    reload()


def key(seq_len: int = 64, E: int = 8, local: LocalGpu = ON_H200) -> CacheKey:
    return key_for(local, E, 256, 128, 2, torch.bfloat16, seq_len)


def ship(home: Path, seq_len: int = 64, **how: Any) -> None:
    """Put a bundle for ``key()``'s layer where PRETUNED_BUNDLES looks."""
    planned = tuner.planned_for(key(seq_len), tuner.shape_of(key(seq_len)))
    bundle = fakemeasure.bundle(planned, **{"config": OTHER, **how})
    publish(home.parent.parent / "bundles" / "shipped.msgpack", codec.encode(bundle))
    reload()


def chosen(configs: tuner.Configs) -> set[Config | None]:
    return {half.config for pair in configs for half in (pair.first, pair.second)}


def test_it_tunes_once_and_keeps_it(home: Path, tmp_path: Path) -> None:
    asked = fakemeasure.on_demand(tmp_path / "log")
    first = asked.configs(key(), 0, force=False)
    assert [pair.op for pair in first] == [Op.FORWARD, Op.DX, Op.DW]
    assert chosen(first) == {CONFIG}
    assert [fusion for fusion, _ in first[0].first.configs] == [Fusion.NONE, Fusion.GATHER]
    assert [fusion for fusion, _ in first[0].second.configs] == [Fusion.NONE, Fusion.SCATTER]
    assert asked.configs(key(), 0, force=False) == first
    assert fakemeasure.on_demand(tmp_path / "log").configs(key(), 0, force=False) == first  # from the file
    for path in (home / "configs").iterdir():
        path.unlink()
    assert fakemeasure.on_demand(tmp_path / "log").configs(key(), 0, force=False) == first  # from the overlay
    assert len((tmp_path / "log").read_text().splitlines()) == 1


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_while_another_thread_tunes_leaves_what_is_known(home: Path, tmp_path: Path) -> None:
    asked = fakemeasure.on_demand(tmp_path / "log")
    configs = asked.configs(key(), 0, force=False)
    begun, go_on, measure = threading.Event(), threading.Event(), asked._measure

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return measure(*args)

    asked._measure = slow
    tuning = threading.Thread(target=asked.configs, args=(key(128), 0), kwargs={"force": False}, daemon=True)
    tuning.start()
    assert begun.wait(60)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        os._exit(0 if asked.configs(key(), 0, force=False) == configs else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        go_on.set()
        tuning.join(60)
    assert not tuning.is_alive()


def test_every_part_of_the_key_counts(home: Path, tmp_path: Path) -> None:
    asked = fakemeasure.on_demand(tmp_path / "log")
    for layer_key in (key(), key(128), key(E=16), key_for(ON_H200, 8, 256, 128, 4, "bf16", 64)):
        asked.configs(layer_key, 0, force=False)
        asked.configs(layer_key, 0, force=False)
    assert len((tmp_path / "log").read_text().splitlines()) == 3  # 64 tokens x 4 are the rows of 128 x 2: measured
    assert key(46) == key(64) == key(90)
    assert key(64) not in (key(45), key(91))
    assert key(local=LocalGpu(90, H100)) != key()


def test_a_later_kernel_revision_tunes_again(home: Path, tmp_path: Path) -> None:
    ship(home, revision=0)
    fakemeasure.on_demand(tmp_path / "log").configs(key(), 0, force=False)
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert dict(key().kernels) == {name: entry.revision for name, entry in ENTRIES.items()}


@pytest.mark.parametrize(
    ("weights", "H", "forms", "schedules"),
    [
        ("mxfp4", 256, [[Fusion.NONE, Fusion.SCATTER]] * 2, {Schedule.W4A16}),
        ("int4_g128_zp", 256, [[Fusion.NONE, Fusion.SCATTER]] * 2, {Schedule.W4A16}),
        ("mxfp4", 224, [[Fusion.NONE, Fusion.GATHER], [Fusion.NONE, Fusion.SCATTER]], {Schedule.TILE}),  # no blocks
        ("fp8_block", 256, [[Fusion.NONE, Fusion.SCATTER]] * 2, {Schedule.W4A16}),  # few rows: x stays as it is
    ],
)
def test_a_layer_of_quantised_weights(
    home: Path, tmp_path: Path, weights: str, H: int, forms: list[list[Fusion]], schedules: set[Schedule]
) -> None:
    """Its forward, rows gathered on load where a kernel does so, and dX; they are frozen, so there is no dW."""
    asked = fakemeasure.on_demand(tmp_path / "log")
    layer = key_for(ON_H200, 8, H, 128, 2, "bf16", 64, weights)
    forward, dX, dW = asked.configs(layer, 0, force=False)
    for half, wanted in zip((forward.first, forward.second), forms, strict=True):
        assert [fusion for fusion, _ in half.configs] == wanted
        assert {config.schedule for _, config in half.configs} == schedules
    assert [fusion for fusion, _ in dX.first.configs] == [Fusion.NONE, Fusion.SCATTER]
    assert dW == KernelPair(Op.DW)
    assert fakemeasure.on_demand(tmp_path / "log").configs(layer, 0, force=False) == (forward, dX, dW)  # from the file
    for path in (home / "configs").iterdir():
        path.unlink()
    assert fakemeasure.on_demand(tmp_path / "log").configs(layer, 0, force=False) == (forward, dX, dW)  # the overlay
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    w = ExpertWeights.quantize(torch.randn(8, 256, H), weights)
    assert key_for(ON_H200, 8, H, 128, 2, torch.bfloat16, 64, w) == layer
    assert key_for(ON_H200, 8, 256, 128, 2, "bf16", 64, "bf16") == key() != layer


def test_of_fp8_blocks_the_configs_are_those_of_the_product_that_runs(home: Path, tmp_path: Path) -> None:
    layer = key_for(ON_H200, 8, 256, 128, 2, "bf16", 64, "fp8_block")
    forward, dX, _ = fakemeasure.on_demand(tmp_path / "log", plain_ns=50_000).configs(layer, 0, force=False)
    assert [config.schedule for _, config in forward.first.configs] == [Schedule.W8A8_BLOCK] * 2
    assert Schedule.W8A8_BLOCK not in {config.schedule for _, config in dX.first.configs}


def test_what_a_bundle_measured_on_this_very_gpu_is_a_hit(home: Path, tmp_path: Path) -> None:
    ship(home)
    configs = fakemeasure.on_demand(tmp_path / "log").configs(key(), 0, force=False)
    assert chosen(configs) == {OTHER}
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    "how", [{"gpu": H100}, {"modelled": True}, {"seq_len": 128}], ids=["another GPU", "modelled", "another bucket"]
)
def test_anything_else_is_not(home: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    ship(home, **how)
    assert chosen(fakemeasure.on_demand(tmp_path / "log").configs(key(), 0, force=False)) == {CONFIG}
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_force_measures_again(home: Path, tmp_path: Path) -> None:
    fakemeasure.on_demand(tmp_path / "log").configs(key(), 0, force=False)
    again = fakemeasure.on_demand(tmp_path / "log", config=OTHER)
    assert chosen(again.configs(key(), 0, force=False)) == {CONFIG}
    assert chosen(again.configs(key(), 0, force=True)) == {OTHER}
    assert chosen(fakemeasure.on_demand(tmp_path / "log").configs(key(), 0, force=False)) == {OTHER}
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_force_measures_again_whatever_the_clock_says(home: Path, tmp_path: Path) -> None:
    """A file of a time to come, as from a machine whose clock is ahead, is not one that was written meanwhile."""
    fakemeasure.on_demand(tmp_path / "log").configs(key(), 0, force=False)
    os.utime(tuner.path_of(home, 90, H200), (time.time() + 86400,) * 2)
    again = fakemeasure.on_demand(tmp_path / "log", config=OTHER)
    assert chosen(again.configs(key(), 0, force=True)) == {OTHER}


def test_what_can_not_be_measured_is_not_tried_by_every_process(home: Path, tmp_path: Path) -> None:
    for _ in range(2):
        configs = fakemeasure.on_demand(tmp_path / "log", modelled=True).configs(key(), 0, force=False)
        assert chosen(configs) == {CONFIG}  # the overlay's modelled choice
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert not list((home / "configs").glob("*"))


def test_disabled_it_neither_measures_nor_writes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ship(home, modelled=True)
    monkeypatch.setenv("PRETUNED_DISABLE_AUTOTUNE", "1")
    reload()
    asked = fakemeasure.on_demand(tmp_path / "log")
    for force in (False, True):
        assert chosen(asked.configs(key(), 0, force=force)) == {OTHER}
    asked.tune_call((Problem(Op.FORWARD, DType.BF16, 8, 1, 1),), 1, 0)
    asked.save(key(), *asked.configs(key(), 0, force=False))
    assert not (tmp_path / "log").exists()
    assert not home.exists()


def test_without_any_bundle_torch_is_the_ordinary_choice(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_fp32 = key_for(ON_H200, 8, 256, 128, 2, torch.float32, 64)  # which nothing ships for
    monkeypatch.setenv("PRETUNED_DISABLE_AUTOTUNE", "1")
    reload()
    assert chosen(fakemeasure.on_demand(tmp_path / "log").configs(of_fp32, 0, force=False)) == {None}
    monkeypatch.setenv("PRETUNED_STRICT", "1")
    reload()
    with pytest.raises(ProblemNotInBundle, match="Build one with: aot build"):
        fakemeasure.on_demand(tmp_path / "log").configs(of_fp32, 0, force=False)


def test_a_failed_measurement_costs_no_run(home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ship(home, modelled=True)

    def fails(planned: object, sm: int, device: int) -> object:
        raise HostError("the GPU is out of memory")

    asked = OnDemand(fails, lambda device: ON_H200)  # type: ignore[arg-type]
    for _ in range(3):
        assert chosen(asked.configs(key(), 0, force=False)) == {OTHER}
    assert caplog.text.count("the GPU is out of memory") == 1  # not tried by every call
    asked.configs(key(), 0, force=True)
    assert caplog.text.count("the GPU is out of memory") == 2
    assert not (home / "configs").exists()


def test_a_call_with_autotune_is_tuned_once(home: Path, tmp_path: Path) -> None:
    asked = fakemeasure.on_demand(tmp_path / "log")
    problems = tuple(Problem(op, DType.BF16, 8, 256, 128) for op in Op)
    for M in (100, 128, 65):
        asked.tune_call(problems, M, 0)
    asked.tune_call(problems, 129, 0)
    fakemeasure.on_demand(tmp_path / "log").tune_call(problems, 128, 0)
    assert len((tmp_path / "log").read_text().splitlines()) == 2
    assert steps(lambda: asked.tune_call(problems, 128, 0)) < 100  # 36 where this was written


def test_importing_the_package_registers_its_tuner_and_compiler() -> None:
    code = (
        "import sys, pretuned.aot; from pretuned.runtime import hooks; "
        "assert hooks._tuner is pretuned.aot._tune and hooks._compiler is pretuned.aot._compile; "
        "print([name for name in ('torch', 'triton', 'click', 'rich', 'pebble') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert all(callable(getattr(pretuned.aot, name)) for name in pretuned.aot.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tune_everything'"):
        pretuned.aot.tune_everything  # noqa: B018


def ask(home: Path, log: Path, *more: str, env: dict[str, str] | None = None) -> warm.Program:
    env = {**os.environ, "HOME": str(home.parent.parent), "PRETUNED_BUNDLES": "", **(env or {})}
    return warm.Program([ASK, log, *more], env=env)


def answer(program: warm.Program) -> object:
    done = program.wait(120)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


@pytest.mark.slow
def test_eight_processes_at_once_tune_once(home: Path, tmp_path: Path) -> None:
    asking = [ask(home, tmp_path / "log", "1.0") for _ in range(8)]
    answers = [answer(process) for process in asking]
    assert answers == [[(op, DECIDED, DECIDED) for op in ("forward", "dX", "dW")]] * 8
    assert len((tmp_path / "log").read_text().splitlines()) == 1


@pytest.mark.slow
def test_force_takes_what_another_process_measured_meanwhile(home: Path, tmp_path: Path) -> None:
    fakemeasure.on_demand(tmp_path / "log", config=OTHER).configs(key(), 0, force=False)
    first = ask(home, tmp_path / "second log", "1.5", "", "force")
    while not (tmp_path / "second log").exists():
        time.sleep(0.02)
    asked = fakemeasure.on_demand(tmp_path / "log", config=OTHER)
    assert chosen(asked.configs(key(), 0, force=True)) == {CONFIG}
    assert answer(first) == [(op, DECIDED, DECIDED) for op in ("forward", "dX", "dW")]
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_threads_tune_once(home: Path, tmp_path: Path) -> None:
    asked = fakemeasure.on_demand(tmp_path / "log", 0.2)
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(asked.configs(key(), 0, force=False))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(result == results[0] for result in results)
    assert len((tmp_path / "log").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_tuner_that_is_killed_lets_the_next_one_tune(home: Path, tmp_path: Path) -> None:
    first = ask(home, tmp_path / "log", "60")
    while not (tmp_path / "log").exists():
        time.sleep(0.02)
    second = ask(home, tmp_path / "log", "0")
    time.sleep(0.5)
    first.kill()
    first.wait()
    assert answer(second) == [(op, DECIDED, DECIDED) for op in ("forward", "dX", "dW")]
    assert len((tmp_path / "log").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_tuner_that_hangs_is_not_waited_for_for_ever(home: Path, tmp_path: Path) -> None:
    first = ask(home, tmp_path / "log", "60")
    try:
        while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():  # opened, then written
            time.sleep(0.02)
        first.send_signal(signal.SIGSTOP)
        second = ask(home, tmp_path / "log", "0", "0.5")
        taken = answer(second)  # what the bundles that ship would run anyhow
        assert [op for op, *_ in taken] == ["forward", "dX", "dW"]
        assert all(DECIDED not in configs and "None" not in configs for _, *configs in taken)
        assert len((tmp_path / "log").read_text().splitlines()) == 1
    finally:
        first.kill()
        first.wait()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["read-only", "full"])
def test_a_home_that_can_not_be_written_costs_the_entry_alone(
    request: pytest.FixtureRequest, home: Path, tmp_path: Path, fault: str
) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        if request.config.getoption("--without-namespaces"):
            pytest.skip("needs namespaces")
        pytest.fail("this test mounts a small disk: allow user namespaces, or run with --without-namespaces")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"""
        mount -t tmpfs -o size=4k,mode=755 none {disk}
        {"mount -o remount,ro " + str(disk) if fault == "read-only" else ""}
        HOME={disk} PRETUNED_BUNDLES= {sys.executable} {ASK} {tmp_path}/log 0 || echo exit $?
        find {disk} -name '*.msgpack' -o -name '*.config' -o -name '*.tmp'
    """
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    (line, *left) = done.stdout.splitlines()
    assert ast.literal_eval(line) == [(op, DECIDED, DECIDED) for op in ("forward", "dX", "dW")], done
    assert [name for name in left if not name.endswith(".config")] == []
    assert "kept by this process alone" in done.stderr
    assert ("Read-only file system" if fault == "read-only" else "No space left on device") in done.stderr
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_without_a_home_it_is_kept_in_the_process(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    reload()
    asked = fakemeasure.on_demand(tmp_path / "log")
    assert chosen(asked.configs(key(), 0, force=False)) == {CONFIG}
    reload()
    assert tuner.measured_here(tuner.planned_for(key(), tuner.shape_of(key())).buckets, ON_H200)
    asked.clear()
    assert not tuner.measured_here(tuner.planned_for(key(), tuner.shape_of(key())).buckets, ON_H200)


def test_an_overlay_that_is_not_trusted_is_measured_once_a_process(home: Path, tmp_path: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)
    asked = fakemeasure.on_demand(tmp_path / "log")
    for _ in range(2):
        assert chosen(asked.configs(key(), 0, force=False)) == {CONFIG}
    asked._kept._memory.clear()
    asked.configs(key(), 0, force=False)
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_the_cache_is_kept_loaded_and_cleared(home: Path, tmp_path: Path) -> None:
    asked = fakemeasure.on_demand(tmp_path / "log")
    assert asked.load(key()) is None
    mine = tuple(KernelPair(op, Preference(((Fusion.NONE, OTHER),))) for op in Op)
    asked.save(key(), *mine)  # type: ignore[arg-type]
    assert fakemeasure.on_demand(tmp_path / "log").load(key()) == mine
    assert asked.configs(key(), 0, force=False) == mine
    asked.clear()
    assert asked.load(key()) is None
    assert fakemeasure.on_demand(tmp_path / "log").load(key()) is None
    asked.configs(key(), 0, force=False)
    assert tuner.path_of(home, 90, H200).exists()
    asked.clear()
    assert not tuner.path_of(home, 90, H200).exists()


@pytest.mark.parametrize("how", ["cut", "flipped", "other", "writable"])
def test_a_damaged_config_file_is_not_there(home: Path, tmp_path: Path, how: str) -> None:
    asked = fakemeasure.on_demand(tmp_path / "log")
    configs = asked.configs(key(), 0, force=False)
    (path,) = (home / "configs").glob("*.config")
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[:-1])
    elif how == "flipped":
        path.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    elif how == "other":
        asked.save(key(1024), *configs)
        path.write_bytes((home / "configs" / key(1024).file_name).read_bytes())
    else:
        path.chmod(0o666)
    assert fakemeasure.on_demand(tmp_path / "log").load(key()) is None


def test_there_are_never_too_many_config_files(home: Path, tmp_path: Path) -> None:
    """The oldest go."""
    asked = fakemeasure.on_demand(tmp_path / "log")
    asked.configs(key(1), 0, force=False)
    for number in range(MAX_FILES - 1):
        path = home / "configs" / f"{number}.config"
        path.touch()
        os.utime(path, (number, number))
    for power in (3, 7):
        asked.configs(key(1 << power), 0, force=False)
        names = {path.name for path in (home / "configs").iterdir()}
        assert len(names) == MAX_FILES
    assert {"0.config", "1.config"}.isdisjoint(names)
    assert "2.config" in names
    for power in (0, 3, 7):
        assert fakemeasure.on_demand(tmp_path / "log").load(key(1 << power)) is not None


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num_experts": 0}, "num_experts is 0, wanted a whole number"),
        ({"top_k": 9}, "k=9 is more than E=8"),
        ({"dtype": "fp8"}, "wanted one of bf16, fp16, fp32, tf32"),
        ({"dtype": "mxfp4"}, "wanted one of bf16, fp16, fp32, tf32"),
        ({"seq_len": 1.5}, "seq_len is 1.5"),
        ({"hidden_dim": 1 << 30}, "H=1073741824"),
        ({"seq_len": 1 << 40}, "tokens"),
        ({"weights": "nf4"}, "get_or_autotune_moe_kernels: weights is 'nf4', wanted one of bf16, .*mxfp4"),
        ({"weights": 4}, "weights is 4, wanted one of"),
        ({"weights": "mxfp4", "dtype": "fp16"}, "dtype is fp16, wanted bf16: x of mxfp4 weights"),
        ({"weights": "bf16", "dtype": "fp16"}, "dtype is fp16, wanted bf16"),
        ({"dtype": "mxfp4"}, "dtype is 'mxfp4', wanted one of bf16, fp16, fp32, tf32$"),
        ({"weights": "mxfp4", "num_experts": 1024}, "1024 experts a GPU, wanted at most 512 of quantised weights"),
    ],
)
def test_what_is_no_layer(how: dict[str, object], words: str) -> None:
    options = {"num_experts": 8, "hidden_dim": 256, "intermediate_dim": 128, "top_k": 2, "dtype": "bf16", "seq_len": 64}
    with pytest.raises(InputError, match=words):
        key_for(ON_H200, **{**options, **how})  # type: ignore[arg-type]


@pytest.mark.parametrize(("H", "refused"), [(256, True), (224, False)])  # 224: no blocks, so nothing is prepared
def test_weights_in_a_checkpoints_layout(H: int, refused: bool) -> None:
    w = ExpertWeights.quantize(torch.randn(8, 256, H), "mxfp4")
    layer = key_for(ON_H200, 8, H, 128, 2, "bf16", 64, w)
    words = "these mxfp4 weights are in the layout of a checkpoint, .*: pass w.prepare.., and call with it"
    with pytest.raises(InputError, match=words) if refused else contextlib.nullcontext():
        api.refuse_unprepared(w, layer)
    if refused:
        api.refuse_unprepared(w.prepare(), layer)


def test_what_is_no_config(home: Path) -> None:
    pairs = [KernelPair(op) for op in Op]
    with pytest.raises(InputError, match="for forward, wanted a KernelPair of forward"):
        pretuned.aot.save_cached_config(key(), *reversed(pairs))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(HostError, match="no CUDA GPU here"):
        pretuned.aot.get_or_autotune_moe_kernels(8, 256, 128, 2, torch.bfloat16)


def test_a_pair_is_what_grouped_gemm_takes() -> None:
    x, w = torch.randn(6, 8), torch.randn(2, 4, 8)
    sizes = torch.tensor([2, 4], dtype=torch.int32)
    forward, dX, _ = (KernelPair(op, Preference(((Fusion.NONE, CONFIG),))) for op in Op)
    for first in (True, False):
        y = grouped_gemm(x, w, sizes, kernel_config_fwd=forward, kernel_config_bwd_dX=dX, is_first_gemm=first)
        torch.testing.assert_close(y, grouped_gemm(x, w, sizes))
    codes = ExpertWeights.quantize(torch.randn(2, 4, 32), "mxfp4")
    rows = torch.randn(6, 32).bfloat16()
    y = grouped_gemm(rows, codes, sizes, kernel_config_fwd=forward, kernel_config_bwd_dX=dX)
    torch.testing.assert_close(y, grouped_gemm(rows, codes, sizes))
    with pytest.raises(InputError, match="kernel_config_fwd is a KernelPair of dX, wanted forward's"):
        grouped_gemm(x, w, sizes, kernel_config_fwd=dX)
    assert forward.of(is_first_gemm=True).config == CONFIG
    assert forward.of(is_first_gemm=False).config is None


def test_logging_tells_what_goes_on(home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fakemeasure.on_demand(tmp_path / "log").configs(key(), 0, force=False)
    assert "measuring 10 cells of E8-H256-I128-k2 on NVIDIA H200 now" in caplog.text
    assert "kept in" in caplog.text
