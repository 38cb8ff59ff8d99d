"""What a name may be, and how any text is shown.

Names are looked up, never joined to a path; this holds all the same if someone does.
"""

from __future__ import annotations

from .limits import MAX_NAME_CHARS

PART = "+"  # in a model's name, between it and the kind of experts, where it has several: "org/model+vision"
_MARKS = frozenset(" ._+@,:=()-")  # in a label, beside letters and digits


def is_identifier(name: str) -> bool:
    """Whether ``name`` may name a kernel, an entry, an argument or a knob: letters, digits, ``_`` and ``$``."""
    return len(name) <= MAX_NAME_CHARS and name.isascii() and name.replace("$", "_").isidentifier()


def is_label(name: str) -> bool:
    """Whether ``name`` may name a model or a GPU: ``Qwen/Qwen3-30B-A3B``, ``NVIDIA H200``.

    Parts between slashes begin with a letter or digit, so it is never absolute and never climbs with ``..``.
    """
    return (
        len(name) <= MAX_NAME_CHARS
        and name.isascii()
        and all(part[:1].isalnum() and all(one.isalnum() or one in _MARKS for one in part) for part in name.split("/"))
    )


def is_text(text: str) -> bool:
    """Whether ``text`` may be a version or a compile option: printable ASCII."""
    return len(text) <= MAX_NAME_CHARS and text.isascii() and text.isprintable()


def printable(text: str) -> str:
    """``text`` for a terminal or a log: each character that does not print (a line's end too) as Python escapes it."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
