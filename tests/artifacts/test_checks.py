"""Checks of plain values: each accepts its own kind, and an error says what was expected and got."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pretuned.artifacts.wire import Malformed, digest, fields, integer, items, name, pick, shown

TABLE = {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("check", "value", "got"),
    [
        (lambda value: integer(value, "n", 2, 4), 2, 2),
        (lambda value: integer(value, "n", 2, 4), 4, 4),
        (lambda value: items(value, "n", 1, 2), [7], [7]),
        (lambda value: items(value, "n", 1, 2), [7, 8], [7, 8]),
        (lambda value: fields(value, "n", ("a", "b")), {"a": 1, "b": 2}, (1, 2)),
        (lambda value: fields(value, "n", ()), {}, ()),
        (lambda value: name(value, "n"), "rows_$1", "rows_$1"),
        (lambda value: name(value, "n", str.isdigit), "12", "12"),
        (lambda value: digest(value, "n"), bytes(32), bytes(32)),
        (lambda value: pick(value, "n", TABLE), "b", 2),
    ],
)
def test_what_is_let_through(check: Callable[[object], object], value: object, got: object) -> None:
    assert check(value) == got


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (lambda value: integer(value, "n", 2, 4), True, "n is True, wanted an integer"),
        (lambda value: integer(value, "n", 2, 4), 3.0, "n is 3.0, wanted an integer"),
        (lambda value: integer(value, "n", 2, 4), None, "n is None, wanted an integer"),
        (lambda value: integer(value, "n", 2, 4), 1, "n is 1, wanted 2 to 4"),
        (lambda value: integer(value, "n", 2, 4), 5, "n is 5, wanted 2 to 4"),
        (lambda value: items(value, "n", 1, 2), None, "n is None, wanted an array"),
        (lambda value: items(value, "n", 1, 2), (7,), "n is (7,), wanted an array"),
        (lambda value: items(value, "n", 1, 2), {"a": 1}, "n is {'a': 1}, wanted an array"),
        (lambda value: items(value, "n", 1, 2), [], "n has 0 items, wanted 1 to 2"),
        (lambda value: items(value, "n", 1, 2), [1, 2, 3], "n has 3 items, wanted 1 to 2"),
        (lambda value: fields(value, "n", ("a", "b")), None, "n is None, wanted a map"),
        (lambda value: fields(value, "n", ("a", "b")), 5, "n is 5, wanted a map"),
        (lambda value: fields(value, "n", ("a", "b")), ["a", "b"], "n is ['a', 'b'], wanted a map"),
        (lambda value: fields(value, "n", ("a", "b")), {"b": 1, "a": 2}, "n has the keys ['b', 'a'], wanted a, b"),
        (lambda value: fields(value, "n", ("a", "b")), {"a": 1}, "n has the keys ['a'], wanted a, b"),
        (lambda value: name(value, "n"), "", "n is '', which is no allowed name"),
        (lambda value: name(value, "n"), "1a", "n is '1a', which is no allowed name"),
        (lambda value: name(value, "n"), b"a", "n is b'a', which is no allowed name"),
        (lambda value: name(value, "n"), None, "n is None, which is no allowed name"),
        (lambda value: digest(value, "n"), bytes(2), "n is b'\\x00\\x00', wanted the 32 bytes of a sha256"),
        (lambda value: digest(value, "n"), "a" * 32, f"n is {'a' * 32!r}, wanted the 32 bytes of a sha256"),
        (lambda value: pick(value, "n", TABLE), "c", "n is 'c', wanted one of a, b"),
        (lambda value: pick(value, "n", TABLE), ["a"], "n is ['a'], wanted one of a, b"),
    ],
)
def test_what_is_refused(check: Callable[[object], object], value: object, message: str) -> None:
    with pytest.raises(Malformed) as caught:
        check(value)
    assert str(caught.value) == message


def test_a_long_value_is_cut() -> None:
    assert shown("x" * 58) == f"'{'x' * 58}'"
    assert shown("x" * 59) == f"'{'x' * 56}..."
    assert len(shown("x" * 10_000)) == 60
