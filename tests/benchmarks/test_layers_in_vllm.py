"""vLLM's own layers beside the same with the plug-in: what is asked for, and the weights that are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pretuned.aot.models.catalogue import catalogue
from pretuned.runtime import ExpertWeights

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import layers_in_vllm

    return layers_in_vllm


def parameter(shape: tuple[int, ...], dtype: torch.dtype, *, turned: bool = False) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    parameter.is_transposed = turned
    return parameter


def test_every_backend_has_the_same_weights(tool: ModuleType) -> None:
    """One pads them, another has them turned: what the model has is the same."""
    E, H, I = 2, 64, 32  # noqa: E741
    kind_of_layer = tool.Kind("m", E, H, I, 2, ())
    plain, padded = parameter((E, 2 * I, H // 2), torch.uint8), parameter((E, 128, 64), torch.uint8)
    straight, turned = parameter((E, H, I // 8), torch.int32), parameter((E, I // 8, H), torch.int32, turned=True)
    for name, kind, pair in (("w13_weight", "mxfp4", (plain, padded)), ("w2_packed", "int4", (straight, turned))):
        for each in pair:
            torch.manual_seed(0)
            tool.draw(name, each, kind, kind_of_layer)
    assert torch.equal(padded[:, : 2 * I, : H // 2], plain)
    assert not padded[:, 2 * I :].any()
    assert plain.float().std() > 10
    assert torch.equal(turned.mT, straight)
    scale = parameter((2, 2, 1), torch.float32)
    tool.draw("w13_weight_scale_inv", scale, "fp8", tool.Kind("m", 2, 128, 128, 2, ()))
    assert float(scale.data.min()) > 0


def test_a_routing(tool: ModuleType) -> None:
    """Whoever chooses by the logits, in bf16 as a router gives them, chooses the same: no two of a token are equal."""
    for E in (8, 384):
        x, logits, weights, ids = tool.routing(tool.Kind("m", E, 64, 32, 3, ()), 50, "cpu")
        assert (x.shape, logits.shape, weights.shape, ids.dtype) == ((50, 64), (50, E), (50, 3), torch.int32)
        assert (logits.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
        assert all(len(set(row)) == E for row in logits.tolist())
        assert float(logits.min()) > 0
        assert float(logits.max()) <= 2
        torch.testing.assert_close(logits.gather(1, ids.long()).float().softmax(-1), weights)
        used = torch.bincount(ids.flatten().long(), minlength=E)
        assert int(used.max()) < (50 if E == 8 else 10)  # spread over the experts


class Method:
    """A quantisation method through which vLLM calls a layer. ``monolithic``: it chooses the experts."""

    skip_forward_padding = False

    def __init__(self, *, monolithic: bool) -> None:
        self.is_monolithic = monolithic

    def apply(
        self, layer: object, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **_: object
    ) -> torch.Tensor:
        return x * topk_weights.sum(-1, keepdim=True) + topk_ids.sum(-1, keepdim=True)

    def apply_monolithic(self, layer: object, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        weights, ids = Router().select_experts(x, router_logits)
        return self.apply(layer, x, weights, ids)


class Router:
    """Chooses two."""

    def select_experts(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, ids = router_logits.float().topk(2, -1)
        return values.softmax(-1), ids.int()


def test_a_call_is_the_same_whoever_chooses_the_experts(tool: ModuleType) -> None:
    """And a layer that is padded has tokens that are, and gives back as many columns as they had."""
    routing = tool.routing(tool.Kind("m", 8, 64, 32, 2, ()), 5, "cpu")
    for hidden in (64, 128):
        config, result = SimpleNamespace(hidden_dim=hidden), []
        for monolithic, routed in ((False, False), (False, True), (True, True)):
            method = Method(monolithic=monolithic)
            layer = SimpleNamespace(quant_method=method, moe_config=config, router=Router())
            result.append(tool.call_of(layer, routing, routed)())
        assert result[0].shape == (5, 64)
        for value in result[1:]:
            torch.testing.assert_close(value, result[0])


def test_what_is_asked_for(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "vllm" / "model_executor"
    place.mkdir(parents=True)
    options = tool.arguments(["--vllm", str(tmp_path), "--json", "o.json", "--tokens", "1,16"])
    assert (options.kinds, options.tokens) == (["bf16", "fp8", "mxfp4", "int4"], [1, 16])
    options = tool.arguments(["--vllm", str(tmp_path), "--json", "o.json", "--kinds", "flagships"])
    assert [tool.KINDS[kind].weights for kind in options.kinds] == ["mxfp4"] * 3 + ["fp8", "bf16"]
    for wrong, message in ((["--kinds", "fp3"], "'fp3' is none of bf16, fp8"), (["--vllm", "."], "no folder vllm")):
        with pytest.raises(SystemExit):
            tool.arguments(["--vllm", str(tmp_path), "--json", "o.json", *wrong])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("weights", ["bf16", "fp8", "mxfp4"])
def test_pretuneds_layer_without_vllm_has_the_weights_that_vllms_are_given(tool: ModuleType, weights: str) -> None:
    E, H, I = 4, 256, 128  # noqa: E741
    kind = tool._flagship("m", E, H, I, 2, weights)._replace(numbers=None)
    direct, routed = tool.Direct(kind, "cpu"), tool.routing(kind, 5, "cpu")
    torch.manual_seed(0)
    dense = []
    for which, N, K in (("w13", 2 * I, H), ("w2", H, I)):
        wide, narrow = {
            "bf16": ((N, K), None),
            "fp8": ((N, K), (N // 128, K // 128)),
            "mxfp4": ((N, K // 2), (N, K // 32)),
        }[weights]
        w = parameter((E, *wide), {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}.get(weights, torch.uint8))
        tool.draw(f"{which}_weight", w, weights, kind)
        if narrow is None:
            dense.append(w.data.float())
            continue
        scale = parameter((E, *narrow), torch.float32 if weights == "fp8" else torch.uint8)
        tool.draw(f"{which}_weight_scale" + ("_inv" if weights == "fp8" else ""), scale, weights, kind)
        make = ExpertWeights.fp8_block if weights == "fp8" else ExpertWeights.mxfp4
        dense.append(torch.stack([make(w.data, scale.data).dequantize(torch.float32, e) for e in range(E)]))
    got, wanted = direct.call(routed)(), torch.zeros(5, H)
    for t in range(5):
        for weight, e in zip(routed.weights[t], routed.ids[t].long(), strict=True):
            gate, up = (dense[0][e] @ routed.x[t].float()).chunk(2)
            wanted[t] += weight * (dense[1][e] @ (torch.nn.functional.silu(gate) * up))
    assert tool.distance(got, wanted) < (5e-2 if weights == "fp8" else 1e-2)


def test_flagships_have_the_sizes_of_the_catalogue(tool: ModuleType) -> None:
    layers = {entry.id.partition("/")[2]: entry.layer for entry in catalogue().values()}
    checked = 0
    for kind in tool.KINDS.values():
        name, _, ranks = kind.model.partition(", ep=")
        if kind.is_flagship and name in layers:
            layer = layers[name]
            assert (kind.E, kind.H, kind.I, kind.top_k) == (layer.E // int(ranks or 1), layer.H, layer.I, layer.k)
            checked += 1
    assert checked >= 4


def test_flagships_have_activations_that_pretuned_knows(tool: ModuleType) -> None:
    from pretuned import runtime

    if not hasattr(runtime, "Activation"):
        pytest.skip("activations with numbers have not landed")
    activations = [str(tool.activation(tool.KINDS[kind])) for kind in tool.FLAGSHIPS]
    assert [text.partition(" ")[0].partition(":")[0].partition("(")[0] for text in activations] == [
        "swiglu",
        "swiglu",
        "situ",
        "swiglu",
        "swiglustep",
    ]


def test_arguments_for_shared_experts_are_those_of_this_vllm(tool: ModuleType) -> None:
    routed = tool.routing(tool.Kind("m", 8, 64, 32, 2, ()), 5, "cpu")
    seen: list[dict[str, object]] = []

    class Newer(Method):
        topk_indices_dtype = torch.int64

        def apply(
            self,
            layer: object,
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            shared_experts: object,
            shared_experts_input: object,
        ) -> torch.Tensor:
            seen.append({"shared": shared_experts, "ids": topk_ids.dtype})
            return x

    class Ours(Method):
        moe_kernel = SimpleNamespace(apply=lambda x, shared_experts_input: x)

        def apply(
            self, layer: object, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **shared: object
        ) -> torch.Tensor:
            seen.append(shared)
            return x

    for method in (Newer(monolithic=False), Ours(monolithic=False)):
        config = SimpleNamespace(hidden_dim=64)
        tool.call_of(SimpleNamespace(quant_method=method, moe_config=config), routed, routed=False)()
    assert seen == [{"shared": None, "ids": torch.int64}, {"shared_experts_input": None}]


@pytest.mark.slow
def test_a_process_that_fails_is_reported_and_the_rest_goes_on(
    tool: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """(There is no vLLM in the folder.)"""
    (tmp_path / "vllm" / "model_executor").mkdir(parents=True)
    out = tmp_path / "cells.json"
    assert tool.main(["--vllm", str(tmp_path), "--json", str(out), "--kinds", "bf16,int4", "--tokens", "1"]) == 1
    cells = json.loads(out.read_text())["cells"]
    assert [cell["kind"] for cell in cells] == ["bf16", "int4"]
    assert all(cell["failed"]["all"] for cell in cells)
    assert "can't open file" not in capfd.readouterr().err


def test_no_layer_that_was_measured_costs_over_3_percent(tool: ModuleType) -> None:
    """The plug-in's promise compared with vLLM's choice."""
    beside = {}
    for path in sorted(RESULTS.glob("layers-in-vllm-*.json")):
        for cell in json.loads(path.read_text())["cells"]:
            own = cell.get("us", {}).get(tool.KINDS[cell["kind"]].backends[0])
            if own is not None:
                beside[cell["model"], cell["tokens"], path.name] = own / cell["us"]["auto"]
    assert len(beside) >= 10
    worst = min(beside, key=beside.__getitem__)
    model, tokens, _ = worst
    assert beside[worst] > 0.97
    page = " ".join((RESULTS.parents[1] / "docs/use/serving-figures.md").read_text().split())
    assert f"The lowest ratio is {model}'s at {tokens:,} token{'s' * (tokens > 1)}: {beside[worst]:.2f}" in page
