"""Names of layers and experts that a checkpoint does not have: the name is well formed, its number is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.peft import WRAPPER_PREFIX
from weightlane.trace.patterns import EXPERT, LAYER, Numbered, numbered

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def beyond(name: str, known: Iterable[str]) -> str:
    """In words, which number of `name` none of the known names has at that place; "" where all are known.

    Says nothing of a place where no known name has any number.
    """
    asked = numbered(name.removeprefix(WRAPPER_PREFIX))
    keys = [numbered(other) for other in known]
    for word, what, number in ((LAYER, "layer", asked.layer), (EXPERT, "expert", asked.expert)):
        numbers = _numbers_at(asked.pattern, word, keys)
        if number is not None and numbers and number not in numbers:
            last = max(numbers)
            return f"There is no {what} {number} here: the last one is {last}."
    return ""


def _numbers_at(pattern: str, word: str, keys: Collection[Numbered]) -> set[int]:
    """The numbers that names with the same parts before them have there."""
    before, found, _ = pattern.partition(word)
    if not found:
        return set()
    numbers = (
        key.layer if word == LAYER else key.expert for key in keys if key.pattern.startswith(before + word)
    )
    return {number for number in numbers if number is not None}
