from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import misbehaving
import pytest
from building import alone, take_row_kernels

from pretuned.aot.build.build import build
from pretuned.aot.build.options import BuildOptions, Observers
from pretuned.aot.bundle.verify import verify
from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.compile.pool import CompileResult
from pretuned.aot.compile.revisions import source_sha256
from pretuned.aot.compile.shipped import Shipped
from pretuned.aot.compile.triton import compile_variant
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import Family, Pool, by_code, families, specs
from pretuned.aot.plan.plan import BuildPlan, plan
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import CompileError, HostError, InputError
from pretuned.artifacts.locking import lock
from pretuned.artifacts.records import PLAIN_DTYPES, Bundle, DType, Fusion, Layout, Op, Problem, RowOp, Source, Variant
from pretuned.kernels.arch import arch_of
from pretuned.kernels.cost import rejection
from pretuned.kernels.entry import LAUNCH_ABI, has_aligned_rows
from pretuned.kernels.rowops import MAKES_CODES, WEIGHT_OPS
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Cache, Config, Schedule, Spec, TileRows

pytestmark = pytest.mark.slow

Make = Callable[..., BuildOptions]


@pytest.fixture(scope="session")
def bundles(
    tmp_path_factory: pytest.TempPathFactory, compiled_dir: Path, small_space: Pool, small_plan: BuildPlan
) -> dict[int, Bundle]:
    """A real build for 80 and 90, read back whole."""
    out = tmp_path_factory.mktemp("built")
    options = BuildOptions(
        out, cache=CompileCache(compiled_dir), space=small_space, compile_one=misbehaving.without_torch
    )
    with alone(compiled_dir.parent / "small.lock"):
        report = build(small_plan, (80, 90), options)
    assert [bundle.failed for bundle in report.bundles] == [0, 0]
    return {bundle.target.sm: codec.decode(bundle.path.read_bytes(), str(bundle.path)) for bundle in report.bundles}


def test_the_files_are_sound_bundles(bundles: dict[int, Bundle], options: Make, small_plan: BuildPlan) -> None:
    report = build(small_plan, (80, 90), options(name="mine"))
    assert [bundle.path.name for bundle in report.bundles] == ["mine-sm80.msgpack", "mine-sm90.msgpack"]
    assert [str(bundle.target) for bundle in report.bundles] == ["sm_80", "sm_90a"]
    for bundle in report.bundles:
        assert verify(str(bundle.path)).variants == bundle.variants
        assert bundle.size_bytes == bundle.path.stat().st_size
        with open_bundle(bundle.path) as opened:
            assert codec.encode(opened.load()) == bundle.path.read_bytes()


def test_there_is_a_choice_for_every_problem_and_bucket(bundles: dict[int, Bundle], small_plan: BuildPlan) -> None:
    for bundle in bundles.values():
        assert list(bundle.choices) == list(small_plan.problems)
        assert bundle.models == small_plan.models
        for problem, choices in bundle.choices.items():
            assert tuple(choice.bucket for choice in choices) == small_plan.buckets[problem]
            for choice in choices:
                assert (choice.source, choice.gpu) == (Source.MODELLED, None)
                assert choice.time_ns > 0
                variant = bundle.variants[choice.variant]
                assert variant.alignment == (16 if has_aligned_rows(problem) else 1)
                if choice.runner_up is not None:
                    assert choice.runner_up != choice.variant
                    assert choice.runner_up_ns is not None
                    assert choice.runner_up_ns >= choice.time_ns


def test_unaligned_problems_run_on_the_fallback(bundles: dict[int, Bundle]) -> None:
    problem = Problem(Op.FORWARD, DType.BF16, 8, 250, 250)
    assert problem in bundles[80].choices
    assert not has_aligned_rows(problem)
    assert has_aligned_rows(Problem(Op.FORWARD, DType.BF16, 8, 256, 256))
    assert not has_aligned_rows(Problem(Op.FORWARD, DType.BF16, 8, 250, 256))
    assert has_aligned_rows(Problem(Op.FORWARD, DType.FP32, 8, 252, 256))


