"""The records of a bundle at the edges of what they may say: the last value that is allowed, the first that is not."""

from __future__ import annotations

import itertools

import golden_bundles
import msgpack
import pytest

from pretuned.artifacts import codec, format
from pretuned.artifacts import limits as lim
from pretuned.artifacts.records import DType, Fusion, Gpu, Kernel, Op, PlanRow, Problem, Source, Target, Timed, Way
from pretuned.artifacts.wire import Malformed

GPU = ("NVIDIA H200", 132, 143771, 13000)
PROBLEM = Problem(Op.FORWARD, DType.BF16, 8, 256, 128)
VARIANT = golden_bundles.medium().variants[0]


def malformed(read, *arguments, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        read(*arguments)


def test_the_target():
    for sm in (10, 9999):
        assert format.read_target({"sm": sm, "arch_specific": True}) == Target(sm, True)
    for sm in (9, 10000):
        malformed(format.read_target, {"sm": sm, "arch_specific": True}, message="target.sm is")


def test_a_kernel():
    for revision in (0, lim.MAX_DIM):
        kernel = Kernel("rows", revision, bytes(32))
        assert format.read_kernel(codec.kernel_value(kernel)) == kernel
    for revision in (-1, lim.MAX_DIM + 1):
        malformed(
            format.read_kernel, codec.kernel_value(Kernel("rows", revision, bytes(32))), message="kernel.revision"
        )


@pytest.mark.parametrize(("field", "least"), [("sm_count", 1), ("memory_mib", 1), ("driver", 0)])
def test_a_gpu(field, least):
    for value in (least, lim.MAX_DIM):
        gpu = Gpu(*GPU)._replace(**{field: value})
        assert format.read_gpu(codec.gpu_value(gpu)) == gpu
    for value in (least - 1, lim.MAX_DIM + 1):
        malformed(format.read_gpu, codec.gpu_value(Gpu(*GPU)._replace(**{field: value})), message=f"gpu.{field} is")


@pytest.mark.parametrize(
    ("at", "field", "most"), [(2, "E", lim.MAX_EXPERTS), (3, "N", lim.MAX_DIM), (4, "K", lim.MAX_DIM)]
)
def test_the_widths_of_a_problem(at, field, most):
    for value in (1, most):
        problem = PROBLEM._replace(**{field: value})
        assert format.read_problem(format.pack_problem(problem)) == problem
    for value in (0, most + 1):
        values = list(PROBLEM.sort_key)
        values[at] = value
        malformed(format.problem_of, values, message=f"problem.{field} is")


def test_a_problem_has_eight_values():
    values = list(PROBLEM.sort_key)
    for wrong in (values[:7], [*values, 0]):
        malformed(format.problem_of, wrong, message=f"problem has {len(wrong)} items, wanted 8 to 8")


def test_every_fusion_and_no_other():
    most = sum(flag.value for flag in Fusion if flag)
    for bits in range(most + 1):
        fusion = Fusion(bits)
        assert format.problem_of([*PROBLEM.sort_key[:6], bits, 0]).fusion == fusion
        assert read_back(fusion=bits).fusion == fusion
    for bits in (-1, most + 1):
        malformed(format.problem_of, [*PROBLEM.sort_key[:6], bits, 0], message="problem.fusion is")
        record = msgpack.unpackb(codec.pack_variant(VARIANT)) | {"fusion": bits}
        malformed(format.read_variant, msgpack.packb(record), 8, message="variant.fusion is")


@pytest.mark.parametrize("fusion", [Fusion.GATHER, Fusion.SCATTER, Fusion.WEIGHT])
def test_each_of_the_fusions_that_need_top_k_may_have_it(fusion):
    values = [*PROBLEM.sort_key[:6], fusion.value, 8]
    assert format.problem_of(values).top_k == 8
    malformed(format.problem_of, [*PROBLEM.sort_key[:6], Fusion.SILU.value, 8], message="problem.top_k is 8, wanted 0")
    for wrong in (-1, lim.MAX_EXPERTS + 1):
        malformed(format.problem_of, [*values[:7], wrong], message="problem.top_k is")


ROW = [3, 1, 1, 1000, 0, 2000, 0]  # [log2 bucket, variant, source, time_ns, runner_up, runner_up_ns, gpu]
# (place, field, the least and the most that it may be in a bundle of 4 variants and 2 GPUs)
BOUNDS = [
    (0, "log2 of choice.bucket", 0, lim.MAX_BUCKET_LOG2),
    (1, "choice.variant", 1, 3),
    (3, "choice.time_ns", 1, lim.MAX_TIME_NS),
    (4, "choice.runner_up", 0, 3),
    (5, "choice.runner_up_ns", 1, lim.MAX_TIME_NS),
    (6, "choice.gpu", 0, 1),
]


@pytest.mark.parametrize(("at", "field", "least", "most"), BOUNDS)
def test_a_choice(at, field, least, most):
    def row(value: int) -> bytes:
        changed = [*ROW]
        changed[at] = value
        if at == 4:
            changed[1] = 2
        return msgpack.packb([changed])

    for value in (least, most):
        if (at, value) != (4, 2):
            (choice,) = format.read_choices(row(value), 4, 2)
            assert codec.pack_choices((choice,)) == row(value)
    least = 0 if at == 1 else least  # the runner-up's, if the whole choice is read
    for value in (least, most):
        assert [row[at] for row in format.read_timed(row(value), 4, 2)] == [value]
    for value in (least - 1, most + 1):
        for read in (format.read_choices, format.read_timed):
            malformed(read, row(value), 4, 2, message=field)


def test_a_choice_has_seven_values_and_a_source():
    for wrong in (ROW[:6], [*ROW, 1, [[0, 0, 1, 2]], 1]):
        for read in (lambda record: format.read_choices(record, 4, 2), lambda record: format.read_measured(record, 2)):
            malformed(read, msgpack.packb([wrong]), message=f"choice has {len(wrong)} items, wanted 7 to 9")
    for source in (-1, 2):
        malformed(format.read_choices, msgpack.packb([[3, 1, source, *ROW[3:]]]), 4, 2, message="choice.source is")
    modelled = msgpack.packb([[3, 1, 0, 1000, None, None, None]])
    assert format.read_choices(modelled, 4, 2)[0].source is Source.MODELLED


def test_an_eighth_value_is_torch_s_time():
    """Of a measured choice alone; the choices that bundles had before are written as they were."""
    later = [4, *ROW[1:]]
    for least in (1, lim.MAX_TIME_NS):
        record = msgpack.packb([[*ROW, least], later])
        both = format.read_choices(record, 4, 2)
        assert [choice.torch_ns for choice in both] == [least, None]
        assert codec.pack_choices(both) == record
        assert format.read_timed(record, 4, 2) == [ROW, later]
        assert format.read_measured(record, 2) == [(1, 0), (0, 0)] * 2
    for wrong in (0, lim.MAX_TIME_NS + 1, None, True):
        malformed(format.read_choices, msgpack.packb([[*ROW, wrong]]), 4, 2, message="choice.torch_ns is")
    modelled = [3, 1, 0, 1000, None, None, None, 900]
    malformed(format.read_choices, msgpack.packb([modelled]), 4, 2, message="torch_ns is there in a modelled choice")


def test_a_ninth_value_is_the_plan():
    """Torch's time is nil in its place if there is none; a choice without a plan is written without either."""
    rows = [[0, 0, 2, 3], [0, 1, 0, None], [2, 0, 0, 1], [2, 0, 5, None], [3, 0, lim.MAX_EXPERTS, 0]]
    plan = (
        PlanRow(Way.ROWS_FIRST, False, 2, 3),
        PlanRow(Way.ROWS_FIRST, True, 0, None),
        PlanRow(Way.FUSED_SILU, False, 0, 1),
        PlanRow(Way.FUSED_SILU, False, 5, None),
        PlanRow(Way.QUANTISED_X, False, lim.MAX_EXPERTS, 0),
    )
    modelled = [4, 1, 0, 1000, None, None, None, None, rows]
    record = msgpack.packb([[*ROW, 900, rows], modelled, [5, *ROW[1:]]])
    choices = format.read_choices(record, 4, 2)
    assert [(choice.torch_ns, choice.plan) for choice in choices] == [(900, plan), (None, plan), (None, ())]
    assert choices[0].variants() == [1, 0, 3, 1, 0]
    assert codec.pack_choices(choices) == record
    assert format.read_timed(record, 4, 2) == [ROW, [5, *ROW[1:]]]
    for wrong, message in (
        (None, "choice.plan is None, wanted an array"),
        ([], "choice.plan has 0 items"),
        ([[0, 0, 1, 1]] * (lim.MAX_PLAN_ROWS + 1), f"choice.plan has {lim.MAX_PLAN_ROWS + 1} items"),
        ([[0, 0, 1]], "a row of choice.plan has 3 items"),
        ([[4, 0, 1, 1]], "way of choice.plan is 4, wanted 0 to 3"),
        ([[0, 2, 1, 1]], "checks of choice.plan is 2"),
        ([[0, False, 1, 1]], "checks of choice.plan is False, wanted an integer"),
        ([[0, 0, -1, 1]], "top_k of choice.plan is -1"),
        ([[0, 0, 1, 4]], "variant of choice.plan is 4, wanted 0 to 3"),
        ([[0, 0, 1, 1], [0, 0, 1, 2]], "not ascending by way, checks and top_k"),
        ([[1, 0, 1, 1], [0, 0, 2, 2]], "not ascending by way, checks and top_k"),
    ):
        malformed(format.read_choices, msgpack.packb([[*ROW, None, wrong]]), 4, 2, message=message)


def test_what_is_measured_where():
    rows = [ROW, [4, 1, 0, 1000, None, None, None], [5, 2, 1, 1000, None, None, 1], [5, 2, 1, 1000, None, None, 7]]
    assert format.read_measured(msgpack.packb(rows[:1]), 2) == [(1, 0), (0, 0)]
    assert format.read_measured(msgpack.packb(rows), 2) == [(1, 0), (0, 0), (2, 1)]
    assert format.read_measured(msgpack.packb([[3, 1, 1, 1000, None, None, -1]]), 2) == []
    malformed(format.read_measured, msgpack.packb([]), 2, message="choices has 0 items")


def test_measured_choices_as_plain_numbers() -> None:
    """Each as the whole choice has it; what breaks the format is refused in the same words."""
    modelled = [4, 1, 0, 1000, None, None, None]
    record = msgpack.packb([ROW, modelled, [5, 2, 1, 1000, None, None, 1]])
    timed = [Timed(*row) for row in format.read_timed(record, 4, 2)]
    whole = [choice for choice in format.read_choices(record, 4, 2) if choice.gpu is not None]
    assert [
        (1 << row.log2_bucket, row.variant, row.time_ns, row.runner_up, row.runner_up_ns, row.gpu) for row in timed
    ] == [
        (choice.bucket, choice.variant, choice.time_ns, choice.runner_up, choice.runner_up_ns, choice.gpu)
        for choice in whole
    ]
    assert format.read_timed(msgpack.packb([modelled]), 4, 2) == []
    malformed(format.read_timed, msgpack.packb([]), 4, 2, message="choices has 0 items")
    malformed(format.read_timed, msgpack.packb([ROW, ROW[:6]]), 4, 2, message="choice has 6 items, wanted 7 to 9")
    malformed(format.read_timed, msgpack.packb([ROW, 1]), 4, 2, message="choice is 1, wanted an array")
    for at, wrong, message in (
        (0, True, "log2 of choice.bucket"),
        (1, "1", "choice.variant"),
        (5, None, "choice.runner_up_ns"),
        (6, 0.0, "choice.gpu"),
    ):
        row = list(ROW)
        row[at] = wrong
        malformed(format.read_timed, msgpack.packb([ROW, row]), 4, 2, message=message)


# (field, the least, the most)
NUMBERS = [
    ("revision", 0, lim.MAX_DIM),
    ("abi", 1, lim.MAX_DIM),
    ("max_experts", 1, lim.MAX_EXPERTS),
    ("threads", 1, lim.MAX_THREADS),
    ("shared_bytes", 0, lim.MAX_SHARED_BYTES),
    ("registers", 0, lim.MAX_REGISTERS),
    ("spill_bytes", 0, lim.MAX_DIM),
    ("scratch_bytes", 0, lim.MAX_DIM),
]


@pytest.mark.parametrize(("field", "least", "most"), NUMBERS)
def test_a_variant(field, least, most):
    for value in (least, most):
        variant = VARIANT._replace(**{field: value})
        assert format.read_variant(codec.pack_variant(variant), variant.cubin_bytes) == variant
        assert format.read_kind(codec.pack_variant(variant))[1] == variant.max_experts
    for value in (least - 1, most + 1):
        malformed(
            format.read_variant,
            codec.pack_variant(VARIANT._replace(**{field: value})),
            8,
            message=f"variant.{field} is",
        )


def test_the_kind_of_a_variant_is_its_first_fields():
    values = msgpack.unpackb(codec.pack_variant(VARIANT))
    kind = [values[name] for name in ("op", "dtype", "layout", "fusion")]
    assert format.read_kind(msgpack.packb(values)) == (kind, VARIANT.max_experts)
    for experts in (0, lim.MAX_EXPERTS + 1):
        malformed(format.read_kind, msgpack.packb(values | {"max_experts": experts}), message="variant.max_experts is")
    short = dict(itertools.islice(values.items(), 8))
    malformed(format.read_kind, msgpack.packb(short), message="variant does not begin with the keys")


def test_what_fits_a_problem():
    kind = [PROBLEM.op.value, PROBLEM.dtype.value, PROBLEM.layout.value, PROBLEM.fusion.value]
    format.check_fits({3: (kind, PROBLEM.E)}, PROBLEM)
    malformed(format.check_fits, {3: (kind, PROBLEM.E - 1)}, PROBLEM, message="variant 3 is for at most 7 experts")
    malformed(format.check_fits, {3: (["dW", *kind[1:]], PROBLEM.E)}, PROBLEM, message="variant 3 is for")


def read_back(**fields: object) -> object:
    """A variant's record with these fields in place of its own, read."""
    values = msgpack.unpackb(codec.pack_variant(VARIANT)) | fields
    return format.read_variant(msgpack.packb(values), VARIANT.cubin_bytes)


def test_the_config_of_a_variant():
    for config in ([], [["a", 0]], [["a", lim.MAX_DIM], ["b", 1]], [[f"k{i:02d}", i] for i in range(lim.MAX_KNOBS)]):
        assert [list(pair) for pair in read_back(config=config).config] == config
    for config, message in (
        ([["a"]], "variant.config has 1 items, wanted 2 to 2"),
        ([["a", 1, 2]], "variant.config has 3 items"),
        ([["a", -1]], "variant.config is -1"),
        ([["a", lim.MAX_DIM + 1]], "variant.config is"),
        ([["b", 1], ["a", 1]], "variant.config has a after b"),
        ([["a", 1], ["a", 1]], "variant.config has a after a"),
        ([[f"k{i:02d}", i] for i in range(lim.MAX_KNOBS + 1)], "65 items|not canonical msgpack"),
    ):
        malformed(lambda config=config: read_back(config=config), message=message)


def test_the_arguments_of_a_variant():
    for arguments in ([], [["x", "ptr"]], [[f"a{i:02d}", "i32"] for i in range(lim.MAX_ARGUMENTS)]):
        assert [list(pair) for pair in read_back(arguments=arguments, tensor_maps=[]).arguments] == arguments
    for arguments, message in (
        ([["x"]], "variant.arguments has 1 items, wanted 2 to 2"),
        ([["x", "ptr", 1]], "variant.arguments has 3 items"),
        ([["x", "desc6"]], "an argument's kind is 'desc6'"),
        ([["x", "ptr"], ["x", "i32"]], "variant.arguments has one name twice"),
    ):
        malformed(lambda arguments=arguments: read_back(arguments=arguments, tensor_maps=[]), message=message)


def mapped(**fields: object) -> object:
    values = {"argument": "x", "element": 6, "box": [8, 64], "swizzle": 3} | fields
    return read_back(arguments=[["x", "desc2"], ["M", "i32"]], tensor_maps=[values]).tensor_maps


def test_the_tensor_maps_of_a_variant():
    for fields in ({}, {"element": 0}, {"element": 255}, {"swizzle": 0}, {"swizzle": 255}, {"box": [1, lim.MAX_BOX]}):
        (box_map,) = mapped(**fields)
        assert {name: getattr(box_map, name) for name in fields} == {
            name: tuple(value) if name == "box" else value for name, value in fields.items()
        }
    for fields, message in (
        ({"element": -1}, "tensor_map.element is"),
        ({"element": 256}, "tensor_map.element is 256, wanted 0 to 255"),
        ({"swizzle": -1}, "tensor_map.swizzle is"),
        ({"swizzle": 256}, "tensor_map.swizzle is 256, wanted 0 to 255"),
        ({"box": [0, 1]}, "tensor_map.box is 0"),
        ({"box": [1, lim.MAX_BOX + 1]}, "tensor_map.box is 257"),
        ({"box": [8]}, "tensor_map.box has 1 items, wanted 2 to 2"),
        ({"box": [8, 8, 8]}, "tensor_map.box has 3 items"),
        ({"argument": "M"}, "tensor_map.argument is 'M'"),
        ({"argument": 1}, "tensor_map.argument is 1"),
        ({"argument": None}, "tensor_map.argument is None"),
        ({"argument": ["x"]}, r"tensor_map.argument is \['x'\]"),
    ):
        malformed(lambda fields=fields: mapped(**fields), message=message)
    malformed(
        lambda: read_back(arguments=[["x", "desc2"]], tensor_maps=[]), message="variant.tensor_maps has none for x"
    )
    for rank in (2, 3, 4, 5):
        box_map = {"argument": "x", "element": 6, "box": [8] * rank, "swizzle": 3}
        (tensor_map,) = read_back(arguments=[["x", f"desc{rank}"]], tensor_maps=[box_map]).tensor_maps
        assert tensor_map.box == (8,) * rank
    twice = {"argument": "x", "element": 6, "box": [8, 8], "swizzle": 3}
    malformed(
        lambda: read_back(arguments=[["x", "desc2"]], tensor_maps=[twice, twice]), message="tensor_map.argument is 'x'"
    )


def test_the_alignment_of_a_variant():
    for alignment in (1, 16):
        assert read_back(alignment=alignment).alignment == alignment
    for alignment in (0, 2, 8, 17, True, 16.0, "16", None):
        malformed(lambda alignment=alignment: read_back(alignment=alignment), message="variant.alignment is")
