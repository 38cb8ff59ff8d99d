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
    problem = next(one for one in base.choices if one.N == 256 and len(able(base, one)) == 3)
    return {(problem, bucket): (n, time_ns, gpu) for bucket in (2, 4, 8)}


def test_merge(aot, here, put, small_bundle):
    one = put("one", lambda base: base)
    two = put("two", lambda base: chosen(base, cells(base, 1, 2_000, H200)))
    ended = aot("merge", one, two, "-o", "both.msgpack")
    assert ended.code == 0, ended.err
    assert "measured beats modelled" in ended.out
    assert "(3 measured on NVIDIA H200)" in ended.out
    assert verify("both.msgpack").choices == verify(str(small_bundle)).choices
    listed = aot("merge", one, two, "-o", "both.msgpack", "--conflicts")
    assert listed.out.count("measured 2.00 us on NVIDIA H200") == 3
    assert "(unchanged)" in listed.out
    before = (here / "both.msgpack").read_bytes()
    told = json.loads(aot("merge", two, one, two, "-o", "both.msgpack", "--json").out)
    assert (here / "both.msgpack").read_bytes() == before
    assert told["measured"] == 3
    assert [one["choices_taken"] for one in told["inputs"]] == [3, told["choices"] - 3]
    assert [one["decided_by"] for one in told["conflicts"]] == ["measured"] * 3
    assert told["conflicts"][0]["kept"] == {
        "path": two,
        "variant": told["conflicts"][0]["kept"]["variant"],
        "revision": ENTRIES["rows"].revision,
        "cubin_sha256": told["conflicts"][0]["kept"]["cubin_sha256"],
        "source": "measured",
        "time_us": 2.0,
        "torch_us": None,
        "gpu": "NVIDIA H200",
    }


def test_each_gpu_s_choices_are_distinguished(aot, put):
    """Merged, listed, compared, and put back into the same bytes."""
    one = put("one", lambda base: chosen(base, cells(base, 0, 3_000, H100)))
    two = put("two", lambda base: chosen(base, cells(base, 1, 2_000, H200)))
    told = json.loads(aot("merge", two, one, "-o", "both.msgpack", "--json").out)
    assert (told["measured"], told["gpus"], told["conflicts"]) == (6, [H100.name, H200.name], [])
    listed = json.loads(aot("inspect", "both.msgpack", "--choices", "--json").out)["choices"]
    assert [(row["M_near"], row["gpu"], row["time_us"]) for row in listed[:3]] == [
        (2, H100.name, 3.0),
        (2, H200.name, 2.0),
        (4, H100.name, 3.0),
    ]
    assert f"measured on {H100.name}, {H200.name}" in aot("inspect", "both.msgpack").out
    assert "choices of problems in both: 0 only in A, 3 only in B" in aot("diff", one, "both.msgpack").out
    told = json.loads(aot("diff", "both.msgpack", two, "--json").out)
    assert (told["choices"], told["choices_unmatched"]) == ([], {"added": 0, "removed": 3})
    assert aot("merge", "both.msgpack", one, "-o", "both.msgpack").out.count("(unchanged)") == 1


def test_merge_into_one_of_its_inputs(aot, put):
    one, two = put("one", lambda base: base), put("two", revised)
    ended = aot("merge", one, two, "-o", one)
    assert ended.code == 0
    assert "later kernel revision" in ended.out
    assert aot("diff", one, two, "--exit-code").code == 1  # the twins that nothing uses are gone
    assert "choices that changed" not in aot("diff", one, two).out


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["merge", "prune"])
def test_of_two_that_change_one_file_the_second_waits(aot_process, here, put, verb):
    """Else what the first added would be gone. Other outputs wait for nobody."""
    one = put("one", lambda base: base)
    rest = (put("two", revised),) if verb == "merge" else ("--models", "shape:E=8,H=256,I=128,k=2 name=small")
    with contextlib.ExitStack() as held:
        held.enter_context(lock(here, 0.0, required=True))
        assert aot_process(verb, one, *rest, "-o", "other.msgpack").code == 0
        words = [sys.executable, "-m", "pretuned.aot", verb, one, *rest, "-o", f"./{one}"]
        with subprocess.Popen(words, cwd=here, stderr=subprocess.PIPE, text=True) as waits:
            assert waits.stderr is not None
            assert "works in" in waits.stderr.readline()
            put("one", lambda base: chosen(base, cells(base, 1, 2_000, H200)))
            held.close()
            waits.stderr.read()
    assert waits.returncode == 0
    with open_bundle(here / one) as bundle:  # what was put there meanwhile was read
        assert any(choice.time_ns == 2_000 for problem in bundle.problems() for choice in bundle.find(problem))


