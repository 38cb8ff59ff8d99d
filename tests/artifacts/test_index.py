"""A glance at the first bytes of a bundle: its target and its GPUs, or nothing."""

from __future__ import annotations

import craft
import golden_bundles
import msgpack
import pytest
from calls import calls_of
from hypothesis import given
from hypothesis import strategies as st

from pretuned.artifacts import codec, format, limits
from pretuned.artifacts.bundle_file import open_bytes
from pretuned.artifacts.errors import BundleCorrupt
from pretuned.artifacts.format import GLANCED_BYTES, glance, glance_at_gpus
from pretuned.artifacts.records import DType, Gpu, Target
from pretuned.artifacts.wire import PREAMBLE_BYTES, Malformed

MEDIUM = codec.encode(golden_bundles.medium())


@given(st.binary(max_size=80), st.integers(0, 80))
def test_a_glance_at_anything_is_a_target_or_nothing(tail, kept):
    begin = MEDIUM[PREAMBLE_BYTES : PREAMBLE_BYTES + kept] + tail
    assert glance(begin) is None or isinstance(glance(begin), Target)


@given(st.builds(Target, st.integers(10, 9999), st.booleans()))
def test_a_glance_tells_every_target(target):
    data = codec.encode(golden_bundles.small()._replace(target=target))
    assert glance(data[PREAMBLE_BYTES : PREAMBLE_BYTES + GLANCED_BYTES]) == target


@given(st.binary(max_size=300), st.integers(0, 1000))
def test_a_glance_at_anything_is_gpus_or_nothing(tail, kept):
    begin = MEDIUM[PREAMBLE_BYTES : PREAMBLE_BYTES + kept] + tail
    assert glance_at_gpus(begin) is None or all(isinstance(gpu, Gpu) for gpu in glance_at_gpus(begin))


def test_where_a_variant_was_tested():
    """The choices say where a variant was tested, whichever is asked first."""
    bundle = golden_bundles.medium()
    measured = {
        index: bundle.gpus[choice.gpu]
        for row in reversed(bundle.choices.values())
        for choice in reversed(row)
        if choice.gpu is not None
        for index in (choice.runner_up, choice.variant)
        if index is not None
    }
    assert measured
    for order in (range(len(bundle.variants)), reversed(range(len(bundle.variants)))):
        with open_bytes(MEDIUM, "made") as file:
            assert {i: gpu for i in order if (gpu := file.tested_on(i)) is not None}.keys() == measured.keys()
    without = golden_bundles.small()._replace(gpus=())
    with open_bytes(codec.encode(without), "made") as file:
        assert file.tested_on(0) is None


def test_what_any_gpu_measured_was_tested_there():
    bundle = golden_bundles.gpus()
    row = next(iter(bundle.choices.values()))
    assert [(choice.bucket, choice.gpu) for choice in row] == [(1, None), (1, 0), (1, 1), (2, 0), (4, 1)]
    named = {row[i].variant: row[i].measured_on(bundle.gpus) for i in (4, 3, 1)}
    for asked in (True, False):
        with open_bytes(codec.encode(bundle), "made") as file:
            if asked:
                assert file.find(next(iter(bundle.choices))) == row
            assert {i: file.tested_on(i) for i in named} == named


@pytest.mark.parametrize("record", [b"", b"\x90", b"\x91\x90", b"\xc0", b"\x91\x97\0\0\0\0\0\0"])
def test_a_damaged_record_is_reported_where_it_is_asked_where_a_variant_was_tested(record):
    top, _ = craft.parts(MEDIUM)
    data = craft.changed(MEDIUM, problems=dict.fromkeys(top["problems"], record))
    with open_bytes(data, "made") as file, pytest.raises(BundleCorrupt, match=r"bundle 'made': .*choices 0"):
        file.tested_on(0)


def test_a_glance_at_gpus_that_are_none():
    begin = craft.changed(MEDIUM, gpus=[{"name": "x", "sm_count": 0, "memory_mib": 1, "driver": 0}])[PREAMBLE_BYTES:]
    assert glance_at_gpus(begin) is None
    assert glance_at_gpus(MEDIUM[PREAMBLE_BYTES:]) == golden_bundles.medium().gpus


def test_a_number_written_longer_than_it_need_be_is_refused():
    """All else is right: each part's own form is checked where it is read, this one by the size of the whole."""
    top, cubins = craft.parts(MEDIUM)
    packed = msgpack.packb(top)
    short = b"\xaamin_driver" + msgpack.packb(top["min_driver"])
    assert packed.count(short) == 1
    long = short[:11] + b"\xce" + top["min_driver"].to_bytes(4, "big")
    data = craft.seal(packed.replace(short, long), cubins)
    with pytest.raises(
        BundleCorrupt, match=rf"index: not canonical msgpack: {len(packed) + 2} bytes, wanted {len(packed)}"
    ):
        codec.decode(data, "made")
    with pytest.raises(BundleCorrupt, match="not canonical msgpack"):
        open_bytes(data, "made")


