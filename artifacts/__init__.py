"""Bundles: their records, their byte format and their files. Needs no torch, no Triton and no GPU.

A public name's module is imported when the name is first used.
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
    name: module
    for module, names in {
        "errors": "BundleCorrupt BundleError BundleTooNew BundleTooOld BundleUnreadable BundleUntrusted "
        "HostError PretunedError",
        "files.blob": "read_checked write_checked",
        "files.bundle_file": "BundleFile open_bundle",
        "files.lock": "lock",
        "files.publish": "publish",
        "format.codec": "decode encode",
        "records.bundle": "Bundle Choice Kernel Model Producer Source TensorMap Variant",
        "records.precision": "DType Elements PRECISIONS Precision Scale",
        "records.problem": "Fusion Layout Op Problem RowOp bucket_of",
        "records.target": "Gpu Target",
    }.items()
    for name in names.split()
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
