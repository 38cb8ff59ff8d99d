"""The passes over rows: their kernels under Triton's interpreter against the equations, and their contract."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import warm
from acts import GATED, UNGATED

from pretuned.artifacts.records import DType, Op, RowOp
from pretuned.kernels import rowops
from pretuned.kernels.activations import KINDS, Activation

WORKER = Path(__file__).parents[2] / "support" / "interpret_passes.py"
ALL = ["dh", "a", "dweights"]


def run(cases: list[dict[str, object]]) -> list[list[str]]:
    """Return the faults of each case, from a process that interprets Triton."""
    done = warm.run([WORKER], stdin=json.dumps(cases), env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    wrong: list[list[str]] = json.loads(done.stdout)
    return wrong


def case(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "pass": "activation_grad",
        "M": 7,
        "columns": 40,
        "block": 16,
        "dtype": "fp32",
        "activation": "silu",
        "gated": True,
        "interleaved": False,
        "used": None,
        "weighted": False,
        "writes": ALL,
        "wide": True,
        "numbers": {},
        "top_k": 2,
        "seed": 0,
        "by_token": False,
        "repeated": 0,
        "narrow": False,
        "biased": False,
        "programs": None,
    }
    return base | changes


def as_json(act: str | Activation) -> tuple[str, dict[str, float]]:
    """The name and the numbers that are not the defaults."""
    if isinstance(act, str):
        return act, {}
    bare = {"limit": None, "alpha": 1.0, "beta": 0.0, "linear_beta": None}
    return act.name, {name: value for name, value in act._asdict().items() if name in bare and value != bare[name]}


FORMS = [
    *((act, True, interleaved) for act in map(as_json, GATED) for interleaved in (False, True)),
    *(((name, {}), False, False) for name in UNGATED),
]


def form(gated: bool, interleaved: bool) -> str:
    """Of an activation, in a case's name."""
    return ", interleaved" if interleaved else "" if gated else ", ungated"


