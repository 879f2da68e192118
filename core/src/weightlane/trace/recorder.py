"""What one run of a loader did to its targets, collected while it runs; `table` is its result's form."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightlane.packing import dtype_name
from weightlane.trace.geometry import Region, coalesce, coalesce_joint
from weightlane.trace.intervals import count
from weightlane.trace.table import Fill, Obstacle, Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from weightlane.trace.element_numbers import Run
    from weightlane.trace.table import ObstacleKind


def storage_key(tensor: Tensor) -> int:
    """The same for all views of one memory, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(slots=True)
class Recorder:
    """Placements, fills and obstacles, by number of source and target.

    Loaders may use threads; each record is one append. `target_of` maps a twin's storage to the number of its
    target, `starts` that number to the storage offset of its first element. `created` holds the tensors made
    during the run, so that their storage keys stay theirs.
    """

    names: Sequence[str]
    target_names: list[str] = field(default_factory=list)
    target_of: dict[int, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)
    created: dict[int, Tensor] = field(default_factory=dict)
    changed_sources: set[int] = field(default_factory=set)
    _seen: set[Obstacle] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_target(self, name: str, twin: Tensor) -> int:
        """Numbers a twin; its storage is its own."""
        number = len(self.target_names)
        self.target_names.append(name)
        self.target_of[storage_key(twin)] = number
        self.starts.append(int(twin.storage_offset()))
        return number

    def place(self, target: int, view: Tensor, source: int, taken: Tensor, casts: tuple[str, ...]) -> None:
        """Elements of `taken` (a view of the source's geometry, in the shape of `view`) go into `view`.

        `casts` are the dtypes passed through, the source's own first.
        """
        if source in self.changed_sources:
            self.block("changed-source", "copy_", [source], target)
        elif view.numel():
            axes = coalesce_joint(view.shape, taken.stride(), view.stride())
            offset = int(view.storage_offset()) - self.starts[target]
            self.placements.append(
                Placement(source, target, int(taken.storage_offset()), offset, axes, self._with(view, casts))
            )

    def place_run(self, target: int, view: Tensor, run: Run, casts: tuple[str, ...]) -> None:
        """Consecutive elements, found by their numbers, go into `view`."""
        axes = ((run.length, 1, 1),) if run.length != 1 else ()
        start = run.target - self.starts[target]
        self.placements.append(Placement(run.source, target, run.first, start, axes, self._with(view, casts)))

    def fill(self, target: int, view: Tensor, value: float) -> None:
        """A constant goes into `view`; if sources were placed there before, they are lost."""
        if not view.numel():
            return
        axes = coalesce(tuple(zip(view.shape, view.stride(), strict=True)))
        filled = Fill(target, int(view.storage_offset()) - self.starts[target], axes, value)
        self.fills.append(filled)
        placed = [item for item in self.placements if item.target == target]
        lost = count([_region(item) for item in placed], [Region(filled.offset, filled.axes)]).covered
        if lost:
            self.block("overwritten", "fill_", [item.source for item in placed], target)

    def block(
        self, kind: ObstacleKind, operator: str, sources: Sequence[int], target: int | None, detail: str = ""
    ) -> None:
        """An obstacle, recorded once however often it is met."""
        obstacle = Obstacle(
            kind,
            operator,
            tuple(self.names[number] for number in dict.fromkeys(sources)),
            () if target is None else (self.target_names[target],),
            detail,
        )
        with self._lock:
            if obstacle not in self._seen:
                self._seen.add(obstacle)
                self.obstacles.append(obstacle)

    def made(self, tensor: Tensor) -> None:
        """A tensor that an operator of the loader made; writing to it is the loader's own affair."""
        self.created[storage_key(tensor)] = tensor

    @staticmethod
    def _with(view: Tensor, casts: tuple[str, ...]) -> tuple[str, ...]:
        own = dtype_name(view.dtype)
        return casts[1:] if casts[-1] == own else (*casts[1:], own)


def _region(placement: Placement) -> Region:
    axes = tuple((size, target) for size, _, target in placement.axes)
    return Region(placement.target_offset, axes)


def operator_name(operator: torch._ops.OpOverload) -> str:
    """Such as `aten.exp`."""
    return f"{operator.namespace}.{operator._schema.name.rpartition('::')[2]}"
