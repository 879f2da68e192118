"""`weightlane backends`, as typer sees it; `weightlane.cli.listing` does the work."""

from __future__ import annotations

from typing import Annotated

import typer

from weightlane.cli.listing import show_backends
from weightlane.cli.locked import Locked

app = typer.Typer(add_completion=False)


@app.command("backends")
def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    locked: Locked = None,
) -> None:
    """List registered backends, and which one is chosen for what is installed here, and why."""
    show_backends(as_json=as_json, locked=locked)
