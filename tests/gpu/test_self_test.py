"""Code is tested on a real GPU: all that ships for it is right, a cubin under another's record is found and left out.

    python -m pytest -q tests/gpu/test_self_test.py

It takes the bundles that ship, and needs a GPU of a capability that one was measured on: 9.0.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from calls import Call, calls_of

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.codec import encode
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import (
    Bundle,
    Choice,
    DType,
    Fusion,
    Layout,
    Op,
    Problem,
    RowOp,
    Source,
    Variant,
    bucket_of,
)
from pretuned.kernels import reference
from pretuned.runtime import explain, grouped_gemm, preload, reload, self_test_results
from pretuned.runtime.driver.device import device as device_of
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.launch import self_test
from pretuned.runtime.launch.loader import loaded

SHIPPED = sorted(Path(str(files("pretuned.artifacts"))).glob("bundles/*.msgpack"))
E, N, K, M = 6, 528, 344, 400  # of no model
PROBLEM = Problem(Op.FORWARD, DType.BF16, E, N, K)


def measured_here() -> list[Path]:
    """The shipped bundles whose code was tested on this GPU's capability."""
    if not torch.cuda.is_available():
        return []
    results = []
    for path in SHIPPED:
        with open_bundle(path) as opened:
            if opened.target.sm == local_gpu(0).sm and opened.gpus:
                results.append(path)
    return results


BUNDLES = measured_here()
pytestmark = pytest.mark.skipif(not BUNDLES, reason="needs a GPU that a shipped bundle was measured on")


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.name)
def test_all_that_ships_is_found_right(path: Path) -> None:
    """Products and passes, quantised ones too: right code is never left out."""
    wrong, took = {}, []
    with open_bundle(path) as bundle:
        for index, variant in enumerate(bundle.variants()):
            kernel = loaded(bundle, index, 0, local_gpu(0).gpu.sm_count)
            began = time.perf_counter()
            reason = self_test.tried(kernel)
            took.append((time.perf_counter() - began) * 1e3)
            if reason is not None:
                wrong[f"{index} {variant.op.value} {variant.dtype.value} {variant.fusion}"] = reason
    took.sort()
    print(f"{path.name}: {len(took)} trials, median {took[len(took) // 2]:.1f} ms, longest {took[-1]:.1f} ms")
    assert wrong == {}


def pair() -> tuple[Bundle, int, int, int]:
    """A whole bundle; in it code of the forward, code of dX with the very same arguments, other code of the forward.

    They read no memory beyond w when they take it for turned round: unaligned code, without TMA, which can't hang.
    """
    for path in BUNDLES:
        with open_bundle(path) as file:
            whole = file.load()
        plain = [
            (i, variant)
            for i, variant in enumerate(whole.variants)
            if variant.alignment == 1
            and not isinstance(variant.op, RowOp)
            and variant.dtype is DType.BF16
            and variant.layout is Layout.NK
            and variant.fusion == Fusion.NONE
        ]
        forward, backward = ([pair for pair in plain if pair[1].op is op] for op in (Op.FORWARD, Op.DX))

        def like(variant: Variant) -> object:
            return (
                variant.kernel,
                variant.entry,
                variant.arguments,
                variant.config,
                variant.threads,
                variant.shared_bytes,
                variant.tensor_maps,
            )

        for i, variant in forward:
            turned = [j for j, other in backward if like(other) == like(variant)]
            others = [j for j, _ in forward if j != i]
            if turned and others:
                return whole, i, turned[0], others[0]
    pytest.skip("no bundle has such a pair")


def write(folder: Path, *, faulty: bool = False) -> Path:
    """A bundle that nobody has run, whose first choice has the cubin of dX under the record of the forward.

    Then right code; ``faulty`` adds code that has no shared memory.
    """
    whole, i, turned, other = pair()
    cubin = whole.cubins[turned]
    forged = whole.variants[i]._replace(
        cubin_bytes=len(cubin),
        cubin_sha256=hashlib.sha256(cubin).digest(),
        registers=whole.variants[turned].registers,
    )
    right = whole.variants[other]._replace(
        spill_bytes=whole.variants[other].spill_bytes + 8
    )  # the record of none that ships
    variants, cubins = [forged, right], [cubin, whole.cubins[other]]
    if faulty:
        variants.append(right._replace(shared_bytes=0))
        cubins.append(whole.cubins[other])
    kernels = {(variant.kernel, variant.revision) for variant in variants}
    choice = Choice(bucket_of(M), 0, Source.MODELLED, 1000, 1, 2000)
    built = whole._replace(
        gpus=(),
        producer=whole.producer.with_held_against(()),
        variants=tuple(variants),
        cubins=tuple(cubins),
        choices={PROBLEM: (choice,)},
        models=(),
        kernels=tuple(kernel for kernel in whole.kernels if (kernel.name, kernel.revision) in kernels),
    )
    path = folder / "bundles" / "forged.msgpack"
    path.parent.mkdir(exist_ok=True)
    publish(path, encode(built))
    return path


