"""Checkpoint names and layouts of a transformers model's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.export.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.export.held import Held


def checkpoint_recipes(model: Any, held: Sequence[Held]) -> tuple[Recipe, ...]:
    """One recipe a tensor, under its own name."""
    del model
    return tuple(
        Recipe(item.name, item.shape, item.dtype, item.sources, item.make, item.tied_to) for item in held
    )
