"""A fork while another thread is in the lookup: the child finds no lock taken and no snapshot half made."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm
from emulated_driver import EmulatedGpu, emulated
from small_bundles import ON_H200, PROBLEM, SPECS, WIDE, bundle, modelled, snapshot, write

import pretuned.runtime
from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import BundleUnreadable
from pretuned.artifacts.records import Problem
from pretuned.runtime import explain, hooks, preload, register_compiler, reload, settings
from pretuned.runtime.dispatch import compiled as dispatch_compiled
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.dispatch.decide import Decision, Origin, decide
from pretuned.runtime.driver import counters
from pretuned.runtime.launch import loader
from pretuned.runtime.settings import lock

SECONDS = 30  # that a child may take: a lock that nobody lets go is waited for without an end

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


class Pause:
    """Stops the thread that calls it first until ``go_on``; any other passes."""

    def __init__(self) -> None:
        self.reached, self.go_on, self._first = threading.Event(), threading.Event(), True

    def __call__(self) -> None:
        if self._first:
            self._first = False
            self.reached.set()
            assert self.go_on.wait(SECONDS)


@contextlib.contextmanager
def stopped_inside(call: Callable[[], object], pause: Pause) -> Iterator[None]:
    """Another thread is in ``call`` as far as ``pause``."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        assert pause.reached.wait(SECONDS)
        yield
    finally:
        pause.go_on.set()
        thread.join(SECONDS)
    assert not thread.is_alive()


def right_in_a_child(call: Callable[[], object]) -> bool:
    """Return True if ``call`` is true in a child of ``fork``, and the child ends."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        good = False
        with contextlib.suppress(BaseException):
            good = bool(call())
        os._exit(0 if good else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def runs_from_a_bundle() -> bool:
    return explain(PROBLEM, M=64, sm=90).runs == "bundle"


@pytest.mark.parametrize("where", ["settings", "snapshot", "installed"])
def test_the_lookup(where: str, clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(clean_places / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    reload()
    pause = Pause()
    module, name = {
        "settings": (settings, "read"),
        "snapshot": (dispatch_snapshot, "take"),
        "installed": (dispatch_snapshot, "installed_places"),
    }[where]
    real = getattr(module, name)

    def slow(*args: object) -> object:
        pause()
        return real(*args)

    monkeypatch.setattr(module, name, slow)
    with stopped_inside(runs_from_a_bundle, pause):
        assert right_in_a_child(runs_from_a_bundle)
        assert right_in_a_child(lambda: reload() or runs_from_a_bundle())  # type: ignore[func-returns-value]


class Compiler:
    """Makes a small bundle, after a pause."""

    def __init__(self) -> None:
        self.pause = Pause()

    def __call__(self, problem: Problem, sm: int) -> bytes:
        self.pause()
        return encode(bundle({problem: [modelled(64, WIDE)]}, sm=sm, specs=SPECS, tag="compiled"))


@pytest.fixture
def compiler(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # a child can ask no GPU that its parent uses
    before, compiler = hooks._compiler, Compiler()
    register_compiler(compiler)
    dispatch_compiled.forget()
    pretuned.runtime.allow_jit()
    yield compiler
    dispatch_compiled.forget()
    pretuned.runtime.allow_jit(False)
    register_compiler(before)


def compiled(bundle_set: dispatch_snapshot.Snapshot) -> bool:
    got = decide(bundle_set, PROBLEM, 64, ON_H200)
    return isinstance(got, Decision) and got.chosen.origin is Origin.COMPILED


def test_a_decision_that_compiles(compiler: Compiler, tmp_path: Path) -> None:
    bundle_set = snapshot(tmp_path)
    with stopped_inside(lambda: compiled(bundle_set), compiler.pause):
        assert right_in_a_child(lambda: compiled(bundle_set))
        assert right_in_a_child(lambda: compiled(snapshot(tmp_path)))
    assert compiled(bundle_set)


class Views(dict):  # type: ignore[type-arg]
    """A snapshot's views, with a pause before or after they are cleared."""

    def __init__(self, pause: Pause, *, after: bool) -> None:
        self._pause, self._after = pause, after

    def clear(self) -> None:
        if not self._after:
            self._pause()
        super().clear()
        self._pause()


@pytest.mark.parametrize("after", [False, True])
def test_a_bundle_that_is_just_being_added(after: bool, compiler: Compiler, tmp_path: Path) -> None:
    compiler.pause.go_on.set()
    bundle_set, pause = snapshot(tmp_path), Pause()
    bundle_set._views = Views(pause, after=after)
    with stopped_inside(lambda: compiled(bundle_set), pause):
        assert right_in_a_child(lambda: compiled(bundle_set))


