"""Other names of the catalogue's models: a hub's URL, a repackager's name, a model in the local cache."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

# Organisations that republish others' models.
_REPACKAGERS = ("unsloth/", "redhatai/", "nvidia/", "amd/")
# Endings of the names of models in another format; all that match are taken off.
_SUFFIX = re.compile(
    r"-(?:unsloth|bnb|4bit|8bit|bf16|gguf|fp8(?:-?dynamic|-?block)?|nvfp4|mxfp4|fp4|awq|gptq(?:-?int[48])?|int[48]|w[48]a(?:16|8)"
    r"|quantized\.w[48]a(?:16|8))$",
    re.I,
)
_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co|modelscope\.cn/models)/+([^?#]+)", re.I)
_IN_REPOSITORY = ("tree", "blob", "resolve", "raw", "commits", "discussions")


def from_url(word: str) -> str | None:
    """org/model from the address of a model hub's page; None if ``word`` is no such address."""
    match = _URL.fullmatch(word.partition("?")[0].partition("#")[0].rstrip("/"))
    if match is None:
        return None
    parts = [part for part in match[1].split("/") if part]
    end = next((i for i, part in enumerate(parts) if part in _IN_REPOSITORY), len(parts))
    return "/".join(parts[:end][-2:])


def republished(word: str) -> str | None:
    """The last part of the name of the model that ``word`` is another format of, by its name; None if of none.

    ``unsloth/Qwen3-30B-A3B-bnb-4bit`` is ``Qwen3-30B-A3B``.
    """
    name = word.rpartition("/")[2]
    while (shorter := _SUFFIX.sub("", name)) != name:
        name = shorter
    changed = name != word.rpartition("/")[2] or word.lower().startswith(_REPACKAGERS)
    return name if changed and name else None


def cached_config(word: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The config.json of ``org/model`` in the Hugging Face cache: of the revision of ``main``, else the newest.

    If none can be read, a dangling link if there is one: reading it raises an error that says what to do.

    huggingface_hub's environment variables reference says where that cache is (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME).
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", word):
        return None
    xdg = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{xdg}/huggingface"
    try:
        hub = Path(environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
        model = hub / ("models--" + word.replace("/", "--"))
        snapshots = model / "snapshots"
        main = model / "refs" / "main"
        wanted = snapshots / _revision(main) / "config.json" if main.is_file() else None
        if wanted is not None and wanted.is_file():
            return wanted
        configs = sorted(snapshot / "config.json" for snapshot in snapshots.iterdir())  # a glob skips dangling links
        readable = [path for path in configs if path.is_file()]
        return max(readable, key=lambda path: path.stat().st_mtime, default=next(filter(dangling, configs), None))
    except (OSError, RuntimeError, ValueError):
        return None


def dangling(path: Path) -> bool:
    """True for a link to a missing file."""
    return path.is_symlink() and not path.exists()


def _revision(ref: Path) -> str:
    """Read the commit in a file below refs; no more is read than a commit takes."""
    with ref.open(encoding="utf-8") as file:
        return file.read(100).strip()
