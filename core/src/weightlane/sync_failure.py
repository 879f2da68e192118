"""From whatever a rank met in a sync to the one typed error that all ranks raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from weightlane.errors import ControlLostError, HookError, PlanError, SyncError, WeightlaneError
from weightlane.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightlane.control import ControlChannel

SyncProgress: TypeAlias = Literal["starting", "moving", "committing"]
"""How far a sync had come when it failed: nobody had moved anything, buckets were moving, or all had
verified and the version was being published."""

# Before all ranks agreed to start there is no one version: each knows only what it asked for.
_CONSEQUENCES: dict[SyncProgress, str] = {
    "starting": "Sync {sync} failed and was not published; it touched no receiver.",
    "moving": "Sync {sync} (version {version}) failed and was not published; receivers that had begun to "
    "write {receivers}.",
    "committing": "The commit of sync {sync} (version {version}) failed; replicas that had not published "
    "{receivers}.",
}


def diagnosed(error: Exception, sync: int, rank: int, seconds: float, check: Callable[[], None]) -> Exception:
    """The error itself where it tells enough; otherwise the loss behind it, where one shows within `seconds`.

    A collective broken by a dead rank raises at once and names a socket; who died is known on the control
    channel a few seconds later. `check` raises when somebody is found lost or another cause was told.
    """
    if isinstance(error, WeightlaneError) and not isinstance(error, HookError):
        return error
    try:
        wait_until(lambda: False, seconds=seconds, check=check)
    except WeightlaneError as found:
        return found
    if isinstance(error, HookError):
        return error
    return SyncError(
        f"Rank {rank} failed in sync {sync}: {type(error).__name__}: {error}.",
        "The trainer's export, a collective, or a transport raised.",
        "See the chained exception on that rank.",
    )


def first_cause(channel: ControlChannel, name: str, mine: Exception) -> Exception:
    """The cause that was told first under abort `name`; one's own where nobody can be asked."""
    try:
        channel.check_abort(name)
    except ControlLostError as lost:
        return mine if isinstance(mine, WeightlaneError) else lost
    except WeightlaneError as first:
        return first
    return mine


def partly_published(error: WeightlaneError, version: int, published: Sequence[str]) -> WeightlaneError:
    """A failed commit as the same typed error, which also names the replicas that serve the version."""
    served = f"served by {', '.join(published)}" if published else "served by no replica"
    return error.adding(f"Version {version} is {served}.")


def with_consequence(
    error: Exception,
    sync: int,
    version: int,
    progress: SyncProgress,
    receivers: str,
    held: Sequence[str] = (),
) -> Exception:
    """The same typed error, which also says what state the receivers are in.

    `receivers` is a predicate. `held` are addresses of engines that are still paused though nothing was
    written: this lane has published no version to them yet, and cannot tell whether what they hold is whole.
    """
    if not isinstance(error, WeightlaneError) or isinstance(error, PlanError):
        return error
    told = _CONSEQUENCES[progress].format(sync=sync, version=version, receivers=receivers)
    if told in error.why:
        return error
    if held and progress == "starting":
        told += f" Generation stays held back at {', '.join(held)} until a sync is published there."
    return error.adding(told)
