"""A checkpoint's tensors and config, made by a stranger: an error of ours, soon, and nothing else."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.runtime import ExpertWeights

FP8 = torch.float8_e4m3fn
LAYER = "model.layers.0.mlp.experts"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
DOWN = {f"{LAYER}.down_proj": torch.zeros(2, 128, 128).to(FP8), f"{LAYER}.down_proj_scale_inv": torch.ones(2, 1, 1)}


def compressed(*targets: Any) -> dict[str, Any]:
    """Of a group for each list of targets; the last one's weights are known."""
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
    groups = {f"group_{i}": {"targets": target, "weights": weights} for i, target in enumerate(targets)}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def refused(tensors: Any, config: Any, part: str | None = "down") -> str:
    """The error, which comes soon and can be read."""
    begin = time.perf_counter()
    with pytest.raises(InputError) as caught:
        ExpertWeights.from_tensors(tensors, config, part)
    assert time.perf_counter() - begin < 20
    assert len(str(caught.value)) < 2000
    return str(caught.value)


@pytest.mark.parametrize("pattern", ["re:(.|.)*!", "re:" + ".*" * 30 + "!"])
def test_a_regular_expression_that_never_ends(pattern: str) -> None:
    message = refused(DOWN, compressed([pattern], ["re:.*experts.*"]))
    assert f"quantization_config: {json.dumps(pattern)[:60]} is no regular expression that pretuned matches" in message


def test_a_regular_expression_is_none() -> None:
    assert 'quantization_config: "re:(" is no regular expression' in refused(DOWN, compressed(["re:("], ["Linear"]))


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def of_bytes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def packed_int4() -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4, "strategy": "group"}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}


# Of each packing the tensors of two experts, stacked, by their last words; and its config.
WHOLE: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "fp8 blocks": ({"weight": torch.zeros(2, 128, 128).to(FP8), "weight_scale_inv": torch.ones(2, 1, 1)}, BLOCKS),
    "fp8 rows": (
        {"weight": torch.zeros(2, 128, 64).to(FP8), "weight_scale": torch.ones(2, 128, 1)},
        {"quant_method": "fp8"},
    ),
    "gpt-oss": ({"blocks": of_bytes(2, 64, 2, 16), "scales": of_bytes(2, 64, 2)}, {"quant_method": "mxfp4"}),
    "gptq": (
        {"qweight": words(2, 16, 64), "qzeros": words(2, 1, 8), "scales": torch.ones(2, 1, 64)},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
    ),
    "awq": (
        {"qweight": words(2, 128, 8), "qzeros": words(2, 1, 8), "scales": torch.ones(2, 1, 64)},
        {"quant_method": "awq", "bits": 4, "group_size": 128},
    ),
    "modelopt": (
        {"weight": of_bytes(2, 64, 64), "weight_scale": torch.zeros(2, 64, 8).to(FP8), "weight_scale_2": torch.ones(2)},
        {"quant_algo": "NVFP4"},
    ),
    "packed int4": (
        {
            "weight_packed": words(2, 64, 16),
            "weight_scale": torch.ones(2, 64, 1).bfloat16(),
            "weight_shape": torch.tensor([64, 128]),
        },
        packed_int4(),
    ),
}


def named(tensors: dict[str, torch.Tensor], expert: int | None = None, projection: str = "down_proj") -> dict[str, Any]:
    """Return tensors under a checkpoint's names, of one expert if ``expert`` is set."""
    at = f"{LAYER}." + ("" if expert is None else f"{expert}.") + f"{projection}."
    return {
        f"{at}{suffix}": tensor if expert is None or suffix == "weight_shape" else tensor[expert]
        for suffix, tensor in tensors.items()
    }


