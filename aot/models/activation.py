"""The activation between the two GEMMs of a model's experts, read from a config.json or the catalogue."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...kernels.activations import Activation

# A config's name of an activation -> pretuned's name.
_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "situ": "situ",
    "swigluoai": "swiglu",
}
_WORDS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")
_OAI = ("gpt_oss", "openai_privacy_filter", "minimax_m3")  # model types with (up + 1) * gate * sigmoid(alpha * gate)
_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0  # their code's values if the config has none


def parse_activation(text: str) -> Activation:
    """Parse ``silu``, ``swiglu:limit=10`` or ``situ:beta=4,linear_beta=25`` into an activation.

    Raises
    ------
    ValueError
        for an unknown name, an unknown number, or a value that is no number.
    """
    name, _, numbers = text.partition(":")
    values: dict[str, float] = {}
    for part in filter(None, numbers.split(",")):
        key, _, value = part.partition("=")
        if key not in Activation._fields[1:]:
            raise ValueError(f"activation '{text}': unknown number '{key}'")
        values[key] = float(value)
    return Activation(name, **values)


def activation_in(values: Mapping[str, object], model_type: str) -> tuple[Activation | None, str]:
    """The activation that a language model's config names, and a note on the layers that differ from it.

    None if the config names no activation, or an unknown one.
    """
    word = next((value for name in _WORDS if isinstance(value := values.get(name), str)), "")
    name = _NAMES.get(word, "")
    limit = _number(values, "swiglu_limit")
    gate, up = _number(values, "mlp_gate_softcap"), _number(values, "mlp_up_softcap")
    if gate is not None:
        return Activation("situ", beta=gate, linear_beta=up), ""
    if name == "situ":
        beta = _number(values, "activation_situ_beta")
        linear_beta = _number(values, "activation_situ_linear_beta")
        return (None if beta is None else Activation(name, beta=beta, linear_beta=linear_beta)), ""
    alpha = _number(values, "swiglu_alpha")
    if name == "swiglu" or alpha is not None or (model_type.startswith(_OAI) and name in ("", "silu")):
        return Activation("swiglu", limit=limit or _OAI_LIMIT, alpha=alpha or _OAI_ALPHA, beta=1.0), ""
    if name == "silu" and limit:
        return Activation("swiglu", limit=limit), ""
    if not name:
        return None, ""
    return Activation(name), _exceptions(values.get("swiglu_limits")) if name == "silu" else ""


def _exceptions(limits: object) -> str:
    """Name the layers that have a limit; ``limits`` has one a layer, 0 and null mean none (Step-3.5 and 3.7)."""
    some = {
        at: limit
        for at, limit in enumerate(limits if isinstance(limits, list) else ())
        if isinstance(limit, (int, float)) and limit > 0
    }
    if not some:
        return ""
    listed = ", ".join(f"{at} ({limit:g})" for at, limit in list(some.items())[:4]) + ", ..." * (len(some) > 4)
    return f"swiglustep with a limit in layers {listed}"


def _number(values: Mapping[str, object], name: str) -> float | None:
    """A number above 0; None for anything else."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None
