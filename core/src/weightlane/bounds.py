"""How long a lane waits for what. Every wait has one of these bounds (invariant 9)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds.

    `connect`: facts, description and planning of all replicas, and every rank's part of it. `start`: from a
    rank's call of `sync` until all ranks have called it and the engines have answered. `bucket`: one bucket
    between a rank and a worker. `finish`: from the last bucket to every replica's report. `lost_after`:
    silence after which a peer counts as dead. `collective`: one collective of the lane's own group; kept
    below `lost_after` times two so that a dead rank ends every call within half a minute.
    """

    connect: float = 180.0
    start: float = 120.0
    bucket: float = 120.0
    finish: float = 120.0
    lost_after: float = 10.0
    collective: float = 20.0


DEFAULT_BOUNDS = Bounds()
