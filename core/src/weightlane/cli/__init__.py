"""The `weightlane` command.

Every command takes `--json` and then writes one JSON document to standard output and nothing else. The exit
status means the same everywhere: 0 all is well; 1 the answer is no, since what was asked for failed, is
missing or cannot work; 2 wrong usage, or the command itself broke. An interrupted demo exits with 130, and a
command whose output nobody reads any more ends without a word, with 141.
"""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING

from weightlane.cli.reader import Reader
from weightlane.errors import UsageError, WeightlaneError

if TYPE_CHECKING:
    from collections.abc import Sequence

WELL, FAILED, UNUSABLE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and gives its exit status.

    An error that weightlane raises on purpose is printed as its sentences, without a traceback: to standard
    error, or with `--json` to standard output as `{"error": {"type", "what", "why", "fix"}}`. Wrong usage and
    errors that nobody foresaw have the same form; the latter show their traceback on standard error.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    reader = Reader()
    return reader.settle(_status_of(words, reader, as_json="--json" in words), failed=FAILED)


def _status_of(words: list[str], reader: Reader, *, as_json: bool) -> int:
    try:
        return _dispatch(words, as_json=as_json)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except WeightlaneError as exc:
        _print_error(exc, as_json=as_json)
        return UNUSABLE if isinstance(exc, UsageError) else FAILED
    except Exception as exc:  # noqa: BLE001 - status 1, which Python would give, means something else here
        if isinstance(exc, BrokenPipeError) and reader.is_gone():
            return FAILED
        traceback.print_exc()
        _print_error(_unforeseen(exc), as_json=as_json, kind=type(exc).__name__)
        return UNUSABLE


def _dispatch(words: list[str], *, as_json: bool) -> int:
    # typer loads pydantic for a command's first parameter: as long as everything else here together. Shells
    # and scripts ask for this listing often, so its two plain forms do without; typer serves all others.
    if words in (["backends"], ["backends", "--json"]):
        from weightlane.cli.listing import show_backends

        show_backends(as_json=as_json)
        return WELL
    from weightlane.cli.app import WRONG_USAGE, app

    try:
        # Left to itself, typer prints wrong usage to standard error for people and exits.
        status = app(args=words, prog_name="weightlane", standalone_mode=not as_json)
    except WRONG_USAGE as exc:
        context = getattr(exc, "ctx", None)
        command = context.command_path if context is not None else "weightlane"
        raise UsageError(exc.format_message(), fix=f"See {command} --help.") from exc
    return status if isinstance(status, int) else WELL


def _unforeseen(error: Exception) -> WeightlaneError:
    return WeightlaneError(
        f"The command broke: {type(error).__name__}: {error}",
        "Nobody foresaw this error; it is a defect of weightlane or of a plugin.",
        "Report it with its traceback.",
    )


def _print_error(error: WeightlaneError, *, as_json: bool, kind: str = "") -> None:
    if as_json:
        from weightlane.cli.output import print_json

        sentences = {"what": error.what, "why": error.why, "fix": error.fix}
        print_json({"error": {"type": kind or type(error).__name__, **sentences}})
        return
    print("\n".join(part for part in (error.what, error.why, error.fix) if part), file=sys.stderr)  # noqa: T201
