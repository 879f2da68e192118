"""What this rank exports in one phase: recipes, and the live tensors that they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightlane.errors import ExportError
from weightlane.export.recipe import Source
from weightlane.export.recipes import recipes
from weightlane.packing import dtype_name
from weightlane.torch_trainer.modules import named_tensors
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from weightlane.contexts import ExportContext
    from weightlane.export.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Exported:
    """Recipes by checkpoint name in the order of the module tree, and live tensors by key, without a copy."""

    recipes: Mapping[str, Recipe]
    tensors: Mapping[str, Tensor]

    def made(self, name: str) -> Tensor:
        """The tensor now: a live one, or a view of one, where nothing has to be computed."""
        recipe = self.recipes[name]
        return recipe.make([self.tensors[key] for key in recipe.sources])

    def owned(self, name: str) -> Tensor:
        """The tensor now, in memory that no live tensor shares."""
        recipe = self.recipes[name]
        made = self.made(name)
        place = made.untyped_storage().data_ptr()
        live = any(self.tensors[key].untyped_storage().data_ptr() == place for key in recipe.sources)
        return made.clone() if live else made


def exported(context: ExportContext) -> Exported:
    """Looks the live tensors up afresh. No collective, and nothing is computed.

    Raises:
        ExportError: see `named_tensors`, `recipes` and `adapter_name`.
    """
    if context.model is None:
        return Exported({}, {})
    adapter: str | None = None
    if context.phase is Phase.ADAPTER:
        from weightlane.torch_trainer.adapter import adapter_name, require_plain_base

        adapter = adapter_name(context)
        require_plain_base(context.model)
    elif context.phase is Phase.MERGED:
        wanted = context.options.get("adapter")
        adapter = None if wanted is None else str(wanted)
    return of_phase(context.model, context.phase, adapter)


def of_phase(model: Any, phase: Phase, adapter: str | None = None) -> Exported:
    """The recipes of a model in a phase.

    Raises:
        ExportError: see `named_tensors` and `recipes`; or two tensors get one checkpoint name.
    """
    tensors = named_tensors(model)
    sources = {
        key: Source(key, tuple(tensor.shape), dtype_name(tensor.dtype)) for key, tensor in tensors.items()
    }
    found: dict[str, Recipe] = {}
    for recipe in recipes(model, sources, phase, adapter):
        if recipe.name in found:
            raise ExportError(
                f"{found[recipe.name].sources[0]} and {recipe.sources[0]} both become {recipe.name}.",
                "One of them would take the other's place.",
                "Rename one of the two modules.",
            )
        found[recipe.name] = recipe
    return Exported(found, tensors)
