from __future__ import annotations

import pytest
from claims import H100, H200, able, chosen, revised, with_twins

from pretuned.aot.bundle.diff import diff, time_ratio
from pretuned.aot.bundle.merge import merge
from pretuned.artifacts import codec
from pretuned.artifacts.records import Bundle

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(small_bundle) -> Bundle:
    return with_twins(codec.decode(small_bundle.read_bytes(), str(small_bundle)))


def test_a_bundle_and_itself(base: Bundle) -> None:
    changes = diff(base, base)
    assert not changes.differ
    assert not changes.choices
    assert changes.cubins_added == changes.cubins_removed == (0, 0)


def test_the_order_of_variants_is_no_difference(base: Bundle) -> None:
    last = len(base.variants) - 1
    turned = base._replace(
        variants=base.variants[::-1],
        cubins=base.cubins[::-1],
        choices={
            problem: tuple(
                choice._replace(
                    variant=last - choice.variant,
                    runner_up=None if choice.runner_up is None else last - choice.runner_up,
                )
                for choice in row
            )
            for problem, row in base.choices.items()
        },
    )
    assert codec.encode(turned) != codec.encode(base)
    assert not diff(base, turned).differ


def test_what_changed_in_a_choice(base: Bundle) -> None:
    problem = next(choice for choice in base.choices if len(able(base, choice)) == 3)
    old = chosen(
        base,
        {
            (problem, 1): (0, 1000, None),
            (problem, 2): (0, 1000, None),
            (problem, 4): (0, 1000, None),
            (problem, 8): (0, 1000, None),
        },
    )
    new = chosen(
        base,
        {
            (problem, 1): (1, 1000, None),
            (problem, 2): (0, 250, H200),
            (problem, 4): (0, 1000, None),
            (problem, 16): (0, 1000, None),
        },
    )
    changes = diff(old, new)
    assert [(choice.bucket, choice.what) for choice in changes.choices] == [
        (1, ("variant",)),
        (2, ("source", "gpu", "time")),
    ]
    assert (changes.choices_added, changes.choices_removed) == (1, 1)
    assert time_ratio(list(changes.choices)) == pytest.approx(0.5)
    assert changes.facts == {"gpus": ("", "NVIDIA H200 (driver 12080)")}
    assert not changes.variants_added
    back = diff(new, old)
    assert [(choice.old, choice.new) for choice in back.choices] == [
        (choice.new, choice.old) for choice in changes.choices
    ]


def test_choices_of_one_gpu_are_held_against_each_other(base: Bundle) -> None:
    problem = next(choice for choice in base.choices if len(able(base, choice)) == 3)
    h100, h200 = chosen(base, {(problem, 1): (0, 1000, H100)}), chosen(base, {(problem, 1): (1, 500, H200)})
    both = merge({"h100": h100, "h200": h200}).bundle
    changes = diff(h200, both)
    assert (changes.choices, changes.choices_added, changes.choices_removed) == ((), 1, 0)
    assert changes.differ
    faster = both._replace(
        choices={problem: tuple(value._replace(time_ns=value.time_ns - 1) for value in both.choices[problem])}
    )
    changes = diff(both, faster)
    assert [(choice.old.gpu, choice.new.gpu, choice.what) for choice in changes.choices] == [
        (H100, H100, ("time",)),
        (H200, H200, ("time",)),
    ]
    (moved,) = diff(h100, h200).choices
    assert (moved.old.gpu, moved.new.gpu) == (H100, H200)


def test_another_runner_up_and_other_experts_a_token(base: Bundle) -> None:
    problem, row = next((product, row) for product, row in base.choices.items() if len(able(base, product)) == 3)
    second = next(i for i in able(base, problem) if i != row[0].variant)
    followed = row[0]._replace(runner_up=second, runner_up_ns=2 * row[0].time_ns)
    changes = diff(base, base._replace(choices={**base.choices, problem: (followed, *row[1:])}))
    assert [choice.what for choice in changes.choices] == [("runner-up",)]
    first, *rest = base.models
    more = first._replace(top_k=first.top_k + 1)
    assert diff(base, base._replace(models=(more, *rest))).models_changed == ((first, more),)


def test_two_models_of_one_name_are_two(base: Bundle) -> None:
    first, *rest = base.models
    both = base._replace(models=(first, first._replace(top_k=first.top_k + 1), *rest))
    assert diff(both, base).models_removed == (both.models[1],)
    assert diff(base, both).differ
    assert not diff(both, both).differ


def test_models_and_problems_that_come_and_go(base: Bundle) -> None:
    first, *rest = base.models
    gone = first._replace(problems=first.problems[1:])
    fewer = base._replace(models=(gone,), choices={p: row for p, row in base.choices.items() if p in gone.problems})
    changes = diff(base, fewer)
    assert changes.models_removed == tuple(rest)
    assert changes.models_changed == ((first, gone),)
    assert set(changes.problems_removed) == set(base.choices) - set(gone.problems)
    assert (changes.problems_added, changes.models_added) == ((), ())
    assert diff(fewer, base).problems_added == changes.problems_removed


def test_variants_recompiled_added_and_removed(base: Bundle) -> None:
    changes = diff(base, revised(base))
    assert [(old.revision, new.revision) for old, new in changes.recompiled] == [
        (variant.revision, variant.revision + 1) for variant in base.variants
    ]
    assert not changes.variants_added
    assert not changes.variants_removed
    assert changes.cubins_added == changes.cubins_removed == (0, 0), "the code is the same"
    assert {choice.what for choice in changes.choices} == {("code",)}

    used = {i for row in base.choices.values() for choice in row for i in (choice.variant, choice.runner_up)}
    idle = next(i for i in range(len(base.variants) - 1, -1, -1) if i not in used)
    assert idle == len(base.variants) - 1, "the last twin"
    fewer = base._replace(variants=base.variants[:idle], cubins=base.cubins[:idle])
    changes = diff(base, fewer)
    assert changes.variants_removed == (base.variants[idle],)
    assert (changes.recompiled, changes.variants_added, changes.choices) == ((), (), ())
    assert changes.cubins_removed == (0, 0), "its twin still has the cubin"
    other = base.variants[idle]._replace(cubin_sha256=bytes(32), cubin_bytes=5)
    changes = diff(base, base._replace(variants=(*base.variants[:idle], other), cubins=(*base.cubins[:idle], b"other")))
    assert changes.recompiled == ((base.variants[idle], other),)
    assert changes.cubins_added == (1, 5)
