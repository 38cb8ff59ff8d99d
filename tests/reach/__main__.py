"""Measure the code that tests reach, from the root: ``python -m tests.reach`` (lines and branches), ``--mutants``.

The first runs the tests of ``part.py`` under coverage, the processes that they start as well, and fails with each line
and branch of that part that none reached, but for those that ``part.py`` leaves out. The second is in ``mutants.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .part import LEFT_OUT, PART, ROOT, TESTS, keep

_CONFIG = """
[run]
branch = true
parallel = true
patch = subprocess
data_file = {folder}/data
source =
    {root}/artifacts
    {root}/runtime
"""


def measured(tests: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Return coverage's JSON report of each file of the part, after these tests; CalledProcessError if one fails."""
    folder.chmod(0o1777)  # some tests have processes of other users, which tell what they reached, too
    config = folder / "coveragerc"
    config.write_text(_CONFIG.format(folder=folder, root=ROOT))
    coverage = [sys.executable, "-m", "coverage"]
    pytest = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    subprocess.run([*coverage, "run", f"--rcfile={config}", *pytest], cwd=ROOT, check=True)
    if len(list(folder.glob("data.*"))) < 2:
        sys.exit("no process that a test started was measured: coverage's .pth file is not in this environment")
    subprocess.run([*coverage, "combine", "-q", f"--rcfile={config}"], cwd=ROOT, check=True)
    whole = [f"{name}/*" if (ROOT / name).is_dir() else name for name in PART]
    only = f"--include={','.join(whole)}"
    subprocess.run([*coverage, "json", "-q", f"--rcfile={config}", only, "-o", folder / "json"], cwd=ROOT, check=True)
    return json.loads((folder / "json").read_text())  # type: ignore[no-any-return]


def faults(report: dict[str, Any], left_out: dict[tuple[str, str], str]) -> Iterator[str]:
    """Each line that no test reached, each way on from a line that none took, and each row that is no longer so."""
    seen = set()
    for file, entry in report["files"].items():
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        missing = set(entry["missing_lines"])
        ways = [(a, f"never goes on to {b}" if b > 0 else "never leaves") for a, b in entry["missing_branches"]]
        for number, what in sorted([(line, "is not reached") for line in missing] + ways):
            text = lines[number - 1].strip()
            if (file, text) in left_out:
                seen.add((file, text))
            elif number not in missing or what == "is not reached":
                yield f"{file}:{number}: {what}: {text}"
    yield from (
        f"{file}: part.py leaves out a line that is reached, or gone: {text}" for file, text in left_out.keys() - seen
    )


def main() -> int:
    """0 if nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.reach", description=__doc__)
    parser.add_argument("--mutants", action="store_true", help="change the code, and see which changes no test notices")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options, rest = parser.parse_known_args()
    if options.mutants:
        from . import mutants

        return mutants.main(rest, options.out)
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    with tempfile.TemporaryDirectory(prefix="reach-") as folder:
        report = measured(TESTS, Path(folder))
    listed = list(faults(report, LEFT_OUT))
    totals = report["totals"]
    figures = {
        "lines": totals["num_statements"],
        "lines_reached": totals["covered_lines"],
        "branches": totals["num_branches"],
        "branches_reached": totals["covered_branches"],
        "left_out": len(LEFT_OUT),
    }
    print(*listed, json.dumps(figures), sep="\n")
    if options.out:
        keep(options.out, "lines and branches", figures)
    return 1 if listed else 0


if __name__ == "__main__":
    sys.exit(main())
