"""A whole vLLM engine in this process or over worker processes, run once with pretuned's plug-in or without."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from tiny_models import VLLM_CLASSES

PROMPTS = [[3, 4, 5, 6, 7], list(range(20, 60))]
NEW_TOKENS = 12
KV_CACHE_BYTES = 16 << 20  # vLLM fills it with zeros
T = TypeVar("T")


class Told(NamedTuple):
    """An engine's output: each prompt's tokens, and their logarithmic probabilities."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


class Lines(logging.Handler):
    """The lines that pretuned logged about layers through vLLM's logger, without the line that it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line.startswith("pretuned: "):
            self.lines.append(line)


@contextlib.contextmanager
def lines() -> Iterator[list[str]]:
    """The lines that pretuned tells meanwhile, those that were told before again."""
    from vllm import logger

    logger._print_info_once.cache_clear()
    handler, ours = Lines(), logging.getLogger("vllm.pretuned")
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)  # vLLM's own, which it sets when an engine starts
    try:
        yield handler.lines
    finally:
        ours.setLevel(level)
        ours.removeHandler(handler)


def config(**changes: Any) -> Any:
    """vLLM's FusedMoEConfig of a small layer."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    parallel = dataclasses.replace(FusedMoEParallelConfig.make_no_parallel(), **changes.pop("parallel", {}))
    settings = {
        "num_experts": 4,
        "experts_per_token": 2,
        "hidden_dim": 32,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_logical_experts": 4,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": RoutingMethodType.TopK,
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
    }
    return FusedMoEConfig(**(settings | changes))


@functools.cache
def _register_class(name: str) -> None:
    """Hand vLLM a model's class; else it imports it in a process of its own, to look at it."""
    from vllm import ModelRegistry

    module = importlib.import_module(f"vllm.model_executor.models.{VLLM_CLASSES[name]}")
    ModelRegistry.register_model(name, getattr(module, name))


@contextlib.contextmanager
def _imports_passed_over() -> Iterator[None]:
    """Keep the collector off objects that were there before.

    vLLM collects garbage ten times in an engine's life, from the start of its end with what it had frozen thawed. In a
    process of tests that would be the million objects of its imports each time. So those are frozen here, what comes
    after them is not, and each collection sees all that an engine made.
    """
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield


_scanned: set[str] = set()  # modules


@contextlib.contextmanager
def _kernels_replaced_once() -> Iterator[None]:
    """Have vLLM look for Triton kernels, which it replaces on a CPU, only if there are modules that it has not seen.

    It looks at each name of each module whenever an engine starts: that was a third of a small engine's life.
    """
    from vllm.platforms import current_platform

    platform, name = type(current_platform), "register_triton_kernel_overrides"
    replace = getattr(platform, name, None)

    def once() -> None:
        if not _scanned.issuperset(sys.modules):
            replace()
            _scanned.update(sys.modules)

    with pytest.MonkeyPatch.context() as patch:
        if replace is not None:  # older ones have none
            patch.setattr(platform, name, staticmethod(once))
        yield


def run(path: Path, switch: str | None, ask: Callable[[Any], T], **settings: Any) -> T:
    """Return ``ask``'s result on vLLM's LLM of the model in ``path``; PRETUNED_VLLM is ``switch`` (None: unset)."""
    import vllm
    from vllm import plugins
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor import custom_op

    config = json.loads((path / "config.json").read_text())
    for name in config["architectures"]:
        _register_class(name)
    custom_op.op_registry_oot.clear()
    plugins.plugins_loaded = False
    os.environ.pop("PRETUNED_VLLM", None)
    if switch is not None:
        os.environ["PRETUNED_VLLM"] = switch
    engine_settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "seed": 0,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
    }
    if config.get("kv_lora_rank"):  # on a CPU with AMX vLLM takes a backend that refuses float32
        engine_settings["attention_backend"] = "CPU_MLA"
    # It fails without a tokenizer. The line that says so keeps the engine for as long as pytest keeps the line.
    logging.getLogger("vllm.renderers.base").setLevel(logging.ERROR)
    with _imports_passed_over(), _kernels_replaced_once():
        llm = vllm.LLM(model=str(path), skip_tokenizer_init=True, **(engine_settings | settings))
        try:
            return ask(llm)
        finally:
            del llm  # it shuts the engine down; nobody else may hold it
            gc.collect()
            cleanup_dist_env_and_memory()


def generate(llm: Any) -> Told:
    """Return the engine's output for ``PROMPTS``: the likeliest token each time."""
    from vllm import SamplingParams

    how = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, detokenize=False, logprobs=0, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], how, use_tqdm=False)
    said = [output.outputs[0] for output in done]
    return Told(
        [list(output.token_ids) for output in said],
        [[row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)] for output in said],
    )


def count(worker: Any) -> None:
    """In a worker: count its layers' calls."""
    from pretuned.integrations.vllm.experts import PretunedExperts

    apply = PretunedExperts.apply
    worker.seen = []

    def counted(self: Any, output: Any, **kwargs: Any) -> None:
        worker.seen.append((tuple(kwargs["w1"].shape), kwargs["expert_map"] is not None))
        apply(self, output, **kwargs)

    PretunedExperts.apply = counted


def seen(worker: Any) -> list[Any]:
    """In a worker: of each call counted, the shape of w13 and whether there was an expert map."""
    return worker.seen