def test_what_a_bundle_says_of_its_making(bundles: dict[int, Bundle]) -> None:
    for sm, bundle in bundles.items():
        assert (bundle.target.sm, bundle.target.arch_specific) == (sm, sm == 90)
        assert bundle.producer.compile_options == ("enable_fp_fusion=True", "line_info=off")
        assert bool(bundle.producer.held_against) is (sm == 90)  # for which measured choices are installed
        assert re.fullmatch(r"\d+\.\d+", bundle.producer.ptxas)
        assert {kernel.name for kernel in bundle.kernels} == {variant.kernel for variant in bundle.variants}
        for kernel in bundle.kernels:
            assert kernel.source_sha256.hex() == source_sha256(kernel.name)
        for variant, cubin in zip(bundle.variants, bundle.cubins, strict=True):
            assert hashlib.sha256(cubin).digest() == variant.cubin_sha256
            assert variant.abi == LAUNCH_ABI
        assert {variant.alignment for variant in bundle.variants} == {1, 16}
        assert bundle.min_driver == 12000


def test_a_second_build_compiles_nothing(bundles: dict[int, Bundle], options: Make, small_plan: BuildPlan) -> None:
    first = build(small_plan, (80, 90), options())
    before = [(bundle.path.stat().st_mtime_ns, bundle.path.stat().st_ino) for bundle in first.bundles]
    second = build(small_plan, (80, 90), options(compile_one=misbehaving.must_not_run))
    assert [(bundle.compiled, bundle.failed, bundle.unchanged) for bundle in second.bundles] == [(0, 0, True)] * 2
    assert [(bundle.path.stat().st_mtime_ns, bundle.path.stat().st_ino) for bundle in second.bundles] == before


_BUILD = """
import sys
from pathlib import Path
if __name__ == "__main__":  # the workers run this file, too
    sys.path.append(sys.argv[4])
    from conftest import ODD, SMALL, _aligned, _fallbacks
    from pretuned.aot.build.build import build
    from pretuned.aot.build.options import BuildOptions
    from pretuned.aot.compile.cache import CompileCache
    from pretuned.aot.models.load import load_models
    from pretuned.aot.plan.plan import plan
    from pretuned.aot.plan.families import Pool
    from pretuned.artifacts.records import Op
    models = [SMALL, ODD] if sys.argv[3] == "in order" else [ODD, SMALL]
    cache = CompileCache(Path(sys.argv[6])) if sys.argv[6:] else None
    options = BuildOptions(Path(sys.argv[1]), workers=int(sys.argv[2]), cache=cache, space=Pool(_aligned, _fallbacks))
    build(plan(load_models(models, (Op.FORWARD,)).shapes), [int(one) for one in sys.argv[5].split(",")], options)
    assert "torch" not in sys.modules, "the builder imported torch"
    assert "triton" not in sys.modules, "the builder itself imported triton"
"""


