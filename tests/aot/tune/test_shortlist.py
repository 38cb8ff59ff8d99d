"""Which variants of a cell are measured: the model's first, and what won nearby."""

from __future__ import annotations

from pretuned.aot.tune.shortlist import SHARE, Winners, contenders
from pretuned.artifacts.records import DType, Fusion, Op, Problem
from pretuned.kernels.spec import Config, Loads

PROBLEM = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048)
# The model's order at M = 64: decode tiles first.
CONFIGS = (
    Config(16, 64, 128, 4, 4, loads=Loads.TMA),
    Config(16, 128, 128, 4, 3, loads=Loads.TMA),
    Config(64, 128, 64, 4, 3, loads=Loads.TMA),
    Config(128, 256, 64, 8, 3, loads=Loads.TMA),
)
NAMES = [config.pairs() for config in CONFIGS]
MANY = [Config(16, 16, 16, 4, 1, group_m=i).pairs() for i in range(1, 33)]


def test_a_tenth_is_measured_the_modelled_choice_first() -> None:
    assert contenders(MANY, [], None) == MANY[:2]
    assert contenders(MANY, [MANY[20], MANY[21]], None) == [*MANY[:2], MANY[20]]
    assert contenders(MANY, [MANY[1], MANY[20]], None) == [*MANY[:2], MANY[20]]
    assert contenders(MANY, [NAMES[0]], None) == MANY[:2]  # it can't run here
    assert contenders(MANY, MANY, None, share=1.0) == MANY
    assert contenders(MANY, [MANY[20]], None, share=0.2) == [*MANY[:2], MANY[20], *MANY[2:]][: len(MANY) // 5]
    assert contenders(MANY[:10], [MANY[5]], None) == MANY[:2]
    assert contenders(MANY[:1], [], None) == MANY[:1]


def test_the_winner_of_another_form_is_measured_beside_the_models_first() -> None:
    for share in (SHARE, 0.34):
        assert contenders(MANY, [MANY[3]], MANY[9], share) == [MANY[0], MANY[9], MANY[1]]
        assert contenders(MANY, [MANY[3]], MANY[0], share) == MANY[:3]
        assert contenders(MANY, [MANY[3]], MANY[1], share) == MANY[:3]
        assert contenders(MANY[:4], [], MANY[3], share) == [MANY[0], MANY[3], MANY[1]]
        assert contenders(MANY[:1], [], MANY[0], share) == MANY[:1]
    assert contenders(MANY, [], NAMES[0]) == MANY[:2]  # it can't run here
    assert contenders(MANY, [], MANY[9], share=1.0) == MANY


def test_what_another_gpu_runs_goes_before_all_but_the_models_first() -> None:
    there = [MANY[20], MANY[9]]
    assert contenders(MANY, [], None, elsewhere=there) == [MANY[0], *there, MANY[1]]
    assert contenders(MANY, [MANY[5], MANY[7]], None, elsewhere=there) == [MANY[0], *there, MANY[5]]
    assert contenders(MANY, [MANY[5]], MANY[7], elsewhere=there) == [MANY[0], *there, MANY[7]]
    assert contenders(MANY, [MANY[9], NAMES[0]], MANY[20], elsewhere=there) == [MANY[0], *there, MANY[1]]
    assert contenders(MANY, [], None, elsewhere=[MANY[0]]) == MANY[:4]
    assert contenders(MANY[:2], [], None, elsewhere=[MANY[1]]) == MANY[:2]
    assert contenders(MANY, [], None, elsewhere=[NAMES[0]]) == MANY[:2]  # it can't run here
    rest = [candidate for candidate in MANY[1:] if candidate not in there]
    assert contenders(MANY, [], None, 0.5, there) == [MANY[0], *there, *rest][:16]
    assert contenders(MANY, [], None, 1.0, there) == MANY


def test_what_runs_today_is_measured_beside_the_shortlist_of_the_others() -> None:
    assert contenders(MANY, [], None, running=MANY[:1]) == MANY[:3]
    assert contenders(MANY, [MANY[0], MANY[20]], None, running=MANY[:1]) == [*MANY[:3], MANY[20]]
    assert contenders(MANY, [], MANY[9], running=MANY[:1]) == [MANY[0], MANY[1], MANY[9], MANY[2]]
    assert contenders(MANY, [], MANY[0], running=MANY[:1]) == MANY[:3]  # it was the twin's winner, too
    assert contenders(MANY, [], None, running=[MANY[1]]) == [MANY[0], MANY[2]]  # the tuner adds it
    assert contenders(MANY, [], None, elsewhere=[MANY[0], MANY[9]], running=MANY[:1]) == [
        MANY[0],
        MANY[1],
        MANY[9],
        MANY[2],
        MANY[3],
    ]
    assert contenders(MANY[:1], [], None, running=MANY[:1]) == MANY[:1]
    assert contenders(MANY, [], None, 1.0, running=MANY[:1]) == MANY


def test_winners_are_asked_nearest_first() -> None:
    winners = Winners()
    other = PROBLEM._replace(N=4096)
    gathers = PROBLEM._replace(fusion=Fusion.GATHER)
    winners.add(PROBLEM, 64, NAMES[0])
    winners.add(PROBLEM, 1024, NAMES[1])
    winners.add(other, 1024, NAMES[2])
    winners.add(PROBLEM._replace(op=Op.DX), 1024, NAMES[3])
    assert winners.near(PROBLEM, 2048) == [NAMES[1], NAMES[2], NAMES[0]]
    assert winners.near(PROBLEM, 64) == [NAMES[0], NAMES[1], NAMES[2]]
    assert winners.other_fusion(gathers, 1024) == NAMES[1]
    assert winners.other_fusion(gathers, 2048) is None
    assert winners.other_fusion(PROBLEM, 1024) is None


def test_of_other_shapes_the_most_alike_are_asked_first() -> None:
    """With as many rows an expert: one that is twice as large in one way, before one that is so in three."""
    winners = Winners()
    winners.add(PROBLEM._replace(E=32, N=12288, K=8192), 256, NAMES[0])  # sorts before the other
    winners.add(PROBLEM._replace(N=3072), 1024, NAMES[1])
    assert winners.near(PROBLEM, 1024) == [NAMES[1], NAMES[0]]
    winners.add(PROBLEM._replace(K=1024), 1024, NAMES[2])
    assert winners.near(PROBLEM, 1024) == [NAMES[2], NAMES[1], NAMES[0]]
    fewer = Winners()
    fewer.add(PROBLEM._replace(E=32), 256, NAMES[0])
    fewer.add(PROBLEM._replace(E=64, N=3072), 512, NAMES[1])
    fewer.add(PROBLEM._replace(E=64), 512, NAMES[2])
    assert fewer.near(PROBLEM, 1024) == [NAMES[2], NAMES[0], NAMES[1]]


def test_what_won_most_often_nearby_comes_first() -> None:
    winners = Winners()
    winners.add(PROBLEM, 1024, NAMES[0])
    for N in (1024, 3072):
        winners.add(PROBLEM._replace(N=N), 1024, NAMES[1])
    assert winners.near(PROBLEM, 1024) == [NAMES[1], NAMES[0]]
    for rows in range(10):  # nine are asked
        winners.add(PROBLEM._replace(N=8 * rows + 8), 4096, NAMES[2])
    assert winners.near(PROBLEM, 1024) == [NAMES[2], NAMES[1], NAMES[0]]


def test_a_plain_product_measured_after_its_forms_is_not_narrowed_to_what_won_there() -> None:
    """The plain form is measured again, and the journal's records of the other forms are kept."""
    winners = Winners()
    gathers = PROBLEM._replace(fusion=Fusion.GATHER)
    winners.add(gathers, 1024, NAMES[1])
    assert winners.other_fusion(PROBLEM, 1024) is None
    assert winners.other_fusion(PROBLEM._replace(fusion=Fusion.SCATTER), 1024) == NAMES[1]
    assert winners.near(PROBLEM, 1024) == [NAMES[1]]
