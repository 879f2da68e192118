"""Running `weightlane demo` as a user does and reading its JSON document."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PROGRAM = "import sys; from weightlane.cli import main; sys.exit(main())"


def run_demo_command(options: Sequence[str], *, folder: Path, seconds: float) -> dict[str, Any]:
    """The document of one demo run; its report lies in `folder` as report.html.

    Raises:
        AssertionError: the command printed no document, or its status and verdict do not go together.
        subprocess.TimeoutExpired: it ran longer than `seconds`.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "demo", "--json", "--report", str(folder / "report.html"), *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        document = {}
    if "verdict" not in document or (document["verdict"] == "PASS") != (done.returncode == 0):
        raise AssertionError(f"status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return document
