"""Model lists that are built to take all time and memory: one clear error, soon."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pretuned.aot.models.load import MAX_MISTAKES, load_models
from pretuned.artifacts.errors import InputError

SHAPE = "shape:E=4096,H=4096,I=4096,k=1"


def refused(*values: str) -> str:
    """The error, which comes within seconds and can be read."""
    begin = time.perf_counter()
    with pytest.raises(InputError) as caught:
        load_models(values)
    assert time.perf_counter() - begin < 20
    assert len(str(caught.value)) < 100_000
    return str(caught.value)


def test_millions_of_shards_of_one_line() -> None:
    degrees = ",".join(map(str, range(1, 4097)))
    message = refused(f"{SHAPE} tp={degrees} ep={degrees}")
    assert "16,777,216 shards of one spec (4096 of tp x 4096 of ep), wanted at most 1024" in message


def test_shards_of_very_many_lines(tmp_path: Path) -> None:
    degrees = ",".join(str(1 << i) for i in range(13))
    lines = [f"{SHAPE} tp={degrees} ep={degrees} tokens=1..{1 << i % 17} name=a{i}" for i in range(400)]
    (tmp_path / "models.txt").write_text("\n".join(lines))
    assert "over 65536 shards in all" in refused(str(tmp_path / "models.txt"))


@pytest.mark.slow
def test_a_hundred_thousand_wrong_lines(tmp_path: Path) -> None:
    (tmp_path / "models.txt").write_text("Qwen/Qwen3-30B-A3B-nope tp=x\n" * 100_000)
    message = refused(str(tmp_path / "models.txt")).split("\n")
    assert message[0] == f"{MAX_MISTAKES} mistakes in what to build for:"
    assert message[-1] == f"(the {100_000 - MAX_MISTAKES // 2:,} lines after these were not looked at)"


def test_mistakes_of_one_line_are_many(tmp_path: Path) -> None:
    degrees = ",".join(str(3 * i + 2) for i in range(200))
    assert f"and {200 - MAX_MISTAKES} more" in refused(f"shape:E=243,H=4096,I=243,k=1 tp={degrees}")


@pytest.mark.parametrize("word", ["tp=1," + "7" * 1_000_000, "dtype=" + "x" * 1_000_000, "y" * 1_000_000])
def test_a_value_of_a_million_characters(word: str) -> None:
    assert len(refused(f"{SHAPE} {word}")) < 5000
    assert len(refused(word)) < 5000


def test_a_list_of_a_million_widths(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": list(range(1, 400_000))}))
    message = refused(str(tmp_path / "config.json"))
    assert "differs between layers (1, 2, 3, " in message
    assert "and 399,979 more); give each as a spec of its own" in message


def quantised(folder: Path, *patterns: str) -> str:
    """A checkpoint of 48 layers whose quantisation leaves out what these name."""
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 1024, "moe_intermediate_size": 512}
    left_out = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignore": patterns}
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 48, **shape, "quantization_config": left_out}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


@pytest.mark.parametrize("pattern", ["re:(.*)*!", "re:(a|b|.)*(a|b|.)*!", "re:" + ".*" * 30 + "!"])
def test_a_regular_expression_that_never_ends(tmp_path: Path, pattern: str) -> None:
    message = refused(quantised(tmp_path, "re:.*lm_head", pattern))
    assert f"quantization_config: {json.dumps(pattern)[:60]} is no regular expression that pretuned matches" in message


def test_very_many_exclusions(tmp_path: Path) -> None:
    """Exclusions are read up to the number of experts; more are refused, and so are many globs."""
    load_models([quantised(tmp_path, *(f"model.layers.{i % 48}.mlp.experts.{i}.w1" for i in range(100_000)))])
    message = refused(quantised(tmp_path, *(f"layers.{i}" for i in range(300_000))))
    assert "300,000 names of what is not quantised, the limit is 262,144" in message
    message = refused(quantised(tmp_path, *(f"*experts.{i}*" for i in range(20_000))))
    assert "20,000 patterns of what is not quantised, the limit is 16,384" in message
