"""Whether two runs of a loader, with different numbers in the place of values, did the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from weightlane.trace.values import InfiniteTokens, NanTokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.trace.table import PlacementTable
    from weightlane.trace.values import TokenForm

Seen: TypeAlias = "set[tuple[object, ...]]"


def placed(table: PlacementTable) -> Seen:
    """What goes where."""
    fills = [(item.target, item.offset, item.axes, msgspec.json.encode(item.value)) for item in table.fills]
    kinds = [(item.kind, item.targets) for item in table.obstacles]
    return {*map(msgspec.structs.astuple, table.placements), *fills, *kinds}


def _written(table: PlacementTable) -> Seen:
    """Where anything goes."""
    axes = [tuple((size, step) for size, _, step in item.axes) for item in table.placements]
    places = [
        (item.target, item.target_offset, own) for item, own in zip(table.placements, axes, strict=True)
    ]
    filled = [(item.target, item.offset, item.axes) for item in table.fills]
    # Which tokens were written cannot be told here, so that some seem to be written nowhere.
    kinds = [(item.kind, item.targets) for item in table.obstacles if item.kind != "value-dependent"]
    return {*places, *filled, *kinds}


PROBES: tuple[tuple[TokenForm, Callable[[PlacementTable], Seen]], ...] = (
    (NanTokens(), placed),
    (InfiniteTokens(), _written),
)
"""Other numbers, and what has to be the same with them."""
