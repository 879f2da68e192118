"""Makes this folder's helpers and the agent tests' fake engine importable."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightlane.ring_file import shared_memory_folder

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("disk", "agent", "messages")]

if TYPE_CHECKING:
    from collections.abc import Iterator

    from disk_lane import DiskLane


@pytest.fixture
def lane() -> Iterator[DiskLane]:
    """In memory, where `fsync` costs nothing."""
    from disk_lane import DiskLane

    with tempfile.TemporaryDirectory(dir=shared_memory_folder()) as parent:
        made = DiskLane(f"{parent}/shared")
        yield made
        made.sink.close()
