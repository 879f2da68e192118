#!/usr/bin/env python3
"""The command line reference, from the typer application: whatever commands it has, in its own words.

`conf.py` writes it whenever the site is built. By hand: `python docs/command_reference.py` prints it.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import typer
from rst_tables import list_table, literal

from weightlane.cli.app import app


def command_pages(application: typer.Typer, name: str) -> str:
    """One section for every command of an application, those of groups in it included."""
    root = typer.main.get_command(application)
    context: Any = _context(root, name)
    return "\n".join(_sections(root, context))


def _context(command: Any, name: str, parent: Any = None) -> Any:
    return command.context_class(command, info_name=name, parent=parent)


def _sections(command: Any, context: Any) -> list[str]:
    """This command's section, then those of its own commands; hidden ones are left out."""
    sections = [_section(command, context)]
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    for name in names:
        inner = command.get_command(context, name)
        if inner is not None and not inner.hidden:
            sections += _sections(inner, _context(inner, name, context))
    return sections


def _section(command: Any, context: Any) -> str:
    path = context.command_path
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    parts = [
        f".. _command-{path.replace(' ', '-')}:\n",
        f"{path}\n{'-' * len(path)}\n",
        _as_literals(inspect.cleandoc(command.help or command.short_help or "")) + "\n",
        f".. code-block:: text\n\n   {usage}\n",
    ]
    told = [_record(item, context) for item in command.get_params(context)]
    records = [record for record in told if record]
    if records:
        parts.append(list_table(("Argument or option", "Meaning"), records, widths="35 65"))
    return "\n".join(parts)


def _record(parameter: Any, context: Any) -> tuple[str, str] | None:
    """What `--help` prints of one argument or option; None for a hidden one."""
    record = parameter.get_help_record(context)
    if record is None:
        return None
    names, meaning = record
    return literal(names), _as_literals(" ".join(meaning.split())) or "\u2013"


def _as_literals(text: str) -> str:
    """Help text as plain words: of all that reStructuredText would read as markup, only `code` is."""
    for character in ("\\", "*", "|", "_"):
        text = text.replace(character, f"\\{character}")
    return text


if __name__ == "__main__":
    sys.stdout.write(command_pages(app, "weightlane"))
