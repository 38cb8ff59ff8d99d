"""The tuner on a Dask cluster: a real scheduler and real workers on loopback; the times alone are made up."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import faketimer
import psutil
import pytest
from building import alone

from pretuned.aot.build.build import compile_candidates
from pretuned.aot.build.options import BuildOptions
from pretuned.aot.choose.bundle import measured_bundle
from pretuned.aot.choose.candidates import read_candidates
from pretuned.aot.cli.main import run as command
from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.executors import dask_worker
from pretuned.aot.executors.dask import DaskGpus, dask_gpus, scheduler_address
from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import DIED, Measured
from pretuned.aot.measure.job import WorkerLost
from pretuned.aot.plan.families import Pool
from pretuned.aot.plan.plan import BuildPlan
from pretuned.aot.process import gpus as process_gpus
from pretuned.aot.tune.tuner import NoGpu, Outcome, TuneObservers, tune_problems
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import HostError, InputError
from pretuned.artifacts.records import Source

pytestmark = pytest.mark.slow

AOT = Path(__file__).parents[1]
SUPPORT = AOT.parent / "support"
# Dask samples each thread's stack and the machine: a third of what its processes take while they wait.
UNWATCHED = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "60s",
}


class Cluster:
    """A scheduler, and workers, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        path = folder / "scheduler.json"
        self.scheduler = self._begin(
            "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show", "--scheduler-file", path
        )
        self.address = ""
        while not self.address:
            assert self.scheduler.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError, ValueError):
                self.address = json.loads(path.read_text())["address"]
            time.sleep(0.05)

    @property
    def executor(self) -> str:
        return self.address.replace("tcp:", "dask:")

    def worker(self, *more: str) -> subprocess.Popen[bytes]:
        return self._begin(
            "worker",
            self.address,
            "--host",
            "127.0.0.1",
            "--nthreads",
            "1",
            "--no-dashboard",
            "--resources",
            "sm90=1",
            "--local-directory",
            self.folder,
            *more,
        )

    def _begin(self, *arguments: object) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "dask", *map(str, arguments)],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **UNWATCHED, "PYTHONPATH": str(SUPPORT)},
            )
        self.processes.append(process)
        return process

    def close(self) -> None:
        tree = [
            child
            for process in self.processes
            if process.poll() is None
            for child in psutil.Process(process.pid).children(True)
        ]
        for process in reversed(self.processes):
            process.kill()
            process.wait()
        for child in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@contextlib.contextmanager
