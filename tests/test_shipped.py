"""The bundles in the wheel: sound, small, of these very kernels, and for sm_90 measured."""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from steps import steps

from pretuned.aot.bundle.verify import sound
from pretuned.aot.compile.cache import asked_for, made_of
from pretuned.aot.compile.pool import CompileJob, compile_all
from pretuned.aot.compile.revisions import source_sha256
from pretuned.aot.compile.shipped import Shipped
from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import Measured
from pretuned.aot.models.catalogue import catalogue
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import (
    CONFIG_LIMIT,
    Pool,
    low_rank_specs,
    row_kernel_specs,
    specs,
    starts_specs,
    to_compile,
)
from pretuned.aot.plan.plan import plan, planned_on
from pretuned.artifacts import packed
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.format import read_measured
from pretuned.artifacts.records import PRECISIONS, Choice, DType, Fusion, Gpu, LocalGpu, Op, Problem, RowOp, Source, Way
from pretuned.kernels.plans import with_plans
from pretuned.kernels.registry import ENTRIES, entry_of
from pretuned.kernels.rowops import RowOpSpec, weight_specs
from pretuned.kernels.search import of_training
from pretuned.kernels.spec import Schedule, Spec
from pretuned.runtime.dispatch.decide import Decision, Origin, decide
from pretuned.runtime.dispatch.places import Kind, Place, candidates_file, candidates_name
from pretuned.runtime.dispatch.snapshot import Snapshot

FOLDER = Path(__file__).parents[1] / "artifacts" / "bundles"
PRESSED = FOLDER.with_name("pressed")
BUNDLES = sorted(FOLDER.glob("*.msgpack"))
CANDIDATES = sorted(FOLDER.glob("*.msgpack.xz"))
JOINT = [(100, 103), (120, 121), (80, 86, 89), (90,)]  # which are in one file, by its name
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
DIGITS = 16  # of a SHA-256, in the lists of what memcheck and racecheck saw
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
CATALOGUE, FP16, OF_CODES = "catalogue-sm90", "fp16-sm90", "quantised-sm90"
OF_WEIGHTS = "weights-sm90"  # which no choice names, and no model
MEASURED = [  # bundle, a journal of it, the GPU
    (CATALOGUE, "catalogue-h100.journal.xz", H100),
    (CATALOGUE, "catalogue-h200.journal.xz", H200),
    (OF_CODES, "quantised-h100.journal.xz", H100),
    (OF_CODES, "quantised-h200.journal.xz", H200),
]
IN_PART = (FP16, "fp16-h100.journal.xz", H100)  # a third of the choices, all of the code
LISTS = {  # elsewhere the first
    CATALOGUE: ("shipped.txt", "shipped-sm90.txt", "flagships-bf16.txt", "glm-air.txt"),
    FP16: ("shipped-fp16.txt",),
    OF_CODES: (
        "quantised.txt",
        "quantised-more.txt",
        "flagships.txt",
        "flagships-more.txt",
        "zero-points.txt",
        "padded.txt",
        "fp8-channel.txt",
        "mxfp8.txt",
        "padded-more.txt",
        "fp8-channel-more.txt",
        "deepseek-ep8.txt",
        "fp8-training.txt",
    ),
}
ON_ONE_ALONE = {
    H100: ("flagships-bf16.txt", "flagships.txt", "flagships-more.txt", "padded.txt"),
    H200: ("padded-more.txt", "fp8-channel-more.txt", "fp8-training.txt"),
}
LATER = (
    "flagships-h100.journal.xz",
    "padded-h100.journal.xz",
    "padded-more-h200.journal.xz",
    "fp8-training-h200.journal.xz",
    *(f"{name}-h{gpu}.journal.xz" for name in ("zero-points", "fp8-channel", "mxfp8", "anew") for gpu in (100, 200)),
)  # journals of lists that are measured by themselves
# Of the cells that a GPU is to have: another's choices stand for the rest. Modelled are fp8_channel of flagships*.txt,
# one padded width there on the H100, and 37 of zero-points.txt, where an untimed variant looks faster than all timed.
MEASURED_PART = 0.977
# Kernels whose tests compile a variant that ships anyway, and compare it: the file, in tests.
COMPARED_ELSEWHERE = {
    "rows_specialized": "aot/compile/test_ptx.py",
    "rows_fitted": "aot/compile/test_ptx.py",
    "weight_specialized": "aot/compile/test_ptx.py",
    "rows_wna16": "kernels/hopper_w4a16/test_rows.py",
    "rows_wna16_zero": "kernels/hopper_w4a16/test_rows.py",
    "rows_wna16_mx8": "kernels/hopper_w4a16/test_rows.py",
    "rows_w8a8": "kernels/hopper_w8a8_block/test_rows.py",
    "rows_w8a8_starts": "kernels/hopper_w8a8_block/test_starts.py",
    "rows_w8a8_channel": "kernels/hopper_w8a8_channel/test_rows.py",
}
MOST_CONFIGS = 24  # of all builds and GPUs: they have most in common
MOST_BYTES = 45_500_000
MOST_PRESSED_BYTES = 5_200_000
MOST_CANDIDATE_BYTES = 11_100_000


