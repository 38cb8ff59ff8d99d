"""A bundle that is merged or pruned has the plans of its own choices; diff and inspect show them."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_bundles import H200, Spec, bundle, measured, write

from pretuned.aot.bundle.diff import diff
from pretuned.aot.bundle.merge import merge
from pretuned.aot.cli.inspect import contents
from pretuned.aot.cli.prune import prune_bundle as prune
from pretuned.aot.plan.plan import BuildPlan
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import BundleCorrupt
from pretuned.artifacts.records import Bundle, Choice, DType, Fusion, Op, PlanRow, Problem, Way
from pretuned.kernels.spec import Config, Loads, Schedule

M = 8192
ON_LOAD = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048, fusion=Fusion.GATHER)
PLAIN, SILU = (ON_LOAD._replace(fusion=fusion) for fusion in (Fusion.NONE, Fusion.SILU))
WIDE = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
SPECS = tuple(Spec(WIDE, fusion=fusion) for fusion in (Fusion.GATHER, Fusion.NONE, Fusion.SCATTER, Fusion.SILU))
ON_LOAD_CHOICE, PLAIN_CHOICE = measured(M, 0, 300.0), measured(M, 1, 200.0)


def bundle_with(*problems: Problem) -> Bundle:
    choices = {ON_LOAD: ON_LOAD_CHOICE, PLAIN: PLAIN_CHOICE, SILU: measured(M, 3, 190.0)}
    return bundle({problem: [choices[problem]] for problem in problems}, gpus=[H200], specs=SPECS)


def plan_of(bundle: Bundle, problem: Problem) -> list[tuple[Way, Fusion | None]]:
    """The ways of a choice's plan, and the fusion of the variant of each."""
    (choice,) = bundle.choices[problem]
    return [(row.way, None if row.variant is None else bundle.variants[row.variant].fusion) for row in choice.plan]


FIRST = [(Way.ROWS_FIRST, Fusion.NONE)]


def test_a_merge_makes_the_plans_of_all_its_choices() -> None:
    """Neither bundle has both times. (No variant that stores by index ships: no choice names it.)"""
    first, other = bundle_with(ON_LOAD), bundle_with(PLAIN)
    assert (plan_of(first, ON_LOAD), plan_of(other, PLAIN)) == ([], [])
    merged = merge({"one": first, "other": other}).bundle
    assert plan_of(merged, ON_LOAD) == FIRST
    assert codec.decode(codec.encode(merged), "merged") == merged


def test_what_is_pruned_names_no_variant_that_is_gone() -> None:
    whole = bundle_with(ON_LOAD, PLAIN, SILU)
    assert plan_of(whole, PLAIN) == [(Way.FUSED_SILU, Fusion.SILU)]
    for kept, plan in (((ON_LOAD, PLAIN), []), ((PLAIN, SILU), [(Way.FUSED_SILU, Fusion.SILU)])):
        pruned = prune(whole, BuildPlan(dict.fromkeys(kept, (M,)), ()), "whole").bundle
        assert plan_of(pruned, PLAIN) == plan
        codec.encode(pruned)
    alone = prune(whole, BuildPlan({ON_LOAD: (M,)}, ()), "whole").bundle
    assert plan_of(alone, ON_LOAD) == []


def test_diff_and_inspect_show_a_plan(tmp_path: Path) -> None:
    whole = bundle_with(ON_LOAD, PLAIN)
    (choice,) = whole.choices[ON_LOAD]
    other = whole._replace(choices={**whole.choices, ON_LOAD: (choice._replace(plan=choice.plan[:1]),)})
    assert diff(whole, whole).choices == ()
    assert [choice.what for choice in diff(whole, other).choices] == [("plan",)]
    with open_bundle(
        write(tmp_path / "a.msgpack", {ON_LOAD: [ON_LOAD_CHOICE], PLAIN: [PLAIN_CHOICE]}, gpus=[H200], specs=SPECS)
    ) as opened:
        rows = contents(opened, choices=True)["choices"]
    assert isinstance(rows, list)
    plans = {row["problem"]: row["plan"] for row in rows}
    assert plans[str(ON_LOAD)] == ["rows_first from top_k 1: variant 1", "rows_first_by_index from top_k 1: variant 2"]
    assert plans[str(PLAIN)] == []
    row = PlanRow(Way.FUSED_SILU, True, 3, None)
    assert str(row) == "fused_silu from top_k 3 with a check: variant the choice's own"


@pytest.mark.parametrize(
    ("problem", "row"),
    [
        (ON_LOAD, PlanRow(Way.ROWS_FIRST, False, 1, 0)),
        (ON_LOAD, PlanRow(Way.ROWS_FIRST, False, 1, 2)),
        (ON_LOAD, PlanRow(Way.ROWS_FIRST_BY_INDEX, False, 1, 1)),
        (ON_LOAD, PlanRow(Way.FUSED_SILU, False, 1, 1)),
        (ON_LOAD, PlanRow(Way.QUANTISED_X, False, 1, 1)),
        (PLAIN, PlanRow(Way.ROWS_FIRST, False, 1, 1)),
        (PLAIN, PlanRow(Way.QUANTISED_X, False, 1, 1)),
    ],
)
def test_a_plan_whose_variant_computes_something_else_is_refused(problem: Problem, row: PlanRow) -> None:
    whole = bundle_with(ON_LOAD, PLAIN)
    (choice,) = whole.choices[problem]
    wrong: Choice = choice._replace(plan=(row,))
    with pytest.raises(BundleCorrupt, match=f"variant {row.variant} "):
        codec.encode(whole._replace(choices={**whole.choices, problem: (wrong,)}))
