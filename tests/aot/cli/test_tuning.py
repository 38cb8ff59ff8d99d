"""aot compile, aot measure, and aot build with a journal; no machine here has a GPU, so what they say without one."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from building import fill
from calls import calls_of

from pretuned.aot.build import build
from pretuned.aot.journal.file import Header, open_journal, read_journal
from pretuned.aot.journal.records import Incumbent, Measured, Timing
from pretuned.aot.plan.families import serves
from pretuned.aot.process import gpus as process_gpus
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import Gpu, Source, Variant

# fp32 dW has the fewest candidates: 7 variants.
MODEL = "shape:E=8,H=256,I=128,k=2 dtype=fp32 ops=dW tokens=1..8 name=mine"
H200 = Gpu("NVIDIA H200", 132, 143771, 13000)
H100 = Gpu("NVIDIA H100 80GB HBM3", 132, 81559, 13000)
cli = importlib.import_module("pretuned.aot.cli.build")  # (the package has the command by this name)
Aot = Callable[..., Any]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(process_gpus.gpu_count() > 0, reason="for a machine without a GPU"),
]


@pytest.fixture(scope="module")
def cache(compiled_dir: Path, compiled_models: Path) -> Path:
    """All tests' compile cache, with what others compiled of such a model for 8.0."""
    fill(compiled_dir, compiled_models)
    return compiled_dir


@pytest.fixture
def candidates(aot: Aot, here: Path, cache: Path) -> Path:
    done = aot("compile", "--models", MODEL, "--sm", "90", "-o", "candidates.msgpack", "--cache-dir", cache)
    assert done.code == 0, done.err
    assert "candidates for sm_90a" in done.out
    return here / "candidates.msgpack"


def write_journal(path: Path, candidates: Path) -> None:
    """Write a journal in which a GPU measured every variant: the later in the bundle, the faster."""
    with open_bundle(candidates) as bundle, open_journal(path, Header(90, H200, bundle.kernels)) as journal:
        variants = bundle.variants()
        for problem in bundle.problems():
            able = [(i, variant.cubin_sha256) for i, variant in enumerate(variants) if serves(variant, problem)]
            timings = tuple(Timing(sha, (90_000 - 1000 * i,) * 2, 0.001, 20, 0.001) for i, sha in able)
            for choice in bundle.find(problem):
                modelled = variants[choice.variant].cubin_sha256
                journal.append([Measured(problem, choice.bucket, modelled, timings, None, None, 1.0, 13000)])


def test_compile_for_several_into_one_file(aot: Aot, here: Path, cache: Path) -> None:
    options = ("compile", "--models", MODEL, "--cache-dir", cache)
    done = aot(*options, "--sm", "90,80", "-o", "both.msgpack.xz")
    assert done.code == 0, done.err
    assert [f"candidates for sm_{sm}, " in done.out for sm in ("80", "90a")] == [True, True]
    assert "aot measure both.msgpack.xz#smNN" in done.out
    assert "(unchanged)" not in done.out
    for sm in (80, 90):
        assert aot(*options, "--sm", sm, "-o", f"{sm}.msgpack").code == 0
        with open_bundle(f"both.msgpack.xz#sm{sm}") as of_both, open_bundle(f"{sm}.msgpack") as alone:
            assert of_both.digest == alone.digest
    built = aot("build", "--models", MODEL, "--candidates", "both.msgpack.xz#sm90", "--measure", "no", "--out", "out")
    assert built.code == 0, built.err
    assert (here / "out" / "pretuned-sm90.msgpack").exists()
    again = aot("build", "--models", MODEL, "--candidates", "both.msgpack.xz#sm90", "--measure", "no", "--out", "out")
    assert again.code == 0, again.err
    refused = aot(*options, "--sm", "80", "-o", "both.msgpack.xz#sm80")
    assert refused.code == 2
    assert "names one bundle of several in a file" in refused.err


