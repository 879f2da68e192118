"""Every error weightlane raises on purpose.

Each message has three sentences: what happened, why, and what to do. Errors that cross a process
border travel as `Failure` (see `weightlane.messages`) and are raised again, same type and same text,
on every rank.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

_MOST_COMPARED = 300


class WeightlaneError(Exception):
    """Base of all typed errors. `what`, `why` and `fix` are kept apart so tools can show them apart.

    `origin` and `remote_traceback` are set on an error that came from another process.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what = what
        self.why = why
        self.fix = fix
        self.origin = ""
        self.remote_traceback = ""
        super().__init__(" ".join(part for part in (what, why, fix) if part))

    def adding(self, why: str) -> Self:
        """The same error with one more sentence of why; origin and far traceback stay."""
        error = type(self)(self.what, f"{self.why} {why}".strip(), self.fix)
        error.origin, error.remote_traceback = self.origin, self.remote_traceback
        return error

    @property
    def reason(self) -> tuple[str, str, str]:
        """Type, what and why without the process that raised it: equal when ranks failed alike."""
        suffix = f" (from {self.origin})"
        return type(self).__name__, self.what.removesuffix(suffix) if self.origin else self.what, self.why


class UsageError(WeightlaneError):
    """Options that contradict each other, or one that is missing or unreadable; nothing was tried."""


class PluginError(WeightlaneError):
    """A plugin is broken, disabled, in conflict or incompatible, and was asked for."""


class HookError(PluginError):
    """A plugin raised from a hook; names the plugin, its distribution and the hook."""


class SelectionError(WeightlaneError):
    """No backend, or more than one, fits an engine; lists every candidate and why it was not taken."""


class PinError(SelectionError):
    """A pin cannot be met; nothing else is chosen in its place."""


class LockError(SelectionError):
    """A selection differs from the lock in force, listing every difference, or a lock cannot be used."""


class ProtocolError(WeightlaneError):
    """A message could not be decoded: truncated, of an unknown kind, or with an unknown field."""


class EngineError(WeightlaneError):
    """The rollout engine answered with an error; carries its own text or traceback."""


class EngineDeadError(EngineError):
    """The rollout engine, or its connection, is gone."""


class ControlLostError(WeightlaneError):
    """The control channel, or a trainer rank on it, stopped answering."""


class SyncError(WeightlaneError):
    """A sync failed; says whether the receivers were touched and which version they still serve."""


class SyncTimeoutError(SyncError):
    """A wait inside a sync reached its bound; names what was awaited and for how long."""


class SyncCancelledError(SyncError):
    """A sync was given up by whoever asked for it on one rank; it failed on all, and was not published."""


class VerificationError(SyncError):
    """What the receiver reports is not what was sent: counts or digests differ."""


class StaleSampleError(WeightlaneError):
    """A sample is further behind the lane's version than was allowed, or its version is not known."""


class NotServableError(EngineError):
    """The receiver refuses to generate: its weights are no published version, or it has let go of memory."""


class ContractError(WeightlaneError):
    """A contract snapshot is damaged, or there is none for what was asked."""


class ExportError(WeightlaneError):
    """The trainer cannot give a tensor as the manifest announced it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a plan.

    `kind` is a stable word for tools (`missing-name`, `shape`, `rank-disagreement`, ...; docs/errors.rst
    lists all of core's); `subject` the tensor, field or rank it is about.
    """

    kind: str
    subject: str
    what: str
    fix: str = ""
    near: tuple[str, ...] = ()

    def __str__(self) -> str:
        near = f" Near: {', '.join(self.near)}." if self.near else ""
        fix = f" {self.fix}" if self.fix else ""
        return f"[{self.kind}] {self.subject}: {self.what.removesuffix('.')}.{near}{fix}"


class PlanError(WeightlaneError):
    """A plan has problems; `problems` holds all of them. Nothing was sent and no receiver was touched."""

    def __init__(self, problems: Sequence[Problem], *, lane: str = "") -> None:
        self.problems = tuple(problems)
        self.lane = lane
        count = len(self.problems)
        head = f"The plan{' of ' + lane if lane else ''} has {count} problem{'' if count == 1 else 's'}:"
        body = "\n".join(f"  {problem}" for problem in self.problems)
        super().__init__(f"{head}\n{body}\nNothing was sent; no receiver was touched.")


MOST_WITH_NEAR_NAMES = 20
"""Problems of one plan that look for near names: a wrong prefix makes every name one, and few tell all."""


def near_names(name: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """The `limit` candidates closest to `name`, best first; never that very name.

    Candidates with the same last part are looked at first, and a few hundred at most: comparing every name
    of a large model with every other would take hours.
    """
    every = [other for other in candidates if other != name]
    tail = name.rpartition(".")[2]
    alike = [other for other in every if other.rpartition(".")[2] == tail]
    for pool in (alike, every):
        found = difflib.get_close_matches(name, pool[:_MOST_COMPARED], n=limit, cutoff=0.6)
        if found:
            return tuple(found)
    return ()
