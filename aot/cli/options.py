"""The options that several verbs share, and their parsing."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ...artifacts.errors import HostError, InputError
from ...artifacts.limits import printable
from ...artifacts.packed import SUFFIX as PACKED
from ...artifacts.records import Op
from ...runtime.dispatch.places import SUFFIX
from ..compile.cache import CompileCache, default_dir
from ..models.load import load_models
from ..plan.plan import BuildPlan, built_of_codes, padded, plan, planned_on, unaligned, without_code
from ..plan.targets import parse_sm
from ..process.gpus import is_stub, native_sm
from . import completion

F = TypeVar("F", bound=Callable[..., Any])
_MOST_TOKENS = 1 << 17

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on stdout.")
quiet = click.option(
    "--quiet", "-q", is_flag=True, help="Print only the results, one a line: no progress, notes or advice."
)
models = click.option(
    "--models",
    "-m",
    "models",
    multiple=True,
    metavar="FILE|SPEC",
    shell_complete=completion.models,
    help="A models.txt, or one model spec in quotes. Repeatable.",
)
ops = click.option("--ops", default=None, metavar="LIST", help="Only some of the ops forward, dX, dW.  [default: all]")
workers = click.option(
    "--workers", "-j", type=click.IntRange(1, 1024), help="Compile this many variants at a time.  [default: one a core]"
)


def directory(file_okay: bool) -> Callable[[str | Path], Path]:
    """The type of an option that is a directory's path."""
    return _path("a directory, . for this one", file_okay=file_okay)


def _path(wanted: str, **how: bool) -> Callable[[str | Path], Path]:
    """The type of an option that is a path; it refuses an empty path, which would mean the current directory."""
    path = click.Path(path_type=Path, **how)

    def converted(value: str | Path) -> Path:
        if value == "":
            raise click.BadParameter(f"it is empty; name {wanted}")
        return path.convert(value, None, None)

    return converted


file_path = _path("a file")


def what_to_build(function: F) -> F:
    """Add --models, --sm, --ops, and the compile cache's options."""
    for option in reversed(
        (
            models,
            click.option(
                "--sm",
                default="native",
                metavar="LIST",
                shell_complete=completion.capabilities,
                help="GPU capabilities: 80,90, sm_90, 9.0 or h100.  [default: this machine's GPU]",
            ),
            ops,
            click.option(
                "--cache-dir",
                type=directory(file_okay=False),
                metavar="DIR",
                help="Directory of compiled variants.  [default: aot --version shows it]",
            ),
            click.option("--no-cache", is_flag=True, help="Compile everything anew and keep nothing."),
            click.argument("rest", cls=_Rest, nargs=-1, callback=_refuse_rest, expose_value=False),
        )
    ):
        function = option(function)
    return function


class _Rest(click.Argument):
    """Words that belong to no option; hidden in help."""

    def get_usage_pieces(self, ctx: click.Context) -> list[str]:
        return []

    def get_help_record(self, ctx: click.Context) -> None:  # type: ignore[override]
        return None


