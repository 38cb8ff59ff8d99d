"""Hooks of mkdocs: the README as home page, pages from outside docs/, and files that pages link to.

A Markdown file of the repository that ``PAGES`` names becomes a page. Any other file that a page links to is copied to
``files/`` of the site, under its path in the repository. A link to a file that does not exist is left as it is, and
mkdocs refuses it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
HOME = "index.md"
# Files of the repository that are pages of the site, and where.
PAGES = {
    "README.md": HOME,
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
    "SECURITY.md": "project/security.md",
    "artifacts/FORMAT.md": "inside/format.md",
    "examples/README.md": "project/examples.md",
    "tests/README.md": "inside/tests.md",
    "benchmarks/peers/README.md": "inside/peers.md",
}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s#]+)(#[^)\s]*)?\)")


@event_priority(100)  # before mkdocstrings reads its own
def on_config(config: Any) -> Any:
    """Where the API reference finds the code, and the address for edit links, if the project has one."""
    config.plugins["mkdocstrings"].config.handlers.setdefault("python", {})["paths"] = [str(ROOT / "src")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = project.get("urls", {}).get("Source")
    if source:
        config.repo_url, config.edit_uri = source, "edit/HEAD/docs/"
        config.theme["features"].append("content.action.edit")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/, and every file that a page links to."""
    sources = {name: ROOT / name for name in PAGES}
    sources |= {f"docs/{file.src_uri}": DOCS / file.src_uri for file in files.documentation_pages()}
    for name, place in PAGES.items():
        if place != HOME and sources[name].exists():
            files.append(File.generated(config, place, content=sources[name].read_text(encoding="utf-8")))
    linked = {
        target
        for name, path in sources.items()
        if path.exists()
        for target in _targets(name, path.read_text(encoding="utf-8"))
    }
    for target in sorted(linked):
        if target not in PAGES and not target.startswith("docs/") and (ROOT / target).is_file():
            files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page's text, with links to what the site has; of the home page the README, then the table of pages."""
    uri = page.file.src_uri
    name = {place: name for name, place in PAGES.items()}.get(uri, f"docs/{uri}")
    if config.repo_url:
        page.edit_url = f"{config.repo_url.rstrip('/')}/edit/HEAD/{name}"
    if uri == HOME:
        table = markdown.partition("![")
        readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Where to go next")
        pages = "## Where to go next\n\n" + _relinked("".join(table[1:]), "docs/index.md", HOME)
        return _relinked(readme[0], "README.md", HOME) + pages
    return _relinked(markdown, name, uri)


def _targets(name: str, text: str) -> list[str]:
    """Paths in the repository that a file of it links to."""
    return [_path(name, target) for _, target, _ in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def _path(name: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))


def _relinked(text: str, name: str, uri: str) -> str:
    """Links of the file ``name``, which the site has at ``uri``, as links of the site."""

    def replaced(match: re.Match[str]) -> str:
        head, link, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", link):
            return match[0]
        target = _path(name, link)
        if (ROOT / target).is_dir() and f"{target}/README.md" in PAGES:
            target += "/README.md"
        if target in PAGES:
            place = PAGES[target]
        elif target.startswith("docs/"):
            place = target.removeprefix("docs/")
        elif (ROOT / target).is_file():
            place, anchor = f"files/{target}", ""
        else:
            return match[0]
        return f"{head}{posixpath.relpath(place, posixpath.dirname(uri) or '.')}{anchor})"

    return _LINK.sub(replaced, text)
