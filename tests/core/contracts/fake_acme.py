"""A plugin for an engine `acme` whose loader is the fake model's: installed or not, live or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from weightlane.facts import EngineFacts
from weightlane.hookspecs import hookimpl
from weightlane.probes import always_viable
from weightlane.program import AgentMove, Lifecycle, Program
from weightlane.receiver import ExpectedTensor, NameEntry, WorkerDescription
from weightlane.trace.entries import entries_from_table
from weightlane.types import BackendDescriptor, Capability, TransportName

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.trace.table import PlacementTable, Untraced

    Trace = Callable[[Any], "tuple[PlacementTable, ...] | Untraced"]


@dataclass(eq=False)
class FakeEndpoint:
    """Answers as a server of acme would, and remembers what was asked of it."""

    address: str
    known: EngineFacts
    expected: tuple[ExpectedTensor, ...]
    trace: Trace
    calls: list[str] = field(default_factory=list)

    def facts(self) -> EngineFacts:
        return self.known

    def describe_workers(self, backend: str) -> tuple[WorkerDescription, ...]:
        self.calls.append("describe")
        return (WorkerDescription(0, 1, "far", 1, "one", expected=self.expected, facts=self.known),)

    def trace_workers(self, tensors: Any, timeout_seconds: float) -> Any:
        self.calls.append("trace")
        return self.trace(tensors)

    def close(self) -> None:
        self.calls.append("close")

    def __getattr__(self, name: str) -> Any:
        # runtime_checkable protocols ask for every method; none of the others may be called by a look.
        if name in {"residency", "call_workers", "call", "send_bucket", "generate"}:
            return lambda *_, **__: self.calls.append(name)
        raise AttributeError(name)


@dataclass(eq=False)
class FakeAcme:
    """The plugin. `installed` is its version here, "" for none; `live` what answers at an address."""

    trace: Trace
    installed: str = ""
    live: FakeEndpoint | None = None
    contracts: str = ""

    @hookimpl
    def weightlane_register_backends(self) -> list[BackendDescriptor]:
        return [
            BackendDescriptor(
                name="acme",
                role="rollout",
                engine="acme",
                era="any",
                versions=SpecifierSet(">=1"),
                distributions=("acme",),
                probe=always_viable,
                capabilities=frozenset({Capability.RECEIVE_FULL}),
                transports=(TransportName.INLINE,),
                contracts=self.contracts,
            )
        ]

    @hookimpl
    def weightlane_collect_facts(self, context: Any) -> EngineFacts | None:
        if context.target is not None:
            return self.live.known if self.live else None
        return EngineFacts("acme", self.installed, "installed") if self.installed else None

    @hookimpl
    def weightlane_open_endpoint(self, context: Any) -> Any:
        return self.live

    @hookimpl
    def weightlane_trace_model(self, context: Any) -> Any:
        return self.trace(context.tensors)

    @hookimpl
    def weightlane_map_names(self, context: Any) -> Any:
        if context.table is not None:
            dropped = {t.name: f"tied to {t.tied_to}" for t in context.worker.expected if t.tied_to}
            return entries_from_table(context.manifest, context.table, dropped)
        return [NameEntry(spec.name, spec.name, spec.dtype, rule="same") for spec in context.manifest.tensors]

    @hookimpl
    def weightlane_build_requests(self, context: Any) -> Program:
        return Program(AgentMove("inline"))

    @hookimpl
    def weightlane_plan_lifecycle(self, context: Any) -> Lifecycle:
        return Lifecycle()
