"""What a name may be, and how any text is shown.

Names are looked up, never joined to a path; this holds all the same if someone does.
"""

from __future__ import annotations

import functools
import re

from .limits import MAX_NAME_CHARS

PART = "+"  # in a model's name, between it and the kind of experts, where it has several: "org/model+vision"
_IDENTIFIER = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+@,:=()-]*(?:/[A-Za-z0-9][A-Za-z0-9 ._+@,:=()-]*)*", re.ASCII)
_TEXT = re.compile(r"[ -~]*", re.ASCII)


@functools.lru_cache(maxsize=1024)  # a bundle of a thousand variants has a hundred such names
def _identifies(name: str) -> bool:
    return _IDENTIFIER.fullmatch(name) is not None


def is_identifier(name: str) -> bool:
    """Whether ``name`` may name a kernel, an entry, an argument or a knob: letters, digits, ``_`` and ``$``."""
    return len(name) <= MAX_NAME_CHARS and _identifies(name)


def is_label(name: str) -> bool:
    """Whether ``name`` may name a model or a GPU: ``Qwen/Qwen3-30B-A3B``, ``NVIDIA H200``.

    Parts between slashes begin with a letter or digit, so it is never absolute and never climbs with ``..``.
    """
    return len(name) <= MAX_NAME_CHARS and _LABEL.fullmatch(name) is not None


def is_text(text: str) -> bool:
    """Whether ``text`` may be a version or a compile option: printable ASCII."""
    return len(text) <= MAX_NAME_CHARS and _TEXT.fullmatch(text) is not None


def printable(text: str) -> str:
    """``text`` for a terminal or a log: each character that does not print (a line's end too) as Python escapes it."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
