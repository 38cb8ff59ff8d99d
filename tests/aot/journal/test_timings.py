"""From records to choices: whom the times favour, and by how much."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretuned.aot.choose.choices import choose
from pretuned.aot.compile.triton import Compiled
from pretuned.aot.journal.file import Contents, Header
from pretuned.aot.journal.records import Failure, Measured, Rematch, Timing
from pretuned.aot.journal.timings import CellTimes, Timings, cell_of
from pretuned.aot.plan.plan import BuildPlan
from pretuned.artifacts.limits import MAX_TIME_NS
from pretuned.artifacts.records import Choice, DType, Fusion, Gpu, Layout, Op, Problem, Source, Variant
from pretuned.kernels.chips import chip_of
from pretuned.kernels.spec import Config, Loads

H200 = Gpu("NVIDIA H200", 132, 143771, 13000)
PROBLEM = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048)
# The model's order at M = 64: decode tiles first.
CONFIGS = (
    Config(16, 64, 128, 4, 4, loads=Loads.TMA),
    Config(16, 128, 128, 4, 3, loads=Loads.TMA),
    Config(64, 128, 64, 4, 3, loads=Loads.TMA),
    Config(128, 256, 64, 8, 3, loads=Loads.TMA),
)


def sha(number: int) -> bytes:
    return bytes([number]) * 32


def variant(number: int, config: Config, fusion: Fusion = Fusion.NONE) -> Compiled:
    variant = Variant(
        "rows",
        1,
        1,
        Op.FORWARD,
        DType.BF16,
        Layout.NK,
        fusion,
        16,
        512,
        config.pairs(),
        "rows",
        (),
        (),
        32 * config.num_warps,
        100_000,
        128,
        0,
        0,
        3,
        sha(number),
    )
    return Compiled(variant, b"abc")


COMPILED = [variant(i, config) for i, config in enumerate(CONFIGS)]


def record(times: dict[int, int], modelled: int, duel: Rematch | None = None, bucket: int = 64) -> Measured:
    timings = tuple(Timing(sha(i), (ns, ns), 0.001, 20, 0.0017) for i, ns in times.items())
    return Measured(PROBLEM, bucket, sha(modelled), timings, duel, None, 1.0, 13000)


def chosen(records: Sequence[Measured | Failure], compiled: Sequence[Compiled] = COMPILED):
    contents = Contents(Header(90, H200, ()), tuple(records), 0, 0)
    (choice,) = choose(BuildPlan({PROBLEM: (64,)}, ()), compiled, 90, Timings.of(contents)).choices[PROBLEM]
    return choice


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1),
    st.none() | st.tuples(st.integers(1, 10**9)),
    st.none() | st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)),
)
def test_a_record_says_alone_what_it_says_twice(
    times: dict[int, tuple[int, int]], torch: tuple[int, ...] | None, plain: tuple[int, ...] | None
) -> None:
    timings = tuple(Timing(sha(i), ns, 0.001 * i, 20 - i, 0.0017) for i, ns in times.items())
    duel = Rematch(sha(0), sha(1), (9,), (10,), 0.9, 0.01)
    record = Measured(PROBLEM, 64, sha(0), timings, duel, torch, 1.0, 13000, plain and (sha(9), plain))

    def times_of(*records: Measured) -> CellTimes:
        return Timings.of(Contents(Header(90, H200, ()), records, 0, 0)).cells[PROBLEM, 64]

    assert times_of(record) == replace(times_of(record, record), duels=(duel,))


def test_times_of_a_form_are_brought_to_the_clock_of_the_plain_product() -> None:
    """Timed with the form it took 30 us, with its own contenders 40: all that the form took is 4/3 longer there."""
    gathers = PROBLEM._replace(fusion=Fusion.GATHER, top_k=8)
    compiled = [*COMPILED, *(variant(i + 8, config, Fusion.GATHER) for i, config in enumerate(CONFIGS))]
    plan = BuildPlan({PROBLEM: (64,), gathers: (64, 128)}, ())
    other = replace(record({8: 20_000, 9: 60_000}, 9, bucket=128), problem=gathers)  # so that both ship

    def form(plain: tuple[bytes, tuple[int, ...]] | None) -> Measured:
        times = {9: 33_000, 8: 36_000}
        return replace(record(times, 9), problem=gathers, plain=plain)

    def choice_of(*records: Measured) -> Choice:
        contents = Contents(Header(90, H200, ()), (*records, other), 0, 0)
        choice, _ = choose(plan, compiled, 90, Timings.of(contents)).choices[gathers]
        assert choice.source is Source.MEASURED
        return choice

    product = record({0: 44_000, 1: 40_000}, 0)
    choice = choice_of(product, form((sha(1), (28_000, 32_143))))
    assert (choice.time_ns, choice.runner_up_ns) == (44_000, 48_000)
    for alone in (
        (product, form(None)),  # an older record
        (product, form((sha(2), (30_000, 30_000)))),  # of a variant that the plain cell did not time
        (form((sha(1), (30_000, 30_000))),),  # the plain cell was not measured
    ):
        assert (choice_of(*alone).time_ns, choice_of(*alone).runner_up_ns) == (33_000, 36_000)
    huge = choice_of(record({0: MAX_TIME_NS, 1: MAX_TIME_NS - 1}, 0), form((sha(1), (1, 1))))
    assert huge.time_ns == MAX_TIME_NS
    least = choice_of(record({0: 2, 1: 1}, 0), form((sha(1), (MAX_TIME_NS, MAX_TIME_NS))))
    assert least.time_ns == 1
    older = replace(form(None), timings=record({9: 10_000, 8: 11_000}, 9).timings)  # of no clock that is known
    assert choice_of(product, older, form((sha(1), (30_000, 30_000)))).time_ns == 44_000
    thrice = [form((sha(1), (ns, ns))) for ns in (20_000, 30_000, 80_000)]  # journals put together
    assert choice_of(product, *thrice).time_ns == 44_000


def test_a_record_of_a_slower_clock_makes_no_variant_of_it_slower() -> None:
    """A real case of an H100: variants that only the faster record timed looked faster than one that is 8 % faster."""
    fast = record({0: 5_281, 1: 5_490, 2: 5_726}, 1)
    slow = record({0: 5_883, 1: 6_273, 3: 6_685}, 1)
    more = replace(slow, timings=tuple(timing._replace(rounds=60) for timing in slow.timings))
    for records in itertools.permutations((fast, more)):
        contents = Contents(Header(90, H200, ()), tuple(records), 0, 0)
        cell = Timings.of(contents).cells[PROBLEM, 64]
        assert cell.torch_ns is None
        assert cell.best_of([sha(2), sha(0)]) == sha(0)
        clock = math.sqrt(5_883 / 5_281 * 6_273 / 5_490)  # both at that of the record with more rounds
        assert cell.times_ns == {sha(0): 5_883, sha(1): 6_273, sha(2): round(5_726 * clock), sha(3): 6_685}
    apart = record({3: 9_000, 2: 10_000}, 3)  # of two that have nothing in common each counts as it is
    times = Timings.of(Contents(Header(90, H200, ()), (record({0: 5_281, 1: 5_490}, 1), apart), 0, 0)).cells
    assert times[PROBLEM, 64].times_ns == {sha(0): 5_281, sha(1): 5_490, sha(2): 10_000, sha(3): 9_000}


@pytest.mark.parametrize("rounds", [5, 60])
def test_torch_is_of_the_clock_of_the_times_beside_it(rounds: int) -> None:
    """An older record had torch, one of a look at a slower clock has none: that makes no choice slower than torch."""
    first = replace(record({0: 10_000, 1: 11_000}, 0), torch_ns=(12_000, 12_000))
    look = record({0: 12_500, 1: 13_750, 2: 12_000}, 0)
    look = replace(look, timings=tuple(timing._replace(rounds=rounds) for timing in look.timings))
    cell = Timings.of(Contents(Header(90, H200, ()), (look, first), 0, 0)).cells[PROBLEM, 64]
    assert cell.torch_ns is not None
    assert cell.torch_ns / cell.times_ns[sha(0)] == pytest.approx(1.2, rel=1e-4)
    assert cell.torch_ns / cell.times_ns[sha(2)] == pytest.approx(1.25, rel=1e-4)
    twice = replace(first, torch_ns=(12_600, 12_600))  # the mean of two middles
    cell = Timings.of(Contents(Header(90, H200, ()), (look, first, twice), 0, 0)).cells[PROBLEM, 64]
    assert cell.torch_ns is not None
    assert cell.torch_ns / cell.times_ns[sha(0)] == pytest.approx(math.sqrt(1.2 * 1.26), rel=1e-4)


def test_of_records_that_are_alike_but_for_torch_the_order_makes_no_difference() -> None:
    alike = [replace(record({2: 11_744, 0: 9_354}, 2), torch_ns=(ns, ns)) for ns in (10_132, 9_819)]
    others = replace(record({2: 9_616}, 2), torch_ns=(11_000, 11_000)), record({0: 11_126, 1: 11_229, 2: 9_142}, 0)
    orders = itertools.permutations((*alike, *others))
    cells = [Timings.of(Contents(Header(90, H200, ()), order, 0, 0)).cells[PROBLEM, 64] for order in orders]
    assert len({cell.torch_ns for cell in cells}) == 1


@pytest.mark.slow
@given(st.permutations(range(4)), st.lists(st.integers(900, 1_100), min_size=4, max_size=4), st.data())
def test_records_count_the_same_in_any_order(order: Sequence[int], clocks: Sequence[int], data: st.DataObject) -> None:
    records = []
    for clock in clocks:
        timed = sorted(data.draw(st.sets(st.integers(0, 5), min_size=1)))
        off = data.draw(st.lists(st.integers(0, 40), min_size=len(timed), max_size=len(timed)))
        times = {i: (i + 10) * clock + more for i, more in zip(timed, off, strict=True)}
        rounds = data.draw(st.sampled_from([5, 20]))
        torch = data.draw(st.none() | st.tuples(st.integers(9_000, 11_000), st.integers(9_000, 11_000)))
        entry = replace(record(times, timed[0]), torch_ns=torch)
        records.append(replace(entry, timings=tuple(timing._replace(rounds=rounds) for timing in entry.timings)))

    def cell(some: Sequence[Measured]) -> object:
        return Timings.of(Contents(Header(90, H200, ()), tuple(some), 0, 0)).cells[PROBLEM, 64]

    assert cell(records) == cell([records[i] for i in order])


@pytest.fixture
def model_first() -> int:
    """Return the variant that the cost model chooses among all on an H200."""
    choice = choose(BuildPlan({PROBLEM: (64,)}, ()), COMPILED, 90, Timings.of(Contents(Header(90, H200, ()), (), 0, 0)))
    (chosen,) = choice.choices[PROBLEM]
    assert chosen.source is Source.MODELLED
    number: int = choice.variants[chosen.variant].variant.cubin_sha256[0]
    return number


def test_the_fastest_measured_one_is_chosen_with_its_time_gpu_and_runner_up(model_first: int) -> None:
    other = (model_first + 1) % 4
    choice = chosen([record({model_first: 50_000, other: 40_000}, model_first)])
    assert (choice.source, choice.time_ns, choice.gpu) == (Source.MEASURED, 40_000, 0)


def test_a_modelled_choice_that_lost_is_not_taken_back_for_one_that_was_not_measured(model_first: int) -> None:
    """The slowest tile by the model wins, so that the scaled estimates of the other two lie below both times."""
    times = {model_first: 50_000, 3: 49_000}
    assert model_first != 3
    cell = record(times, model_first)
    choice = chosen([cell])
    assert (choice.source, choice.time_ns) == (Source.MEASURED, 49_000)
    # Where the model's first was not measured, it is still taken before one that looks slower.
    other = next(i for i in range(3) if i != model_first)
    assert chosen([record({other: 50_000, 3: 49_000}, other)]).source is Source.MODELLED


def test_within_the_noise_the_modelled_choice_stays(model_first: int) -> None:
    both = [COMPILED[model_first], COMPILED[(model_first + 1) % 4]]
    other = (model_first + 1) % 4
    near = record({model_first: 50_000, other: 49_850}, model_first)
    assert chosen([near], both).time_ns == 50_000
    far = record({model_first: 50_000, other: 49_000}, model_first)
    assert chosen([far], both).time_ns == 49_000
    noisy = replace(far, timings=tuple(timing._replace(noise=0.02) for timing in far.timings))
    assert chosen([noisy], both).time_ns == 50_000


def test_of_what_ships_a_cell_takes_the_fastest_as_timed(model_first: int) -> None:
    """Other cells are why both ship: then noise is no reason to prefer the slower, but a lost duel is."""
    other = (model_first + 1) % 4
    far = record({model_first: 50_000, other: 40_000}, model_first, bucket=128)
    back = record({model_first: 40_000, other: 50_000}, model_first, bucket=256)

    def near(duel: Rematch | None, times: int = 1) -> int:
        cells = (record({model_first: 50_000 * times, other: 49_850 * times}, model_first, duel), far, back)
        evidence = Timings.of(Contents(Header(90, H200, ()), cells, 0, 0))
        first, *rest = choose(BuildPlan({PROBLEM: (64, 128, 256)}, ()), COMPILED, 90, evidence).choices[PROBLEM]
        assert [choice.time_ns for choice in rest] == [40_000, 40_000]
        return first.time_ns // times

    def fought(ratio: float) -> Rematch:
        return Rematch(sha(other), sha(model_first), (49_000, 49_000), (50_000, 50_000), ratio, 0.005)

    ratios = (0.998, 1.001, 1.004, 1.006)
    assert [near(fought(ratio)) for ratio in ratios] == [49_850, 49_850, 49_850, 50_000]
    assert [near(fought(ratio), 300) for ratio in ratios] == [49_850, 50_000, 50_000, 50_000]  # 15 ms: of three rounds
    assert near(None) == near(None, 300) == 49_850
    third = (model_first + 2) % 4  # a duel with one that has no time in the cell says nothing of the others
    assert near(replace(fought(1.1), modelled=sha(third))) == 49_850


def test_a_lost_duel_counts_more_than_the_times(model_first: int) -> None:
    other = (model_first + 1) % 4
    both = [COMPILED[model_first], COMPILED[other]]

    def duel(ratio: float, band: float) -> Rematch:
        return Rematch(sha(other), sha(model_first), (45_000, 45_000), (50_000, 50_000), ratio, band)

    times = {model_first: 50_000, other: 45_000}
    assert chosen([record(times, model_first, duel(0.9, 0.005))], both).time_ns == 45_000
    assert chosen([record(times, model_first, duel(0.98, 0.03))], both).time_ns == 50_000
    assert chosen([record(times, model_first, duel(1.01, 0.005))], both).time_ns == 50_000


def test_a_cell_measured_twice_counts_by_its_medians_in_any_order(model_first: int) -> None:
    other = (model_first + 1) % 4
    records = [record({model_first: 50_000, other: ns}, model_first) for ns in (30_000, 60_000, 45_000)]
    for turned in (records, records[::-1], [records[1], records[0], records[2]]):
        assert chosen(turned).time_ns == 45_000


def test_of_a_cell_measured_twice_each_time_weighs_its_rounds(model_first: int) -> None:
    other = (model_first + 1) % 4

    def of_rounds(ns: int, rounds: int, noise: float) -> Measured:
        entry = record({model_first: 50_000, other: ns}, model_first)
        return replace(entry, timings=tuple(timing._replace(rounds=rounds, noise=noise) for timing in entry.timings))

    few, more = of_rounds(40_000, 3, 0.03), of_rounds(48_000, 9, 0.001)
    for both in ((few, more), (more, few)):
        cell = Timings.of(Contents(Header(90, H200, ()), both, 0, 0)).cells[PROBLEM, 64]
        assert (cell.times_ns[sha(other)], cell.noise[sha(other)]) == (48_000, 0.001)
        thrice = (*both, replace(few, timings=tuple(timing._replace(rounds=6) for timing in few.timings)))
        cell = Timings.of(Contents(Header(90, H200, ()), thrice, 0, 0)).cells[PROBLEM, 64]
        # 9 rounds each: the lower, by the clock that brings the two of one record nearest to the two of the other.
        assert cell.times_ns[sha(other)] == round(40_000 * math.sqrt(48 / 40))


def test_of_duels_of_the_same_two_those_of_the_most_rounds_count(model_first: int) -> None:
    other = (model_first + 1) % 4
    times = {model_first: 50_000, other: 45_000}

    def of_rounds(rounds: int, ratio: float) -> Measured:
        duel = Rematch(sha(other), sha(model_first), (45_000, 45_000), (50_000, 50_000), ratio, 0.005)
        entry = record(times, model_first, duel)
        return replace(entry, timings=tuple(timing._replace(rounds=rounds) for timing in entry.timings))

    for won, lost, ns in ((9, 3, 45_000), (3, 9, 50_000), (3, 3, 50_000)):
        for both in ((of_rounds(won, 0.9), of_rounds(lost, 1.02)), (of_rounds(lost, 1.02), of_rounds(won, 0.9))):
            assert chosen(both).time_ns == ns


def test_more_rounds_together_count_more_than_a_duel_of_fewer(model_first: int) -> None:
    """A second look in which the two fought no duel."""
    other = (model_first + 1) % 4
    lost = Rematch(sha(other), sha(model_first), (45_000, 45_000), (50_000, 50_000), 1.02, 0.005)

    def of_rounds(rounds: int, duel: Rematch | None) -> Measured:
        entry = record({model_first: 50_000, other: 49_000}, model_first, duel)
        return replace(entry, timings=tuple(timing._replace(rounds=rounds) for timing in entry.timings))

    assert chosen([of_rounds(3, lost)]).time_ns == 50_000
    for both in ((of_rounds(3, lost), of_rounds(9, None)), (of_rounds(9, None), of_rounds(3, lost))):
        assert chosen(both).time_ns == 49_000
    assert chosen([of_rounds(3, lost), of_rounds(3, None)]).time_ns == 50_000
    alone = of_rounds(9, None)
    alone = replace(alone, timings=alone.timings[:1])  # the two were not timed together there
    assert chosen([of_rounds(3, lost), alone]).time_ns == 50_000


def test_drivers_are_distinguished() -> None:
    first = record({0: 10_000}, 0)
    second = replace(record({0: 11_000}, 0, bucket=128), driver=13020)
    evidence = Timings.of(Contents(Header(90, H200, ()), (second, first), 0, 0))
    assert [gpu.driver for gpu in evidence.gpus] == [13000, 13020]
    assert evidence.gpu_of(evidence.cells[PROBLEM, 64]) == 0
    assert evidence.gpu_of(evidence.cells[PROBLEM, 128]) == 1


def test_the_model_knows_the_gpu_that_was_measured() -> None:
    assert chip_of(H200, 90).name == "H200"
    assert chip_of(H200._replace(name="NVIDIA H200 NVL", sm_count=130), 90).sm_count == 130
    assert chip_of(H200._replace(name="unheard of"), 90).name == "H100 SXM"


def test_a_product_of_two_names_has_one_cell() -> None:
    twin = PROBLEM.transposed
    assert twin is not None
    own, other = record({0: 40_000, 1: 50_000}, 0), replace(record({1: 60_000, 2: 45_000}, 1), problem=twin)
    evidence = Timings.of(Contents(Header(90, H200, ()), (own, other), 0, 0))
    assert list(evidence.cells) == [(PROBLEM, 64)]
    assert cell_of(twin, 64) == cell_of(PROBLEM, 64) == (PROBLEM, 64)
    assert set(evidence.cells[PROBLEM, 64].times_ns) == {sha(0), sha(1), sha(2)}
    both = choose(BuildPlan({PROBLEM: (64,), twin: (64,)}, ()), COMPILED, 90, evidence).choices
    assert both[PROBLEM] == both[twin]


def test_records_of_a_form_that_share_the_plain_product_alone_are_brought_to_its_clock() -> None:
    gathers = PROBLEM._replace(fusion=Fusion.GATHER, top_k=8)
    fast = replace(record({8: 30_000}, 8), problem=gathers, plain=(sha(0), (20_000, 20_000)))
    slow = replace(record({9: 31_000}, 9), problem=gathers, plain=(sha(0), (24_000, 24_000)))
    for records in ((fast, slow), (slow, fast)):
        cell = Timings.of(Contents(Header(90, H200, ()), records, 0, 0)).cells[gathers, 64]
        assert cell.times_ns[sha(9)] / cell.times_ns[sha(8)] == pytest.approx(31_000 / (30_000 * 1.2), rel=1e-3)


@pytest.mark.parametrize(("torch_us", "faster"), [(12, True), (14.9, False), (15.1, False), (25, False), (None, False)])
def test_torch_is_chosen_where_it_is_faster_by_more_than_noise_and_what_is_around_it(
    torch_us: float | None, faster: bool
) -> None:
    """The fastest kernel takes 20 us, and what the runtime launches around torch's call 5."""
    times = None if torch_us is None else (round(torch_us * 1000),) * 2
    choice = chosen([replace(record({0: 30_000, 1: 20_000}, 0), torch_ns=times)])
    assert choice.time_ns == 20_000
    assert choice.torch_ns == (12_000 if faster else None)


