"""The whole contract between weightlane and its plugins.

A plugin is a module (or object) named by an entry point of group `weightlane`. It registers descriptors and
implements the hooks of the roles it serves. Hooks are called per plan, phase or sync, never per tensor.
Selection comes first (`weightlane.selection`): of all registered backends one is chosen, and only its plugin
is called, with its descriptor in the context. Hook order therefore never decides anything.

What a replica is asked at connect it is asked again when it was started anew at its address, before the next
sync (`weightlane.rejoin`): facts, endpoint, and everything that planning calls, for all replicas, since the
plan as it stands must come out again.

A plugin in full::

    import weightlane.hookspecs as wl

    @wl.hookimpl
    def weightlane_register_backends():
        return [BackendDescriptor(name="acme", role="rollout", engine="acme", ...)]

    @wl.hookimpl
    def weightlane_open_endpoint(context):
        from acme_weightlane.endpoint import AcmeEndpoint   # heavy imports stay inside hooks
        return AcmeEndpoint(context.target)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

if TYPE_CHECKING:
    from weightlane.adapters import AdapterExpression
    from weightlane.contexts import (
        AgentContext,
        BuildRequestsContext,
        EndpointContext,
        ExportContext,
        ExpressAdapterContext,
        FactsContext,
        LaunchContext,
        LaunchPlan,
        MapNamesContext,
        PeftConfigContext,
        StreamContext,
        TraceModelContext,
        TrainerLifecycleContext,
    )
    from weightlane.endpoint import EngineEndpoint
    from weightlane.engine_agent import WorkerEngine
    from weightlane.events import SyncEvent
    from weightlane.facts import EngineFacts
    from weightlane.manifest import RankManifest
    from weightlane.peft import AdapterConfig
    from weightlane.program import Lifecycle, Program, TrainerLifecycle
    from weightlane.receiver import NameEntry
    from weightlane.stream import ExportStream
    from weightlane.trace.table import PlacementTable, Untraced
    from weightlane.types import BackendDescriptor

PROJECT = "weightlane"

_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_hookspec = pluggy.HookspecMarker(PROJECT)
_hookimpl = pluggy.HookimplMarker(PROJECT)


def hookimpl(function: _Hook) -> _Hook:
    """Marks an implementation of one of the hooks below."""
    marked: _Hook = _hookimpl(function)
    return marked


# -- any process ------------------------------------------------------------------------------------------


@_hookspec
def weightlane_register_backends() -> Iterable[BackendDescriptor]:
    """Descriptors of the backends this plugin implements, one per era.

    Collecting. Must not import torch or an engine: discovery is to stay under 50 ms for 20 plugins.
    """
    raise NotImplementedError


@_hookspec
def weightlane_sync_event(event: SyncEvent) -> None:
    """Observe the course of a lane (metrics, progress). Collecting; may run in any thread of the rank."""


# -- controller -------------------------------------------------------------------------------------------


@_hookspec
def weightlane_collect_facts(context: FactsContext) -> EngineFacts | None:
    """Facts of one engine from the best source at hand, or None when this plugin cannot reach it.

    Collecting over the plugins that register the engine; the best source wins, worker before server before
    installed package. Must not import the engine: read metadata, source text, or ask a live server. Called
    again for a replica that was started anew.
    """


@_hookspec
def weightlane_plan_launch(context: LaunchContext) -> LaunchPlan:
    """How the engine must be started for this mode so that a lane can reach it. Starts nothing.

    The demo and tests start the engine from the same source, so that what is printed is what was tried.

    Raises:
        PlanError: the engine cannot be started so; every problem is in it.
    """
    raise NotImplementedError


@_hookspec
def weightlane_open_endpoint(context: EndpointContext) -> EngineEndpoint:
    """A handle on one live replica. Bounded by `context.timeout_seconds`.

    Called at connect, and again for a replica that was started anew, unless it is an engine object of this
    process: that keeps its handle.
    """
    raise NotImplementedError


@_hookspec
def weightlane_map_names(context: MapNamesContext) -> Sequence[NameEntry]:
    """Where each exported tensor goes in this worker, in manifest order. Pure; never invents a target.

    Called while planning: at connect, and again when a replica was started anew.
    """
    raise NotImplementedError


@_hookspec
def weightlane_trace_model(context: TraceModelContext) -> tuple[PlacementTable, ...] | Untraced:
    """Where a checkpoint would land in an engine that does not run: its model built without data, and traced.

    Called in an environment that holds the engine, for planning ahead and for contract snapshots. One table
    per worker of the layout asked for. Must leave the process's own engine state as it was. Optional: a
    backend without it is traced only where it runs.
    """
    raise NotImplementedError


@_hookspec
def weightlane_express_adapter(context: ExpressAdapterContext) -> AdapterExpression:
    """How this engine takes the agreed adapter: its own wire form, its swap policy, what to know about it.

    Mode adapter only. Pure. Called while planning, at connect and again when a replica was started anew, and
    each time more than once: first for the adapter as it was trained, then, where an engine of the lane needs
    the normal form (`form`), for that, so that `wire` describes what is sent. The answer's `carries` lists
    the features that the engine takes; core refuses any other, by name and with the mode that could carry it.
    Raises PlanError for what only the engine itself can tell.
    """
    raise NotImplementedError


@_hookspec
def weightlane_build_requests(context: BuildRequestsContext) -> Program:
    """The steps of one sync for this era: made at connect, filled and replayed at each sync. Pure.

    Called again when a replica was started anew; a program other than that of connect is refused.
    """
    raise NotImplementedError


@_hookspec
def weightlane_plan_lifecycle(
    context: BuildRequestsContext | TrainerLifecycleContext,
) -> Lifecycle | TrainerLifecycle:
    """What to load, pause, release, resume, flush and offload around the move. Pure.

    Called for both backends. A rollout backend gets a `BuildRequestsContext`, once per replica, and gives a
    `Lifecycle`; a trainer backend gets a `TrainerLifecycleContext`, once, and gives a `TrainerLifecycle`. One
    that loads and offloads nothing says so with an empty one. `weightlane.schedule` merges them. Called while
    planning: at connect, and again when a replica was started anew. A rollout backend that cannot do what
    `context.release` asks of this very engine raises `PlanError`.
    """
    raise NotImplementedError


# -- trainer rank -----------------------------------------------------------------------------------------


@_hookspec
def weightlane_describe_export(context: ExportContext) -> RankManifest:
    """This rank's part of the manifest, in the order in which it will yield. No collective, no copy."""
    raise NotImplementedError


@_hookspec
def weightlane_normalize_peft_config(context: PeftConfigContext) -> AdapterConfig:
    """This rank's adapter in the frozen form. No collective, no copy.

    Mode adapter only, at connect, on ranks that were given a model, after `weightlane_describe_export`, which
    leaves the manifest's `adapter` open. The plugin knows where its trainer keeps a configuration;
    `weightlane.peft.adapter_config_of` reads peft's and those of Megatron trainers. Features are kept in it,
    for the engine to carry or not. Raises PlanError that lists whatever cannot be read.
    """
    raise NotImplementedError


@_hookspec
def weightlane_export_params(context: StreamContext) -> ExportStream:
    """A stream of planned buckets. Every rank iterates it to the end, also one that sends nothing."""
    raise NotImplementedError


# -- engine worker ----------------------------------------------------------------------------------------


@_hookspec
def weightlane_worker_agent(context: AgentContext) -> WorkerEngine:
    """The engine-specific part of the agent, made inside the engine's worker process."""
    raise NotImplementedError
