"""The rules of the house, read off the code: which room may use which, and how large rooms, files, functions may get.

A room is a folder of a layer. ``ORDER`` lists each layer's rooms from the bottom up: a room may use those before it and
the layers below. Names in one string are neighbours, which do not use each other. docs/inside/architecture.md draws
the same. Every rule here is a function of a tree or of that page, so that the tests below can hold a made-up one
against it, too.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER: dict[str, tuple[str, ...]] = {
    "artifacts": ("limits errors", "names", "records", "format", "code", "files"),
    "kernels": ("hardware codes", "contract", "search cost reference", "gemm.portable", "gemm.hopper rowops"),
    "runtime": (
        "locks", "current settings driver weights", "hooks", "verdicts config_cache", "dispatch", "check", "launch",
        "ops", "replay inspect", "api", "integrations",
    ),
    "aot": (
        "process models", "compile journal plan", "measure bundle", "executors choose report pack", "tune compare",
        "build demand", "cli",
    ),
}  # fmt: skip
LAYERS = tuple(ORDER)
# What else than the standard library a layer or a room may import; the longest name that fits counts.
THIRD_PARTY: dict[str, frozenset[str] | None] = {  # None: anything
    "artifacts": frozenset({"msgpack", "filelock"}),
    "artifacts.files.signature": frozenset({"cryptography"}),
    "kernels": frozenset({"torch"}),
    "kernels.hardware": frozenset(),
    "kernels.contract": frozenset(),
    "kernels.search": frozenset(),
    "kernels.cost": frozenset(),
    "kernels.gemm": frozenset({"triton"}),
    "kernels.rowops": frozenset({"triton"}),
    "runtime": frozenset({"torch"}),
    "runtime.dispatch": frozenset(),  # what is chosen needs no torch
    "runtime.integrations.plug_in": frozenset({"prometheus_client"}),
    "runtime.integrations.sglang": frozenset({"sglang"}),
    "runtime.integrations.sglang.experts": frozenset({"sglang", "torch"}),
    "runtime.integrations.sglang.quantised": frozenset({"sglang", "torch"}),
    "runtime.integrations.transformers": frozenset({"torch", "transformers"}),
    "runtime.integrations.transformers.adapters": frozenset({"torch"}),
    "runtime.integrations.transformers.gates": frozenset({"torch"}),
    "runtime.integrations.transformers.injection": frozenset({"torch"}),
    "runtime.integrations.transformers.lora": frozenset({"torch"}),
    "runtime.integrations.transformers.param_wrapper": frozenset({"peft", "torch"}),
    "runtime.integrations.transformers.packed": frozenset({"compressed_tensors", "torch", "transformers"}),
    "runtime.integrations.transformers.quantised": frozenset({"torch"}),
    "runtime.integrations.vllm": frozenset({"vllm"}),
    "runtime.integrations.vllm.experts": frozenset({"torch", "vllm"}),
    "runtime.integrations.vllm.quantised": frozenset({"torch", "vllm"}),
    "aot": None,
}
TRITON = ("kernels.gemm", "kernels.rowops", "aot.compile", "aot.compare")  # who may import Triton
VENDOR_FREE = (
    "runtime.weights", "runtime.dispatch", "runtime.check", "runtime.ops", "runtime.replay", "runtime.api",
    "aot.choose", "aot.tune", "aot.journal",
)  # fmt: skip
# (torch says cuda of every vendor's GPU; cubin_sha256 and ptxas are names of the bundle format's fields.)
VENDOR = re.compile(r"libcuda|\bptx\b|sm_\d+|nvidia", re.IGNORECASE)
MOST_MODULES, MOST_LINES, MOST_PARAMETERS = 14, 650, 12
MANY_MODULES = ("aot", "cli")  # a file a verb
# Signatures that are others' or the command line's, and what hands them on.
MANY_PARAMETERS = {
    "grouped_gemm", "traced", "explain",  # the documented parameters of grouped_gemm
    "moe_mlp",  # its own documented ones
    "build",  # the options of aot build
    "rows",  # kernels/reference.py: every fused form in one equation
}  # fmt: skip
STDLIB = frozenset(__import__("sys").stdlib_module_names)


class Import(NamedTuple):
    """One name that a module imports: ``name`` is absolute, below ``pretuned`` without that word."""

    line: int
    name: str
    ours: bool


class Module(NamedTuple):
    """A file of the product. ``name`` is its import name without ``pretuned``."""

    path: Path
    name: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @property
    def room(self) -> str:
        """The layer and what stands in ``ORDER``."""
        return room_of(self.name)


def room_of(name: str) -> str:
    """``runtime.dispatch`` of ``runtime.dispatch.decide``: the longest that ``ORDER`` lists, or the layer."""
    layer, _, rest = ("runtime." + name if name.split(".")[0] == "integrations" else name).partition(".")
    rooms = [one for floor in ORDER[layer] for one in floor.split() if rest == one or rest.startswith(one + ".")]
    return f"{layer}.{max(rooms, key=len)}" if rooms else layer


def read(root: Path) -> dict[str, Module]:
    """Every module of the product, by name."""
    found = {}
    for layer in LAYERS:
        for path in sorted((root / layer).rglob("*.py")):
            parts = list(path.relative_to(root).with_suffix("").parts)
            parts = parts[1:] if parts[:2] == ["runtime", "integrations"] else parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            found[name] = Module(path, name, tree, tuple(ast.walk(tree)))
    return found


def imports(module: Module, every: dict[str, Module]) -> Iterator[Import]:
    """Everything that a module imports, inside functions and under TYPE_CHECKING, too."""
    package = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                ours = alias.name.startswith("pretuned.")
                yield Import(node.lineno, alias.name.removeprefix("pretuned."), ours)
        elif isinstance(node, ast.ImportFrom):
            if not node.level and (node.module or "").split(".")[0] != "pretuned":
                yield Import(node.lineno, node.module or "", False)
                continue
            above = package[: len(package) - node.level + 1] if node.level else []
            said = node.module.split(".") if node.module else []
            base = ".".join([*above, *(said if node.level else said[1:])])
            for alias in node.names:
                whole = f"{base}.{alias.name}" if base else alias.name
                yield Import(node.lineno, whole if whole in every else base, True)


def _floor(room: str) -> int:
    layer, _, rest = room.partition(".")
    return next((i for i, floor in enumerate(ORDER[layer]) if rest in floor.split()), len(ORDER[layer]))


def imports_that_go_up(every: dict[str, Module]) -> Iterator[str]:
    """Rule 1: an import goes down, wherever it stands."""
    for module in every.values():
        for one in imports(module, every):
            if not one.ours:
                continue
            here, there = module.room, room_of(one.name)
            mine, theirs = (LAYERS.index(room.split(".")[0]) for room in (here, there))
            up = theirs > mine or (mine == theirs and here != there and _floor(there) >= _floor(here))
            if up and not (module.path.name == "__init__.py" and "." not in module.name):  # a layer's own front
                yield f"{module.path}:{one.line}: {here} uses {one.name}, which stands beside or above it"


def engines_that_meet(every: dict[str, Module]) -> Iterator[str]:
    """Rule 1 inside ``integrations``: an engine's room uses no other's, and what they share uses none of them."""
    rooms = {name.rpartition(".")[0] for name in every if re.fullmatch(r"integrations\.\w+\.\w+", name)}
    for module in every.values():
        for one in imports(module, every):
            here, there = (".".join(name.split(".")[:2]) for name in (module.name, one.name))
            if here.startswith("integrations.") and one.ours and there in rooms - {here}:
                yield f"{module.path}:{one.line}: {here} uses {one.name}, another engine's"


def circles(every: dict[str, Module]) -> Iterator[str]:
    """Rule 2: no circle of modules, of any kind of import."""
    uses = {
        name: {one.name for one in imports(module, every) if one.ours and one.name in every and one.name != name}
        for name, module in every.items()
        if not (module.path.name == "__init__.py" and "." not in name)
    }
    done: set[str] = set()
    for start in uses:
        path, ahead = [start], [iter(uses[start])]
        while ahead:
            name = next(ahead[-1], None)
            if name is None:
                done.add(path.pop())
                ahead.pop()
            elif name in path:
                yield "a circle: " + " -> ".join([*path[path.index(name) :], name])
            elif name in uses and name not in done:
                path.append(name)
                ahead.append(iter(uses[name]))


def foreign_imports(every: dict[str, Module]) -> Iterator[str]:
    """Rule 3: a room imports the packages that are its own to import; Triton belongs to the rooms of kernels."""
    for module in every.values():
        named = "runtime." + module.name if module.name.startswith("integrations") else module.name
        allowed = THIRD_PARTY[max((one for one in THIRD_PARTY if f"{named}.".startswith(one + ".")), key=len)]
        for one in imports(module, every):
            first = one.name.split(".")[0]
            if one.ours or first in STDLIB:
                continue
            if allowed is not None and first not in allowed:
                yield f"{module.path}:{one.line}: {module.room} imports {first}, allowed are {sorted(allowed)}"
            if first == "triton" and not named.startswith(TRITON):
                yield f"{module.path}:{one.line}: {module.room} imports triton, which {', '.join(TRITON)} may"


def vendor_words(every: dict[str, Module]) -> Iterator[str]:
    """Rule 4: no vendor's word in the rooms that serve every vendor's GPU."""
    for module in every.values():
        if module.room in VENDOR_FREE:
            for number, line in enumerate(module.path.read_text(encoding="utf-8").splitlines(), 1):
                word = VENDOR.search(line)
                if word:
                    yield f"{module.path}:{number}: {module.room} says {word[0]}"


def large_ones(every: dict[str, Module]) -> Iterator[str]:
    """Rule 5: rooms of at most 14 modules, modules of at most 650 lines, functions of at most 12 parameters."""
    rooms: dict[Path, int] = defaultdict(int)
    for module in every.values():
        rooms[module.path.parent] += module.path.name != "__init__.py"
        lines = len(module.path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            yield f"{module.path}: {lines} lines, at most {MOST_LINES}"
        if module.room.startswith(("kernels.gemm", "kernels.rowops")):
            continue
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef) and node.name not in MANY_PARAMETERS:
                given = node.args
                count = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
                count -= bool(given.args) and given.args[0].arg in ("self", "cls")
                if count > MOST_PARAMETERS:
                    yield f"{module.path}:{node.lineno}: {node.name} has {count} parameters, at most {MOST_PARAMETERS}"
    for path, count in rooms.items():
        if count > MOST_MODULES and path.parts[-2:] != MANY_MODULES:
            yield f"{path}: {count} modules, at most {MOST_MODULES}"


def classes_of_one_name(every: dict[str, Module]) -> Iterator[str]:
    """Rule 6: a public class's name stands for one thing, with an underscore before it, too."""
    found: dict[str, list[str]] = defaultdict(list)
    public: set[str] = set()
    for module in every.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{module.path}:{node.lineno}")
                if not node.name.startswith("_"):
                    public.add(node.name)
    for name, places in found.items():
        if len(places) > 1 and name in public:
            yield f"class {name} is defined {len(places)} times: {', '.join(places)}"


