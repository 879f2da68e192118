"""How a program runs its proof: figures are written whatever happens, and what it started ends with it."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from proof import Proof


def prove(options: argparse.Namespace, kind: type[Proof]) -> dict[str, Any]:
    """Runs it all; what was seen."""
    Path(options.out).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, end_quietly)
    with tempfile.TemporaryDirectory(prefix="wl-") as scratch:
        proof = kind(options, Path(scratch))
        try:
            with proof.ends:
                proof.run()
        except BaseException:  # noqa: BLE001 - figures are wanted whatever happened
            proof.figures.setdefault("errors", {})["run"] = traceback.format_exc()
            sys.stderr.write(proof.figures["errors"]["run"])
        proof.say("done")
    return proof.figures


def status_of(options: argparse.Namespace, figures: dict[str, Any]) -> int:
    """Writes the figures; 0 when every check passed."""
    (Path(options.out) / "figures.json").write_text(json.dumps(figures, indent=1))
    checks = figures["checks"].values()
    failed = "errors" in figures or not all(item["passed"] for item in checks)
    return int(failed or bool(figures.get("rank 1")))


def end_quietly(number: int, frame: FrameType | None) -> NoReturn:
    """A signal ends the run, and what it has started with it."""
    del frame
    raise SystemExit(128 + number)
