"""Activations with numbers: what is accepted, what is refused and how, and what a row kernel gets."""

from __future__ import annotations

import copy
import math
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import pretuned
import pretuned.runtime
from pretuned.artifacts.errors import InputError
from pretuned.kernels.activations import KINDS, Activation, activation_of
from pretuned.runtime import activate


def test_the_exported_class_is_this_one() -> None:
    assert pretuned.Activation is pretuned.runtime.Activation is Activation


@pytest.mark.parametrize("name", [*KINDS, "swiglu_oai"])
def test_each_name_makes_one_that_is_found_again(name: str) -> None:
    act = Activation(name, beta=2.0) if name == "situ" else Activation(name)
    for other in (pickle.loads(pickle.dumps(act)), copy.deepcopy(act), eval(repr(act))):
        assert other == act
        assert hash(other) == hash(act)
        assert type(other) is Activation


@pytest.mark.parametrize("act", [Activation("swiglu", limit=1.0, alpha=1.3, beta=0.5), Activation("silu")])
def test_torch_s_trees_take_it_apart_and_make_it_again(act: Activation) -> None:
    """Checkpointing, export, DDP, FSDP and accelerate do this with arguments."""
    leaves, spec = pytree.tree_flatten((act, 1))
    again, _ = pytree.tree_unflatten(leaves, spec)
    assert (type(again), again) == (Activation, act)
    h = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.testing.assert_close(checkpoint(activate, h, act, use_reentrant=False), activate(h, act))


def test_a_change_of_one_number_is_checked() -> None:
    act = Activation("swiglu", limit=7.0)
    assert act._replace(limit=3.0) == Activation("swiglu", limit=3.0)
    for base, change in ((act, {"limit": -1.0}), (act, {"linear_beta": 2.0}), (Activation("silu"), {"limit": 7.0})):
        with pytest.raises(InputError, match="wanted"):
            base._replace(**change)


