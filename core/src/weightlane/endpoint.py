"""The handle that a controller holds on one replica of a live engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.adapters import AdapterRef
    from weightlane.agent import WorkerAgent
    from weightlane.facts import EngineFacts
    from weightlane.messages import Generation, WireTensor
    from weightlane.program import EngineCall, RequestMove
    from weightlane.receiver import WorkerDescription
    from weightlane.residency import WorkerResidency
    from weightlane.trace.table import LiveHashes, PlacementTable, Untraced


@runtime_checkable
class EngineEndpoint(Protocol):
    """One replica: facts, workers, calls, generation.

    Every method has a bound and raises `EngineError` with the engine's own words, or `EngineDeadError`
    when the engine or the connection is gone. Methods may be called from different threads; a
    long-running `call_workers` must not keep `close` from ending it.
    """

    @property
    def address(self) -> str:
        """Where the engine is, for messages."""

    def facts(self) -> EngineFacts:
        """Facts from the best source that this endpoint reaches."""

    def describe_workers(self, backend: str) -> tuple[WorkerDescription, ...]:
        """Every worker of the replica.

        Where no agent can run, one description made from what the engine tells of itself, with
        `workers` = 1 and the checkpoint that its configuration asks for in `expected`.
        """

    def residency(self, backend: str, lane: str, timeout_seconds: float) -> tuple[WorkerResidency, ...]:
        """What every worker holds now; asked before each sync, so it must be cheap.

        `plan_digest` is left empty where no agent runs.
        """

    def call_workers(self, message: bytes, timeout_seconds: float) -> Sequence[bytes]:
        """Carries one encoded `AgentRequest` to every worker; replies come in worker order."""

    def call(self, call: EngineCall, *, version: int | None = None) -> str:
        """Runs one call of the engine's own and gives the answer as text.

        `version` fills `call.version_field`.
        """

    def send_bucket(
        self, move: RequestMove, tensors: Sequence[tuple[str, Tensor]], *, last: bool, version: int
    ) -> None:
        """Sends one bucket in the engine's own request (`native-requests` backends only)."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        adapter: AdapterRef | None = None,
    ) -> tuple[Generation, ...]:
        """Continuations of exactly `max_tokens` tokens with their log-probs; greedy at temperature 0.

        `adapter` is what `Lane.adapter_ref` gives; None leaves it to the engine.

        Log-probs are the model's own, of its logits as they are: the temperature is not applied to them. An
        engine that cannot give those at a temperature refuses that temperature.

        Raises:
            EngineError: a continuation has another length, the engine cannot give these log-probs, or does
                not serve this adapter.
        """

    def close(self) -> None:
        """Lets go of the handle, not of the engine. Idempotent."""


@runtime_checkable
class LocalEndpoint(Protocol):
    """An endpoint whose only worker lives in this process, so that tensors can go by reference."""

    def local_agent(self) -> WorkerAgent:
        """The worker's agent."""


@runtime_checkable
class TracingEndpoint(Protocol):
    """An endpoint without agents whose engine can still be made to trace a load, by a way of its own."""

    def trace_workers(
        self, tensors: Sequence[WireTensor], timeout_seconds: float
    ) -> tuple[PlacementTable, ...] | Untraced:
        """One table per worker of one load of `tensors` (canonical names, full shapes), or why there is none.

        Raises:
            EngineError: the engine was asked and failed.
        """


@runtime_checkable
class ReadingBackEndpoint(Protocol):
    """A `TracingEndpoint` that can also tell what its engine holds where the tables say, as hashes."""

    def read_back(self, tables: Sequence[PlacementTable], timeout_seconds: float) -> tuple[LiveHashes, ...]:
        """Each worker's hashes of its live elements (see `weightlane.trace.live_hashes`), in table order.

        Called after the last bucket and the calls that settle it, before the version is published; generation
        is paused. `tables` are those that `trace_workers` gave when the plan was made.

        Raises:
            EngineError: the engine was asked and failed, or does not know of these tables any more.
        """
