"""Tests lie as the modules do: ``runtime/ops/layer.py`` has a ``tests/runtime/ops/test_layer.py``, or a row here.

The table is to get shorter. A row goes when its module has a test file of its name.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("artifacts", "kernels", "runtime", "aot")
CODE = (ast.FunctionDef, ast.ClassDef)
# The modules of a room that have no test file of their name, and the files below tests/ that test them ("": none yet).
COVERED: dict[tuple[str, str], str] = {
    ("artifacts", "errors limits"): "artifacts/format/test_codec.py",
    ("artifacts.records", "problem target"): "artifacts/format/test_codec.py",
    ("kernels.contract", "launchable"): "attacks/test_launchable.py",
    ("kernels.contract", "entry hopper portable"): "kernels/contract/test_registry.py",
    ("kernels.contract", "spec words"): "kernels/test_gated.py runtime/driver/test_block.py",
    ("kernels.contract", "rowops"): "kernels/rowops/test_interpreted.py",
    ("kernels.cost", "constants"): "kernels/cost/test_model.py",
    ("kernels.cost", "fits"): "kernels/gemm/test_transposed.py",
    ("kernels.gemm.hopper.operand", "blocks"): "kernels/gemm/hopper/operand/test_dequantize.py",
    ("kernels.gemm.hopper", "wna16_zero"): "kernels/gemm/hopper/operand/test_zeroed.py",
    ("kernels.gemm.hopper", "wna16_mx8"): "kernels/gemm/hopper/operand/test_mx8.py",
    ("kernels.gemm.hopper", "consumer gather pipeline rows weight"): (
        "aot/compile/test_ptx.py kernels/gemm/hopper/test_tf32.py"
    ),
    ("kernels.gemm.portable", "rows tiles weight zero_rows"): "kernels/gemm/test_interpreted.py",
    ("kernels.gemm.portable", "codes"): "kernels/gemm/portable/test_coded.py",
    ("kernels.rowops", "activation gather_combine sort zero_rows"): "kernels/rowops/test_interpreted.py",
    ("kernels.rowops", "quantize_rows"): "kernels/rowops/test_quantize.py",
    ("kernels.rowops", "activation_row_codes"): "kernels/rowops/test_activation_codes.py",
    ("kernels.search", "ampere blackwell coded hopper tiles"): "kernels/search/test_space.py",
    ("runtime", "__main__"): "runtime/inspect/test_doctor.py",
    ("runtime", "config_cache"): "aot/demand/test_tuner.py runtime/integrations/test_unsloth.py",
    ("runtime", "current"): "runtime/dispatch/test_snapshot.py",
    ("runtime", "hooks locks"): "runtime/test_fork.py",
    ("runtime.api", "adapted"): "runtime/api/test_lora.py",
    ("runtime.api", "call"): "runtime/check/test_form.py",
    ("runtime.api", "gradients"): "runtime/api/test_differentiation.py",
    ("runtime.api", "layer_call routing"): "runtime/api/test_moe.py",
    ("runtime.api", "operator_call"): "runtime/api/test_torch_library.py",
    ("runtime.check", "call operands tensors"): "runtime/check/test_form.py runtime/api/test_grouped_gemm.py",
    ("runtime.dispatch", "gather"): "runtime/launch/test_gather.py",
    ("runtime.dispatch", "ranking"): "runtime/dispatch/test_decide.py",
    ("runtime.dispatch", "places"): "runtime/dispatch/test_snapshot.py",
    ("runtime.dispatch", "rowops"): "runtime/launch/test_rowops.py",
    ("runtime.integrations", "sglang"): "engines/test_sglang.py",
    ("runtime.integrations.sglang", "experts"): "engines/test_sglang.py",
    ("runtime.integrations.sglang", "quantised"): "engines/test_sglang_quantised.py",
    ("runtime.integrations.transformers", "param_wrapper"): "runtime/integrations/transformers/test_adapters.py",
    ("runtime.integrations.unsloth", "cache"): "runtime/integrations/test_unsloth.py",
    ("runtime.integrations.vllm", "experts"): "engines/test_vllm_experts.py",
    ("runtime.integrations.vllm", "quantised"): "engines/test_vllm_quantised.py",
    ("runtime.ops", "activation"): "runtime/ops/test_layer.py",
    ("runtime.ops", "gradients"): "runtime/ops/test_autograd.py",
    ("runtime.inspect", "asked explanation"): "runtime/inspect/test_explain.py",
    ("runtime.inspect", "prover survey"): "runtime/inspect/test_prove.py",
    ("runtime.launch", "trials"): "runtime/launch/test_proof.py",
    ("runtime.launch", "ready"): "runtime/launch/test_products.py",
    ("runtime.ops", "products"): "runtime/ops/test_torch_fallback.py",
    ("runtime.ops", "quantised"): "runtime/api/test_quantised.py",
    ("runtime.replay", "layer_plan"): "runtime/replay/test_layer_out.py runtime/ops/test_layer.py",
    ("runtime.replay", "programs"): "runtime/replay/test_plan.py",
    ("runtime.weights", "given"): "runtime/weights/test_expert_weights.py",
    ("aot", "__main__"): "aot/test_main.py",
    ("aot.build", "options summary"): "aot/build/test_build.py",
    ("aot.bundle", "assemble inspect verify"): "aot/build/test_build.py attacks/test_odd_bundles.py",
    ("aot.bundle", "sign"): "aot/cli/test_sign.py",
    ("aot.choose", "bundle candidates"): "aot/tune/test_tuner.py",
    ("aot.choose", "held_against"): "aot/choose/test_incumbents.py",
    ("aot.cli", "build compile measure"): "aot/cli/test_tuning.py",
    ("aot.cli", "diff merge prune"): "aot/cli/test_bundle_tools.py",
    ("aot.cli", "doctor inspect main models plan verify versions"): "aot/cli/test_verbs.py",
    ("aot.cli", "echo options progress sections table"): "aot/cli/test_verbs.py aot/cli/test_mistakes.py",
    ("aot.cli", "bench"): "aot/compare/test_run.py",
    ("aot.compare", "libraries plot products result timing"): "aot/compare/test_run.py",
    ("aot.compare", "triton_kernels"): "benchmarks/test_beside_vllm.py",
    ("aot.compile", "cache"): "attacks/test_caches.py",
    ("aot.compile", "nvidia"): "aot/compile/test_ptx.py",
    ("aot.demand", "api cache"): "aot/demand/test_tuner.py",
    ("aot.executors", "dask_worker"): "aot/executors/test_dask.py",
    ("aot.journal", "records"): "aot/journal/test_file.py",
    ("aot.measure", "clock"): "aot/measure/test_bench.py",
    ("aot.measure", "job"): "aot/tune/test_tuner.py",
    ("aot.models", "layer spec"): "aot/models/test_load.py aot/models/test_hf_config.py",
    ("aot.pack", "image package wheel"): "aot/cli/test_pack.py",
    ("aot.plan", "explained"): "aot/cli/test_explain.py",
    ("aot.plan", "families"): "aot/plan/test_plan.py",
    ("aot.process", "child orphan scratch"): "aot/compile/test_pool.py",
    ("aot.process", "gpus"): "aot/cli/test_tuning.py",
    ("aot.process", "interrupts"): "aot/tune/test_tuner.py",
    ("aot.process", "output_dir output_file"): "attacks/test_caches.py",
    ("aot.report", "cells data folded markup roofline search sheets sources"): "aot/report/test_page.py",
    ("aot.tune", "outcome state task"): "aot/tune/test_tuner.py",
}
# Rooms whose modules are imported by a name made at run time, and by whom.
BY_NAME = {"aot.compile.triton": ("kernels.gemm.portable", "kernels.gemm.hopper", "kernels.rowops")}


def modules(root: Path) -> list[str]:
    """The product's modules, as ``runtime.ops.layer``. An ``__init__.py`` with code is one of its room's name.

    (A layer's front has none but the table of its public names.)
    """
    paths = [path for layer in LAYERS for path in sorted((root / layer).rglob("*.py"))]
    found = []
    for path in paths:
        *room, name = path.relative_to(root).with_suffix("").parts
        if name != "__init__":
            found.append(".".join([*room, name]))
        elif len(room) > 1 and any(isinstance(node, CODE) for node in ast.parse(path.read_text()).body):
            found.append(".".join(room))
    return found


def own_test(module: str) -> str:
    """Its test file below tests/."""
    *room, name = module.split(".")
    return "/".join([*room, f"test_{name}.py"])


@functools.cache
def named(path: Path, text: str) -> tuple[set[str], set[str]]:
    """What a file of tests imports of the product, and which programs of tests/support it may load."""
    found = set[str]()
    for start, names in re.findall(r"from pretuned((?:\.\w+)*) import \(?([\w, \n]+)", text):
        found |= {f"{start}.{name}".lstrip(".") for name in re.findall(r"\w+", names)}
    found |= {name.lstrip(".") for name in re.findall(r"\bpretuned((?:\.\w+)+)", text)}
    nodes = list(ast.walk(ast.parse(text, str(path))))
    helpers = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    helpers |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return found, helpers | set(re.findall(r'"(\w+)\.py"', text))


def imported(root: Path, file: str) -> set[str]:
    """What a test file imports from the product, and what else it loads for that: conftest.py, tests/support.

    A program of tests/support may be named by its file. What a string imports, a process's program, counts as well.
    """
    tests = root / "tests"
    waiting = [tests / file, *(folder / "conftest.py" for folder in (tests / file).parents if folder != tests.parent)]
    seen, found = set[Path](), set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        here, helpers = named(path, path.read_text(encoding="utf-8"))
        found |= here
        waiting += [tests / "support" / f"{name}.py" for name in helpers]
    for layer in LAYERS:  # a public name, by the table of its layer's front
        front = root / layer / "__init__.py"
        for name, home in re.findall(r'"(\w+)": "([\w.]+)"', front.read_text() if front.exists() else ""):
            found |= {f"{layer}.{home}"} if f"{layer}.{name}" in found else set()
    found = {"runtime." + name if name.split(".")[0] == "integrations" else name for name in found}
    return found | {
        room
        for loader, rooms in BY_NAME.items()
        for room in rooms
        if any((one + ".").startswith(loader + ".") for one in found)
    }


def astray(root: Path, covered: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Rule 7: each module has a test file of its name at its place, or a row that is right."""
    there = modules(root)
    rows = {f"{room}.{name}": files.split() for (room, names), files in covered.items() for name in names.split()}
    for module in there:
        if module not in rows and not (root / "tests" / own_test(module)).exists():
            yield f"{module} has no tests/{own_test(module)}, and no row in COVERED"
    for module, files in rows.items():
        if module not in there:
            yield f"{module} stands in COVERED, and is no module"
        elif (root / "tests" / own_test(module)).exists():
            yield f"{module} has tests/{own_test(module)}: its row in COVERED can go"
        room = module.rpartition(".")[0]
        for file in files:
            if not (root / "tests" / file).exists():
                yield f"tests/{file}, which COVERED names for {module}, does not exist"
            elif not any(name == room or name.startswith(room + ".") for name in imported(root, file)):
                yield f"tests/{file}, which COVERED names for {module}, imports nothing of {room}"


def test_tests_mirror_the_tree() -> None:
    assert list(astray(ROOT, COVERED)) == []


A_FILE = "from pretuned.aot.plan import a, b"
MADE = {
    "aot/__init__.py": "def __getattr__(name): ...", "aot/plan/__init__.py": '"""The plan."""', "aot/plan/a.py": "",
    "aot/plan/b.py": "", "tests/aot/plan/test_a.py": A_FILE,
}  # fmt: skip
ROW = {("aot.plan", "b"): "aot/plan/test_a.py"}


def test_a_tree_that_keeps_it(tmp_path: Path) -> None:
    make(tmp_path, MADE)
    assert list(astray(tmp_path, ROW)) == []


@pytest.mark.parametrize(
    ("files", "covered", "complaint"),
    [
        (MADE, {}, "aot.plan.b has no tests/aot/plan/test_b.py, and no row in COVERED"),
        (MADE, {("aot.plan", "b c"): "aot/plan/test_a.py"}, "aot.plan.c stands in COVERED, and is no module"),
        (MADE, {("aot.plan", "a b"): "aot/plan/test_a.py"}, "aot.plan.a has tests/aot/plan/test_a.py: its row"),
        (MADE, {("aot.plan", "b"): "aot/test_x.py"}, "tests/aot/test_x.py, which COVERED names for aot.plan.b, does"),
        ({**MADE, "aot/plan/__init__.py": "def f(): ..."}, ROW, "aot.plan has no tests/aot/test_plan.py, and no row"),
        ({**MADE, "tests/aot/plan/test_a.py": "from pretuned.aot import planner"}, ROW,
         "which COVERED names for aot.plan.b, imports nothing of aot.plan"),
    ],
)  # fmt: skip
def test_one_that_does_not_is_told(
    tmp_path: Path, files: dict[str, str], covered: dict[tuple[str, str], str], complaint: str
) -> None:
    make(tmp_path, files)
    (told,) = astray(tmp_path, covered)
    assert complaint in told


def make(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"tests/test_x.py": "from pretuned.aot.plan import (\n    a,\n    b,\n)"},
         "aot.plan aot.plan.a aot.plan.b"),
        ({"tests/test_x.py": "import fake", "tests/support/fake.py": "import pretuned.aot.tune"}, "aot.tune"),
        ({"tests/test_x.py": 'P = "program.py"', "tests/support/program.py": "import pretuned.aot.tune"}, "aot.tune"),
        ({"tests/aot/cli/test_x.py": "", "tests/aot/conftest.py": "import pretuned.artifacts"}, "artifacts"),
        ({"tests/test_x.py": "import pretuned.integrations.x"}, "runtime.integrations.x"),
        ({"tests/test_x.py": "from pretuned.runtime import f", "runtime/__init__.py": '{"f": "api.g"}'},
         "runtime runtime.api.g runtime.f"),
        ({"tests/test_x.py": "import pretuned.aot.compile.triton"},
         "aot.compile.triton kernels.gemm.hopper kernels.gemm.portable kernels.rowops"),
    ],
)  # fmt: skip
def test_what_a_test_imports(tmp_path: Path, files: dict[str, str], found: str) -> None:
    make(tmp_path, files)
    (file,) = tmp_path.rglob("test_x.py")
    assert sorted(imported(tmp_path, str(file.relative_to(tmp_path / "tests")))) == found.split()
