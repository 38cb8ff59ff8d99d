"""What a bundle is: its types, its bytes, its files. Needs no torch, no Triton, no GPU.

Everything is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .errors import (
        BundleCorrupt,
        BundleError,
        BundleTooNew,
        BundleTooOld,
        BundleUnreadable,
        BundleUntrusted,
        HostError,
        PretunedError,
    )
    from .files.blob import read_checked, write_checked
    from .files.bundle_file import BundleFile, open_bundle
    from .files.lock import lock
    from .files.publish import publish
    from .format.codec import decode, encode
    from .records.bundle import Bundle, Choice, Kernel, Model, Producer, Source, TensorMap, Variant
    from .records.precision import PRECISIONS, DType, Elements, Precision, Scale
    from .records.problem import Fusion, Layout, Op, Problem, RowOp, bucket_of
    from .records.target import Gpu, Target

_PUBLIC = {  # name -> module
    "Bundle": "records.bundle",
    "BundleCorrupt": "errors",
    "BundleError": "errors",
    "BundleFile": "files.bundle_file",
    "BundleTooNew": "errors",
    "BundleTooOld": "errors",
    "BundleUnreadable": "errors",
    "BundleUntrusted": "errors",
    "Choice": "records.bundle",
    "DType": "records.precision",
    "Elements": "records.precision",
    "Fusion": "records.problem",
    "Gpu": "records.target",
    "HostError": "errors",
    "Kernel": "records.bundle",
    "Layout": "records.problem",
    "Model": "records.bundle",
    "Op": "records.problem",
    "PRECISIONS": "records.precision",
    "Precision": "records.precision",
    "PretunedError": "errors",
    "Problem": "records.problem",
    "Producer": "records.bundle",
    "RowOp": "records.problem",
    "Scale": "records.precision",
    "Source": "records.bundle",
    "Target": "records.target",
    "TensorMap": "records.bundle",
    "Variant": "records.bundle",
    "bucket_of": "records.problem",
    "decode": "format.codec",
    "encode": "format.codec",
    "lock": "files.lock",
    "open_bundle": "files.bundle_file",
    "publish": "files.publish",
    "read_checked": "files.blob",
    "write_checked": "files.blob",
}

__all__ = [
    "PRECISIONS",
    "Bundle",
    "BundleCorrupt",
    "BundleError",
    "BundleFile",
    "BundleTooNew",
    "BundleTooOld",
    "BundleUnreadable",
    "BundleUntrusted",
    "Choice",
    "DType",
    "Elements",
    "Fusion",
    "Gpu",
    "HostError",
    "Kernel",
    "Layout",
    "Model",
    "Op",
    "Precision",
    "PretunedError",
    "Problem",
    "Producer",
    "RowOp",
    "Scale",
    "Source",
    "Target",
    "TensorMap",
    "Variant",
    "bucket_of",
    "decode",
    "encode",
    "lock",
    "open_bundle",
    "publish",
    "read_checked",
    "write_checked",
]


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