def test_a_variant_that_is_being_loaded(tmp_path: Path) -> None:
    pause = Pause()

    class Damaged:
        digest, path = b"damaged", "a.msgpack"

        def variant(self, index: int) -> object:
            pause()
            raise BundleUnreadable("gone")

    def load() -> bool:
        try:
            loader.loaded(Damaged(), 0, 0, 132)  # type: ignore[arg-type]
        except BundleUnreadable:
            return True
        return False

    with stopped_inside(load, pause):
        assert right_in_a_child(load)


def test_a_word_of_a_counter() -> None:
    pause, words = Pause(), counters.Counters(0)

    class Slow(EmulatedGpu):
        def cuMemAlloc_v2(self, memory: int, size: int) -> int:
            pause()
            return super().cuMemAlloc_v2(memory, size)

    with emulated(Slow()), stopped_inside(lambda: words.take(1), pause):
        assert right_in_a_child(lambda: words.take(1) > 0)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_collector_that_waits(enabled: bool, clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pause, was = Pause(), gc.isenabled()

    def is_available() -> bool:
        pause()
        return False

    def preloads() -> bool:
        preload()
        return gc.isenabled() is enabled

    monkeypatch.setattr("torch.cuda.is_available", is_available)
    try:
        (gc.enable if enabled else gc.disable)()
        with stopped_inside(preloads, pause):
            assert not gc.isenabled()
            assert right_in_a_child(lambda: gc.isenabled() is enabled and preloads())
        assert gc.isenabled() is enabled
        gc.disable()
        assert right_in_a_child(lambda: not gc.isenabled())  # what others do with it stays
    finally:
        (gc.enable if was else gc.disable)()


def test_a_child_lets_go_what_its_own_thread_holds() -> None:
    """A fork inside the lookup, as of a compiler that starts workers: leaving the lock is no error there."""

    def leaves_it() -> bool:
        with lock("compiling"):
            held.close()
        with lock("compiling"):
            return True

    with contextlib.ExitStack() as held:
        held.enter_context(lock("compiling"))
        assert right_in_a_child(leaves_it)


def test_a_system_that_forks_nothing_has_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "register_at_fork")
    settings.at_fork(lambda: None)
    with settings.lock("compiling"):
        pass


def test_no_module_makes_a_lock_of_its_own() -> None:
    package = Path(pretuned.runtime.__file__ or "").parent
    assert [path.name for path in sorted(package.glob("*.py")) if "Lock(" in path.read_text()] == ["settings.py"]


PROGRAM = """
import importlib.machinery, multiprocessing, os, signal, sys, threading
import torch
import pretuned.runtime
from pretuned.runtime import Lora, grouped_gemm, moe_mlp


def calls():
    x, w, m_sizes = torch.ones(2, 4), torch.ones(1, 4, 4), torch.tensor([2])
    grouped_gemm(x, w, m_sizes)
    grouped_gemm(x, w, m_sizes, lora=Lora(torch.ones(1, 2, 4), torch.ones(1, 4, 2), dropout=0.5))
    torch.jit.trace(lambda x: grouped_gemm(x, w, m_sizes), x, check_trace=False)
    moe_mlp(x, w, w[..., :2], torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    pretuned.runtime.explain(E=8, N=256, K=256, M=64, dtype="bf16", sm=90)


def right(child):
    child.start()
    child.join(120)
    if child.exitcode is None:
        child.kill()
    return child.exitcode == 0


class Slow:
    reached, go_on = threading.Event(), threading.Event()

    def find_spec(self, name, path=None, target=None):
        if name != "pretuned.kernels.reference":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def slowly(module):
            self.reached.set()
            self.go_on.wait(150)
            execute(module)

        spec.loader.exec_module = slowly
        return spec


def main(how):
    go_on, slow = threading.Event(), Slow()

    def uses():
        go_on.wait()
        calls()

    threads = [threading.Thread(target=uses) for _ in range(4)]
    for thread in threads:
        thread.start()
    if how == "fork":  # before other threads use it
        print(right(multiprocessing.get_context("fork").Process(target=calls)))
        go_on.set()
    else:  # while another thread imports it
        sys.meta_path.insert(0, slow)
        go_on.set()
        assert slow.reached.wait(20)
        print(right(multiprocessing.get_context("spawn").Process(target=calls)))
        slow.go_on.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.slow  # processes that import what first calls do
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_what_is_promised(how: str, tmp_path: Path) -> None:
    """A fork before other threads use pretuned, or a spawn while they do."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = warm.run([program, how])
    assert done.stdout.split() == ["True"], done.stderr
    assert done.returncode == 0, done.stderr
