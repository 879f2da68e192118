"""Checkpoint names and layouts of a transformers model's tensors, as `save_pretrained` would write them.

transformers 5 keeps some models in another form than their checkpoints: experts fused into one tensor, names
of composite models moved. The rule is asked of transformers itself: its own reversal of a load is run once on
tensors without data, and what it does to them is recorded (`weightlane.export.recorded_ops`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from weightlane.checkpoint_renames import renamed_once, reversed_renames
from weightlane.errors import ExportError
from weightlane.export.paths import is_a, own_class
from weightlane.export.recipe import Recipe
from weightlane.export.structure import structure_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.export.held import Held
    from weightlane.export.recipe import Make
    from weightlane.export.recorded_ops import Chain, View


@dataclass(frozen=True, slots=True)
class Converted:
    """One checkpoint tensor: the first of the model's tensors that it is made of, and how; None: it is it."""

    name: str
    first: int
    made: View | Chain | None
    shape: tuple[int, ...]
    dtype: str


_KNOWN: weakref.WeakKeyDictionary[Any, tuple[object, tuple[Converted, ...]]] = weakref.WeakKeyDictionary()


def checkpoint_recipes(model: Any, held: Sequence[Held]) -> tuple[Recipe, ...]:
    """Recipes of the checkpoint's tensors, in the order of the model's.

    Args:
        model: the model without peft's own wrappers; of another library than transformers, its names are
            taken for the checkpoint's.
        held: its tensors under its own names.

    Raises:
        ExportError: transformers' conversion fails, loses a tensor, or does what cannot be recorded.
    """
    converted = _converted(model, held)
    names = {
        held[item.first].name: item.name for item in converted if item.made is None
    }  # tied tensors stay tied under their new names
    return tuple(_recipe(item, held, names) for item in converted)


def _recipe(item: Converted, held: Sequence[Held], names: dict[str, str]) -> Recipe:
    first = held[item.first]
    if item.made is None:
        alias = names.get(first.tied_to, "")
        return Recipe(item.name, first.shape, first.dtype, first.sources, first.make, alias)
    taken = tuple(held[number] for number in item.made.sources)
    sources = tuple(key for one in taken for key in one.sources)
    return Recipe(item.name, item.shape, item.dtype, sources, _make(item.made, taken))


def _make(made: View | Chain, taken: tuple[Held, ...]) -> Make:
    from weightlane.export.recorded_ops import View

    first = taken[0]
    row = prod(first.shape[1:])
    if isinstance(made, View) and len(first.sources) > 1 and row and made.offset % row + made.reach <= row:
        return PartOfOne(made, first, made.offset // row, made.offset % row)
    return Composed(made, taken)


@dataclass(frozen=True, slots=True)
class Composed:
    """A conversion of tensors that are themselves made of sources."""

    made: View | Chain
    taken: tuple[Held, ...]

    def __call__(self, sources: Sequence[Tensor]) -> Tensor:
        """The checkpoint tensor; a view of a source where nothing has to be computed."""
        tensors: list[Tensor] = []
        at = 0
        for one in self.taken:
            tensors.append(one.make(sources[at : at + len(one.sources)]))
            at += len(one.sources)
        return self.made(tensors)


@dataclass(frozen=True, slots=True)
class PartOfOne:
    """A view within one index of the first dimension: one expert's, so that others need not be merged."""

    made: View
    held: Held
    index: int
    offset: int

    def __call__(self, sources: Sequence[Tensor]) -> Tensor:
        """The view of what is made of that index alone."""
        return self.made.of(self.held.make_one(sources, self.index), self.offset)


def _converted(model: Any, held: Sequence[Held]) -> tuple[Converted, ...]:
    if not is_a(model, "PreTrainedModel", "transformers"):
        return _renamed(held, {})
    question = (
        tuple((item.name, item.shape, item.dtype) for item in held),
        id(getattr(model, "_weight_conversions", None)),
    )
    known = _KNOWN.get(model)
    if known is None or known[0] != question:
        known = (question, _asked(model, held))
        _KNOWN[model] = known
    return known[1]


def _asked(model: Any, held: Sequence[Held]) -> tuple[Converted, ...]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4: the checkpoint's names, save for the prefixes that classes declare
        return _renamed(held, reversed_renames(getattr(model, "_checkpoint_conversion_mapping", None) or {}))
    from weightlane.export.recorded_ops import record
    from weightlane.packing import dtype_name, torch_dtype

    shapes = {item.name: (item.shape, torch_dtype(item.dtype)) for item in held}
    name = own_class(model).__name__
    try:
        bare = structure_of(model, shapes)
        found = record(lambda tensors: revert_weight_conversion(bare, tensors), shapes)
    except Exception as error:
        raise ExportError(
            f"The checkpoint tensors of {name} cannot be worked out: {error}.",
            "transformers' own conversion of this model could not be reversed tensor by tensor.",
            "Use a model whose checkpoint holds the tensors as the model does, or another version of "
            "transformers.",
        ) from error
    converted = [
        Converted(each, first, made, shape, dtype_name(dtype))
        for each, (first, made, shape, dtype) in found.items()
    ]
    _require_all(held, converted, name)
    return tuple(sorted(converted, key=lambda item: item.first))  # stable: the order within one stays


def _renamed(held: Sequence[Held], prefixes: dict[str, str]) -> tuple[Converted, ...]:
    return tuple(
        Converted(renamed_once(item.name, prefixes), number, None, item.shape, item.dtype)
        for number, item in enumerate(held)
    )


def _require_all(held: Sequence[Held], converted: Sequence[Converted], model: str) -> None:
    used = {number for item in converted for number in (item.made.sources if item.made else (item.first,))}
    lost = [item.name for number, item in enumerate(held) if number not in used]
    if lost:
        raise ExportError(
            f"transformers' conversion of {model} loses {lost[0]} and {len(lost) - 1} more.",
            "Two tensors get one checkpoint name, or one gets none.",
            "Report this with the version of transformers.",
        )
