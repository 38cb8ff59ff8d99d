"""Which names a bundle may contain, and how untrusted text is printed.

pretuned never joins a name to a path. These checks keep it safe if somebody does.
"""

from __future__ import annotations

from .limits import MAX_NAME_CHARS

PART = "+"  # between a model's name and its kind of experts, if it has several kinds: "org/model+vision"
_MARKS = frozenset(" ._+@,:=()-")  # allowed in a label, next to letters and digits


def is_identifier(name: str) -> bool:
    """Return whether a kernel, entry, argument or knob may have this name: letters, digits, ``_`` and ``$``."""
    return len(name) <= MAX_NAME_CHARS and name.isascii() and name.replace("$", "_").isidentifier()


def is_label(name: str) -> bool:
    """Return whether a model or a GPU may have this name: ``Qwen/Qwen3-30B-A3B``, ``NVIDIA H200``.

    Each part between slashes begins with a letter or digit. So a label is no absolute path and contains no ``..`` part.
    """
    return (
        len(name) <= MAX_NAME_CHARS
        and name.isascii()
        and all(part[:1].isalnum() and all(c.isalnum() or c in _MARKS for c in part) for part in name.split("/"))
    )


def is_text(text: str) -> bool:
    """Return whether a version or compile option may have this text: printable ASCII."""
    return len(text) <= MAX_NAME_CHARS and text.isascii() and text.isprintable()


def printable(text: str) -> str:
    """Return ``text`` with unprintable characters, line ends included, escaped the way Python escapes them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
