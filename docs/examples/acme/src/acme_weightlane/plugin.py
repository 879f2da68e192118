"""The entry point: one descriptor and the hooks of a rollout backend. Heavy imports stay inside hooks."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from weightlane.facts import EngineFacts
from weightlane.hookspecs import hookimpl
from weightlane.probes import ProbeResult, require_attributes
from weightlane.program import AgentMove, Lifecycle, Program
from weightlane.receiver import NameEntry
from weightlane.types import BackendDescriptor, Capability, TransportName

if TYPE_CHECKING:
    from weightlane.contexts import (
        AgentContext,
        BuildRequestsContext,
        EndpointContext,
        FactsContext,
        MapNamesContext,
    )
    from weightlane.endpoint import EngineEndpoint
    from weightlane.engine_agent import WorkerEngine

NAMED_WEIGHTS = "acme:Engine.weights"


def probe_named_weights(facts: EngineFacts) -> ProbeResult:
    """Whether the engine keeps its weights by name."""
    return require_attributes(facts, (NAMED_WEIGHTS,))


@hookimpl
def weightlane_register_backends() -> list[BackendDescriptor]:
    """One backend, for the releases that keep weights by name."""
    return [
        BackendDescriptor(
            name="acme",
            role="rollout",
            engine="acme",
            era="named-weights",
            versions=SpecifierSet(">=2,<3"),
            distributions=("acme-engine",),
            probe=probe_named_weights,
            capabilities=frozenset({Capability.RECEIVE_FULL, Capability.WORKER_AGENT}),
            transports=(TransportName.INLINE,),
            summary="acme in the trainer's process",
        )
    ]


@hookimpl
def weightlane_collect_facts(context: FactsContext) -> EngineFacts | None:
    """From the live engine where there is one, else the version that is installed."""
    if context.target is not None:
        from acme_weightlane.worker import facts_of

        return facts_of(context.target.handle)
    for distribution in context.distributions:
        try:
            return EngineFacts("acme", metadata.version(distribution), "installed")
        except metadata.PackageNotFoundError:
            continue
    return None


@hookimpl
def weightlane_open_endpoint(context: EndpointContext) -> EngineEndpoint:
    """The engine is an object in this process, so its calls need no socket."""
    from acme_weightlane.worker import AcmeFront
    from weightlane.front.desk import FrontDesk
    from weightlane.front.endpoint import LocalEndpoint
    from weightlane.front.gate import ServingGate

    engine = context.target.handle
    # The engine's own: what one lane left half-written, no endpoint of the next may generate from.
    gate = vars(engine).setdefault("_weightlane_gate", ServingGate())
    desk = FrontDesk(AcmeFront(engine), origin="acme in this process", gate=gate)
    return LocalEndpoint(desk, "acme in this process", context.timeout_seconds)


@hookimpl
def weightlane_map_names(context: MapNamesContext) -> list[NameEntry]:
    """acme's names are checkpoint names. One that it lacks keeps its name: the plan then refuses it."""
    live = {tensor.name: tensor.dtype for tensor in context.worker.live}
    return [
        NameEntry(
            canonical=spec.name,
            wire=spec.name,
            dtype=live.get(spec.name, spec.dtype),
            targets=(spec.name,) if spec.name in live else (),
            rule="exact" if spec.name in live else "unknown",
        )
        for spec in context.manifest.tensors
    ]


@hookimpl
def weightlane_build_requests(context: BuildRequestsContext) -> Program:
    """Our agent receives every bucket by value."""
    del context
    return Program(AgentMove("inline"))


@hookimpl
def weightlane_plan_lifecycle(context: BuildRequestsContext) -> Lifecycle:
    """acme has no calls of its own; the front holds generation back while a sync writes."""
    del context
    return Lifecycle(notes=("generation waits from the first bucket until the version is published",))


@hookimpl
def weightlane_worker_agent(context: AgentContext) -> WorkerEngine:
    """Made in the process that holds the weights."""
    from acme_weightlane.worker import AcmeWorker

    return AcmeWorker(context.worker)
