"""The largest sizes and counts that a bundle may have, and which names; how untrusted text is printed.

A reader checks sizes before it allocates memory. pretuned never joins a name to a path. The checks of names keep it
safe if somebody does.
"""

from __future__ import annotations

FORMAT = 2  # the format that this version writes
OLDEST_FORMAT = 2  # the oldest format that it reads

MAX_FILE_BYTES = 256 << 20
MAX_INDEX_BYTES = 16 << 20
MAX_CUBIN_BYTES = 8 << 20
MAX_RECORD_BYTES = 65535  # one nested record: a variant, a problem's choices
MAX_MODELS_BYTES = 8 << 20  # the one nested record of all models
MAX_BLOB_BYTES = 256 << 20  # one digest-checked file of the compile cache

MAX_VARIANTS = 4096  # no array is longer: msgpack allocates nested arrays' claimed lengths before it refuses them
MAX_PROBLEMS = 65535
MAX_MODELS = 4096
MAX_KERNELS = 256
MAX_GPUS = 256
MAX_OPTIONS = 64
MAX_ARGUMENTS = 64
MAX_KNOBS = 64
MAX_MODEL_PROBLEMS = 4096
MAX_MODEL_ROWS = 1 << 20  # problems of all models together

MAX_NAME_CHARS = 200
MAX_EXPERTS = 65536
MAX_WIDTH = 1 << 20  # a model's H and I
MAX_DIM = 2**31 - 1  # N, K and any other int32
MAX_BUCKET_LOG2 = 31  # bucket_of(2**31 - 1) is 2**31
MAX_CHOICES = 1024  # of one problem: 32 GPUs, each with every bucket
MAX_PLAN_ROWS = 64  # of one choice
MAX_TIME_NS = 2**53 - 1  # the largest integer that all JSON readers read exactly
MAX_BOX = 256  # elements along one dimension of a TMA box (CUDA driver API, cuTensorMapEncodeTiled)
MAX_THREADS = 1024
MAX_SHARED_BYTES = 1 << 20
MAX_REGISTERS = 1024

MAX_OPEN_BUNDLES = 64  # file descriptors that a process holds; other bundles are opened again when they are read
MAX_FILES = 4096  # files of one directory that are listed
MAX_KEYS = 256  # of PRETUNED_TRUSTED_KEYS
MAX_LINKS = 40  # symbolic links followed for one path, Linux's own limit


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
