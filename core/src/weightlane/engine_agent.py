"""What an engine plugin supplies inside the engine's worker; everything else of the agent is core's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from weightlane.errors import Problem
    from weightlane.messages import ReceivePlan, WireTensor
    from weightlane.receiver import WorkerDescription
    from weightlane.trace.table import PlacementTable


class WorkerEngine(Protocol):
    """The engine-specific part of a worker agent.

    Called from one thread at a time. A tensor given to `load_weights` is a view that is valid during the
    call alone: whoever retains it must copy it.
    """

    def describe(self) -> WorkerDescription:
        """This worker now: live tensors looked up afresh, expected checkpoint, incarnation.

        Called at connect and when a replica comes back. `held_version` and `servable` are filled in by
        core's agent.
        """

    def current_incarnation(self) -> str:
        """The incarnation that `describe` tells, alone: asked before each sync, so it must be cheap."""

    def check_plan(self, plan: ReceivePlan) -> Sequence[Problem]:
        """Problems that only the worker can see, found without writing anything."""

    def begin(self, version: int) -> None:
        """A sync starts; the first write follows. An error here means that nothing was written."""

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        """Hands checkpoint tensors to the engine's loader; gives how many of them it was handed."""

    def finish(self, version: int) -> None:
        """The last bucket was loaded: post-processing, derived copies, cache resets."""

    def publish(self, version: int) -> None:
        """Every worker of every replica has verified; `version` is what is served from now on."""


@runtime_checkable
class LetsGoOfMemory(Protocol):
    """A `WorkerEngine` whose engine can sleep has these as well."""

    def released(self) -> Sequence[str]:
        """Memory that the engine has let go and not taken back (`weights`, `kv_cache`); empty if none."""

    def why_not_whole(self) -> str:
        """Why the weights are no whole version, for a reason of the engine's own (sleep); "" if they are.

        What the agent itself has begun to write it knows without this.
        """


@runtime_checkable
class TracesLoads(Protocol):
    """A `WorkerEngine` that can run its own loader on stand-ins, so that a plan knows where tensors land."""

    def trace(self, tensors: Sequence[WireTensor]) -> PlacementTable:
        """The table of one load of `tensors`, which carry canonical names, full shapes and dtypes.

        Where the engine takes more than one style of names, each is tried and the table of the complete one
        is given, or of the one that consumes most where none is complete. Writes nothing.
        """

    def live_tensors(self) -> Mapping[str, Tensor]:
        """The model's tensors by the names of a table's targets, aliases included, looked up at this call."""


@runtime_checkable
class TellsItsBase(Protocol):
    """A `WorkerEngine` that can compare the values that it holds with those an adapter was trained on."""

    def base_problems(self, trained_on: Mapping[str, str]) -> Sequence[Problem]:
        """Where its weights differ from digests by checkpoint name (`weightlane.base_digest`).

        Writes nothing. Asked when a lane is attached, so it may take as long as reading the weights does.
        """


def released_by(engine: WorkerEngine) -> tuple[str, ...]:
    """What an engine has let go; nothing where it cannot sleep."""
    return tuple(engine.released()) if isinstance(engine, LetsGoOfMemory) else ()


def why_not_whole(engine: WorkerEngine) -> str:
    """Why an engine's weights are no whole version; "" also where it cannot lose them."""
    return engine.why_not_whole() if isinstance(engine, LetsGoOfMemory) else ""
