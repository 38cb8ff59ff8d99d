"""dW whose last columns are multiplied at half a tile's width."""

from __future__ import annotations

import pytest

from pretuned.artifacts.records import DType, Layout, Op, Problem
from pretuned.kernels import registry
from pretuned.kernels.chips import chip_for
from pretuned.kernels.cost import Resources
from pretuned.kernels.cost_model import estimate_us
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Config, Edge, Loads, Schedule, Spec

WIDE = Config(32, 128, 256, 8, 8, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
NARROW = WIDE._replace(edge=Edge.HALF)


def test_what_can_be_narrow() -> None:
    assert registry.refusal(Spec(Op.DW, DType.BF16, NARROW)) is None
    assert str(NARROW) == f"{WIDE} half-edge"
    plain = NARROW._replace(schedule=Schedule.PERSISTENT)
    assert "edge is HALF, wanted WHOLE" in str(registry.refusal(Spec(Op.DW, DType.BF16, plain)))


def test_a_bundle_from_before_has_none() -> None:
    before = tuple(pair for pair in WIDE.pairs() if pair[0] != "narrow")
    assert Config.from_pairs(before) == WIDE
    assert Config.from_pairs(NARROW.pairs()) == NARROW


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Op)
def test_it_is_tried_where_there_is_such_code(op: Op, dtype: DType) -> None:
    configs = [config for sm in (80, 90, 100, 120) for config in candidates(op, dtype, sm) if config.edge is Edge.HALF]
    assert configs == ([NARROW] if op is Op.DW and dtype in (DType.BF16, DType.FP16) else [])


def test_x_comes_in_halves() -> None:
    wide, narrow = (Spec(Op.DW, DType.BF16, config) for config in (WIDE, NARROW))
    assert registry.boxes(wide)["x"] == (1, 1, 32, 256)
    assert registry.boxes(narrow) == registry.boxes(wide) | {"x": (1, 1, 32, 128)}
    assert registry.constants(narrow, 90) == registry.constants(wide, 90) | {"NARROW": True}


def test_a_half_of_one_part_leaves_through_one_buffer() -> None:
    slim = NARROW._replace(block_k=128)
    assert registry.constants(Spec(Op.DW, DType.BF16, slim), 90)["SLOTS"] == 1
    assert registry.constants(Spec(Op.DW, DType.BF16, slim._replace(edge=Edge.WHOLE)), 90)["SLOTS"] == 2


@pytest.mark.parametrize(
    ("K", "least", "most"), [(2880, 0.94, 0.985), (1408, 0.9, 0.985), (2048, 1.0, 1.0), (3008, 1.0, 1.0)]
)
def test_its_estimate_is_less_where_half_is_enough(K: int, least: float, most: float) -> None:
    """gpt-oss, gate_up, at T=8192: measured 1716 and 1767 us, with K=2880."""
    problem = Problem(Op.DW, DType.BF16, 32, 5760, K, layout=Layout.NK)
    wide, narrow = (
        estimate_us(problem, 32768, Resources(config, 384, 229784, 168, 16), chip_for(90)) for config in (WIDE, NARROW)
    )
    assert least * wide <= narrow <= most * wide
