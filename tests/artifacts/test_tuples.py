"""Our NamedTuple against typing's."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from typing import Any

import pytest

from pretuned.artifacts.tuples import NamedTuple


class Ours(NamedTuple):
    """Ours."""

    a: int
    b: str = "b"
    c: tuple[int, ...] = (1,)

    @property
    def twice(self) -> int:
        """2 * a."""
        return 2 * self.a

    @classmethod
    def of(cls, a: int) -> Ours:
        """One."""
        return cls(a)


class Typings(typing.NamedTuple):
    """Typing's."""

    a: int
    b: str = "b"
    c: tuple[int, ...] = (1,)


def test_it_is_what_typing_makes() -> None:
    ours: Any = Ours(3, c=())
    typings: Any = Typings(3, c=())
    assert ours == typings == (3, "b", ())
    assert hash(ours) == hash(typings)
    assert repr(ours) == repr(typings).replace("Typings", "Ours")
    assert list(inspect.signature(Ours).parameters) == list(inspect.signature(Typings).parameters)
    for name in ("_fields", "_field_defaults", "__match_args__"):
        assert getattr(Ours, name) == getattr(Typings, name)
    assert ours._asdict() == typings._asdict()
    assert type(ours)._make([1, 2, 3]) == (1, 2, 3)
    assert ours._replace(a=5) == (5, "b", ())
    assert type(ours._replace(a=5)) is Ours
    assert (ours.a, ours.twice, Ours.of(4), Ours.__doc__, Ours.__module__) == (3, 6, (4, "b", (1,)), "Ours.", __name__)
    assert not hasattr(ours, "__dict__")
    assert Ours.__new__.__code__.co_filename == "<named tuple Ours>"  # type: ignore[attr-defined]
    for again in (pickle.loads(pickle.dumps(ours)), copy.copy(ours), copy.deepcopy(ours)):
        assert again == ours
        assert type(again) is Ours


@pytest.mark.parametrize(
    "wrong",
    [
        lambda record: type(record)(),
        lambda record: type(record)(1, 2, 3, 4),
        lambda record: type(record)(1, d=4),
        lambda record: record._replace(d=4),
        lambda record: type(record)._make([1, 2, 3, 4]),
        lambda record: setattr(record, "a", 5),
        lambda record: record.d,
    ],
)
def test_what_is_wrong_is_refused(wrong: Any) -> None:
    for record in (Ours(1), Typings(1)):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            wrong(record)


def test_a_class_of_it_can_be_one_of_another() -> None:
    class More(Ours):
        """With a method."""

        def thrice(self) -> int:
            """3 * a."""
            return 3 * self.a

    assert More(2).thrice() == 6
    assert type(More(2)._replace(a=3)) is More
    match More(7):
        case Ours(a, b):
            assert (a, b) == (7, "b")
