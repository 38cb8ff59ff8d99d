"""Candidates that ship compiled: what of them is taken, what is not, and a build where nothing compiles."""

from __future__ import annotations

import importlib.util
import lzma
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretuned.aot.build.build import build
from pretuned.aot.build.options import BuildOptions, Observers
from pretuned.aot.bundle.verify import verify
from pretuned.aot.choose.candidates import read_candidates
from pretuned.aot.compile import toolchain
from pretuned.aot.compile.cache import asked_for, made_of
from pretuned.aot.compile.shipped import Shipped, shipped_file
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import Pool, to_compile
from pretuned.aot.plan.plan import BuildPlan, plan
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.codec import decode, encode
from pretuned.artifacts.errors import CompileError, HostError, InputError
from pretuned.artifacts.records import Bundle, Op
from pretuned.kernels.arch import arch_of
from pretuned.kernels.cost import rejection
from pretuned.kernels.rowops import RowOpSpec
from pretuned.kernels.spec import Spec
from pretuned.runtime.dispatch.places import Kind, Place, candidates_name

BUNDLES = Path(__file__).parents[3] / "artifacts" / "bundles"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    """A bundle that ships: some of the candidates."""
    path = BUNDLES / "catalogue-sm80.msgpack"
    return decode(path.read_bytes(), str(path))


@pytest.fixture(scope="module")
def wanted() -> list[Spec | RowOpSpec]:
    layer = plan(load_models(["shape:E=8,H=256,I=128,k=2"], (Op.FORWARD,)).shapes)
    return list(to_compile(layer.problems, 80, Pool()))  # some of the bundle's, and more


@pytest.fixture
def layer() -> BuildPlan:
    return plan(load_models(["shape:E=8,H=256,I=128,k=2 tokens=1..64 name=nobodys"], (Op.FORWARD,)).shapes)


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, real=importlib.util.find_spec: None if name == "triton" else real(name),
    )
    toolchain.toolchain.cache_clear()
    yield
    toolchain.toolchain.cache_clear()


def pressed(bundle: Bundle) -> bytes:
    """Return a bundle compressed like ``pack`` does, but quickly."""
    return lzma.compress(encode(bundle), preset=0)


def installed(folder: Path, bundle: Bundle | bytes) -> list[Place]:
    data = bundle if isinstance(bundle, bytes) else pressed(bundle)
    (folder / candidates_name(80)).write_bytes(data)
    return [Place(Kind.INSTALLED, folder)]


def test_what_was_compiled_of_these_sources_is_taken(
    tmp_path: Path, bundle: Bundle, wanted: list[Spec | RowOpSpec]
) -> None:
    shipped = Shipped.in_packages(80, installed(tmp_path, bundle))
    assert len(shipped) == len({made_of(variant) for variant in bundle.variants})
    taken = 0
    for spec in wanted:
        code = shipped.get(spec, 80)
        if code is not None:
            taken += 1
            assert made_of(code.variant) == asked_for(spec)
            assert bundle.cubins[bundle.variants.index(code.variant)] == code.cubin
            assert code.maker is not None
            assert (code.maker.producer, code.maker.min_driver) == (bundle.producer, bundle.min_driver)
        assert shipped.get(spec, 86) is None
    assert 10 < taken < len(wanted)
    assert not shipped.trouble
    assert not Shipped.in_packages(86, [Place(Kind.INSTALLED, tmp_path)])


def test_what_was_compiled_of_other_sources_is_not(
    tmp_path: Path, bundle: Bundle, wanted: list[Spec | RowOpSpec]
) -> None:
    kernels = tuple(
        kernel._replace(source_sha256=bytes(32)) if kernel.name == "rows" else kernel for kernel in bundle.kernels
    )
    shipped = Shipped.in_packages(80, installed(tmp_path, bundle._replace(kernels=kernels)))
    others = [variant for variant in bundle.variants if variant.kernel != "rows"]
    assert 0 < len(shipped) == len({made_of(other) for other in others})
    taken = [code.variant.kernel for code in (shipped.get(spec, 80) for spec in wanted) if code is not None]
    assert "combine" in taken
    assert "rows" not in taken


