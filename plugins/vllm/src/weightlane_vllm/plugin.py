"""The `vllm` backend: one era so far, and its hooks. Heavy imports stay inside the hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from weightlane.hookspecs import hookimpl
from weightlane.probes import ProbeResult, require_attributes
from weightlane.types import BackendDescriptor, Capability, TransportName
from weightlane_vllm.facts import DISTRIBUTIONS, ENGINE, LORA_LOAD_WEIGHTS, WORKER_EXTENSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightlane.contexts import (
        AgentContext,
        BuildRequestsContext,
        EndpointContext,
        FactsContext,
        LaunchContext,
        LaunchPlan,
        MapNamesContext,
    )
    from weightlane.endpoint import EngineEndpoint
    from weightlane.engine_agent import WorkerEngine
    from weightlane.facts import EngineFacts
    from weightlane.program import Lifecycle, Program
    from weightlane.receiver import NameEntry

BACKEND = "vllm"
_FACTS_SECONDS = 30.0


def probe_lora_load_weights(facts: EngineFacts) -> ProbeResult:
    """`_HAS_LORA_LOAD_WEIGHTS`, and a worker that takes an extension class.

    Where the LoRA wrapper loads its own base layer, plain checkpoint names are right with LoRA on and off;
    the `.base_layer` names of older engines are refused by these and the other way round.
    """
    return require_attributes(facts, (LORA_LOAD_WEIGHTS, WORKER_EXTENSION))


@hookimpl
def weightlane_register_backends() -> Iterable[BackendDescriptor]:
    return [
        BackendDescriptor(
            name=BACKEND,
            role="rollout",
            engine=ENGINE,
            era="lora-load-weights",
            versions=SpecifierSet(">=0.28,<0.33"),
            distributions=DISTRIBUTIONS,
            probe=probe_lora_load_weights,
            capabilities=frozenset(
                {Capability.RECEIVE_FULL, Capability.WORKER_AGENT, Capability.WEIGHT_VERSION}
            ),
            transports=(
                TransportName.INPROCESS,
                TransportName.SHM,
                TransportName.INLINE,
                TransportName.DISK,
            ),
            summary="vLLM through an agent in its workers; plain checkpoint names.",
            install_hint="pip install 'weightlane-vllm[vllm]'",
        )
    ]


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
    from weightlane_vllm.names import map_names

    return map_names(context.manifest, context.worker)


@hookimpl
def weightlane_build_requests(context: BuildRequestsContext) -> Program:
    from weightlane_vllm.requests import build_program

    return build_program(context.transport)


@hookimpl
def weightlane_plan_lifecycle(context: BuildRequestsContext) -> Lifecycle:
    from weightlane_vllm.requests import plan_lifecycle

    return plan_lifecycle(context.facts)


@hookimpl
def weightlane_worker_agent(context: AgentContext) -> WorkerEngine:
    from weightlane_vllm.worker import VllmWorkerEngine

    return VllmWorkerEngine(context.worker)
