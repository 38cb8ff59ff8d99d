"""The files by which people find, cite and check the project agree with it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name: str) -> Any:
    return pytest.importorskip("yaml").safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_workflows_run_what_the_repository_has() -> None:
    runs = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in read(str(path.relative_to(ROOT)))["jobs"].values():
            runs |= {word for step in job["steps"] for word in re.findall(r"\.ci/\w+", step.get("run", ""))}
    assert runs == {".ci/run", ".ci/nightly"}
    assert all((ROOT / path).is_file() for path in runs)


@pytest.mark.parametrize("name", ["bug", "wrong-result", "slow"])
def test_an_issue_form_asks_for_the_doctors_output(name: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    assert any("`python -m pretuned.runtime`" in field["attributes"].get("description", "") for field in form["body"])
    assert (name == "slow") == ("aot bench" in json.dumps(form))


def test_a_citation_has_the_version_and_the_licence() -> None:
    cited = read("CITATION.cff")
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])


def test_pre_commit_has_the_ruff_of_the_constraints() -> None:
    (pinned,) = re.findall(r"^ruff==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    hooks = read(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert {word for hook in hooks for word in hook["additional_dependencies"]} == {pinned}


def test_a_devcontainer_is_set_up_as_contributing_says() -> None:
    command = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))[
        "postCreateCommand"
    ]
    assert command in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_links_of_the_package_are_its_layers() -> None:
    """Under its import name, ``src/pretuned`` has each layer, the integrations and what the package itself is."""
    links = {path.name: path.readlink() for path in (ROOT / "src" / "pretuned").iterdir() if path.is_symlink()}
    layers = ("artifacts", "kernels", "runtime", "aot")
    wanted = {layer: Path("../..", layer) for layer in layers} | {"integrations": Path("../../runtime/integrations")}
    wanted |= {name: Path("../../package", name) for name in ("__init__.py", "py.typed")}
    assert links == wanted
