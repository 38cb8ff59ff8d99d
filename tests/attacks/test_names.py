"""Path traversal in names: refused at decode, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

import craft
import msgpack
import pytest

from pretuned.artifacts import codec
from pretuned.artifacts.errors import BundleCorrupt

EVIL = ["/etc/passwd", "..", "../x", "a/../b", "a\0b", "a" * 256, "a" * 201, "\u202ecod", "é", "a\nb", "a//b", ""]
DATA = (Path(__file__).parents[1] / "golden" / "format2-medium.msgpack").read_bytes()
INDEX, _ = craft.parts(DATA)


def named(place: str, name: str) -> bytes:
    """The golden bundle with ``name`` in one of the places where a bundle has names."""
    if place == "gpu":
        return craft.changed(DATA, gpus=[{**INDEX["gpus"][0], "name": name}, INDEX["gpus"][1]])
    if place == "kernel":
        return craft.changed(DATA, kernels=[{**INDEX["kernels"][0], "name": name}, *INDEX["kernels"][1:]])
    if place == "model":
        first, *rest = msgpack.unpackb(INDEX["models"])
        return craft.changed(DATA, models=msgpack.packb([{**first, "name": name}, *rest]))
    if place in ("kernel of a variant", "entry"):
        return craft.changed_variant(DATA, **{place.split()[0]: name})
    if place == "knob":
        return craft.changed_variant(DATA, config=[[name, 1]])
    if place == "argument":
        return craft.changed_variant(DATA, arguments=[[name, "ptr"]], tensor_maps=[])
    assert place == "tensor map"
    maps = [{"argument": name, "element": 9, "box": [1, 1], "swizzle": 0}]
    return craft.changed_variant(DATA, arguments=[["x", "desc2"]], tensor_maps=maps)


PLACES = ["gpu", "kernel", "model", "kernel of a variant", "entry", "knob", "argument", "tensor map"]


@pytest.mark.parametrize("name", EVIL)
@pytest.mark.parametrize("place", PLACES)
def test_refused(place, name):
    with pytest.raises(BundleCorrupt):
        codec.decode(named(place, name), "b")


@pytest.mark.parametrize("place", ["gpu", "model", "entry", "knob", "argument"])
def test_a_plain_name_in_the_same_place_passes(place):
    assert codec.decode(named(place, "plain"), "b")