class Machine:
    """This GPU, with a bundle and an overlay of its own; ``tried`` counts trials."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, trials: list[Call]) -> None:
        self.trials, self.path = trials, write(folder)
        patch.setenv("PRETUNED_BUNDLES", str(self.path.parent))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.delenv("PRETUNED_DISABLE_SELF_TEST", raising=False)
        patch.delenv("PRETUNED_DISABLE_AUTOTUNE", raising=False)
        self.anew()

    @property
    def tried(self) -> int:
        return len(self.trials)

    def anew(self) -> None:
        """Forget the state, like a new process."""
        self_test_results._memory.__init__()  # type: ignore[misc]
        device_of(0).trusted.clear()
        self.trials.clear()
        reload()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    with calls_of(self_test.tried) as trials:
        yield Machine(monkeypatch, tmp_path, trials)


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(M, K, device="cuda", generator=generator).bfloat16()
    w = (torch.randn(E, N, K, device="cuda", generator=generator) * K**-0.5).bfloat16()
    return x, w, torch.tensor([30, 0, 300, 1, 69, 0], dtype=torch.int32, device="cuda")


def is_right(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor) -> bool:
    want = reference.forward(x.double(), w.double(), m_sizes)
    return bool((y.double() - want).norm() < 1e-2 * want.norm())


def test_a_cubin_under_anothers_record_is_found_and_left_out(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = operands()
    forged = explain(*inputs).chosen
    assert forged is not None
    assert (forged.usable.path, forged.index) == (machine.path, 0)
    assert "never run on this capability" in str(explain(*inputs))
    assert is_right(grouped_gemm(*inputs), *inputs)
    assert is_right(grouped_gemm(*inputs), *inputs)
    assert machine.tried == 2
    (line,) = [record.getMessage() for record in caplog.records if "left out from now on" in record.getMessage()]
    for part in ("forged.msgpack", forged.variant.cubin_sha256.hex(), torch.cuda.get_device_name(0), "wanted"):
        assert part in line
    chosen = explain(*inputs).chosen
    assert chosen is not None
    assert (chosen.usable.path, chosen.index) == (machine.path, 1)
    assert "passed its self-test on this GPU" in str(explain(*inputs))
    machine.anew()
    assert is_right(grouped_gemm(*inputs), *inputs)  # it is remembered
    assert machine.tried == 0


def test_without_the_proof_it_would_have_run(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forged code is wrong in the call, too: what is found is no freak of the trial."""
    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    machine.anew()
    inputs = operands()
    assert not is_right(grouped_gemm(*inputs), *inputs)
    assert machine.tried == 0


def test_a_graph_capture_uses_nothing_that_is_not_tested(machine: Machine) -> None:
    x, w, m_sizes = operands()
    ends = m_sizes.cumsum(0).to(torch.int32)
    torch._grouped_mm(x, w.transpose(1, 2), offs=ends)  # torch's own first call is no part of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = grouped_gemm(x, w, m_sizes)
    assert machine.tried == 0
    graph.replay()
    assert is_right(y, x, w, m_sizes)
    assert is_right(grouped_gemm(x, w, m_sizes), x, w, m_sizes)
    assert machine.tried == 2  # the next call outside proves it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = grouped_gemm(x, w, m_sizes)
    y.fill_(float("nan"))
    graph.replay()
    assert is_right(y, x, w, m_sizes)


def test_a_trial_goes_on_beside_a_capture_of_another_thread(machine: Machine) -> None:
    """It runs while this thread captures a graph, which stays whole."""
    inputs = operands()
    kernel_of = open_bundle(machine.path)
    kernel = loaded(kernel_of, 1, 0, local_gpu(0).gpu.sm_count)
    assert self_test.tried(kernel) is None  # what torch loads late is there
    a = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b = a + 1
        assert self_test.tried(kernel) is None
        c = b * 2
    graph.replay()
    assert c.tolist() == [4.0] * 8
    assert is_right(grouped_gemm(*inputs), *inputs)


def test_preload_proves(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    preload(problems=[PROBLEM], tokens=range(60, 90))
    assert machine.tried >= 2
    assert len([record for record in caplog.records if "left out from now on" in record.getMessage()]) == 1
    tried, inputs = machine.tried, operands()
    assert is_right(grouped_gemm(*inputs), *inputs)
    assert machine.tried == tried


def test_what_ships_for_this_gpu_costs_no_trial(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRETUNED_BUNDLES")
    machine.anew()
    w = torch.randn(128, 1536, 2048, device="cuda").bfloat16()
    rows = torch.full((128,), 4, dtype=torch.int32, device="cuda")
    x = torch.randn(512, 2048, device="cuda").bfloat16()
    grouped_gemm(x, w, rows)
    assert "tested on NVIDIA" in str(explain(x, w, rows))
    assert machine.tried == 0
    assert not self_test_results._memory.results


def test_the_command_finds_what_is_wrong_and_what_faults(tmp_path: Path) -> None:
    """In processes of its own: this one's GPU is as it was."""
    write(tmp_path, faulty=True)
    shipped = Path(str(files("pretuned.artifacts"))) / "bundles" / "weights-sm90.msgpack"
    weights = (
        open_bundle(shipped).variants() if local_gpu(0).sm == 90 else ()
    )  # row kernels that nobody has tested before
    environment = os.environ | {"PRETUNED_BUNDLES": str(tmp_path / "bundles"), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pretuned.runtime", "--self-test", "--json"]
    for _ in range(2):  # the second time nothing is run
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 1, done.stderr
        gpu = json.loads(done.stdout)["gpus"][0]
        print(gpu)
        assert gpu["passed"] == 1 + len(weights)
        assert gpu["tested_before"] > 50
        assert len(gpu["wrong"]) == 2
        assert all("Please file this line" in line for line in gpu["wrong"])
    inputs = operands()
    logging.getLogger("pretuned").info("the GPU is as it was")
    assert torch.isfinite(inputs[0]).all()
