"""What pyproject.toml can't say: the description that a package index shows is README.md with links that work there."""

import re
import sys
from pathlib import Path

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://)([^)]+)\)")


def description(readme: str, source: str | None) -> str:
    """``readme`` with links to the repository at ``source``; without one files are named, pictures left out."""

    def absolute(match: re.Match[str]) -> str:
        picture, text, path = match.groups()
        if source is not None:
            return f"{picture}[{text}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{path})"
        return "" if picture else f"{text} (`{path.partition('#')[0]}`)"

    return LINK.sub(absolute, readme)


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    setup(
        long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), urls.get("Source")),
        long_description_content_type="text/markdown",
    )