def test_what_a_part_lets_through_the_whole_does_not(monkeypatch):
    """The last line of defence: were a record's own form not checked, the bytes would not be those of the bundle."""
    top, _ = craft.parts(MEDIUM)
    records = dict(top["problems"])
    key, record = next(iter(records.items()))
    row = record.index(b"\xcd")
    assert record[row : row + 1] == b"\xcd"
    longer = record[:row] + b"\xce\0\0" + record[row + 1 :]
    data = craft.changed(MEDIUM, problems={**records, key: longer})
    with pytest.raises(BundleCorrupt, match=r"choices for .*: not canonical msgpack"):
        codec.decode(data, "made")
    monkeypatch.setattr(format, "unpack", format.parse)
    with pytest.raises(BundleCorrupt, match="the bytes are not in canonical form"):
        codec.decode(data, "made")


def test_all_models_together_have_so_many_problems(monkeypatch):
    bundle = golden_bundles.medium()
    rows = sum(len(model.problems) for model in bundle.models)
    assert rows
    monkeypatch.setattr(limits, "MAX_MODEL_ROWS", rows)
    assert codec.decode(MEDIUM, "made").models == bundle.models
    monkeypatch.setattr(limits, "MAX_MODEL_ROWS", rows - 1)
    with pytest.raises(BundleCorrupt, match=f"models: more than {rows - 1} problems of models in all"):
        codec.decode(MEDIUM, "made")


def test_a_record_has_so_many_bytes():
    top, _ = craft.parts(MEDIUM)
    for size, message in ((65535, "problem"), (65536, "problems has an item of 65536 bytes, the limit is 65535")):
        data = craft.changed(MEDIUM, problems={bytes(size): b"\x90", **top["problems"]})
        with pytest.raises(BundleCorrupt, match=message) as caught:
            codec.decode(data, "made")
        assert ("the limit is" in str(caught.value)) is (size == 65536)


def test_any_driver_may_be_enough():
    bundle = golden_bundles.small()._replace(min_driver=0)
    assert codec.decode(codec.encode(bundle), "made").min_driver == 0


def test_a_variant_that_does_not_begin_as_one_is_reported() -> None:
    record = msgpack.packb({"kernel": "rows", "revision": 1, "abi": 1, "dtype": "bf16"})
    with pytest.raises(Malformed, match="variant does not begin with the keys kernel, revision, abi, op, dtype"):
        format.read_kind(record)


def test_two_neighbours_out_of_order_are_refused():
    top, _ = craft.parts(MEDIUM)
    rows = list(top["problems"].items())
    assert len(rows) > 2
    for at in range(len(rows) - 1):
        turned = [*rows[:at], rows[at + 1], rows[at], *rows[at + 2 :]]
        with pytest.raises(BundleCorrupt, match="problems are not sorted by their bytes, each once"):
            open_bytes(craft.changed(MEDIUM, problems=dict(turned)), "b")


MODEL = {"name": "a/b", "tp": 1, "ep": 1, "top_k": 1, "dtype": "bf16", "problems": [0]}


@pytest.mark.parametrize(
    ("field", "least", "most"), [("tp", 1, limits.MAX_DIM), ("ep", 1, limits.MAX_DIM), ("top_k", 1, limits.MAX_EXPERTS)]
)
def test_the_numbers_of_a_model(field, least, most):
    small = codec.encode(golden_bundles.small())
    for value in (least, most):
        data = craft.changed(small, models=msgpack.packb([MODEL | {field: value}]))
        (model,) = open_bytes(data, "b").models()
        assert getattr(model, field) == value
    for value in (least - 1, most + 1):
        data = craft.changed(small, models=msgpack.packb([MODEL | {field: value}]))
        with pytest.raises(BundleCorrupt, match=f"model.{field} is {value}"):
            open_bytes(data, "b").models()


def test_the_problems_of_a_model():
    count = len(golden_bundles.medium().choices)
    for rows in ([], [0], [count - 1], [*range(count)], [0, 0]):
        (model,) = open_bytes(craft.changed(MEDIUM, models=msgpack.packb([MODEL | {"problems": rows}])), "b").models()
        assert len(model.problems) == len(rows)
    for row in (-1, count):
        data = craft.changed(MEDIUM, models=msgpack.packb([MODEL | {"problems": [row]}]))
        with pytest.raises(BundleCorrupt, match=f"model.problems is {row}"):
            open_bytes(data, "b").models()


