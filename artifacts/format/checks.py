"""What a plain value out of msgpack must be; each check names the field and what it got."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from ..names import is_identifier
from .wire import Malformed

V = TypeVar("V")


def integer(value: object, what: str, low: int, high: int) -> int:
    """``value``, if it is an int (never a bool) from ``low`` to ``high``."""
    if type(value) is not int:
        raise Malformed(f"{what} is {shown(value)}, wanted an integer")
    if not low <= value <= high:
        raise Malformed(f"{what} is {value}, wanted {low} to {high}")
    return value


def items(value: object, what: str, low: int, high: int) -> list[object]:
    """``value``, if it is a list of ``low`` to ``high`` items."""
    if type(value) is not list:
        raise Malformed(f"{what} is {shown(value)}, wanted an array")
    if not low <= len(value) <= high:
        raise Malformed(f"{what} has {len(value)} items, wanted {low} to {high}")
    return value


def fields(value: object, what: str, names: tuple[str, ...]) -> tuple[object, ...]:
    """The values of a map that has exactly these keys in this order."""
    if type(value) is not dict:
        raise Malformed(f"{what} is {shown(value)}, wanted a map")
    if tuple(value) != names:
        raise Malformed(f"{what} has the keys {shown(list(value))}, wanted {', '.join(names)}")
    return tuple(value.values())


def name(value: object, what: str, allowed: Callable[[str], bool] = is_identifier) -> str:
    """``value``, if it is a str that ``allowed`` allows."""
    if type(value) is not str or not allowed(value):
        raise Malformed(f"{what} is {shown(value)}, which is no allowed name")
    return value


def digest(value: object, what: str) -> bytes:
    """``value``, if it is 32 bytes."""
    if type(value) is not bytes or len(value) != 32:
        raise Malformed(f"{what} is {shown(value)}, wanted the 32 bytes of a sha256")
    return value


def pick(value: object, what: str, table: Mapping[str, V]) -> V:
    """What ``table`` has for ``value``."""
    if type(value) is not str or value not in table:
        raise Malformed(f"{what} is {shown(value)}, wanted one of {', '.join(table)}")
    return table[value]


def shown(value: object) -> str:
    """``value`` for a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
