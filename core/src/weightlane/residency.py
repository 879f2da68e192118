"""What a replica holds now, asked before each sync and never assumed (invariant 4)."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import SyncTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightlane.plan import ReplicaPlan

_OVERRUN_SECONDS = 15.0  # an endpoint ends a call by itself within about ten seconds of its bound


class WorkerResidency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="resident"):
    """One worker's own word.

    `plan_digest` is that of the plan it holds for the lane that asks ("" for none). `cause` says why it is
    not servable. `released` lists memory that was let go and not taken back, such as `weights`. `base` is the
    identity of the whole base that it holds for adapters ("" where none is known).
    """

    worker: int
    incarnation: str
    plan_digest: str = ""
    held_version: int | None = None
    servable: bool = True
    cause: str = ""
    released: tuple[str, ...] = ()
    base: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaResidency:
    """One replica's answer: its workers, or the error in place of them."""

    replica: int
    address: str
    workers: tuple[WorkerResidency, ...] = ()
    error: Exception | None = None

    @property
    def versions(self) -> tuple[int | None, ...]:
        """What each worker tells, in worker order."""
        return tuple(worker.held_version for worker in self.workers)

    def __str__(self) -> str:
        if self.error is not None:
            return f"replica {self.replica} at {self.address}: does not answer: {self.error}"
        told = "; ".join(
            f"worker {item.worker}: incarnation {item.incarnation}, version {item.held_version}, "
            + ("servable" if item.servable else f"not servable ({item.cause})")
            + (f", released {', '.join(item.released)}" if item.released else "")
            for item in self.workers
        )
        return f"replica {self.replica} at {self.address}: {told}"

    def why_no_base(self, identity: str) -> str:
        """Why a base of that identity must be sent; "" where every worker holds it."""
        for worker in self.workers:
            if worker.base != identity:
                held = f"another base ({worker.base})" if worker.base else "no base that is known and whole"
                return f"worker {worker.worker} holds {held}" + (f": {worker.cause}" if worker.cause else "")
        return ""

    def is_as_planned(self, replica: ReplicaPlan, plan_digest: str) -> bool:
        """Whether these are the very workers that the plan was made for, and hold it where agents run."""
        here = {item.worker: item.incarnation for item in self.workers}
        holds_plan = all(item.plan_digest == plan_digest for item in self.workers)
        return here == replica.incarnations and (holds_plan or not replica.has_agent)


def ask_together(
    askers: Sequence[Callable[[], ReplicaResidency]], whom: Sequence[tuple[int, str]], seconds: float
) -> list[ReplicaResidency]:
    """Every replica's answer, all asked at once, each within `seconds`; an error is part of the answer."""
    answers: list[ReplicaResidency | None] = [None] * len(askers)

    def ask(position: int) -> None:
        number, address = whom[position]
        try:
            answers[position] = askers[position]()
        except Exception as error:  # noqa: BLE001 - what to make of it is the caller's to say
            answers[position] = ReplicaResidency(number, address, error=error)

    if len(askers) == 1:
        ask(0)  # bounded by the endpoint, as every call of one is
    else:
        threads = [
            threading.Thread(target=ask, args=(position,), name="weightlane-residency", daemon=True)
            for position in range(len(askers))
        ]
        deadline = time.monotonic() + seconds + _OVERRUN_SECONDS
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    return [
        answer or ReplicaResidency(number, address, error=_silent(address, seconds))
        for answer, (number, address) in zip(answers, whom, strict=True)
    ]


def _silent(address: str, seconds: float) -> SyncTimeoutError:
    return SyncTimeoutError(
        f"{address} did not tell what it holds within {seconds:g} s.",
        "Its endpoint did not end the call in time either.",
        "Look at the engine's log; restart it.",
    )
