"""SGLang's own kernels in the place of its extension's, and Marlin's list of kernels cut to a layer's."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

MARLIN = """\
#define COMMON_GET_IF_M234(W_TYPE, N_BLOCKS, K_BLOCKS, NUM_THREADS)     \\
  _GET_IF(W_TYPE, 2, N_BLOCKS, K_BLOCKS, false, -1, NUM_THREADS, false) \\
  _GET_IF(W_TYPE, 2, N_BLOCKS, K_BLOCKS, false, 2, NUM_THREADS, false)  \\
  _GET_IF(W_TYPE, 2, N_BLOCKS, K_BLOCKS, false, 8, NUM_THREADS, false)

  COMMON_GET_IF(host::kU4)
  COMMON_GET_IF(host::kU4B8)
    MXFP4_GET_IF(host::kFE2M1f)
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import sglang_kernels

    return sglang_kernels


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules imported so far, in a copy that the test may change."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return sys.modules


def test_an_extension_for_another_torch_is_replaced(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    (tmp_path / "sgl_kernel" / "scalar_type.py").write_text("import sys\nscalar_types = sys.modules[__name__].__name__")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert tool.stand_in() == tool.IN_ITS_PLACE
    module = importlib.import_module("sgl_kernel")
    assert all(getattr(module, name) is getattr(tool, name) for name in tool.IN_ITS_PLACE)
    assert importlib.import_module("sgl_kernel.scalar_type").scalar_types == "sgl_kernel.scalar_type"
    with pytest.raises(NotImplementedError, match=f"sgl_kernel.silu_and_mul: .* torch {torch.__version__[:4]}"):
        module.silu_and_mul(torch.zeros(1))


def test_an_extension_that_loads_stays(tool: ModuleType, modules: dict[str, ModuleType]) -> None:
    modules["sgl_kernel"] = ModuleType("sgl_kernel")
    assert tool.stand_in() == {}
    assert not hasattr(modules["sgl_kernel"], "moe_sum_reduce")


@pytest.mark.parametrize(
    ("dtype", "H", "factor", "kernel"),
    [
        (torch.bfloat16, 16, 1.0, "moe_topk_sum"),
        (torch.bfloat16, 12, 1.0, "moe_sum_reduce_triton"),
        (torch.bfloat16, 16, 2.5, "moe_sum_reduce_triton"),
        (torch.float16, 16, 1.0, "moe_sum_reduce_triton"),
    ],
)
def test_the_sum_is_by_the_kernel_that_can(
    tool: ModuleType, modules: dict[str, ModuleType], dtype: torch.dtype, H: int, factor: float, kernel: str
) -> None:
    """(SGLang's two have no way to run here: which is called is asked.)"""
    called: list[str] = []
    for module, name in (("moe_topk_sum", "moe_topk_sum"), ("fused_moe_triton_kernels", "moe_sum_reduce_triton")):
        modules[f"{tool.OPS}moe.{module}"] = SimpleNamespace(**{name: lambda *_, name=name: called.append(name)})  # type: ignore[assignment]
    tool.moe_sum_reduce(torch.zeros(3, 2, H, dtype=dtype), torch.zeros(3, H, dtype=dtype), factor)
    assert called == [kernel]


def test_an_older_triton_has_what_is_asked_of_it(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    info = pytest.importorskip("triton.language.target_info")
    jit = importlib.import_module("triton.runtime.jit")
    for owner, name in ((info, "is_hip_gfx1250"), (jit.JITFunction, "def_file_line_number")):
        monkeypatch.setattr(owner, name, None, raising=False)
        monkeypatch.delattr(owner, name)
    put = tool.older_triton()
    assert {"is_hip_gfx1250", "def_file_line_number"} <= set(put)
    assert info.is_hip_gfx1250 is info.is_hip
    assert tool.older_triton() == []
    for name in put:
        delattr(info if name == "is_hip_gfx1250" else jit.JITFunction, name)


def test_marlins_list_keeps_a_kinds_kernels(tool: ModuleType) -> None:
    text, gone = tool.fewer(MARLIN, "int4")
    assert gone == 4
    assert [line.strip() for line in text.splitlines() if "GET_IF" in line and "define" not in line] == [
        "_GET_IF(W_TYPE, 2, N_BLOCKS, K_BLOCKS, false, 2, NUM_THREADS, false)  \\",
        "COMMON_GET_IF(host::kU4B8)",
    ]
    assert "MXFP4_GET_IF(host::kFE2M1f)" in tool.fewer(MARLIN, "mxfp4")[0]


def test_sources_without_that_list_are_reported(tool: ModuleType, tmp_path: Path) -> None:
    for name in ("marlin", "marlin_moe"):
        (tmp_path / "gemm" / name).mkdir(parents=True)
    (tmp_path / tool.MARLIN).write_text("void another();")
    with pytest.raises(ValueError, match=r"moe_wna16_marlin.cuh has no list .* COMMON_GET_IF"):
        tool.fewer_marlins(tmp_path, tmp_path / "copy", "int4")


def test_modules_built_beforehand_go_before_others(
    tool: ModuleType, modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    loader = ModuleType("loader")
    loader._find_prebuilt = lambda spec, scope: scope / "own.so"  # type: ignore[attr-defined]
    modules["sglang.kernels.jit.utils.compile.loader"] = loader
    (tmp_path / "marlin").mkdir()
    (tmp_path / "marlin" / "marlin.so").touch()
    tool.take(tmp_path)
    for name, there in (("marlin", tmp_path / "marlin" / "marlin.so"), ("activation", Path("scope") / "own.so")):
        assert loader._find_prebuilt(spec=SimpleNamespace(module_name=name), scope=Path("scope")) == there


def test_building_leaves_what_is_there_and_adds_the_rest(
    tool: ModuleType, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """(Stand-ins for SGLang's loader and two of its modules: it compiles nothing here.)"""
    built, cache = tmp_path / "built", tmp_path / "cache"
    for where in (built / "first", cache):
        where.mkdir(parents=True)
    (built / "first" / "first.so").write_text("old")
    (cache / "second.so").write_text("new")
    loader = ModuleType("loader")
    loader._find_prebuilt = lambda spec, scope: scope / f"{spec.module_name}.so"  # type: ignore[attr-defined]
    compiling = "sglang.kernels.jit.utils.compile"
    modules[compiling] = SimpleNamespace(KERNEL_PATH=tmp_path)  # type: ignore[assignment]
    modules[compiling + ".loader"] = loader
    modules["sglang.kernels.jit.utils.arch"] = SimpleNamespace(
        override_jit_cuda_arch=lambda *_: contextlib.nullcontext()
    )  # type: ignore[assignment]
    modules[tool.OPS + "activation.activation"] = ModuleType("activation")
    monkeypatch.setattr(tool, "_KEPT", {})

    def load(name: str) -> None:
        loader._load(loader._find_prebuilt(spec=SimpleNamespace(module_name=name), scope=cache))

    monkeypatch.setattr(
        tool, "builders", lambda kind: [lambda: load({"bf16": "first", "fp8": "second"}.get(kind, "first"))]
    )
    assert set(tool.build(built, tmp_path / "sources")) == {"first", "second"}
    assert [(built / name / f"{name}.so").read_text() for name in ("first", "second")] == ["old", "new"]
