"""The form with silu(gate) * up in the epilogue: its code, its arguments, its estimate, its reference."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pretuned.artifacts.records import PLAIN_LAYOUTS, DType, Fusion, Layout, Op, Problem
from pretuned.kernels import reference
from pretuned.kernels.chips import chip_for
from pretuned.kernels.cost import CONSTANTS, Resources
from pretuned.kernels.cost_model import estimate_us
from pretuned.kernels.entry import FLAGS
from pretuned.kernels.registry import arguments, boxes, constants, divisibility
from pretuned.kernels.spec import Config, Loads, Schedule, Spec, code_of

BOTH = Fusion.SILU | Fusion.GATHER
CONFIG = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)


def spec(fusion: Fusion, **more: object) -> Spec:
    return Spec(Op.FORWARD, DType.BF16, CONFIG, fusion=fusion, **more)  # type: ignore[arg-type]


def test_it_is_code_of_its_own_and_no_flag() -> None:
    assert code_of(Op.FORWARD, Fusion.SILU) is Fusion.SILU
    assert code_of(Op.FORWARD, BOTH) is BOTH
    assert BOTH & FLAGS is Fusion.GATHER
    assert Fusion.SILU & FLAGS is Fusion.NONE
    assert Fusion(31) == FLAGS | Fusion.SILU


@pytest.mark.parametrize(
    ("op", "fusion"),
    [(Op.DX, Fusion.SILU), (Op.DW, Fusion.SILU), *((Op.FORWARD, Fusion.SILU | Fusion(bit)) for bit in (2, 4, 8))],
)
def test_what_there_is_no_code_for(op: Op, fusion: Fusion) -> None:
    with pytest.raises(ValueError, match="SILU goes with GATHER"):
        code_of(op, fusion)


def test_its_result_leaves_by_tma_whether_rows_are_gathered_or_not() -> None:
    plain, gathers = spec(Fusion.SILU), spec(BOTH)
    assert (set(boxes(plain)), set(boxes(gathers))) == ({"x", "w", "y_map"}, {"w", "y_map"})
    assert dict(arguments(gathers))["x"] == "ptr"
    assert dict(arguments(gathers))["y_map"] == dict(arguments(plain))["y_map"] == "desc4"
    said = [tuple(constants(spec, 90)[name] for name in ("GATED", "GATHER", "INDEXED")) for spec in (plain, gathers)]
    assert said == [(True, False, False), (True, True, False)]
    assert all("y_map" not in constants(spec, 90) for spec in (plain, gathers))
    assert constants(spec(Fusion.GATHER), 90)["GATED"] is False
    assert arguments(plain) == arguments(spec(Fusion.NONE))  # the same launch
    assert divisibility(plain) == divisibility(spec(Fusion.NONE))
    assert str(gathers).endswith("cooperative gather silu")


def test_its_estimate_is_the_products_with_half_of_the_columns_written() -> None:
    resources, chip = Resources(CONFIG, 384, 220_000, 168), chip_for(90)
    for E, M in ((8, 4096), (128, 8192), (128, 65536)):
        plain = Problem(Op.FORWARD, DType.BF16, E, 1536, 2048, fusion=Fusion.GATHER)
        times = [estimate_us(problem, M, resources, chip) for problem in (plain._replace(fusion=BOTH), plain)]
        assert times[0] < times[1]
        assert times[1] - times[0] <= M * 768 * 2 / chip.bandwidth_gbs * 1e-3 * 2  # no more than that takes


@pytest.mark.parametrize("fusion", [Fusion.SILU, BOTH])
def test_its_estimate_has_none_of_what_half_tiles_save(fusion: Fusion) -> None:
    """Its kernel multiplies every tile at its whole width, past the last column and in the last wave too."""
    assert constants(spec(fusion), 90)["GATED"] is True
    resources, hopper = Resources(CONFIG, 384, 220_000, 168), CONSTANTS.hopper

    def us(problem: Problem, M: int, name: str, value: bool) -> float:
        constants = CONSTANTS._replace(hopper=hopper._replace(specialized=hopper.specialized._replace(**{name: value})))
        return estimate_us(problem, M, resources, chip_for(90), constants)

    odd = Problem(Op.FORWARD, DType.BF16, 32, 2 * 1344, 2880, fusion=fusion)  # 10.5 tiles of columns
    few = Problem(Op.FORWARD, DType.BF16, 8, 4096, 28672, fusion=fusion)  # a last wave of less than half
    for problem, M, name in ((odd, 32768, "half_columns"), (few, 2048, "split_tail")):
        assert us(problem, M, name, True) == us(problem, M, name, False)
        plain = problem._replace(fusion=fusion & ~Fusion.SILU)
        assert us(plain, M, name, True) < 0.99 * us(plain, M, name, False)


@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
def test_the_reference(layout: Layout) -> None:
    torch.manual_seed(1)
    E, N, K, T, k = 3, 12, 8, 5, 2
    x, w = torch.randn(T, K).double(), torch.randn(E, N, K).double()
    m_sizes, index = torch.tensor([4, 0, 3]), torch.tensor([3, 1, 8, 99, 0, 7, 2, 5, 4, 6])
    y = torch.full((T * k, N // 2), float("nan")).double()
    stored = w if layout is Layout.NK else w.transpose(1, 2).contiguous()
    reference.rows(
        x, stored, m_sizes, y, M=T * k, layout=layout, index=index, index_end=T * k, gather_divisor=k, silu=True
    )
    for row, expert in enumerate([0, 0, 0, None, 2, 2, 2, None, None, None]):
        if expert is None:
            assert y[row].isnan().all()
            continue
        h = w[expert] @ x[index[row] // k]
        torch.testing.assert_close(y[row], functional.silu(h[: N // 2]) * h[N // 2 :])
