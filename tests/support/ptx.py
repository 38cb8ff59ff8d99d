"""A few instructions of PTX, carried out on arrays of 32-bit words."""

from __future__ import annotations

import re

import numpy as np


def numbers(bits: np.ndarray) -> np.ndarray:
    """bf16 of 16 bits each, as float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bf16, ties to even, of numbers that float64 has exactly; without a sign of zero."""
    _, exponent = np.frexp(values)
    unit = np.exp2(np.maximum(exponent - 1, -126) - 7.0)
    rounded = (np.rint(values / unit) * unit + 0.0).astype(np.float32)
    return (rounded.view(np.uint32) >> 16).astype(np.uint32)


def carried_out(text: str, inputs: dict[str, np.ndarray], results: int = 8) -> list[np.ndarray]:
    """$0, $1 and so on of PTX: the few instructions that these texts have, on words."""
    held = dict(inputs)

    def value(name: str) -> np.ndarray:
        return held[name] if name in held else np.asarray(int(name, 0), dtype=np.uint32)

    def halves(of, *names: str) -> np.ndarray:  # type: ignore[no-untyped-def]
        words = [np.asarray(value(name), dtype=np.uint32) for name in names]
        low, high = (rounded(of(*(numbers((word >> at) & 0xFFFF) for word in words))) for at in (0, 16))
        return low | (high << 16)

    def bytes_of(a: np.ndarray, b: np.ndarray, order: np.ndarray) -> np.ndarray:
        wide = np.asarray(a).astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
        total = np.zeros(np.broadcast_shapes(wide.shape, order.shape), dtype=np.uint64)
        for i in range(4):
            at = np.uint64(8) * (order.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(7))
            total |= ((wide >> at) & np.uint64(0xFF)) << np.uint64(8 * i)
        return total.astype(np.uint32)

    for line in re.split(r"[;\n]", text.strip().strip("{}")):
        op, _, rest = line.strip().partition(" ")
        if op in ("", ".reg"):
            continue
        if op == "mov.b32" and rest.startswith("{"):
            first, second, source = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest).groups()  # type: ignore[union-attr]
            held[first], held[second] = value(source) & 0xFFFF, value(source) >> np.uint32(16)
            continue
        to, *names = re.sub("[{}]", "", rest).split(", ")
        if op == "mov.b32":
            held[to] = value(names[0]) | (value(names[-1]) << np.uint32(16)) if len(names) == 2 else value(names[0])
        elif op == "lop3.b32":
            last = {"0xEA": np.bitwise_or, "0x6A": np.bitwise_xor}[names[3]]
            held[to] = last(value(names[0]) & value(names[1]), value(names[2]))
        elif op == "prmt.b32":
            held[to] = bytes_of(value(names[0]), value(names[1]), value(names[2]))
        elif op == "mad.lo.s32":
            held[to] = value(names[0]) * value(names[1]) + value(names[2])
        elif op == "setp.ne.s32":
            held[to] = value(names[0]) != value(names[1])
        elif op == "selp.b32":
            held[to] = np.where(value(names[2]), value(names[0]), value(names[1]))
        else:
            a, b = value(names[0]), value(names[1])
            held[to] = {
                "and.b32": lambda a=a, b=b: a & b,
                "shl.b32": lambda a=a, b=b: a << b,
                "shr.u32": lambda a=a, b=b: a >> b,
                "mul.lo.s32": lambda a=a, b=b: a * b,
                "add.s32": lambda a=a, b=b: a + b,
                "sub.rn.bf16x2": lambda names=names: halves(lambda x, y: x - y, *names),
                "mul.rn.bf16x2": lambda names=names: halves(lambda x, y: x * y, *names),
                "fma.rn.bf16x2": lambda names=names: halves(lambda x, y, z: x * y + z, *names),
            }[op]()
    return [held[f"${i}"] for i in range(results)]