@pytest.mark.parametrize(
    ("workers", "order", "zone", "seed", "user", "sms", "row_kernels"),
    [
        pytest.param(1, "in order", "UTC", 7, [], "80,90", True, marks=pytest.mark.nightly),
        (3, "reversed", "Pacific/Apia", 8, ["unshare", "--map-user=12345", "--map-group=12345"], "90", False),
        pytest.param(8, "reversed", "UTC", 9, [], "90", True, marks=pytest.mark.nightly),
    ],
)
def test_the_same_bytes_from_any_number_of_workers_place_zone_seed_and_user(
    bundles: dict[int, Bundle],
    tmp_path: Path,
    workers: int,
    order: str,
    zone: str,
    seed: int,
    user: list[str],
    sms: str,
    row_kernels: bool,
) -> None:
    """By day ``row_kernels`` are taken as they ship: tests/test_shipped.py compiles these."""
    script, home = tmp_path / "build.py", tmp_path / f"place-{seed}"
    script.write_text(_BUILD)
    home.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(home),
        "TZ": zone,
        "PYTHONHASHSEED": str(seed),
    }
    words = [home / "out", str(workers), order, Path(__file__).parents[1], sms]
    if not row_kernels:
        take_row_kernels(home / "cache")
        words.append(home / "cache")
    done = subprocess.run(
        [*user, sys.executable, script, *words],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for sm in map(int, sms.split(",")):
        assert (home / "out" / f"pretuned-sm{sm}.msgpack").read_bytes() == codec.encode(bundles[sm])


def test_failed_variants_are_reported_and_not_fatal(options: Make, small_plan: BuildPlan) -> None:
    def aligned(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
        return (Config(16, 32, 64, 4, 2), Config(16, 32, 64, 4, 5))

    space = Pool(aligned, options().space.fallbacks)
    (bundle,) = build(small_plan, (80,), options(space=space, compile_one=misbehaving.refuses)).bundles
    assert bundle.failed == 1
    assert [dropped.reason for dropped in bundle.dropped] == [
        "forward bf16 16x32x64 w4 s5 g8 persistent for sm_80: no such instruction"
    ]
    assert bundle.to_dict()["failed"] == 1
    # And the three passes of a forward, aligned and not; the list of rows, the sort, and clear.
    assert verify(str(bundle.path)).variants == 6 + 6 + 3


def test_a_variant_that_does_not_fit_is_pruned_with_its_figures(options: Make, small_plan: BuildPlan) -> None:
    def aligned(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
        return (Config(16, 32, 64, 4, 2), Config(128, 128, 64, 8, 8))

    (bundle,) = build(small_plan, (80,), options(space=Pool(aligned, options().space.fallbacks))).bundles
    assert bundle.pruned == 2  # plain, and moving rows
    assert {dropped.reason for dropped in bundle.dropped} == {"229376 bytes of shared memory, sm_80 has 166912"}


def test_nothing_is_written_where_an_op_has_no_variant_left(
    options: Make, small_plan: BuildPlan, bundles: dict[int, Bundle]
) -> None:
    first = build(small_plan, (80, 90), options())
    before = [bundle.path.read_bytes() for bundle in first.bundles]
    with pytest.raises(CompileError, match=r"(?s)sm_80: not one variant of forward bf16 can be used.*no such inst"):
        build(small_plan, (80, 90), options(cache=None, compile_one=misbehaving.refuses_all))
    assert [bundle.path.read_bytes() for bundle in first.bundles] == before
    left = {path.name for path in options().out.iterdir()} - {".pretuned.lock"}
    assert left == {bundle.path.name for bundle in first.bundles}


def test_the_reasons_to_reject_a_variant(bundles: dict[int, Bundle]) -> None:
    def altered(variant: Variant, **figures: int) -> str | None:
        return rejection(variant._replace(**figures), arch_of(80))

    aligned = next(variant for variant in bundles[80].variants if variant.alignment == 16)
    fallback = next(variant for variant in bundles[80].variants if variant.alignment == 1)
    assert altered(aligned) is None
    assert altered(aligned, shared_bytes=163 * 1024) is None
    assert altered(aligned, shared_bytes=163 * 1024 + 1) == "166913 bytes of shared memory, sm_80 has 166912"
    assert altered(aligned, threads=512, registers=128) is None
    assert altered(aligned, threads=512, registers=255) == "255 registers x 512 threads, sm_80 has 65536 registers"
    assert altered(aligned, spill_bytes=64) is None
    assert altered(aligned, spill_bytes=65) == "65 bytes a thread are spilled, at most 64 are accepted"
    assert altered(fallback, spill_bytes=4096) is None  # any N and K run, if slowly
    assert altered(fallback, shared_bytes=1 << 20) is not None


def test_one_class_of_experts_serves_512_and_another_any_number(small_space: Pool) -> None:
    def classes(*experts: int) -> set[tuple[int, int]]:
        problems = [Problem(Op.FORWARD, DType.BF16, E, 256, 256) for E in experts]
        return {(spec.alignment, spec.max_experts) for spec in specs(problems, 80, small_space)}

    assert classes(1, 8, 512) == {(16, 512), (1, 65536)}
    assert classes(8, 513) == {(16, 65536), (1, 65536)}


def test_what_counts_few_experts_alone_still_serves_those_beside_a_larger_family() -> None:
    def largest(*experts: int) -> set[int]:
        problems = [Problem(Op.FORWARD, DType.BF16, E, 256, 256) for E in experts]
        listed = specs(problems, 90, Pool())
        return {
            spec.max_experts
            for spec in listed
            if spec.alignment == 16 and (spec.config.schedule.warp_specialized or spec.config.schedule is Schedule.TILE)
        }

    assert largest(8) == largest(8, 513) == {512}
    assert largest(513) == set()


def test_families_keep_ops_and_dtypes_apart(small_space: Pool) -> None:
    problems = [Problem(op, dtype, 8, 256, 256) for op in Op for dtype in DType if dtype in PLAIN_DTYPES]
    assert [len(members) for members in families(problems).values()] == [1] * 12
    assert len(specs(problems, 80, small_space)) == 12 * 3


def test_what_is_the_same_code_is_compiled_once(small_space: Pool) -> None:
    forms = [(Op.FORWARD, fusion) for fusion in (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)]
    problems = [
        Problem(op, DType.BF16, 8, 256, 256, layout, fusion)
        for op, fusion in forms
        for layout in (Layout.NK, Layout.KN)
    ]
    # Two aligned candidates and a fallback each. Through pointers what gathers is what scatters.
    assert [len(by_code(specs(problems[::2], sm, small_space), sm)) for sm in (80, 90)] == [6, 8]
    backward = [problem._replace(op=Op.DX) for problem in problems]
    once = by_code(specs([*problems, *backward], 90, small_space), 90)
    assert len(once) == 16  # a forward of w [E, K, N] is dX of [E, N, K], and has no variants of its own
    assert sorted(map(len, once)) == [1] * 14 + [2] * 2
    for first, *rest in once:
        assert {spec.layout for spec in (first, *rest)} == {Layout.NK}
        assert {Family.of(spec) for spec in rest}.isdisjoint({Family.of(first)})


def test_moving_rows_has_one_candidate_of_a_kind_and_tile_size() -> None:
    for sm in (80, 90, 120):
        plain, gathers, scatters = (
            Pool().candidates(Family(Op.FORWARD, DType.BF16, Layout.NK, fusion), sm)
            for fusion in (Fusion.NONE, Fusion.GATHER, Fusion.SCATTER)
        )
        tiles = [
            (
                gather.block_m,
                gather.block_n,
                gather.block_k,
                gather.schedule.warp_specialized,
                gather.cache is Cache.EVICT_FIRST,
            )
            for gather in gathers
        ]
        assert gathers == tuple(
            config for config in scatters if config.schedule is not Schedule.PINGPONG and config.rows is TileRows.FIXED
        )
        assert len(set(tiles)) == len(tiles) < len(plain)
        rest = [
            config for config in plain if config.schedule is not Schedule.PINGPONG and config.rows is TileRows.FIXED
        ]  # which gather none
        assert set(tiles) == {
            (
                config.block_m,
                config.block_n,
                config.block_k,
                config.schedule.warp_specialized,
                config.cache is Cache.EVICT_FIRST,
            )
            for config in rest
        }
        assert list(gathers) == [config for config in plain if config in gathers]


@pytest.fixture(scope="session")
def training(
    tmp_path_factory: pytest.TempPathFactory, compiled_dir: Path, small_space: Pool, training_plan: BuildPlan
) -> dict[int, Bundle]:
    """A real build of all ops for 80 and 90, with one aligned candidate and one fallback."""
    space = Pool(lambda op, dtype, sm: small_space.aligned(op, dtype, sm)[:1], small_space.fallbacks)
    options = BuildOptions(tmp_path_factory.mktemp("all"), cache=CompileCache(compiled_dir), space=space)
    report = build(training_plan, (80, 90), options)
    for bundle in report.bundles:
        assert verify(str(bundle.path)).variants == bundle.variants
    # NONE and the moving form of the forward and of dX (in the other layout they are each other's), aligned and not,
    # and dW; on 90 what gathers is apart. And four passes, the list of rows, the sort, and clear.
    assert [bundle.compiled + bundle.cached for bundle in report.bundles] == [2 * 2 * 2 + 2 + 11, 2 * (2 + 3) + 2 + 11]
    return {bundle.target.sm: codec.decode(bundle.path.read_bytes(), str(bundle.path)) for bundle in report.bundles}


def test_training_has_its_own_variant_for_every_form(training: dict[int, Bundle]) -> None:
    for sm, bundle in training.items():
        names = {(Family.of(variant), variant.alignment) for variant in bundle.variants}
        assert len(names) == len(bundle.variants) == 2 * (3 * 2 + 1 + 4) + 3
        for problem, choices in bundle.choices.items():
            for choice in choices:
                assert Family.of(bundle.variants[choice.variant]) == Family.of(problem)
        for variant in bundle.variants:
            maps = [tensor_map.argument for tensor_map in variant.tensor_maps]
            if sm == 80 or variant.alignment == 1:
                assert maps == []
            elif variant.op is Op.DW:
                assert maps == ["dy", "x"]
            elif isinstance(variant.op, RowOp):
                assert maps == []
            else:
                assert maps == (["w"] if variant.fusion is Fusion.GATHER else ["x", "w"])
        others = (*MAKES_CODES, *WEIGHT_OPS)  # which quantised weights alone have
        passes = {op.value for op in RowOp if op not in others}
        assert {kernel.name for kernel in bundle.kernels} == {"rows", "weight", *passes}


def test_shared_code_is_the_same_bytes_as_compiled_by_itself(training: dict[int, Bundle]) -> None:
    bundle = training[80]
    at = next(
        i
        for i, variant in enumerate(bundle.variants)
        if (variant.op, variant.fusion, variant.alignment) == (Op.DX, Fusion.SCATTER, 16)
    )
    variant = bundle.variants[at]
    spec = Spec(variant.op, variant.dtype, Config.from_pairs(variant.config), variant.layout, variant.fusion)
    gathers = spec._replace(fusion=Fusion.GATHER)
    assert by_code([gathers, spec], 80) == ((gathers, spec),)  # so it was not compiled as itself
    alone = compile_variant(spec, 80)
    assert (alone.variant, alone.cubin) == (variant, bundle.cubins[at])


def test_at_most_sixteen_configs_a_family_ship(options: Make, bundles: dict[int, Bundle]) -> None:
    shapes = load_models(["Qwen/Qwen3-30B-A3B"], (Op.FORWARD,)).shapes
    (bundle,) = build(plan(shapes), (80,), options()).bundles
    variants = codec.decode(bundle.path.read_bytes(), "it").variants
    assert len({variant.config for variant in variants}) <= 16
    assert len({Family.of(variant) for variant in variants if isinstance(variant.op, Op)}) == 3


def test_observers_hear_of_every_variant(bundles: dict[int, Bundle], options: Make, small_plan: BuildPlan) -> None:
    totals: list[int] = []
    heard: list[CompileResult] = []
    build(small_plan, (80, 90), options(), Observers(totals.append, heard.append))
    assert totals == [17 + 15]
    assert len(heard) == 17 + 15
    assert all(result.cached for result in heard)


def test_an_interrupted_build_says_what_is_kept(
    bundles: dict[int, Bundle], options: Make, small_plan: BuildPlan
) -> None:
    def interrupt(result: CompileResult) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="interrupted: 15 of 15 variants are compiled and kept; run the same"):
        build(small_plan, (80,), options(), Observers(on_result=interrupt))
    with pytest.raises(KeyboardInterrupt, match="without a compile cache nothing is kept"):
        build(small_plan, (80,), options(cache=None), Observers(on_result=interrupt))
    assert not list(options().out.glob("*.msgpack"))


def test_a_second_build_in_the_same_directory_waits_and_says_for_whom(
    bundles: dict[int, Bundle], options: Make, small_plan: BuildPlan, tmp_path: Path
) -> None:
    out = options().out
    out.mkdir()
    notes: list[str] = []
    holder = lock(out, 1.0)

    def waiting(note: str) -> None:
        notes.append(note)
        assert not list(out.glob("*.msgpack"))
        holder.__exit__(None, None, None)

    assert holder.__enter__()
    build(small_plan, (80,), options(), Observers(on_note=waiting))
    assert notes == [f"another aot (process {os.getpid()}) works in '{out}': waiting for it"]
    assert (out / "pretuned-sm80.msgpack").exists()


def test_a_directory_that_cannot_be_made_is_reported_before_any_work(
    options: Make, small_plan: BuildPlan, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    totals: list[int] = []
    with pytest.raises(HostError, match=r"can't make the directory .*file/out'.*--out DIR"):
        build(small_plan, (80,), options(out=tmp_path / "file" / "out"), Observers(totals.append))
    assert not totals


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 101, "naïve", "a b"])
def test_a_name_that_is_no_plain_file_name(options: Make, small_plan: BuildPlan, name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be part of a file's name"):
        build(small_plan, (80,), options(name=name))
    assert not (tmp_path / "out").exists()


def test_a_capability_that_is_not_supported(options: Make, small_plan: BuildPlan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sm_75 is not supported"):
        build(small_plan, (75,), options())
    assert not (tmp_path / "out").exists()


def test_each_capability_has_a_quantised_model_as_it_can(tmp_path: Path) -> None:
    """Of what ships compiled: as published where there is code, else what stands in."""
    config = {
        "model_type": "gpt_oss",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    listed = load_models([f"{tmp_path} name=mine tokens=1..8 ops=forward layout=nk"])
    report = build(plan(listed.shapes), (80, 90), BuildOptions(tmp_path / "out", shipped=Shipped.in_packages))
    built = {}
    for bundle in report.bundles:
        assert bundle.compiled == 0
        with open_bundle(bundle.path) as opened:
            built[bundle.target.sm] = {(model.name, model.dtype, bool(model.problems)) for model in opened.models()}
    able = bool(candidates(Op.FORWARD, DType.MXFP4, 80))
    assert built == {80: {("mine", DType.MXFP4 if able else DType.BF16, True)}, 90: {("mine", DType.MXFP4, True)}}
