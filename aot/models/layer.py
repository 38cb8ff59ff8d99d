"""The shapes that a plan is made of: an expert layer as its model publishes it, and a shard of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...artifacts.limits import MAX_EXPERTS, MAX_WIDTH
from ...artifacts.records import DType, Layout, Op
from ...kernels.activations import Activation
from ...kernels.hopper_w4a16 import can_be_prepared, padded_width

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
    """Name the layers with a limit; ``limits`` has an entry for each layer, 0 or null for none (Step-3.5 and 3.7)."""
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


MAX_TOKENS = 1 << 24
MAX_ROWS = 1 << 30  # the largest M: a bucket is a power of two and fits int32
_SHOWN = 64  # the largest divisor that an error lists
_FP8_BLOCK = 128  # rows and columns of w that have one scale in fp8 training


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One mixture-of-experts layer, whole, as the model publishes it.

    ``E`` experts of width ``I``, ``k`` of them a token, between hidden states of width ``H``.
    ``shared_width`` is the width of all shared experts together, in elements (0: none). ``gated``:
    GEMM 1 computes gate and up. ``weights`` is the published format (``bf16``, ``fp8_block``, ``mxfp4``, ...).
    ``layouts``: how programs hold the weights; [E, K, N] too if the checkpoint does. ``zero_experts`` is the number of
    further experts that return the token unchanged; transformers' GEMM 1 has rows for them. ``part``: which of a
    model's kinds of experts these are (``vision``, ``talker``, ``attention``, ...), or empty. ``activation``: the
    activation between the two GEMMs, or None if unknown.
    """

    E: int
    k: int
    H: int
    I: int  # noqa: E741, the field's letter
    shared_width: int = 0
    gated: bool = True
    weights: str = "bf16"
    note: str = ""
    layouts: tuple[Layout, ...] = (Layout.NK,)
    zero_experts: int = 0
    part: str = ""
    activation: Activation | None = None

    def contradictions(self) -> list[str]:
        """List the contradictions in the layer's sizes; empty if there are none."""
        problems = [
            f"{letter}={value}: wanted 1 to {most}"
            for letter, value, most in (
                ("E", self.E, MAX_EXPERTS),
                ("k", self.k, MAX_EXPERTS),
                ("H", self.H, MAX_WIDTH),
                ("I", self.I, MAX_WIDTH),
            )
            if not 1 <= value <= most
        ]
        if self.k > self.E >= 1:
            problems.append(f"k={self.k} is more than E={self.E}: a token can't go to more experts than there are")
        return problems


@dataclass(frozen=True, slots=True)
class LayerGemm:
    """One grouped GEMM of a shard: the weight is [E, N, K]."""

    role: str  # gate_up, up or down
    E: int
    N: int
    K: int


