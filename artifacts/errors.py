"""Every error that pretuned raises on purpose.

Each message says what, where, got against wanted, and what to do. Each class is also the natural
builtin, so that ordinary handlers work. ``aot`` maps them to exit codes in one place.
"""

from __future__ import annotations


class PretunedError(Exception):
    """The root of the tree."""


class InputError(PretunedError, ValueError):
    """What the user gave can't be used: a spec, an option, a tensor. Exit code 2."""


class HostError(PretunedError, OSError):
    """The machine can't do it: a disk, a permission, a missing tool. Exit code 1."""


class LockBusy(HostError):
    """Another process holds a lock that was waited for long enough."""


class BundleError(PretunedError):
    """A bundle can't be used. Always one of the subclasses below."""


class BundleCorrupt(BundleError, ValueError):
    """The bytes are not a valid bundle: cut, changed, or malformed."""


class BundleTooNew(BundleError, ValueError):
    """A format or launch ABI later than this version reads."""


class BundleTooOld(BundleError, ValueError):
    """A format or launch ABI that this version no longer reads."""


class BundleUntrusted(BundleError, PermissionError):
    """The file's place, owner, mode or pinned digest forbids loading code from it."""


class BundleUnreadable(BundleError, OSError):
    """The file is missing, no regular file, or can't be read."""


class TargetMismatch(BundleError, RuntimeError):
    """The bundle holds code for another GPU capability."""


class DriverTooOld(BundleError, RuntimeError):
    """The CUDA driver is older than the bundle's toolkit needs."""


class ProblemNotInBundle(PretunedError, LookupError):
    """Strict mode: no choice for this problem and bucket on this capability."""


class CudaError(PretunedError, RuntimeError):
    """A CUDA driver call failed; the message names the call and the driver's own error."""


class CompileError(PretunedError, RuntimeError):
    """A kernel did not compile; the message carries the compiler's reason."""