CASES = (
    {
        f"{which}, {name}{numbers or ''}{form(gated, interleaved)}, {dtype}": case(
            **{"pass": which},
            activation=name,
            numbers=numbers,
            gated=gated,
            interleaved=interleaved,
            dtype=dtype,
            weighted=True,
            used=6,
        )
        for which in ("activation", "activation_grad")
        for (name, numbers), gated, interleaved in FORMS
        for dtype in ("fp32", "fp16")
    }
    | {
        f"special numbers, {name}{numbers or ''}{form(gated, interleaved)}": case(
            **{"pass": "special"}, activation=name, numbers=numbers, gated=gated, interleaved=interleaved, block=1024
        )
        for (name, numbers), gated, interleaved in FORMS
    }
    | {
        "int32 index": case(wide=False, weighted=True),
        "no weights, but their gradient": case(),
        "dh alone": case(writes=["dh"], used=3),
        "a alone": case(writes=["a"], weighted=True),
        "dweights alone": case(writes=["dweights"], used=3),
        "nothing": case(writes=[]),
        "no row is used": case(used=0, weighted=True),
        "more rows used than there are": case(used=9, weighted=True),
        "one column": case(columns=1),
        "activation of one column": case(**{"pass": "activation"}, columns=1, used=2),
        "gather": case(**{"pass": "gather"}),
        "gather, int32, some rows": case(**{"pass": "gather"}, wide=False, used=9, top_k=3, dtype="fp16"),
        "gather, one slot": case(**{"pass": "gather"}, top_k=1, columns=5),
    }
    | {
        f"gather by token, {k} slots, {used} used, {repeated} repeated{', int64' if wide else ''}": case(
            **{"pass": "gather"}, by_token=True, M=M, top_k=k, used=used, repeated=repeated, wide=wide, columns=columns
        )
        for M, k, used, repeated, columns in [
            (7, 2, None, 0, 40),
            (7, 1, 5, 0, 16),
            (5, 3, 9, 4, 5),
            (3, 11, None, 33, 40),
            (200, 8, 1500, 0, 3),
            (200, 3, None, 290, 3),
            (7, 2, 0, 0, 40),
            (4, 8, 99, 9, 17),
            (9, 9, 40, 2, 16),
        ]
        for wide in (False, True)
    }
    | {
        f"{which} of {used} rows by {programs} programs": case(
            **{"pass": which}, M=19, used=used, programs=programs, weighted=True, top_k=3, interleaved=programs == 2
        )
        for which in ("activation", "activation_grad", "gather", "combine")
        for used in (0, 1, 13, 19, None)
        for programs in (1, 2, 5)
    }
    | {
        "combine": case(**{"pass": "combine"}),
        "combine, one slot": case(**{"pass": "combine"}, top_k=1),
        "combine, many slots": case(**{"pass": "combine"}, top_k=11, dtype="fp16"),
        "combine, weighted": case(**{"pass": "combine"}, top_k=3, weighted=True),
        "combine, weighted in fp16": case(**{"pass": "combine"}, top_k=9, weighted=True, narrow=True, dtype="fp16"),
        "combine, biased": case(**{"pass": "combine"}, top_k=4, biased=True),
        "combine, biased and weighted in fp16": case(
            **{"pass": "combine"}, top_k=2, weighted=True, narrow=True, biased=True, dtype="fp16"
        ),
        "combine, of weights in fp16 none": case(**{"pass": "combine"}, narrow=True, dtype="fp16"),
        "weights in fp16": case(weighted=True, narrow=True, dtype="fp16", used=5),
        "weights in fp16, interleaved": case(weighted=True, narrow=True, dtype="fp16", interleaved=True),
    }
    | {
        f"sort of {M} slots by {block}, E={E}{', int64' if wide else ''}{', others' if others else ''}": case(
            **{"pass": "sort_slots"}, M=M, E=E, block=block, wide=wide, others=others, one_expert=False
        )
        for M, E, block in [(1, 1, 32), (32, 5, 32), (33, 5, 32), (100, 128, 128), (300, 64, 64), (2100, 33, 32)]
        for wide in (False, True)
        for others in (False, True)
    }
    | {
        f"rows of {E} experts among {M}, {room} each{', at starts' if starts else ''}{', int64' if wide else ''}": case(
            **{"pass": "place_rows"}, M=M, E=E, room=room, block=block, most=most, wide=wide, starts=starts
        )
        for M, E, room, block, most in [(1, 1, 1, 4, 2), (12, 4, 3, 4, 4), (60, 6, 10, 4, 12), (70, 512, 70, 16, 9)]
        for wide in (False, True)
        for starts in (False, True)
    }
    | {
        "sort of slots of one expert": case(
            **{"pass": "sort_slots"}, M=70, E=40, block=32, others=False, one_expert=True
        ),
    }
    | {
        f"sort of {M} slots, E={E}": case(
            **{"pass": "sort_slots"}, M=M, E=E, block=64, wide=False, others=True, one_expert=False
        )
        for M in (60, 200)
        for E in (255, 256, 257, rowops.MOST_SORTED_EXPERTS)
    }
    | {
        f"clear {rows} rows, {M} entries, E={E}{', int64' * wide}{', most named' * named}, {end}": case(
            **{"pass": "clear"}, M=M, rows=rows, E=E, index_end=end, most=most, wide=wide, named=named, columns=columns
        )
        for M, rows, E, end, most, columns in [
            (1, 1, 1, 1, 1, 4),
            (70, 70, 5, 70, 9, 4),
            (200, 130, 3, 130, 99, 20),
            (64, 200, 40, 64, 3, 36),
            (33, 65, 17, 60, 0, 16),
        ]
        for wide in (False, True)
        for named in (False, True)
    }
)


def by_night(case: dict[str, object]) -> bool:
    """The largest cases with another index, and one or five programs where all rows are used, one or none."""
    M, wide, others = case["M"], case["wide"], case.get("others")
    if case["pass"] == "place_rows":
        return case["E"] == 512 and wide is not case["starts"]
    if case["pass"] == "sort_slots":
        return M == 2100 and wide is not others
    if M == 200 and case["by_token"]:
        return wide is (case["top_k"] == 8)
    return M == 19 and case["programs"] != 2 and case["used"] not in (13, None)


