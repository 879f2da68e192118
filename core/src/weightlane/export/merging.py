"""Tensors of a peft-wrapped model as the model without peft holds them: merged with adapters, or the base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.errors import ExportError, near_names
from weightlane.export.deltas import ExpertLowRank, wide_dtype
from weightlane.export.held import Held, plain
from weightlane.export.lora_layers import (
    changes_of,
    require_mergeable,
    require_no_fake_quantisation,
    require_plain_base,
    require_unmerged,
)
from weightlane.export.paths import walk
from weightlane.export.places import active_adapters, adapter_configs, is_copy_holder, is_layer, place_of
from weightlane.export.rounding import note_merge
from weightlane.manifest import FLOATING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from torch import Tensor

    from weightlane.export.lora_layers import Change
    from weightlane.export.places import Place
    from weightlane.export.recipe import Source


@dataclass(frozen=True, slots=True)
class Merge:
    """Base and changes to one tensor; sources are the base and then each change's, in order."""

    changes: tuple[Change, ...]

    def __call__(self, sources: Sequence[Tensor]) -> Tensor:
        """The merged tensor in the base's dtype, rounded once, in memory of its own."""
        import torch

        base = sources[0].detach()
        with torch.no_grad(), torch.autocast(base.device.type, enabled=False):
            wide = base.to(wide_dtype(base.dtype))
            merged = wide
            at = 1
            for change in self.changes:
                taken = sources[at : at + change.step.matrices]
                merged = change.step.added(merged, wide, taken)
                at += change.step.matrices
            return _rounded(wide, merged, base)

    def one(self, sources: Sequence[Tensor], index: int) -> Tensor:
        """One index of the first dimension, where the changes are such that others are not needed."""
        import torch

        steps = [change.step for change in self.changes if isinstance(change.step, ExpertLowRank)]
        if len(steps) < len(self.changes):
            return self(sources)[index]
        base = sources[0].detach()[index]
        with torch.no_grad(), torch.autocast(base.device.type, enabled=False):
            wide = base.to(wide_dtype(base.dtype))
            merged = wide
            for number, step in enumerate(steps):
                merged = step.added_to_one(merged, index, sources[1 + 2 * number : 3 + 2 * number])
            return _rounded(wide, merged, base)


def merged_tensors(model: Any, sources: Mapping[str, Source], adapter: str | None) -> list[Held]:
    """Every tensor of the model with its adapters merged, in the order of `sources`.

    Args:
        model: the module, walked for facts only.
        sources: its tensors by cleaned key.
        adapter: the adapter to merge; None for those that are active in each layer.

    Raises:
        ExportError: what cannot be merged, by name, with the way out.
    """
    _require_adapter(model, adapter)
    layers: list[str] = []
    for path, module in walk(model):
        require_no_fake_quantisation(path, module)
        if is_layer(module) or is_copy_holder(module):
            layers.append(path)
    if not layers:
        raise ExportError(
            f"A trainer model of type {type(model).__name__} has no adapter to merge.",
            "Mode merged adds LoRA matrices to the weights of a module that peft has wrapped.",
            "Use mode full.",
        )
    places = {key: place_of(model, key) for key in sources}
    checked: set[str] = set()
    changes = {
        key: _changes(key, place, adapter, sources, checked)
        for key, place in places.items()
        if _counts_in_merge(place, adapter)
    }
    return _tensors(sources, places, changes)


def base_tensors(model: Any, sources: Mapping[str, Source]) -> list[Held]:
    """Every tensor of the base, as if no adapter were there.

    Raises:
        ExportError: an adapter is merged into it, or it is quantised.
    """
    places = {key: place_of(model, key) for key in sources}
    for layer in {layer.path: layer for place in places.values() for layer in place.layers}.values():
        require_unmerged(layer)
        require_plain_base(layer)
    nothing = {key: () for key, place in places.items() if place.part in ("base", "original")}
    return _tensors(sources, places, nothing)


def _tensors(
    sources: Mapping[str, Source], places: Mapping[str, Place], exported: Mapping[str, tuple[Change, ...]]
) -> list[Held]:
    """The tensors that are exported, each with what is added to it."""
    found: dict[str, Held] = {}
    owners: dict[object, str] = {}
    for key, changes in exported.items():
        place = places[key]
        source = sources[key]
        owner = place.name
        if place.held is not None:
            # Tied weights stay tied where the same is added to both.
            added = [(change.step, _identities(change, places)) for change in changes]
            owner = owners.setdefault((id(place.held), tuple(added)), place.name)
        tied_to = "" if owner == place.name else owner
        if changes:
            keys = (key, *(item for change in changes for item in change.keys))
            step = Merge(changes)
            held = Held(place.name, source.shape, source.dtype, keys, step, step.one, tied_to)
        else:
            held = plain(place.name, source, tied_to)
        if place.name in found:
            raise ExportError(
                f"{found[place.name].sources[0]} and {key} are both {place.name} without peft's names.",
                "One of them would take the other's place.",
                "Rename one of the two modules.",
            )
        found[place.name] = held
    return list(found.values())


def _identities(change: Change, places: Mapping[str, Place]) -> tuple[object, ...]:
    found = [places[key].held for key in change.keys]
    return tuple(key if one is None else id(one) for key, one in zip(change.keys, found, strict=True))


def _counts_in_merge(place: Place, adapter: str | None) -> bool:
    if place.part in ("original", "copy") and place.holder is not None:
        holder = place.holder.module
        if getattr(holder, "disable_adapters", False):
            raise ExportError(
                f"The trained copy of {place.holder.path} is switched off now.",
                "The trainer computes with the original, and what the engine is to serve cannot be told.",
                "Sync outside disable_adapter().",
            )
        chosen = adapter if adapter is not None else next(iter(active_adapters(holder)), "")
        trained = chosen in holder._modules["modules_to_save"]._modules
        return place.adapter == chosen if place.part == "copy" else not trained
    return place.part == "base"


def _changes(
    key: str, place: Place, adapter: str | None, sources: Mapping[str, Source], checked: set[str]
) -> tuple[Change, ...]:
    changes: list[Change] = []
    for layer in reversed(place.layers):
        adapters = (adapter,) if adapter is not None else active_adapters(layer.module)
        if layer.path not in checked:
            require_mergeable(layer, adapters)
            checked.add(layer.path)
        leaf = key.removeprefix(f"{layer.path}.")
        while leaf.startswith("base_layer."):
            leaf = leaf.removeprefix("base_layer.")
        changes += changes_of(layer, leaf, adapters, sources[key], sources)
    if changes and sources[key].dtype not in FLOATING:
        raise ExportError(
            f"{key} is {sources[key].dtype}, and an adapter is to be added to it.",
            f"A merged weight is one of {', '.join(sorted(FLOATING))}.",
            "Load the base in bfloat16 or float32, or use mode adapter.",
        )
    return tuple(changes)


def _require_adapter(model: Any, adapter: str | None) -> None:
    known = adapter_configs(model)
    if adapter is not None and known and adapter not in known:
        near = near_names(adapter, known)
        raise ExportError(
            f"The model has no adapter {adapter!r}.",
            f"It has {', '.join(known)}.",
            f"Use {near[0]!r}." if near else "Name one of these.",
        )


def _rounded(wide: Tensor, merged: Tensor, base: Tensor) -> Tensor:
    sent = merged.to(base.dtype)
    note_merge(wide, merged, sent)
    return sent.clone() if merged is wide else sent
