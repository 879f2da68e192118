"""A tensor of the model under its own name there, before it gets the checkpoint's name and layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from weightlane.export.recipe import Make, Source

    MakeOne: TypeAlias = "Callable[[Sequence[Tensor], int], Tensor]"
    """Gives the slice of one index of the first dimension, without making the others."""


@dataclass(frozen=True, slots=True)
class Held:
    """How a tensor of the model is made from sources. `tied_to` names the one whose tensor it is."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]
    make: Make
    make_one: MakeOne
    tied_to: str = ""


def as_it_is(sources: Sequence[Tensor]) -> Tensor:
    """The one source itself, without a copy."""
    return sources[0]


def one_of_it(sources: Sequence[Tensor], index: int) -> Tensor:
    """A view of one index of the one source."""
    return sources[0][index]


def plain(name: str, source: Source, tied_to: str = "") -> Held:
    """A tensor that is exported as the trainer holds it."""
    return Held(name, source.shape, source.dtype, (source.key,), as_it_is, one_of_it, tied_to)
