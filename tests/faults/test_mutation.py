"""Random mutation, the digest as it was or made right. Longer: ``python -m tests.faults --long``."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import BundleError
from pretuned.artifacts.records import Gpu

sys.path.append(str(Path(__file__).parent))
import mutate

pytestmark = pytest.mark.slow

GOLDEN = {path.stem: path.read_bytes() for path in sorted((Path(__file__).parents[1] / "golden").glob("*.msgpack"))}


@pytest.mark.parametrize("mutations", [20_000, pytest.param(60_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", GOLDEN)
def test_no_mutation_is_accepted(name, mutations):
    data = GOLDEN[name]
    inputs = mutate.flips(data, random.Random(f"flips {name}"))
    assert mutate.run(inputs, mutations, lambda got: got != data and mutate.accepted(got)) == 0


@pytest.mark.parametrize(
    ("name", "mutations"),
    [
        *((value, 15_000) for value in GOLDEN if "gpus" in value),
        *(pytest.param(value, 40_000, marks=pytest.mark.nightly) for value in GOLDEN),
    ],
)
def test_a_mutation_with_the_digest_made_right_is_refused_or_canonical(name, mutations):
    inputs = mutate.sealed(GOLDEN[name], random.Random(f"sealed {name}"))
    accepted = functools.partial(mutate.accepted, whole=False)  # whole: test_any_change_to_the_index
    assert mutate.run(inputs, mutations, accepted) > 0, "the fuzzer never got past the checks"


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(st.data())
def test_any_change_to_the_index(data):
    golden = GOLDEN[data.draw(st.sampled_from(sorted(GOLDEN)))]
    at = data.draw(st.integers(0, len(golden) - 1))
    new = data.draw(st.binary(min_size=0, max_size=12))
    cut = data.draw(st.integers(0, 12))
    mutate.accepted(mutate.craft.reseal(golden[:at] + new + golden[at + cut :]))


def test_the_lazy_reader_raises_nothing_else(tmp_path):
    """The lazy reader reads accepted data as the strict reader would, or refuses it when it is used."""
    path = tmp_path / "b.msgpack"
    inputs = mutate.sealed(GOLDEN["format2-small"], random.Random(0))
    opened = 0
    for _ in range(3000):
        path.write_bytes(next(inputs))
        try:
            with open_bundle(path, later=True) as file:
                assert file.may_be_of(Gpu("NVIDIA H200", 132, 143771, 13000)) in (True, False)
            with open_bundle(path) as file:
                opened += 1
                file.variants()
                file.models()
                for problem in file.problems():
                    file.find(problem)
                for i in range(file.variant_count):
                    file.cubin(i)
        except BundleError:
            pass
    assert opened > 100


def test_the_long_run_in_small(tmp_path):
    """The program whose figures docs/inside/reliability.md has, for the two rows that are longest."""
    out, root = tmp_path / "long.json", Path(__file__).parents[2]
    few = ("--rows", "R1,R11", "--inputs", "600", "--loads", "60", "--cores", "2", "--readers", "2", "--minutes", "1")
    command = [sys.executable, "-m", "tests.faults", "--long", *few, "--out", out]
    subprocess.run(command, cwd=root, capture_output=True, check=True)
    ((fuzzed,), (loaded,)) = json.loads(out.read_text()).values()
    assert (fuzzed["mutations"], fuzzed["sealed"], fuzzed["accepted"], fuzzed["wrong"]) == (600, 600, 0, 0)
    assert 0 < fuzzed["canonical"] < 600
    assert 0 < fuzzed["slowest_cpu_s"] < 1
    assert (loaded["loads"], loaded["failed"]) == (60, 0)
    assert loaded["republishes"] >= 200
