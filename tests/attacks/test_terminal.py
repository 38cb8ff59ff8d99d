"""Names of files that hold terminal escapes, lines and letters that are none: shown, and never raw."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretuned.artifacts.limits import printable
from pretuned.artifacts.records import Gpu, LocalGpu
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot

ON_H200 = LocalGpu(90, Gpu("NVIDIA H200", 132, 143771, 12080))
GOLDEN = Path(__file__).parents[1] / "golden" / "format2-medium.msgpack"
NAMES = ["a\x1b[31mb", "a\x1b]0;owned\x07b", "a\nforged: b", "a\rb", "a\u202eb", "a\x9b2Jb", "a\udcffb", "<b>&'\""]


def raw(text: str) -> set[str]:
    """Return the characters of a text that a terminal would act on."""
    return {letter for letter in text if not letter.isprintable() and letter != "\n"}


def test_printable_keeps_what_prints() -> None:
    assert printable("Qwen/Qwen3 É 中 <b>") == "Qwen/Qwen3 É 中 <b>"
    assert printable("a\x1b[2J\nb\u202e\udcff") == "a\\x1b[2J\\nb\\u202e\\udcff"


VERBS = ("inspect", "inspect --json", "verify", "diff", "merge", "report", "missing")
FEW = (NAMES[0], "a\nforged: b", "a\udcffb")  # the others are of the same three kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "name"),
    [
        pytest.param(verb, name, marks=() if verb == VERBS[0] or name in FEW else pytest.mark.nightly)
        for verb in VERBS
        for name in NAMES
    ],
)
def test_verbs_print_no_name_raw(tmp_path: Path, name: str, verb: str) -> None:
    path = tmp_path / f"{name}.msgpack"
    path.write_bytes(GOLDEN.read_bytes())
    arguments = {
        "diff": ["diff", path, GOLDEN],
        "merge": ["merge", path, GOLDEN, "-o", tmp_path / f"{name}.out"],
        "report": ["report", path, "-o", tmp_path / "page.html"],
        "missing": ["inspect", f"{path}.no"],
    }.get(verb, [*verb.split(), path])
    done = subprocess.run(
        [sys.executable, "-m", "pretuned.aot", *map(os.fsencode, arguments)], capture_output=True, check=False, cwd="/"
    )
    out = (done.stdout + done.stderr).decode("utf-8", "surrogateescape")
    assert done.returncode in (0, 2)
    assert "Traceback" not in out
    assert "internal error" not in out
    assert not raw(out)
    assert not any(line.startswith("forged") for line in out.splitlines())
    if verb == "inspect --json":
        assert json.loads(out)["path"] == str(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_skipped_is_logged_in_one_line(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{name}.msgpack").write_bytes(b"none")
    with caplog.at_level(logging.INFO, "pretuned"):
        Snapshot([Place(Kind.NAMED, tmp_path)]).view(ON_H200, installed=False)
    (record,) = caplog.records
    assert not raw(record.getMessage())
    assert "\n" not in record.getMessage()


@pytest.mark.slow
@pytest.mark.parametrize("field", ["model_type", "quant_method"])
def test_a_config_forges_no_line(tmp_path: Path, field: str) -> None:
    forged = "x'\nok  all bundles verified\x1b[2J\nnote: y" + "z" * 1_000_000
    config = {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 256, "intermediate_size": 128}
    config |= {"model_type": forged} if field == "model_type" else {"quantization_config": {field: forged}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "pretuned.aot", "plan", "--models", str(tmp_path), "--sm", "80"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\\n" in done.stderr or "_nok__all_bundles_verified" in done.stderr  # the name of a format is letters alone
    assert not raw(done.stdout + done.stderr)
    assert not any(line.startswith("ok") for line in done.stderr.splitlines())
    assert len(done.stderr) < 10_000


@pytest.mark.parametrize(("term", "lines"), [("xterm", 0), ("dumb", 1)])
def test_a_terminal_without_a_bar_gets_lines(tmp_path: Path, term: str, lines: int) -> None:
    """script(1) is the terminal."""
    code = "from pretuned.aot.cli.progress import Shown\nwith Shown('testing', False) as s:\n s.start(9)\n"
    code += " s.show(9, 'things', '9 of 9 things', last=True)"
    program = tmp_path / "show.py"
    program.write_text(code)
    done = subprocess.run(
        ["script", "-qec", f"{sys.executable} {program}", str(tmp_path / "log")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TERM": term, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("9 of 9 things") == lines
    assert ("testing" in done.stdout) is not bool(lines)
