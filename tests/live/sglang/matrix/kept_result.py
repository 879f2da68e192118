"""What `nox -s matrix` showed, as it is kept: written where every test of the run passed."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

from other_versions import EVERY_VERSION, LIVE_VERSIONS
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

    def is_whole(self) -> bool:
        """Whether every version was asked about all that there is to be shown of it."""
        asked = all(self.of(version).requests for version in EVERY_VERSION)
        return asked and all(self.of(version).restart_noticed for version in LIVE_VERSIONS)

    def write(self, file: Path, root: Path) -> None:
        """JSON with a digest of every module that it shows, by its path below `root`."""
        found = {
            "python": platform.python_version(),
            "torch": version_of("torch"),
            "versions": {version: asdict(item) for version, item in self._found.items()},
            "modules": digests(SHOWN_BY_THE_MATRIX, root),
        }
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
