"""CUDA code in an extension module: what of it is taken along, and that it comes back where it was."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from fatbins import CUBIN, PTX, element, module


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import fatbin

    return fatbin


def codes(tool: ModuleType, data: bytes) -> list[list[tuple[int, int, bytes]]]:
    """Kind, capability and code of each element, by container."""
    zstd = tool.Zstd()
    return [
        [(element.kind, element.arch, element.unpressed(zstd).payload) for element in tool.elements(data, where)]
        for where in tool.containers(data)
    ]


def test_one_capability_s_code_comes_back(tool: ModuleType) -> None:
    own, old, new = (bytes([n]) * 4994 + b"kernel" for n in (90, 80, 100))
    data = module(
        [element(tool, CUBIN, 80, old), element(tool, CUBIN, 90, own), element(tool, CUBIN, 100, new)],
        [element(tool, PTX, 75, b"older" * 99), element(tool, PTX, 80, old), element(tool, CUBIN, 80, old)],
        [element(tool, CUBIN, 100, new)],
        [element(tool, PTX, 90, old), element(tool, CUBIN, 90, own, pressed=False)],
        [element(tool, CUBIN, 90, own), element(tool, CUBIN, 90, new)],  # 90 and 90a
    )
    zstd = tool.Zstd()
    rest, code = tool.cut(data, 90, zstd)
    assert len(rest) == len(data)
    assert own in code
    assert new not in code.replace(own + new, b"")
    back = tool.whole(rest, code, zstd)
    assert codes(tool, back) == [
        [(CUBIN, 90, own)],
        [(PTX, 80, old)],
        [],
        [(CUBIN, 90, own)],
        [(CUBIN, 90, own), (CUBIN, 90, new)],
    ]
    assert [container.start for container in tool.containers(back)] == [
        container.start for container in tool.containers(data)
    ]
    where = tool.section(data)
    assert (back[: where.start], back[where.stop :]) == (data[: where.start], data[where.stop :])


def test_code_that_this_zstd_presses_less_is_handed_over_as_it_is(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = module([element(tool, CUBIN, 90, b"".join(n.to_bytes(2, "big") for n in range(9000)))])
    zstd = tool.Zstd()
    monkeypatch.setattr(zstd, "press", lambda code, level: b"\0" * len(code))
    rest, code = tool.cut(data, 90, zstd)
    assert len(code) < 18000
    assert tool.whole(rest, code, zstd) == data


def test_kernels_by_name_stay_behind(tool: ModuleType) -> None:
    data = module([element(tool, CUBIN, 90, b"_Z3one")], [element(tool, CUBIN, 90, b"_Z3two")])
    zstd = tool.Zstd()
    rest, code = tool.cut(data, 90, zstd, re.compile(b"one"))
    assert codes(tool, tool.whole(rest, code, zstd)) == [[], [(CUBIN, 90, b"_Z3two")]]


def test_what_is_not_of_one_file_is_reported(tool: ModuleType) -> None:
    zstd = tool.Zstd()
    rest, code = tool.cut(module([element(tool, CUBIN, 90, b"code" * 50)]), 90, zstd)
    with pytest.raises(ValueError, match="150 bytes of code are none that were cut from this file"):
        tool.whole(rest, code[:150], zstd)
    with pytest.raises(ValueError, match="no ELF file"):
        tool.section(b"PK")
    with pytest.raises(ValueError, match="zstd: error"):
        zstd.unpress(b"nothing pressed", 100)
