"""Which adapter is loaded, served and removed when: the one place where that order is kept.

Two slots an adapter. The new one is loaded beside the served one, checked, served, and only then is the old
one removed (R57, R68); a sync that fails on the way removes what it loaded. Under policy `paused` there is
one slot: the old adapter is removed first, and the worker is fenced from then until publication.

Everything is kept by lane. Two living lanes never have adapters of one name on a worker (`attach_check`); a
lane that takes the name of one that is gone also takes what that one left served.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightlane.adapter_check import binding_problems
from weightlane.adapter_engine import AdapterLoad, TakesAdapters
from weightlane.adapters import adapter_ref
from weightlane.errors import VerificationError

if TYPE_CHECKING:
    from collections.abc import Container

    from torch import Tensor

    from weightlane.adapters import AdapterBinding
    from weightlane.messages import ReceivePlan


@dataclass(frozen=True, slots=True)
class _Held:
    """An adapter that an engine holds in a slot."""

    engine: TakesAdapters
    lane: str
    name: str
    number: int

    @property
    def slot(self) -> str:
        return f"{self.name}.{self.number}"


def replaces_in_place(plan: ReceivePlan) -> bool:
    """Whether nothing serves between the removal of the old adapter and the new one's publication."""
    return plan.adapter is not None and plan.adapter.expression.swap == "paused"


class AdapterSwap:
    """What one worker serves, by lane, and what it holds ready."""

    def __init__(self) -> None:
        self._served: dict[str, _Held] = {}
        self._ready: _Held | None = None

    def take_over(self, plan: ReceivePlan, attached: Container[str]) -> None:
        """Gives a lane that is about to be attached what a lane that is gone left served under its name."""
        if plan.adapter is None or plan.lane in self._served:
            return
        for lane, held in tuple(self._served.items()):
            if held.name == plan.adapter.config.name and lane not in attached:
                del self._served[lane]
                self._served[plan.lane] = replace(held, lane=plan.lane)

    def load(
        self, engine: object, received: ReceivePlan, tensors: dict[str, Tensor], version: int
    ) -> AdapterBinding:
        """Loads a whole adapter without serving it, in the engine's one call for that.

        Args:
            engine: of the worker; the plan was checked against it when it was attached.
            received: the plan.
            tensors: all of the adapter's, by wire name, owned.
            version: what is to be published.

        Raises:
            VerificationError: the engine bound other modules than the adapter has, or with another rank or
                scale. `discard` removes what was loaded.
        """
        plan = received.adapter
        if plan is None or not isinstance(engine, TakesAdapters):
            raise AssertionError(
                "a plan without an adapter, or for another engine, cannot have been attached"
            )
        name, swap = plan.config.name, plan.expression.swap
        served = self._served.get(received.lane)
        if swap == "paused" and served is not None:
            del self._served[received.lane]  # first: one that fails to go must not be removed a second time
            served.engine.remove_adapter(served.slot)
        held = _Held(engine, received.lane, name, self._free_number(name))
        ref = adapter_ref(plan.config, swap, version)
        binding = engine.load_adapter(AdapterLoad(held.slot, ref, plan.config, plan.expression.wire, tensors))
        self._ready = held
        problems = binding_problems(plan.config, ref, binding)
        if problems:
            raise VerificationError(
                f"Adapter {ref.name} was not bound as planned: {'; '.join(problems)}.",
                "The engine would answer with the base, or with part of the adapter.",
                "Check the engine's target modules and largest rank; report this with the plan.",
            )
        return binding

    def publish(self) -> None:
        """Serves what `load` made ready, then removes what was served before."""
        ready = self._ready
        if ready is None:
            raise AssertionError("load() comes before publish()")
        ready.engine.serve_adapter(ready.slot)  # an error leaves it ready, for discard to remove
        self._ready = None
        old = self._served.get(ready.lane)
        self._served[ready.lane] = ready
        if old is not None:
            old.engine.remove_adapter(old.slot)

    def discard(self) -> None:
        """Removes what a failed sync had loaded; what is served stays. Nothing to do is fine."""
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.engine.remove_adapter(ready.slot)

    def drop_all(self) -> None:
        """Removes every adapter: the base that they belong to is about to be written."""
        self.discard()
        while self._served:
            _, held = self._served.popitem()
            held.engine.remove_adapter(held.slot)

    def _free_number(self, name: str) -> int:
        """The first that no served adapter of this name has, whichever lane's it is."""
        taken = {held.number for held in self._served.values() if held.name == name}
        return next(number for number in range(len(taken) + 1) if number not in taken)
