"""What a shell is told to complete, by the program that it asks."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("aot bu", {"plain,build"}),
        ("aot build --ou", {"plain,--out"}),
        ("aot plan --sm 80,h1", {"plain,80,h100", "plain,80,h100sxm", "plain,80,h100nvl", "plain,80,h100pcie"}),
        ("aot bench --models openai/GPT-oss-2", {"plain,openai/gpt-oss-20b", "file,openai/GPT-oss-2"}),
    ],
)
def test_a_shell_completes(aot_process, words, wanted):
    asked = {"_AOT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert set(aot_process(**asked).out.split()) == wanted
    assert "_aot_completion" in aot_process(_AOT_COMPLETE="bash_source").out