def test_what_is_no_code_for_the_capability_is_not(
    tmp_path: Path, bundle: Bundle, wanted: list[Spec | RowOpSpec]
) -> None:
    path = BUNDLES / "catalogue-sm86.msgpack"
    other = decode(path.read_bytes(), str(path))._replace(target=bundle.target)
    shipped = Shipped.in_packages(80, installed(tmp_path, other))
    assert len(shipped) > 10
    assert not any(shipped.get(spec, 80) for spec in wanted)
    assert "candidates-sm80.msgpack.xz" in shipped.trouble[0]
    assert "code for sm_86, the bundle says sm_80" in shipped.trouble[0]


@pytest.mark.parametrize("damage", ["cut", "writable"])
def test_a_file_that_can_not_be_used_is_reported(tmp_path: Path, bundle: Bundle, damage: str) -> None:
    data = pressed(bundle)
    places = installed(tmp_path, data[:-100] if damage == "cut" else data)
    if damage == "writable":
        (tmp_path / candidates_name(80)).chmod(0o666)
    shipped = Shipped.in_packages(80, places)
    assert not shipped
    assert len(shipped.trouble) == 1
    assert "candidates-sm80.msgpack.xz" in shipped.trouble[0]


def test_where_none_ships() -> None:
    with pytest.raises(InputError, match="none ship for sm_75: name a file"):
        shipped_file(75)
    with pytest.raises(InputError, match="no GPU here"):
        shipped_file(None)


@pytest.mark.usefixtures("no_triton")
def test_a_build_where_nothing_compiles(tmp_path: Path, bundle: Bundle, layer: BuildPlan) -> None:
    places = installed(tmp_path, bundle)
    notes: list[str] = []
    options = BuildOptions(tmp_path / "out", shipped=lambda sm: Shipped.in_packages(sm, places))
    (built,) = build(layer, (80,), options, Observers(on_note=notes.append)).bundles
    assert (built.compiled, built.cached) == (0, 0)
    assert built.shipped > 10
    assert built.failed > 0
    assert "Triton is not installed" in built.lost
    assert len(notes) == 1
    assert "nothing is compiled: Triton is not installed" in notes[0]
    decoded = decode(built.path.read_bytes(), "it")
    assert decoded.producer == bundle.producer
    assert {variant.cubin_sha256 for variant in decoded.variants} <= {
        variant.cubin_sha256 for variant in bundle.variants
    }


@pytest.mark.usefixtures("no_triton")
def test_a_build_where_nothing_compiles_and_nothing_ships(tmp_path: Path, layer: BuildPlan) -> None:
    with pytest.raises(HostError, match="Triton is not installed, and compiling needs it"):
        build(layer, (80,), BuildOptions(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_triton")
def test_what_takes_too_much_is_pruned_without_a_compiler(tmp_path: Path, layer: BuildPlan) -> None:
    """The candidates in the wheel have it, so that nobody compiles it to know."""
    (built,) = build(layer, (120,), BuildOptions(tmp_path / "out", shipped=Shipped.in_packages)).bundles
    assert (built.compiled, built.cached, built.failed, built.lost) == (0, 0, 0, "")
    assert 0 < built.pruned < built.shipped
    candidates = BUNDLES / f"{candidates_name(120, 121)}#sm120"
    with open_bundle(candidates) as bundle:
        variants, problems = tuple(bundle.variants()), tuple(bundle.problems())
        named = {variants[choice.variant] for problem in problems for choice in bundle.find(problem)}
    assert verify(str(candidates)).variants == len(variants)
    able = {candidate.variant for candidate in read_candidates(candidates).compiled}
    assert able < {*variants}
    assert named <= able
    assert {variant for variant in variants if rejection(variant, arch_of(120)) is None} == able


@pytest.mark.usefixtures("no_triton")
def test_a_problem_that_no_shipped_code_is_for(tmp_path: Path) -> None:
    many = plan(load_models(["shape:E=1024,H=256,I=128,k=2 tokens=1..64"], (Op.DW,)).shapes)
    with pytest.raises(CompileError, match=r"(?s)not one variant of dW bf16 can be used for E=1024\..*not installed"):
        build(many, (90,), BuildOptions(tmp_path / "out", shipped=Shipped.in_packages))
