# ruff: noqa
"""old candidates, new candidates, journal in, journal out: digests renamed"""

import sys, json, zlib
from pretuned.artifacts.store import open_bundle

old, new, jin, jout = sys.argv[1:]


def keys(p):
    b = open_bundle(p)
    out = {}
    for v in b.variants():
        k = repr((v.kernel, v.op, v.dtype, v.layout, v.fusion, v.config, v.alignment, v.max_experts))
        assert k not in out
        out[k] = v
    return out


o = keys(old)
n = keys(new)
m = {o[k].cubin_sha256.hex(): n[k].cubin_sha256.hex() for k in o}
print(len(o), len(n), len(m), sum(a != b for a, b in m.items()))
import re

t = open(jin).read().split("\n")
out = []
hdr = json.loads(t[0][9:])
b = open_bundle(new)
hdr["kernels"] = [
    [k.name, k.revision, k.source_sha256.hex()] for k in b.kernels if k.name in {x[0] for x in hdr["kernels"]}
]
t[0] = t[0][:9] + json.dumps(hdr, separators=(",", ":"))
for line in t:
    if not line:
        continue
    body = line[9:] if line is t[0] else re.sub(r"[0-9a-f]{64}", lambda x: m.get(x[0], x[0]), line[9:])
    out.append("%08x " % zlib.crc32(body.encode()) + body)
open(jout, "w").write("\n".join(out) + "\n")
