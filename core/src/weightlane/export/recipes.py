"""Recipes of everything that a torch model exports in one phase, from facts alone: no tensor is read.

FULL is the state under the checkpoint's names; MERGED the same with adapters added; BASE the same without
adapters; ADAPTER the adapter's matrices under peft's own names. Names are those that `save_pretrained` writes
(`weightlane.export.conversion`); what a receiver calls them is the receiver's affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.errors import ExportError
from weightlane.export.conversion import checkpoint_recipes
from weightlane.export.held import Held, as_it_is, plain
from weightlane.export.merging import base_tensors, merged_tensors
from weightlane.export.paths import walk
from weightlane.export.places import base_model_of, is_copy_holder, is_layer, place_of
from weightlane.export.recipe import Recipe
from weightlane.peft import WRAPPER_PREFIX
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightlane.export.recipe import Source


def recipes(
    model: Any, sources: Mapping[str, Source], phase: Phase, adapter: str | None = None
) -> tuple[Recipe, ...]:
    """What is exported, in the order of `sources`, and how each tensor is made.

    Args:
        model: a torch module, wrapped or not, walked for its structure and peft's facts; its own tensors may
            be shards. Anything else (a mapping of tensors) has no structure, and its keys are names.
        sources: every tensor of the model as a whole, by cleaned key (`weightlane.export.paths`).
        phase: what is exported.
        adapter: the adapter of phases MERGED and ADAPTER; None for those that are active (MERGED), and
            required for ADAPTER.

    Raises:
        ExportError: the phase does not serve this model, or something cannot be exported; names it, and the
            way out.
    """
    if not hasattr(model, "named_modules"):
        _require_full(phase)
        return tuple(
            Recipe(key, item.shape, item.dtype, (item.key,), as_it_is) for key, item in sources.items()
        )
    if phase is Phase.ADAPTER:
        return _adapter_recipes(model, sources, adapter)
    if phase is Phase.MERGED:
        held = merged_tensors(model, sources, adapter)
    elif phase is Phase.BASE:
        held = base_tensors(model, sources)
    else:
        held = _full_tensors(model, sources)
    return checkpoint_recipes(base_model_of(model), held)


def _full_tensors(model: Any, sources: Mapping[str, Source]) -> list[Held]:
    for path, module in walk(model):
        if is_layer(module) or is_copy_holder(module):
            raise ExportError(
                f"{path} is a layer of peft's, so the model's state is no checkpoint.",
                "Mode full sends weights as they are, under names that an engine knows.",
                "Use mode merged for weights with the adapter added, or mode adapter for the adapter alone.",
            )
    owners: dict[int, str] = {}
    found: list[Held] = []
    for key, source in sources.items():
        place = place_of(model, key)
        owner = key if place.held is None else owners.setdefault(id(place.held), key)
        found.append(plain(place.name, source, "" if owner == key else owner))
    return found


def _adapter_recipes(model: Any, sources: Mapping[str, Source], adapter: str | None) -> tuple[Recipe, ...]:
    """Names keep peft's `base_layer` where one layer is around another: peft reads them so."""
    found: list[Recipe] = []
    for key, source in sources.items():
        place = place_of(model, key)
        if place.part == "adapter" and place.adapter == adapter and place.holder is not None:
            path = place.holder.path.removeprefix(WRAPPER_PREFIX)
            name = f"{WRAPPER_PREFIX}{path}.{place.leaf}"
            found.append(Recipe(name, source.shape, source.dtype, (key,), as_it_is))
    return tuple(found)


def _require_full(phase: Phase) -> None:
    if phase is not Phase.FULL:
        raise ExportError(
            f"Phase {phase.value} was asked of a trainer model that is no torch module.",
            "Without modules it cannot be told which tensors belong to an adapter.",
            "Pass the module, or use mode full.",
        )
