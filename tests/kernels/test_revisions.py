"""A kernel whose source changed has a new revision: bundles of the old source say so."""

from __future__ import annotations

import re

import pytest

from pretuned.kernels.revisions import HERE, REVISIONS, source_sha256


@pytest.mark.parametrize("kernel", REVISIONS)
def test_the_recorded_digest_is_that_of_the_source(kernel: str) -> None:
    now, recorded = source_sha256(kernel), REVISIONS[kernel]
    assert now == recorded.sha256, (
        f"the source of {kernel} changed: in kernels/revisions.py raise its revision "
        f"(now {recorded.revision}; a revision that was never released may stay) and set its sha256 to {now}"
    )


def test_every_kernel_file_belongs_to_a_kernel() -> None:
    with_kernels = {path.name for path in HERE.glob("*.py") if re.search(r"@(triton|gluon)\.jit", path.read_text())}
    assert with_kernels == {name for revision in REVISIONS.values() for name in revision.sources}
