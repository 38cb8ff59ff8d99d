"""The parts of the packaging that pyproject.toml can't express.

The description that a package index shows is README.md with links that work there. And the bundles that ship, which the
repository holds pressed to a tenth (artifacts/pressed), are unpacked: into a wheel, or, where a clone itself is
installed, into its artifacts/bundles.
"""

import lzma
import os
import re
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

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


def unpack(folder: Path) -> None:
    """The bundles into ``folder``; one that is there already with the same bytes is left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for pressed in sorted((ROOT / "artifacts" / "pressed").glob("*.xz")):
        path, data = folder / pressed.stem, lzma.decompress(pressed.read_bytes())
        if not path.exists() or path.read_bytes() != data:
            begun = path.with_name(f".{path.name}.{os.getpid()}")
            begun.write_bytes(data)
            begun.replace(path)  # who reads the old one goes on


class BuildWithBundles(build_py):
    """The package's files, and the bundles."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # of a clone's folder, what an earlier one unpacked stays behind
            there = {path.stem for path in (ROOT / "artifacts" / "pressed").glob("*.xz")}
            for old in Path(self.build_lib, "pretuned/artifacts/bundles").glob("*.msgpack"):
                if old.name not in there:
                    old.unlink()
        unpack(ROOT / "artifacts/bundles" if self.editable_mode else Path(self.build_lib, "pretuned/artifacts/bundles"))


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    setup(
        long_description=description((ROOT / "README.md").read_text(encoding="utf-8"), urls.get("Source")),
        long_description_content_type="text/markdown",
        cmdclass={"build_py": BuildWithBundles},
    )
