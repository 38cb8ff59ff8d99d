"""The serving engines' plug-ins before there is a layer: they check the switch and the version, and log failures.

Every process of an engine imports this module, also for models without experts. So it needs the standard library only.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
_FROM = "pretuned"


class PlugIn:
    """One engine's plug-in: whether it is wanted, and what happens when it fails.

    Parameters
    ----------
    engine, package
        The engine's name in messages, and its Python package.
    switch
        The environment variable: 0 or false is off, 1 or true runs every layer that pretuned can run.
    first, last
        The oldest and the newest version that the tests ran with, such as (0, 20, 2) and (0, 33). A newest version of
        two numbers includes all its patch releases.
    group
        The engine's entry point group, in which pyproject.toml registers pretuned.
    listed
        The environment variable that lists the plug-ins that the engine loads.
    distributions
        The names of the distributions that install the package; () if the name is the package's.
    """

    def __init__(
        self,
        engine: str,
        package: str,
        switch: str,
        *,
        first: tuple[int, ...],
        last: tuple[int, ...],
        group: str,
        listed: str,
        distributions: tuple[str, ...] = (),
    ) -> None:
        self.engine, self.package, self.switch, self.first, self.last = engine, package, switch, first, last
        self.group, self.listed, self.distributions = group, listed, distributions or (package,)
        self.log = logging.getLogger(f"{package}.{_FROM}")  # a child of the engine's logger, with its handlers
        self._logged: set[str] = set()

    @property
    def tested(self) -> str:
        """The engine and its versions that the tests ran with, as text."""
        first, last = (".".join(map(str, version)) for version in (self.first, self.last))
        return f"{self.engine} {first}" if first == last else f"{self.engine} {first} to {last}"

    @property
    def is_off(self) -> bool:
        """True if the switch turns the plug-in off."""
        return self._said() in ("0", "false")

    @property
    def everywhere(self) -> bool:
        """True if the switch asks for every layer that pretuned can run, measured or not."""
        return self._said() in ("1", "true")

    def _said(self) -> str:
        return os.environ.get(self.switch, "").strip().lower()

    def begin(self) -> bool:
        """True if the plug-in is to register in this process. Logs one line: active, or why not."""
        if self.is_off:
            return False
        if self._said() and not self.everywhere:
            said = os.environ[self.switch]
            self.log.warning(
                "pretuned: %s=%r is neither 1, true, 0, false nor empty: taken as empty", self.switch, said
            )
        version = str(importlib.import_module(self.package).__version__)
        if not self.was_tried(version):
            text = f"pretuned was tested with {self.tested} and this is {version}: every MoE layer stays with "
            self._log_once_an_engine(logging.WARNING, text + self.engine)
            return False
        self.say_active()
        return True

    def say_active(self, log: Callable[[str], object] | None = None) -> None:
        """Log in an engine's first process, once loggers are set up, that pretuned is active, and how to switch it off.

        Some versions set up loggers later. So the first layer's process calls this again, with its logger as ``log``.
        """
        text = "pretuned is active: it runs the MoE layers that it has kernels for. "
        self._log_once_an_engine(logging.INFO, f"{text}{self.switch}=0 switches it off", log)

    def was_tried(self, version: str) -> bool:
        """True if the tests ran with this version of the engine."""
        match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
        numbers = tuple(int(part or 0) for part in match.groups()) if match else ()
        return bool(numbers) and self.first <= numbers and numbers[: len(self.last)] <= self.last

    def attempt(self, doing: str, call: Callable[..., _T], *arguments: Any) -> _T | None:
        """The result of ``call``; None after any exception, which is logged. The engine's own code then runs."""
        try:
            return call(*arguments)
        except Exception as error:
            self.failed(doing, error)
            return None

    def failed(self, doing: str, error: Exception) -> None:
        """Warn that the engine's own code runs in place of pretuned's; once for each reason."""
        reason = f"{type(error).__name__}: {error}"
        line = (
            f"pretuned: MoE layers stay with {self.engine}, as pretuned could not {doing}: {reason}. "
            f"{self.switch}=0 switches pretuned off"
        )
        if line not in self._logged:
            self._logged.add(line)
            self.log.warning("%s", line)
            self.log.debug("pretuned: where it failed", exc_info=error)

    def count(self, *, taken: bool, layers: int = 1) -> None:
        """Add to the gauge ``pretuned_moe_layers`` of prometheus_client, if this process has that library."""
        try:
            _gauge().labels(engine=self.package, runs=_FROM if taken else "engine").inc(layers)
        except Exception as error:
            self.log.debug("pretuned: layers are not counted: %s", error)

    def count_given_back(self) -> None:
        """Correct the gauge: a layer that was counted as pretuned's is now the engine's."""
        self.count(taken=True, layers=-1)
        self.count(taken=False)

    def _log_once_an_engine(self, level: int, line: str, log: Callable[[str], object] | None = None) -> None:
        """Log a line, unless this process or the engine's first process has logged it. Other processes need ``log``."""
        if line in self._logged:
            return
        import multiprocessing  # imported here: engines have imported it already

        marker = f"_{self.switch}_LOGGED"  # an environment variable that the engine's other processes inherit
        if multiprocessing.parent_process() is None:
            os.environ.pop(marker, None)  # set by another engine whose process started this one
        elif log is None or os.environ.get(marker) == line:
            return
        if not self.log.isEnabledFor(level):
            return
        self._logged.add(line)
        os.environ[marker] = line
        if log is None:
            self.log.log(level, "%s", line)
        else:
            log(line)


@functools.cache
def _gauge() -> Any:
    from prometheus_client import Gauge  # installed with the engines

    # Processes that share PROMETHEUS_MULTIPROC_DIR report their sum.
    labels = ["engine", "runs"]
    return Gauge("pretuned_moe_layers", "MoE layers by who runs them", labels, multiprocess_mode="livesum")


class _Imports:
    """A finder on ``sys.meta_path`` that finds no module itself: it calls functions after modules were imported."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Callable[[Any], object]]] = {}
        self._finding: set[str] = set()

    def add(self, name: str, call: Callable[[Any], object]) -> None:
        """Call ``call`` with module ``name``, now or once it is imported."""
        if name in sys.modules:
            call(importlib.import_module(name))  # waits for a thread that is importing it now
            return
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        calls = self._calls.setdefault(name, [])
        if call not in calls:
            calls.append(call)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Part of the protocol of finders. It never raises, so the module's import is not affected."""
        if name not in self._calls or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None:
                self._call_after(name, spec.loader)
            return spec
        except Exception:  # a parent that can't be imported, or a loader whose attributes can't be set
            return None
        finally:
            self._finding.discard(name)

    def _call_after(self, name: str, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module  # restores the loader's own method
            run(module)
            for call in self._calls.pop(name, ()):
                call(module)

        loader.exec_module = exec_module


_imports = _Imports()


def when_imported(name: str, call: Callable[[Any], object]) -> None:
    """Call ``call`` with the module ``name`` once it is imported; now if it is imported already. Imports nothing.

    ``call`` must not raise. Registering an equal ``call`` again changes nothing.
    """
    _imports.add(name, call)
