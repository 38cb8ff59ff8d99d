"""Rules for names."""

from __future__ import annotations

import pytest

from pretuned.artifacts import limits as names


@pytest.mark.parametrize("name", ["a", "_", "$x", "grouped_gemm_0d1d", "A" * 200])
def test_identifiers(name):
    assert names.is_identifier(name)


@pytest.mark.parametrize("name", ["", "0a", "a.b", "a-b", "a b", "a/b", "a\n", "a\0", "é", "A" * 201])
def test_no_identifiers(name):
    assert not names.is_identifier(name)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-30B-A3B",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA GeForce RTX 4090",
        "a/b/c",
        "x (y)",
        "0",
        "mix+match@1:2,3=4",
    ],
)
def test_labels(name):
    assert names.is_label(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "..",
        ".",
        "a/..",
        "../a",
        "a/../b",
        ".a",
        "-a",
        " a",
        "a\n",
        "a\0b",
        "a\\b",
        "é",
        "a" * 201,
    ],
)
def test_no_labels(name):
    assert not names.is_label(name)


def test_texts():
    assert names.is_text("Cuda compilation tools, release 12.9, V12.9.86")
    assert names.is_text("")
    assert not names.is_text("a\n")
    assert not names.is_text("a\x7f")
    assert not names.is_text("a" * 201)
