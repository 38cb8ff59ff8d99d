"""The examples of docs/runtime/quantised.md run as they stand, on small checkpoints with the models' own names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pretuned.artifacts.records import PRECISIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "runtime" / "quantised.md"
E, H, I = 4, 256, 128  # noqa: E741


def _write(folder: Path, config: dict[str, Any], *files: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    where = {}
    for number, tensors in enumerate(files):
        name = f"model-{number}.safetensors"
        save_file(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps({"hidden_size": H, "num_experts_per_tok": 2, **config}))


def _deepseek(layer: int, experts: range) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.mlp.experts.{e}.{name}.{suffix}": value
        for e in experts
        for name, N, K in (("gate_proj", I, H), ("up_proj", I, H), ("down_proj", H, I))
        for suffix, value in (
            ("weight", torch.randn(N, K).to(torch.float8_e4m3fn)),
            ("weight_scale_inv", torch.full((N // 128, K // 128), K**-0.5)),
        )
    }


def _gpt_oss() -> dict[str, torch.Tensor]:
    name, tensors = "model.layers.0.mlp.experts", {}
    for projection, N, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        tensors[f"{name}.{projection}_blocks"] = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8)
        tensors[f"{name}.{projection}_scales"] = torch.full((E, N, K // 32), 121, dtype=torch.uint8)
        tensors[f"{name}.{projection}_bias"] = torch.randn(E, N).bfloat16()
    return tensors


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    _write(
        tmp_path / "DeepSeek-V3",
        {"n_routed_experts": E, "quantization_config": quantised},
        _deepseek(3, range(2)),
        _deepseek(3, range(2, E)) | _deepseek(4, range(1)),
    )
    _write(
        tmp_path / "gpt-oss-20b", {"num_local_experts": E, "quantization_config": {"quant_method": "mxfp4"}}, _gpt_oss()
    )
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {"__name__": "example"}
    for block, format in zip(blocks, ("fp8_block", "mxfp4"), strict=True):
        exec(compile(block, str(PAGE), "exec"), names)  # our own page
        assert names["gate_up"].format == names["down"].format == format
        assert names["gate_up"].shape == (E, 2 * I, H)
        assert names["out"].shape == names["hidden"].shape
        assert names["out"].isfinite().all()
        assert names["out"].any()


def test_the_table_has_every_format_and_its_bits() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = {
        name: row.split("|")[4]
        for row in text.splitlines()
        if row.startswith("| `") and row.count("|") == 8
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert set(rows) | {"fp8_block_a16", "fp8_channel_a16"} == {
        n for n, precision in PRECISIONS.items() if precision.quantised
    }
    for name, row in rows.items():
        bits = PRECISIONS[name].w_bytes(4096, 4096) * 8 / 4096**2
        assert any(abs(float(part) - bits) < 0.006 for part in row.split(",")), (name, row, bits)
