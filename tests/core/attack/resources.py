"""What a process holds: descriptors, threads, memory, and the rings that lie about."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass
from pathlib import Path

from weightlane.ring_file import shared_memory_folder


@dataclass(frozen=True)
class Held:
    files: int
    threads: int
    ring_names: int
    ring_mappings: int
    resident_mib: float


def ring_names() -> set[str]:
    return {path.name for path in shared_memory_folder().glob("weightlane-attack*")}


def ring_mappings() -> int:
    """Rings that this process has mapped, named or not."""
    return Path("/proc/self/maps").read_text().count("weightlane-attack")


def held() -> Held:
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return Held(
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
        len(ring_names()),
        ring_mappings(),
        resident / 1024,
    )
