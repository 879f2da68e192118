"""How long a lane waits for what. Every wait has one of these bounds (invariant 9)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds.

    What is bounded otherwise, or relies on something else, says so where it waits (a test looks for that).

    `connect`: facts, description and planning of all replicas, and every rank's part of it; also of one that
    comes back before a sync. `start`: from a
    rank's call of `sync` until all ranks have called it and one engine has answered. `bucket`: one bucket
    between a rank and a worker. `finish`: from the last bucket to one replica's report. `lost_after`:
    silence after which a peer counts as dead. `collective`: one collective of the lane's own group; longer
    than a bucket, since another rank may be waiting for its worker between two collectives. A killed rank
    breaks a collective at once; this bound is for one that is stopped or cut off. `drain`: until the requests
    that run in one engine have ended, where a sync waits for them.
    """

    connect: float = 180.0
    start: float = 120.0
    bucket: float = 120.0
    finish: float = 120.0
    lost_after: float = 10.0
    collective: float = 150.0
    drain: float = 300.0

    def whole_sync(self, buckets: int, replicas: int) -> float:
        """The sum of what one sync may wait for: the bound of whoever only waits for its end."""
        waits = (self.start + self.finish) * (replicas + 1) + self.drain * replicas
        return self.connect + waits + self.bucket * buckets


DEFAULT_BOUNDS = Bounds()
