from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from claims import H100, H200, able, chosen, revised, with_twins
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pretuned.aot.build.build import build
from pretuned.aot.build.options import BuildOptions
from pretuned.aot.bundle.merge import Reason, merge
from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import Family, ships_unchosen
from pretuned.aot.plan.plan import plan
from pretuned.artifacts import codec
from pretuned.artifacts.errors import BundleTooNew, BundleTooOld, InputError, TargetMismatch
from pretuned.artifacts.records import Bundle, Choice, Fusion, Gpu, Op, Problem, RowOp, Source, Target, same_gpu
from pretuned.kernels.entry import LAUNCH_ABI
from pretuned.kernels.registry import ENTRIES

pytestmark = pytest.mark.slow  # two models are compiled

BIG = "shape:E=16,H=512,I=256,k=2 tokens=1..256 name=big"


@pytest.fixture(scope="session")
def built(small_bundle: Path) -> Bundle:
    """A real bundle of two models, one of them unaligned: an aligned variant and a fallback a family."""
    return codec.decode(small_bundle.read_bytes(), str(small_bundle))


@pytest.fixture(scope="session")
def base(built: Bundle) -> Bundle:
    """A bundle like ``built`` with two aligned variants a family."""
    return with_twins(built)


@pytest.fixture(scope="session")
def other(tmp_path_factory, compiled_dir, small_space) -> Bundle:
    """Another real bundle, of another model, from the same variants."""
    options = BuildOptions(tmp_path_factory.mktemp("other"), cache=CompileCache(compiled_dir), space=small_space)
    path = build(plan(load_models([BIG], (Op.FORWARD,)).shapes), (80,), options).bundles[0].path
    return codec.decode(path.read_bytes(), str(path))


@pytest.fixture(scope="session")
def cell(base: Bundle) -> tuple[Problem, int]:
    """One that two aligned variants and the fallback can all serve."""
    problem = next(choice for choice in base.choices if choice.N == 256 and not choice.fusion)
    assert len(able(base, problem)) == 3
    return problem, 64


def unchecked(*bundles: Bundle):
    return merge({f"{i}.msgpack": bundle for i, bundle in enumerate(bundles)})


def merged(*bundles: Bundle):
    done = unchecked(*bundles)
    data = codec.encode(done.bundle)
    assert codec.decode(data, "merged") == done.bundle
    return done


def the_choice(bundle: Bundle, cell: tuple[Problem, int]) -> Choice:
    problem, bucket = cell
    return next(choice for choice in bundle.choices[problem] if choice.bucket == bucket)


def test_two_models_bundles_become_one(built: Bundle, other: Bundle) -> None:
    done = merged(built, other)
    both = done.bundle
    assert set(both.choices) == set(built.choices) | set(other.choices)
    assert {model.name for model in both.models} == {"small", "odd", "big"}
    assert not done.conflicts
    assert done.taken == (sum(map(len, built.choices.values())), sum(map(len, other.choices.values())))
    for source in (built, other):
        for problem, row in source.choices.items():
            for old, new in zip(row, both.choices[problem], strict=True):
                assert both.variants[new.variant] == source.variants[old.variant]
                assert both.cubins[new.variant] == source.cubins[old.variant]
                assert (new.time_ns, new.source, new.runner_up_ns) == (old.time_ns, old.source, old.runner_up_ns)
                if old.runner_up is not None:
                    assert both.variants[new.runner_up] == source.variants[old.runner_up]
    # the variants are the same cubins: each is there once
    assert len(both.variants) == len(set(built.variants) | set(other.variants))
    assert len(both.variants) < len(built.variants) + len(other.variants)


def test_models_of_one_name_are_united(base: Bundle) -> None:
    first, second = list(base.choices)[:2], list(base.choices)[2:]
    name = base.models[0]
    parts = [
        base._replace(choices={p: base.choices[p] for p in part}, models=(name._replace(problems=tuple(part)),))
        for part in (first, second)
    ]
    (model,) = merged(*parts).bundle.models
    assert set(model.problems) == set(base.choices)


