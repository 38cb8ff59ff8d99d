"""CUlaunchConfig as the driver reads it: what the runtime packs by hand is held against it."""

from __future__ import annotations

import ctypes
from ctypes import c_uint, c_void_p


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig, without attributes."""

    _fields_ = [
        ("grid_x", c_uint), ("grid_y", c_uint), ("grid_z", c_uint),
        ("block_x", c_uint), ("block_y", c_uint), ("block_z", c_uint),
        ("shared_bytes", c_uint), ("stream", c_void_p), ("attributes", c_void_p), ("attribute_count", c_uint),
    ]  # fmt: skip