@dataclass(frozen=True, slots=True)
class LayerShard:
    """One shard of one model's expert layer, and what to build for it.

    ``E``, ``k``, ``H`` and ``I`` are the whole layer's. ``tp`` GPUs split the width of each expert,
    ``ep`` GPUs split the experts. ``shared_experts`` shared experts of width I are fused into the
    routed ones: every rank holds them all, and each token goes to all of them. ``tokens`` is the
    (least, most) number of tokens of one step, counted over all ep ranks. ``layouts``: the weights' layouts.
    ``zero_experts`` and ``activation`` are the layer's. ``weights``: the requested formats; ``dtypes``: the dtypes that
    are built; ``instead``: the dtypes built on a capability that has code for none of them. ``pads``: programs pad
    quantised weights so that they can be prepared, as the serving plug-ins do. ``trains_in_fp8``: programs train with
    ``precision="fp8"``, whose dX is a forward of fp8_block weights with N and K exchanged.
    """

    name: str
    E: int
    k: int
    H: int
    I: int  # noqa: E741, the field's letter
    shared_experts: int
    gated: bool
    dtypes: tuple[DType, ...]
    tp: int
    ep: int
    tokens: tuple[int, int]
    ops: tuple[Op, ...]
    note: str = ""
    layouts: tuple[Layout, ...] = (Layout.NK,)
    zero_experts: int = 0
    weights: tuple[str, ...] = ("bf16",)
    instead: tuple[DType, ...] = ()
    activation: Activation | None = None
    pads: bool = True
    trains_in_fp8: bool = False

    @property
    def experts_per_rank(self) -> int:
        """E/ep, and the fused shared experts."""
        return self.E // self.ep + self.shared_experts

    @property
    def built_in(self) -> tuple[str, ...]:
        """The names of ``dtypes``."""
        return tuple(dtype.value for dtype in self.dtypes)

    @property
    def experts_per_token(self) -> int:
        """k, and the fused shared experts."""
        return self.k + self.shared_experts

    @property
    def width(self) -> int:
        """I/tp: the expert's width on one GPU."""
        return self.I // self.tp

    @property
    def rows(self) -> tuple[int, int]:
        """(least, most) M: rows of one rank, tokens * k / ep where the routing is even; at least 1."""
        least, most = (tokens * self.experts_per_token for tokens in self.tokens)
        return max(1, least // self.ep), max(1, -(-most // self.ep))

    def gemms(self, prepared_as: DType | None = None) -> tuple[LayerGemm, LayerGemm]:
        """GEMM 1, w [E, 2I/tp, H] (gated) or [E, I/tp, H], and GEMM 2, w [E, H, I/tp]; as [E, N, K] in any layout.

        With ``prepared_as``, a format, I/tp is padded as the serving plug-ins pad it before they prepare the weights.
        """
        width = self.width if prepared_as is None else self.padded_width(prepared_as)
        first = LayerGemm("gate_up", self.experts_per_rank, 2 * width, self.H)
        if not self.gated:
            first = LayerGemm("up", self.experts_per_rank, width, self.H)
        return first, LayerGemm("down", self.experts_per_rank, self.H, width)

    def padded_width(self, dtype: DType) -> int:
        """I/tp, padded for prepared weights; I/tp itself if H can't be prepared at that size."""
        wide = padded_width(dtype, self.width) if self.pads else self.width
        return wide if can_be_prepared(dtype, wide, self.H) and can_be_prepared(dtype, self.H, wide) else self.width

    def padded_gemm(self) -> LayerGemm | None:
        """GEMM 1 over weights that have rows for the zero experts too, as transformers holds them on one rank."""
        first = self.gemms()[0]
        return replace(first, E=first.E + self.zero_experts) if self.zero_experts and self.ep == 1 else None

    def contradictions(self) -> list[str]:
        """List why this shard is impossible; empty if it is possible."""
        problems = []
        if self.I % self.tp:
            problems.append(f"tp={self.tp} does not divide I={self.I}; tp can be {_divisors(self.I)}")
        if self.E % self.ep:
            problems.append(f"ep={self.ep} does not divide E={self.E}; ep can be {_divisors(self.E)}")
        if self.trains_in_fp8 and (self.H % _FP8_BLOCK or self.width % _FP8_BLOCK):
            problems.append(
                f"training=fp8 with H={self.H} and I/tp={self.width}: wanted multiples of {_FP8_BLOCK}, the size of a "
                "block of weights; leave training= out to build for bf16"
            )
        if self.experts_per_rank > MAX_EXPERTS:
            problems.append(
                f"{self.experts_per_rank} experts on a rank, shared ones included, wanted at most {MAX_EXPERTS}"
            )
        if self.rows[1] > MAX_ROWS:
            problems.append(
                f"tokens=..{self.tokens[1]} with {self.experts_per_token} experts a token makes {self.rows[1]} rows, "
                f"wanted at most {MAX_ROWS}"
            )
        return problems

    def __str__(self) -> str:
        text = f"{self.name} tp={self.tp} ep={self.ep} dtype={','.join(self.built_in)}"
        if self.layouts != (Layout.NK,):
            text += f" layout={','.join(layout.value for layout in self.layouts)}"
        return text + (f" shared={self.shared_experts}" if self.shared_experts else "")


def _divisors(number: int) -> str:
    """The divisors that a deployment might use, for an error."""
    some = [str(divisor) for divisor in range(1, _SHOWN + 1) if number % divisor == 0]
    return ", ".join(some + ["..."] * (number > _SHOWN))