def _refuse_rest(ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> None:
    if values:
        models = ctx.params.get("models") or ()
        if not any("=" in value for value in values):
            more = " ".join(f"--models {shlex.quote(value)}" for value in values)
            raise click.UsageError(f"'{values[0]}' belongs to no option; each model is one, e.g. {more}", ctx)
        spec = shlex.quote(" ".join((*models[-1:], *values)))
        raise click.UsageError(
            f"'{values[0]}' belongs to no option; a spec and its options are one value in quotes, e.g. --models {spec}",
            ctx,
        )


def load(models: Sequence[str], sm: str, ops: str | None) -> tuple[BuildPlan, tuple[int, ...], tuple[str, ...]]:
    """The plan, the capabilities, and notes for the user.

    Raises
    ------
    InputError, HostError
    """
    if not models:
        raise InputError("nothing to build for: give --models FILE or --models SPEC (aot models lists known ones)")
    mistakes: list[InputError | HostError] = []
    sms: tuple[int, ...] = ()
    try:
        sms = parse_sm(sm, _native_sm)
    except (InputError, HostError) as error:
        mistakes.append(error)
    try:
        loaded = load_models(models, only=wanted_ops(ops))
    except InputError as error:
        mistakes.append(error)
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise InputError("\n".join(map(str, mistakes)))
    if wrong := [*without_code(loaded.shapes)]:
        raise InputError("\n".join(wrong))
    building = (*unaligned(loaded.shapes), *padded(loaded.shapes, sms), *built_of_codes(loaded.shapes, sms))
    notes = (*loaded.notes, *building)
    return planned_on(plan(loaded.shapes), sms), sms, notes


def _native_sm() -> int | None:
    sm = native_sm()
    if sm is None and is_stub():
        raise HostError(
            "--sm native: the libcuda.so.1 that was found is a stub to link with, as the CUDA toolkit and conda have "
            "it, not the driver. Take its directory (stubs) out of LD_LIBRARY_PATH, or name the capabilities"
        )
    return sm


def wanted_ops(text: str | None) -> tuple[Op, ...]:
    """Parse --ops into the ops to build, in their usual order."""
    if text is None:
        return tuple(Op)
    by_name = {op.value.lower(): op for op in Op}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name.lower() not in by_name]
    if unknown or not names:
        got = f"'{unknown[0]}' is no op" if unknown else "it names none"
        raise InputError(f"--ops {text}: {got}; wanted some of {', '.join(op.value for op in Op)}")
    wanted = {by_name[name.lower()] for name in names}
    return tuple(op for op in Op if op in wanted)


def bundle_files(paths: Sequence[str], *, packed: bool = False) -> tuple[str, ...]:
    """The files that arguments name; a directory stands for its bundles.

    ``packed`` includes files that hold several bundles (``.msgpack.xz``).

    Raises
    ------
    InputError
        for a path that does not exist, or a directory without bundles.
    HostError
        for a directory that can't be listed.
    """
    kinds = (SUFFIX, PACKED) if packed else (SUFFIX,)
    files: list[str] = []
    for path in paths:
        if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for some paths
            if "#" not in path:  # FILE.msgpack.xz#sm80 is no file's name
                _exists(path)
            files.append(path)
            continue
        try:
            names = sorted(os.listdir(path))  # noqa: PTH208 - names are enough
        except OSError as error:
            raise HostError(f"can't list the directory '{printable(path)}': {error.strerror}") from error
        inside = [name for name in names if name.endswith(kinds) and not name.startswith(".")]
        if not inside:
            raise InputError(
                f"'{printable(path)}' is a directory without bundles (*{SUFFIX}): name another one, or files"
            )
        files += [os.path.join(path, name) for name in inside]  # noqa: PTH118 - as the path was given
    return tuple(files)


def _exists(path: str) -> None:
    try:
        os.lstat(path)
    except FileNotFoundError:
        hint = "name a bundle, or a directory of bundles such as aot build writes"
        raise InputError(f"bundle '{printable(path)}': no such file; {hint}") from None
    except (OSError, ValueError):
        return  # opening the file reports the reason


def count_list(option: str, text: str) -> list[int]:
    """Parse ``1,16,128`` into the distinct numbers.

    Raises
    ------
    InputError
        for anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", part) and 1 <= int(part) <= _MOST_TOKENS for part in parts):
        raise InputError(f"{option} {text}: wanted numbers from 1 to {_MOST_TOKENS}, e.g. 1,16,128")
    return list(dict.fromkeys(map(int, parts)))


def cache_of(cache_dir: Path | None, no_cache: bool) -> CompileCache | None:
    """The compile cache that the options name, or None."""
    if no_cache:
        return None
    directory = cache_dir or default_dir()
    return CompileCache(directory) if directory else None


def print_json(value: object) -> None:
    """Print ``value`` as JSON on stdout."""
    click.echo(json.dumps(value, indent=2))
