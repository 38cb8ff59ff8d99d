"""The activations that tests run: each kind with a gate, with numbers that values reach, and each without."""

from __future__ import annotations

from pretuned.kernels.activations import UNGATED as UNGATED
from pretuned.kernels.activations import Activation
from pretuned.runtime.ops.activation import RowActivation

GATED: tuple[str | Activation, ...] = (
    "silu",
    "gelu",
    "gelu_tanh",
    "relu2",
    "swiglu_oai",
    Activation("swiglu", limit=1.5),
    Activation("swiglu", limit=2.0, alpha=1.3, beta=0.5),
    Activation("situ", beta=1.5),
    Activation("situ", beta=2.0, linear_beta=1.25),
    Activation("swiglustep", limit=0.75),
)


def row_act(activation: str | Activation, gated: bool = True, interleaved: bool = False) -> RowActivation:
    """An activation, by name or itself, with its place in a row."""
    function = Activation(activation) if isinstance(activation, str) else activation
    return RowActivation(function.plain, gated, interleaved)