def test_measured_beats_modelled_however_slow(base: Bundle, cell) -> None:
    measured, modelled = chosen(base, {cell: (0, 90_000, H200)}), chosen(base, {cell: (1, 1_000, None)})
    for order in ((measured, modelled), (modelled, measured)):
        done = merged(*order)
        best = the_choice(done.bundle, cell)
        assert (best.source, best.time_ns) == (Source.MEASURED, 90_000)
        assert done.bundle.gpus == (H200,)
        (conflict,) = done.conflicts
        assert conflict.reason is Reason.MEASURED
        assert order[conflict.kept] is measured


def test_measured_stays_before_a_later_revision_that_nobody_measured(base: Bundle, cell) -> None:
    measured, later = chosen(base, {cell: (0, 90_000, H200)}), revised(chosen(base, {cell: (1, 1_000, None)}))
    assert the_choice(merged(measured, later).bundle, cell).source is Source.MEASURED


@pytest.mark.parametrize("gpu", [None, H200])
def test_a_later_revision_beats_an_earlier_one(base: Bundle, cell, gpu) -> None:
    early, later = chosen(base, {cell: (0, 1_000, gpu)}), revised(chosen(base, {cell: (1, 90_000, gpu)}))
    for order in ((early, later), (later, early)):
        done = merged(*order)
        best = the_choice(done.bundle, cell)
        assert best.time_ns == 90_000
        assert done.bundle.variants[best.variant].revision == ENTRIES["rows"].revision + 1
        assert [conflict.reason for conflict in done.conflicts] == [Reason.REVISION]
        wanted = {(kernel.name, kernel.revision + 1) for kernel in base.kernels}
        assert {(kernel.name, kernel.revision) for kernel in done.bundle.kernels} == wanted, (
            "nothing of the earlier one is left"
        )
        assert any("earlier kernel revision" in note for note in done.notes) is (gpu is not None)


def test_on_one_gpu_the_lower_time_wins_whatever_the_driver(base: Bundle, cell) -> None:
    updated = H200._replace(driver=13000, memory_mib=143156)
    slow, fast = chosen(base, {cell: (0, 2_000, H200)}), chosen(base, {cell: (1, 1_900, updated)})
    for order in ((slow, fast), (fast, slow)):
        done = merged(*order)
        assert the_choice(done.bundle, cell).time_ns == 1_900
        assert done.bundle.gpus == (updated,)
        assert [conflict.reason for conflict in done.conflicts] == [Reason.TIME]


def test_of_two_gpus_each_keeps_what_was_measured_on_it(base: Bundle, cell) -> None:
    """Whatever the order, and whichever is faster or of a later revision; a modelled choice beside them goes."""
    problem, bucket = cell
    h100 = chosen(base, {cell: (0, 3_000, H100), (problem, 8): (0, 500, H100)})
    h200 = revised(chosen(base, {cell: (1, 2_000, H200), (problem, 8): (1, 9, None)}))
    for order in itertools.permutations((h100, h200, chosen(base, {cell: (0, 4_000, H100._replace(driver=13000))}))):
        done = merged(*order)
        row = done.bundle.choices[problem]
        times = [(choice.bucket, choice.time_ns, choice.measured_on(done.bundle.gpus)) for choice in row]
        assert times == [(8, 500, H100), (bucket, 3_000, H100), (bucket, 2_000, H200)]
        revisions = [done.bundle.variants[choice.variant].revision for choice in row]
        assert revisions[1] + 1 == revisions[2] == ENTRIES["rows"].revision + 1
        assert {conflict.reason: (conflict.winner.time_ns, conflict.loser.time_ns) for conflict in done.conflicts} == {
            Reason.MEASURED: (500, 9),
            Reason.TIME: (3_000, 4_000),
        }
        assert sum(done.taken) == len(row)
    again = merged(done.bundle, h100, h200)
    assert again.bundle == done.bundle._replace(producer=again.bundle.producer)


