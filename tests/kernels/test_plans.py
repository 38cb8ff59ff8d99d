"""The plans of a bundle: which calls run another variant than the choice's own, by the bundle's times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from small_bundles import H100, H200, Spec, bundle, measured, modelled

from pretuned.artifacts import codec
from pretuned.artifacts.records import Choice, DType, Fusion, Gpu, Layout, Op, PlanRow, Problem, Way, planned
from pretuned.kernels import plans
from pretuned.kernels.chips import chip_named
from pretuned.kernels.spec import Config, Loads, Schedule

M = 8192
BOTH = Fusion.SILU | Fusion.GATHER
ON_LOAD = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048, fusion=Fusion.GATHER)
PLAIN = ON_LOAD._replace(fusion=Fusion.NONE)
WIDE = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
KINDS = (Fusion.GATHER, Fusion.NONE, Fusion.SCATTER, BOTH, Fusion.SILU)
SPECS = tuple(Spec(WIDE, fusion=kind) for kind in KINDS)
SILU, GATED = PLAIN._replace(fusion=Fusion.SILU), PLAIN._replace(fusion=BOTH)


def us(top_k: int, gpu: Gpu = H200) -> float:
    """The time of the row kernel that gathers."""
    time_us = plans.gather_us(M, 2048, 2, top_k, chip_named(gpu.name))
    assert time_us is not None
    return time_us


def plan(*choices: tuple[Problem, Choice], gpus: Sequence[Gpu] = (H200,)) -> tuple[PlanRow, ...]:
    """The plan of the first choice, in a bundle that the format holds."""
    built = bundle({problem: [choice] for problem, choice in choices}, gpus=gpus, specs=SPECS)
    assert plans.with_plans(built) == built  # as the builder of these tests called it before
    codec.encode(built)
    (choice,) = built.choices[choices[0][0]]
    return choice.plan


def first(plain_us: float, on_load_us: float = 300.0) -> list[PlanRow]:
    return [
        row
        for row in plan((ON_LOAD, measured(M, 0, on_load_us)), (PLAIN, measured(M, 1, plain_us)))
        if row.way is Way.ROWS_FIRST
    ]


def test_rows_are_gathered_first_from_the_top_k_on_with_which_it_is_faster() -> None:
    assert first(300.0) == []
    assert first(300.0 - us(128) + 0.1) == []
    for top_k in (2, 3, 8):
        at = 300.0 - us(top_k) - 0.001  # of top_k it is just faster, of one less it is not
        assert us(top_k - 1) > us(top_k) + 0.001
        assert first(at)[0] == PlanRow(Way.ROWS_FIRST, False, top_k, 1)


def test_a_check_of_the_index_counts() -> None:
    assert first(300.0 - us(1) - 4.1) == [PlanRow(Way.ROWS_FIRST, False, 1, 1)]  # in any case
    decision = first(300.0 - us(8) - 0.001)
    assert decision == [PlanRow(Way.ROWS_FIRST, False, 8, 1), PlanRow(Way.ROWS_FIRST, True, 0, None)]
    row = plan((ON_LOAD, measured(M, 0, 300.0)), (PLAIN, measured(M, 1, 300.0 - us(8) - 0.001)))
    asked = [(top_k, checks) for top_k in (0, 1, 7, 8, 9, 500) for checks in (False, True)]
    runs = [call for call in asked if planned(row, Way.ROWS_FIRST, call[0], checks=call[1]) == 1]
    assert runs == [(8, False), (9, False), (500, False)]


def test_each_top_k_is_decided_by_its_own_times() -> None:
    """Row by row, whatever the plan has written down: as the rule says, and never for rows that can't be gathered."""
    for plain_us in (270.0, 280.0, 284.0, 285.0, 286.0, 288.0, 299.0):
        decided_plan = plan((ON_LOAD, measured(M, 0, 300.0)), (PLAIN, measured(M, 1, plain_us)))
        for top_k in range(129):
            for checks in (False, True):
                runs = bool(top_k) and plain_us + us(max(1, top_k)) + 4.0 * checks < 300.0
                assert planned(decided_plan, Way.ROWS_FIRST, top_k, checks=checks) == (1 if runs else None)
                runs = bool(top_k) and 1.05 * plain_us + us(max(1, top_k)) + 4.0 * checks < 300.0
                assert planned(decided_plan, Way.ROWS_FIRST_BY_INDEX, top_k, checks=checks) == (2 if runs else None)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize(
    "times", [(300.0, 280.0, 290.0, 272.0), (300.0, 290.0, 296.0, 280.0), (300.0, 270.0, 320.0, 1e3)]
)
def test_silu_is_the_least_of_four_for_each_top_k(times: tuple[float, float, float, float], checks: bool) -> None:
    on_load, plain, silu_on_load, silu = times
    decided_plan = plan(
        (ON_LOAD, measured(M, 0, on_load)),
        (PLAIN, measured(M, 1, plain)),
        (GATED, measured(M, 3, silu_on_load)),
        (SILU, measured(M, 4, silu)),
    )
    saved = plans.least_activation_us(GATED, M, chip_named(H200.name))
    for top_k in range(129):
        row_us = us(top_k) + 4.0 * checks if top_k else 1e9
        options: dict[int | None, float] = {3: silu_on_load, 4: silu + row_us}
        best = min(options, key=lambda option: options[option])
        wanted = best if options[best] <= min(on_load, plain + row_us) + saved else None
        assert planned(decided_plan, Way.FUSED_SILU, top_k, checks=checks) == wanted


