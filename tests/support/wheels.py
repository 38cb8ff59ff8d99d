"""pretuned's wheel, as a release is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_tree(tree: Path) -> None:
    """Copy all files that git would hold to ``tree``, an empty folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        source, target = ROOT / name, tree / name
        if not name or not (source.is_symlink() or source.is_file()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            target.write_bytes(source.read_bytes())


def build_wheel(tree: Path, out: Path) -> Path:
    """The wheel of a copy of the repository in ``tree``, an empty folder."""
    copy_tree(tree)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tree],
        check=True,
        capture_output=True,
    )
    return next(out.glob("*.whl"))
