"""Bundles: their records, their byte format and their files. Needs no torch, no Triton and no GPU.

A public name's module is imported when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bundle_file import BundleFile, open_bundle
    from .codec import decode, encode
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
    from .locking import lock
    from .publishing import publish, read_checked, write_checked
    from .records import (
        PRECISIONS,
        Bundle,
        Choice,
        DType,
        Elements,
        Fusion,
        Gpu,
        Kernel,
        Layout,
        Model,
        Op,
        Precision,
        Problem,
        Producer,
        RowOp,
        Scale,
        Source,
        Target,
        TensorMap,
        Variant,
        bucket_of,
    )

_PUBLIC = {  # name -> module
    name: module
    for module, names in {
        "errors": "BundleCorrupt BundleError BundleTooNew BundleTooOld BundleUnreadable BundleUntrusted "
        "HostError PretunedError",
        "bundle_file": "BundleFile open_bundle",
        "codec": "decode encode",
        "locking": "lock",
        "publishing": "publish read_checked write_checked",
        "records": "Bundle Choice DType Elements Fusion Gpu Kernel Layout Model Op PRECISIONS Precision Problem "
        "Producer RowOp Scale Source Target TensorMap Variant bucket_of",
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
