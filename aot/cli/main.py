"""The group of verbs, and the entry point of a command line."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

import click

from . import completion
from .exits import OK, guarded, quiet_without_reader

_SECTIONS = {  # as --help lists them
    "Build": ("build", "plan", "compile", "measure"),
    "Look": ("explain", "bench", "models", "inspect", "report", "doctor"),
    "Change": ("merge", "prune", "pack"),
    "Check": ("verify", "sign", "diff"),
}
_VERBS = tuple(verb for verbs in _SECTIONS.values() for verb in verbs)
_DEBUG = "--debug"


class _Verbs(click.Group):
    """A group that imports a verb when it is used: ``aot --version`` needs none of them."""

    def make_context(self, *args: Any, **named: Any) -> click.Context:
        with quiet_without_reader():  # --help prints here
            return super().make_context(*args, **named)

    def invoke(self, ctx: click.Context) -> Any:
        with quiet_without_reader():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_VERBS, "help"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "help":
            return _help
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(f".{cmd_name}", __package__)
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in _SECTIONS.items():
            commands = [(verb, command) for verb in verbs if (command := self.get_command(ctx, verb)) is not None]
            with formatter.section(title):
                formatter.write_dl([(verb, command.get_short_help_str(200)) for verb, command in commands])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in (*_VERBS, "help") and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0].lower(), (*_VERBS, "help", "--version"), n=1, cutoff=0.6)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(_VERBS)}"
            raise click.UsageError(f"no command '{args[0]}'; {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.command("help")
@click.argument("verb", required=False, metavar="[COMMAND]", shell_complete=completion.verbs)
@click.pass_context
def _help(ctx: click.Context, verb: str | None) -> None:
    """Show the help of a command, or of aot."""
    parent = ctx.find_root()
    if verb is None:
        click.echo(parent.get_help())
        return
    name, command, _ = _Verbs.resolve_command(aot, parent, [verb])
    assert command is not None
    click.echo(command.get_help(click.Context(command, info_name=name, parent=parent)))


def _show_version(as_json: bool) -> None:
    from .doctor import versions

    facts = versions()
    if as_json:
        from .options import print_json

        print_json(facts)
        return
    width = max(map(len, facts))
    click.echo("\n".join(f"{name.replace('_', ' '):<{width}}  {value}" for name, value in facts.items()))


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=False,
    invoke_without_command=True,
)
@click.option("--version", is_flag=True, help="Show all versions, and the directory of the compile cache.")
@click.option("--json", "as_json", is_flag=True, help="With --version: print JSON, and nothing else, on stdout.")
@click.option(_DEBUG, is_flag=True, expose_value=False, help="Show tracebacks. It can follow the command, too.")
@click.pass_context
def aot(ctx: click.Context, version: bool, as_json: bool) -> None:
    """Tune and compile MoE grouped-GEMM kernels ahead of time, into bundles that a process loads at once.

    \b
    Examples:
      aot build --models models.txt --sm 80,90
      aot build --models "Qwen/Qwen3-30B-A3B tp=1,2" --sm 90
      aot explain Qwen/Qwen3-30B-A3B --gpu h100
      aot verify bundles
      aot help build                  # options and examples of a command

    \b
    Exit codes:
      0    ok
      1    the environment: disk, GPU, packages
      2    the input: options, models, bundles
      130  interrupted
      141  the output pipe was closed
    Errors are text on stderr. With --json, stdout is then empty.
    """
    if version:
        _show_version(as_json)
        ctx.exit()
    if as_json:
        raise click.UsageError("--json follows a command (aot models --json) or --version", ctx)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns its exit code."""
    verb_arguments = [argument for argument in arguments if argument != _DEBUG]

    def command() -> int:
        code = aot.main(verb_arguments, prog_name="aot", standalone_mode=False)
        return code if isinstance(code, int) else OK

    return guarded(command, debug=len(verb_arguments) < len(arguments))
