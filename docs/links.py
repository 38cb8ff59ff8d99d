"""Hooks of mkdocs: where the API reference finds the code, and links to what the site does not hold.

Links of a page to files outside docs/ become the file's name. On GitHub and in a clone they are links. A link to a
file that is not there is left as it is, and mkdocs refuses it.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

DOCS = Path(__file__).resolve().parent
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


_links: list[tempfile.TemporaryDirectory[str]] = []  # removed when mkdocs ends


@event_priority(100)  # before mkdocstrings reads its own
def on_config(config: Any) -> Any:
    """The folders under their import names, through links: docstrings are read, nothing is imported."""
    _links[:] = [tempfile.TemporaryDirectory()]
    package = Path(_links[0].name) / "pretuned"
    package.mkdir()
    for layer in ("artifacts", "kernels", "runtime"):
        (package / layer).symlink_to(DOCS.parent / layer)
    (package / "__init__.py").symlink_to(DOCS.parent / "package" / "__init__.py")
    config.plugins["mkdocstrings"].config.handlers.setdefault("python", {})["paths"] = [_links[0].name]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text with those links replaced."""
    here = (DOCS / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        target = (here / match[2]).resolve()
        if target.is_relative_to(DOCS) or not target.exists():
            return match[0]
        path = target.relative_to(DOCS.parent)
        return match[1] if match[1].strip("`").endswith(path.name) else f"{match[1]} (`{path}`)"

    return _LINK.sub(replaced, markdown)
