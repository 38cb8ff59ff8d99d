"""Which of a config's patterns means a module. (Those that take for ever: ``tests/attacks/test_checkpoints.py``.)"""

from __future__ import annotations

import re

import pytest

from pretuned.artifacts.errors import HostError, InputError
from pretuned.runtime.weights import patterns
from pretuned.runtime.weights.patterns import first_matching

NAMES = ("model.layers.1.mlp.experts.0.w1", "model.layers.1.mlp.experts")
OTHERS = ("model.layers.12.self_attn",)
EACH = ("re:.*experts$", "re:mlp", "re:model.layers.1.", "re:^model.*mlp.*", r"re:.*layers\.12\..*", "re:.*$", "re:",
        "*mlp", "model*experts", "*.1.*", "re:.*[mx]lp.*", "re:(model|x).*", "re:.+attn", "re:mod?el",
        r"re:.*s\.*")  # fmt: skip


def means(pattern: str, name: str) -> bool:
    """By the words of ``first_matching``, for those above."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    middle = re.escape(pattern).replace(r"\*", ".*")
    return re.fullmatch(rf"(.*\.)?{middle}|{middle}\..*", name) is not None


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False], ids=["here", "in a process"])
def test_the_first_that_means_one_of_the_names(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not alone:
        monkeypatch.setattr(patterns, "_MOST_STARS", -1)
    groups = (NAMES, OTHERS, ())
    for i in range(len(EACH)):
        wanted = [
            next((j for j, one in enumerate(EACH[i:]) if any(means(one, name) for name in names)), None)
            for names in groups
        ]
        assert first_matching(EACH[i:], groups, "w", "of it") == wanted
        one = [0 if any(means(EACH[i], name) for name in names) else None for names in groups]
        assert first_matching(EACH[i : i + 1], groups, "w", "of it") == one
    assert first_matching([], groups, "w", "of it") == [None, None, None]


@pytest.mark.parametrize(
    ("pattern", "short"),
    [("re:.*mlp.experts.*", True), (r"re:^model\.layers\.3\..*$", True), ("re:.*lm_head", True),
     ("re:" + "a" * 100, True), ("re:.*a.*b.*", True), ("re:.*.*.*.*", False), ("re:.**", False), ("re:a*", False),
     ("re:.+", False), ("re:.?", False), ("re:.{9}", False), (r"re:\.*", False), ("re:(a)", False), ("re:[a]", False),
     ("re:a|b", False), ("re:a$b", False), (r"re:\w", False), ("re:.*?", False), ("re:.*+", False),
     ("re:.*{9}", False), ("re:" + "a" * 101, False), ("re:\n", False), ("*mlp", False), ("re:", False)],
)  # fmt: skip
def test_what_can_not_take_long(pattern: str, short: bool) -> None:
    assert patterns._is_short(pattern) is short


def test_what_can_not_take_long_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert first_matching(["re:.*q", "re:.*experts.*"], [NAMES], "w", "of it") == [1]
    worst = ["re:.*.*.*x"] * 67
    for patterns_, names in ((["re:x"] * 16384, ["x"]), (worst, ["x" * 199]), (["re:x"], ["x" * 200])):
        assert first_matching(patterns_, [names], "w", "of it") == [0]
    of_a_layer = [(f"model.layers.3.mlp.experts.{e}.gate_proj",) for e in range(512)]
    assert first_matching(["re:.*self_attn.*", r"re:.*layers\.3\..*experts.*"], of_a_layer, "w", "of it") == [1] * 512
    for patterns_, names in (
        (["re:(x)"], NAMES), ([*worst, worst[0]], ["x" * 200]), (worst, ["x"] * 40000), (["re:x"], ["x" * 201]),
    ):  # fmt: skip
        with pytest.raises(HostError, match=r"^can't start '/no/such/python': No such file or directory$"):
            first_matching(patterns_, [names], "w", "of it")


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(InputError, match=r'^w: "re:\(" is no regular expression: missing \)'):
        first_matching(["re:.*", "re:("], [NAMES], "w", "of it")
    with pytest.raises(InputError, match=r"^w: 16,385 patterns of it, the limit is 16,384$"):
        first_matching(["x*"] * 16385, [NAMES], "w", "of it")
    assert first_matching(["x*"] * 16384, [NAMES], "w", "of it") == [None]


def test_of_those_that_take_long_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_LONGEST_S", 0.001)
    wanted = r'^w: the patterns of it take over 2 s, or 1 GiB: "re:\(a\)", "re:\(b\)", "re:\(c\)", \.\.\.$'
    with pytest.raises(InputError, match=wanted):
        first_matching([f"re:({one})" for one in "abcd"], [NAMES], "w", "of it")
    with pytest.raises(InputError, match=r'1 GiB: "re:\(a\)", "re:\(b\)", "re:\(c\)"$'):
        first_matching([f"re:({one})" for one in "abc"], [NAMES], "w", "of it")
    with pytest.raises(InputError, match=r'1 GiB: "re:\(a{55}$'):  # 60 characters with the quote
        first_matching([f"re:({'a' * 100})"], [NAMES], "w", "of it")
    with pytest.raises(InputError, match=r'1 GiB: "re:\(a\)"$'):
        first_matching(["re:(a)"], [NAMES], "w", "of it")
