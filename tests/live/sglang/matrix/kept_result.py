"""What `nox -s matrix` showed, as it is kept: written at the end of a run in which every test passed."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

from other_versions import EVERY_VERSION
from shown_modules import SHOWN_BY_THE_MATRIX, digests

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightlane.testing.parity_result import SyncParity


@dataclass
class OfOneVersion:
    """`live` has a row per way of syncing into a running server; empty where none was started."""

    era: str = ""
    requests: list[str] = field(default_factory=list)
    adapter_config: bool = False
    live: list[dict[str, Any]] = field(default_factory=list)
    restart_noticed: bool = False
    adapters_refused: bool = False


class MatrixResult:
    """Collects what tests showed of each version."""

    def __init__(self) -> None:
        self._found: dict[str, OfOneVersion] = {}

    def of(self, version: str) -> OfOneVersion:
        return self._found.setdefault(version, OfOneVersion())

    def requests(self, version: str, *, era: str, read: list[str], adapter_config: bool) -> None:
        found = self.of(version)
        found.era, found.requests, found.adapter_config = era, read, adapter_config

    def live(self, version: str, way: str, syncs: Sequence[SyncParity]) -> None:
        self.of(version).live.append(
            {
                "way": way,
                "syncs": len(syncs),
                "largest_difference": max(item.difference for item in syncs),
                "smallest_move": min(item.moved for item in syncs),
            }
        )

    def write(self, file: Path, root: Path) -> None:
        """JSON with a digest of every module that it shows, by its path below `root`.

        What the file holds of the same code stays, where this run showed nothing of it.
        """
        modules = digests(SHOWN_BY_THE_MATRIX, root)
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        before = kept["versions"] if kept.get("modules") == modules else {}
        versions = {
            version: asdict(_merged(OfOneVersion(**before.get(version, {})), self.of(version)))
            for version in EVERY_VERSION
        }
        found = {
            "python": platform.python_version(),
            "torch": version_of("torch"),
            "versions": versions,
            "modules": modules,
        }
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _merged(before: OfOneVersion, now: OfOneVersion) -> OfOneVersion:
    ways = {row["way"]: row for row in (*before.live, *now.live)}
    asked = now if now.requests else before
    return OfOneVersion(
        era=asked.era,
        requests=asked.requests,
        adapter_config=asked.adapter_config,
        live=[ways[way] for way in sorted(ways)],
        restart_noticed=before.restart_noticed or now.restart_noticed,
        adapters_refused=before.adapters_refused or now.adapters_refused,
    )
