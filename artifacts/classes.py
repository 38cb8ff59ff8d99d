"""``NamedTuple``, ``Enum``, ``IntEnum`` and ``Flag`` like Python's, whose classes are made faster.

A process's first call makes some 70 and 17 of them. A module that uses ``NamedTuple`` must import annotations from
``__future__``. An enumeration's members are its public names whose values are texts or integers. ``value`` and ``name``
are plain attributes, and members are hashed by identity, an ``IntEnum``'s as its integer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enum import Enum as Enum
    from enum import Flag as Flag
    from enum import IntEnum as IntEnum
    from typing import NamedTuple as NamedTuple
else:
    from _collections import _tuplegetter
    from types import FunctionType

    class _Tuple(tuple):
        """The base class of all named tuples."""

        __slots__ = ()

        @classmethod
        def _make(cls, values):
            return cls(*values)

        def _replace(self, **changed):
            copy = self._make(map(changed.pop, self._fields, self))
            if changed:
                raise TypeError(f"{type(self).__name__} has no fields {list(changed)!r}")
            return copy

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self):
            return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"

        def __getnewargs__(self):
            return tuple(self)

    new = tuple.__new__
    # ``__new__`` by the number of fields. Python keeps the bytecode of these functions with this module's: compiling
    # one takes 100 us. A class with another number of fields has its own compiled.
    _NEW = {
        function.__code__.co_argcount - 1: function
        for function in (
            lambda _cls, a: new(_cls, (a,)),
            lambda _cls, a, b: new(_cls, (a, b)),
            lambda _cls, a, b, c: new(_cls, (a, b, c)),
            lambda _cls, a, b, c, d: new(_cls, (a, b, c, d)),
            lambda _cls, a, b, c, d, e: new(_cls, (a, b, c, d, e)),
            lambda _cls, a, b, c, d, e, f: new(_cls, (a, b, c, d, e, f)),
            lambda _cls, a, b, c, d, e, f, g: new(_cls, (a, b, c, d, e, f, g)),
            lambda _cls, a, b, c, d, e, f, g, h: new(_cls, (a, b, c, d, e, f, g, h)),
            lambda _cls, a, b, c, d, e, f, g, h, i: new(_cls, (a, b, c, d, e, f, g, h, i)),
            lambda _cls, a, b, c, d, e, f, g, h, i, j: new(_cls, (a, b, c, d, e, f, g, h, i, j)),
            lambda _cls, a, b, c, d, e, f, g, h, i, j, k: new(_cls, (a, b, c, d, e, f, g, h, i, j, k)),
            lambda _cls, a, b, c, d, e, f, g, h, i, j, k, m: new(_cls, (a, b, c, d, e, f, g, h, i, j, k, m)),
            lambda _cls, a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q, r, s, t, u: new(
                _cls, (a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q, r, s, t, u)
            ),
            lambda _cls, a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q, r, s, t, u, v, w, x, y, z, A, B, C, D, E, F: (
                new(_cls, (a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q, r, s, t, u, v, w, x, y, z, A, B, C, D, E, F))
            ),
        )
    }

    def _new(count):
        if count not in _NEW:
            fields = ", ".join(f"field{i}" for i in range(count))
            _NEW[count] = eval(f"lambda _cls, {fields}: new(_cls, ({fields},))", {"new": new})  # noqa: S307 (numbers)
        return _NEW[count]

    class _Made(type):
        def __new__(cls, name, bases, body):
            if not bases:
                return super().__new__(cls, name, bases, body)
            fields = tuple(body["__annotations__"])
            defaults = {field: body.pop(field) for field in fields if field in body}
            new = _new(len(fields))
            code = new.__code__.replace(co_name="__new__", co_varnames=("_cls", *fields))
            body |= {field: _tuplegetter(place, "") for place, field in enumerate(fields)}
            body["__new__"] = FunctionType(code, new.__globals__, "__new__", tuple(defaults.values()))
            body["_fields"] = body["__match_args__"] = fields
            body["_field_defaults"], body["__slots__"] = defaults, ()
            return type(name, (_Tuple,), body)

    class NamedTuple(metaclass=_Made):
        pass

    class _Enumeration(type):
        """The class of enumerations."""

        def __new__(cls, name, bases, body):
            values = {key: value for key, value in body.items() if key[0] != "_" and type(value) in (int, str)}
            for key in values:
                del body[key]
            body["_by_value"] = {}
            made = type.__new__(cls, name, bases, body)
            for key, value in values.items():
                type.__setattr__(made, key, made._member(key, value))
            made._members = made._listed(tuple(made._by_value.values()))
            return made

        def __call__(cls, value):
            try:
                return cls._by_value[value]
            except (KeyError, TypeError):
                return cls._missing(value)

        def __iter__(cls):
            return iter(cls._members)

        def __len__(cls):
            return len(cls._members)

        def __contains__(cls, member):
            return isinstance(member, cls)

        def __setattr__(cls, name, value):
            if name[0] != "_":
                raise AttributeError(f"{cls.__name__}.{name} can't be set")
            type.__setattr__(cls, name, value)

    class Enum(metaclass=_Enumeration):
        """An enumeration: each member is one object."""

        @classmethod
        def _member(cls, name, value):
            member = int.__new__(cls, value) if issubclass(cls, int) else object.__new__(cls)
            member.name, member.value = name, value
            return cls._by_value.setdefault(value, member)

        @classmethod
        def _listed(cls, members):
            return members

        @classmethod
        def _missing(cls, value):
            if isinstance(value, cls):
                return value
            raise ValueError(f"{value!r} is not a valid {cls.__name__}")

        def __repr__(self):
            return f"<{type(self).__name__}.{self.name}: {self.value!r}>"

        def __str__(self):
            return f"{type(self).__name__}.{self.name}"

        def __reduce_ex__(self, _protocol):
            return type(self), (self.value,)

    class IntEnum(int, Enum):
        """An enumeration whose members are integers."""

        __repr__ = Enum.__repr__
        __str__ = int.__repr__

    class Flag(Enum):
        """An enumeration of bits, whose members can be combined. Each combination is one object, too."""

        @classmethod
        def _listed(cls, members):
            cls._bits = tuple([member for member in members if member.value.bit_count() == 1])
            cls._all = sum([member.value for member in cls._bits])
            return cls._bits

        @classmethod
        def _missing(cls, value):
            if type(value) is not int or value & ~cls._all:
                return super()._missing(value)
            return cls._member("|".join([bit.name for bit in cls._bits if bit.value & value]), value)

        def __or__(self, other):
            return type(self)(self.value | other.value)

        def __and__(self, other):
            return type(self)(self.value & other.value)

        def __invert__(self):
            return type(self)(self._all & ~self.value)

        def __contains__(self, other):
            return other.value & self.value == other.value

        def __bool__(self):
            return bool(self.value)