def test_compile_here_build_from_a_journal(aot: Aot, here: Path, candidates: Path, cache: Path) -> None:
    write_journal(here / "h200.journal", candidates)
    options = ("build", "--models", MODEL, "--journal", "h200.journal")
    done = aot(*options, "--candidates", "candidates.msgpack", "--out", "given")
    assert done.code == 0, done.err
    assert "choices were measured on NVIDIA H200" in done.out
    done = aot(*options, "--sm", "90", "--out", "compiled", "--cache-dir", cache, "--json")
    assert done.code == 0, done.err
    (built,) = json.loads(done.out)["bundles"]
    assert (built["source"], built["gpus"], built["tuned"]) == ("measured", ["NVIDIA H200"], None)
    bundles = [here / place / "pretuned-sm90.msgpack" for place in ("given", "compiled")]
    assert bundles[0].read_bytes() == bundles[1].read_bytes()
    with open_bundle(bundles[0]) as bundle:
        for problem in bundle.problems():
            assert {choice.source for choice in bundle.find(problem)} == {Source.MEASURED}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("measure", "candidates.msgpack", "--models", MODEL, "-J", "j"), 1, "no CUDA GPU here: measure on"),
        (("measure", "candidates.msgpack", "-J", "j"), 2, "nothing to measure for: give --models"),
        (("measure", "candidates.msgpack", "--models", MODEL), 2, "Missing option '--journal'"),
        (("measure", "none.msgpack", "--models", MODEL, "-J", "j"), 2, "none.msgpack"),
        (("measure", "candidates.msgpack", "--models", MODEL, "-J", "j", "--like", "none.msgpack"), 2, "none.msgpack"),
        (("measure", "candidates.msgpack", "--models", MODEL, "-J", "j", "--budget", "5x"), 2, "wanted e.g. 90s, 10m"),
        (("measure", "candidates.msgpack", "--models", MODEL, "-J", "j", "--budget", "9" * 400), 2, "is no duration"),
        (
            ("measure", "candidates.msgpack", "--models", MODEL, "-J", "j", "--budget", "9" * 308 + "h"),
            2,
            "is no duration",
        ),
        (("measure", "candidates.msgpack", "--models", MODEL, "-J", "j", "--gpus", "a"), 2, "wanted ordinals"),
        (("measure", "candidates.msgpack", "--models", MODEL, "-J", "j", "--share", "nan"), 2, "nan is no share"),
        (("measure", "candidates.msgpack", "--models", MODEL, "-J", "j", "--part", "9/8"), 2, "wanted e.g. 1/8"),
        (("measure", "candidates.msgpack", "--models", MODEL, "-J", "j", "--part", "3/3"), 2, "2 weights"),
        (("build", "--models", MODEL, "--sm", "90", "--measure", "only"), 1, "sm_90 can't be measured"),
        (("build", "--models", MODEL, "--sm", "80,90", "-J", "j"), 2, "a journal is of one capability"),
        (("build", "--models", MODEL, "--sm", "90", "-J", "j", "--measure", "no"), 2, "aot measure writes one"),
        (("build", "--models", MODEL, "--sm", "80", "--candidates", "candidates.msgpack"), 2, "are for sm_90"),
        (("build", "--models", MODEL, "--candidates", "candidates.msgpack", "-J", "none"), 2, "aot measure writes one"),
        (
            ("build", "--models", "shape:E=8,H=256,I=128,k=2", "--candidates", "candidates.msgpack"),
            2,
            "no variants of dW bf16",
        ),
        (("compile", "--models", MODEL, "--sm", "80,90"), 2, "several capabilities need a compressed file"),
        (("compile", "--models", MODEL, "--sm", "90", "-o", "candidates.msgpack/x"), 1, "can't make the directory"),
        (("compile", "--models", MODEL, "--sm", "90", "-o", "notes.txt"), 2, "is there and is no bundle"),
    ],
)
def test_mistakes_are_reported_in_one_message(
    aot: Aot, here: Path, candidates: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    (here / "notes.txt").write_text("precious")
    done = aot(*arguments)
    assert (here / "notes.txt").read_text() == "precious"
    assert done.code == code, done.err
    assert message in done.err
    assert "Traceback" not in done.err


def test_measuring_can_be_taken_out(aot: Aot, candidates: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETUNED_DISABLE_AUTOTUNE", "1")
    done = aot("measure", "candidates.msgpack", "--models", MODEL, "-J", "j")
    assert (done.code, "PRETUNED_DISABLE_AUTOTUNE forbids measuring" in done.err) == (2, True)
    done = aot("build", "--models", MODEL, "--sm", "90", "--measure", "only")
    assert (done.code, "--measure only demands it" in done.err) == (2, True)
    done = aot("build", "--models", MODEL, "--sm", "90", "--cache-dir", cache)
    assert done.code == 0
    assert "note: PRETUNED_DISABLE_AUTOTUNE is set: nothing is measured" in done.err
    assert "choices are modelled" in done.out


def test_a_journal_of_another_gpu_or_code_is_refused(aot: Aot, here: Path, candidates: Path, cache: Path) -> None:
    write_journal(here / "h200.journal", candidates)
    done = aot("compile", "--models", MODEL, "--sm", "80", "-o", "other.msgpack", "--cache-dir", cache)
    assert done.code == 0
    done = aot("build", "--models", MODEL, "--candidates", "other.msgpack", "-J", "h200.journal")
    assert done.code == 2
    assert "measured on sm_90, the candidates are for sm_80" in done.err


def test_a_journal_that_cannot_serve_is_reported_before_anything_is_compiled(
    aot: Aot, here: Path, candidates: Path
) -> None:
    write_journal(here / "h200.journal", candidates)
    for journal, message in (("h200.journal", "measured on sm_90"), ("no.journal", "aot measure writes one")):
        with calls_of(build._compile) as compiled:
            done = aot("build", "--models", MODEL, "--sm", "80", "-J", journal, "--measure", "auto")
        assert (done.code, compiled) == (2, [])
        assert message in done.err
    done = aot("build", "--models", MODEL, "--candidates", "candidates.msgpack", "-J", "no.journal")
    assert (done.code, "aot measure writes one" in done.err) == (2, True)
    assert not (here / "bundles").exists()


def test_a_journal_that_nobody_named_and_that_cannot_serve_is_not_used(
    aot: Aot, here: Path, candidates: Path, cache: Path
) -> None:
    (here / "out").mkdir()
    write_journal(here / "out" / "pretuned-sm80.journal", candidates)  # as if another build had left it
    options = ("build", "--models", MODEL, "--sm", "80", "--out", "out", "--cache-dir", cache)
    done = aot(*options)
    assert done.code == 0, done.err
    assert "note: not used: " in done.err
    assert "choices are modelled" in done.out


def test_damaged_records_of_a_journal_are_reported(aot: Aot, here: Path, candidates: Path) -> None:
    write_journal(here / "h200.journal", candidates)
    lines = (here / "h200.journal").read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"measured", b"messured")
    (here / "h200.journal").write_bytes(b"\n".join(lines))
    done = aot("build", "--models", MODEL, "--candidates", "candidates.msgpack", "-J", "h200.journal", "--out", "out")
    assert done.code == 0, done.err
    assert "journal 'h200.journal': 1 damaged records are left out" in done.err


def test_a_journal_of_other_models_is_reported(aot: Aot, here: Path, candidates: Path, cache: Path) -> None:
    write_journal(here / "h200.journal", candidates)
    other = MODEL.replace("H=256", "H=512")
    done = aot("build", "--models", other, "--sm", "90", "-J", "h200.journal", "--out", "out", "--cache-dir", cache)
    assert done.code == 0, done.err
    message = "note: journal 'h200.journal': none of the 8 cells measured there is of these models: all is modelled"
    assert message in done.err
    assert "choices are modelled" in done.out


def test_candidates_are_not_replaced_by_their_bundle(aot: Aot, here: Path, candidates: Path) -> None:
    write_journal(here / "h200.journal", candidates)
    own = here / "pretuned-sm90.msgpack"
    own.write_bytes(candidates.read_bytes())
    done = aot("build", "--models", MODEL, "--candidates", own.name, "-J", "h200.journal", "--out", ".")
    assert done.code == 2
    assert "the bundle would take its place" in done.err
    assert own.read_bytes() == candidates.read_bytes()


def test_the_examples_in_the_help_have_real_options(aot: Aot) -> None:
    for verb in ("compile", "measure", "build"):
        done = aot(verb, "--help")
        assert done.code == 0
        options = {word for line in done.out.splitlines() for word in line.split() if word.startswith("--")}
        named = {word.rstrip(",") for word in options}
        assert {"--models", "--json"} <= named


def of_a_later_version(variant: Variant) -> Variant:
    return variant._replace(config=(*variant.config, ("zz_later", 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda variant: variant._replace(abi=2), "launch ABI 2, this version reads 1. Upgrade pretuned"),
        (of_a_later_version, "or upgrade pretuned"),
        (lambda variant: variant._replace(entry="another"), "another"),
    ],
)
def test_candidates_that_can_not_be_launched_are_refused_before_anything_is_written(
    aot: Aot, here: Path, candidates: Path, change: Callable[[Variant], Variant], message: str
) -> None:
    write_journal(here / "h200.journal", candidates)
    bundle = codec.decode(candidates.read_bytes(), "candidates")
    changed = bundle._replace(variants=(change(bundle.variants[0]), *bundle.variants[1:]))
    (here / "changed.msgpack").write_bytes(codec.encode(changed))
    for arguments in (
        ("build", "--models", MODEL, "--candidates", "changed.msgpack", "--out", "made"),
        ("measure", "changed.msgpack", "--models", MODEL, "-J", "new.journal"),
    ):
        done = aot(*arguments)
        assert (done.code, done.out) == (2, ""), done.err
        assert message in done.err
        assert done.err.count("\n") == 1
    assert not (here / "made").exists()
    assert not (here / "new.journal").exists()


def test_a_journal_that_is_named_is_gone_on_with_where_there_is_its_gpu(
    monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    monkeypatch.setattr(cli, "native_sm", lambda: 90)
    journal = here / "h200.journal"
    for there in (False, True):
        if there:
            journal.write_text("")
        assert cli._measured_sms("auto", (90,), journal, None) == ((90,), ())
        assert cli._measured_sms("auto", (80,), journal, None) == ((), ())
        assert cli._measured_sms("no", (90,), journal, None) == ((), ())


def test_a_journal_of_another_gpu_is_read_where_nothing_must_be_measured(
    monkeypatch: pytest.MonkeyPatch, aot: Aot, here: Path, candidates: Path
) -> None:
    """An H100 with an H200's journal."""
    write_journal(here / "h200.journal", candidates)
    before = (here / "h200.journal").read_bytes()

    def on_an_h100(executor: None, gpus: None, problems: object, path: Path, journal: Path, **how: object) -> None:
        with open_bundle(path) as bundle, open_journal(journal, Header(90, H100, bundle.kernels)):
            raise AssertionError("it was opened")

    monkeypatch.setattr(cli, "native_sm", lambda: 90)
    monkeypatch.setattr(cli, "tune", on_an_h100)
    build = ("build", "--models", MODEL, "--candidates", "candidates.msgpack", "--journal", "h200.journal")
    done = aot(*build)
    assert done.code == 0, done.err
    assert "nothing is measured: journal 'h200.journal': measured on NVIDIA H200" in done.err
    assert "choices were measured on NVIDIA H200" in done.out
    done = aot(*build, "--measure", "only")
    assert done.code == 2
    assert "Times of one say nothing of the other" in done.err
    assert (here / "h200.journal").read_bytes() == before


def test_no_measuring_takes_a_journal_that_is_named_and_no_other(aot: Aot, here: Path, candidates: Path) -> None:
    (here / "bundles").mkdir()
    write_journal(here / "bundles" / "pretuned-sm90.journal", candidates)
    build = ("build", "--models", MODEL, "--candidates", "candidates.msgpack")
    assert "choices were measured" in aot(*build).out
    assert "none was measured" in aot(*build, "--measure", "no").out
    named = aot(*build, "--measure", "no", "--journal", "bundles/pretuned-sm90.journal")
    assert "choices were measured" in named.out


def test_what_is_no_bundle_is_not_built_over(aot: Aot, here: Path, candidates: Path) -> None:
    (here / "bundles").mkdir()
    path = here / "bundles" / "pretuned-sm90.msgpack"
    path.write_text("precious")
    for more in (("--sm", "90"), ("--candidates", "candidates.msgpack")):
        done = aot("build", "--models", MODEL, *more)
        assert (done.code, done.out) == (2, ""), done.err
        assert "is there and is no bundle: it is not overwritten" in done.err
    assert path.read_text() == "precious"
    path.unlink()
    path.mkdir()
    done = aot("build", "--models", MODEL, "--sm", "90")
    assert done.code == 2
    assert "is a directory, wanted a file's name" in done.err


def test_a_build_ends_with_what_is_faster_than_before(aot: Aot, here: Path, candidates: Path) -> None:
    """The journal says that the slowest variant of each cell ran before, or the fastest."""
    write_journal(here / "h200.journal", candidates)
    contents = read_journal(here / "h200.journal")
    (here / "h200.journal").unlink()
    with open_journal(here / "h200.journal", contents.header) as journal:
        for i, record in enumerate(contents.records):
            assert isinstance(record, Measured)
            ran = record.timings[-1 if i == 0 else 0].variant
            journal.append([dataclasses.replace(record, incumbents=(Incumbent(ran, bytes(32)),))])
    build = ("build", "--models", MODEL, "--candidates", "candidates.msgpack", "--journal", "h200.journal")
    done = aot(*build)
    assert done.code == 0, done.err
    cells, first = len(contents.records), contents.records[0]
    assert isinstance(first, Measured)
    gain = first.timings[0].time_ns / first.timings[-1].time_ns - 1
    last = done.out.splitlines()[-1]
    assert (
        last == f"sm_90a: {cells - 1} cells faster than before by {100 * gain:.1f} % in the mean, 1 as before, 0 slower"
    )
    (bundle,) = json.loads(aot(*build, "--json").out)["bundles"]
    assert bundle["compared_with_before"] == {
        "faster": cells - 1,
        "gain": round(gain, 4),
        "as_before": 1,
        "slower": 0,
        "not_compared": 0,
    }
    assert bundle["lost"] == ""


def test_next_is_said_for_a_shell(aot: Aot, here: Path, cache: Path) -> None:
    done = aot("compile", "--models", MODEL, "--sm", "90", "-o", "my c.msgpack", "--cache-dir", cache)
    assert "aot measure 'my c.msgpack' --models" in done.out