def models_of(name: str, gpu: str | None = None) -> list[str]:
    """The lists that a bundle was built of; those that were measured on a GPU."""
    others = {name for other, lists in ON_ONE_ALONE.items() if gpu not in (None, other) for name in lists}
    return [str(RESULTS.parent / listed) for listed in LISTS.get(name, ("shipped.txt",)) if listed not in others]


def listed_for(sm: int) -> list[str]:
    """Return the lists of models that the candidates for a capability are compiled of."""
    lists = [RESULTS.parent / "candidates.txt", RESULTS.parent / f"candidates-sm{sm}.txt"]
    return [str(path) for path in lists if path.exists()]


def test_which_there_are_and_how_large() -> None:
    capabilities = (100, 103, 120, 121, 80, 86, 89, 90)
    names = [*(f"catalogue-sm{sm}" for sm in capabilities), FP16, OF_CODES, OF_WEIGHTS]
    assert [path.stem for path in BUNDLES] == names
    assert sum(path.stat().st_size for path in BUNDLES) < MOST_BYTES
    assert [path.name for path in CANDIDATES] == [candidates_name(*sms) for sms in JOINT]
    assert [packed.capabilities(path.read_bytes(), path.name) for path in CANDIDATES] == JOINT
    assert sum(path.stat().st_size for path in CANDIDATES) < MOST_CANDIDATE_BYTES


def test_each_is_what_the_repository_holds_compressed() -> None:
    pressed = sorted(PRESSED.iterdir())
    assert [path.name for path in pressed] == [f"{path.name}.xz" for path in BUNDLES]
    for path, packed_path in zip(BUNDLES, pressed, strict=True):
        assert b"".join(packed.unpack(packed_path.read_bytes(), packed_path.name)) == path.read_bytes(), (
            f"{path.name} is of another state of the repository: pip install -e . unpacks it anew; if it is newer, "
            "press it (docs/use/build.md, What ships)"
        )
    assert sum(value.stat().st_size for value in pressed) < MOST_PRESSED_BYTES


@pytest.mark.parametrize(
    "name", [FP16, "catalogue-sm80", *(pytest.param(name, marks=pytest.mark.slow) for name in (CATALOGUE, OF_CODES))]
)
def test_plans_are_those_that_the_builder_makes_of_the_times(name: str) -> None:
    """In tests/benchmarks/test_decisions.py is what dispatch makes of them."""
    with open_bundle(FOLDER / f"{name}.msgpack") as file:
        bundle = file.load()
    assert with_plans(bundle).choices == bundle.choices, "python benchmarks/run.py replan --write makes them anew"
    ways = {row.way for choices in bundle.choices.values() for choice in choices for row in choice.plan}
    by_index = {Way.ROWS_FIRST_BY_INDEX} if name == CATALOGUE else set()
    first = {Way.ROWS_FIRST, Way.FUSED_SILU} if name in (CATALOGUE, FP16) else set()
    assert ways == first | by_index | ({Way.QUANTISED_X} if name == OF_CODES else set())


