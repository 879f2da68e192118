"""The adapters that one vLLM worker holds for lanes: loaded from memory, proven, served, removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightlane.adapter_check import binding_problems
from weightlane.errors import EngineError, SyncError
from weightlane_vllm.adapter_supply import AdapterSupply
from weightlane_vllm.lora_binding import binding_of
from weightlane_vllm.lora_layers import LoraLayers
from weightlane_vllm.lora_model import lora_model
from weightlane_vllm.lora_request import lora_number, numbered_request
from weightlane_vllm.served_adapters import Removals, ServedAdapters

if TYPE_CHECKING:
    from collections.abc import Collection

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.adapters import AdapterBinding, AdapterRef

_ATTRIBUTE = "_weightlane_adapter_shelf"


@dataclass(frozen=True, slots=True)
class _Held:
    """One adapter with its tensors as they came: vLLM may have to be given it again."""

    load: AdapterLoad
    number: int


class AdapterShelf:
    """Called from the worker's own thread, one call at a time.

    Args:
        worker: vLLM's own worker object, with LoRA on.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._supply: AdapterSupply | None = None
        self._held: dict[str, _Held] = {}
        self._serving: list[str] = []
        self._kept: list[str] = []
        self.removals: Removals = "at-once"

    def load(self, load: AdapterLoad) -> AdapterBinding:
        """Holds an adapter in its slot, in one `add_lora`, and reads back what is bound.

        Raises:
            SyncError: every slot is taken, or another adapter has the same number. As after any error of
                vLLM's own, the slot is empty then and what was held beside it is untouched.
        """
        self._require_released(load.slot)
        self.remove(load.slot)
        held = _Held(load, self._number_beside_others(load))
        self._require_room(held)
        self._held[load.slot] = held
        try:
            return self._add(held)
        except BaseException:
            self.remove(load.slot)
            raise

    def serve(self, slot: str) -> None:
        """Requests may name this slot's adapter from now on.

        One of the very same name makes room first (a trainer that began anew publishes a version again):
        requests tell the number, so that it changes hands.
        """
        held = self._held.get(slot)
        if held is None:
            raise EngineError(f"Slot {slot} of this vLLM worker holds no adapter.")
        number = lora_number(held.load.ref.name)
        if held.number != number:
            for other in [name for name, item in self._held.items() if item.number == number]:
                self._free(other)
            self._free(slot)
            self._held[slot] = _Held(held.load, number)
            self._add_as_before(self._held[slot])
        self._serving = [other for other in self._serving if other != slot] + [slot]

    def remove(self, slot: str) -> None:
        """Frees a slot, half-written or whole; an empty one is fine.

        One whose next version is served already is kept instead where requests may run with it still.
        """
        if slot in self._serving:
            self._serving.remove(slot)
            name = self._held[slot].load.config.name
            if self.removals == "when-released" and self._of(name, self._serving):
                self._kept.append(slot)
                return
            for kept in self._of(name, self._kept):
                self._free(kept)
        self._free(slot)

    def release(self, names: Collection[str]) -> None:
        """Frees the slots of what was kept under these names: no request runs with it any more."""
        for slot in tuple(self._kept):
            if self._held[slot].load.ref.name in names:
                self._free(slot)

    def told(self) -> ServedAdapters:
        """What is served, loaded beside it, and kept; raises as `serving`."""
        serving = self.serving()
        beside = [slot for slot in self._held if slot not in (*self._serving, *self._kept)]
        return ServedAdapters(
            serving,
            tuple(self._held[slot].load.ref for slot in beside),
            tuple(self._held[slot].load.ref for slot in self._kept),
        )

    def serving(self) -> tuple[AdapterRef, ...]:
        """What requests may name, every one of it loaded: those that the engine has dropped are loaded again.

        Raises:
            EngineError: one of them can no longer be bound as it was.
        """
        loaded = self._worker.list_loras() if self._serving else ()
        for held in map(self._held.__getitem__, self._serving):
            if held.number not in loaded:
                self._add_as_before(held)
        return tuple(self._held[slot].load.ref for slot in self._serving)

    def _free(self, slot: str) -> None:
        self._serving = [other for other in self._serving if other != slot]
        self._kept = [other for other in self._kept if other != slot]
        held = self._held.pop(slot, None)
        if held is not None:
            self._from_memory().withdraw(held.number)
            self._worker.remove_lora(held.number)

    def _of(self, name: str, slots: list[str]) -> list[str]:
        return [slot for slot in slots if self._held[slot].load.config.name == name]

    def _require_released(self, slot: str) -> None:
        if slot in self._kept:
            raise SyncError(
                f"vLLM still needs adapter {self._held[slot].load.ref.name} in slot {slot}.",
                "Its next version was published, and requests that name it have not ended.",
                "Await them before the sync after the next, or connect with requests='abort'.",
            )

    def _add_as_before(self, held: _Held) -> None:
        problems = binding_problems(held.load.config, held.load.ref, self._add(held))
        if problems:
            raise EngineError(
                f"Adapter {held.load.ref.name} could not be loaded into vLLM again as it was: "
                f"{'; '.join(problems)}.",
                "Requests that name it would be answered with something else.",
                "Sync the adapter again.",
            )

    def _add(self, held: _Held) -> AdapterBinding:
        """One `add_lora`, whatever lingers under this number removed first: vLLM would keep that instead."""
        layers = LoraLayers(self._worker)
        self._from_memory().offer(held.number, lambda: lora_model(held.load, held.number, layers))
        if held.number in self._worker.list_loras():
            self._worker.remove_lora(held.number)
        if not self._worker.add_lora(numbered_request(held.load.ref, held.number)):
            raise EngineError(f"vLLM did not add adapter {held.load.ref.name} and gave no reason.")
        return binding_of(layers, held.load, held.number)

    def _number_beside_others(self, load: AdapterLoad) -> int:
        """The number that requests will tell, or a spare one while the adapter's own last version has it."""
        number, name = lora_number(load.ref.name), load.config.name
        last = any(item.number == number and item.load.config.name == name for item in self._held.values())
        return lora_number(f"{load.ref.name} in {load.slot}") if last else number

    def _require_room(self, held: _Held) -> None:
        name = held.load.ref.name
        same = [other for other in self._held.values() if other.number == held.number]
        if same:
            raise SyncError(
                f"Adapter {name} has the number {held.number} of {same[0].load.ref.name}, which is held.",
                "vLLM tells adapters apart by their numbers, which follow from their names.",
                "Give the adapter another name, or publish under another version.",
            )
        slots = int(self._worker.vllm_config.lora_config.max_loras)
        if len(self._held) >= slots:
            raise SyncError(
                f"vLLM has no slot for adapter {name}.",
                f"It was started with --max-loras {slots} and holds "
                f"{', '.join(other.load.ref.name for other in self._held.values())}.",
                "Start it with more, or close the lane of an adapter that is not used.",
            )

    def _from_memory(self) -> AdapterSupply:
        if self._supply is None:
            self._supply = AdapterSupply(LoraLayers(self._worker).manager)
            self._supply.apply()
        return self._supply


def shelf_of(worker: Any) -> AdapterShelf:
    """The one shelf of a worker; it lives on the worker itself, as the agent does."""
    shelf: AdapterShelf | None = vars(worker).get(_ATTRIBUTE)
    if shelf is None:
        shelf = AdapterShelf(worker)
        setattr(worker, _ATTRIBUTE, shelf)
    return shelf
