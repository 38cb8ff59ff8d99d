"""vLLM's layers captured in a CUDA graph: new weights by vLLM's reload, and sleep, on a real GPU.

PRETUNED_TEST_VLLM=FOLDER python -m pytest -q tests/gpu/test_refit_in_vllm.py

FOLDER is as tests/support/vllm_on_gpu.py says.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_on_gpu

pytestmark, layers = vllm_on_gpu.marks, vllm_on_gpu.layers
E, T = 16, 64
MODELS = ("gpt-oss-20b", "qwen3-30b-fp8")


class Two:
    """Checkpoints of one model with other numbers, and what a layer of each says to the same tokens."""

    def __init__(self, layers: Any, model: str, folder: Path) -> None:
        from benchmarks.peers import load_in_vllm

        self.tool, self.layers = load_in_vllm, layers
        self.tool.register(model)
        config = self.tool.config_of(model, 1, num_experts=E, num_local_experts=E)
        self.folders = [folder / str(seed) for seed in range(2)]
        for seed, to in enumerate(self.folders):
            self.tool.write(to, config, seed, "cuda")
        H = config["hidden_size"]
        I = config.get("moe_intermediate_size", config["intermediate_size"])  # noqa: E741
        self.inputs = layers.routing(layers.Kind(model, E, H, I, config["num_experts_per_tok"], ()), T, "cuda")
        self.want = []
        for number in range(2):
            loaded, vllm_config = self.load(number)
            with self.within(vllm_config):
                self.want.append(self.call(loaded)().clone())
        assert not torch.equal(*self.want)

    def load(self, number: int) -> tuple[Any, Any]:
        config = self.tool.settings(self.folders[number], "safetensors")
        model = self.tool.load(config)
        assert self.tool.ran_by(model) == ["PretunedQuantisedExperts"]
        return model, config

    def call(self, model: Any) -> Callable[[], torch.Tensor]:
        methods = [(module, getattr(module, "quant_method", None)) for module in model.modules()]
        layer = [module for module, method in methods if getattr(method, "moe_kernel", None) is not None][-1]
        call: Callable[[], torch.Tensor] = self.layers.call_of(layer, self.inputs, False)
        return call

    @contextmanager
    def within(self, config: Any) -> Iterator[None]:
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        with set_current_vllm_config(config), set_forward_context(None, config):
            yield

    def captured(self, model: Any, config: Any) -> Callable[[], torch.Tensor]:
        """The replay of the layer's graph."""
        with self.within(config):
            call = self.call(model)
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = call()

        def replay() -> torch.Tensor:
            graph.replay()
            torch.cuda.synchronize()
            return out.clone()

        return replay


@pytest.fixture(scope="module")
def pairs(layers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Two]]:
    """By the model's name."""
    yield {model: Two(layers, model, tmp_path_factory.mktemp("models")) for model in MODELS}
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("model", MODELS)
def test_a_graph_captured_before_the_reload_gives_the_new_weights_result(model: str, pairs: dict[str, Two]) -> None:
    two = pairs[model]
    loaded, config = two.load(0)
    replay = two.captured(loaded, config)
    assert torch.equal(replay(), two.want[0])
    for number in (1, 0, 1):
        two.tool.reload(loaded, config, two.folders[number])
        assert torch.equal(replay(), two.want[number])


def test_graphs_captured_before_sleep_read_the_weights_after_it(pairs: dict[str, Two]) -> None:
    """By vLLM's allocator: level 1 keeps the weights on the host, level 2 drops them and they are loaded again.

    A process has one pool for weights: a second one aborts.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        loaded = [two.load(0) for two in pairs.values()]
    replays = [two.captured(*inputs) for two, inputs in zip(pairs.values(), loaded, strict=True)]

    def check(number: int) -> None:
        for two, replay in zip(pairs.values(), replays, strict=True):
            assert torch.equal(replay(), two.want[number])

    check(0)
    allocator.sleep(offload_tags="weights")
    allocator.wake_up()
    check(0)
    allocator.sleep(offload_tags=())
    allocator.wake_up()
    for two, inputs in zip(pairs.values(), loaded, strict=True):
        two.tool.reload(*inputs, two.folders[1])
    check(1)
