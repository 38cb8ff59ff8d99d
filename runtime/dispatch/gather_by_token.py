"""Whether a pass that gathers rows reads each row of x once (``launch/gather.py``), or once for each row it goes to."""

from __future__ import annotations

# Of the result: with 117 MB two launches take as long as one on an H200, with 134 MB less, with 42 MB longer
# (docs/inside/trials.md, gather-by-token).
LEAST_BYTES = 128 << 20


def by_token(M: int, row_bytes: int, slots: int, top_k: int) -> bool:
    """Whether each row of x is to be read once, for all rows that it goes to, which takes a launch more.

    Not where most of the ``slots``, ``top_k`` of each row of x, are not in the index.
    """
    return top_k > 1 and M * row_bytes >= LEAST_BYTES and 0 < slots <= 2 * M
