"""Results do not depend on torch's default dtype and device, which engines set while a model is loaded."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pretuned.artifacts.records import PRECISIONS
from pretuned.runtime import grouped_gemm, moe_mlp
from pretuned.runtime.ops import fp8_codes
from pretuned.runtime.weights.expert_weights import ExpertWeights

ROOT = Path(__file__).resolve().parents[2]
FORMATS = sorted(name for name, precision in PRECISIONS.items() if precision.quantised)
_SIZED = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace", "eye", "tensor", "scalar_tensor"}
_WHOLE = {"arange", "randint", "randperm"}  # int64, whatever the default dtype is
# vLLM creates a layer's parameters within ``with torch.device(...)``; that is where they belong.
_ON_THE_DEFAULT_DEVICE = {"runtime/integrations/vllm/quantised.py"}


def calls_that_use_defaults(path: Path) -> Iterator[str]:
    """Calls of torch's factories without a device, or without a dtype where the default decides it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        if name not in _SIZED | _WHOLE or ast.unparse(node.func.value) != "torch":
            continue
        named = {keyword.arg for keyword in node.keywords}
        where = str(path.relative_to(ROOT))
        lacks = ({"dtype"} if name in _SIZED else set()) | (
            {"device"} if where not in _ON_THE_DEFAULT_DEVICE else set()
        )
        if lacks - named:
            yield f"{where}:{node.lineno}: {ast.unparse(node)[:80]} lacks {', '.join(sorted(lacks - named))}"


def test_every_new_tensor_names_its_device_and_dtype() -> None:
    """Within ``with torch.device("cuda")`` a table made while a module is imported would be on the GPU for good."""
    files = [path for folder in ("runtime", "kernels") for path in (ROOT / folder).rglob("*.py")]
    assert [line for path in files for line in calls_that_use_defaults(path)] == []


@contextlib.contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype, and a default device that nothing can be computed on."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def tensors_of(format: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantised w in both layouts, and its numbers."""
    weights = ExpertWeights.quantize(w, format)
    results = {f"stored {name}": tensor.clone() for name, tensor in weights.tensors().items()}
    results["numbers"] = weights.dequantize(torch.float32)
    prepared = weights.prepare()
    results |= {f"prepared {name}": tensor.clone() for name, tensor in prepared.tensors().items()}
    return results | {f"restored {name}": tensor for name, tensor in prepared.restore().tensors().items()}


def assert_same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype is tensor.dtype, name
        assert got[name].device == tensor.device, name
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_quantised_weights(format: str, dtype: torch.dtype) -> None:
    w = torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(3)) * 0.05
    want = tensors_of(format, w)
    with defaults(dtype):
        got = tensors_of(format, w)
    assert_same_bits(got, want)


def products(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Results and gradients of a product and a layer, in ``dtype`` and in fp8."""
    generator = torch.Generator("cpu").manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return (numbers * 0.2).to(dtype).requires_grad_()

    x, up, down = normal(40, 128), normal(3, 256, 128), normal(3, 128, 128)
    m_sizes = torch.tensor([16, 0, 24], dtype=torch.int32, device="cpu")
    ids = torch.arange(80, dtype=torch.int64, device="cpu").view(40, 2) % 3
    weights = torch.full((40, 2), 0.5, dtype=torch.float32, device="cpu").requires_grad_()
    results = {"product": grouped_gemm(x, up, m_sizes), "layer": moe_mlp(x, up, down, ids, weights)}
    if dtype is torch.bfloat16:
        results["fp8 product"] = grouped_gemm(x, up, m_sizes, precision="fp8")
        results["fp8 layer"] = moe_mlp(x, up, down, ids, weights, precision="fp8")
    torch.autograd.backward(list(results.values()), list(results.values()))
    gradients = {"dx": x.grad, "dup": up.grad, "ddown": down.grad, "dweights": weights.grad}
    return {name: tensor.detach() for name, tensor in (results | gradients).items() if tensor is not None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_and_gradients(dtype: torch.dtype) -> None:
    want = products(dtype)
    for default in (torch.bfloat16, torch.float64):
        with defaults(default):
            assert_same_bits(products(dtype), want)


@pytest.mark.parametrize("blocks", [False, True])
def test_codes_along_M(blocks: bool) -> None:
    """1 / 448 in bf16 is another number."""
    t = torch.randn(200, 256, generator=torch.Generator().manual_seed(7)).bfloat16()
    m_sizes = torch.tensor([150, 50])
    want = fp8_codes.column_codes(t, m_sizes, blocks=blocks)
    with defaults(torch.bfloat16):
        got = fp8_codes.column_codes(t, m_sizes, blocks=blocks)
    assert_same_bits({"codes": got.codes, "scale": got.scale}, {"codes": want.codes, "scale": want.scale})


IMPORTED_WHILE_A_MODEL_IS_MADE = """
import importlib, pkgutil, torch
torch.set_default_dtype(torch.bfloat16)
import pretuned
with torch.device("meta"):
    for package in ("runtime", "kernels", "artifacts"):
        root = importlib.import_module(f"pretuned.{package}")
        for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            skipped = ".integrations" in module.name or module.name.endswith("__main__")
            if not skipped:
                try:
                    importlib.import_module(module.name)
                except ModuleNotFoundError as error:
                    assert error.name.partition(".")[0] in ("triton",), error
    from pretuned.runtime import ExpertWeights
w = torch.randn(2, 128, 256, dtype=torch.float32)
for format in ("fp8_block", "mxfp8", "mxfp4", "nvfp4", "int4_g128"):
    stored = ExpertWeights.quantize(w, format)
    want = stored.dequantize(torch.float32)
    assert torch.equal(stored.prepare().dequantize(torch.float32), want)
print("right")
"""


@pytest.mark.slow
def test_modules_imported_while_a_model_is_made() -> None:
    """``with torch.device(...)`` holds for the tables of modules, too, that a first layer imports."""
    command = [sys.executable, "-c", IMPORTED_WHILE_A_MODEL_IS_MADE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == ("right\n", 0), ended.stderr