@pytest.mark.parametrize("sm", sorted(sm for sms in JOINT for sm in sms))
def test_the_candidates_are_all_that_would_be_compiled_of_these_kernels(sm: int) -> None:
    """No more, and no less: what ``aot compile`` would be asked for the lists of benchmarks today."""
    path = candidates_file(FOLDER, sm)
    assert path is not None
    anew = f"{path.name} is stale: make it anew (docs/use/build.md, What ships)"
    with open_bundle(path) as bundle:
        assert bundle.target.sm == sm
        for kernel in bundle.kernels:
            assert kernel.source_sha256.hex() == source_sha256(kernel.name), f"{anew}: {kernel.name} changed"
            assert kernel.revision == ENTRIES[kernel.name].revision, f"{anew}: {kernel.name} has another revision"
        there = {made_of(variant) for variant in bundle.variants()}
    listed = plan(load_models(listed_for(sm)).shapes)
    problems = planned_on(listed, (sm,)).problems
    beside = *low_rank_specs(problems, sm, Pool()), *starts_specs(problems, sm), *row_kernel_specs(problems, sm, Pool())
    wanted = {asked_for(spec) for spec in (*specs(problems, sm, Pool()), *beside)}
    assert there == wanted, anew


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "low_rank", "left_out"),
    [
        (90, False, tuple(COMPARED_ELSEWHERE)),
        *(
            pytest.param(*case, (), marks=pytest.mark.nightly)
            for case in ((90, False), (90, True), (80, False), (80, True))
        ),
    ],
)
def test_the_candidates_are_what_this_triton_compiles(sm: int, low_rank: bool, left_out: tuple[str, ...]) -> None:
    """The smallest of each kernel, byte for byte: what is no kernel's source decides its code, too."""

    def size(spec: Any) -> tuple[int, ...]:
        c = spec.config
        return (c.schedule is Schedule.PINGPONG, c.block_m * c.block_n * c.block_k) if isinstance(spec, Spec) else ()

    shipped = Shipped.in_packages(sm)
    listed = plan(load_models(listed_for(sm)).shapes)
    wanted = to_compile(planned_on(listed, (sm,)).problems, sm, Pool(), low_rank=True)
    able = [spec for spec in wanted if (Fusion.LOW_RANK in spec.fusion) is low_rank]
    smallest = {entry_of(spec).name: spec for spec in sorted(able, key=size, reverse=True)}
    assert smallest.keys() >= set(left_out)
    jobs = [CompileJob(spec, sm) for kernel, spec in smallest.items() if kernel not in left_out]
    results = compile_all(jobs)
    for result in results:
        ready = shipped.get(result.job.spec, sm)
        assert result.compiled is not None, result.reason
        assert ready is not None
        assert result.compiled.cubin == ready.cubin, f"candidates-sm{sm} are stale: {result.job.spec}"


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.stem)
def test_every_one_is_sound_and_of_these_kernels(path: Path) -> None:
    bundle = sound(str(path))
    for kernel in bundle.kernels:
        assert kernel.source_sha256.hex() == source_sha256(kernel.name), (
            f"{path.name} was built of another {kernel.name}: build it anew (docs/use/build.md, What ships)"
        )
    wanted = {OF_CODES: {Op.FORWARD, Op.DX}, OF_WEIGHTS: set()}.get(path.stem, set(Op))
    assert {problem.op for problem in bundle.choices} == wanted


def test_the_kernels_of_weights_are_those_of_every_format() -> None:
    """Made anew by: python -m pretuned.aot.compile.weights --sm 90 -o artifacts/bundles/weights-sm90.msgpack."""
    with open_bundle(FOLDER / f"{OF_WEIGHTS}.msgpack") as file:
        variants = file.load().variants
    gemms, rows = of_training(90)
    assert {made_of(variant) for variant in variants} == {
        asked_for(spec) for spec in (*weight_specs(tuple(DType)), *gemms, *rows)
    }
    # With 168 registers ACTIVATION_GRAD_CODES spills nothing, and takes 1.16 times as long: half as many programs fit.
    most = {RowOp.ACTIVATION_GRAD_CODES: 112}
    assert all(variant.spill_bytes <= most.get(variant.op, 8) for variant in variants)


@pytest.mark.parametrize("path", sorted(set(COMPARED_ELSEWHERE.values())))
def test_kernels_are_compared_elsewhere(path: str) -> None:
    text = (Path(__file__).parent / path).read_text()
    assert "assert_as_shipped(" in text or "ptx_for_hopper(" in text


@pytest.mark.slow
def test_the_kernels_of_weights_are_what_this_triton_compiles() -> None:
    """All but dW of codes: tests/kernels/hopper_w8a8_block/test_weight.py."""
    with open_bundle(FOLDER / f"{OF_WEIGHTS}.msgpack") as file:
        bundle = file.load()
    there = dict(zip(map(made_of, bundle.variants), bundle.cubins, strict=True))
    _, rows = of_training(90)
    wanted = [RowOpSpec(op, DType.FP8_BLOCK) for op in (RowOp.MOVE_CODES, RowOp.QUANTIZE_WEIGHTS)]
    for result in compile_all([CompileJob(spec, 90) for spec in (*wanted, *rows)]):
        assert result.compiled is not None, result.reason
        assert result.compiled.cubin == there[asked_for(result.job.spec)], f"{OF_WEIGHTS} is stale: {result.job.spec}"


