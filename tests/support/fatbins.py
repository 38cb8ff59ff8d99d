"""Extension modules with CUDA code in them, as nvcc lays it out, for the tests of what cuts them."""

from __future__ import annotations

import struct
from types import ModuleType

PTX, CUBIN, ZSTD = 1, 2, 0x8000


def element(tool: ModuleType, kind: int, arch: int, code: bytes, *, pressed: bool = True) -> bytes:
    """Return an element like nvcc writes one."""
    payload = tool.Zstd().press(code, 19) if pressed else code
    padded = -(-len(payload) // 8) * 8
    head = struct.pack("<HHIQIII", kind, 0x0101, 64, padded, len(payload) if pressed else 0, 0, 0x10008)
    head = head[:28] + struct.pack("<III", arch, 0, 0)
    head += struct.pack("<QQQ", 0x11 | (ZSTD if pressed else 0), 0, len(code) if pressed else 0)
    return head + payload.ljust(padded, b"\0")


def module(*containers: list[bytes]) -> bytes:
    """An ELF file with a section of these, some bytes before and behind."""
    laid = b""
    for container in containers:
        body = b"".join(container)
        laid += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    names = b"\0.nv_fatbin\0.shstrtab\0"
    start = 64 + 8
    text = start + len(laid)
    table = text + len(names) + 8
    rows = [(0, 0, 0, 0, 0, 0), (1, 1, 0, 0, start, len(laid)), (12, 3, 0, 0, text, len(names))]
    head = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<QIHHHHHH", table, 0, 64, 0, 0, 64, 3, 2)
    sections = b"".join(struct.pack("<IIQQQQ", *row).ljust(64, b"\0") for row in rows)
    return head.ljust(64, b"\0") + b"before\0\0" + laid + names + b"behind\0\0" + sections
