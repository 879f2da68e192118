"""The move of transport `collective`: one `/update_weights_from_distributed` a bucket, fed by a broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import PlanError, Problem
from weightlane.program import AnnouncedGroup, RequestMove
from weightlane_sglang.contract import (
    ANNOUNCED_FIELDS,
    DESTROY_GROUP_REQUEST,
    DESTROY_GROUP_ROUTE,
    DISTRIBUTED_REQUEST,
    DISTRIBUTED_ROUTE,
    GROUP_FIELDS,
    INIT_GROUP_REQUEST,
    INIT_GROUP_ROUTE,
)
from weightlane_sglang.requests import json_body, require_fields

if TYPE_CHECKING:
    from typing import Literal

    from weightlane.facts import EngineFacts

_BACKENDS: dict[str, Literal["gloo", "nccl"]] = {"cpu": "gloo", "cuda": "nccl"}
_SECONDS = 120.0


def announced_move(facts: EngineFacts) -> tuple[RequestMove, tuple[str, ...]]:
    """(move, notes): the group has the controller as rank 0 and one rank per tensor-parallel rank after it.

    Raises:
        PlanError: the server lacks a route or a field, or runs on a device with no backend for it here.
    """
    routes = (DISTRIBUTED_ROUTE, INIT_GROUP_ROUTE, DESTROY_GROUP_ROUTE)
    missing = [route for route in routes if route not in facts.routes]
    backend = _BACKENDS.get(facts.device)
    if missing or backend is None:
        what = (
            f"SGLang {facts.version} has no route {', '.join(missing)}"
            if missing
            else f"a group is made on {' or '.join(_BACKENDS)}, and the server tells device {facts.device!r}"
        )
        raise PlanError([Problem("transport", "collective", what, "Leave the transport open.")])
    require_fields(facts, INIT_GROUP_REQUEST, GROUP_FIELDS)
    require_fields(facts, DESTROY_GROUP_REQUEST, ("group_name",))
    require_fields(facts, DISTRIBUTED_REQUEST, ANNOUNCED_FIELDS)
    body = json_body(facts, DISTRIBUTED_REQUEST, {"flush_cache": False, "abort_all_requests": False})
    move = RequestMove(
        route=DISTRIBUTED_ROUTE,
        payload_field="",
        copies=1,
        body=body,
        last_body=body,
        timeout_seconds=_SECONDS,
        transport="collective",
        group=AnnouncedGroup(backend, facts.parallel.tensor),
    )
    notes = [
        f"each bucket is announced, then broadcast by rank 0 over {backend} to {facts.parallel.tensor} ranks",
        "an update tells nothing of what it wrote: names and shapes are checked against the checkpoint",
    ]
    if backend == "nccl":
        notes.append(
            "a group over nccl has not been run by weightlane's own tests, which have no such machine"
        )
    return move, tuple(notes)