@pytest.mark.parametrize(
    "path", [bundle for bundle in BUNDLES if bundle.stem != OF_WEIGHTS], ids=lambda path: path.stem
)
def test_every_one_is_of_the_models_that_are_listed(path: Path) -> None:
    """And ``explain`` may name a model of theirs to the builder."""
    listed = load_models(models_of(path.stem))
    with open_bundle(path) as bundle:
        built = {(model.name, model.tp, model.ep, model.top_k, model.dtype) for model in bundle.models()}
        wanted = planned_on(plan(listed.shapes), (bundle.target.sm,)).models
    assert built == {(model.name, model.tp, model.ep, model.top_k, model.dtype) for model in wanted}
    assert {name for name, *_ in built} <= set(catalogue())


def test_each_published_format_with_kernels_has_choices() -> None:
    """Of a model of the catalogue as it is published: whole, or split as it is served where one GPU can't hold it."""
    with open_bundle(FOLDER / f"{OF_CODES}.msgpack") as bundle:
        there = {(problem, choice.bucket) for problem in bundle.problems() for choice in bundle.find(problem)}
    formats = [
        (id_, format)
        for id_, entry in catalogue().items()
        for format in entry.formats
        if format in PRECISIONS and PRECISIONS[format].quantised
    ]
    splits = ("", "tp=4", "ep=8")
    missing = [
        (id_, format)
        for id_, format in formats
        if not any(is_in(there, f"{id_} weights={format} ops=forward {split}") for split in splits)
    ]
    assert not missing
    assert len(formats) > 20


def is_in(there: set[tuple[Problem, int]], spec: str) -> bool:
    """Return True if these are all cells of a spec; a spec that no GPU holds, or that can't be split so, has none."""
    try:
        buckets = planned_on(plan(load_models([spec]).shapes), (90,)).buckets
    except InputError:
        return False
    return {(problem, bucket) for problem, row in buckets.items() for bucket in row} <= there


@functools.lru_cache(maxsize=1)
def choices_of(name: str) -> tuple[tuple[Gpu, ...], list[tuple[Problem, Choice]]]:
    """The GPUs of a bundle and all of its choices."""
    with open_bundle(FOLDER / f"{name}.msgpack") as bundle:
        return bundle.gpus, [(problem, choice) for problem in bundle.problems() for choice in bundle.find(problem)]


@functools.lru_cache(maxsize=2)
def cells_of(*lists: str) -> Mapping[Problem, tuple[int, ...]]:
    """Problem -> buckets that are to be measured on 9.0 of such lists."""
    return planned_on(plan(load_models(lists).shapes), (90,)).buckets


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gpu"), [(name, gpu) for name, _, gpu in MEASURED])
def test_those_for_sm_90_were_measured(name: str, gpu: str) -> None:
    gpus, choices = choices_of(name)
    assert [gpu.name for gpu in gpus] == [H100, H200]
    wanted = cells_of(*models_of(name, gpu))
    here = {(problem, choice.bucket) for problem, choice in choices if choice.gpu == [H100, H200].index(gpu)}
    first = cells_of(*models_of(name)[:1])
    left = [(problem, bucket) for problem, row in wanted.items() for bucket in row if (problem, bucket) not in here]
    assert len(left) <= (1 - MEASURED_PART) * sum(map(len, wanted.values()))
    assert len([cell for cell in left if cell[1] in first.get(cell[0], ())]) <= 2, "two do not fit an H100's memory"
    modelled = {(problem, choice.bucket) for problem, choice in choices if choice.source is not Source.MEASURED}
    assert not modelled & here, "a merge drops them"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "journal", "gpu"), [*MEASURED, IN_PART])