@pytest.fixture(scope="module")
def results(asked: list[str]) -> dict[str, list[str]]:
    return dict(zip(asked, run([CASES[name] for name in asked]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if by_night(case) else ()) for name, case in CASES.items()]
)
def test_kernel_matches_the_equation(results: dict[str, list[str]], name: str) -> None:
    assert results[name] == []


@pytest.mark.slow
def test_random_shapes() -> None:
    rng = random.Random(11)
    cases = []
    which = ["gather", "activation", "activation_grad", "combine", "clear"]
    for seed in range(40):
        (name, numbers), gated, interleaved = rng.choice(FORMS)
        M = rng.choice([1, 2, 9])
        cases.append(
            case(
                **{"pass": rng.choice(which)},
                M=M,
                seed=seed,
                activation=name,
                numbers=numbers,
                gated=gated,
                interleaved=interleaved,
                columns=rng.choice([1, 3, 16, 17, 63, 64]),
                block=rng.choice([16, 64]),
                used=rng.choice([None, *range(M + 2)]),
                weighted=rng.random() < 0.5,
                by_token=rng.random() < 0.5,
                repeated=rng.choice([0, 0, 1, 3]),
                wide=rng.random() < 0.5,
                writes=[name for name in ALL if rng.random() < 0.7],
                dtype=rng.choice(["fp32", "fp16"]),
                top_k=rng.choice([1, 3, 8, 9]),
                rows=rng.choice([1, 9, 64, 70]),
                E=rng.choice([1, 5, 20]),
                index_end=rng.choice([0, 1]),
                most=rng.choice([0, 1, 9]),
                named=rng.random() < 0.5,
                narrow=rng.random() < 0.5,
                biased=rng.random() < 0.5,
                programs=rng.choice([None, 1, 2, 3]),
            )
        )
    for tried, wrong in zip(cases, run(cases), strict=True):
        assert wrong == [], tried


def test_the_kernels_have_the_flags_of_the_contract() -> None:
    from pretuned.kernels.rowops import activation, gather_combine, sort, zero_rows

    assert zero_rows._NAMES.value == rowops.NAMES
    assert zero_rows._CLEARED_ROWS.value == rowops.CLEARED_ROWS
    for name in ("COUNTS", "ADDS", "PLACES"):
        assert getattr(sort, f"_{name}").value == getattr(rowops, name)
    assert sort._COLUMNS.value == rowops.SORTED_EXPERTS
    assert sort._BINS.value == rowops.MOST_SORTED_EXPERTS
    for name in ("USED", "NOTES", "BY_TOKEN"):
        assert getattr(gather_combine, f"_{name}").value == getattr(rowops, name)
    assert gather_combine._ROWS.value == rowops.NOTED_ROWS
    for number, name in enumerate(KINDS):
        assert getattr(activation, f"_{name.upper()}").value == number
    for name in ("GATED", "INTERLEAVED", "USED", "WEIGHTED", "WRITES_DH", "WRITES_A", "WRITES_DWEIGHTS"):
        assert getattr(activation, f"_{name}").value == getattr(rowops, name)
    assert activation._KIND.value == rowops.KIND >= len(KINDS) - 1
    assert activation._KIND.value & rowops.GATED == 0


