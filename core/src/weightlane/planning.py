"""Planning on the controller: from manifests and live descriptions to one agreed plan, or every problem."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from weightlane.adapter_planning import base_of_adapter, in_one_form, naming_problems
from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.buckets import lay_out_buckets
from weightlane.contexts import (
    BuildRequestsContext,
    EndpointContext,
    TrainerLifecycleContext,
)
from weightlane.errors import PlanError, Problem
from weightlane.manifest import Manifest, RankManifest, merge_rank_manifests
from weightlane.peers import choose_transport, form_peers
from weightlane.plan import LanePlan, ReplicaPlan, wire_tensors
from weightlane.plan_problems import (
    disagreements,
    folder_problems,
    frame_problems,
    lost_base_problems,
    memory_problems,
    read_back_problems,
    request_problems,
)
from weightlane.program import AgentMove, with_lifecycle
from weightlane.replica_mapping import map_replica
from weightlane.selection import select
from weightlane.types import Capability, Mode, Phase, TransportName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.adapters import AdapterExpression, SwapPolicy, TrainedBase
    from weightlane.contexts import RolloutTarget
    from weightlane.endpoint import EngineEndpoint
    from weightlane.facts import EngineFacts
    from weightlane.program import Program, TrainerLifecycle
    from weightlane.receiver import WorkerDescription
    from weightlane.registry import Registry, Selected
    from weightlane.replica_mapping import MappedReplica
    from weightlane.trace.table import PlacementTable
    from weightlane.types import (
        MemoryTag,
        MissingPolicy,
        ReadBackPolicy,
        RequestPolicy,
        VerifyLevel,
    )

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


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user asked for, as far as planning needs it; `trained_on` where phase BASE is planned."""

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
    read_back: ReadBackPolicy = "first"
    swap: SwapPolicy = "two_slot"
    requests: RequestPolicy | None = None
    drain_seconds: float = DEFAULT_BOUNDS.drain
    trained_on: TrainedBase | None = None


@dataclass(frozen=True, slots=True)
class OpenReplica:
    """A replica that answered: its endpoint, what was selected for it and what its workers say.

    `mapped` is where its loaders put the export, once they were asked; it is asked of a replica once, so that
    a plan can be made again while another replica does not answer.
    """

    number: int
    endpoint: EngineEndpoint
    selected: Selected
    facts: EngineFacts
    workers: tuple[WorkerDescription, ...]
    mapped: MappedReplica | None = None

    @property
    def tables(self) -> tuple[PlacementTable, ...]:
        """What a sync through requests is read back with; nothing before it was asked."""
        return self.mapped.tables if self.mapped else ()


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


def map_replicas(
    registry: Registry, request: PlanRequest, parts: Sequence[RankManifest], replicas: Sequence[OpenReplica]
) -> tuple[OpenReplica, ...]:
    """The replicas, each asked where its loaders put the export unless it was asked before.

    Manifests that do not agree are left for `make_plan` to refuse.

    Raises:
        WeightlaneError: an engine that was asked for its tables and failed.
    """
    manifest, _ = merge_rank_manifests(parts)
    if manifest is None:
        return tuple(replicas)
    manifest = in_one_form(registry, manifest, replicas, request.swap).manifest
    return tuple(
        replica
        if replica.mapped is not None
        else replace(replica, mapped=map_replica(registry, request, manifest, replica))
        for replica in replicas
    )


def make_plan(
    registry: Registry, request: PlanRequest, parts: Sequence[RankManifest], replicas: Sequence[OpenReplica]
) -> LanePlan:
    """The plan, or a PlanError with every problem found; nothing is sent here.

    Replicas that were not asked yet where their loaders put the export are asked now.
    """
    manifest, found = merge_rank_manifests(parts)
    if manifest is None:
        raise PlanError(found, lane=request.lane)
    problems: list[Problem] = []
    if not replicas:
        problems.append(Problem("replica", "rollout", "no replica was given to the controller"))
    form = in_one_form(registry, manifest, replicas, request.swap)
    manifest = form.manifest
    problems.extend(form.problems)
    mapped = [item.mapped or map_replica(registry, request, manifest, item) for item in replicas]
    for item in mapped:
        problems.extend(item.problems)
    if problems:
        raise PlanError(_once(problems), lane=request.lane)
    entries = mapped[0].entries
    problems.extend(disagreements([item.entries for item in mapped], replicas))
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    tensors = wire_tensors(entries, shapes)
    buckets = lay_out_buckets(tensors, bucket_bytes=request.bucket_bytes)
    problems.extend(folder_problems(request.transport, request.folder, entries, tensors))
    trained_on = request.trained_on or base_of_adapter(registry, request, manifest, replicas)
    problems.extend(lost_base_problems(request.release, trained_on))
    plans: list[ReplicaPlan] = []
    for replica, item in zip(replicas, mapped, strict=True):
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
        expression = form.expressions.get(replica.number)
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
            swap=expression.swap if expression else None,
            requests=request.requests,
            drain_seconds=request.drain_seconds,
        )
        try:
            program = with_lifecycle(
                registry.call_build_requests(replica.selected, context),
                registry.call_plan_lifecycle(replica.selected, context),
            )
        except PlanError as refusal:
            problems += refusal.problems
            continue
        problems += frame_problems(program, buckets, tensors)
        problems += memory_problems(program, request.release, replica)
        problems += request_problems(program, request.requests, replica)
        problems += read_back_problems(program, request.read_back, item.reason, replica)
        first = sum(len(plan.peers) for plan in plans)
        plans.append(_replica_plan(replica, item, transport, program, expression, parts, first))
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
        read_back=request.read_back,
        trained_on=trained_on,
    )


def _trainer_lifecycle(registry: Registry, request: PlanRequest, manifest: Manifest) -> TrainerLifecycle:
    selected = registry.backend_named(request.trainer_backend)
    if selected is None:
        raise AssertionError("rank 0 has described its export with this very backend")
    context = TrainerLifecycleContext(selected.descriptor, manifest, request.trainer_options)
    return registry.call_plan_trainer_lifecycle(selected, context)


def _replica_plan(
    replica: OpenReplica,
    mapped: MappedReplica,
    transport: TransportName,
    program: Program,
    expression: AdapterExpression | None,
    ranks: Sequence[RankManifest],
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
        coverage=mapped.coverage,
        transport=transport,
        incarnations={worker.worker: worker.incarnation for worker in replica.workers},
        peers=form_peers(transport, replica.workers, ranks, first=first),
        gpus=tuple(worker.gpu_uuid for worker in replica.workers)
        if transport is TransportName.CUDA_IPC
        else (),
        program=program,
        adapter=expression,
        stamps_version=Capability.WEIGHT_VERSION in selected.descriptor.capabilities,
        coverage_reason=mapped.reason,
        trace=mapped.figures,
        reads_back=bool(mapped.tables) and not isinstance(program.move, AgentMove),
    )


def _once(problems: Sequence[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))
