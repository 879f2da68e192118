"""The `weightlane` command.

Exit status: 0 all is well, 1 what was asked for failed or is missing, 2 wrong usage.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from weightlane.errors import WeightlaneError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and gives its exit status.

    An error that weightlane raises on purpose is printed as its sentences, without a traceback: to standard
    error, or with `--json` to standard output as `{"error": {"type", "what", "why", "fix"}}`.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _dispatch(words)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except WeightlaneError as exc:
        _print_error(exc, as_json="--json" in words)
        return 1
    return 0


def _dispatch(words: list[str]) -> None:
    # typer loads pydantic for a command's first parameter: as long as everything else here together. Shells
    # and scripts ask for this listing often, so its two plain forms do without; typer serves all others.
    if words in (["backends"], ["backends", "--json"]):
        from weightlane.cli.listing import show_backends

        show_backends(as_json="--json" in words)
        return
    from weightlane.cli.app import app

    app(args=words, prog_name="weightlane")


def _print_error(error: WeightlaneError, *, as_json: bool) -> None:
    if as_json:
        from weightlane.cli.output import print_json

        sentences = {"what": error.what, "why": error.why, "fix": error.fix}
        print_json({"error": {"type": type(error).__name__, **sentences}})
        return
    print("\n".join(part for part in (error.what, error.why, error.fix) if part), file=sys.stderr)  # noqa: T201
