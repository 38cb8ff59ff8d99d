from __future__ import annotations

import pytest

from pretuned.aot.models.layer import activation_in, parse_activation
from pretuned.kernels.activations import Activation

OAI = Activation("swiglu_oai")


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"model_type": "qwen3_moe", "hidden_act": "silu"}, Activation("silu")),
        ({"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh"}, Activation("gelu_tanh")),
        ({"model_type": "nemotron_h", "mlp_hidden_act": "relu2"}, Activation("relu2")),
        ({"model_type": "deepseek_v4", "hidden_act": "silu", "swiglu_limit": 10.0}, Activation("swiglu", limit=10.0)),
        ({"model_type": "hy_v4", "hidden_act": "silu", "swiglu_limit": 0}, Activation("silu")),
        ({"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0}, OAI),
        ({"model_type": "gpt_oss"}, OAI),
        ({"model_type": "minimax_m3_text", "hidden_act": "swigluoai"}, OAI),
        (
            {"model_type": "any", "hidden_act": "silu", "swiglu_alpha": 1.5, "swiglu_limit": 5},
            Activation("swiglu", limit=5.0, alpha=1.5, beta=1.0),
        ),
        (
            {
                "model_type": "kimi_linear",
                "hidden_act": "situ",
                "activation_situ_beta": 4.0,
                "activation_situ_linear_beta": 25.0,
            },
            Activation("situ", beta=4.0, linear_beta=25.0),
        ),
        (
            {"model_type": "inkling2_text", "hidden_act": "silu", "mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0},
            Activation("situ", beta=4.0, linear_beta=25.0),
        ),
        ({"model_type": "kimi_linear", "hidden_act": "situ"}, None),
        ({"model_type": "any", "hidden_act": "mish"}, None),
        ({"model_type": "any", "hidden_act": "silu", "swiglu_limit": float("nan")}, Activation("silu")),
        ({"model_type": "any"}, None),
    ],
)
def test_a_config_s_activation(config: dict[str, object], activation: Activation | None) -> None:
    assert activation_in(config, str(config["model_type"])) == (activation, "")


def test_limits_of_some_layers_are_a_note() -> None:
    limits = {"hidden_act": "silu", "swiglu_limits": [0.0, None, 7.0, 7]}
    assert activation_in(limits, "step3p5") == (
        Activation("silu"),
        "swiglustep with a limit in layers 2 (7), 3 (7)",
    )
    many = {"hidden_act": "silu", "swiglu_limits": [1.0] * 9}
    assert activation_in(many, "step3p5")[1].endswith("3 (1), ...")


@pytest.mark.parametrize(
    ("text", "activation"),
    [
        ("silu", Activation("silu")),
        ("swiglu:limit=10", Activation("swiglu", limit=10.0)),
        ("swiglu:limit=7,alpha=1.702,beta=1", Activation("swiglu_oai")),
        ("situ:beta=4,linear_beta=25", Activation("situ", beta=4.0, linear_beta=25.0)),
    ],
)
def test_an_activation_as_the_catalogue_has_it(text: str, activation: Activation) -> None:
    assert parse_activation(text) == activation


@pytest.mark.parametrize("text", ["", "silly", "swiglu:limit", "swiglu:gamma=1", "swiglu:limit=x", "silu:limit=7"])
def test_what_is_no_activation(text: str) -> None:
    with pytest.raises(ValueError, match=r"[Aa]ctivation|could not convert"):
        parse_activation(text)
