"""The activations between the two GEMMs of an MoE layer: names, parameters, and their encoding for a row kernel.

``reference.activation`` has the equations in torch, ``kernels/rowops/activation.py`` in Triton.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from ..artifacts.errors import InputError
from ..artifacts.tuples import NamedTuple

# A row kernel's flags have an activation's index in this tuple; kernels/rowops/activation.py has the same values.
KINDS = ("silu", "gelu", "gelu_tanh", "swiglu", "relu2", "situ", "swiglustep")
GATED = KINDS
UNGATED = ("silu", "gelu", "gelu_tanh", "relu2")

_OAI = "swiglu_oai"
_OAI_NUMBERS: dict[str, Any] = {"limit": 7.0, "alpha": 1.702, "beta": 1.0}  # openai/gpt-oss, its model card and code
_DEFAULTS: dict[str, Any] = {"limit": None, "alpha": 1.0, "beta": 0.0, "linear_beta": None}
_TAKES: dict[str, tuple[str, ...]] = {
    "swiglu": ("limit", "alpha", "beta"),
    "situ": ("beta", "linear_beta"),
    "swiglustep": ("limit",),
}
_LEAST, _MOST = 1e-30, 1e30  # a number's absolute value: kernels have it and its inverse in float32
_LARGEST = 3.4028234e38  # of float32
_INSTEAD = {  # hints for a number that an activation does not have
    ("silu", "limit"): "swiglu with a limit is silu(min(gate, limit)) * clamp(up, -limit, limit)",
    ("silu", "alpha"): "swiglu has alpha",
    ("silu", "beta"): "swiglu has beta",
}


class _Fields(NamedTuple):
    name: str
    limit: float | None
    alpha: float
    beta: float
    linear_beta: float | None


class Activation(_Fields):
    """An activation with its numbers. It can be passed wherever an activation's name can.

    With gate g and up u, in float32, rounded once:

    ==============  =================================================================================================
    ``silu``        g * sigmoid(g) * u
    ``gelu``        0.5 * g * (1 + erf(g / sqrt(2))) * u; ``gelu_tanh``: its tanh approximation
    ``relu2``       max(g, 0)^2 * u
    ``swiglu``      c * sigmoid(alpha * c) * (clamp(u, -limit, limit) + beta), c = min(g, limit)
    ``swiglu_oai``  ``swiglu`` with limit 7, alpha 1.702 and beta 1 (gpt-oss)
    ``situ``        beta * tanh(g / beta) * sigmoid(g) * v, v = linear_beta * tanh(u / linear_beta), or u without it
    ``swiglustep``  min(silu(g), limit) * clamp(u, -limit, limit)
    ==============  =================================================================================================

    Parameters
    ----------
    name
        One of the names above.
    limit
        Above 0, or None for no limit; for ``swiglu`` and ``swiglustep``.
    alpha
        For ``swiglu``.
    beta
        For ``swiglu``, and for ``situ``, which needs a beta above 0.
    linear_beta
        Above 0, or None; for ``situ``.

    Raises
    ------
    InputError
        for an unknown name, a number out of its range, or a number that this activation does not have.
    """

    __slots__ = ()

    def __new__(
        cls,
        name: str,
        limit: float | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        linear_beta: float | None = None,
    ) -> Activation:
        """Check the name and the numbers.

        They may be positional, because torch's pytrees (checkpointing, export), DDP and FSDP rebuild named tuples.
        """
        if not isinstance(name, str) or (name not in KINDS and name != _OAI):
            raise InputError(f"Activation: name is {name!r}, wanted one of {', '.join((*KINDS, _OAI))}")
        numbers = {"limit": limit, "alpha": alpha, "beta": beta, "linear_beta": linear_beta}
        takes = _TAKES.get(name, ())
        for field, value in numbers.items():
            if field not in takes and not (value is _DEFAULTS[field] or value == _DEFAULTS[field]):
                fields = f"it has {', '.join(takes)}" if takes else "it has no numbers"
                hint = _INSTEAD.get((name, field), fields)
                raise InputError(f"Activation: {field} is {value!r} for {name}, wanted none: {hint}")
        if name == _OAI:
            name, numbers = "swiglu", numbers | _OAI_NUMBERS
        limit, linear_beta = (_above_zero(name, field, numbers[field]) for field in ("limit", "linear_beta"))
        alpha, beta = (_finite(name, field, numbers[field]) for field in ("alpha", "beta"))
        if name == "situ" and not beta >= _LEAST:
            raise InputError(f"Activation: beta is {beta!r} for situ, wanted a number above 0 ({_LEAST:g} or more)")
        return super().__new__(cls, name, limit, alpha, beta, linear_beta)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Activation:  # type: ignore[override]
        """Make an activation with all checks; ``_replace`` calls this."""
        return cls(*iterable)

    def __repr__(self) -> str:
        numbers = [f", {field}={value!r}" for field, value in self._own().items()]
        return f"Activation({self.name!r}{''.join(numbers)})"

    def __str__(self) -> str:
        """Return the text for logs: ``silu``, ``swiglu_oai``, ``swiglu(limit=10)``."""
        own = self._own()
        if self.name == "swiglu" and own == _OAI_NUMBERS:
            return _OAI
        return self.name + (f"({', '.join(f'{field}={value:g}' for field, value in own.items())})" if own else "")

    def _own(self) -> dict[str, Any]:
        """The numbers that are not the defaults."""
        pairs = zip(self._fields[1:], self[1:], strict=True)
        return {field: value for field, value in pairs if value != _DEFAULTS[field]}

    @property
    def plain(self) -> Activation:
        """The equal activation without numbers, or this activation if there is none."""
        return _SILU if self in _ALSO_SILU else self

    @property
    def words(self) -> Mapping[str, int]:
        """The numbers for a row kernel: the bits of float32 limit, alpha, beta and linear_beta, by name.

        A limit of None becomes infinity, a linear_beta of None becomes 0.
        """
        return _words(self)


def activation_of(call: str, activation: str | Activation, *, gated: bool, interleaved: bool) -> Activation:
    """Return the activation of a call's argument, a name or an ``Activation``.

    Raises
    ------
    InputError
        for an unknown activation, or one that is not defined with (without) a gate. The message begins with ``call``.
    """
    allowed = GATED if gated else UNGATED
    act = _NAMED.get(activation) if isinstance(activation, str) else activation
    if not isinstance(act, Activation) or act.name not in allowed:
        names = (*allowed, _OAI) if gated else allowed
        raise InputError(
            f"{call}: activation is {activation!r}, wanted one of {', '.join(names)} with gated={gated}"
            + (": situ needs its beta, Activation('situ', beta=...)" if activation == "situ" and gated else "")
        )
    if interleaved and not gated:
        raise InputError(
            f"{call}: interleaved=True with gated=False: without a gate nothing is interleaved. Leave it out"
        )
    return act.plain


def _finite(name: str, field: str, value: Any) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or not abs(float(value)) <= _MOST:
        raise InputError(f"Activation: {field} is {value!r} for {name}, wanted a finite number ({_MOST:g} at most)")
    return float(value)


def _above_zero(name: str, field: str, value: Any) -> float | None:
    """Return a number above 0, or None for None, infinity and limits beyond float32."""
    if value is None:
        return None
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value) > 0:
        hint = ". Without a limit leave it out" if field == "limit" and value == 0 else ""
        raise InputError(f"Activation: {field} is {value!r} for {name}, wanted a number above 0, or None{hint}")
    number = float(value)
    if number == math.inf or (field == "limit" and number > _LARGEST):  # (torch.compile can't trace math.isinf)
        return None
    if field != "limit" and not _LEAST <= number <= _MOST:
        raise InputError(f"Activation: {field} is {value!r} for {name}, wanted {_LEAST:g} to {_MOST:g}, or None")
    return number


@functools.cache
def _words(act: Activation) -> Mapping[str, int]:
    numbers = math.inf if act.limit is None else act.limit, act.alpha, act.beta, act.linear_beta or 0.0
    return dict(zip(act._fields[1:], struct.unpack("<4i", struct.pack("<4f", *numbers)), strict=True))


_NAMED = {name: Activation(name) for name in (*KINDS, _OAI) if name != "situ"}  # defined by a name alone
_SILU = Activation("silu")
_ALSO_SILU = (Activation("swiglu"), Activation("swiglustep"))
