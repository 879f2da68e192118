"""Asking a replica where its loaders would put what is to be sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.agent_calls import call_agents
from weightlane.endpoint import TracingEndpoint
from weightlane.manifest import FLOATING
from weightlane.messages import Trace, Traced, WireTensor
from weightlane.trace.table import Untraced
from weightlane.trace.table_check import require_table, require_workers
from weightlane.types import Capability, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.manifest import Manifest
    from weightlane.planning import OpenReplica
    from weightlane.receiver import BeyondExpected, ExpectedTensor
    from weightlane.trace.table import PlacementTable

_USUAL_DTYPE = "float32"


def tied_away(manifest: Manifest, expected: Sequence[ExpectedTensor]) -> dict[str, str]:
    """Exported tensors that the receiver reads another one for, each with that reason."""
    tied = {item.name: f"tied to {item.tied_to}" for item in expected if item.tied_to}
    return {spec.name: tied[spec.name] for spec in manifest.tensors if spec.name in tied}


def sources_to_trace(
    manifest: Manifest, expected: Sequence[ExpectedTensor], beyond: BeyondExpected | None = None
) -> tuple[WireTensor, ...]:
    """What a whole load of this receiver would be: the exported tensors first, in their order.

    Tensors that are tied away, or that the receiver does not know, are left out: the one kind is not sent,
    the other is a problem of the plan already, and would only end the loader's run. Shapes are the
    receiver's, for the same reason. Where the receiver takes tensors beyond what it expects, the trace is to
    tell which: they come with the shapes that they are exported in. What it expects and nobody exports is
    added, so that it is known what must travel together with it.
    """
    wanted = {item.name: item for item in expected if not item.tied_to}
    tied = {item.name for item in expected if item.tied_to}
    usual = next((spec.dtype for spec in manifest.tensors if spec.dtype in FLOATING), _USUAL_DTYPE)
    sent = [
        WireTensor(spec.name, wanted[spec.name].shape if spec.name in wanted else spec.shape, spec.dtype)
        for spec in manifest.tensors
        if spec.name in wanted or (beyond is not None and spec.name not in tied)
    ]
    exported = {spec.name for spec in manifest.tensors}
    missing = [
        WireTensor(item.name, item.shape, item.dtype or usual)
        for item in wanted.values()
        if item.name not in exported
    ]
    return (*sent, *missing)


def ask_for_tables(
    replica: OpenReplica, manifest: Manifest, sources: Sequence[WireTensor], seconds: float
) -> tuple[PlacementTable, ...] | Untraced:
    """One table per worker, or why there is none.

    Args:
        replica: open.
        manifest: the agreed one.
        sources: what `sources_to_trace` gives for it.
        seconds: bound of the one call that reaches all workers.

    Raises:
        EngineError: the engine was asked and failed.
        ProtocolError: a table that is not about these sources, or leaves its tensors.
    """
    if manifest.phase is Phase.ADAPTER:
        return Untraced("an adapter's matrices are bound to modules by name, not written by the loader")
    if not sources:
        return Untraced("nothing that is exported is in the checkpoint that the receiver expects")
    endpoint = replica.endpoint
    address = endpoint.address
    if isinstance(endpoint, TracingEndpoint):
        answer = endpoint.trace_workers(sources, seconds)
    elif Capability.WORKER_AGENT in replica.selected.descriptor.capabilities:
        answer = _ask_agents(replica, sources, seconds)
    else:
        answer = Untraced(f"nothing of ours runs where {address} has its workers")
    if isinstance(answer, Untraced):
        return answer
    if not answer:
        return Untraced(f"{address} gave no table for any worker")
    require_workers(answer, sender=address)
    for table in answer:
        require_table(table, sources, sender=f"worker {table.key.worker} of {address}")
    return answer


def _ask_agents(
    replica: OpenReplica, sources: Sequence[WireTensor], seconds: float
) -> tuple[PlacementTable, ...] | Untraced:
    request = Trace(replica.selected.reference, tuple(sources))
    answers: list[Traced | Untraced] = call_agents(
        replica.endpoint,
        request,
        (Traced, Untraced),
        workers=len(replica.workers),
        seconds=seconds,
    )
    tables: list[PlacementTable] = []
    for item in answers:
        if isinstance(item, Untraced):
            return item
        tables.append(item.table)
    return tuple(tables)
