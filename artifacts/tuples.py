"""A ``NamedTuple`` like typing's, whose classes are made faster: a process's first call makes some 70 of them.

A module that uses it must import annotations from ``__future__``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    from _collections import _tuplegetter
    from functools import cache
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

    @cache
    def _new(count):
        """Return ``__new__`` for classes with ``count`` fields: compiling it for each class would take most time."""
        fields = ", ".join(f"field{i}" for i in range(count))
        return eval(f"lambda _cls, {fields}: new(_cls, ({fields},))", {"new": tuple.__new__})  # noqa: S307 (numbers)

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
