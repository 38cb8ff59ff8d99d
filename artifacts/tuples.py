"""A ``NamedTuple`` like typing's, whose classes are made faster: a process's first call makes some 70 of them.

A module that uses it must import annotations from ``__future__``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
            file = f"<named tuple {name}>"  # in tracebacks and profiles
            code = new.__code__.replace(co_name="__new__", co_filename=file, co_varnames=("_cls", *fields))
            body |= {field: _tuplegetter(place, "") for place, field in enumerate(fields)}
            body["__new__"] = FunctionType(code, new.__globals__, "__new__", tuple(defaults.values()))
            body["_fields"] = body["__match_args__"] = fields
            body["_field_defaults"], body["__slots__"] = defaults, ()
            return type(name, (_Tuple,), body)

    class NamedTuple(metaclass=_Made):
        pass
