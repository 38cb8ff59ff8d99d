"""The documented calls of Unsloth's MoE kernels, run on pretuned."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_bundles
import torch
from emulated_driver import EmulatedGpu, emulated
from emulated_kernels import DRIVER as OLD
from torch.nn import functional

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Fusion, Op
from pretuned.integrations import unsloth
from pretuned.integrations.unsloth import (
    GroupedGemm,
    KernelConfigBackward_dW,
    KernelConfigBackward_dX,
    KernelConfigForward,
    get_or_autotune_moe_kernels,
    grouped_gemm,
    grouped_gemm_dW,
    grouped_gemm_dX,
    grouped_gemm_forward,
)
from pretuned.runtime import reload, sort_routing
from pretuned.runtime.dispatch.pin import KernelPair

E, H, I, K, T = 4, 16, 12, 2, 10  # noqa: E741


@pytest.fixture
def layer() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    routing = sort_routing(ids, E)
    return {
        "x": torch.randn(T, H, requires_grad=True),
        "up": (torch.randn(E, 2 * I, H) / 4).requires_grad_(),
        "down": (torch.randn(E, H, I) / 4).requires_grad_(),
        "ids": ids,
        "weights": torch.rand(T, K),
        "rows": routing.gather_indices,
        "m_sizes": routing.m_sizes,
    }


def block(layer: dict[str, torch.Tensor], product: Any = grouped_gemm, **how: Any) -> torch.Tensor:
    """The block that the documentation describes: two grouped GEMMs, silu and mul between, weighted and summed."""
    up, down = layer["up"].reshape(-1, H), layer["down"].reshape(-1, I)  # flattened, [E*N, K]
    h = product(layer["x"], up, layer["m_sizes"], K, layer["rows"], permute_x=True, is_first_gemm=True, **how)
    gate, wide = h.chunk(2, -1)
    y = product(
        functional.silu(gate) * wide,
        down,
        layer["m_sizes"],
        K,
        layer["rows"],
        permute_y=True,
        is_first_gemm=False,
        **how,
    )
    return (y.view(T, K, H) * layer["weights"][..., None]).sum(1)


def wanted(layer: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = []
    for t in range(T):
        tensor = torch.zeros(H)
        for s in range(K):
            e = int(layer["ids"][t, s])
            gate, wide = (layer["up"][e] @ layer["x"][t]).chunk(2)
            tensor = tensor + layer["weights"][t, s] * (layer["down"][e] @ (functional.silu(gate) * wide))
        rows.append(tensor)
    return torch.stack(rows)


@pytest.mark.parametrize("product", [grouped_gemm, GroupedGemm.apply])
@pytest.mark.parametrize("how", ["plain", "configs", "tuned"])
def test_the_documented_block_and_its_gradients(layer: dict[str, torch.Tensor], product: Any, how: str) -> None:
    configs: dict[str, Any] = {}
    if how == "configs":
        configs = {
            "kernel_config_fwd": KernelConfigForward(
                BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, BLOCK_SIZE_K=64, num_warps=8, num_stages=3, use_tma_load_w=True
            ),
            "kernel_config_bwd_dX": KernelConfigBackward_dX(use_tma_load_dy=True),
            "kernel_config_bwd_dW": KernelConfigBackward_dW(use_tma_load_x=True),
        }
    elif how == "tuned":
        names = ("kernel_config_fwd", "kernel_config_bwd_dX", "kernel_config_bwd_dW")
        configs = dict(zip(names, get_or_autotune_moe_kernels(E, H, I, K, torch.float32), strict=True))
    leaves = [layer[name] for name in ("x", "up", "down")]
    grads = torch.autograd.grad(wanted(layer).square().sum(), leaves)
    out = block(layer, product, **configs)
    torch.testing.assert_close(out, wanted(layer))
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), leaves), grads, rtol=1e-4, atol=1e-4)


def test_the_single_calls(layer: dict[str, torch.Tensor]) -> None:
    wish = {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 32,
        "num_warps": 4,
        "num_stages": 3,
        "use_tma_store": False,
        "flatten": True,
        "debug": False,
    }
    how = {"topk": K, "m_sizes": layer["m_sizes"], "gather_indices": layer["rows"], "permute_x": True}
    y = grouped_gemm_forward(
        layer["x"], layer["up"].reshape(-1, H), use_tma_load_w=True, use_tma_load_x=False, **how, **wish
    )
    assert not y.requires_grad
    again = grouped_gemm(layer["x"], layer["up"], layer["m_sizes"], K, layer["rows"], permute_x=True)
    torch.testing.assert_close(y, again.detach())
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(again, (layer["x"], layer["up"]), dy)
    flat = layer["up"].detach().reshape(-1, H)
    torch.testing.assert_close(grouped_gemm_dX(dy, flat, use_tma_load_dy=True, use_tma_load_w=True, **how, **wish), dx)
    x = layer["x"].detach()
    torch.testing.assert_close(grouped_gemm_dW(x, dy, use_tma_load_dy=True, use_tma_load_x=True, **how, **wish), dw)
    with pytest.raises(
        TypeError, match=r"grouped_gemm_dX\(\) got unexpected keyword arguments \['BLOCK_M'\], wanted of"
    ):
        grouped_gemm_dX(dy, flat, BLOCK_M=64, **how)


DOCUMENTED: dict[str, Any] = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 32,
    "num_warps": 4,
    "num_stages": 3,
    "use_tma_load_w": True,
    "use_tma_load_x": True,
    "use_tma_load_dy": True,
    "use_tma_store": True,
    "flatten": False,
    "debug": True,
}


@pytest.mark.parametrize("name", [*DOCUMENTED, "autotune"])
def test_each_single_call_takes_each_documented_knob(layer: dict[str, torch.Tensor], name: str, caplog: Any) -> None:
    x, flat = layer["x"].detach(), layer["up"].detach().reshape(-1, H)
    dy = torch.randn(T * K, 2 * I)
    how = {"topk": K, "m_sizes": layer["m_sizes"], "gather_indices": layer["rows"], "permute_x": True}
    knob = {name: DOCUMENTED.get(name, True)}
    with caplog.at_level(logging.DEBUG, logger=unsloth.__name__):
        for call, inputs in (
            (grouped_gemm_forward, (x, flat)),
            (grouped_gemm_dX, (dy, flat)),
            (grouped_gemm_dW, (x, dy)),
        ):
            assert torch.equal(call(*inputs, **how, **knob), call(*inputs, **how))
    idle = {"debug": 3, "use_tma_load_w": 1, "use_tma_load_x": 1, "use_tma_load_dy": 1}.get(name, 0)
    assert caplog.text.count("changes nothing there") == idle


@pytest.mark.parametrize("kind", [KernelConfigForward, KernelConfigBackward_dX, KernelConfigBackward_dW])
def test_each_config_has_the_documented_fields(kind: type[Any]) -> None:
    loads = {KernelConfigForward: "wx", KernelConfigBackward_dX: ("dy", "w"), KernelConfigBackward_dW: ("dy", "x")}
    own = {f"use_tma_load_{operand}" for operand in loads[kind]}
    common = {name for name in DOCUMENTED if "_load_" not in name and name != "debug"}
    assert {field.name for field in dataclasses.fields(kind)} == {
        *own,
        *common,
        "permute_x",
        "permute_y",
        "fuse_mul_post",
    }
    config = kind(**{name: value for name, value in DOCUMENTED.items() if name in own | common})
    assert (config.BLOCK_SIZE_M, config.num_stages, config.use_tma_store, config.flatten) == (64, 3, True, False)


def test_signatures_are_the_documented_ones() -> None:
    names = list(inspect.signature(grouped_gemm).parameters)
    assert ", ".join(names) == (
        "X, W, m_sizes, topk, gather_indices, permute_x, permute_y, topk_weights, fuse_mul_post, kernel_config_fwd, "
        "kernel_config_bwd_dX, kernel_config_bwd_dW, autotune, is_first_gemm, dX_only, dW_only"
    )
    fields = {field.name for field in dataclasses.fields(KernelConfigForward)}
    assert fields == {
        "BLOCK_SIZE_M",
        "BLOCK_SIZE_N",
        "BLOCK_SIZE_K",
        "num_warps",
        "num_stages",
        "flatten",
        "permute_x",
        "permute_y",
        "fuse_mul_post",
        "use_tma_store",
        "use_tma_load_w",
        "use_tma_load_x",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: the emulated one is for machines without")
def test_a_wish_becomes_the_nearest_config_of_a_bundle(clean_places: Path) -> None:
    small_bundles.write(
        clean_places / "a.msgpack",
        {small_bundles.PROBLEM: [small_bundles.modelled(64, small_bundles.WIDE)]},
        min_driver=OLD,
        tag="a",
    )
    reload()
    sizes = small_bundles.PROBLEM.E, small_bundles.PROBLEM.N, small_bundles.PROBLEM.K
    with emulated(EmulatedGpu()):  # its driver is too old for what ships
        for config, index in (
            (KernelConfigForward(16, 64, 128, 4, 3), small_bundles.NARROW),
            (KernelConfigForward(), small_bundles.ANY),
        ):
            result = unsloth._nearest(config, Op.FORWARD, DType.BF16, sizes, 0)
            assert result.of(Fusion.NONE) == small_bundles.SPECS[index].config
            assert unsloth._nearest(config, Op.FORWARD, DType.BF16, sizes, 0) is result  # looked up once
        assert unsloth._nearest(KernelConfigBackward_dW(), Op.DW, DType.BF16, sizes, 0).configs == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_configs_are_the_ordinary_choices(caplog: pytest.LogCaptureFixture) -> None:
    unsloth._logged.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            configs = get_or_autotune_moe_kernels(128, 2048, 768, 8, torch.bfloat16)
    assert configs == tuple(KernelPair(op) for op in Op)
    (record,) = caplog.records
    assert "no CUDA GPU here" in record.getMessage()


@pytest.fixture
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reload()
    yield tmp_path / "pretuned"
    monkeypatch.undo()
    reload()
    unsloth.clear_cache()


def test_configs_are_kept_under_a_name(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = KernelConfigForward(64, 128, 64), KernelConfigBackward_dX(), KernelConfigBackward_dW()
    assert unsloth.load_cached_config("a layer") is None
    unsloth.save_cached_config("a layer", *configs, metadata={"seq_len": 8192})
    for _ in range(2):
        saved = unsloth.load_cached_config("a layer")
        assert saved is not None
        assert KernelConfigForward(**saved["config_fwd"]) == configs[0]
        assert saved["metadata"] == {"seq_len": 8192}
        unsloth.clear_cache()  # the file stays
    (path,) = overlay.rglob("*.json")
    path.write_bytes(b"damaged")
    assert unsloth.load_cached_config("a layer") is None
    with pytest.raises(InputError, match="config_fwd is a int"):
        unsloth.save_cached_config("b", 3, *configs[1:])
    with pytest.raises(InputError, match="what JSON can say"):
        unsloth.save_cached_config("b", *configs, metadata={"a": {1, 2}})
    monkeypatch.setenv("UNSLOTH_MOE_DISABLE_AUTOTUNE", "1")
    reload()
    unsloth.save_cached_config("c", *get_or_autotune_moe_kernels(128, 2048, 768, 8, torch.bfloat16))
    assert unsloth.load_cached_config("c") is not None
    unsloth.clear_cache()
    assert unsloth.load_cached_config("c") is None  # nothing was written
