"""Names without their numbers: `model.layers.3.mlp.up_proj.weight` is one of `model.layers.{layer}.…`.

A number is a part of a dotted name that is digits alone. That after `experts` is an expert, the first other
one a layer, a further one a place within it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

LAYER, EXPERT, WITHIN = "{layer}", "{expert}", "{within}"

ALL_LAYERS = "all"
"""The layers of a pattern that occurs in each, or that has none."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """A name taken apart: its pattern, and the numbers that it had; None where it had none."""

    pattern: str
    layer: int | None = None
    expert: int | None = None
    within: int | None = None


def numbered(name: str) -> Numbered:
    """The pattern of a name. `fill` is its inverse."""
    parts = name.split(".")
    found: dict[str, int] = {}
    for place, part in enumerate(parts):
        if not (part.isdigit() and part.isascii()):
            continue
        if place and parts[place - 1] == "experts" and EXPERT not in found:
            word = EXPERT
        else:
            word = next((free for free in (LAYER, WITHIN) if free not in found), "")
        if word and str(int(part)) == part:
            found[word] = int(part)
            parts[place] = word
    return Numbered(".".join(parts), found.get(LAYER), found.get(EXPERT), found.get(WITHIN))


def alike(name: str, key: Numbered) -> str:
    """The pattern of a receiver's name, with the placeholders of a source's numbers where they are the same.

    A number that differs (a draft layer that is counted otherwise) stays as it is.
    """
    own = numbered(name)
    pairs = (
        (LAYER, own.layer, key.layer),
        (EXPERT, own.expert, key.expert),
        (WITHIN, own.within, key.within),
    )
    pattern = own.pattern
    for word, mine, theirs in pairs:
        if mine is not None and mine != theirs:
            pattern = pattern.replace(word, str(mine))
    return pattern


def fill(pattern: str, key: Numbered) -> str:
    """The name of a pattern for one layer and expert."""
    for word, number in ((LAYER, key.layer), (EXPERT, key.expert), (WITHIN, key.within)):
        if number is not None:
            pattern = pattern.replace(word, str(number))
    return pattern


def layers_in_words(layers: Collection[int], every: Collection[int]) -> str:
    """Which of a model's layers, so that a model with more of them has the same words where it can.

    Args:
        layers: those that are meant.
        every: all that the model has.
    """
    if not layers or set(layers) == set(every):
        return ALL_LAYERS
    chosen, known = sorted(layers), sorted(every)
    if chosen == [known[0]]:
        return str(chosen[0])
    if chosen == [number for number in known if number >= chosen[0]]:
        return f"{chosen[0]} on"
    step = chosen[1] - chosen[0] if len(chosen) > 1 else 0
    if step > 1 and chosen == [n for n in known if n >= chosen[0] and (n - chosen[0]) % step == 0]:
        return f"{chosen[0]} and every {step} on"
    if chosen == [number for number in known if number <= chosen[-1]]:
        return f"up to {chosen[-1]}"
    return " ".join(str(number) for number in chosen)


_ON = re.compile(r"(\d+) on")
_EVERY = re.compile(r"(\d+) and every (\d+) on")
_UP_TO = re.compile(r"up to (\d+)")


def meant_by(words: str, layer: int | None) -> bool:
    """Whether a layer is among those that `layers_in_words` put into words.

    Raises:
        ValueError: these are no such words.
    """
    if words == ALL_LAYERS:
        return True
    if layer is None:
        return False
    if found := _ON.fullmatch(words):
        return layer >= int(found[1])
    if found := _EVERY.fullmatch(words):
        return layer >= int(found[1]) and (layer - int(found[1])) % max(int(found[2]), 1) == 0
    if found := _UP_TO.fullmatch(words):
        return layer <= int(found[1])
    return layer in {int(number) for number in words.split()}


def layers_of(keys: Iterable[Numbered]) -> list[int]:
    """The layers among numbers, each once, in order."""
    return sorted({key.layer for key in keys if key.layer is not None})
