"""Asks pytest which live tests it would run, and for their ways; no engine is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from live_ways import Way

FOLDER = Path(__file__).parent
TABLE = FOLDER.parent / "WAYS.md"
ROOT = FOLDER.parents[3]
LONG = 10


def collected(syncs: int | None = None) -> dict[Way, list[str]]:
    """The tests that show each way, with `--syncs` or as every run has it."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "ways.json")
        words = ["-m", "pytest", "tests/live/vllm", "-m", "live", "--collect-only", "-q", "-n", "0"]
        words += ["-p", "no:cacheprovider", "-p", "ways_listing", f"--ways-json={told}"]
        words += [] if syncs is None else [f"--syncs={syncs}"]
        path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
        finished = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        if finished.returncode:
            raise RuntimeError(finished.stdout[-3000:] + finished.stderr[-3000:])
        found: dict[Way, list[str]] = {}
        for item in json.loads(told.read_text()):
            found.setdefault(Way(**item["way"]), []).append(item["test"])
        return found
