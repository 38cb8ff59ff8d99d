"""aot diff, merge and prune, as commands."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import reports
from claims import H100, H200, able, chosen, revised, with_twins

from pretuned.aot.bundle.verify import verify
from pretuned.aot.cli.build import _in_context
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.locking import lock
from pretuned.artifacts.packed import pack
from pretuned.artifacts.publishing import publish
from pretuned.kernels.registry import ENTRIES


@pytest.fixture
def put(here, small_bundle):
    """Write a bundle, made by a function of the real one, into the working directory."""

    def write(name, make):
        path = here / f"{name}.msgpack"
        base = with_twins(codec.decode(small_bundle.read_bytes(), str(small_bundle)))
        publish(path, codec.encode(make(base)))
        return path.name

    return write


def cells(base, n, time_ns, gpu):
    problem = next(choice for choice in base.choices if choice.N == 256 and len(able(base, choice)) == 3)
    return {(problem, bucket): (n, time_ns, gpu) for bucket in (2, 4, 8)}


def test_merge(aot, here, put, small_bundle):
    first = put("one", lambda base: base)
    two = put("two", lambda base: chosen(base, cells(base, 1, 2_000, H200)))
    ended = aot("merge", first, two, "-o", "both.msgpack")
    assert ended.code == 0, ended.err
    assert "measured beats modelled" in ended.out
    assert "(3 measured on NVIDIA H200)" in ended.out
    assert verify("both.msgpack").choices == verify(str(small_bundle)).choices
    listed = aot("merge", first, two, "-o", "both.msgpack", "--conflicts")
    assert listed.out.count("measured 2.00 us on NVIDIA H200") == 3
    assert "(unchanged)" in listed.out
    before = (here / "both.msgpack").read_bytes()
    report = json.loads(aot("merge", two, first, two, "-o", "both.msgpack", "--json").out)
    assert (here / "both.msgpack").read_bytes() == before
    assert report["measured"] == 3
    assert [merged_input["choices_taken"] for merged_input in report["inputs"]] == [3, report["choices"] - 3]
    assert [conflict["decided_by"] for conflict in report["conflicts"]] == ["measured"] * 3
    assert report["conflicts"][0]["kept"] == {
        "path": two,
        "variant": report["conflicts"][0]["kept"]["variant"],
        "revision": ENTRIES["rows"].revision,
        "cubin_sha256": report["conflicts"][0]["kept"]["cubin_sha256"],
        "source": "measured",
        "time_us": 2.0,
        "torch_us": None,
        "gpu": "NVIDIA H200",
    }


def test_each_gpu_s_choices_are_distinguished(aot, put):
    """Merged, listed, compared, and put back into the same bytes."""
    first = put("one", lambda base: chosen(base, cells(base, 0, 3_000, H100)))
    two = put("two", lambda base: chosen(base, cells(base, 1, 2_000, H200)))
    report = json.loads(aot("merge", two, first, "-o", "both.msgpack", "--json").out)
    assert (report["measured"], report["gpus"], report["conflicts"]) == (6, [H100.name, H200.name], [])
    listed = json.loads(aot("inspect", "both.msgpack", "--choices", "--json").out)["choices"]
    assert [(row["M_near"], row["gpu"], row["time_us"]) for row in listed[:3]] == [
        (2, H100.name, 3.0),
        (2, H200.name, 2.0),
        (4, H100.name, 3.0),
    ]
    assert f"measured on {H100.name}, {H200.name}" in aot("inspect", "both.msgpack").out
    assert "choices of problems in both: 0 only in A, 3 only in B" in aot("diff", first, "both.msgpack").out
    report = json.loads(aot("diff", "both.msgpack", two, "--json").out)
    assert (report["choices"], report["choices_unmatched"]) == ([], {"added": 0, "removed": 3})
    assert aot("merge", "both.msgpack", first, "-o", "both.msgpack").out.count("(unchanged)") == 1


def test_merge_into_one_of_its_inputs(aot, put):
    first, two = put("one", lambda base: base), put("two", revised)
    ended = aot("merge", first, two, "-o", first)
    assert ended.code == 0
    assert "later kernel revision" in ended.out
    assert aot("diff", first, two, "--exit-code").code == 1  # the twins that nothing uses are gone
    assert "choices that changed" not in aot("diff", first, two).out


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["merge", "prune"])
def test_of_two_that_change_one_file_the_second_waits(aot_process, here, put, verb):
    """Else what the first added would be gone. Other outputs wait for nobody."""
    first = put("one", lambda base: base)
    rest = (put("two", revised),) if verb == "merge" else ("--models", "shape:E=8,H=256,I=128,k=2 name=small")
    with contextlib.ExitStack() as held:
        held.enter_context(lock(here, 0.0, required=True))
        assert aot_process(verb, first, *rest, "-o", "other.msgpack").code == 0
        words = [sys.executable, "-m", "pretuned.aot", verb, first, *rest, "-o", f"./{first}"]
        with subprocess.Popen(words, cwd=here, stderr=subprocess.PIPE, text=True) as waits:
            assert waits.stderr is not None
            assert "works in" in waits.stderr.readline()
            put("one", lambda base: chosen(base, cells(base, 1, 2_000, H200)))
            held.close()
            waits.stderr.read()
    assert waits.returncode == 0
    with open_bundle(here / first) as bundle:  # what was put there meanwhile was read
        assert any(choice.time_ns == 2_000 for problem in bundle.problems() for choice in bundle.find(problem))


@pytest.mark.parametrize("verb", ["merge", "prune"])
def test_an_output_that_is_something_else(aot, here, put, verb):
    first = put("one", lambda base: base)
    (here / "notes.txt").write_text("precious")
    (here / "folder").mkdir()
    rest = (put("two", revised),) if verb == "merge" else ("--models", "shape:E=8,H=256,I=128,k=2 name=small")
    for out, code, words in (
        ("notes.txt", 2, "is there and is no bundle"),
        ("folder", 2, "is a directory"),
        ("nowhere/x.msgpack", 1, "is no directory"),
    ):
        ended = aot(verb, first, *rest, "-o", out)
        assert (ended.code, ended.out) == (code, "")
        assert words in ended.err
        assert ended.err.count("\n") == 1
    assert (here / "notes.txt").read_text() == "precious"


def test_merge_of_what_is_no_bundle(aot, here, put):
    first = put("one", lambda base: base)
    data = bytearray((here / first).read_bytes())
    data[-10] ^= 1
    (here / "flipped.msgpack").write_bytes(data)
    ended = aot("merge", first, "flipped.msgpack", "-o", "out.msgpack")
    assert ended.code == 2
    assert "flipped.msgpack" in ended.err
    assert aot("merge", first, first, "-o", "out.msgpack").code == 2
    assert not (here / "out.msgpack").exists()


def test_diff(aot, put):
    first = put("one", lambda base: chosen(base, cells(base, 0, 1_000, None)))
    two = put("two", lambda base: chosen(base, cells(base, 1, 2_000, H200)))
    same = aot("diff", first, first, "--exit-code")
    assert (same.code, same.err) == (0, "")
    assert same.out.startswith("no difference")
    ended = aot("diff", first, two)
    assert ended.code == 0
    assert ended.out.splitlines()[0] == "from A to B: 3 choices changed, taking 2.00x the time"
    assert "choices that changed: 3" in ended.out
    assert "+100.0 %" in ended.out
    assert "NVIDIA H200" in ended.out
    listed = aot("diff", first, two, "--choices", "--exit-code")
    assert listed.code == 1
    assert listed.out.count("modelled -> measured NVIDIA H200") == 3
    report = json.loads(aot("diff", first, two, "--json").out)
    assert report["differ"] is True
    assert [choice["changed"] for choice in report["choices"]] == [["variant", "source", "gpu", "time"]] * 3
    assert json.loads(aot("diff", first, first, "--json").out)["differ"] is False


def test_torch_as_a_choice_is_listed_compared_merged_and_reported(aot, here, put):
    def by_torch(base):
        bundle = chosen(base, cells(base, 0, 3_000, H200))
        rows = {
            problem: tuple(choice._replace(torch_ns=1_500) for choice in row) for problem, row in bundle.choices.items()
        }
        return bundle._replace(choices=rows)

    first, two = put("one", lambda base: chosen(base, cells(base, 0, 2_000, H200))), put("two", by_torch)
    (listed, *_) = json.loads(aot("inspect", two, "--choices", "--json").out)["choices"]
    assert (listed["time_us"], listed["torch_us"]) == (3.0, 1.5)
    assert "1.5" in aot("inspect", two, "--choices").out
    changes = json.loads(aot("diff", first, two, "--json").out)["choices"]
    assert [row["changed"] for row in changes] == [["time", "torch"]] * 3
    assert [changes[0][side][field] for side in ("old", "new") for field in ("time_us", "torch")] == [
        2.0,
        False,
        1.5,
        True,
    ]
    assert aot("diff", first, two, "--choices").out.count("-> torch, else ") == 3
    changes = json.loads(aot("merge", first, two, "-o", "both.msgpack", "--json").out)["conflicts"]
    assert [(row["kept"]["path"], row["kept"]["torch_us"], row["dropped"]["torch_us"]) for row in changes] == [
        (two, 1.5, None)
    ] * 3
    assert (
        ": measured 3.00 us, torch 1.50 us on NVIDIA H200"
        in aot("merge", first, two, "-o", "both.msgpack", "--conflicts").out
    )
    assert verify("both.msgpack").choices == verify(two).choices
    assert aot("report", "both.msgpack", "-o", "r.html").code == 0
    shown_cells = [cell for cell in reports.cells_of((here / "r.html").read_text()) if cell["state"] == "measured"]
    assert [(cell["config"], cell["us"], cell["torch"]) for cell in shown_cells] == [("torch grouped_mm", 1.5, 1.5)] * 3
    assert all(cell["second_us"] == 3.0 and cell["second"][0].isdigit() for cell in shown_cells)


def test_diff_shows_models_problems_and_variants(aot, put):
    first = put("one", lambda base: base)
    two = put("two", lambda base: revised(chosen(base, cells(base, 0, 1_000, None))))
    out = aot("diff", first, two).out
    assert out.splitlines()[0].startswith("from A to B: 1 model gone, 1 changed; ")
    assert "-  odd tp=1 ep=1 bf16" in out
    assert "~  small tp=1 ep=1 bf16  4 -> 1 problems" in out
    assert "1 -> 2" in out
    assert "\n-  forward bf16 E=8 N=250 K=125" in out


def test_prune(aot, here, put, small_bundle):
    first = put("one", lambda base: base)
    small = "shape:E=8,H=256,I=128,k=2 tokens=1..64 name=small"
    ended = aot("prune", first, "--models", small, "--ops", "forward", "-o", "small.msgpack")
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert "smaller than one.msgpack" in ended.out
    report = json.loads(aot("prune", first, "-m", small, "--ops", "forward", "-o", "small.msgpack", "--json").out)
    assert report["models"] == {"before": 2, "after": 1}
    assert report["problems"] == {"before": 8, "after": 4}
    assert report["size_bytes"]["after"] == (here / "small.msgpack").stat().st_size < report["size_bytes"]["before"]
    assert report["unchanged"] is True
    assert report["missing"] == []
    more = aot("prune", first, "-m", small.replace("64", "128"), "--ops", "forward", "-o", "small.msgpack")
    assert more.code == 0
    assert "lacks 4 choices of these models" in more.err
    none = aot("prune", first, "-m", "Qwen/Qwen3-30B-A3B", "-o", "none.msgpack")
    assert (none.code, none.out) == (2, "")
    assert "built for odd, small" in none.err


@pytest.mark.parametrize("verb", ["merge", "prune"])
def test_an_output_that_is_a_link_is_replaced_and_said_to_be(aot, here, put, verb):
    first = put("one", lambda base: base)
    rest = (put("two", revised),) if verb == "merge" else ("--models", "shape:E=8,H=256,I=128,k=2 name=small")
    assert "(unchanged)" not in aot(verb, first, *rest, "-o", "target.msgpack").out
    (here / "link.msgpack").symlink_to("target.msgpack")
    before = (here / "target.msgpack").read_bytes()
    assert "(unchanged)" not in aot(verb, first, *rest, "-o", "link.msgpack").out
    assert not (here / "link.msgpack").is_symlink()
    assert (here / "link.msgpack").read_bytes() == (here / "target.msgpack").read_bytes() == before
    assert "(unchanged)" in aot(verb, first, *rest, "-o", "link.msgpack").out


@pytest.mark.parametrize(("out", "shown"), [("bundles", "bundles"), ("a/b", "a/b"), ("../x", "x"), ("/srv/y", "y")])
def test_a_dockerfile_copies_from_below_its_own_folder(out: str, shown: str) -> None:
    assert _in_context(Path(out)) == f"{shown} /opt/pretuned/bundles"


def test_a_dockerfile_copies_a_folder_with_blanks() -> None:
    assert _in_context(Path("/srv/my bundles")) == '["my bundles", "/opt/pretuned/bundles"]'


@pytest.mark.slow  # code for three capabilities, unpacked again and again
def test_a_file_of_several_bundles(aot, here, small_bundle):
    """verify reads each, diff and inspect want one named."""
    shipped = Path(__file__).parents[3] / "artifacts" / "bundles" / "candidates-sm80-sm86-sm89.msgpack.xz"
    verified = aot("verify", shipped)
    assert verified.code == 0, verified.err
    assert [line.split()[1] for line in verified.out.splitlines()] == [f"{shipped}#sm{sm}" for sm in (80, 86, 89)]
    pin = hashlib.sha256(shipped.read_bytes()).hexdigest()
    assert aot("verify", shipped, "--sha256", pin).out == verified.out
    assert aot("verify", shipped, "--sha256", "0" * 64).code == 2
    assert "for       sm_89, " in aot("inspect", f"{shipped}#sm89").out
    for arguments in (("inspect", shipped), ("diff", shipped, shipped)):
        refused = aot(*arguments)
        assert refused.code == 2
        assert f"the file holds several: name one, as in '{shipped}#sm80'" in refused.err
    refused = aot("inspect", f"{shipped}#sm90")
    assert refused.code == 2
    assert "holds none for sm_90, but for sm_80, sm_86, sm_89" in refused.err
    data = small_bundle.read_bytes()
    (here / "cut.msgpack.xz").write_bytes(pack(data, data[:16], b"and no more"))
    refused = aot("verify", "cut.msgpack.xz")
    assert refused.code == 2
    assert "cut.msgpack.xz" in refused.err


def test_a_file_of_several_is_compared_by_its_own_size(aot, here, put, small_bundle):
    (here / "one.msgpack.xz").write_bytes(pack(small_bundle.read_bytes()))
    ended = aot("diff", small_bundle, "one.msgpack.xz#sm80", "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert not report["differ"]
    assert report["size_bytes"] == [small_bundle.stat().st_size, (here / "one.msgpack.xz").stat().st_size]