def cluster_in(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers as most people start them, under nannies that start them again."""
    with cluster_in(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.worker()
        cluster.worker()
        yield cluster


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster to break."""
    with cluster_in(tmp_path) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def candidates(
    tmp_path_factory: pytest.TempPathFactory, compiled_dir: Path, small_space: Pool, small_plan: BuildPlan
) -> Path:
    path = tmp_path_factory.mktemp("candidates") / "candidates.msgpack"
    options = BuildOptions(path.parent, cache=CompileCache(compiled_dir), space=small_space)
    with alone(compiled_dir.parent / "small.lock"):
        compile_candidates(small_plan, (90,), path, options)
    return path


def all_of(gpus: DaskGpus, count: int) -> list[object]:
    """Return all objects that workers gave, once there are as many workers as the test has started."""
    results: list[object] = []
    end = time.monotonic() + 30
    while len(results) < count:
        assert time.monotonic() < end
        results += gpus.joined()
        time.sleep(0.05)
    return results


def tune(
    cluster: Cluster,
    plan: BuildPlan,
    candidates: Path,
    journal: Path,
    workers: int,
    watch: TuneObservers | None = None,
    **session: object,
) -> Outcome:
    session = {"greet": faketimer.shipped, "run": faketimer.run, **session}
    with dask_gpus(cluster.executor, candidates, **session) as gpus:  # type: ignore[arg-type]
        return tune_problems(
            plan.buckets, candidates, journal, executors=all_of(gpus, workers), joined=gpus.joined, observers=watch
        )  # type: ignore[arg-type]


def measured_keys(journal: Path) -> list[object]:
    return [(record.problem, record.bucket) for record in read_journal(journal).records if isinstance(record, Measured)]


def test_it_measures_every_cell_once(cluster: Cluster, candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    journal = tmp_path / "h200.journal"
    outcome = tune(cluster, small_plan, candidates, journal, 2)
    assert (outcome.measured, outcome.left, outcome.failures) == (small_plan.choices, 0, ())
    keys = measured_keys(journal)
    assert len(set(keys)) == len(keys) == small_plan.choices
    bundle = measured_bundle(small_plan, read_candidates(candidates, small_plan), read_journal(journal))
    assert bundle.gpus == (faketimer.H200,)
    assert {choice.source for row in bundle.choices.values() for choice in row} == {Source.MEASURED}
    again = tune(cluster, small_plan, candidates, journal, 2, run=faketimer.dies)
    assert (again.in_journal, again.measured) == (small_plan.choices, 0)


def test_a_variant_that_ends_its_process_is_reported_and_costs_no_dask_worker(
    cluster: Cluster, candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    before = workers_of(cluster)
    outcome = tune(cluster, small_plan, candidates, tmp_path / "journal", 2, run=faketimer.dies)
    with open_bundle(candidates) as bundle:
        bad = bundle.variant(0).cubin_sha256
    assert {(failure.kind, failure.variant) for failure in outcome.failures} == {
        (DIED, bad)
    }  # by both, where both met it
    assert (outcome.measured, outcome.left, outcome.unable) == (small_plan.choices, 0, 0)
    assert workers_of(cluster) == before


def test_a_variant_that_kills_workers_again_and_again_is_recorded_and_skipped(
    cluster: Cluster, candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    before = workers_of(cluster)
    notes: list[str] = []
    watch = TuneObservers(on_note=notes.append)
    outcome = tune(cluster, small_plan, candidates, tmp_path / "journal", 2, watch, run=faketimer.kills_its_machine)
    with open_bundle(candidates) as bundle:
        bad = bundle.variant(0).cubin_sha256
    assert {(failure.kind, failure.variant) for failure in outcome.failures} == {
        (DIED, bad)
    }  # by both, where both met it
    assert (outcome.measured, outcome.left, outcome.unable) == (small_plan.choices, 0, 0)
    assert sum("is out: the worker has left the cluster, or was killed" in note for note in notes) >= 3
    assert workers_of(cluster) != before


def test_the_commands_measure_on_the_cluster(
    cluster: Cluster,
    candidates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = functools.partial(dask_gpus, greet=faketimer.greet, run=faketimer.run)
    monkeypatch.setattr("pretuned.aot.executors.dask.dask_gpus", fake)
    monkeypatch.chdir(tmp_path)
    options = ["--models", "shape:E=8,H=256,I=128,k=2 tokens=1..64", "--ops", "forward", "--executor", cluster.executor]
    assert command(["measure", str(candidates), "-J", "a.journal", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["finished"], report["gpu"]["name"]) == (True, "NVIDIA H200")
    keys = measured_keys(tmp_path / "a.journal")  # some more than once: what would ship is looked at again
    assert len(set(keys)) == report["measured"] == report["cells"] > 0
    assert command(["build", "--candidates", str(candidates), *options, "--json"]) == 0  # with a journal of its own
    (built,) = json.loads(capsys.readouterr().out)["bundles"]
    assert (built["source"], built["tuned"]["measured"]) == ("measured", report["cells"])


def test_two_workers_on_one_gpu_are_refused(
    cluster: Cluster, candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"Dask worker tcp\S+ and Dask worker tcp\S+ use the same GPU: give each"):
        tune(cluster, small_plan, candidates, tmp_path / "journal", 2, greet=faketimer.same_uuid)


def test_a_worker_with_another_version_is_left_out(
    cluster: Cluster, candidates: Path, small_plan: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.9")
    notes: list[str] = []
    watch = TuneObservers(on_note=notes.append)
    with pytest.raises(NoGpu, match=r"it has pretuned [1-9.0]+, the tuner has 0\.0\.9: install the same"):
        tune(cluster, small_plan, candidates, tmp_path / "journal", 2, watch)
    assert sum(note.startswith("left out: Dask worker") for note in notes) == 2


@pytest.mark.skipif(process_gpus.gpu_count() > 0, reason="for a machine without a GPU")
def test_the_command_asks_the_workers_for_their_gpu(
    cluster: Cluster, candidates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "measure",
        str(candidates),
        "--models",
        "shape:E=8,H=256,I=128,k=2 tokens=1..64",
        "--ops",
        "forward",
        "-J",
        str(tmp_path / "journal"),
        "--executor",
        cluster.executor,
    ]
    assert command(arguments) == 1
    output = capsys.readouterr().err
    assert "Dask worker tcp://127.0.0.1:" in output
    assert "its worker does not start: torch" in output
    assert "can't use this machine's GPU" in output


def workers_of(cluster: Cluster) -> set[int]:
    """The processes that hold the workers."""
    nannies = [psutil.Process(process.pid) for process in cluster.processes[1:]]
    return {child.pid for nanny in nannies for child in nanny.children() if "spawn_main" in " ".join(child.cmdline())}


def test_a_worker_killed_in_the_middle_costs_nothing_and_one_that_comes_takes_part(
    lone: Cluster, candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    first, second = (lone.worker("--no-nanny") for _ in range(2))
    journal = tmp_path / "h200.journal"
    notes: list[str] = []

    def shoot(progress: object) -> None:
        if len(measured_keys(journal)) == 3:
            first.kill()
            lone.worker("--no-nanny")
        if len(measured_keys(journal)) == 12:
            second.kill()  # and all depends on the one that came

    watch = TuneObservers(on_cell=shoot, on_note=notes.append)
    outcome = tune(lone, small_plan, candidates, journal, 2, watch, run=faketimer.slow)
    assert (outcome.measured, outcome.left, outcome.failures) == (small_plan.choices, 0, ())
    keys = measured_keys(journal)
    assert len(set(keys)) == len(keys) == small_plan.choices
    assert sum("is out: the worker has left the cluster, or was killed" in note for note in notes) == 2


_TUNE = """
import sys
from pathlib import Path
import faketimer
from conftest import ODD, SMALL
from pretuned.aot.executors.dask import dask_gpus
from pretuned.aot.process.interrupts import tidy_interrupts
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.aot.tune.tuner import TuneObservers, tune_problems
from pretuned.artifacts.records import Op
executor, candidates, journal = sys.argv[1:]
problems = plan(load_models([SMALL, ODD], (Op.FORWARD,)).shapes).buckets
watch = TuneObservers(on_cell=lambda p: print("cell", p.done, flush=True))
try:
    with tidy_interrupts(), dask_gpus(executor, candidates, greet=faketimer.greet, run=faketimer.slow) as gpus:
        tune_problems(problems, candidates, Path(journal), executors=gpus.joined(), joined=gpus.joined, observers=watch)
except KeyboardInterrupt as error:
    sys.exit(f"{error}")
"""


# tests/aot/tune/test_tuner.py kills one with a GPU of its own by day
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
def test_stopped_or_killed_it_loses_the_job_in_flight_at_most_and_goes_on(
    lone: Cluster, candidates: Path, small_plan: BuildPlan, tmp_path: Path, number: signal.Signals
) -> None:
    worker = lone.worker("--no-nanny")
    journal = tmp_path / "h200.journal"
    process = subprocess.Popen(
        [sys.executable, "-c", _TUNE, lone.executor, str(candidates), str(journal)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(AOT), str(SUPPORT)])},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "cell 3\n":
            break
    process.send_signal(number)
    _, message = process.communicate(timeout=30)
    kept = len(read_journal(journal).records)
    assert 3 <= kept < small_plan.choices
    if number == signal.SIGINT:
        said = (
            f"interrupted: {kept} of {small_plan.choices} cells are measured and kept in '{journal}'; "
            "run the same command to go on\n"
        )
        assert message.endswith(said)
        # Python's own words, if the signal came while one of Dask's futures was let go of.
        before = message.removesuffix(said)
        assert not before or before.startswith("Exception ignored in: <function Future.__del__")
        running = [" ".join(child.cmdline()) for child in psutil.Process(worker.pid).children(True)]
        assert not [line for line in running if "spawn_main" in line]  # the process on the GPU has ended
    outcome = tune(lone, small_plan, candidates, journal, 1)
    assert (outcome.in_journal, outcome.measured, outcome.left) == (kept, small_plan.choices - kept, 0)


def test_a_lost_scheduler_ends_it_and_what_was_measured_is_kept(
    lone: Cluster, candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    lone.worker("--no-nanny")
    journal = tmp_path / "h200.journal"
    shot = threading.Event()

    def shoot(progress: object) -> None:
        if not shot.is_set():
            shot.set()
            lone.scheduler.kill()

    with pytest.raises(HostError, match=r"the Dask scheduler is gone: .*What was measured is kept"):
        tune(lone, small_plan, candidates, journal, 1, TuneObservers(on_cell=shoot), run=faketimer.slow, connect_s=2)
    assert read_journal(journal).records


def test_a_session_that_ends_while_its_process_is_begun_leaves_none(candidates: Path) -> None:
    class Digest(bytes):
        """Of candidates whose session ends while they are unpacked, when their digest is looked at."""

        def __ne__(self, other: object) -> bool:
            asyncio.run(dask_worker.end("ends early"))
            return super().__ne__(other)

    with open_bundle(candidates) as bundle:
        digest = Digest(bundle.digest)
    session = dask_worker.Session("ends early", importlib.metadata.version("pretuned"), digest, idle_s=30.0)
    with pytest.raises(WorkerLost):
        dask_worker.start(session, candidates.read_bytes())
    assert session.id not in dask_worker._held


def test_without_a_fitting_worker_it_says_how_to_start_one(lone: Cluster, candidates: Path) -> None:
    notes: list[str] = []
    with (
        pytest.raises(HostError, match=r'no Dask worker offers sm90, there is none at all: .*--resources "sm90=1"'),
        dask_gpus(lone.executor, candidates, notes.append, wait_s=0.6),
    ):
        raise AssertionError
    assert notes == ["waiting 1 s for a Dask worker that offers sm90"]


@pytest.mark.parametrize(
    ("verb", "more", "code", "message"),
    [
        ("measure", ("--executor", "dask://127.0.0.1:1"), 1, "no Dask scheduler answers there within 15 s"),
        ("measure", ("--executor", "scheduler:8786"), 2, "wanted dask://HOST:PORT"),
        ("measure", ("--executor", "dask://scheduler"), 2, "wanted dask://HOST:PORT"),
        ("measure", ("--executor", "dask://scheduler:99999"), 2, "wanted dask://HOST:PORT"),
        ("measure", ("--executor", "dask://127.0.0.1:1", "--gpus", "0"), 2, "--gpus is of this machine"),
        ("build", ("--executor", "dask://127.0.0.1:1", "--measure", "no"), 2, "--measure no forbids it"),
        ("build", ("--executor", "dask://127.0.0.1:1"), 1, "no Dask scheduler answers there within 15 s"),
    ],
)
def test_mistakes_are_reported_in_one_message(
    candidates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    more: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if message.startswith("no Dask scheduler"):
        monkeypatch.setattr("pretuned.aot.executors.dask.connected.__wrapped__.__defaults__", (1.0,))
        message = "no Dask scheduler answers there within 1 s"
    options = ["--models", "shape:E=8,H=256,I=128,k=2", *more]
    where = [str(candidates), "-J", "journal"] if verb == "measure" else ["--sm", "90"]
    assert command([verb, *where, *options]) == code
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1, output.err
    assert output.out == ""
    assert not list(tmp_path.iterdir())


def test_a_missing_dask_says_what_to_install(
    candidates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    options = [
        "--models",
        "shape:E=8,H=256,I=128,k=2",
        "-J",
        str(tmp_path / "j"),
        "--executor",
        "dask://scheduler:8786",
    ]
    assert command(["measure", str(candidates), *options]) == 1
    assert 'pip install "pretuned[dask]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("dask://scheduler:8786", "tcp://scheduler:8786"),
        ("dask://[::1]:8786/", "tcp://[::1]:8786"),
        ("tls://scheduler:8786", "tls://scheduler:8786"),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert scheduler_address(text) == address


def test_nothing_of_dask_is_imported_before_it_is_asked_for() -> None:
    script = (
        "import sys; from pretuned.aot.cli.main import run; "
        "import pretuned.aot.executors.dask_worker, pretuned.aot.executors.dask; "
        "assert run(['measure', '--help']) == 0; assert not {'distributed', 'dask'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


@pytest.mark.nightly
def test_a_cluster_with_certificates(tmp_path: Path) -> None:
    """A real scheduler that takes no connection without a certificate of its authority."""
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
        "-keyout",
        tmp_path / "key.pem",
        "-out",
        tmp_path / "cert.pem",
    ]
    subprocess.run(make, check=True, capture_output=True)
    tls = "DASK_DISTRIBUTED__COMM__TLS__"
    ours = {f"{tls}CA_FILE": str(tmp_path / "cert.pem")}
    for role in ("CLIENT", "SCHEDULER"):
        ours |= {f"{tls}{role}__CERT": str(tmp_path / "cert.pem"), f"{tls}{role}__KEY": str(tmp_path / "key.pem")}
    path = tmp_path / "scheduler.json"
    command = [
        "scheduler",
        "--protocol",
        "tls",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--no-dashboard",
        "--no-show",
        "--scheduler-file",
        path,
    ]
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "dask", *map(str, command)], env={**os.environ, **ours}, stderr=subprocess.DEVNULL
    )
    code = (
        "import sys\nfrom pretuned.aot.executors.dask import connected\n"
        "with connected(sys.argv[1], 10.0) as client: print(client.scheduler.address, client.scheduler_info()['type'])"
    )
    try:
        address = ""
        while not address:
            assert scheduler.poll() is None
            with contextlib.suppress(OSError, ValueError):
                address = json.loads(path.read_text())["address"]
            time.sleep(0.05)
        assert address.startswith("tls://")
        for executor, environment, wanted in (
            (address, ours, f"{address} Scheduler"),
            (address, {}, "Dask's own settings name the certificates"),
            (address.replace("tls:", "dask:"), ours, "no Dask scheduler answers there"),
        ):
            asked = [sys.executable, "-c", code, executor]
            done = subprocess.run(asked, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
            assert wanted in done.stdout + done.stderr
    finally:
        scheduler.kill()
        scheduler.wait()
