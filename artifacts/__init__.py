"""What a bundle is: its types, its bytes, its files. Needs no torch, no Triton, no GPU."""

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