@pytest.mark.parametrize("verb", ["merge", "prune"])
def test_an_output_that_is_something_else(aot, here, put, verb):
    one = put("one", lambda base: base)
    (here / "notes.txt").write_text("precious")
    (here / "folder").mkdir()
    rest = (put("two", revised),) if verb == "merge" else ("--models", "shape:E=8,H=256,I=128,k=2 name=small")
    for out, code, words in (
        ("notes.txt", 2, "is there and is no bundle"),
        ("folder", 2, "is a directory"),
        ("nowhere/x.msgpack", 1, "is no directory"),
    ):
        ended = aot(verb, one, *rest, "-o", out)
        assert (ended.code, ended.out) == (code, "")
        assert words in ended.err
        assert ended.err.count("\n") == 1
    assert (here / "notes.txt").read_text() == "precious"


def test_merge_of_what_is_no_bundle(aot, here, put):
    one = put("one", lambda base: base)
    data = bytearray((here / one).read_bytes())
    data[-10] ^= 1
    (here / "flipped.msgpack").write_bytes(data)
    ended = aot("merge", one, "flipped.msgpack", "-o", "out.msgpack")
    assert ended.code == 2
    assert "flipped.msgpack" in ended.err
    assert aot("merge", one, one, "-o", "out.msgpack").code == 2
    assert not (here / "out.msgpack").exists()


def test_diff(aot, put):
    one = put("one", lambda base: chosen(base, cells(base, 0, 1_000, None)))
    two = put("two", lambda base: chosen(base, cells(base, 1, 2_000, H200)))
    same = aot("diff", one, one, "--exit-code")
    assert (same.code, same.err) == (0, "")
    assert same.out.startswith("no difference")
    ended = aot("diff", one, two)
    assert ended.code == 0
    assert ended.out.splitlines()[0] == "from A to B: 3 choices changed, taking 2.00x the time"
    assert "choices that changed: 3" in ended.out
    assert "+100.0 %" in ended.out
    assert "NVIDIA H200" in ended.out
    every = aot("diff", one, two, "--choices", "--exit-code")
    assert every.code == 1
    assert every.out.count("modelled -> measured NVIDIA H200") == 3
    told = json.loads(aot("diff", one, two, "--json").out)
    assert told["differ"] is True
    assert [one["changed"] for one in told["choices"]] == [["variant", "source", "gpu", "time"]] * 3
    assert json.loads(aot("diff", one, one, "--json").out)["differ"] is False


