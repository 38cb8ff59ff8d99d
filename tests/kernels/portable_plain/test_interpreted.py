"""The kernels themselves, run by Triton's interpreter on small ragged problems against plain numpy in fp64."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.slow

GATHER, SCATTER, WEIGHT, BIAS, LOW_RANK = 1, 2, 4, 8, 32
WORKER = Path(__file__).parents[2] / "support" / "interpret.py"


def run(cases: list[dict[str, object]]) -> list[dict[str, object]]:
    """The interpreter is switched on by an environment variable before triton is imported: a process of its own."""
    done = warm.run([WORKER], stdin=json.dumps(cases), env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, object]] = json.loads(done.stdout)
    return results


def case(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "m_sizes": [5, 0, 17, 1],
        "M": 23,
        "N": 40,
        "K": 48,
        "dtype": "fp32",
        "op": "forward",
        "layout": "nk",
        "tma": False,
        "persistent": True,
        "programs": 3,
        "wide": False,
        "poison": [],
        "group_m": 2,
        "scan": 0,
        "fusion": 0,
        "top_k": 2,
        "bad_index": False,
        "zero_tail": False,
        "block": [16, 16, 32],
        "seed": 0,
        "filled_up": 0,
    }
    return base | changes


CLEARING = {"zero_tail": True, "persistent": False}
CASES = {
    "plain": case(),
    "one program a tile": case(persistent=False),
    "tma": case(tma=True),
    "tma, one program a tile": case(tma=True, persistent=False),
    "w as [E, K, N]": case(layout="kn"),
    "w as [E, K, N], tma": case(layout="kn", tma=True),
    "dX": case(op="dX"),
    "dX, tma": case(op="dX", tma=True),
    "fp16": case(dtype="fp16", tma=True),
    "int64 counts": case(wide=True),
    "counts beyond M are cut off": case(m_sizes=[5, 3, 900, 7], wide=True),
    "counts beyond M are cut off, one program a tile": case(m_sizes=[5, 3, 900, 7], persistent=False),
    "large tiles": case(m_sizes=[5, 0, 70, 1], M=80, block=[64, 16, 32]),
    "large tiles, rows gathered": case(m_sizes=[5, 0, 70, 1], M=80, block=[64, 16, 32], fusion=GATHER | SCATTER),
    "large tiles, bad rows gathered": case(m_sizes=[30, 70], M=100, block=[64, 16, 32], fusion=GATHER, bad_index=True),
    "tiles are found": case(op="find", m_sizes=[5, 0, 90, 1, 33], M=129, group_m=3),
    "tiles are found, int64": case(op="find", m_sizes=[0, 17, 16, -3, 2**40], M=200, wide=True),
    "tiles are found, more asked for": case(op="find", m_sizes=[40, 40, 40, 7], M=50, N=30),
    "tiles are found, far more asked for": case(op="find", m_sizes=[1, 900, 3, 900], M=70, N=100),
    "int64 counts beyond M are cut off, one program a tile": case(m_sizes=[5, 2**40, 9], wide=True, persistent=False),
    "int64 counts beyond 2^32": case(m_sizes=[4, 2**40, 3, 1], wide=True),
    "negative counts are none": case(m_sizes=[5, -7, 9, -1]),
    "negative int64 counts are none": case(m_sizes=[5, -(2**40), 9, -1], wide=True),
    "rows past the sum are left": case(m_sizes=[2, 0, 3, 1], M=23),
    "no rows at all": case(m_sizes=[0, 0, 0, 0]),
    "every row on one expert": case(m_sizes=[0, 0, 23, 0]),
    "odd N and K": case(N=37, K=33),
    "odd N and K, w as [E, K, N]": case(N=37, K=33, layout="kn"),
    "rows of y filled up": case(N=37, tma=True, filled_up=40, poison=[2]),
    "rows of y filled up, one program a tile": case(N=33, tma=True, filled_up=48, persistent=False, dtype="fp16"),
    "many experts, few rows": case(m_sizes=[int(i % 7 == 0) for i in range(100)], M=15, programs=4),
    "any number of experts": case(m_sizes=[5, 0, 17, 1, 0, 0, 0, 0, 3, 20, 2], M=50, scan=4),
    "any number of experts, tma": case(m_sizes=[5, 0, 17, 1, 0, 0, 0, 0, 3, 20, 2], M=50, scan=4, tma=True),
    "any number of experts, cut off": case(m_sizes=[5, -2, 17, 1, 0, 900, 4, 3], M=30, scan=2),
    "dW, any number of experts": case(op="dW", m_sizes=[5, 0, 17, 1, 0, 3, 20], M=50, N=16, K=16, scan=2),
    "dW, any number of experts, tma": case(op="dW", m_sizes=[5, 0, 17, 1, 0, 0, 9], M=32, K=16, scan=4, tma=True),
    "many row tiles": case(m_sizes=[90, 0, 33, 5], M=128, N=70, programs=5, group_m=3),
    "NaN and inf of one expert stay there": case(poison=[2]),
    "NaN and inf of one expert stay there, tma": case(poison=[2], tma=True, K=40),
    "NaN and inf of one expert stay there, dX": case(poison=[0], op="dX", tma=True, N=40),
    "rows of no expert are zeroed": case(m_sizes=[2, 0, 3, 1], M=50, zero_tail=True),
    "rows of no expert are zeroed, tma": case(m_sizes=[2, 0, 3, 1], M=23, zero_tail=True, tma=True, persistent=False),
    "rows of no expert are zeroed, any number": case(m_sizes=[2, 0, 3, 1, 0], M=23, zero_tail=True, scan=2),
    "no rows at all, all zeroed": case(m_sizes=[0, 0, 0, 0], zero_tail=True, op="dX"),
    "rows that no index names are zeroed": case(**CLEARING, m_sizes=[2, 0, 9, 1], fusion=SCATTER),
    "rows that no index names are zeroed, tma": case(
        **CLEARING, fusion=SCATTER | WEIGHT | BIAS, tma=True, bad_index=True
    ),
    "rows that no index names are zeroed, int64": case(**CLEARING, fusion=SCATTER, wide=True, bad_index=True, N=37),
    "rows that no index names are zeroed, dX": case(
        **CLEARING, m_sizes=[5, 900, 3, 8], fusion=SCATTER, op="dX", top_k=1
    ),
    "rows that no index names are zeroed, many": case(
        **CLEARING, m_sizes=[100, 0, 190, 9], M=300, fusion=SCATTER, top_k=3
    ),
    "no row is named, all zeroed": case(**CLEARING, m_sizes=[0, 0, 0, 0], fusion=SCATTER, tma=True),
    "gather": case(fusion=GATHER),
    "gather, tma": case(fusion=GATHER, tma=True),
    "gather, one program a tile": case(fusion=GATHER, persistent=False, wide=True),
    "scatter": case(fusion=SCATTER),
    "scatter, tma": case(fusion=SCATTER, tma=True),
    "gather and scatter": case(fusion=GATHER | SCATTER, tma=True, top_k=3),
    "weight": case(fusion=WEIGHT, tma=True),
    "bias": case(fusion=BIAS, tma=True),
    "bias, odd N": case(fusion=BIAS, N=37),
    "scatter, weight, bias": case(fusion=SCATTER | WEIGHT | BIAS, tma=True, wide=True),
    "everything": case(fusion=GATHER | SCATTER | WEIGHT | BIAS, dtype="fp16"),
    "an index out of range takes no part": case(fusion=GATHER | SCATTER | WEIGHT, bad_index=True),
    "an index out of range takes no part, tma": case(fusion=SCATTER, bad_index=True, tma=True),
    "a low-rank part": case(fusion=LOW_RANK),
    "a low-rank part, tma": case(fusion=LOW_RANK, tma=True, persistent=False),
    "a low-rank part, odd N and K": case(fusion=LOW_RANK, N=37, K=33, poison=[2]),
    "a low-rank part of gathered rows": case(fusion=LOW_RANK | GATHER, tma=True, wide=True),
    "a low-rank part, a bias, rows of an index out of range": case(fusion=LOW_RANK | GATHER | BIAS, bad_index=True),
    "a low-rank part, dX": case(op="dX", fusion=LOW_RANK, tma=True),
    "a low-rank part, w as [E, K, N]": case(layout="kn", fusion=LOW_RANK | GATHER | BIAS, dtype="fp16"),
    "a low-rank part, any number of experts": case(
        m_sizes=[5, 0, 17, 1, 0, 0, 9, 2], M=50, scan=4, fusion=LOW_RANK, dtype="fp16"
    ),
    "dX, gather": case(op="dX", fusion=GATHER, top_k=1),
    "dX, scatter": case(op="dX", fusion=SCATTER, tma=True),
    "dW": case(op="dW"),
    "dW, tma": case(op="dW", tma=True),
    "dW, one program a tile": case(op="dW", persistent=False),
    "dW, one program a tile, tma": case(op="dW", persistent=False, tma=True),
    "dW, fp16, tma": case(op="dW", tma=True, dtype="fp16"),
    "dW, int64 counts": case(op="dW", wide=True),
    "dW, counts beyond M are cut off": case(op="dW", m_sizes=[5, 3, 900, 7], tma=True),
    "dW, no rows at all": case(op="dW", m_sizes=[0, 0, 0, 0]),
    "dW, odd N and K": case(op="dW", N=37, K=33),
    "dW, many row steps": case(op="dW", m_sizes=[90, 0, 33, 5], M=128, programs=5, tma=True),
    "dW, NaN and inf of one expert stay there": case(op="dW", poison=[2]),
    "dW, NaN and inf of one expert stay there, tma": case(op="dW", poison=[2], tma=True),
}


@pytest.fixture(scope="module")
def results(asked: list[str]) -> dict[str, dict[str, object]]:
    return dict(zip(asked, run([CASES[name] for name in asked]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_the_equation(results: dict[str, dict[str, object]], name: str) -> None:
    result = results[name]
    assert result["wrong"] == [], result
    assert result["untouched"], "rows past the sum, or a guard around y, were written"


def test_random_shapes() -> None:
    import random

    rng = random.Random(7)
    cases = []
    for seed in range(24):
        E = rng.choice([1, 2, 3, 8, 33])
        sizes = [rng.choice([0, 0, 1, 3, 16, 17, 40]) for _ in range(E)]
        cases.append(
            case(
                m_sizes=sizes,
                M=max(1, sum(sizes) + rng.choice([0, 0, 5])),
                N=rng.choice([1, 8, 16, 41, 64]),
                K=rng.choice([1, 8, 31, 32, 72]),
                dtype=rng.choice(["fp32", "fp16"]),
                op=rng.choice(["forward", "dX", "dW"]),
                layout=rng.choice(["nk", "kn"]),
                tma=False,
                persistent=rng.random() < 0.5,
                fusion=rng.choice([0, 0, *range(1, 16)]),
                top_k=rng.choice([1, 2, 4]),
                programs=rng.choice([1, 2, 7]),
                wide=rng.random() < 0.5,
                group_m=rng.choice([1, 2, 8]),
                seed=seed,
            )
        )
    for tried, result in zip(cases, run(cases), strict=True):
        assert result["wrong"] == [], (tried, result)
        assert result["untouched"], tried