RULES: tuple[Callable[[dict[str, Module]], Iterator[str]], ...] = (
    imports_that_go_up, engines_that_meet, circles, foreign_imports, vendor_words, large_ones, classes_of_one_name,
)  # fmt: skip


@functools.cache
def product() -> dict[str, Module]:
    """Ours, parsed when a test first asks."""
    return read(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_product_keeps(rule: Callable[[dict[str, Module]], Iterator[str]]) -> None:
    assert list(rule(product())) == []


def test_every_room_is_on_a_floor() -> None:
    rooms = {f"{layer}.{one}" for layer, floors in ORDER.items() for floor in floors for one in floor.split()}
    there = {module.room for module in product().values() if module.path.name not in ("__init__.py", "__main__.py")}
    assert there == rooms
    for module in product().values():
        if module.path.name == "__init__.py":
            assert ast.get_docstring(module.tree), f"{module.path} does not say what is in the room"


# Each rule beside a tree that breaks it: files, and what the complaint has to say.
BROKEN: list[tuple[Callable[[dict[str, Module]], Iterator[str]], dict[str, str], str]] = [
    (imports_that_go_up, {"kernels/contract/a.py": "from ...runtime import x"},
     "a.py:1: kernels.contract uses runtime"),
    (imports_that_go_up, {"runtime/check/a.py": "def f():\n    from ..ops.b import c", "runtime/ops/b.py": "c = 1"},
     "a.py:2: runtime.check uses runtime.ops.b"),
    (imports_that_go_up, {"runtime/replay/a.py": "from ..inspect import b", "runtime/inspect/b.py": ""},
     "beside or above"),
    (imports_that_go_up, {"runtime/integrations/a.py": "", "runtime/api/b.py": "from ...integrations import a"},
     "runtime.api uses integrations.a"),
    (engines_that_meet, {"runtime/integrations/a/__init__.py": "", "runtime/integrations/a/x.py": "from ..b.y import z",
                         "runtime/integrations/b/__init__.py": "", "runtime/integrations/b/y.py": "z = 1"},
     "x.py:1: integrations.a uses integrations.b.y, another engine's"),
    (circles, {"aot/plan/a.py": "from . import b", "aot/plan/b.py": "def f():\n    from .c import d",
               "aot/plan/c.py": "from .a import e"}, "aot.plan.a -> aot.plan.b -> aot.plan.c -> aot.plan.a"),
    (foreign_imports, {"runtime/dispatch/a.py": "import torch"}, "runtime.dispatch imports torch, allowed are []"),
    (foreign_imports, {"runtime/api/a.py": "import numpy as np"}, "allowed are ['torch']"),
    (foreign_imports, {"aot/tune/a.py": "def f():\n    import triton.language"}, "a.py:2: aot.tune imports triton"),
    (vendor_words, {"runtime/ops/a.py": "x = 1\ny = 'sm_90'"}, "a.py:2: runtime.ops says sm_90"),
    (large_ones, {"aot/plan/a.py": "x = 1\n" * 651}, "651 lines, at most 650"),
    (large_ones, {f"aot/plan/{name}.py": "" for name in "abcdefghijklmno"}, "plan: 15 modules, at most 14"),
    (large_ones, {f"runtime/integrations/{name}.py": "" for name in "abcdefghijklmno"},
     "integrations: 15 modules, at most 14"),
    (large_ones, {"aot/plan/a.py": "class A:\n    def f(self, a, b, c, d, e, g, h, i, j, k, *, m, n, o): ..."},
     "a.py:2: f has 13 parameters"),
    (classes_of_one_name, {"aot/plan/a.py": "class A: ...", "runtime/api/b.py": "class A: ..."},
     "class A is defined 2 times"),
    (classes_of_one_name, {"aot/plan/a.py": "class A: ...", "runtime/api/b.py": "def f():\n    class _A: ..."},
     "class A is defined 2 times"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "files", "complaint"), BROKEN)
def test_a_tree_that_breaks_a_rule_is_told(
    rule: Callable[[dict[str, Module]], Iterator[str]], files: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    told = list(rule(read(tmp_path)))
    assert any(complaint in one for one in told), told
    assert {other.__name__ for other in RULES if list(other(read(tmp_path)))} == {rule.__name__}


PAGE = "docs/inside/architecture.md"


def drawn(page: str) -> dict[str, tuple[frozenset[str], ...]]:
    """The floors of each layer that a page draws, from the bottom up.

    A drawing is indented. Its first line names layers, and each name begins a column; a line below it is a floor.
    """
    found: dict[str, list[frozenset[str]]] = {}
    columns: list[tuple[str, int]] = []
    for line in page.splitlines():
        if not line.startswith("    ") or not line.strip():
            columns = []
            continue
        words = [(match[0], match.start()) for match in re.finditer(r"\S+", line)]
        if not columns and {word for word, _ in words} <= set(LAYERS):
            columns = words
            continue
        for i, (layer, start) in enumerate(columns):
            end = columns[i + 1][1] if i + 1 < len(columns) else len(line)
            floor = frozenset(word.replace("/", ".") for word, at in words if start <= at < end)
            if floor:
                found.setdefault(layer, []).append(floor)
    return {layer: tuple(reversed(floors)) for layer, floors in found.items()}


def drawn_otherwise(page: str) -> Iterator[str]:
    """Rule 9: the page draws the floors that ``ORDER`` has."""
    there = drawn(page)
    for layer, floors in ORDER.items():
        wanted = tuple(frozenset(floor.split()) for floor in floors)
        got = there.get(layer, ())
        for i in range(max(len(wanted), len(got))):
            here, said = (" ".join(sorted(floors[i])) if i < len(floors) else "none" for floors in (got, wanted))
            if here != said:
                yield f"{PAGE}: floor {i + 1} of {layer} is {here}, ORDER in tests/test_architecture.py says {said}"


def test_the_page_draws_the_same_floors() -> None:
    assert list(drawn_otherwise((ROOT / PAGE).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("layer", "floors", "complaint"),
    [
        ("artifacts", ORDER["artifacts"][:-1], "floor 6 of artifacts is none, "),
        ("kernels", ("contract", "hardware", *ORDER["kernels"][2:]), "floor 1 of kernels is contract, "),
        ("runtime", (*ORDER["runtime"], "shop"), "is shop, ORDER in tests/test_architecture.py says none"),
        ("aot", ("process", *ORDER["aot"][1:]), "is process, ORDER in tests/test_architecture.py says models process"),
        ("aot", (), "floor 7 of aot is none, "),
    ],
)  # fmt: skip
def test_a_page_that_draws_other_floors_is_told(layer: str, floors: tuple[str, ...], complaint: str) -> None:
    lines = [f"    {name}" + "".join(f"\n      {floor}" for floor in reversed(floors if name == layer else ORDER[name]))
             for name in LAYERS]  # fmt: skip
    told = list(drawn_otherwise("\n\n".join(lines)))
    assert any(complaint in one for one in told), told
    assert all(f" of {layer} is " in one for one in told), told
