"""What an obstacle of a trace means for a plan: one problem each, with a kind of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import Problem

if TYPE_CHECKING:
    from weightlane.trace.table import Obstacle

_FIX = "Where its elements land cannot be proven, so it is not sent; report the architecture."
_LOADER_FIX = "Fix what it complains of, or report the architecture."


def obstacle_problem(item: Obstacle, receiver: str) -> Problem:
    """The problem, about the first source or target that is concerned.

    Args:
        item: what the loader did.
        receiver: how messages call the replica.
    """
    subject = next(iter((*item.sources, *item.targets)), "loader")
    into = f" into {item.targets[0]}" if item.targets and item.sources else ""
    by = f" by {item.operator}" if item.operator else ""
    more = f" ({item.detail})" if item.detail else ""
    loader = f"the loader of {receiver}"
    match item.kind:
        case "computed":
            what = f"{loader} writes a value computed{by}{into}{more}"
            return Problem("trace-computed", subject, what, _FIX)
        case "staged":
            what = f"{loader} takes it through a temporary tensor{by}{more}"
            return Problem("trace-staged", subject, what, _FIX)
        case "value-dependent":
            return Problem("trace-value-dependent", subject, f"{loader} decides by its value{by}{more}", _FIX)
        case "rebound":
            return Problem("trace-rebound", subject, f"{loader} puts another tensor in its place{more}", _FIX)
        case "overwritten":
            return Problem("trace-overwritten", subject, f"{loader} overwrites it{by}{into}{more}", _FIX)
        case "foreign":
            return Problem("trace-foreign", subject, f"{loader} writes{by} to {item.detail}", _FIX)
        case "changed-source":
            return Problem("trace-changed-source", subject, f"{loader} changes it in place{by}{more}", _FIX)
        case "thread":
            thread = item.detail or "a thread that ran before"
            what = f"{loader} gives work{by} to {thread}, of which not all can be seen"
            return Problem("trace-thread", subject, what, _FIX)
        case "per-call":
            what = f"{loader} writes it otherwise when it does not come in one call with all others"
            return Problem("trace-per-call", subject, what, _FIX)
        case "untraceable":
            return Problem("trace-untraceable", subject, f"{receiver} holds {item.detail}", _FIX)
        case "error":
            return Problem("trace-error", subject, f"{loader} raised {item.detail}", _LOADER_FIX)
