"""aot report, as a command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reports import cells_of

from pretuned.aot.journal.file import Header, open_journal
from pretuned.aot.journal.records import Measured, Timing
from pretuned.artifacts import codec
from pretuned.artifacts.records import Gpu

ROOT = Path(__file__).resolve().parents[3]
A100 = Gpu("NVIDIA A100-SXM4-80GB", 108, 81920, 12080)


@pytest.fixture
def journal(here, small_bundle):
    """A journal of one cell of the small bundle; its name."""
    bundle = codec.decode(small_bundle.read_bytes(), str(small_bundle))
    problem, (choice, *_) = next((product, row) for product, row in bundle.choices.items() if product.N == 256)
    timing = Timing(bundle.variants[choice.variant].cubin_sha256, (5_000, 5_100), 0.001, 20, 0.001)
    path = here / "a100.journal"
    with open_journal(path, Header(80, A100, bundle.kernels)) as opened:
        opened.append([Measured(problem, choice.bucket, timing.variant, (timing,), None, (9_000,), 1.0, 12080)])
    return path.name


def test_a_file_that_is_not_there_is_named(aot, here, journal):
    for arguments in (("nope",), (journal, "--candidates", "nope"), (journal, "--journal", "nope")):
        ended = aot("report", *arguments)
        assert (ended.code, ended.out) == (2, "")
        assert "'nope': no such file" in ended.err


def test_a_bundle(aot, here, small_bundle):
    ended = aot("report", small_bundle)
    assert ended.code == 0, ended.err
    headline, written = ended.out.splitlines()
    assert headline.endswith("the A100 80GB SXM.")
    assert written.startswith("report.html: 4 GEMMs, 56 cells (56 modelled), ")
    text = (here / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "small" in text
    report = json.loads(aot("report", small_bundle, "--json").out)
    assert report == {
        "path": "report.html",
        "headline": headline,
        "size_bytes": (here / "report.html").stat().st_size,
        "gemms": 4,
        "cells": 56,
        "measured": 0,
        "modelled": 56,
        "missing": 0,
        "notes": [],
    }
    assert (here / "report.html").read_text() == text


def test_a_journal_and_both(aot, here, journal, small_bundle):
    ended = aot("report", journal, "--candidates", small_bundle, "-o", "j.html")
    assert ended.code == 0, ended.err
    assert "(1 measured)" in ended.out
    text = (here / "j.html").read_text()
    assert "NVIDIA A100-SXM4-80GB, 108 SMs, 81920 MiB, CUDA driver 12.8" in text
    (config,) = {cell["config"] for cell in cells_of(text)}
    assert config.startswith(("32x128x64 w4 s4", "64x64x64 w4 s4"))
    assert aot("report", journal, "-o", "j.html").code == 0
    (config,) = {cell["config"] for cell in cells_of((here / "j.html").read_text())}
    assert config.startswith("cubin ")
    report = json.loads(aot("report", small_bundle, "--journal", journal, "-o", "j.html", "--json").out)
    assert (report["cells"], report["modelled"]) == (56, 56)


def test_damaged_records_are_reported(aot, here, journal):
    data = bytearray((here / journal).read_bytes())
    data[-20] ^= 1
    (here / journal).write_bytes(data)
    ended = aot("report", journal)
    assert ended.code == 0
    assert "1 damaged records of a journal are left out" in ended.err


def test_what_is_missing_of_some_models(aot, here, small_bundle):
    wanted = "shape:E=8,H=256,I=128,k=2 tokens=1..128 name=small"
    report = json.loads(aot("report", small_bundle, "--models", wanted, "--ops", "forward", "--json").out)
    assert (report["modelled"], report["missing"]) == (56, 4)


def test_mistakes(aot, here, journal, small_bundle):
    (here / "notes.html").write_text("my notes")
    (here / "text").write_text("no journal")
    (here / "text.msgpack").write_text("no bundle")
    (here / "other.journal").write_bytes((here / journal).read_bytes())
    bundle = codec.decode(small_bundle.read_bytes(), "small")
    with open_journal(here / "h100.journal", Header(90, A100, bundle.kernels)):
        pass
    for arguments, words in (
        ((small_bundle, "-o", "notes.html"), "is no HTML page: it is not overwritten"),
        (("text",), "no journal"),
        (("text.msgpack",), "bundle 'text.msgpack': file is 9 bytes"),
        (("nothing.msgpack",), "nothing.msgpack"),
        ((small_bundle, "--journal", "text"), "no journal"),
        ((small_bundle, "--journal", "h100.journal"), "'h100.journal' is for sm_90, "),
        ((small_bundle, "--ops", "forward"), "--ops needs --models"),
        ((journal, "--candidates", "text"), "'text'"),
    ):
        ended = aot("report", *arguments)
        assert (ended.code, ended.out) == (2, ""), arguments
        assert words in ended.err
    assert (here / "notes.html").read_text() == "my notes"
    assert not (here / "report.html").exists()


def test_it_needs_no_matplotlib(here, small_bundle):
    code = (
        "import sys; sys.modules['matplotlib'] = None; from pretuned.aot import __main__ as aot; sys.exit(aot.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", small_bundle], capture_output=True, check=False, cwd=here
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_the_shipped_journal_makes_a_page_that_can_be_mailed(aot, here):
    """132,213 cells of an H200 and an H100 are measured; the 32 others are modelled."""
    before = time.process_time()
    report = json.loads(
        aot(
            "report",
            ROOT / "artifacts/bundles/catalogue-sm90.msgpack",
            "--json",
            "--journal",
            ROOT / "benchmarks/results/catalogue-h200.journal.xz",
        ).out
    )
    assert time.process_time() - before < 90
    assert report["headline"] == "1.44 x torch over 2,859 cells, worst 0.96, 132,213 measured, 32 modelled, 34 missing."
    assert report["size_bytes"] < 6_000_000