def test_the_models_of_a_product():
    """In whatever dtype, layout and top_k, each once, in their order; and they are read once, however often asked."""
    bundle = golden_bundles.medium()
    problems = sorted(bundle.choices, key=lambda problem: problem.sort_key)
    shares = [(0, 1, 2), (1, 0), (), (2, 2)]
    models = tuple(
        bundle.models[0]._replace(name=f"m/{i}", problems=tuple(problems[j] for j in share))
        for i, share in enumerate(shares)
    )
    file = open_bytes(codec.encode(bundle._replace(models=models)), "b")
    assert file.models() is file.models()

    def product(problem):
        return problem.op, problem.fusion, problem.E, problem.N, problem.K

    asked = [*problems, problems[0]._replace(dtype=DType.FP16), problems[0]._replace(E=3)]
    models_found = [file.models_of(problem) for problem in asked]
    assert models_found == [
        tuple(model for model in file.models() if product(asked_problem) in map(product, model.problems))
        for asked_problem in asked
    ]
    assert models_found[-2] == models_found[0] != ()
    assert models_found[-1] == ()


def test_the_least_driver():
    for driver in (0, limits.MAX_DIM):
        assert open_bytes(craft.changed(MEDIUM, min_driver=driver), "b").min_driver == driver
    for driver in (-1, limits.MAX_DIM + 1):
        with pytest.raises(BundleCorrupt, match=f"min_driver is {driver}"):
            open_bytes(craft.changed(MEDIUM, min_driver=driver), "b")


@pytest.mark.parametrize("chars", [1, 255 - 15, 256 - 15, 65535 - 15, 65536 - 15])
def test_the_models_take_what_their_length_does(chars):
    """Models of as many bytes as a length of one, two and four bytes can tell, and of one more."""
    bundle = golden_bundles.small()
    models = tuple(
        bundle.models[0]._replace(name="m" * min(limits.MAX_NAME_CHARS, left))
        for left in range(chars, 0, -limits.MAX_NAME_CHARS)
    )
    models = tuple(model._replace(tp=i + 1) for i, model in enumerate(models))
    data = codec.encode(bundle._replace(models=models))
    assert open_bytes(data, "b").models() == models


@pytest.mark.parametrize("value", [None, 5, "text", [b"\x90"], {b"a": b"b"}, True])
def test_models_and_problems_are_what_they_are(value):
    for part, message in (("models", "models is no bin"), ("problems", "problems is no map|problem 0")):
        for read in (lambda data: open_bytes(data, "b").problems(), lambda data: codec.decode(data, "b")):
            with pytest.raises(BundleCorrupt, match=message):
                read(craft.changed(MEDIUM, **{part: value}))


def test_who_asked_for_choices_need_read_no_others_to_tell_where_they_were_tested():
    bundle = golden_bundles.medium()
    pairs = [
        (problem, choice) for problem, row in bundle.choices.items() for choice in row if choice.runner_up is not None
    ]
    assert pairs
    for problem, choice in pairs:
        file = open_bytes(MEDIUM, "b")
        assert file.find(problem)
        with calls_of(format.read_measured) as read:
            assert file.tested_on(choice.variant) in bundle.gpus
            assert file.tested_on(choice.runner_up) in bundle.gpus
        assert read == []


def test_where_none_was_tested_each_row_is_read_once():
    """Also of a bundle without problems: there is no row to read."""
    file = open_bytes(MEDIUM, "b")
    with calls_of(format.read_measured) as read:
        for _ in range(2):
            assert file.tested_on(len(golden_bundles.medium().variants)) is None  # no choice names it
            records = sorted(entry.arguments["record"] for entry in read)
            assert records == sorted(craft.parts(MEDIUM)[0]["problems"].values())
    assert open_bytes(craft.changed(MEDIUM, problems={}), "b").tested_on(0) is None


def test_steps_through_the_rows():
    """Golden ones: 0.618 of all, or the next step that meets each row."""
    assert [format._apart(count) for count in (1, 2, 10, 100, 1000)] == [0, 1, 7, 61, 619]
    for count in range(1, 50):
        assert {row * format._apart(count) % count for row in range(count)} == set(range(count))


def test_what_lengths_take():
    """msgpack's headers have 2, 3 and 5 bytes for bins, 1 and 3 for arrays and maps."""
    for size in (0, 255, 256, 65535, 65536):
        assert format._bin_bytes(size) == len(msgpack.packb(bytes(size)))
    for count in (0, 15, 16, 65535):
        assert format._count_bytes(count) == len(msgpack.packb([1] * count)) - count - 1
    for sizes in ([], [0], [255], [256], [1, 255, 256, 65535]):
        records = [bytes(size) for size in sizes]
        assert format._records(records, "it") == (records, sum(len(msgpack.packb(record)) for record in records))
