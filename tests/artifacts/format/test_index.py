"""A glance at the first bytes of a bundle: its target and its GPUs, or nothing."""

from __future__ import annotations

import dataclasses

import golden_bundles
from hypothesis import given
from hypothesis import strategies as st

from pretuned.artifacts.format import codec
from pretuned.artifacts.format.index import GLANCED_BYTES, glance, glance_at_gpus
from pretuned.artifacts.format.wire import PREAMBLE_BYTES
from pretuned.artifacts.records.target import Gpu, Target

MEDIUM = codec.encode(golden_bundles.medium())


@given(st.binary(max_size=80), st.integers(0, 80))
def test_a_glance_at_anything_is_a_target_or_nothing(tail, kept):
    begin = MEDIUM[PREAMBLE_BYTES : PREAMBLE_BYTES + kept] + tail
    assert glance(begin) is None or isinstance(glance(begin), Target)


@given(st.builds(Target, st.integers(10, 9999), st.booleans()))
def test_a_glance_tells_every_target(target):
    data = codec.encode(dataclasses.replace(golden_bundles.small(), target=target))
    assert glance(data[PREAMBLE_BYTES : PREAMBLE_BYTES + GLANCED_BYTES]) == target


@given(st.binary(max_size=300), st.integers(0, 1000))
def test_a_glance_at_anything_is_gpus_or_nothing(tail, kept):
    begin = MEDIUM[PREAMBLE_BYTES : PREAMBLE_BYTES + kept] + tail
    assert glance_at_gpus(begin) is None or all(isinstance(one, Gpu) for one in glance_at_gpus(begin))
