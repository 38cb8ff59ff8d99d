"""Bundle to bytes and back; what the writer refuses; the lazy reader against the strict one."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from types import MappingProxyType

import craft
import golden_bundles
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretuned.artifacts import codec, limits
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import BundleCorrupt
from pretuned.artifacts.records import (
    Bundle,
    Choice,
    DType,
    Fusion,
    Gpu,
    Kernel,
    Layout,
    Model,
    Op,
    Problem,
    Producer,
    RowOp,
    Source,
    Target,
    TensorMap,
)

EMPTY = Bundle(Target(90, True), 12080, Producer("0", "0", "0", ()), (), (), (), (), {}, ())


@pytest.mark.parametrize("make", [*golden_bundles.GOLDEN.values(), lambda: EMPTY])
def test_round_trip(make):
    bundle = make()
    data = codec.encode(bundle)
    assert codec.decode(data, "x") == bundle
    assert codec.encode(codec.decode(data, "x")) == data


@pytest.mark.parametrize("fusion", [Fusion.SILU, Fusion.SILU | Fusion.GATHER])
def test_silu_in_the_epilogue_is_16(fusion):
    small = golden_bundles.small()
    (variant,), ((problem, choices),) = small.variants, small.choices.items()
    gated = problem._replace(fusion=fusion)
    bundle = small._replace(
        variants=(variant._replace(fusion=fusion),),
        choices={gated: choices},
        models=tuple(model._replace(problems=(gated,)) for model in small.models),
    )
    data = codec.encode(bundle)
    assert codec.decode(data, "x") == bundle
    (key,) = craft.parts(data)[0]["problems"]
    assert msgpack.unpackb(key)[6] == fusion.value == 16 + (fusion & Fusion.GATHER).value
    assert f" fused={'gather+' if Fusion.GATHER in fusion else ''}silu" in str(gated)


def with_passes() -> Bundle:
    """A pass of each kind beside the variants of the GEMMs."""
    bundle = golden_bundles.medium()
    first, cubin = bundle.variants[0], bundle.cubins[0]
    passes = [first._replace(op=op, layout=Layout.NK, fusion=Fusion.NONE) for op in RowOp]
    return bundle._replace(variants=(*bundle.variants, *passes), cubins=(*bundle.cubins, *[cubin] * len(passes)))


def test_passes_over_rows_are_variants_that_no_choice_can_name():
    bundle = with_passes()
    assert codec.decode(codec.encode(bundle), "x") == bundle
    problem, row = next(iter(bundle.choices.items()))
    named = (row[0]._replace(variant=len(bundle.variants) - 1), *row[1:])
    with pytest.raises(BundleCorrupt, match=r"is for \['largest_weight', 'bf16', 'nk', 0\]"):
        codec.encode(bundle._replace(choices={**bundle.choices, problem: named}))
    other = {problem._replace(op=RowOp.COMBINE): row for problem, row in bundle.choices.items()}
    with pytest.raises(BundleCorrupt, match=r"problem.op is 'combine', wanted one of forward, dX, dW"):
        codec.encode(bundle._replace(choices=other, models=()))


def test_any_msgpack_reader_reads_it():
    data = codec.encode(golden_bundles.medium())
    stream = msgpack.Unpacker()
    stream.feed(data)
    preamble, index, cubins = stream
    assert preamble[:4] == ["pretuned", 2, len(data), len(data) - 63 - 5 - len(cubins)]
    assert index["target"] == {"sm": 90, "arch_specific": True}
    assert cubins == b"".join(golden_bundles.medium().cubins)
    assert msgpack.unpackb(index["variants"][0])["kernel"] == "grouped_forward"


def test_the_order_that_choices_were_given_in_does_not_show():
    bundle = golden_bundles.medium()
    turned = bundle._replace(choices=MappingProxyType(dict(reversed(bundle.choices.items()))))
    assert codec.encode(turned) == codec.encode(bundle)


def test_the_lazy_reader_says_what_the_strict_one_says(tmp_path):
    bundle = golden_bundles.medium()
    path = tmp_path / "b.msgpack"
    path.write_bytes(codec.encode(bundle))
    with open_bundle(path) as file:
        lazy = Bundle(
            file.target,
            file.min_driver,
            file.producer,
            file.kernels,
            file.gpus,
            file.variants(),
            tuple(file.cubin(i) for i in range(file.variant_count)),
            {problem: file.find(problem) for problem in file.problems()},
            file.models(),
        )
        assert lazy == bundle == file.load()


def replaced_variant(**fields: object) -> Bundle:
    bundle = golden_bundles.small()
    return bundle._replace(variants=(bundle.variants[0]._replace(**fields),))


def replaced_choice(**fields: object) -> Bundle:
    bundle = golden_bundles.small()
    ((problem, (choice,)),) = bundle.choices.items()
    return bundle._replace(choices={problem: (choice._replace(**fields),)})


def replaced_problem(**fields: object) -> Bundle:
    bundle = golden_bundles.small()
    ((problem, choices),) = bundle.choices.items()
    return bundle._replace(choices={problem._replace(**fields): choices}, models=())


def replaced(**fields: object) -> Bundle:
    return golden_bundles.small()._replace(**fields)


DESC = (("x", "desc2"), ("M", "i32"))
OTHER = Problem(Op.FORWARD, DType.BF16, 1, 1, 1)


def of_gpus(*gpus: int | None) -> Bundle:
    """The small bundle with choices of these GPUs for one bucket."""
    small = golden_bundles.small()
    ((problem, (choice,)),) = small.choices.items()
    row = tuple(choice._replace(source=Source.MODELLED if gpu is None else Source.MEASURED, gpu=gpu) for gpu in gpus)
    many_gpus = tuple(Gpu(f"GPU {i}", 132, 81559, 12080) for i in range(limits.MAX_GPUS))
    return small._replace(gpus=many_gpus, choices={problem: row})


# The numbers of each record: test_schema.py and test_index.py.
REFUSED = {
    "no kernel": (replaced(kernels=()), "is not in kernels"),
    "kernel of another revision": (replaced_variant(revision=2), "revision 2 is not in kernels"),
    "kernel twice": (replaced(kernels=golden_bundles.small().kernels * 2), "twice"),
    "gpu twice": (replaced(gpus=(Gpu("a", 1, 1, 1),) * 2), "twice"),
    "gpu name": (replaced(gpus=(Gpu("../a", 1, 1, 1),)), "gpu.name"),
    "arch_specific": (replaced(target=Target(90, 1)), "arch_specific is 1"),
    "min_driver bool": (replaced(min_driver=True), "min_driver is True"),
    "min_driver big": (replaced(min_driver=2**64), "can't be"),
    "producer text": (replaced(producer=Producer("0", "0", "é", ())), "producer.ptxas"),
    "producer newline": (replaced(producer=Producer("0\n", "0", "", ())), "producer.pretuned"),
    "producer options": (replaced(producer=Producer("0", "0", "", ("",) * 65)), "65 items"),
    "source digest": (replaced(kernels=(Kernel("grouped_forward", 1, bytes(31)),)), "source_sha256"),
    "more variants than cubins": (replaced(cubins=()), "1 variants and 0 cubins"),
    "size of a cubin": (replaced_variant(cubin_bytes=3), "its variant says 3"),
    "digest of a cubin": (replaced_variant(cubin_sha256=bytes(32)), "cubin 0 has sha256"),
    "empty cubin": (
        replaced_variant(cubin_bytes=0, cubin_sha256=hashlib.sha256(b"").digest())._replace(cubins=(b"",)),
        "cubin_bytes is 0",
    ),
    "model of an unknown problem": (replaced(models=(Model("m", 1, 1, 1, DType.BF16, (OTHER,)),)), "KeyError"),
    "model name": (replaced(models=(Model("/m", 1, 1, 1, DType.BF16, ()),)), "model.name"),
    "too few experts": (replaced_variant(max_experts=127), "at most 127 experts"),
    "entry": (replaced_variant(entry="a b"), "variant.entry"),
    "knob bool": (replaced_variant(config=(("a", True),)), "variant.config is True"),
    "kind": (replaced_variant(arguments=(("x", "f32"),)), "kind is 'f32'"),
    "map with no descriptor": (replaced_variant(tensor_maps=(TensorMap("x", 9, (1, 1), 0),)), "wanted a desc"),
    "map twice": (
        replaced_variant(arguments=DESC, tensor_maps=(TensorMap("x", 9, (1, 1), 0),) * 2),
        "wanted a desc",
    ),
    "variant for another op": (replaced_variant(op=Op.DW), "variant 0 is for ['dW'"),
    "variant for another dtype": (replaced_variant(dtype=DType.FP16), "variant 0 is for ['forward', 'fp16'"),
    "variant for another layout": (replaced_variant(layout=golden_bundles.Layout.KN), "'kn'"),
    "variant of a fusion": (replaced_variant(fusion=Fusion.GATHER), "'nk', 1]"),
    "no choices": (replaced(choices=dict.fromkeys(golden_bundles.small().choices, ())), "has 0 items"),
    "runner_up is the choice": (replaced_choice(runner_up=0, runner_up_ns=1), "the chosen variant itself"),
    "runner_up alone": (replaced_choice(runner_up=0), "both"),
    "runner_up_ns alone": (replaced_choice(runner_up_ns=1), "both"),
    "time float": (replaced_choice(time_ns=1.5), "time_ns is 1.5"),
    "modelled on a GPU": (replaced_choice(gpu=0), "a modelled one has none"),
    "measured on none": (replaced_choice(source=Source.MEASURED), "a measured choice names its GPU"),
    "bucket no power of two": (replaced_choice(bucket=3), "the format rounds"),
    "buckets twice": (replaced(choices={p: c * 2 for p, c in golden_bundles.small().choices.items()}), "ascending"),
    "one GPU twice": (of_gpus(0, 0), "bucket 1 of GPU 0 comes after bucket 1 of GPU 0, wanted them ascending"),
    "GPUs in another order": (of_gpus(1, 0), "bucket 1 of GPU 0 comes after bucket 1 of GPU 1"),
    "modelled last": (of_gpus(0, None), "bucket 1 of the cost model comes after bucket 1 of GPU 0"),
    "too many": (of_gpus(*range(1025)), "1025 exceeds max_array_len(1024)"),
    "top_k": (replaced_problem(top_k=8), "top_k is 8, wanted 0"),
    "lists for tuples": (replaced(gpus=[]), "the format rounds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_encode_refuses(name):
    bundle, message = REFUSED[name]
    with pytest.raises(BundleCorrupt) as caught:
        codec.encode(bundle, "new.msgpack")
    assert message in str(caught.value)
    assert "bundle 'new.msgpack'" in str(caught.value)


def test_encode_refuses_what_is_too_large(monkeypatch):
    cubin = bytes(limits.MAX_CUBIN_BYTES + 1)
    small = golden_bundles.small()
    variant = small.variants[0]._replace(cubin_bytes=len(cubin), cubin_sha256=hashlib.sha256(cubin).digest())
    with pytest.raises(BundleCorrupt, match="cubin_bytes is 8388609, wanted 1 to 8388608"):
        codec.encode(small._replace(variants=(variant,), cubins=(cubin,)))


SMALL = codec.encode(golden_bundles.small())
(KEY,) = craft.parts(SMALL)[0]["problems"]


@pytest.mark.parametrize(
    "data",
    [
        craft.changed(SMALL, extra=1),
        craft.changed(SMALL, models=[]),
        craft.changed(SMALL, models=b"\xc0"),
        craft.changed(SMALL, problems=[]),
        craft.changed(SMALL, problems={}),
        craft.changed(SMALL, problems={"a": b"\x90"}, models=b"\x90"),
        craft.changed(SMALL, problems={b"\x90": b"\x90"}),
        craft.changed(SMALL, problems={bytes(65536): b""}),
        craft.changed(SMALL, problems={KEY: b"\xc0"}),
        craft.changed(SMALL, problems={KEY: b"\x91\x90"}),
        craft.changed(SMALL, problems={KEY: None}),
        craft.changed(SMALL, variants=[b"\x80"]),
        craft.changed(SMALL, variants=[]),
        craft.changed(SMALL, cubin_bytes=[15]),
        craft.changed(SMALL, cubin_bytes=[17]),
        craft.changed(SMALL, cubin_bytes=[16, 1]),
        craft.changed(SMALL, kernels=None),
        craft.changed(SMALL, target=[80, False]),
        craft.changed(SMALL, target={"arch_specific": False, "sm": 80}),
        craft.changed(SMALL, producer={}),
        craft.changed_variant(SMALL, fusion=32),  # of a later version
        craft.changed_variant(SMALL, op="backward"),
        craft.changed_variant(SMALL, dtype=["bf16"]),
        craft.changed_variant(SMALL, layout=0),
        craft.changed_variant(SMALL, tensor_maps=[{}]),
        craft.changed_variant(SMALL, arguments=[["x"]]),
        craft.changed_variant(SMALL, config={"block_m": 16}),
        craft.changed_variant(SMALL, cubin_sha256="a" * 32),
        craft.changed_variant(SMALL, spare=1),
    ],
)
def test_decode_refuses(data):
    with pytest.raises(BundleCorrupt, match=r"^bundle 'b\.msgpack': "):
        codec.decode(data, "b.msgpack")


def test_each_digest_and_the_cubins_header_are_reported_as_what_they_are():
    wrong = bytearray(SMALL)
    wrong[40] ^= 1
    with pytest.raises(BundleCorrupt, match=r"header and index have sha256 \w{64}, header says \w{64}"):
        codec.decode(bytes(wrong), "b")
    at = len(SMALL) - 16 - 5
    with pytest.raises(
        BundleCorrupt, match=f"the cubins' header at byte {at} is not that of {len(SMALL)} bytes in all"
    ):
        codec.decode(SMALL[:at] + b"\xc5" + SMALL[at + 1 :], "b")
    with pytest.raises(BundleCorrupt, match=r"cubin 0 has sha256 \w{64}, its variant says \w{64}"):
        codec.decode(SMALL[:-1] + b"x", "b")


problems = st.tuples(st.integers(1, 512), st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1)).map(
    lambda sizes: Problem(Op.FORWARD, DType.BF16, *sizes)
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    listed=st.sets(problems, max_size=20),
    buckets=st.sets(st.integers(0, 31), min_size=1),
    time_ns=st.integers(1, 2**53 - 1),
    gpus=st.sets(st.sampled_from([None, 0, 1, 255]), min_size=1),
    seed=st.integers(0, 2**32),
)
def test_round_trip_of_any_choices(listed, buckets, time_ns, gpus, seed):
    rng = random.Random(seed)
    bundle = of_gpus()
    variants = tuple(bundle.variants[0]._replace(alignment=a) for a in (16, 1))
    choices = {
        problem: tuple(
            Choice(1 << b, rng.randrange(2), Source.MODELLED if gpu is None else Source.MEASURED, time_ns, gpu=gpu)
            for b in sorted(buckets)
            for gpu in sorted(gpus, key=lambda index: -1 if index is None else index)
        )
        for problem in listed
    }
    bundle = bundle._replace(variants=variants, cubins=bundle.cubins * 2, choices=choices, models=())
    assert codec.decode(codec.encode(bundle), "x") == bundle


def test_golden_bytes_are_what_the_builder_of_goldens_makes():
    golden = Path(__file__).parents[1] / "golden"
    for name in ("small", "edges", "gpus"):
        assert codec.encode(golden_bundles.GOLDEN[name]()) == (golden / f"format2-{name}.msgpack").read_bytes()
