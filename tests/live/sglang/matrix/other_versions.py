"""The SGLang versions that `nox -s matrix` goes through.

`other_versions.json` lists them, and what goes before the environment of SGLang 0.5.18 to make it one of
each. A version is among them because a request changed its shape in it, or the era does.
"""

from __future__ import annotations

import json
from pathlib import Path

LISTED = json.loads(
    (Path(__file__).parents[2] / "sglang_cpu_environment/other_versions.json").read_text(encoding="utf-8")
)
EVERY_VERSION: tuple[str, ...] = tuple(LISTED)
LIVE_VERSIONS: tuple[str, ...] = tuple(version for version, item in LISTED.items() if item["live"])
