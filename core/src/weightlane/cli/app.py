"""The typer application. A command's module is imported when that command runs or shows its help.

A command is a module `weightlane.cli.<name>` with a typer `app` that holds one command, and a line in
`COMMANDS`. It takes `--json`, and keeps to the exit statuses of `weightlane.cli`.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

COMMANDS: dict[str, str] = {
    "backends": "weightlane.cli.backends",
    "demo": "weightlane.cli.demo",
    "diff": "weightlane.cli.diff",
    "doctor": "weightlane.cli.doctor",
    "explain": "weightlane.cli.explain",
    "launch-args": "weightlane.cli.launch_args",
    "lock": "weightlane.cli.lock",
    "plan": "weightlane.cli.plan",
}

# typer carries click, or its own copy of it; from either, this is the class of errors of usage.
WRONG_USAGE: Any = typer.BadParameter.__bases__[0]


class LazyGroup(TyperGroup):
    """Finds commands in `COMMANDS` and imports the module of the one that is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        """All names, unimported."""
        return sorted(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or None."""
        if cmd_name not in self.commands:
            # For a name that is not there, typer looks for near ones among the commands it holds.
            for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:
                module = importlib.import_module(COMMANDS[name])
                self.commands[name] = typer.main.get_command(module.app)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    name="weightlane",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from weightlane import __version__

        typer.echo(f"weightlane {__version__}")
        raise typer.Exit


@app.callback()
def _weightlane(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Move a trainer's weights into rollout engines, and prove that they arrived.

    Exit status of every command: 0 all is well; 1 what was asked for failed, is missing or cannot work; 2
    wrong usage, or the command itself broke. With --json, errors are JSON on standard output, too.
    """
