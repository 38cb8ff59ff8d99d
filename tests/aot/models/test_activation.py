from __future__ import annotations

import pytest

from pretuned.aot.models.activation import LayerActivation, activation_in, parse_activation

OAI = LayerActivation("swiglu", 7.0, 1.702, 1.0)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"model_type": "qwen3_moe", "hidden_act": "silu"}, LayerActivation("silu")),
        ({"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh"}, LayerActivation("gelu_tanh")),
        ({"model_type": "nemotron_h", "mlp_hidden_act": "relu2"}, LayerActivation("relu2")),
        ({"model_type": "deepseek_v4", "hidden_act": "silu", "swiglu_limit": 10.0}, LayerActivation("swiglu", 10.0)),
        ({"model_type": "hy_v4", "hidden_act": "silu", "swiglu_limit": 0}, LayerActivation("silu")),
        ({"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0}, OAI),
        ({"model_type": "gpt_oss"}, OAI),
        ({"model_type": "minimax_m3_text", "hidden_act": "swigluoai"}, OAI),
        (
            {"model_type": "any", "hidden_act": "silu", "swiglu_alpha": 1.5, "swiglu_limit": 5},
            LayerActivation("swiglu", 5.0, 1.5, 1.0),
        ),
        (
            {"model_type": "kimi_linear", "hidden_act": "situ", "activation_situ_beta": 4.0,
             "activation_situ_linear_beta": 25.0},
            LayerActivation("situ", beta=4.0, linear_beta=25.0),
        ),
        (
            {"model_type": "inkling2_text", "hidden_act": "silu", "mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0},
            LayerActivation("situ", beta=4.0, linear_beta=25.0),
        ),
        ({"model_type": "kimi_linear", "hidden_act": "situ"}, None),
        ({"model_type": "any", "hidden_act": "mish"}, None),
        ({"model_type": "any", "hidden_act": "silu", "swiglu_limit": float("nan")}, LayerActivation("silu")),
        ({"model_type": "any"}, None),
    ],
)  # fmt: skip
def test_a_config_s_activation(config: dict[str, object], activation: LayerActivation | None) -> None:
    assert activation_in(config, str(config["model_type"])) == (activation, "")


def test_limits_of_some_layers_are_a_note() -> None:
    limits = {"hidden_act": "silu", "swiglu_limits": [0.0, None, 7.0, 7]}
    assert activation_in(limits, "step3p5") == (
        LayerActivation("silu"),
        "swiglustep with a limit in layers 2 (7), 3 (7)",
    )
    many = {"hidden_act": "silu", "swiglu_limits": [1.0] * 9}
    assert activation_in(many, "step3p5")[1].endswith("3 (1), ...")


@pytest.mark.parametrize(
    "text", ["silu", "swiglu:limit=10", "swiglu:limit=7,alpha=1.702,beta=1", "situ:beta=4,linear_beta=25"]
)
def test_an_activation_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_activation(text)) == text


@pytest.mark.parametrize("text", ["", "silly", "swiglu:limit", "swiglu:gamma=1", "swiglu:limit=x"])
def test_what_is_no_activation(text: str) -> None:
    with pytest.raises(ValueError, match=r"activation|could not convert"):
        parse_activation(text)
