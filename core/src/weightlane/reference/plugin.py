"""Registers the reference engine. Imports neither torch nor transformers; what one hook needs, it imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from weightlane.hookspecs import hookimpl
from weightlane.probes import always_viable
from weightlane.program import AgentMove, EngineCall, Lifecycle, MemoryCalls, Program
from weightlane.types import BackendDescriptor, Capability, Phase, TransportName

if TYPE_CHECKING:
    from weightlane.adapters import AdapterExpression
    from weightlane.contexts import (
        AgentContext,
        BuildRequestsContext,
        EndpointContext,
        ExpressAdapterContext,
        FactsContext,
        LaunchContext,
        LaunchPlan,
        MapNamesContext,
    )
    from weightlane.endpoint import EngineEndpoint
    from weightlane.engine_agent import WorkerEngine
    from weightlane.facts import EngineFacts
    from weightlane.receiver import NameEntry

ENGINE = "reference"
FACTS_SECONDS = 10.0


@hookimpl
def weightlane_register_backends() -> list[BackendDescriptor]:
    """One backend for every transformers release that the engine runs on."""
    return [
        BackendDescriptor(
            name=ENGINE,
            role="rollout",
            engine=ENGINE,
            era="transformers-4.50",
            versions=SpecifierSet(">=4.50,<6"),
            distributions=("transformers",),
            probe=always_viable,
            capabilities=frozenset(
                {
                    Capability.RECEIVE_FULL,
                    Capability.RECEIVE_MERGED,
                    Capability.RECEIVE_ADAPTER,
                    Capability.RECEIVE_BASE,
                    Capability.WORKER_AGENT,
                    Capability.PAUSE,
                    Capability.WEIGHT_VERSION,
                }
            ),
            transports=(
                TransportName.INPROCESS,
                TransportName.CUDA_IPC,
                TransportName.SHM,
                TransportName.INLINE,
                TransportName.DISK,
            ),
            summary="transformers in its own process; right rather than fast",
            install_hint="pip install 'weightlane[reference]'",
        )
    ]


@hookimpl
def weightlane_collect_facts(context: FactsContext) -> EngineFacts | None:
    """Facts from the live engine, or, without a target, of the installed transformers."""
    if context.engine != ENGINE:
        return None
    if context.target is None:
        from weightlane.facts import EngineFacts
        from weightlane.installations import find_distribution

        found = find_distribution(context.distributions, context.search_path)
        return EngineFacts(engine=ENGINE, version=found.version, source="installed") if found else None
    if context.target.handle is not None:
        return _engine_of(context.target.handle).facts()
    from weightlane.front.client import FrontEndpoint

    endpoint = FrontEndpoint(context.target.address, FACTS_SECONDS)
    try:
        return endpoint.facts()
    finally:
        endpoint.close()


@hookimpl
def weightlane_plan_launch(context: LaunchContext) -> LaunchPlan:
    """The engine's server behind a front."""
    from weightlane.reference.launch import plan_launch

    return plan_launch(context)


@hookimpl
def weightlane_open_endpoint(context: EndpointContext) -> EngineEndpoint:
    """A front endpoint for an address, a local one for a `ReferenceEngine` of this process."""
    target = context.target
    if target.handle is not None:
        from weightlane.reference.endpoint import ReferenceEndpoint

        return ReferenceEndpoint(_engine_of(target.handle), context.timeout_seconds)
    from weightlane.front.client import FrontEndpoint

    return FrontEndpoint(target.address, context.timeout_seconds)


@hookimpl
def weightlane_map_names(context: MapNamesContext) -> list[NameEntry]:
    """Where the worker's loader was seen to put it; else canonical names, which are this engine's own.

    An adapter's matrices go to the module that they name, in the dtype of its weight.
    """
    from weightlane.receiver import NameEntry

    if context.manifest.phase is Phase.ADAPTER:
        return _map_adapter(context)
    if context.table is not None:
        from weightlane.trace.asking import tied_away
        from weightlane.trace.entries import entries_from_table

        tied = tied_away(context.manifest, context.worker.expected)
        return list(entries_from_table(context.manifest, context.table, tied))
    expected = {tensor.name: tensor for tensor in context.worker.expected}
    live = {tensor.name for tensor in context.worker.live}
    entries: list[NameEntry] = []
    for spec in context.manifest.tensors:
        tensor = expected.get(spec.name)
        if tensor is None:
            entries.append(NameEntry(spec.name, spec.name, spec.dtype, rule="unknown"))
            continue
        dtype = tensor.dtype or spec.dtype
        if tensor.tied_to:
            dropped = f"tied to {tensor.tied_to}"
            entries.append(NameEntry(spec.name, spec.name, dtype, rule="tied", dropped=dropped))
            continue
        targets = (spec.name,) if spec.name in live else ()
        entries.append(NameEntry(spec.name, spec.name, dtype, targets=targets, rule="exact"))
    return entries


def _map_adapter(context: MapNamesContext) -> list[NameEntry]:
    from weightlane.peft import parse_lora_name
    from weightlane.receiver import NameEntry

    dtypes = {tensor.name: tensor.dtype for tensor in context.worker.expected}
    entries: list[NameEntry] = []
    for spec in context.manifest.tensors:
        parsed = parse_lora_name(spec.name)
        weight = f"{parsed.module}.weight" if parsed else ""
        targets = (weight,) if weight in dtypes else ()
        rule = "lora" if targets else "unknown"
        entries.append(NameEntry(spec.name, spec.name, dtypes.get(weight) or spec.dtype, targets, rule))
    return entries


@hookimpl
def weightlane_express_adapter(context: ExpressAdapterContext) -> AdapterExpression:
    """See `weightlane.reference.expression`.

    Raises:
        PlanError: the engine was started with fewer slots than the policy needs.
    """
    from weightlane.reference import expression

    return expression.express(context)


@hookimpl
def weightlane_build_requests(context: BuildRequestsContext) -> Program:
    """The agent receives; no request of the engine's own is needed."""
    if context.transport is TransportName.SHM:
        return Program(AgentMove("shm"))
    if context.transport is TransportName.CUDA_IPC:
        return Program(AgentMove("cuda_ipc"))
    if context.transport is TransportName.INLINE:
        return Program(AgentMove("inline"))
    if context.transport is TransportName.DISK:
        return Program(AgentMove("disk"))
    return Program(AgentMove("inprocess"))


@hookimpl
def weightlane_plan_lifecycle(context: BuildRequestsContext) -> Lifecycle:
    """No pause to call: the front's gate follows the agent's own messages. Memory as the lane asks."""
    held = ("generation is held back from the first message of a sync until it is published",)
    return Lifecycle(
        notes=() if context.phase is Phase.ADAPTER else held,
        requests="drain",
        memory=tuple(
            MemoryCalls(tag, EngineCall(f"release_{tag}"), EngineCall(f"resume_{tag}"))
            for tag in context.release
        ),
    )


@hookimpl
def weightlane_worker_agent(context: AgentContext) -> WorkerEngine:
    """The engine is its own worker."""
    return _engine_of(context.worker).worker


def _engine_of(handle: object) -> ReferenceEngine:
    from weightlane.reference.engine import ReferenceEngine

    if not isinstance(handle, ReferenceEngine):
        from weightlane.errors import EngineError

        raise EngineError(
            f"{type(handle).__module__}.{type(handle).__qualname__} is not a reference engine.",
            "The target names engine 'reference' and gives an object as its handle.",
            "Pass a weightlane.reference.engine.ReferenceEngine, or an address.",
        )
    return handle


if TYPE_CHECKING:
    from weightlane.reference.engine import ReferenceEngine
