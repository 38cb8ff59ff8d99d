"""Completions that a shell gets from the program."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("aot bu", {"plain,build"}),
        ("aot build --ou", {"plain,--out"}),
        ("aot help me", {"plain,measure", "plain,merge"}),
        ("aot he", {"plain,help"}),
        ("aot explain m --gpu h100n", {"plain,h100nvl"}),
        ("aot plan --sm 80,h1", {"plain,80,h100", "plain,80,h100sxm", "plain,80,h100nvl", "plain,80,h100pcie"}),
        ("aot bench --models openai/GPT-oss-2", {"plain,openai/gpt-oss-20b", "file,openai/GPT-oss-2"}),
    ],
)
def test_a_shell_completes(aot_process, words, wanted):
    asked = {"_AOT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert set(aot_process(**asked).out.split()) == wanted


def test_a_shell_gets_the_function_that_asks(aot_process):
    assert "_aot_completion" in aot_process(_AOT_COMPLETE="bash_source").out


def test_bash_completes_models_and_gpus():
    """The very function that bash is given, which forgets what comes before a file."""
    script = Path(sys.executable).with_name("aot")
    asked = """
eval "$(_AOT_COMPLETE=bash_source {aot})"; compopt() {{ :; }}
ask() {{ COMP_WORDS=({aot} "$@"); COMP_CWORD=$#; COMPREPLY=(); _aot_completion {aot}; echo "${{COMPREPLY[*]}}"; }}
ask plan --models openai/gpt-oss-1; ask plan --sm h100n
"""
    command = ["bash", "-c", asked.format(aot=shlex.quote(str(script)))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["openai/gpt-oss-120b", "h100nvl"]
