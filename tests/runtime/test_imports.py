"""Importing the runtime has no effects."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
import warm


def modules_after(code: str, *, cold: bool = False, **environment: str) -> dict[str, bool]:
    """In a new process, after ``code``: whether each of some modules is imported, and whether CUDA is.

    The process has imported torch and nothing else of these, unless it is ``cold``.
    """
    report = """
import json, sys
watched = ("torch", "triton", "click", "rich", "pebble", "filelock", "msgpack",
           "pretuned.aot", "pretuned.artifacts.bundle_file", "pretuned.artifacts.format", "pretuned.kernels",
           "pretuned.kernels.registry", "pretuned.kernels.cost_model", "pretuned.kernels.portable_plain.rows",
           "pretuned.runtime.dispatch", "pretuned.runtime.driver.cuda", "pretuned.runtime.launch",
           "pretuned.runtime.launch.loader", "pretuned.runtime.ops")
found = {name: name in sys.modules for name in watched}
torch = sys.modules.get("torch")
print(json.dumps(found | {"cuda": bool(torch and torch.cuda.is_initialized())}))
"""
    words, env = ["-c", code + report], {"PATH": os.environ["PATH"], **environment}
    done = (
        subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)
        if cold
        else warm.run(words, env=env)
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    imported: dict[str, bool] = json.loads(done.stdout)
    return imported


@functools.cache
def modules_of_torch() -> dict[str, bool]:
    modules = modules_after("import torch")
    assert not [name for name, imported in modules.items() if imported and name.startswith("pretuned")]
    return modules


def test_the_package_alone_imports_nothing() -> None:
    """Not even ``typing``, which takes longer than all that is left."""
    code = "import sys; before = set(sys.modules); import pretuned.runtime; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    system = {"__future__", "importlib", "importlib._bootstrap", "importlib._bootstrap_external", "warnings"}
    assert set(done.stdout.split()) <= system | {"pretuned", "pretuned.runtime"}


@pytest.mark.slow  # a process that imports torch
# Each is a process of its own: one in the quick run.
@pytest.mark.parametrize(
    "name",
    [
        "grouped_gemm",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("explain", "preload", "reload", "fingerprint", "Explanation")
        ),
    ],
)
def test_a_call_adds_no_triton_and_no_command_line(name: str) -> None:
    alone = modules_of_torch()
    modules = modules_after(f"from pretuned.runtime import {name}", PRETUNED_STRICT="maybe")
    for module in (
        "triton",
        "click",
        "rich",
        "pebble",
        "filelock",
        "pretuned.aot",
        "pretuned.kernels.portable_plain.rows",
        "pretuned.kernels.cost_model",
        "cuda",
    ):
        assert modules[module] <= alone[module], module


@pytest.mark.slow  # a process that imports torch
def test_bundles_and_the_driver_wait_for_a_first_call() -> None:
    """The import runs nothing that reads a bundle, loads a kernel or asks the driver."""
    alone = modules_of_torch()
    modules = modules_after("from pretuned.runtime import grouped_gemm, moe_mlp")
    imported = {"pretuned.kernels", "pretuned.runtime.dispatch", "pretuned.runtime.launch", "pretuned.runtime.ops"}
    waits = [name for name in modules if name.startswith(("msgpack", "filelock", "pretuned.")) and name not in imported]
    assert len(waits) == 10
    for module in waits:
        assert modules[module] <= alone[module], module
    called = modules_after(
        "import torch; from pretuned.runtime import grouped_gemm\n"
        "grouped_gemm(torch.ones(2, 4), torch.ones(1, 3, 4), torch.tensor([2]))"
    )
    assert called["pretuned.runtime.ops"]  # else nothing above says anything


@pytest.mark.slow  # a process that imports torch
def test_preload_leaves_little_of_that_to_the_first_call() -> None:
    assert modules_after("from pretuned.runtime import preload, grouped_gemm")["pretuned.runtime.ops"]


@pytest.mark.slow  # a process that imports torch
def test_a_call_on_the_host_needs_no_home_and_no_triton() -> None:
    code = """
import torch
from pretuned.runtime import grouped_gemm
y = grouped_gemm(torch.ones(2, 4), torch.ones(1, 3, 4), torch.tensor([2]))
assert y.tolist() == [[4.0] * 3] * 2
"""
    modules = modules_after(code, cold=True)
    assert not modules["triton"]
    assert not modules["cuda"]


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    import pretuned.runtime as runtime

    assert sorted(runtime.__all__) == sorted(runtime._PUBLIC)
    for name in runtime.__all__:
        assert callable(getattr(runtime, name)), name
        assert name in dir(runtime)
    with pytest.raises(AttributeError, match="no attribute 'gruoped_gemm'"):
        _ = runtime.gruoped_gemm
