"""LoRA adapters beside the reference engine's model: held in slots, applied by hooks on linear modules.

The formula is written out here instead of being peft's: the engine exists to be compared with, and must not
share the code that it is compared to. The model's own modules and names stay as they are, so that syncs of
full weights and of adapters may meet in one engine.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from weightlane.adapters import AdapterBinding, BoundModule
from weightlane.errors import EngineError, SyncError, near_names
from weightlane.peft import lora_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.adapters import AdapterRef


@dataclass(frozen=True, slots=True)
class _Delta:
    """One module's part of an adapter: `first` (rank, in), `second` (out, rank), in the weight's dtype."""

    first: Tensor
    second: Tensor
    scaling: float

    def added_to(self, output: Tensor, inputs: Tensor) -> Tensor:
        return output + (inputs @ self.first.T @ self.second.T) * self.scaling


@dataclass(frozen=True, slots=True)
class _Slot:
    """One adapter: its deltas by live module name, and the canonical name of each."""

    ref: AdapterRef
    deltas: Mapping[str, _Delta]
    canonical: Mapping[str, str]


class AdapterShelf:
    """The adapters of one model. Not thread-safe: the engine's own lock is around every call.

    Args:
        model: the torch module.
        live_names: the model's own name of each tensor, by checkpoint name.
        slots: how many adapters may be held at once; 0 sets no limit.
    """

    def __init__(self, model: Any, live_names: Mapping[str, str], *, slots: int = 0) -> None:
        self._model = model
        self._limit = slots
        self._live_names = live_names
        self._slots: dict[str, _Slot] = {}
        self._serving: list[str] = []
        self._applied: _Slot | None = None
        self._hooks: dict[str, Any] = {}

    def load(self, load: AdapterLoad) -> AdapterBinding:
        """Holds an adapter in its slot and tells where it is bound, as read back from the hooked modules.

        Raises:
            SyncError: a target is no linear module of this model, or a matrix does not fit it, or every slot
                is taken. Nothing is held then.
        """
        self.remove(load.slot)
        if self._limit and len(self._slots) >= self._limit:
            held = ", ".join(slot.ref.name for slot in self._slots.values())
            raise SyncError(
                f"The reference engine has no slot for adapter {load.ref.name}.",
                f"It has {self._limit} and holds {held}.",
                "Start it with more --adapter-slots, or close the lane of an adapter that is not used.",
            )
        deltas: dict[str, _Delta] = {}
        canonical: dict[str, str] = {}
        for module in load.config.target_modules:
            live = self._live_names.get(f"{module}.weight", "").removesuffix(".weight")
            deltas[live] = _delta(load, module, self._linear(module, live))
            canonical[live] = module
        self._slots[load.slot] = _Slot(load.ref, deltas, canonical)
        for live in deltas:
            if not self._hooked(live):
                hook = partial(self._apply, live)
                self._hooks[live] = self._model.get_submodule(live).register_forward_hook(hook)
        return self._binding(self._slots[load.slot])

    def serve(self, slot: str) -> AdapterRef:
        """Answers requests with this slot from now on; it takes the place of none."""
        if slot not in self._slots:
            raise EngineError(f"Slot {slot} of the reference engine holds no adapter.")
        self._serving = [other for other in self._serving if other != slot] + [slot]
        return self._slots[slot].ref

    def remove(self, slot: str) -> None:
        """Frees a slot and the hooks that no other slot needs; an empty slot is fine."""
        self._slots.pop(slot, None)
        self._serving = [other for other in self._serving if other != slot]
        needed = {live for held in self._slots.values() for live in held.deltas}
        for live in [live for live in self._hooks if live not in needed]:
            self._hooks.pop(live).remove()

    @contextmanager
    def applied(self, name: str) -> Iterator[AdapterRef | None]:
        """Applies the adapter that a request names inside the block; "" is the base, where none is served.

        Raises:
            EngineError: no adapter of this name is served, or none is named while there are some. The base
                never answers in an adapter's place.
        """
        served = {self._slots[slot].ref.name: self._slots[slot] for slot in self._serving}
        if name and name not in served:
            near = near_names(name, served)
            raise EngineError(
                f"The reference engine serves no adapter {name!r}.",
                f"It serves {', '.join(served) or 'the base alone'}.",
                f"Ask the lane for adapter_ref(); near: {', '.join(near)}." if near else "Sync one first.",
            )
        if served and not name:
            raise EngineError(
                "A request to the reference engine names no adapter.",
                f"It serves {', '.join(served)}, and the base is not what was trained.",
                "Name what the lane's adapter_ref() tells.",
            )
        self._applied = served[name] if name else None
        try:
            yield self._applied.ref if self._applied else None
        finally:
            self._applied = None

    def _apply(self, live: str, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        del module
        delta = self._applied.deltas.get(live) if self._applied else None
        return output if delta is None else delta.added_to(output, inputs[0])

    def _binding(self, slot: _Slot) -> AdapterBinding:
        return AdapterBinding(
            slot.ref,
            tuple(
                BoundModule(slot.canonical[live], delta.first.shape[0], delta.scaling)
                for live, delta in slot.deltas.items()
                if self._hooked(live)
            ),
        )

    def _hooked(self, live: str) -> bool:
        """Asked of the module that is there now: one that was replaced since has no hook of ours."""
        hook = self._hooks.get(live)
        return hook is not None and hook.id in self._model.get_submodule(live)._forward_hooks

    def _linear(self, module: str, live: str) -> Any:
        import torch

        found = self._model.get_submodule(live) if live else None
        if isinstance(found, torch.nn.Linear):
            return found
        kind = "not there" if found is None else f"a {type(found).__name__}"
        raise SyncError(
            f"An adapter cannot be bound to {module}: it is {kind}.",
            "The reference engine applies LoRA to torch.nn.Linear modules.",
            "Leave it out of the adapter's target modules.",
        )


def _delta(load: AdapterLoad, module: str, linear: Any) -> _Delta:
    lora = load.config.lora_of(module)
    rank = lora.rank
    first, second = load.tensors.get(lora_name(module, "A")), load.tensors.get(lora_name(module, "B"))
    wanted = ((rank, linear.in_features), (linear.out_features, rank))
    shapes = tuple(tuple(item.shape) if item is not None else None for item in (first, second))
    if first is None or second is None or shapes != wanted:
        raise SyncError(
            f"The matrices of {module} are {shapes[0]} and {shapes[1]}, not {wanted[0]} and {wanted[1]}.",
            f"They are to fit rank {rank} and a module with {linear.in_features} inputs and "
            f"{linear.out_features} outputs.",
        )
    like = linear.weight
    return _Delta(first.to(like.device, like.dtype), second.to(like.device, like.dtype), lora.scaling)