def hostile(like: torch.Tensor) -> list[Any]:
    """Return objects that an attacker may put in place of a tensor."""
    dtypes = (torch.bool, torch.complex64, torch.float64, torch.int64, torch.int32, torch.uint8, torch.float8_e5m2)
    plain = torch.zeros(like.shape)
    return [
        None,
        "x",
        [1, 2],
        1.0,
        torch.tensor(1),
        torch.zeros(4),
        like.new_empty((0,)),
        like.new_empty((2, 0, 128)),
        like.new_empty((0, *like.shape[1:])),
        torch.empty(like.shape, dtype=like.dtype, device="meta"),
        torch.empty((2, 1 << 31, 1 << 20), dtype=like.dtype, device="meta"),
        plain.to_sparse(),
        torch.zeros(4, 4).to_sparse_csr(),
        *(plain.to(dtype) for dtype in dtypes),
        like.new_zeros((1,)).expand(like.shape),
        like.mT if like.dim() > 1 else like,
        like[None],
        like[None, None],
        like[..., :1],
        like[:1],
        like[..., :-1],
        torch.cat([like.view(torch.int8), like.view(torch.int8)], -1) if like.dim() > 1 else like,
        torch.stack([plain, plain], -1).to(like.dtype)[..., 0],
        torch.zeros(like.shape, requires_grad=True),
        torch.full(like.shape, float("nan")).to(like.dtype),
        torch.full(like.shape, -1.0).to(like.dtype),
        torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(3, 3)]),
        torch.quantize_per_tensor(torch.zeros(2, 4, 4), 1.0, 0, torch.quint8),
    ]


def attempt(tensors: Any, config: Any, part: Any = "down") -> bool:
    """Return True if the tensors are read; else assert that the error is pretuned's, and short."""
    try:
        weights = ExpertWeights.from_tensors(tensors, config, part)
    except InputError as error:
        message = str(error)
    else:
        E, N, K = weights.shape
        assert min(E, N, K) >= 1
        if weights.device.type == "cpu":
            weights.dequantize()
        return True
    assert len(message) < 2000
    assert message.isprintable()
    return False


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("packing", WHOLE)
def test_tensors_that_are_none(packing: str) -> None:
    tensors, config = WHOLE[packing]
    both = named(tensors, 0) | named(tensors, 1)
    for checkpoint in (named(tensors), both):
        assert attempt(checkpoint, config) or (checkpoint is both and packing == "gpt-oss")  # its experts are stacked
        for name, tensor in checkpoint.items():
            attempt({key: value for key, value in checkpoint.items() if key != name}, config)
            for other in hostile(tensor if tensor.dim() else tensor[None]):
                attempt({**checkpoint, name: other}, config)
    for name in tensors:  # up beside another gate
        for other in hostile(tensors[name][0] if tensors[name].dim() > 1 else tensors[name]):
            gate, up = named(tensors, 0, "gate_proj"), named(tensors, 0, "up_proj")
            attempt({**gate, **up, f"{LAYER}.0.up_proj.{name}": other}, config, "gate_up")


DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    FP8,
    torch.float8_e5m2,
    torch.complex64,
)
MORE_DTYPES = [
    dtype
    for name in ("float8_e8m0fnu", "float4_e2m1fn_x2", "uint16", "uint32", "uint64", "float8_e4m3fnuz")
    if (dtype := getattr(torch, name, None)) is not None
]
INT4_GROUP = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False}
ZERO_POINTS = {**packed_int4(), "config_groups": {"g": {"targets": ["Linear"], "weights": INT4_GROUP}}}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8 blocks": BLOCKS,
    "fp8 rows": {"quant_method": "fp8"},
    "gpt-oss": {"quant_method": "mxfp4"},
    "DeepSeek-V4": {**BLOCKS, "expert_dtype": "fp4"},
    "modelopt": {"quant_algo": "NVFP4"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "packed int4": ZERO_POINTS,
    "packed mxfp4": {**packed_int4(), "format": "mxfp4-pack-quantized"},
}


