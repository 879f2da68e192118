"""Planning for replicas of packing engines: real agents and planning, a plugin that maps names as told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packing_engine import SHAPES

from weightlane.agent import WorkerAgent
from weightlane.contexts import RolloutTarget
from weightlane.facts import EngineFacts
from weightlane.hook_calls import Selected
from weightlane.manifest import RankManifest, TensorSpec
from weightlane.planning import OpenReplica, PlanRequest, make_plan
from weightlane.probes import always_viable
from weightlane.program import AgentMove, Lifecycle, Program, TrainerLifecycle
from weightlane.receiver import NameEntry
from weightlane.trace.entries import entries_from_table
from weightlane.types import BackendDescriptor, Capability, Mode, Phase, TransportName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.contexts import MapNamesContext
    from weightlane.plan import LanePlan

DESCRIPTOR = BackendDescriptor(
    name="fake",
    role="rollout",
    engine="fake",
    era="now",
    versions=SpecifierSet(),
    distributions=("fake",),
    probe=always_viable,
    capabilities=frozenset({Capability.RECEIVE_FULL, Capability.WORKER_AGENT}),
    transports=(TransportName.INLINE,),
)
SELECTED = Selected(DESCRIPTOR, "fake", "fake-weightlane", "1")


class FakeEndpoint:
    """The workers' agents; `dead` fails the test if anybody asks."""

    address = "here"
    dead = False

    def __init__(self, engines: Sequence[Any]) -> None:
        self.engines = list(engines)
        self.agents = [self._agent(number) for number in range(len(engines))]

    def _agent(self, number: int) -> WorkerAgent:
        return WorkerAgent(lambda backend: self.engines[number], origin=f"worker {number}")

    def start_anew(self, engines: Sequence[Any]) -> None:
        self.engines = list(engines)
        self.agents = [self._agent(number) for number in range(len(engines))]

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        assert not self.dead
        return [agent.handle(message) for agent in self.agents]

    def describe_workers(self, backend: str) -> Any:
        return tuple(engine.describe() for engine in self.engines)

    def close(self) -> None: ...


class FakeRegistry:
    """What planning calls of a registry."""

    def __init__(self, wires: dict[str, str] | None = None) -> None:
        self.wires = wires or {}
        self.drops: dict[str, str] = {}
        self.tables: list[Any] = []

    def call_map_names(self, selected: Selected, context: MapNamesContext) -> list[NameEntry]:
        self.tables.append(context.table)
        if context.table is not None and not self.wires:
            return list(entries_from_table(context.manifest, context.table, self.drops))
        return [
            NameEntry(spec.name, self.wires.get(spec.name, spec.name), spec.dtype, ("somewhere",))
            for spec in context.manifest.tensors
        ]

    def call_build_requests(self, selected: Selected, context: object) -> Program:
        return Program(AgentMove("inline"))

    def call_plan_lifecycle(self, selected: Selected, context: object) -> Lifecycle:
        return Lifecycle()

    def backend_named(self, reference: str) -> Selected:
        return SELECTED

    def call_plan_trainer_lifecycle(self, selected: Selected, context: object) -> TrainerLifecycle:
        return TrainerLifecycle()


def opened(engines: Sequence[Any], number: int = 0) -> OpenReplica:
    endpoint: Any = FakeEndpoint(engines)
    workers = tuple(engine.describe() for engine in engines)
    return OpenReplica(number, endpoint, SELECTED, EngineFacts("fake", "1", "worker"), workers)


def request_for(replicas: int = 1, **fields: Any) -> PlanRequest:
    return PlanRequest(
        **{
            "lane": "lane-1",
            "mode": Mode.FULL,
            "verify": "digest",
            "bucket_bytes": 64,
            "transport": None,
            "trainer_backend": "torch",
            "targets": tuple(RolloutTarget("fake", handle=object()) for _ in range(replicas)),
            "pins": (None,) * replicas,
            "open_seconds": 5.0,
        }
        | fields
    )


def exported(names: Sequence[str] = tuple(SHAPES), **other: tuple[tuple[int, ...], str]) -> RankManifest:
    """One rank's manifest of these tensors; `other` are by name with dots as `__`."""
    specs = [TensorSpec(name, SHAPES[name], "float32") for name in names]
    specs += [TensorSpec(name.replace("__", "."), shape, dtype) for name, (shape, dtype) in other.items()]
    return RankManifest(0, 1, Phase.FULL, tuple(specs))


def plan_for(
    engines: Sequence[Any], part: RankManifest | None = None, registry: Any = None, **fields: Any
) -> LanePlan:
    return make_plan(
        registry or FakeRegistry(), request_for(**fields), [part or exported()], [opened(engines)]
    )


def untraced(engine: Any) -> Any:
    """The same engine, as one whose plugin cannot trace it."""

    class Quiet:
        def __getattr__(self, name: str) -> Any:
            if name in ("trace", "live_tensors"):
                raise AttributeError(name)
            return getattr(engine, name)

    return Quiet()