def test_every_specialised_kernel_was_right_on_the_gpu(name: str, journal: str, gpu: str) -> None:
    """No interpreter runs them: what the journal judged on the GPU are these very cubins, of this very source.

    Or their trials, under memcheck on an H100.
    """
    contents = read_journal(RESULTS / journal)
    assert contents.header.gpu.name == gpu
    for kernel in contents.header.kernels:
        assert kernel.source_sha256.hex() == source_sha256(kernel.name), (
            f"{kernel.name} changed since it was judged on {gpu}. On one: aot measure candidates.msgpack --models "
            f"benchmarks/shipped.txt --journal {journal.removesuffix('.xz')} (docs/use/build.md, What ships)"
        )
    also = LATER if name == OF_CODES else ()  # a variant that is right on one card of a capability is so on another
    records = [
        record for each in (contents, *(read_journal(RESULTS / record) for record in also)) for record in each.records
    ]
    timings = (timing for record in records if isinstance(record, Measured) for timing in record.timings)
    judged = {timing.variant.hex()[:DIGITS] for timing in timings}
    if gpu == H100:
        judged |= {line.split()[0] for line in (RESULTS / "memcheck-cubins.txt").read_text().splitlines()}
    with open_bundle(FOLDER / f"{name}.msgpack") as bundle:
        specialised = [
            variant
            for variant in bundle.variants()
            if variant.kernel.endswith(
                ("_specialized", "_fitted", "_wna16", "_wna16_zero", "_wna16_mx8", "_w8a8_channel")
            )
        ]
    plain = {"rows_specialized", "weight_specialized"}
    kernels = {
        CATALOGUE: plain | {"rows_fitted"},
        FP16: plain,
        OF_CODES: {"rows_wna16", "rows_wna16_zero", "rows_wna16_mx8", "rows_w8a8_channel"},
    }
    assert {variant.kernel for variant in specialised} == kernels[name]
    assert {variant.cubin_sha256.hex()[:DIGITS] for variant in specialised} <= judged


@pytest.mark.slow
def test_where_code_was_tested_is_reported_by_few_of_its_choices() -> None:
    """A first call of a shape that no choice is for asks it, of code that the cost model has chosen."""
    sizes: dict[int, int] = {}
    with open_bundle(FOLDER / f"{CATALOGUE}.msgpack") as bundle:
        problems = bundle.problems()
        named = [
            i for i, variant in enumerate(bundle.variants()) if isinstance(variant.op, Op) and variant.alignment > 1
        ]
        choices = [choice for problem in problems for choice in bundle.find(problem) if choice.gpu is not None]
    cells = Counter(i for choice in choices for i in (choice.variant, choice.runner_up))
    for i in named:
        with open_bundle(FOLDER / f"{CATALOGUE}.msgpack") as bundle:
            sizes[i] = steps(lambda bundle=bundle, i=i: bundle.tested_on(i), of=read_measured)
            assert bundle.tested_on(i) is not None
    assert 1 <= statistics.median(sizes.values()) < len(problems) / 100
    # (What one cell alone names may stand anywhere.)
    assert max(reads for i, reads in sizes.items() if cells[i] > 1) < len(problems) / 4
    assert sum(cells[i] == 1 for i in named) <= 1


def test_each_gpu_has_the_choices_of_its_own_kind() -> None:
    """Of the bundle for sm_90, and another GPU of the capability those of the one most like it."""
    bundle_set = Snapshot([Place(Kind.INSTALLED, FOLDER)])
    problem = Problem(Op.DX, DType.BF16, 8, 28672, 4096)  # of Mixtral-8x7B
    large = problem._replace(E=16, N=21504, K=6144)  # measured on H200s alone
    for name, memory_mib, wanted in (
        (H200, 143155, H200),
        (H100, 81079, H100),
        ("NVIDIA H100 NVL", 95830, H100),
        ("NVIDIA GH200 144G HBM3e", 146831, H200),
    ):
        local = LocalGpu(90, Gpu(name, 132, memory_mib, 13000))
        decided = decide(bundle_set, problem, 16384, local)
        assert isinstance(decided, Decision)
        assert decided.chosen.usable.path.stem == CATALOGUE
        assert decided.chosen.gpu is not None
        assert decided.chosen.gpu.name == wanted
        assert (decided.chosen.origin is Origin.THIS_GPU) == (name == wanted)
        decided = decide(bundle_set, large, 8192, local)
        assert isinstance(decided, Decision)
        assert decided.chosen.gpu is not None
        assert decided.chosen.gpu.name == H200
        assert (decided.chosen.origin is Origin.THIS_GPU) == (name == H200)


@pytest.mark.parametrize("gpu", [H100, H200])
def test_no_more_configs_than_a_build_ships(gpu: str) -> None:
    with open_bundle(FOLDER / f"{CATALOGUE}.msgpack") as bundle:
        named = {
            i
            for problem in bundle.problems()
            for choice in bundle.find(problem)
            if choice.gpu == [H100, H200].index(gpu)
            for i in (choice.variant, choice.runner_up)
        }
        variants = bundle.variants()
    gemms = [
        variant
        for i, variant in enumerate(variants)
        if isinstance(variant.op, Op) and (i in named or variant.alignment == 1)
    ]
    builds = len(models_of(CATALOGUE))
    assert max(len({gemm.config for gemm in gemms if gemm.op is op}) for op in Op) <= builds * CONFIG_LIMIT
    assert max(len({variant.config for variant in variants if variant.op is op}) for op in Op) <= MOST_CONFIGS
