"""FORMAT.md is right: its example is what the writer writes, its limits are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import golden_bundles

import pretuned.artifacts
from pretuned.artifacts import codec, format, limits

TEXT = (Path(pretuned.artifacts.__file__).parent / "FORMAT.md").read_text()
WORDS = " ".join(TEXT.split())


def test_the_example_byte_for_byte():
    block = TEXT.split("```hex\n")[1].split("```")[0]
    data = b""
    for line in block.splitlines():
        match = re.match(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)(?: |$)", line)
        assert match, line
        assert int(match[1], 16) == len(data), line
        data += bytes.fromhex(match[2])
    assert data == codec.encode(golden_bundles.small())


def test_the_tables_name_every_field_in_order():
    top = re.findall(r"^\| `(\w+)` \|", TEXT, flags=re.M)
    assert tuple(top) == format.FIELDS
    variant = WORDS.split("**Variant**")[1].split("**Key of a problem**")[0]
    places = [variant.index(f"`{name}`") for name in format.VARIANT]
    assert places == sorted(places)
    for kind in format.KINDS:
        assert kind in variant


def test_the_limits_are_those_of_the_code():
    section = WORDS.split("## 5. Limits")[1]
    for text in (
        f"file {limits.MAX_FILE_BYTES >> 20} MiB",
        f"index {limits.MAX_INDEX_BYTES >> 20} MiB",
        f"models {limits.MAX_MODELS_BYTES >> 20} MiB",
        f"nested record {limits.MAX_RECORD_BYTES:,} bytes",
        f"cubin {limits.MAX_CUBIN_BYTES >> 20} MiB",
        f"{limits.MAX_VARIANTS} variants and models, {limits.MAX_PROBLEMS:,} problems",
        f"E and top_k {limits.MAX_EXPERTS:,}",
        f"strings {limits.MAX_NAME_CHARS} characters",
    ):
        assert text in section
    assert limits.MAX_MODELS == limits.MAX_VARIANTS
    assert limits.MAX_DIM == 2**31 - 1
    assert limits.MAX_TIME_NS == 2**53 - 1
    assert f"The bundle format, version {limits.FORMAT}" in TEXT
