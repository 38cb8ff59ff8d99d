"""Our NamedTuple against typing's, our enumerations against Python's."""

from __future__ import annotations

import copy
import enum
import inspect
import pickle
import re
import threading
import typing
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest

from pretuned.artifacts.classes import Enum, Flag, IntEnum, NamedTuple


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
    for again in (pickle.loads(pickle.dumps(ours)), copy.copy(ours), copy.deepcopy(ours)):
        assert again == ours
        assert type(again) is Ours


@pytest.mark.parametrize(
    "wrong",
    [
        lambda one: type(one)(),
        lambda one: type(one)(1, 2, 3, 4),
        lambda one: type(one)(1, d=4),
        lambda one: one._replace(d=4),
        lambda one: type(one)._make([1, 2, 3, 4]),
        lambda one: setattr(one, "a", 5),
        lambda one: one.d,
    ],
)
def test_what_is_wrong_is_refused(wrong: Any) -> None:
    for one in (Ours(1), Typings(1)):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            wrong(one)


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


class Color(Enum):
    """Ours."""

    RED = "red"
    BLUE = "blue"

    @property
    def long(self) -> str:
        """Its value, twice."""
        return self.value * 2


class Size(IntEnum):
    """Ours."""

    SMALL = 0
    LARGE = 3


class Work(Flag):
    """Ours."""

    NONE = 0
    READ = 1
    WRITE = 2
    SEEK = 4


class PythonsColor(enum.Enum):
    RED = "red"
    BLUE = "blue"


class PythonsSize(enum.IntEnum):
    SMALL = 0
    LARGE = 3


class PythonsWork(enum.Flag):
    NONE = 0
    READ = 1
    WRITE = 2
    SEEK = 4


@pytest.mark.parametrize(
    ("ours", "pythons"),
    [(Color, PythonsColor), (Size, PythonsSize), (Work, PythonsWork)],
    ids=lambda kind: kind.__name__,
)
def test_an_enumeration_is_what_python_makes(ours: Any, pythons: Any) -> None:
    names = [name for name in vars(pythons) if name.isupper()]
    assert [getattr(ours, name).value for name in names] == [getattr(pythons, name).value for name in names]
    for name in names:
        member, other = getattr(ours, name), getattr(pythons, name)
        assert (member.name, member.value) == (other.name, other.value)
        assert repr(member) == repr(other).replace("Pythons", "")
        assert str(member) in (str(other).replace("Pythons", ""), f"{other.value}")  # an IntEnum's since Python 3.11
        assert ours(member.value) is ours(member) is member
        assert type(member) is ours
        assert member in ours
        for again in (pickle.loads(pickle.dumps(member)), copy.copy(member), copy.deepcopy(member)):
            assert again is member
    assert ours.__doc__ == "Ours."
    for wrong in ("green", 99, -1, None, [], 1.5):
        with pytest.raises(ValueError, match=rf"{re.escape(repr(wrong))} is not a valid {ours.__name__}"):
            ours(wrong)
    with pytest.raises(AttributeError):
        setattr(ours, names[0], 1)


def test_members_are_listed_in_order_and_compared_by_identity() -> None:
    assert list(Color) == [Color.RED, Color.BLUE]
    assert len(Color) == 2
    assert Color.RED != Color.BLUE
    assert {Color.RED: 1}[Color("red")] == 1
    assert Color.RED.long == "redred"
    assert "red" not in Color.__dict__


def test_an_integer_is_one() -> None:
    assert (Size.LARGE, Size.LARGE > Size.SMALL, f"{Size.LARGE}", [7, 8, 9, 10][Size.LARGE]) == (3, True, "3", 10)
    assert {3: "a"}[Size.LARGE] == "a"
    assert msgpack.packb(Size.LARGE) == msgpack.packb(3)
    assert max(Size) is Size.LARGE


def test_flags_are_combined() -> None:
    both = Work.READ | Work.WRITE
    assert both is Work(3) is Work.WRITE | Work.READ
    assert (both.value, str(both), repr(both)) == (3, "Work.READ|WRITE", "<Work.READ|WRITE: 3>")
    assert Work.READ in both
    assert Work.SEEK not in both
    assert Work.NONE in both
    assert both & ~Work.READ is Work.WRITE
    assert ~Work.NONE is Work(7)
    assert both & Work.SEEK is Work.NONE
    assert not Work.NONE
    assert both
    assert [flag for flag in Work if flag] == [Work.READ, Work.WRITE, Work.SEEK]  # Python 3.10 also lists NONE
    assert pickle.loads(pickle.dumps(both)) is both


def test_threads_combine_flags_to_one_object() -> None:
    class Many(Flag):
        A = 1
        B = 2

    start = threading.Barrier(8)

    def combine(_: int) -> int:
        start.wait()
        return id(Many.A | Many.B)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(combine, range(8)))) == 1