def test_gpt_oss_s_is_swiglu_with_its_numbers() -> None:
    act = Activation("swiglu", limit=7, alpha=1.702, beta=1)
    assert act == Activation("swiglu_oai")
    assert str(act) == "swiglu_oai"
    assert activation_of("f", "swiglu_oai", gated=True, interleaved=False) == act


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (Activation("silu"), "silu"),
        (Activation("swiglu", limit=10.0), "swiglu(limit=10)"),
        (Activation("swiglu", limit=7.0, alpha=1.5, beta=1.0), "swiglu(limit=7, alpha=1.5, beta=1)"),
        (Activation("situ", beta=4.0, linear_beta=20.0), "situ(beta=4, linear_beta=20)"),
        (Activation("swiglustep", limit=7.0), "swiglustep(limit=7)"),
    ],
)
def test_what_a_log_line_says(act: Activation, said: str) -> None:
    assert str(act) == said
    assert eval(repr(act)) == act


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("tanh", {}, "name is 'tanh', wanted one of silu, gelu"),
        (None, {}, "name is None"),
        ("swiglu", {"limit": math.nan}, "limit is nan for swiglu, wanted a number above 0, or None"),
        ("swiglu", {"limit": -1.0}, "limit is -1.0 for swiglu"),
        ("swiglu", {"limit": 0}, "limit is 0 for swiglu.* Without a limit leave it out"),
        ("swiglu", {"limit": "7"}, "limit is '7' for swiglu"),
        ("swiglu", {"limit": True}, "limit is True for swiglu"),
        ("swiglu", {"alpha": math.inf}, "alpha is inf for swiglu, wanted a finite number"),
        ("swiglu", {"beta": math.nan}, "beta is nan for swiglu, wanted a finite number"),
        ("swiglu", {"alpha": None}, "alpha is None for swiglu"),
        ("swiglu", {"linear_beta": 2.0}, "linear_beta is 2.0 for swiglu, wanted none: it has limit, alpha, beta"),
        ("situ", {}, "beta is 0.0 for situ, wanted a number above 0"),
        ("situ", {"beta": -3.0}, "beta is -3.0 for situ"),
        ("situ", {"beta": 1.0, "linear_beta": 0.0}, "linear_beta is 0.0 for situ"),
        ("situ", {"beta": 1.0, "limit": 7.0}, "limit is 7.0 for situ, wanted none: it has beta, linear_beta"),
        ("swiglustep", {"limit": 7.0, "alpha": 2.0}, "alpha is 2.0 for swiglustep, wanted none: it has limit"),
        ("silu", {"limit": 10.0}, "limit is 10.0 for silu, wanted none: swiglu with a limit is"),
        ("swiglu_oai", {"limit": 10.0}, "limit is 10.0 for swiglu_oai, wanted none: it has no numbers"),
        ("gelu", {"alpha": 1.5}, "alpha is 1.5 for gelu, wanted none: it has no numbers"),
        # What float32 has no number for, or no inverse: a kernel would compute with 0 or infinity.
        ("situ", {"beta": 1e39}, "beta is 1e\\+39 for situ, wanted a finite number"),
        ("situ", {"beta": 1e-39}, "beta is 1e-39 for situ, wanted a number above 0"),
        ("situ", {"beta": 1.0, "linear_beta": 1e-50}, "linear_beta is 1e-50 for situ, wanted 1e-30 to 1e\\+30"),
        ("situ", {"beta": 1.0, "linear_beta": 3e38}, "linear_beta is 3e\\+38 for situ, wanted 1e-30 to 1e\\+30"),
        ("swiglu", {"alpha": -1e39}, "alpha is -1e\\+39 for swiglu"),
    ],
)
def test_what_is_no_activation_is_refused(name: Any, numbers: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Activation(name, **numbers)


def test_numbers_of_numpy_and_infinite_limits() -> None:
    assert Activation("swiglu", limit=np.float32(7.0)) == Activation("swiglu", limit=7)
    assert Activation("swiglustep", limit=math.inf).limit is None


def test_no_limit_and_no_slope_is_silu() -> None:
    for same in (Activation("swiglu"), Activation("swiglustep"), Activation("swiglu", limit=math.inf)):
        assert activation_of("f", same, gated=True, interleaved=True) == Activation("silu")
    for other in (Activation("swiglu", limit=9.0), Activation("swiglu", alpha=2.0), Activation("swiglu", beta=1.0)):
        assert activation_of("f", other, gated=True, interleaved=True) == other


def test_a_kernel_gets_the_bits_of_float32() -> None:
    def back(act: Activation) -> tuple[float, ...]:
        return struct.unpack("<4f", struct.pack("<4i", *act.words.values()))

    assert back(Activation("swiglu", limit=7, alpha=1.5, beta=1)) == (7.0, 1.5, 1.0, 0.0)
    assert back(Activation("situ", beta=4, linear_beta=0.5)) == (math.inf, 1.0, 4.0, 0.5)
    assert back(Activation("swiglu", limit=1e300)) == (math.inf, 1.0, 0.0, 0.0)
    assert back(Activation("swiglu", limit=3.4e38)) == (struct.unpack("f", struct.pack("f", 3.4e38))[0], 1.0, 0.0, 0.0)
    assert back(Activation("swiglu", beta=-0.5)) == (math.inf, 1.0, -0.5, 0.0)


def test_what_a_call_refuses() -> None:
    for name in ("swiglustep ", 3, None, ["silu"], "situ"):
        with pytest.raises(InputError, match="f: activation is"):
            activation_of("f", name, gated=True, interleaved=False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"situ needs its beta, Activation\('situ', beta=...\)"):
        activation_of("f", "situ", gated=True, interleaved=False)
    with pytest.raises(InputError, match="wanted one of silu, gelu, gelu_tanh, relu2 with gated=False"):
        activation_of("f", Activation("swiglu", limit=7.0), gated=False, interleaved=False)
    with pytest.raises(InputError, match="without a gate nothing is interleaved"):
        activation_of("f", "silu", gated=False, interleaved=True)