def test_the_later_cost_model_wins(base: Bundle, cell) -> None:
    old, new = chosen(base, {cell: (0, 1_000, None)}), chosen(base, {cell: (1, 3_000, None)})
    old = old._replace(producer=old.producer._replace(pretuned="0.9.2").with_held_against(["b" * 64]))
    new = new._replace(producer=new.producer._replace(pretuned="0.10.0").with_held_against(["a" * 64]))
    for order in ((old, new), (new, old)):
        done = merged(*order)
        assert the_choice(done.bundle, cell).time_ns == 3_000
        assert [conflict.reason for conflict in done.conflicts] == [Reason.COST_MODEL]
        assert done.bundle.producer.pretuned == "0.10.0, 0.9.2"
        assert done.bundle.producer.held_against == ("a" * 16, "b" * 16)
        assert not any("options" in note for note in done.notes)


def test_buckets_are_united(base: Bundle, cell) -> None:
    problem, _ = cell
    first, two = chosen(base, {(problem, 1): (0, 10, None)}), chosen(base, {(problem, 4): (1, 20, None)})
    done = merged(two, first)
    assert [choice.bucket for choice in done.bundle.choices[problem]] == [1, 4]
    assert not done.conflicts


def test_what_nothing_uses_is_dropped_but_for_fallbacks(base: Bundle, cell) -> None:
    first, two = chosen(base, {cell: (0, 10, None)}), chosen(base, {cell: (0, 10, None)}, min_driver=12090)
    done = merged(first, two)
    assert done.unused == len(base.variants) - len(done.bundle.variants) > 0
    best = the_choice(done.bundle, cell).variant
    assert all(
        i == best or variant.alignment == 1 or isinstance(variant.op, RowOp)
        for i, variant in enumerate(done.bundle.variants)
    )
    families = {Family.of(variant) for variant in base.variants}
    assert {Family.of(variant) for variant in done.bundle.variants if ships_unchosen(variant)} == families
    assert done.bundle.min_driver == 12090
    assert (done.conflicts, done.agreed) == ((), 1)


def test_a_fallback_ships_in_its_latest_revision_alone(base: Bundle, cell) -> None:
    done = merged(chosen(base, {cell: (0, 10, H200)}), revised(chosen(base, {cell: (1, 10, None)})))
    fallbacks = [variant for variant in done.bundle.variants if variant.alignment == 1]
    assert fallbacks
    assert all(variant.revision == ENTRIES[variant.kernel].revision + 1 for variant in fallbacks)
    assert {kernel.revision - ENTRIES[kernel.name].revision for kernel in done.bundle.kernels} == {0, 1}


def test_configs_past_a_builds_limit_are_kept_and_told(built: Bundle, base: Bundle) -> None:
    problem = next(choice for choice in base.choices if choice.N == 256 and not choice.fusion)
    template = able(base, problem)[0]
    variants, cubins, row = list(base.variants), list(base.cubins), []
    for power in range(20):
        knobs = dict(base.variants[template].config, group_m=power + 100)
        variants.append(base.variants[template]._replace(config=tuple(sorted(knobs.items()))))
        cubins.append(base.cubins[template])
        row.append(Choice(1 << power, len(variants) - 1, Source.MEASURED, 100, gpu=0))
    many = base._replace(
        variants=tuple(variants), cubins=tuple(cubins), gpus=(H200,), choices={problem: tuple(row)}, models=()
    )
    done = merged(built, many)
    (over,) = done.too_many
    assert (over.op, over.configs) == (
        Op.FORWARD,
        20 + len({variant.config for variant in built.variants if isinstance(variant.op, Op)}),
    )
    assert any(f"{over.configs} configs" in note for note in done.notes)
    assert len({done.bundle.variants[choice.variant].config for choice in done.bundle.choices[problem]}) == 20


def test_what_can_not_be_merged(base: Bundle, other: Bundle) -> None:
    with pytest.raises(InputError, match="1 bundle given"):
        merged(base)
    with pytest.raises(TargetMismatch, match=r"'1\.msgpack' is for sm_90a, '0\.msgpack' for sm_80"):
        merged(base, other._replace(target=Target(90, True)))
    for abi, kind, words in ((LAUNCH_ABI + 1, BundleTooNew, "Upgrade"), (LAUNCH_ABI - 1, BundleTooOld, "again")):
        odd = other._replace(variants=tuple(variant._replace(abi=abi) for variant in other.variants))
        with pytest.raises(kind, match=rf"'1\.msgpack', variant 0: launch ABI {abi}, .* writes {LAUNCH_ABI}.*{words}"):
            merge({"0.msgpack": base, "1.msgpack": odd})
    edited = other._replace(kernels=tuple(kernel._replace(source_sha256=bytes(32)) for kernel in other.kernels))
    first = other.kernels[0]
    with pytest.raises(InputError, match=f"{first.name} of revision {first.revision} has the source 000000000000"):
        merged(base, edited)


