"""The `sglang` backend: its eras and their hooks. Heavy imports stay inside the hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from weightlane.hookspecs import hookimpl
from weightlane.types import BackendDescriptor, Capability, Phase, TransportName
from weightlane_sglang.contract import DISTRIBUTIONS, ENGINE
from weightlane_sglang.probes import (
    probe_untimed_flush,
    probe_updates_in_session,
    probe_updates_without_session,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from weightlane.adapters import AdapterExpression
    from weightlane.contexts import (
        BuildRequestsContext,
        EndpointContext,
        ExpressAdapterContext,
        FactsContext,
        LaunchContext,
        LaunchPlan,
        MapNamesContext,
    )
    from weightlane.endpoint import EngineEndpoint
    from weightlane.facts import EngineFacts
    from weightlane.probes import ProbeResult
    from weightlane.program import Lifecycle, Program
    from weightlane.receiver import NameEntry

BACKEND = "sglang"
UNTIMED_FLUSH = "untimed-flush"
WITHOUT_SESSION = "updates-without-session"
IN_SESSION = "updates-in-session"
_FACTS_SECONDS = 30.0


@hookimpl
def weightlane_register_backends() -> Iterable[BackendDescriptor]:
    return [
        _descriptor(WITHOUT_SESSION, ">=0.5.10,<0.5.21", probe_updates_without_session, adapters=_ADAPTERS),
        _descriptor(IN_SESSION, ">=0.5.21,<0.5.24", probe_updates_in_session, adapters=_ADAPTERS),
        _descriptor(UNTIMED_FLUSH, ">=0.5.0,<0.5.10", probe_untimed_flush),
    ]


_ADAPTERS = frozenset({Capability.RECEIVE_BASE, Capability.RECEIVE_ADAPTER})
"""Not before 0.5.10: loads from memory came with 0.5.8, which does not run with LoRA on all modules."""


def _descriptor(
    era: str,
    versions: str,
    probe: Callable[[EngineFacts], ProbeResult],
    adapters: frozenset[Capability] = frozenset(),
) -> BackendDescriptor:
    return BackendDescriptor(
        name=BACKEND,
        role="rollout",
        engine=ENGINE,
        era=era,
        versions=SpecifierSet(versions),
        distributions=DISTRIBUTIONS,
        probe=probe,
        capabilities=frozenset(
            {
                Capability.RECEIVE_FULL,
                Capability.RECEIVE_MERGED,
                Capability.NATIVE_REQUESTS,
                Capability.PAUSE,
                Capability.WEIGHT_VERSION,
            }
        )
        | adapters,
        transports=(TransportName.INLINE, TransportName.COLLECTIVE),
        summary="A running SGLang server, or an Engine here, by its own requests; plain checkpoint names.",
        install_hint="pip install 'sglang==0.5.18'",
        contracts="weightlane_sglang",
    )


@hookimpl
def weightlane_collect_facts(context: FactsContext) -> EngineFacts | None:
    if context.engine != ENGINE:
        return None
    target = context.target
    if target is None:
        from weightlane_sglang.installed import installed_facts

        return installed_facts(context.distributions, context.search_path)
    if target.handle is None and not target.address.startswith(("http://", "https://")):
        return None
    from contextlib import closing

    from weightlane_sglang.channel import open_channel
    from weightlane_sglang.server_facts import read_facts

    with closing(open_channel(target)) as channel:
        return read_facts(channel, timeout_seconds=_FACTS_SECONDS)


@hookimpl
def weightlane_plan_launch(context: LaunchContext) -> LaunchPlan:
    from weightlane_sglang.launch import plan_launch

    return plan_launch(context)


@hookimpl
def weightlane_open_endpoint(context: EndpointContext) -> EngineEndpoint:
    from weightlane_sglang.endpoint import open_endpoint

    return open_endpoint(context)


@hookimpl
def weightlane_map_names(context: MapNamesContext) -> Sequence[NameEntry]:
    if context.manifest.phase is Phase.ADAPTER:
        from weightlane.adapter_entries import entries_of_adapter

        return entries_of_adapter(context)
    if context.table is not None:
        from weightlane.trace.entries import entries_from_table

        tied = {item.name: item.tied_to for item in context.worker.expected if item.tied_to}
        dropped = {name: f"the server reads {other} for it" for name, other in tied.items()}
        return entries_from_table(context.manifest, context.table, dropped)
    from weightlane_sglang.names import map_names

    return map_names(context.manifest, context.worker)


@hookimpl
def weightlane_express_adapter(context: ExpressAdapterContext) -> AdapterExpression:
    from weightlane_sglang.adapter_expression import express

    return express(context)


@hookimpl
def weightlane_build_requests(context: BuildRequestsContext) -> Program:
    if context.phase is Phase.ADAPTER:
        from weightlane_sglang.adapter_program import build_adapter_program

        return build_adapter_program(context)
    if context.descriptor.era == IN_SESSION:
        from weightlane_sglang.session_program import build_program_in_session

        return build_program_in_session(context)
    from weightlane_sglang.requests import build_program

    return build_program(context)


@hookimpl
def weightlane_plan_lifecycle(context: BuildRequestsContext) -> Lifecycle:
    if context.phase is Phase.ADAPTER:
        from weightlane_sglang.adapter_program import plan_adapter_lifecycle

        return plan_adapter_lifecycle(context)
    if context.descriptor.era == IN_SESSION:
        from weightlane_sglang.session_program import plan_lifecycle_in_session

        return plan_lifecycle_in_session(context)
    if context.descriptor.era == UNTIMED_FLUSH:
        from weightlane_sglang.untimed_flush import plan_lifecycle_with_untimed_flush

        return plan_lifecycle_with_untimed_flush(context)
    from weightlane_sglang.lifecycle import plan_lifecycle

    return plan_lifecycle(context)
