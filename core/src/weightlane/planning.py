"""Planning on the controller: from manifests and live descriptions to one agreed plan, or every problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightlane.adapter_check import check_adapter_tensors
from weightlane.adapter_planning import express_adapter, naming_problems
from weightlane.buckets import lay_out_buckets
from weightlane.contexts import (
    BuildRequestsContext,
    EndpointContext,
    MapNamesContext,
    TrainerLifecycleContext,
)
from weightlane.errors import PlanError, Problem, near_names
from weightlane.manifest import Manifest, RankManifest, merge_rank_manifests
from weightlane.peers import choose_transport, form_peers
from weightlane.plan import LanePlan, ReplicaPlan, wire_tensors
from weightlane.plan_check import check_against_expected
from weightlane.plan_problems import (
    disagreements,
    dtype_problems,
    duplicate_names,
    folder_problems,
    frame_problems,
    memory_problems,
    tie_problems,
)
from weightlane.program import with_lifecycle
from weightlane.selection import select
from weightlane.types import Capability, Mode, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.adapters import AdapterExpression
    from weightlane.contexts import RolloutTarget
    from weightlane.endpoint import EngineEndpoint
    from weightlane.facts import EngineFacts
    from weightlane.program import Program, TrainerLifecycle
    from weightlane.receiver import NameEntry, WorkerDescription
    from weightlane.registry import Registry, Selected
    from weightlane.types import MemoryTag, MissingPolicy, TransportName, VerifyLevel

MODE_PHASES: dict[Mode, Phase] = {
    Mode.FULL: Phase.FULL,
    Mode.MERGED: Phase.MERGED,
    Mode.ADAPTER: Phase.ADAPTER,
}
EXPORT_CAPABILITIES: dict[Mode, Capability] = {
    Mode.FULL: Capability.EXPORT_FULL,
    Mode.MERGED: Capability.EXPORT_MERGED,
    Mode.ADAPTER: Capability.EXPORT_ADAPTER,
}
_RECEIVE: dict[Mode, Capability] = {
    Mode.FULL: Capability.RECEIVE_FULL,
    Mode.MERGED: Capability.RECEIVE_MERGED,
    Mode.ADAPTER: Capability.RECEIVE_ADAPTER,
}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user asked for, as far as planning needs it."""

    lane: str
    mode: Mode
    verify: VerifyLevel
    bucket_bytes: int
    transport: TransportName | None
    trainer_backend: str
    targets: tuple[RolloutTarget, ...]
    pins: tuple[str | None, ...]
    open_seconds: float
    folder: str = ""
    missing_replicas: MissingPolicy = "fail"
    release: tuple[MemoryTag, ...] = ()
    trainer_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenReplica:
    """A replica that answered: its endpoint, what was selected for it and what its workers say."""

    number: int
    endpoint: EngineEndpoint
    selected: Selected
    facts: EngineFacts
    workers: tuple[WorkerDescription, ...]


def open_replicas(registry: Registry, request: PlanRequest) -> tuple[OpenReplica, ...]:
    """Gathers facts, selects a backend and opens an endpoint for every target.

    Raises:
        SelectionError, EngineError: the first replica that has no backend or does not answer; endpoints
            opened before are closed.
    """
    opened: list[OpenReplica] = []
    try:
        opened.extend(open_replica(registry, request, number) for number in range(len(request.targets)))
    except BaseException:
        for replica in opened:
            replica.endpoint.close()
        raise
    return tuple(opened)


def open_replica(registry: Registry, request: PlanRequest, number: int) -> OpenReplica:
    """One replica, at connect and when it comes back: facts, selection, endpoint, its workers' own words."""
    target = request.targets[number]
    facts = registry.collect_facts(target.engine, target)
    selected = select(registry, "rollout", target.engine, facts, pin=request.pins[number])
    endpoint = registry.call_open_endpoint(
        selected, EndpointContext(selected.descriptor, target, request.open_seconds)
    )
    try:
        return OpenReplica(number, endpoint, selected, facts, endpoint.describe_workers(selected.reference))
    except BaseException:
        endpoint.close()
        raise


