"""The exceptions that pretuned raises on purpose.

A message names the fault, its place, the value that was found, the value that was wanted, and the remedy. Each class
also inherits from the builtin that fits, e.g. InputError from ValueError. ``aot`` maps the classes to exit codes.
"""

from __future__ import annotations


class PretunedError(Exception):
    """The base class of all pretuned errors."""


class InputError(PretunedError, ValueError):
    """An input of the user can't be used: a spec, an option or a tensor. Exit code 2."""


class HostError(PretunedError, OSError):
    """The machine refuses: a full disk, a missing permission or tool. Exit code 1."""


class LockBusy(HostError):
    """Another process still holds a lock when the waiting time is over."""


class BundleError(PretunedError):
    """A bundle can't be used. Only the subclasses below are raised."""


class BundleCorrupt(BundleError, ValueError):
    """The bytes are not a valid bundle: cut, changed, or malformed."""


class BundleTooNew(BundleError, ValueError):
    """The bundle's format or launch ABI is newer than this version reads."""


class BundleTooOld(BundleError, ValueError):
    """The bundle's format or launch ABI is older than this version reads."""


class BundleUntrusted(BundleError, PermissionError):
    """The file's directory, owner, mode, signature or pinned digest forbids loading code from it."""


class BundleUnreadable(BundleError, OSError):
    """The file is missing, is not a regular file, or can't be read."""


class TargetMismatch(BundleError, RuntimeError):
    """The bundle holds code for another GPU capability."""


class DriverTooOld(BundleError, RuntimeError):
    """The CUDA driver is older than the bundle's toolkit needs."""


class ProblemNotInBundle(PretunedError, LookupError):
    """Strict mode: no bundle has a choice for this problem and bucket on this GPU's capability."""


class CudaError(PretunedError, RuntimeError):
    """A CUDA driver call failed; the message names the call and the driver's own error."""


class CompileError(PretunedError, RuntimeError):
    """A kernel did not compile; the message carries the compiler's reason."""
