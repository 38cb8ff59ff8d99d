"""A launch as the driver reads it: what the runtime packs by hand is held against CUDA's own structs."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char, c_int32, c_int64, c_uint, c_uint64, c_void_p
from typing import NamedTuple

_KINDS = {"ptr": c_uint64, "i32": c_int32, "i64": c_int64}


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig, without attributes."""

    _fields_ = [
        ("grid_x", c_uint),
        ("grid_y", c_uint),
        ("grid_z", c_uint),
        ("block_x", c_uint),
        ("block_y", c_uint),
        ("block_z", c_uint),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    ]


class Launch(NamedTuple):
    """The arguments of cuLaunchKernelEx; ``pointers`` is the address of the addresses of the parameters."""

    config: int
    handle: int
    pointers: int

    def values(self, kinds: list[str | int]) -> list[int | bytes]:
        """The parameters, of these kinds: of a number its bytes."""
        places = (c_void_p * len(kinds)).from_address(self.pointers)
        return [
            bytes((c_char * kind).from_address(place or 0))
            if isinstance(kind, int)
            else _KINDS[kind].from_address(place or 0).value
            for kind, place in zip(kinds, places, strict=True)
        ]


@functools.cache
def parameters(arguments: tuple[tuple[str, str], ...]) -> tuple[list[str], list[str | int]]:
    """The name and the kind of each parameter of a kernel: a descriptor is 128 bytes, then its sizes and strides."""
    names: list[str] = []
    kinds: list[str | int] = []
    for name, kind in arguments:
        rank = int(kind[4:]) if kind.startswith("desc") else 0
        names += [name, *(f"{name} size {i}" for i in range(rank)), *(f"{name} stride {i}" for i in range(rank))]
        kinds += [128, *["i32"] * rank, *["i64"] * rank] if rank else [kind]
    return [*names, "scratch", "scratch 2"], [*kinds, "ptr", "ptr"]


def words_of(arguments: tuple[tuple[str, str], ...], launch: Launch) -> dict[str, int | bytes]:
    """Every word of a kernel by name, see ``parameters``."""
    names, kinds = parameters(arguments)
    return dict(zip(names, launch.values(kinds), strict=True))
