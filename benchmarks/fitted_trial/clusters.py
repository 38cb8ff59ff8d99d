# ruff: noqa
"""Clusters of two programs: what Triton has no word for, said in the PTX that it makes.

A kernel for clusters (``CLUSTER``, kernels/pipeline.py) marks what concerns both programs by remarks in its PTX. Between
``// cluster: both`` and ``// cluster: end`` a TMA load goes to both programs' shared memory and barriers
(``.multicast::cluster``), and an arrival at a barrier, or a store, is repeated in the other program (``mapa``); between
``// cluster: leader`` and the end an arrival goes to the first program instead. ``// cluster: sync`` stands in front of
a barrier of the whole cluster that one warpgroup waits at. The other warps arrive when they begin and don't wait: they
must hand registers over before that warpgroup gets so far, and it wakes them after it.
"""

from __future__ import annotations

import re

_REGION = re.compile(r"// cluster: (both|leader)\n(.*?)// cluster: end\n", re.DOTALL)
_COPY = re.compile(
    r"(@%p\d+ )?cp\.async\.bulk\.tensor\.(\dd)\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes"
    r" (\[[^;]*\]);"
)
_ARRIVE = re.compile(r"(@%p\d+ )?mbarrier\.arrive\.shared::cta\.b64 _, \[(%r\d+)\];")
_STORE = re.compile(r"st\.shared\.v4\.b32 \[ (%r\d+) \+ 0 \], (\{[^}]*\});")
_ENTRY = re.compile(r"(\n\.reqntid (\d+)\n(?:\.[^\n]*\n)*)\{\n((?:\t\.reg[^\n]*\n)+)")
_OTHER = "mov.u32 rank, %cluster_ctarank; xor.b32 rank, rank, 1;"


def _arrive(found: re.Match[str], rank: str) -> str:
    return (
        f"{{ .reg .b32 rank, at; {rank} mapa.shared::cluster.u32 at, {found[2]}, rank; "
        f"{found[1] or ''}mbarrier.arrive.shared::cluster.b64 _, [at]; }}"
    )


def _send(found: re.Match[str], store: re.Match[str]) -> str:
    return (
        f"{{ .reg .b32 rank, at, bar; {_OTHER} mapa.shared::cluster.u32 at, {store[1]}, rank; "
        f"mapa.shared::cluster.u32 bar, {found[2]}, rank; {found[1] or ''}st.async.shared::cluster"
        f".mbarrier::complete_tx::bytes.v4.b32 [at], {store[2].rstrip(';')}, [bar]; }}"
    )


def _both(text: str) -> tuple[str, int]:
    text, copies = _COPY.subn(
        lambda m: (
            f"{{ .reg .b16 programs; mov.b16 programs, 3; {m[1] or ''}cp.async.bulk.tensor.{m[2]}.shared::cluster"
            f".global.mbarrier::complete_tx::bytes.multicast::cluster {m[3]}, programs; }}"
        ),
        text,
    )
    stores = list(_STORE.finditer(text))
    if stores:  # words of the queue and the barrier that says so: st.async does both at once
        (store,) = stores
        text, arrivals = _ARRIVE.subn(lambda m: f"{m[0]} {_send(m, store)}", text)
    else:
        text, arrivals = _ARRIVE.subn(lambda m: f"{m[0]} {_arrive(m, _OTHER)}", text)
    return text, copies + arrivals


def clustered(ptx: str) -> str:
    """The PTX of a kernel for clusters of two.

    Raises
    ------
    ValueError
        if a remark is about nothing, or the kernel doesn't begin as expected.
    """

    def region(found: re.Match[str]) -> str:
        inner = found[2]
        assert "// cluster:" not in inner, inner
        if found[1] == "both":
            text, count = _both(inner)
        else:
            text, count = _ARRIVE.subn(lambda m: _arrive(m, "mov.b32 rank, 0;"), inner)
        if not count:
            raise ValueError(f"a remark about nothing: {inner}")
        return text

    ptx, regions = _REGION.subn(region, ptx)
    if not regions or "// cluster: both" in ptx or "// cluster: end" in ptx or ptx.count("// cluster: sync") != 1:
        raise ValueError("not the PTX of a kernel for clusters")
    start = (
        "\t{ .reg .pred other; .reg .b32 thread; mov.u32 thread, %tid.x; setp.ge.u32 other, thread, 128; "
        "@other barrier.cluster.arrive.relaxed; }\n"
    )
    ptx, entries = _ENTRY.subn(
        lambda m: f"{m[1].rstrip()}\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n{{\n{m[3]}{start}", ptx
    )
    if entries != 1:
        raise ValueError(f"{entries} kernels in the PTX, wanted 1")
    return ptx
