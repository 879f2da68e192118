"""An adapter for a replica that takes requests only: gathered here, sent whole, read back, swapped.

Where an agent runs, it gathers and swaps inside the worker. Here the controller does both, by the same
`AdapterSwap`, and the endpoint makes the engine's own requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from weightlane.adapter_collector import AdapterCollector
from weightlane.adapter_swap import AdapterSwap
from weightlane.errors import EngineError
from weightlane.program import AdapterMove

if TYPE_CHECKING:
    from torch import Tensor

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.adapters import AdapterBinding, AdapterRef
    from weightlane.endpoint import EngineEndpoint
    from weightlane.plan import LanePlan


@runtime_checkable
class AdapterEndpoint(Protocol):
    """An endpoint without agents whose engine takes adapters in requests of its own.

    Its `remove_adapter` ends new requests for the name at once, and may leave those that run to end.
    """

    def load_adapter(self, move: AdapterMove, load: AdapterLoad, *, held: bool) -> AdapterBinding:
        """Loads an adapter under `load.ref.name` and tells what was bound, read back where anybody can.

        `held`: the lane holds generation back at the engine. An error means that nothing is left of it there.

        Raises:
            EngineError: the engine refused it, or holds another one of that name for this lane.
        """

    def serve_adapter(self, ref: AdapterRef) -> None:
        """From now on requests may name it."""

    def remove_adapter(self, ref: AdapterRef) -> None:
        """Takes it out of the engine."""


class RequestedAdapter:
    """The adapters of one replica through a lane's life; shared by its sink and its session.

    Args:
        plan: the lane's.
        number: which of its replicas this is.
        endpoint: of the replica.
        move: of its program.
    """

    def __init__(self, plan: LanePlan, number: int, endpoint: AdapterEndpoint, move: AdapterMove) -> None:
        self._received = plan.receive_plan(number, ())
        self._engine = _Slots(endpoint, move)
        self._collector = AdapterCollector()
        self._swap = AdapterSwap()

    @property
    def serves_as_before(self) -> bool:
        """Whether the engine holds whatever it served when this sync began; False before a first one."""
        return self._engine.serves_as_before

    def begin(self) -> None:
        """A sync begins: what an earlier one had gathered is dropped."""
        self._collector = AdapterCollector()

    def gathered(self, name: str, tensor: Tensor) -> None:
        """Keeps a copy of one tensor, by wire name, in the dtype that travels."""
        self._collector.add([(name, tensor)])

    def load(self, version: int, *, held: bool) -> AdapterBinding:
        """Sends what was gathered. What a sync before this one had loaded and not published goes first.

        Raises:
            SyncError: a tensor never came.
            EngineError, VerificationError: as `AdapterEndpoint.load_adapter` and `AdapterSwap.load`.
        """
        tensors = self._collector.whole([wire.name for wire in self._received.tensors])
        self._swap.discard()
        self._engine.held = held
        return self._swap.load(self._engine, self._received, tensors, version)

    def publish(self) -> None:
        """Requests may name what was loaded, and no longer what was served before."""
        self._swap.publish()
        self._engine.serves_as_before = True

    def discard(self) -> None:
        """Removes what a failed sync had loaded; what is served stays. Nothing to do is fine."""
        self._swap.discard()


class _Slots:
    """The endpoint as `AdapterSwap` takes it: by slots, which an engine behind requests has no names for."""

    def __init__(self, endpoint: AdapterEndpoint, move: AdapterMove) -> None:
        self._endpoint = endpoint
        self._move = move
        self._loaded: dict[str, AdapterRef] = {}
        self._served = ""
        self.held = False
        self.serves_as_before = False

    def load_adapter(self, load: AdapterLoad) -> AdapterBinding:
        binding = self._endpoint.load_adapter(self._move, load, held=self.held)
        self._loaded[load.slot] = load.ref
        return binding

    def serve_adapter(self, slot: str) -> None:
        self._endpoint.serve_adapter(self._loaded[slot])
        self._served = slot

    def remove_adapter(self, slot: str) -> None:
        if slot == self._served:
            self._served, self.serves_as_before = "", False
        ref = self._loaded.pop(slot, None)
        if ref is not None:  # one that failed to load left nothing
            self._endpoint.remove_adapter(ref)


def adapter_by_request(plan: LanePlan, number: int, endpoint: EngineEndpoint) -> RequestedAdapter | None:
    """For a replica whose program carries adapters in requests; None for any other.

    Raises:
        EngineError: the program does, and the endpoint cannot make them.
    """
    move = plan.replicas[number].program.move
    if not isinstance(move, AdapterMove):
        return None
    if not isinstance(endpoint, AdapterEndpoint):
        raise EngineError(
            f"The program for {endpoint.address} carries an adapter in requests.",
            f"Its endpoint ({type(endpoint).__name__}) has no load_adapter and what belongs to it.",
            "Report this to the plugin's authors.",
        )
    return RequestedAdapter(plan, number, endpoint, move)