GPUS = (None, H200, H200._replace(driver=13000), H200._replace(memory_mib=141000), H100)
MAKES = st.lists(
    st.tuples(
        st.dictionaries(
            st.tuples(st.integers(0, 5), st.sampled_from([1, 2, 4])),
            st.tuples(st.integers(0, 1), st.integers(1, 4), st.sampled_from(GPUS)),
            min_size=1,
        ),
        st.integers(0, 1),
        st.sampled_from(["0.1.0", "0.2.0"]),
        st.sampled_from(["3.6.0", "3.7.1"]),
    ),
    min_size=2,
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(makes=MAKES)
@example(  # equal but for the driver: what broke the tie must be there still after the first merge
    [
        ({(0, 1): (0, 1, None), (0, 2): (0, 1, None), (2, 4): (0, 2, GPUS[2])}, 1, "0.1.0", "3.6.0"),
        ({(0, 1): (0, 1, None), (2, 4): (0, 2, GPUS[1])}, 1, "0.1.0", "3.6.0"),
    ]
)
def test_the_order_of_the_inputs_and_merging_in_steps_change_nothing(base: Bundle, makes) -> None:
    """In steps, too, as long as they were made by one version: a merged bundle lists several."""
    problems = [choice for choice in base.choices if choice.fusion is Fusion.NONE or choice.N == 256]
    bundles = []
    for choices, revision, version, triton in makes:
        cells = {(problems[p % len(problems)], bucket): claim for (p, bucket), claim in choices.items()}
        producer = base.producer._replace(pretuned=version, triton=triton)
        bundle = chosen(base, cells, producer=producer)
        bundles.append(revised(bundle, revision) if revision else bundle)
    results = {codec._encode(unchecked(*order).bundle) for order in itertools.permutations(bundles)}
    (data,) = results
    whole = codec.decode(data, "whole")
    for again in bundles:
        if len({bundle.producer for bundle in bundles}) == 1:
            same = codec._encode(unchecked(whole, again).bundle) == data
            assert same, "merging in steps changed something"  # bytes in a report would hide the example
    for problem, row in whole.choices.items():
        for choice in row:
            rivals = [
                (
                    bundle.gpus[row_choice.gpu] if row_choice.gpu is not None else None,
                    bundle.variants[row_choice.variant].revision,
                    row_choice.time_ns,
                )
                for bundle in bundles
                for row_choice in bundle.choices.get(problem, ())
                if row_choice.bucket == choice.bucket
            ]
            measured = [rival for rival in rivals if rival[0]]
            among = [rival for rival in rivals if same_gpu(rival[0], choice.measured_on(whole.gpus))]
            latest = max(revision for _, revision, _ in among)
            assert (choice.source is Source.MEASURED) == bool(measured)
            assert whole.variants[choice.variant].revision == latest
            if measured:
                assert choice.time_ns == min(time for _, revision, time in among if revision == latest)
                there = {chosen.gpu for chosen in row if chosen.bucket == choice.bucket}
                assert len(there) == len({gpu.name for gpu, *_ in measured}), "one of each GPU"


def test_every_gpu_that_is_named_is_used(base: Bundle, cell) -> None:
    idle = Gpu("NVIDIA H20", 78, 97871, 12080)
    unused = chosen(base, {cell: (0, 10, H200)})._replace(gpus=(idle, H200))
    unused = unused._replace(choices={cell[0]: tuple(choice._replace(gpu=1) for choice in unused.choices[cell[0]])})
    assert merged(unused, chosen(base, {cell: (1, 20, None)})).bundle.gpus == (H200,)
