"""Which of a config's patterns means a module. (Those that take for ever: ``tests/attacks/test_checkpoints.py``.)"""

from __future__ import annotations

import json
import re
import time

import pytest

from pretuned.artifacts.errors import InputError
from pretuned.runtime.weights import patterns
from pretuned.runtime.weights.patterns import first_matching

NAMES = ("model.layers.1.mlp.experts.0.w1", "model.layers.1.mlp.experts")
OTHERS = ("model.layers.12.self_attn",)
EACH = (
    "re:.*experts$",
    "re:mlp",
    "re:model.layers.1.",
    "re:^model.*mlp.*",
    r"re:.*layers\.12\..*",
    "re:.*$",
    "re:",
    "*mlp",
    "model*experts",
    "*.1.*",
    "re:.*[mx]lp.*",
    "re:(model|x).*",
    "re:.+attn",
    "re:mod?el",
    r"re:.*s\.*",
)


def means(pattern: str, name: str) -> bool:
    """By the words of ``first_matching``, for those above."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    middle = re.escape(pattern).replace(r"\*", ".*")
    return re.fullmatch(rf"(.*\.)?{middle}|{middle}\..*", name) is not None


def test_the_first_that_means_one_of_the_names() -> None:
    groups = (NAMES, OTHERS, ())
    for i in range(len(EACH)):
        wanted = [
            next((j for j, pattern in enumerate(EACH[i:]) if any(means(pattern, name) for name in names)), None)
            for names in groups
        ]
        assert first_matching(EACH[i:], groups, "w", "of it") == wanted
        first = [0 if any(means(EACH[i], name) for name in names) else None for names in groups]
        assert first_matching(EACH[i : i + 1], groups, "w", "of it") == first
    assert first_matching([], groups, "w", "of it") == [None, None, None]


@pytest.mark.parametrize(
    "pattern",
    [
        "re:.*mlp.experts.*",
        r"re:^model\.layers\.3\..*$",
        "re:.*lm_head",
        "re:.*a.*b.*",
        "re:",
        r"re:.*(q|k|v|o)_proj$",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        r"re:.*layers\.[2-4]\..*experts.*",
        r"re:.*\.(?:1[0-5])\..*",
        r"re:model\.layers\.\d+\.mlp\.experts\.\d+\..*_proj",
        "re:^(?!.*experts).*$",
        "re:.*attn.*|lm_head$",
        r"re:.*(?:layers\.(3|4)\.|lm_head).*",
        "re:(?i).*EXPERTS.*",
        r"re:model\.layers\.\d{1,2}\.mlp",
        "re:.*?experts",
        r"re:.*layers\.1\..*|.*layers\.12\..*|.*lm_head",
        "re:.*layers.(" + "|".join(map(str, range(61))) + ").mlp.*",
    ],
)
def test_forms_that_checkpoints_use(pattern: str) -> None:
    for name in (*NAMES, *OTHERS, "lm_head", "model.layers.13.mlp.experts.7.down_proj", "vision.q_proj"):
        wanted = None if re.match(pattern[3:], name) is None else 0
        assert first_matching([pattern], [[name]], "w", "of it") == [wanted], name


@pytest.mark.parametrize(
    "pattern",
    [
        "re:(",
        "re:(a)*",
        "re:(a|.)*!",
        "re:((a)+)+",
        "re:.*.*.*.*",
        "re:.**",
        "re:a$b",
        r"re:\s",
        "re:(?=a)",
        "re:(?P<n>a)",
        r"re:(a)\1",
        "re:[",
        "re:a{99999999999}",
        "re:\n",
        "re:(((a)))",
        r"re:(?<!a)b",
        "re:.*+",
    ],
)
def test_any_other_form_is_refused_by_its_text(pattern: str) -> None:
    wanted = re.escape(f"w: {json.dumps(pattern)[:60]} is no regular expression that pretuned matches: wanted letters")
    with pytest.raises(InputError, match=f"^{wanted}"):
        first_matching(["re:.*", pattern], [NAMES], "w", "of it")


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(InputError, match=r'^w: "re:\[9-0\]" is no regular expression: bad character range'):
        first_matching(["re:[9-0]"], [NAMES], "w", "of it")
    with pytest.raises(InputError, match=r"^w: 16,385 patterns of it, the limit is 16,384$"):
        first_matching(["x*"] * 16385, [NAMES], "w", "of it")
    assert first_matching(["x*"] * 16384, [NAMES], "w", "of it") == [None]
    with pytest.raises(InputError, match=r'^w: "a{59} has 513 characters, the limit is 512$'):
        first_matching(["a" * 513], [NAMES], "w", "of it")
    assert first_matching(["a" * 512], [NAMES], "w", "of it") == [None]
    with pytest.raises(InputError, match=r'^w: "re:\.\*" takes too long for a name of 1,025 characters$'):
        first_matching(["re:.*"], [["x" * 1025]], "w", "of it")
    assert first_matching(["re:.*"], [["x" * 1024]], "w", "of it") == [0]
    with pytest.raises(InputError, match=r"takes too long for a name of 500 characters$"):
        first_matching(["re:.*.*.*z"], [["x" * 499 + "z"]], "w", "of it")


def test_one_match_takes_no_long_time_at_worst() -> None:
    begin = time.thread_time()
    first_matching([r"re:.*\w*.*[^x]"], [["x" * 400]], "w", "of it")
    first_matching(["re:" + "(a|b|.)" * 8 + ".*[^x]"], [["x" * 100]], "w", "of it")
    assert time.thread_time() - begin < 5.0


def test_of_those_that_take_long_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_LONGEST_S", 0.0)
    wanted = r'^w: the patterns of it take over 0 s: "re:\(a\)", "re:\(b\)", "re:\(c\)", \.\.\.$'
    with pytest.raises(InputError, match=wanted):
        first_matching([f"re:({letter})" for letter in "abcd"], [NAMES], "w", "of it")
    with pytest.raises(InputError, match=r'0 s: "re:\(a\)", "re:\(b\)", "re:\(c\)"$'):
        first_matching([f"re:({letter})" for letter in "abc"], [NAMES], "w", "of it")


def test_many_patterns_and_names_are_refused_in_time() -> None:
    begin = time.thread_time()
    with pytest.raises(InputError, match="the patterns of it take over 2 s"):
        first_matching([f"re:.*.*{i}z$" for i in range(10000)], [[f"{i}zx" * 20 for i in range(5000)]], "w", "of it")
    assert time.thread_time() - begin < 20.0
