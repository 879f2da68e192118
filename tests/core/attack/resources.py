"""What a process holds: descriptors, threads, processes, memory, and the rings that lie about."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from weightlane.ring_file import shared_memory_folder


@dataclass(frozen=True)
class Held:
    files: int
    threads: int
    processes: int
    ring_names: int
    ring_mappings: int
    resident_mib: float


LABEL = "left"
"""Of the rings that are looked for: none of other tests, which may run beside, is labelled so."""


def ring_names() -> set[str]:
    return {path.name for path in shared_memory_folder().glob(f"weightlane-{LABEL}*")}


def ring_mappings() -> int:
    """Rings that this process has mapped, named or not."""
    return Path("/proc/self/maps").read_text().count(f"weightlane-{LABEL}")


def descendants() -> set[int]:
    """Processes that this one has started, and that those have; also ended ones that nobody waited for."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in {os.getpid(), *found}} - found:
        found |= more
    return found


def held() -> Held:
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return Held(
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
        len(descendants()),
        len(ring_names()),
        ring_mappings(),
        resident / 1024,
    )
