"""The `vllm` backend: its hooks, the same for both eras (`eras`). Heavy imports stay inside the hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.hookspecs import hookimpl
from weightlane.types import Phase
from weightlane_vllm.eras import ERAS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
        TraceModelContext,
    )
    from weightlane.endpoint import EngineEndpoint
    from weightlane.engine_agent import WorkerEngine
    from weightlane.facts import EngineFacts
    from weightlane.program import Lifecycle, Program
    from weightlane.receiver import NameEntry
    from weightlane.trace.table import PlacementTable, Untraced
    from weightlane.types import BackendDescriptor

_FACTS_SECONDS = 30.0


@hookimpl
def weightlane_register_backends() -> Iterable[BackendDescriptor]:
    return ERAS


@hookimpl
def weightlane_collect_facts(context: FactsContext) -> EngineFacts | None:
    target = context.target
    if target is None:
        from weightlane_vllm.facts import installed_facts

        return installed_facts(context.distributions, context.search_path)
    if target.handle is not None:
        from contextlib import closing

        from weightlane_vllm.endpoint import LlmEndpoint

        with closing(LlmEndpoint(target.handle, _FACTS_SECONDS)) as endpoint:
            return endpoint.facts()
    if target.address.startswith(("unix:", "tcp:")):
        from weightlane.front.client import FrontEndpoint

        return FrontEndpoint(target.address, _FACTS_SECONDS).facts()
    return None


@hookimpl
def weightlane_plan_launch(context: LaunchContext) -> LaunchPlan:
    from weightlane_vllm.launch import plan_launch

    return plan_launch(context)


@hookimpl
def weightlane_open_endpoint(context: EndpointContext) -> EngineEndpoint:
    from weightlane_vllm.endpoint import open_endpoint

    return open_endpoint(context.target, context.timeout_seconds)


@hookimpl
def weightlane_map_names(context: MapNamesContext) -> Sequence[NameEntry]:
    """What the loader was seen to do; where nobody could trace it, static rules. Adapters have their own."""
    if context.manifest.phase is Phase.ADAPTER:
        from weightlane_vllm.adapter_names import map_adapter

        return map_adapter(context)
    if context.table is None:
        from weightlane_vllm.names import map_names

        return map_names(context.manifest, context.worker)
    from weightlane.trace.entries import entries_from_table

    tied = {item.name: item.tied_to for item in context.worker.expected if item.tied_to}
    dropped = {name: f"the receiver reads {owner} for it" for name, owner in tied.items()}
    return entries_from_table(context.manifest, context.table, dropped)


@hookimpl
def weightlane_express_adapter(context: ExpressAdapterContext) -> AdapterExpression:
    from weightlane_vllm.adapter_expression import express

    return express(context)


@hookimpl
def weightlane_trace_model(context: TraceModelContext) -> tuple[PlacementTable, ...] | Untraced:
    from weightlane_vllm.meta_model import trace_model

    return trace_model(context)


@hookimpl
def weightlane_build_requests(context: BuildRequestsContext) -> Program:
    from weightlane_vllm.requests import build_program

    return build_program(context.transport)


@hookimpl
def weightlane_plan_lifecycle(context: BuildRequestsContext) -> Lifecycle:
    from weightlane_vllm.requests import plan_lifecycle
    from weightlane_vllm.running_policy import with_running_requests
    from weightlane_vllm.sleep_plan import require_no_frozen_requests

    require_no_frozen_requests(context)
    lifecycle = plan_lifecycle(context.facts, context.phase, context.release)
    return with_running_requests(context, lifecycle)


@hookimpl
def weightlane_worker_agent(context: AgentContext) -> WorkerEngine:
    from weightlane_vllm.worker import VllmWorkerEngine

    return VllmWorkerEngine(context.worker)