def test_torch_is_chosen_for_no_dw_and_on_no_capability_without_a_kernel_of_torch() -> None:
    def choice(problem: Problem, sm: int) -> Choice:
        rows = replace(record({1: 20_000}, 1), problem=problem, torch_ns=(5_000, 5_000))
        code = [Compiled(candidate.variant._replace(op=problem.op), candidate.cubin) for candidate in COMPILED]
        evidence = Timings.of(Contents(Header(sm, H200, ()), (rows,), 0, 0))
        (choice,) = choose(BuildPlan({problem: (64,)}, ()), code, sm, evidence).choices[problem]
        return choice

    assert choice(PROBLEM, 90).torch_ns == 5_000
    assert choice(PROBLEM._replace(op=Op.DW), 90).torch_ns is None
    assert choice(PROBLEM, 80).torch_ns is None
    turned = PROBLEM.transposed  # dX of w [E, K, N], by whose name the cell was not measured
    assert turned is not None
    contents = Contents(Header(90, H200, ()), (replace(record({1: 20_000}, 1), torch_ns=(5_000,)),), 0, 0)
    (chosen,) = choose(BuildPlan({turned: (64,)}, ()), COMPILED, 90, Timings.of(contents)).choices[turned]
    assert chosen.torch_ns == 5_000