def matrix(packing: str, N: int, K: int, g: int) -> dict[str, tuple[torch.dtype, list[int]]]:
    """The tensors of a matrix [N, K] in groups of g columns: their dtypes and shapes."""
    whole, half, words, G = (N, K), (N, K // 2), torch.int32, -(-K // g)
    groups = (torch.uint8, (N, -(-K // 32)))
    layouts: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
        "fp8 blocks": {"weight": (FP8, whole), "weight_scale_inv": (torch.float32, (-(-N // 128), -(-K // 128)))},
        "fp8 rows": {"weight": (FP8, whole), "weight_scale": (torch.float32, (N, 1))},
        "gpt-oss": {"blocks": (torch.uint8, (N, -(-K // 32), 16)), "scales": groups},
        "DeepSeek-V4": {"weight": (torch.int8, half), "scale": groups},
        "modelopt": {
            "weight": (torch.uint8, half),
            "weight_scale": (FP8, (N, -(-K // 16))),
            "weight_scale_2": (torch.float32, ()),
        },
        "gptq": {
            "qweight": (words, (K // 8, N)),
            "qzeros": (words, (G, N // 8)),
            "scales": (torch.float16, (G, N)),
            "g_idx": (words, (K,)),
        },
        "awq": {"qweight": (words, (K, N // 8)), "qzeros": (words, (G, N // 8)), "scales": (torch.float16, (G, N))},
        "packed int4": {
            "weight_packed": (words, (N, -(-K // 8))),
            "weight_scale": (torch.bfloat16, (N, G)),
            "weight_zero_point": (words, (-(-N // 8), G)),
            "weight_shape": (torch.int64, (2,)),
            "weight_g_idx": (words, (K,)),
        },
        "packed mxfp4": {"weight_packed": (torch.uint8, half), "weight_scale": groups},
    }
    return {suffix: (dtype, list(size)) for suffix, (dtype, size) in layouts[packing].items()}


WORDS: dict[str, tuple[Any, ...]] = {
    "group_size": (32, 64, 128, 256, 96, 48, 1, 0, -1, -2, None, 2**31, 2**63, 2**70, 1.5, True, "128"),
    "sym": (True, False, None, 1),
    "desc_act": (True, False, None),
    "zero_point": (True, False, None),
    "bits": (4, 8, None, 2**70),
    "scale_fmt": ("ue8m0", "float", None),
    "checkpoint_format": ("gptq_v2", "marlin"),
    "weight_block_size": ([128, 128], [64, 64], None),
    "quant_method": ("auto-round", "fp8", "gptq", "awq", "mxfp4"),
    "packing_format": ("auto_round", "auto_round:auto_awq", None),
    "meta": ({"quantizer": "gptqmodel:1"}, 5),
    "dynamic": ({r".*experts\.1\..*": {"bits": 8}}, {r"-:.*": {}}, {r".*experts\.1\..*": {"group_size": 2**70}}),
    "extra_config": ({f"{LAYER}.1.down_proj": {"sym": True}}, {f"{LAYER}": {"group_size": 64}}),
}


def damaged(case: int) -> tuple[dict[Any, Any], dict[str, Any], str | None]:
    """Tensors and a config of a checkpoint, some of which are not as they should be."""
    draw = random.Random(case)
    packing, harm = draw.choice(list(CONFIGS)), draw.choice((0, 0.03, 0.1, 0.3))
    config = dict(CONFIGS[packing])

    def odd(chance: float = harm) -> bool:
        return draw.random() < chance

    N, K, g = draw.choice((8, 16, 128, 136)), draw.choice((8, 32, 64, 96, 128, 160, 256)), draw.choice((32, 64, 128))
    size = draw.choice(WORDS["group_size"]) if odd() else g
    if packing == "packed int4":
        strategy, order = "channel" if odd() else "group", "group" if odd() else None
        symmetric = draw.choice((True, False, None)) if odd(0.3) else False
        weights = {**INT4_GROUP, "group_size": size, "strategy": strategy, "actorder": order, "symmetric": symmetric}
        config["config_groups"] = {"g": {"targets": ["Linear"], "weights": weights}}
    if "group_size" in config:
        config["group_size"] = size
    config |= {word: draw.choice(values) for word, values in WORDS.items() if odd(harm / 6)}
    part, stacked = draw.choice(("down", "gate_up")), draw.random() < 0.4
    projections = ["down_proj"] if part == "down" else ["gate_up_proj"] if stacked else ["gate_proj", "up_proj"]
    tensors: dict[Any, Any] = {}
    for expert in [None] if stacked and not odd() else range(draw.choice((1, 2))):
        for projection in projections:
            at = f"{LAYER}." + ("" if expert is None else f"{expert}.") + projection
            rows, columns = draw.choice((8, 64, 192)) if odd() else N, draw.choice((8, 64, 192)) if odd() else K
            for suffix, (dtype, shape) in matrix(packing, rows, columns, draw.choice((16, 48)) if odd() else g).items():
                if not odd():
                    shape = [2, *shape] if stacked and suffix != "weight_shape" else shape
                    tensors[f"{at}.{suffix}"] = perhaps_odd(draw, odd, suffix, shape, dtype, (rows, columns, g))
    return tensors, config, None if odd() else part


def perhaps_odd(
    draw: random.Random, odd: Any, suffix: str, size: list[int], dtype: torch.dtype, of: tuple[int, int, int]
) -> Any:
    """A tensor of a checkpoint, or another in its place."""
    rows, columns, g = of
    for _ in range(3):
        if odd():
            before, behind = size[: (at := draw.randrange(len(size) + 1))], size[at + 1 :]
            size = draw.choice(
                (
                    size[1:],
                    [1, *size],
                    size[::-1],
                    [*size, 1],
                    [],
                    [*before, 0, *behind],
                    [*before, draw.choice((1, 2, 3, 7, 300)), *behind],
                )
            )
    dtype = draw.choice((*DTYPES, *MORE_DTYPES)) if odd() else dtype
    if odd():
        return torch.empty(size, dtype=dtype, device="meta")
    values = torch.randint(0, 120, size, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))
    if "g_idx" in suffix and size:
        values = (torch.arange(size[-1]) // draw.choice((g, g, 1, 1 << 20))).expand(size).contiguous()
    if suffix == "weight_shape" and size == [2]:
        values = torch.tensor([rows, columns])
    try:
        tensor = values.to(dtype)
    except (RuntimeError, NotImplementedError):  # torch casts nothing to float4
        tensor = values.to(torch.uint8).view(dtype)
    if odd() and tensor.dim() > 1:
        tensor = draw.choice((tensor.mT, tensor[..., ::2], tensor[:, :1], tensor[-1:]))
    return tensor


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_checkpoints_are_read_or_refused() -> None:
    """The first of some 100,000 cases that were tried."""
    read = sum(attempt(*damaged(case)) for case in range(600))
    assert 100 < read < 500


VALUES: tuple[Any, ...] = (
    None,
    5,
    -1,
    0,
    1e308,
    float("nan"),
    "x" * 10**5,
    "",
    [],
    [1],
    [None],
    ["x"],
    [128, "128"],
    [128.0, 128],
    {},
    {"a": 1},
    {"a": {}},
    {"a": {"targets": 5}},
    {"a": {"targets": [5]}},
    {"a": {"targets": ["re:("]}},
    True,
    b"x",
    {"a": {"targets": ["re:a{99999999999}"]}},
    {1: 2},
    "re:(",
    ["\ud800"],
    10**5000,
    "\n\x1b[31m",
    [10**5000],
    list(range(10**5)),
)


@pytest.mark.parametrize("packing", WHOLE)
def test_a_config_that_is_none(packing: str) -> None:
    tensors, config = WHOLE[packing]
    checkpoint = named(tensors)
    more = (
        "expert_dtype",
        "format",
        "version",
        "packing_format",
        "group_size",
        "bits",
        "quant_method",
        "quant_algo",
        "config_groups",
        "weight_block_size",
        "quantization_config",
        "quantization",
    )
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    for value in (*VALUES, deep):
        attempt(checkpoint, value)
        for key in dict.fromkeys((*config, *more)):
            attempt(checkpoint, {**config, key: value})
        if "config_groups" in config:
            group = config["config_groups"]["g"]
            for key in ("targets", "weights", "format", "input_activations"):
                attempt(checkpoint, {**config, "config_groups": {"g": {**group, key: value}}})
            for key in ("type", "num_bits", "strategy", "block_structure"):
                weights = {**group["weights"], key: value}
                attempt(checkpoint, {**config, "config_groups": {"g": {**group, "weights": weights}}})


def test_names_and_parts_that_are_none() -> None:
    weight = torch.zeros(128, 64).to(FP8)
    names = (
        5,
        None,
        b"x",
        f"experts.{'9' * 5000}.down_proj.weight",
        "experts.\u0663.down_proj.weight",
        "\n",
        "x" * 10**6,
        "experts.99999999999999999999.down_proj.weight",
        "experts." * 10**5 + "down_proj.weight",
        "experts.-1.down_proj.weight",
        "experts.0.down_proj.weight\n",
        "a\x1b[31m.experts.0.down_proj.weight",
    )
    for name in names:
        attempt({name: weight}, {"quant_method": "fp8"})
        attempt({name: weight, "experts.0.down_proj.weight_scale": weight}, {"quant_method": "fp8"})
        attempt({name: weight, "b.experts.0.down_proj.weight": weight}, {"quant_method": "fp8"})
    for tensors in (None, 5, [], [1], "x", {}, {"x": weight}):
        assert not attempt(tensors, {"quant_method": "fp8"})
    for part in (5, [], {}, "x" * 10**6, b"", True, weight):
        assert not attempt({"experts.0.down_proj.weight": weight}, {"quant_method": "fp8"}, part)


def test_what_each_is_reported() -> None:
    meta = {**DOWN, f"{LAYER}.down_proj": torch.empty(2, 128, 128, dtype=FP8, device="meta")}
    assert "the tensors is partly on the meta device, wanted all with data, or all without" in refused(meta, BLOCKS)
    sparse = {**DOWN, f"{LAYER}.down_proj": torch.zeros(2, 2, 2).to_sparse()}
    assert "experts.down_proj is torch.float32 and torch.sparse_coo, wanted a plain tensor" in refused(sparse, BLOCKS)
    empty = {**DOWN, f"{LAYER}.down_proj": torch.zeros(2, 0, 128).to(FP8)}
    assert "of shape [2, 0, 128], wanted one that is not empty" in refused(empty, BLOCKS)
    tensors, config = WHOLE["packed int4"]
    for K in (-5, 0, 120, 129, 1 << 40):
        message = refused(named({**tensors, "weight_shape": torch.tensor([64, K])}), config)
        assert f"is {K}, wanted 121 to 128, as weight_packed has" in message
    tensors, config = WHOLE["fp8 rows"]
    gate, up = named(tensors, 0, "gate_proj"), named(tensors, 0, "up_proj")
    short = {**gate, **up, f"{LAYER}.0.up_proj.weight": torch.zeros(128, 32).to(FP8)}
    message = (
        "codes of gate and up is torch.float8_e4m3fn of shape [128, 64] and torch.float8_e4m3fn of shape [128, 32]"
    )
    assert message in refused(short, config, "gate_up")


def test_what_is_long_is_cut() -> None:
    tensors, config = WHOLE["fp8 rows"]
    long = {
        f"{'x' * (1000 - len(name)) if i == 0 else ''}{name}": tensor
        for i, (name, tensor) in enumerate((("y.norm", torch.ones(1)), *named(tensors).items()))
    }
    assert attempt(long, config)
    message = refused({**long, "x" * 1001: torch.ones(1)}, config)
    assert f"the name of a tensor is {'x' * 57}... of 1,001 characters, wanted 1000 at most" in message
    assert "the name of a tensor is 5, wanted a string" in refused({5: torch.ones(1)}, config)
    assert "the tensors is a, b, c ..., wanted experts' down" in refused(dict.fromkeys("abcd", torch.ones(1)), config)
    layers = {f"{i}.experts.down_proj.{name}": tensor for i in range(4) for name, tensor in tensors.items()}
    message = refused(layers, config)
    assert "of 4 layers: 0.experts., 1.experts., 2.experts., wanted those of one layer" in message
    for block, said in (("x" * 60, "x" * 60), ("x" * 61, "x" * 57 + "..."), ([128] * 3, "[128, 128, 128]")):
        assert f"weight_block_size is {said}, wanted [128, 128]" in refused(
            DOWN, {**BLOCKS, "weight_block_size": block}
        )


def test_what_each_part_of_a_config_may_be() -> None:
    assert attempt(DOWN, {**BLOCKS, "weight_block_size": (128, 128)})
    tensors, config = WHOLE["awq"]
    assert attempt(named(tensors), {**config, "version": "GEMM"})
    for version in ("5", "gemv"):
        assert f"awq of version {version!r}, wanted 'gemm'" in refused(named(tensors), {**config, "version": version})
    assert "awq of version '5', wanted 'gemm'" in refused(named(tensors), {**config, "version": 5})
    assert attempt(DOWN, compressed(("re:.*experts.*",)))
    beside = compressed(["re:other"], None, ["Linear"], ["re:another"])
    for i in (0, 1, 3):
        beside["config_groups"][f"group_{i}"]["weights"] = {"type": "int"}
    assert attempt(DOWN, beside)
    beside["config_groups"]["group_2"]["weights"] = {"type": "int"}
    assert "weights of ('int', None, None)" in refused(DOWN, beside)
    for two in (compressed(["re:other"], ["lm_head"]), compressed(["A"], ["B"])):
        assert "of 2 config_groups, wanted one whose targets name model.layers.0.mlp.experts" in refused(DOWN, two)
    later = compressed(["Linear"], ["re:other", "Linear"])  # the later group has the target, as in compressed-tensors
    later["config_groups"]["group_0"]["weights"] = {"type": "int"}
    assert attempt(DOWN, later)
    assert "the config's targets of a group is [5], wanted a list of strings" in refused(DOWN, compressed([5]))
    other = compressed(["Linear"])
    other["config_groups"]["group_0"]["weights"]["block_structure"] = [64, 64]
    assert "compressed-tensors' float-quantized with weights of ('float', 8, 'block')" in refused(DOWN, other)
    assert "a group of the config is a int, wanted a dict" in refused(DOWN, {**other, "config_groups": {"g": 5}})
    for nothing in (None, {}):  # a group without targets names no module
        other["config_groups"]["group_1"] = nothing
        assert "float-quantized with weights of ('float', 8, 'block')" in refused(DOWN, other)


def test_what_gate_and_up_have_in_common() -> None:
    tensors, config = WHOLE["fp8 rows"]
    gate, up = named(tensors, 0, "gate_proj"), named(tensors, 0, "up_proj")
    taller = {"weight": torch.zeros(1, 192, 64).to(FP8), "weight_scale": torch.ones(1, 192, 1)}
    weights = ExpertWeights.from_tensors({**gate, **named(taller, 0, "up_proj")}, config, "gate_up")
    assert weights.shape == (1, 320, 64)
    tensors, config = WHOLE["fp8 blocks"]
    gate, up = named(tensors, 0, "gate_proj"), named(tensors, 0, "up_proj")
    message = refused({**gate, **up, f"{LAYER}.0.up_proj.weight_scale_inv": torch.ones(1, 2)}, config, "gate_up")
    assert "its weight_scale_inv, is of shape [1, 2], wanted [1, 1]" in message
    wider = {"weight": torch.zeros(1, 128, 256).to(FP8), "weight_scale_inv": torch.ones(1, 1, 2)}
    message = refused({**gate, **named(wider, 0, "up_proj")}, config, "gate_up")
    assert "codes of gate and up is torch.float8_e4m3fn of shape [128, 128] and torch.float8_e4m3fn" in message


def much(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """One element, again and again: none of these fits into any machine's memory."""
    return torch.zeros([1] * len(shape)).to(dtype).expand(shape)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({"0.down_proj.weight": much(FP8, 1 << 24, 1 << 24), "0.down_proj.weight_scale_inv": torch.ones(1, 1)}, BLOCKS),
        (
            {
                "0.down_proj.weight": torch.zeros(128, 128).to(FP8),
                "0.down_proj.weight_scale_inv": much(torch.float32, 1 << 24, 1 << 24),
            },
            BLOCKS,
        ),
        ({"down_proj": much(FP8, 8, 1 << 23, 1 << 23), "down_proj_scale_inv": torch.ones(8, 1, 1)}, BLOCKS),
        (
            {
                "0.down_proj.qweight": words(16, 128),
                "0.down_proj.qzeros": words(1, 16),
                "0.down_proj.scales": torch.ones(1, 128),
                "0.down_proj.g_idx": much(torch.int32, 1 << 48),
            },
            GPTQ,
        ),
        (
            {
                "0.down_proj.qweight": torch.zeros(1 << 20, dtype=torch.int32).as_strided((1 << 19, 1 << 19), (1, 1)),
                "0.down_proj.qzeros": words(1, 16),
                "0.down_proj.scales": torch.ones(1, 128),
            },
            GPTQ,
        ),
    ],
    ids=["codes", "scales", "stacked", "of another use", "overlapping"],
)
def test_a_tensor_that_repeats_its_elements_is_never_copied(tensors: dict[str, torch.Tensor], config: Any) -> None:
    message = refused({f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}, config)
    assert "which repeats elements, wanted memory for each of them" in message


def test_nor_do_the_constructors_copy_one() -> None:
    E, N, K = 256, 1 << 20, 1 << 20
    scale = much(torch.float32, E, N // 128, K // 128)
    state = {"codes": much(FP8, E, N, K), "scale": scale}
    for make in (
        lambda: ExpertWeights.fp8_block(much(FP8, E, N, K), scale),
        lambda: ExpertWeights.fp8_block(torch.zeros(1, 1, 1).to(FP8), scale),
        lambda: ExpertWeights.fp8_channel(much(FP8, E, N, K), much(torch.float32, E, N)),
        lambda: ExpertWeights.mxfp4(much(torch.uint8, E, N, K // 32, 16), much(torch.uint8, E, N, K // 32)),
        lambda: ExpertWeights.int4(much(torch.uint8, E, N, K // 2), much(torch.float32, E, N, K // 32)),
        lambda: ExpertWeights.nvfp4(much(torch.uint8, E, N, K // 2), much(FP8, E, N, K // 16), torch.ones(E)),
        lambda: ExpertWeights.from_state_dict("fp8_block", state),
        lambda: ExpertWeights.quantize(much(torch.bfloat16, E, N, K), "fp8_block"),
    ):
        with pytest.raises(InputError, match=r"with strides|and strides|of shape"):
            make()
