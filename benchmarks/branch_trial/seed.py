# ruff: noqa
"""Which cells are measured again: ``python seed.py FIRST.journal CANDIDATES.msgpack SECOND.journal REDO.json``.

Those from 96 rows an expert on, those where pingpong of the first journal leads by over 1.5 %, and those where it is
the model's choice, beside the two best others. The rest go into the second journal without pingpong's times.
"""

import json
import math
import sys
import zlib

from pretuned.artifacts.store import open_bundle
from pretuned.kernels.revisions import REVISIONS

first, candidates, second, redo_at = sys.argv[1:]
lines = open(first).read().splitlines()
with open_bundle(candidates) as bundle:
    today = {one.cubin_sha256.hex() for one in bundle.variants()}
timed = {time[0] for text in lines[1:] for time in json.loads(text[9:])["timings"]}
GONE = timed - today  # pingpong, whose code is other code now
redo, keep = {}, []
for text in lines[1:]:
    record = json.loads(text[9:])
    times = {one[0]: math.sqrt(one[1][0] * one[1][1]) for one in record["timings"]}
    other = {one: time for one, time in times.items() if one not in GONE}
    lead = min(other.values()) / min((time for one, time in times.items() if one in GONE), default=math.inf)
    if lead > 1 / 0.985 or record["bucket"] >= 96 * record["problem"][2] or record["modelled"] in GONE:
        redo[json.dumps([record["problem"], record["bucket"]])] = sorted(other, key=other.get)[:2]
        continue
    record["timings"] = [one for one in record["timings"] if one[0] not in GONE]
    if record["duel"] and GONE & set(record["duel"][:2]):
        record["duel"] = None
    keep.append(record)
header = json.loads(lines[0][9:])
header["kernels"] = [[name, revision, REVISIONS[name].sha256] for name, revision, _ in header["kernels"]]
with open(second, "w") as out:
    for one in (header, *keep):
        text = json.dumps(one, separators=(",", ":"))
        out.write(f"{zlib.crc32(text.encode()):08x} {text}\n")
json.dump(redo, open(redo_at, "w"))
print(len(redo), len(keep))