def make_plan(
    registry: Registry, request: PlanRequest, parts: Sequence[RankManifest], replicas: Sequence[OpenReplica]
) -> LanePlan:
    """The plan, or a PlanError with every problem found; nothing is sent here."""
    manifest, found = merge_rank_manifests(parts)
    if manifest is None:
        raise PlanError(found, lane=request.lane)
    problems: list[Problem] = []
    if not replicas:
        problems.append(Problem("replica", "rollout", "no replica was given to the controller"))
    mapped: list[tuple[NameEntry, ...]] = []
    for replica in replicas:
        entries, replica_problems = _map_replica(registry, request, manifest, replica)
        mapped.append(entries)
        problems.extend(replica_problems)
    if problems:
        raise PlanError(_once(problems), lane=request.lane)
    entries = mapped[0]
    problems.extend(disagreements(mapped, replicas))
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    tensors = wire_tensors(entries, shapes)
    buckets = lay_out_buckets(tensors, bucket_bytes=request.bucket_bytes)
    problems.extend(folder_problems(request.transport, request.folder, entries, tensors))
    plans: list[ReplicaPlan] = []
    for replica in replicas:
        transport = choose_transport(
            replica.selected.descriptor,
            replica.workers,
            parts,
            wanted=request.transport,
            folder=request.folder,
        )
        if isinstance(transport, Problem):
            problems.append(transport)
            continue
        expression, refusals = express_adapter(registry, manifest, replica)
        problems += refusals
        context = BuildRequestsContext(
            descriptor=replica.selected.descriptor,
            facts=replica.facts,
            phase=manifest.phase,
            transport=transport,
            tensors=tensors,
            buckets=buckets,
            workers=replica.workers,
            verify=request.verify,
            release=request.release,
        )
        program = with_lifecycle(
            registry.call_build_requests(replica.selected, context),
            registry.call_plan_lifecycle(replica.selected, context),
        )
        problems += frame_problems(program, buckets, tensors)
        problems += memory_problems(program, request.release, manifest.phase, replica)
        first = sum(len(plan.peers) for plan in plans)
        plans.append(_replica_plan(replica, transport, program, expression, len(parts), first))
    problems += naming_problems(plans)
    if problems:
        raise PlanError(_once(problems), lane=request.lane)
    return LanePlan(
        lane=request.lane,
        mode=request.mode,
        phase=manifest.phase,
        world_size=manifest.world_size,
        trainer_backend=request.trainer_backend,
        manifest=manifest,
        verify=request.verify,
        entries=entries,
        tensors=tensors,
        buckets=buckets,
        replicas=tuple(plans),
        folder=request.folder,
        missing_replicas=request.missing_replicas,
        release=request.release,
        trainer_lifecycle=_trainer_lifecycle(registry, request, manifest),
    )


def _trainer_lifecycle(registry: Registry, request: PlanRequest, manifest: Manifest) -> TrainerLifecycle:
    selected = registry.backend_named(request.trainer_backend)
    if selected is None:
        raise AssertionError("rank 0 has described its export with this very backend")
    context = TrainerLifecycleContext(selected.descriptor, manifest, request.trainer_options)
    return registry.call_plan_trainer_lifecycle(selected, context)


def _map_replica(
    registry: Registry, request: PlanRequest, manifest: Manifest, replica: OpenReplica
) -> tuple[tuple[NameEntry, ...], list[Problem]]:
    where = f"{replica.facts.engine} at {replica.endpoint.address}"
    descriptor = replica.selected.descriptor
    needed = _RECEIVE[request.mode]
    if needed not in descriptor.capabilities:
        return (), [
            Problem(
                "capability",
                descriptor.name,
                f"backend {descriptor.name} of {replica.selected.distribution} cannot receive mode "
                f"{request.mode.value}",
                f"It can: {', '.join(sorted(item.value for item in descriptor.capabilities))}.",
            )
        ]
    problems: list[Problem] = []
    per_worker = [
        tuple(
            registry.call_map_names(
                replica.selected, MapNamesContext(descriptor, replica.facts, manifest, worker)
            )
        )
        for worker in replica.workers
    ]
    entries = per_worker[0]
    names = [spec.name for spec in manifest.tensors]
    if [entry.canonical for entry in entries] != names:
        return (), [
            Problem(
                "map-names",
                descriptor.name,
                f"its map has {len(entries)} entries for {len(names)} exported tensors, or another order",
                f"Report this to {replica.selected.distribution}.",
            )
        ]
    for worker, other in zip(replica.workers[1:], per_worker[1:], strict=True):
        for mine, theirs in zip(entries, other, strict=True):
            if (mine.wire, mine.dtype, mine.dropped) != (theirs.wire, theirs.dtype, theirs.dropped):
                problems.append(
                    Problem(
                        "map-names",
                        mine.canonical,
                        f"worker {worker.worker} wants it otherwise than worker 0",
                    )
                )
    sent = wire_tensors(entries, {spec.name: spec.shape for spec in manifest.tensors})
    problems += duplicate_names(sent)
    expected_tensors = replica.workers[0].expected
    if manifest.adapter is None:
        problems += check_against_expected(sent, expected_tensors, receiver=where)
    else:
        problems += check_adapter_tensors(sent, manifest.adapter, expected_tensors, receiver=where)
    problems += dtype_problems(manifest, entries)
    problems += tie_problems(manifest, entries, replica.workers[0].expected, where)
    expected = {item.name for item in replica.workers[0].expected}
    for entry in entries:
        if not entry.dropped and not entry.targets and entry.rule == "unknown" and entry.wire in expected:
            live = [tensor.name for tensor in replica.workers[0].live]
            problems.append(
                Problem(
                    "no-target",
                    entry.canonical,
                    f"the checkpoint of {where} has it, but no live tensor takes it",
                    near=near_names(entry.canonical, live),
                )
            )
    return entries, problems


def _replica_plan(
    replica: OpenReplica,
    transport: TransportName,
    program: Program,
    expression: AdapterExpression | None,
    world_size: int,
    first: int,
) -> ReplicaPlan:
    selected = replica.selected
    return ReplicaPlan(
        replica=replica.number,
        engine=replica.facts.engine,
        engine_version=replica.facts.version,
        address=replica.endpoint.address,
        backend=selected.reference,
        era=selected.descriptor.era,
        distribution=f"{selected.distribution} {selected.version}",
        evidence=selected.evidence,
        notes=selected.notes,
        coverage="untraced",
        transport=transport,
        incarnations={worker.worker: worker.incarnation for worker in replica.workers},
        peers=form_peers(transport, replica.workers, world_size, first=first),
        program=program,
        adapter=expression,
        stamps_version=Capability.WEIGHT_VERSION in selected.descriptor.capabilities,
    )


def _once(problems: Sequence[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))
