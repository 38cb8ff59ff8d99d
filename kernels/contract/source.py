"""What every kernel says of its source, also one that goes over rows: which function it is, and of which revision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel: its function, and the source it stands for.

    From the first release on ``revision`` goes up whenever the source changes; until then only where a launcher has to
    know. Bundles record it: when they are merged a later one beats an earlier one, and one of two sources is refused.
    """

    name: str  # of the function, and the symbol in cubins
    revision: int
    home: str  # the module that has the function, below ``kernels``
    sha256: str  # of what it is compiled from: revisions.source_sha256
    launched_since: int  # the first revision whose code does all that today's launchers ask of it
