"""What a rank exports in a phase: what it holds, the recipes over that, and where both come together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from weightlane.errors import ExportError
from weightlane.export.recipes import recipes
from weightlane.torch_trainer.adapter import adapter_name, require_plain_base
from weightlane.types import Phase
from weightlane_fsdp.holdings import holdings
from weightlane_fsdp.options import Options, read_options
from weightlane_fsdp.torch_api import torch_api
from weightlane_fsdp.tree import unwrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.contexts import ExportContext
    from weightlane.export.recipe import Recipe
    from weightlane_fsdp.held import Held


@dataclass(frozen=True, slots=True)
class Export:
    """Made anew for each sync: a trainer may have put its parameters elsewhere since."""

    held: dict[str, Held]
    recipes: tuple[Recipe, ...]
    options: Options
    device: torch.device

    @property
    def used(self) -> list[Held]:
        """What the recipes read, each once, in the order in which they come to it."""
        return [self.held[key] for key in dict.fromkeys(key for item in self.recipes for key in item.sources)]


def read_export(context: ExportContext) -> Export:
    """This rank's export, without a collective and without a copy.

    Raises:
        ExportError: an option that is unknown, or something in the model that cannot be exported.
    """
    options = read_options(context.options)
    held = holdings(context.model, options.precision, torch_api(context.descriptor))
    model: Any = unwrapped(context.model)
    sources = {key: item.source for key, item in held.items()}
    adapter = options.adapter
    if context.phase in (Phase.ADAPTER, Phase.BASE):
        adapter = adapter_name(replace(context, model=model))
        require_plain_base(model)
    made = recipes(model, sources, context.phase, adapter)
    _require_own_names(made)
    return Export(
        held=held,
        recipes=made,
        options=options,
        device=_device(held),
    )


def _require_own_names(made: Sequence[Recipe]) -> None:
    owners: dict[str, Recipe] = {}
    for item in made:
        other = owners.setdefault(item.name, item)
        if other is not item:
            raise ExportError(
                f"{other.sources[0]} and {item.sources[0]} both become {item.name}.",
                "One of them would take the other's place.",
                "Rename one of the two modules.",
            )


def _device(held: dict[str, Held]) -> torch.device:
    """Where ranks gather: the GPU, if the trainer computes with anything there."""
    devices = dict.fromkeys(item.device for item in held.values())
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