def test_torch_as_a_choice_is_listed_compared_merged_and_reported(aot, here, put):
    def by_torch(base):
        found = chosen(base, cells(base, 0, 3_000, H200))
        rows = {problem: tuple(one._replace(torch_ns=1_500) for one in row) for problem, row in found.choices.items()}
        return found._replace(choices=rows)

    one, two = put("one", lambda base: chosen(base, cells(base, 0, 2_000, H200))), put("two", by_torch)
    (listed, *_) = json.loads(aot("inspect", two, "--choices", "--json").out)["choices"]
    assert (listed["time_us"], listed["torch_us"]) == (3.0, 1.5)
    assert "1.5" in aot("inspect", two, "--choices").out
    told = json.loads(aot("diff", one, two, "--json").out)["choices"]
    assert [row["changed"] for row in told] == [["time", "torch"]] * 3
    assert [told[0][side][field] for side in ("old", "new") for field in ("time_us", "torch")] == [
        2.0,
        False,
        1.5,
        True,
    ]
    assert aot("diff", one, two, "--choices").out.count("-> torch, else ") == 3
    told = json.loads(aot("merge", one, two, "-o", "both.msgpack", "--json").out)["conflicts"]
    assert [(row["kept"]["path"], row["kept"]["torch_us"], row["dropped"]["torch_us"]) for row in told] == [
        (two, 1.5, None)
    ] * 3
    assert (
        ": measured 3.00 us, torch 1.50 us on NVIDIA H200"
        in aot("merge", one, two, "-o", "both.msgpack", "--conflicts").out
    )
    assert verify("both.msgpack").choices == verify(two).choices
    assert aot("report", "both.msgpack", "-o", "r.html").code == 0
    found = [cell for cell in reports.cells_of((here / "r.html").read_text()) if cell["state"] == "measured"]
    assert [(cell["config"], cell["us"], cell["torch"]) for cell in found] == [("torch grouped_mm", 1.5, 1.5)] * 3
    assert all(cell["second_us"] == 3.0 and cell["second"][0].isdigit() for cell in found)


def test_diff_shows_models_problems_and_variants(aot, put):
    one = put("one", lambda base: base)
    two = put("two", lambda base: revised(chosen(base, cells(base, 0, 1_000, None))))
    out = aot("diff", one, two).out
    assert out.splitlines()[0].startswith("from A to B: 1 model gone, 1 changed; ")
    assert "-  odd tp=1 ep=1 bf16" in out
    assert "~  small tp=1 ep=1 bf16  4 -> 1 problems" in out
    assert "1 -> 2" in out
    assert "\n-  forward bf16 E=8 N=250 K=125" in out


def test_prune(aot, here, put, small_bundle):
    one = put("one", lambda base: base)
    small = "shape:E=8,H=256,I=128,k=2 tokens=1..64 name=small"
    ended = aot("prune", one, "--models", small, "--ops", "forward", "-o", "small.msgpack")
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert "smaller than one.msgpack" in ended.out
    told = json.loads(aot("prune", one, "-m", small, "--ops", "forward", "-o", "small.msgpack", "--json").out)
    assert told["models"] == {"before": 2, "after": 1}
    assert told["problems"] == {"before": 8, "after": 4}
    assert told["size_bytes"]["after"] == (here / "small.msgpack").stat().st_size < told["size_bytes"]["before"]
    assert told["unchanged"] is True
    assert told["missing"] == []
    more = aot("prune", one, "-m", small.replace("64", "128"), "--ops", "forward", "-o", "small.msgpack")
    assert more.code == 0
    assert "lacks 4 choices of these models" in more.err
    none = aot("prune", one, "-m", "Qwen/Qwen3-30B-A3B", "-o", "none.msgpack")
    assert (none.code, none.out) == (2, "")
    assert "built for odd, small" in none.err


@pytest.mark.parametrize("verb", ["merge", "prune"])
def test_an_output_that_is_a_link_is_replaced_and_said_to_be(aot, here, put, verb):
    one = put("one", lambda base: base)
    rest = (put("two", revised),) if verb == "merge" else ("--models", "shape:E=8,H=256,I=128,k=2 name=small")
    assert "(unchanged)" not in aot(verb, one, *rest, "-o", "target.msgpack").out
    (here / "link.msgpack").symlink_to("target.msgpack")
    before = (here / "target.msgpack").read_bytes()
    assert "(unchanged)" not in aot(verb, one, *rest, "-o", "link.msgpack").out
    assert not (here / "link.msgpack").is_symlink()
    assert (here / "link.msgpack").read_bytes() == (here / "target.msgpack").read_bytes() == before
    assert "(unchanged)" in aot(verb, one, *rest, "-o", "link.msgpack").out


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
    told = json.loads(ended.out)
    assert not told["differ"]
    assert told["size_bytes"] == [small_bundle.stat().st_size, (here / "one.msgpack.xz").stat().st_size]