@pytest.mark.parametrize("op", [op for op in RowOp if op not in rowops.WEIGHT_OPS])
def test_the_kernels_take_the_arguments_of_the_contract(op: RowOp) -> None:
    from pretuned.kernels.rowops import (
        activation,
        activation_codes,
        activation_grad_codes,
        gather_combine,
        order_codes,
        place,
        quantize,
        quantize_blocks,
        quantize_columns,
        quantize_rows,
        sort,
        zero_rows,
    )
    from pretuned.kernels.rowops import activation_row_codes as row_codes

    homes = (
        activation_codes,
        activation_grad_codes,
        activation,
        zero_rows,
        place,
        sort,
        gather_combine,
        quantize,
        quantize_blocks,
        quantize_columns,
        row_codes,
        quantize_rows,
        order_codes,
    )
    kernel = next(getattr(home, op.value) for home in homes if hasattr(home, op.value))
    constants = rowops.constants(rowops.RowOpSpec(op, DType.BF16))
    assert [*(name for name, _ in rowops.arguments(op)), *constants] == list(kernel.arg_names)


def test_a_program_of_the_activation_has_lanes_for_four_rows() -> None:
    """256 columns of four rows, in bf16: 768 columns leave no lane idle."""
    spec = rowops.RowOpSpec(RowOp.ACTIVATION, DType.BF16)
    assert (spec.config.block, spec.config.num_warps, rowops.constants(spec)["ROWS"]) == (256, 4, 4)
    assert (rowops.rows_at_once(RowOp.ACTIVATION), rowops.rows_at_once(RowOp.ACTIVATION_GRAD)) == (4, 1)
    assert rowops.programs(RowOp.ACTIVATION, 9, 768, 256, 4) == 9


def test_which_passes_go_with_which_gemms() -> None:
    def of(*ops: Op, dtypes: tuple[DType, ...] = (DType.BF16,)) -> list[tuple[RowOp, DType]]:
        return list(dict.fromkeys((spec.op, spec.dtype) for spec in rowops.specs(dtypes, frozenset(ops))))

    bf16, fp32 = DType.BF16, DType.FP32
    rest = [(RowOp.PLACE_ROWS, fp32), (RowOp.SORT_SLOTS, fp32), (RowOp.CLEAR, fp32)]  # of no dtype: recorded as fp32
    assert of(Op.FORWARD) == [(RowOp.COMBINE, bf16), (RowOp.ACTIVATION, bf16), (RowOp.GATHER, bf16), *rest]
    assert of(Op.DX) == [(RowOp.COMBINE, bf16), (RowOp.ACTIVATION_GRAD, bf16), (RowOp.GATHER, bf16), *rest]
    assert (RowOp.CLEAR, fp32) not in of(Op.DW)
    pairs = [(RowOp.QUANTIZE, bf16), (RowOp.ORDER_CODES, bf16), (RowOp.ACTIVATION_CODES, bf16)]
    assert of(Op.FORWARD, dtypes=(DType.FP8_BLOCK,)) == [*of(Op.FORWARD)[:3], *pairs, *rest]
    assert of(Op.FORWARD, dtypes=(DType.FP8_BLOCK_A16,)) == of(Op.FORWARD)
    by_row = [(RowOp.QUANTIZE_ROWS, bf16), (RowOp.ORDER_CODES, bf16), (RowOp.ACTIVATION_ROW_CODES, bf16)]
    assert of(Op.FORWARD, dtypes=(DType.FP8_CHANNEL,)) == [*of(Op.FORWARD)[:3], *by_row, *rest]
    built = len(RowOp) - len(rowops.WEIGHT_OPS) - len(rowops.training_specs())
    assert len(of(*Op, dtypes=(bf16, DType.FP8_BLOCK, DType.FP8_CHANNEL))) == built
    assert of(Op.FORWARD, dtypes=(DType.TF32, fp32)) == [
        (RowOp.COMBINE, fp32),
        (RowOp.ACTIVATION, fp32),
        (RowOp.GATHER, fp32),
        *rest,
    ]
    assert of() == []


def test_a_block_is_read_back_and_nothing_else_is() -> None:
    block = rowops.RowOpSpec(RowOp.COMBINE, DType.BF16).config
    assert rowops.Block.from_pairs(block.pairs()) == block
    for pairs in ((("block", 1024),), (("block", 0), ("num_warps", 4)), (("block_k", 16), ("num_warps", 4))):
        with pytest.raises(ValueError, match="wanted"):
            rowops.Block.from_pairs(pairs)
