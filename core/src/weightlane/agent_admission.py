"""Residency, checked by an agent before the first write of a sync (invariant 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.engine_agent import why_not_whole
from weightlane.errors import SyncError

if TYPE_CHECKING:
    from weightlane.agent_state import Attached, BaseState
    from weightlane.engine_agent import WorkerEngine
    from weightlane.messages import BeginInline, CheckResidency, Receive, ReceiveDisk


def require_plan(
    attached: Attached | None, request: Receive | BeginInline | CheckResidency | ReceiveDisk, origin: str
) -> Attached:
    """What this worker holds of the lane, if it is the plan that the request is about.

    Raises:
        SyncError: it holds none, or another one.
    """
    if attached is None or attached.plan.plan_digest != request.plan_digest:
        held = "none" if attached is None else attached.plan.plan_digest
        raise SyncError(
            f"{origin} does not hold plan {request.plan_digest} of lane {request.lane} (it holds {held}).",
            "The engine was restarted, or another controller attached since the sync began.",
            "Sync again: the next sync gives it the plan anew.",
        )
    return attached


def require_residency(
    attached: Attached, engine: WorkerEngine, base: BaseState, *, planned: str | None, origin: str
) -> None:
    """The engine is the one that the plan was made for, and holds what an adapter is put on.

    Args:
        attached: the lane's plan here.
        engine: the plugin's part.
        base: what was written here since.
        planned: the incarnation that the plan was made for.
        origin: how the worker names itself.

    Raises:
        SyncError: another incarnation, or no base, or another base, for the adapter.
    """
    lane = attached.plan.lane
    incarnation = engine.current_incarnation()
    if planned != incarnation:
        raise SyncError(
            f"{origin} is incarnation {incarnation}, the plan was made for {planned}.",
            "The engine or its model was made anew since the sync began.",
            "Sync again: the next sync makes the plan with it anew.",
        )
    lost, adapter = why_not_whole(engine), attached.plan.adapter
    if adapter is None:
        return
    if lost:
        raise SyncError(
            f"{origin} has no base for the adapter of lane {lane}.", lost, "Sync full weights first."
        )
    if adapter.base.identity != base.identity:
        raise SyncError(
            f"{origin} does not hold the base any more that the adapter of lane {lane} was trained on.",
            "Another lane has written its weights since.",
            "Sync again: it is sent again." if adapter.base.sent_by else "Connect again.",
        )