def test_silu_without_a_gather_and_by_the_other_name() -> None:
    assert plan((PLAIN, measured(M, 1, 210.0)), (SILU, measured(M, 4, 209.0))) == (
        PlanRow(Way.FUSED_SILU, False, 0, 4),
    )
    twin = PLAIN.transposed
    assert twin is not None
    assert twin.layout is Layout.KN
    built = bundle({twin: [measured(M, 1, 210.0)], SILU: [measured(M, 4, 209.0)]}, gpus=[H200], specs=SPECS)
    assert built.choices[twin][0].plan == (PlanRow(Way.FUSED_SILU, False, 0, 4),)
    codec.encode(built)


def test_a_modelled_choice_is_of_the_capability_s_representative() -> None:
    at = 300.0 / 1.05 - us(8, H100)
    for plain_us, has in ((at - 0.01, True), (at + 0.01, False)):
        decided_plan = plan((ON_LOAD, modelled(M, 0, 300.0)), (PLAIN, modelled(M, 1, plain_us)), gpus=())
        assert (planned(decided_plan, Way.ROWS_FIRST, 8, checks=False) == 1) is has


def test_two_sources_or_two_gpus_make_no_plan() -> None:
    assert plan((ON_LOAD, measured(M, 0, 300.0)), (PLAIN, modelled(M, 1, 10.0))) == ()
    assert plan((ON_LOAD, modelled(M, 0, 300.0)), (PLAIN, measured(M, 1, 10.0))) == ()
    assert plan((ON_LOAD, measured(M, 0, 300.0)), (PLAIN, measured(M, 1, 10.0, gpu=1)), gpus=(H200, H100)) == ()
    assert plan((ON_LOAD, measured(M, 0, 300.0)), (PLAIN, measured(M // 2, 1, 10.0))) == ()
    unknown = H200._replace(name="NVIDIA H300")  # a row kernel has no time there
    assert plan((ON_LOAD, measured(M, 0, 300.0)), (PLAIN, measured(M, 1, 10.0)), gpus=(unknown,)) == ()


def test_old_plans_are_forgotten() -> None:
    built = bundle({ON_LOAD: [measured(M, 0, 300.0)], PLAIN: [measured(M, 1, 10.0)]}, gpus=[H200], specs=SPECS)
    assert built.choices[ON_LOAD][0].plan
    alone = built._replace(choices={ON_LOAD: built.choices[ON_LOAD]})
    assert plans.with_plans(alone).choices[ON_LOAD][0].plan == ()
