"""The order of one sync, both sides' lifecycle in one list; printed with the plan and followed by the lane.

Rollout engines hold still and make room first, then the trainer loads what it exports; after the last bucket
the trainer makes room again before an engine takes its caches back. Publishing is the last thing that can
fail; only then is generation let go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from weightlane.program import AdapterMove

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.program import EngineCall, Program, TrainerLifecycle
    from weightlane.types import ReadBackPolicy

StepKind: TypeAlias = Literal[
    "pause",
    "release",
    "resume-weights",
    "onload",
    "move",
    "offload",
    "verify",
    "flush",
    "resume-memory",
    "read-back",
    "publish",
    "continue",
]

BEFORE_MOVE: tuple[StepKind, ...] = ("pause", "release", "resume-weights")
"""On each replica, before any rank loads or exports anything."""
ON_RANKS: tuple[StepKind, ...] = ("onload", "move", "offload")
"""On each trainer rank; the controller goes on when every rank is through."""
AFTER_MOVE: tuple[StepKind, ...] = ("verify", "flush", "resume-memory")
"""Once every rank is through: all replicas verify before any is flushed."""
BY_REQUEST: tuple[StepKind, ...] = ("read-back",)
"""Of replicas without agents whose endpoint asks what they hold; agents read back before they report."""
AT_COMMIT: tuple[StepKind, ...] = ("publish", "continue")
"""In `commit`: every replica publishes before any goes on."""
ORDER = BEFORE_MOVE + ON_RANKS + AFTER_MOVE + BY_REQUEST + AT_COMMIT

Side: TypeAlias = Literal["rollout", "trainer", "lane"]


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step: who does it, on which replica (None: on every rank, or in all), what, and when not always."""

    kind: StepKind
    side: Side
    what: str
    replica: int | None = None
    condition: str = ""

    def __str__(self) -> str:
        where = self.side if self.replica is None else f"{self.side} {self.replica}"
        return f"{where}: {self.kind} ({self.what})" + (f" {self.condition}" if self.condition else "")


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every step of one sync, in order."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join(f"{number}. {step}" for number, step in enumerate(self.steps, 1))


_WHEN: dict[ReadBackPolicy, str] = {"first": "at the first sync", "always": "", "never": ""}


def make_schedule(
    programs: Sequence[Program],
    trainer: TrainerLifecycle,
    read_back: Mapping[int, ReadBackPolicy] | None = None,
) -> Schedule:
    """Merges the programs of all replicas, in replica order, with the trainer's share.

    `read_back` has the replicas that are read back by requests, and when.
    """
    steps: list[Step] = []
    for kind in ORDER:
        if kind in ON_RANKS or kind == "verify":
            steps += _steps_of_all(kind, trainer)
        elif kind in BY_REQUEST:
            steps += [
                Step(kind, "rollout", "hashes of what it holds", number, _WHEN[policy])
                for number, policy in (read_back or {}).items()
                if policy != "never"
            ]
        else:
            steps += [
                step for number, program in enumerate(programs) for step in _rollout(kind, number, program)
            ]
    return Schedule(tuple(steps))


def calls_of(program: Program, kind: StepKind) -> tuple[EngineCall, ...]:
    """The unconditional engine calls of one kind of step."""
    calls: dict[StepKind, tuple[EngineCall, ...]] = {
        "pause": program.pause,
        "flush": program.settle,
        "publish": program.publish,
        "continue": program.resume,
    }
    return calls.get(kind, ())


def _steps_of_all(kind: StepKind, trainer: TrainerLifecycle) -> list[Step]:
    if kind == "move":
        return [Step(kind, "lane", "every bucket, from the ranks to the workers of every replica")]
    if kind == "verify":
        return [Step(kind, "lane", "reports of every worker of every replica")]
    what = trainer.onload if kind == "onload" else trainer.offload
    return [Step(kind, "trainer", what)] if what else []


def _rollout(kind: StepKind, number: int, program: Program) -> list[Step]:
    steps = [Step(kind, "rollout", call.route, number) for call in calls_of(program, kind)]
    if kind == "publish" and not steps:
        by_name = isinstance(program.move, AdapterMove)
        steps = [Step(kind, "rollout", "by the adapter's name" if by_name else "by its agent", number)]
    kept = [item for item in program.memory if item.tag != "weights"]
    if kind == "release":
        steps += [
            Step(kind, "rollout", item.release.route, number, "unless it sleeps already") for item in kept
        ]
    if kind == "resume-weights":
        steps += [
            Step(kind, "rollout", item.resume.route, number, "if they were released")
            for item in program.memory
            if item.tag == "weights"
        ]
    if kind == "resume-memory":
        steps += [
            Step(kind, "rollout", item.resume.route, number, "if it was released") for item in reversed(kept)
        ]
    return steps
