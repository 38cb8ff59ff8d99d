"""Ed25519 signatures checked (RFC 8032, 5.1.7), in plain integers: the runtime needs no other package for it.

All here is public, so nothing has to take the same time for every input. Stricter than the RFC where it leaves a
choice: one form of each key, point and scalar, no key or R of small order, and the equation without the cofactor.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

# x = X/Z, y = Y/Z, xy = T/Z on -x^2 + y^2 = 1 + d x^2 y^2 modulo p.
_Point: TypeAlias = tuple[int, int, int, int]

_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493  # the order of the base point
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT = pow(2, (_P - 1) // 4, _P)  # of -1
_ZERO: _Point = (0, 1, 1, 0)
_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
_Y = 46316835694926478169428394003475163141307993866256225615783033603165251855960
_BASE: _Point = (_X, _Y, 1, _X * _Y % _P)


def is_key(public: bytes) -> bool:
    """Whether 32 bytes are a public key: a point in its one form, and none of the eight of small order."""
    point = _decoded(public)
    return point is not None and not _is_small(point)


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the 64 bytes ``signature`` are R and S with S B = R + h A, by ``public``, the 32 bytes of A.

    h is SHA-512 of R, A and ``message``, modulo the order of B.
    """
    point = _decoded(public)
    if point is None or _is_small(point) or len(signature) != 64:
        return False
    r, s = signature[:32], int.from_bytes(signature[32:], "little")
    if s >= _L:
        return False
    h = int.from_bytes(hashlib.sha512(r + public + message).digest(), "little") % _L
    x, y, z, t = point
    found = _combined(s, _BASE, h, (_P - x, y, z, _P - t))
    return _encoded(found) == r and not _is_small(found)


def _added(one: _Point, other: _Point) -> _Point:
    """Their sum; for two that are the same, too (RFC 8032, 5.1.4)."""
    x1, y1, z1, t1 = one
    x2, y2, z2, t2 = other
    a, b = (y1 - x1) * (y2 - x2) % _P, (y1 + x1) * (y2 + x2) % _P
    c, d = 2 * _D * t1 * t2 % _P, 2 * z1 * z2 % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _combined(s: int, one: _Point, h: int, other: _Point) -> _Point:
    """s one + h other, bit by bit from the highest."""
    table = (_ZERO, one, other, _added(one, other))
    found = _ZERO
    for bit in reversed(range(max(s.bit_length(), h.bit_length()))):
        found = _added(found, found)
        found = _added(found, table[(s >> bit & 1) + 2 * (h >> bit & 1)])
    return found


def _is_small(point: _Point) -> bool:
    """Whether eight times the point is zero."""
    for _ in range(3):
        point = _added(point, point)
    x, y, z, _ = point
    return x % _P == 0 and (y - z) % _P == 0


def _encoded(point: _Point) -> bytes:
    x, y, z, _ = point
    inverse = pow(z, -1, _P)
    return (y * inverse % _P | (x * inverse % _P & 1) << 255).to_bytes(32, "little")


def _decoded(data: bytes) -> _Point | None:
    """The point of 32 bytes, or None where they are none, or not its one form (RFC 8032, 5.1.3)."""
    number = int.from_bytes(data, "little")
    sign, y = number >> 255, number & (1 << 255) - 1
    if len(data) != 32 or y >= _P:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT % _P
    if (x * x - square) % _P or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = _P - x
    return x, y, 1, x * y % _P
