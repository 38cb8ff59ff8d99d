"""One warp that runs a few words of PTX, on numpy.

Those of kernels/portable_plain/lookup.py and unnamed.py as they stand, on no GPU.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

import numpy as np

LANES = 32
_WORD = 0xFFFFFFFF
Values = np.ndarray  # of 32 lanes, int64; a register of 32 bits holds 0 .. 2^32 - 1


def _signed(value: Values) -> Values:
    return np.where(value > 0x7FFFFFFF, value - (1 << 32), value)


_COMPARES: dict[str, Callable[[Values, Values], Values]] = {
    "lt": np.less,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": np.not_equal,
    "eq": np.equal,
}


def _check_names(statements: list[str]) -> None:
    """That an assembler would know each name, and know it once."""
    labels: list[str] = []
    for kinds in (statement for statement in statements if statement.startswith(".reg")):
        for name in kinds.split(maxsplit=2)[2].split(","):
            stem, _, many = name.strip().rstrip(">").partition("<")
            labels += [f"{stem}{i}" for i in range(int(many))] if many else [stem]
    labels += [statement[:-1] for statement in statements if statement.endswith(":")]
    assert len(set(labels)) == len(labels), "a name is there twice"
    for statement in statements:
        if not statement.startswith(".reg") and not statement.endswith(":"):
            guard, operands = re.fullmatch(r"(?:@!?(\w+) +)?\S+ *(.*)", statement).groups()  # type: ignore[union-attr]
            names = {*re.findall(r"(?<![\w$%.])[A-Za-z_]\w*", operands), guard or labels[0]}
            assert names <= {*labels}, f"{statement}: what is {names - {*labels}}?"


@functools.cache
def _read(text: str) -> tuple[tuple[str, ...], dict[str, int]]:
    """The words in their order, and where the labels among them are."""
    statements = [s.strip() for s in re.split(r"[;\n]|(?<=:)", text)]
    _check_names([s for s in statements if s and s not in "{}"])
    statements = [s for s in statements if s and s not in "{}" and not s.startswith(".reg")]
    return tuple(statements), {s[:-1]: i for i, s in enumerate(statements) if s.endswith(":")}


class Warp:
    """``memory`` is the words at address 0 and on; reading anything else is an error."""

    def __init__(self, memory: list[int], operands: Mapping[str, int]) -> None:
        self._memory = [word & _WORD for word in memory]
        wide = operands.items()
        self.registers: dict[str, Values] = {name: np.full(LANES, value & _WORD, np.int64) for name, value in wide}

    def run(self, text: str) -> None:
        statements, labels = _read(text)
        at = 0
        while at < len(statements):
            statement = statements[at]
            at += 1
            if statement.endswith(":"):
                continue
            active = np.ones(LANES, bool)
            if statement.startswith("@"):
                guard, statement = statement.split(maxsplit=1)
                active = self.registers[guard[1:]].astype(bool)
            word, *rest = statement.split(maxsplit=1)
            operands = [operand.strip() for operand in rest[0].split(",")]
            if word == "bra":
                assert active.all() or not active.any(), f"lanes part at {statement}"
                at = labels[operands[0]] if active.all() else at
            else:
                self._step(word.split("."), operands, active)

    def _value(self, name: str) -> Values:
        if name == "%laneid":
            return np.arange(LANES, dtype=np.int64)
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", name):
            return np.full(LANES, int(name, 0) & _WORD, np.int64)
        return self.registers[name]

    def _step(self, word: list[str], operands: list[str], active: Values) -> None:
        name, kind = word[0], word[-1]
        into, *names = operands
        if name == "ld":
            address, offset = re.fullmatch(r"\[(\w+)(?:\+(\d+))?\]", names[0]).groups()  # type: ignore[union-attr]
            places = self._value(address) + int(offset or 0)
            assert not any(p < 0 or p % 4 for p in places[active]), f"no word of memory: {places[active]}"
            values = np.array([self._memory[p // 4] if on else 0 for p, on in zip(places, active, strict=True)])
        else:
            if name in ("redux", "shfl", "vote"):
                assert active.all(), "a warp's word in a part of it"
                assert names.pop() == "0xffffffff"
            operand_values = [self._value(n) for n in names]
            if kind.startswith("s") and not (name == "shl" or kind == "s64"):
                operand_values = [_signed(v) for v in operand_values]
            if name == "shfl" and word[2] == "up":
                into, moved = into.split("|")
                distance = int(operand_values[1][0])
                self.registers[moved] = np.arange(LANES) >= distance
                values = np.where(np.arange(LANES) >= distance, np.roll(operand_values[0], distance), operand_values[0])
            else:
                values = self._result(name, word, operand_values)
                wide = kind in ("s64", "b64") or (name == "mul" and word[1] == "wide")
                values = values if wide or name == "setp" else values & _WORD
        before = self.registers.get(into, np.zeros(LANES, np.int64))
        self.registers[into] = np.where(active, values, before)

    def _result(self, name: str, word: list[str], operands: list[Values]) -> Values:
        if name == "setp":
            return _COMPARES[word[1]](operands[0], operands[1])
        if name == "redux":
            return np.full(LANES, operands[0].sum())
        if name == "vote":
            return np.full(LANES, sum(1 << i for i in range(LANES) if operands[0][i]))
        if name == "shfl":  # idx
            return operands[0][operands[1] % LANES]
        unary: dict[str, Callable[..., Values]] = {
            "mov": lambda a: a,
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "min": np.minimum,
            "max": np.maximum,
            "shl": np.left_shift,
            "shr": np.right_shift,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
            "bfind": lambda a: np.array([(int(v).bit_length() - 1) & _WORD for v in a]),
            "selp": lambda a, b, p: np.where(p, a, b),
            "popc": lambda a: np.array([int(v).bit_count() for v in a]),
            "clz": lambda a: np.array([32 - int(v).bit_length() for v in a]),
            "brev": lambda a: np.array([int(f"{int(v):032b}"[::-1], 2) for v in a]),
        }
        return unary[name](*operands)
