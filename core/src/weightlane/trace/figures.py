"""What a plan shows of its placement tables. The tables themselves stay where they were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weightlane.trace.coverage import target_coverage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.trace.table import PlacementTable


class TraceFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of one replica in numbers, over all of its workers.

    `digests` has one digest per worker, `style` is that of the names that travel. `targets` counts tensors
    that are written, `elements` those of them that come from a source, `padding` those that are set to a
    constant, `owned` tensors that are left to the engine. `seconds` is how long the slowest worker took.
    """

    digests: tuple[str, ...]
    style: str
    targets: int
    elements: int
    padding: int = 0
    owned: int = 0
    seconds: float = 0.0

    @property
    def timeless(self) -> TraceFigures:
        """The same without the time it took: equal whenever the same was seen."""
        return msgspec.structs.replace(self, seconds=0.0)

    def __str__(self) -> str:
        workers = len(self.digests)
        parts = [
            f"{self.targets:,} tensors of {workers} worker{'' if workers == 1 else 's'}",
            f"{self.elements:,} elements",
        ]
        if self.padding:
            parts.append(f"{self.padding:,} of padding")
        if self.owned:
            parts.append(f"{self.owned:,} left to the engine")
        return f"{', '.join(parts)}, {self.style} names, traced in {self.seconds:.2f} s"


def figures_of(tables: Sequence[PlacementTable]) -> TraceFigures:
    """The figures of all workers' tables of one replica; at least one table."""
    targets = elements = padding = owned = 0
    for table in tables:
        for item in target_coverage(table):
            written = bool(item.once or item.more or item.filled)
            targets += written
            owned += not written and bool(item.target.owned)
            elements += item.once + item.more
            padding += item.filled
    return TraceFigures(
        digests=tuple(table.digest() for table in tables),
        style=tables[0].style,
        targets=targets,
        elements=elements,
        padding=padding,
        owned=owned,
        seconds=max(table.seconds for table in tables),
    )
