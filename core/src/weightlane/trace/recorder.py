"""What one run of a loader did to its targets, collected while it runs; `table` is its result's form."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.multiprocessing.reductions import StorageWeakRef

from weightlane.packing import dtype_name
from weightlane.trace.geometry import Region, coalesce, coalesce_joint
from weightlane.trace.intervals import TooFineError, count
from weightlane.trace.stand_ins import tensors_in
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
    target, `starts` that number to the storage offset of its first element.
    """

    names: Sequence[str]
    target_names: list[str] = field(default_factory=list)
    target_of: dict[int, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)
    changed_sources: set[int] = field(default_factory=set)
    _made: dict[int, StorageWeakRef] = field(default_factory=dict)
    _without_data: list[int] = field(default_factory=list)
    _placed: dict[int, list[Placement]] = field(default_factory=dict)
    _seen: set[Obstacle] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_target(self, name: str, twin: Tensor) -> int:
        """Numbers a twin; its storage is its own."""
        number = len(self.target_names)
        self.target_names.append(name)
        self.target_of[storage_key(twin)] = number
        self.starts.append(int(twin.storage_offset()))
        self.dtypes.append(twin.dtype)
        return number

    def place(self, target: int, view: Tensor, source: int, taken: Tensor, casts: tuple[str, ...]) -> None:
        """Elements of `taken` (a view of the source's geometry, in the shape of `view`) go into `view`.

        `casts` are the dtypes passed through, the source's own first.
        """
        if source in self.changed_sources:
            self.block("changed-source", "copy_", [source], target)
        elif view.numel() and self._is_plain(target, view, [source]):
            axes = coalesce_joint(view.shape, taken.stride(), view.stride())
            offset = int(view.storage_offset()) - self.starts[target]
            self._add(
                Placement(source, target, int(taken.storage_offset()), offset, axes, _chain(view, casts))
            )

    def place_run(self, target: int, view: Tensor, run: Run, casts: tuple[str, ...]) -> None:
        """Consecutive elements, found by their numbers, go into `view`."""
        if run.source in self.changed_sources:
            self.block("changed-source", "copy_", [run.source], target)
            return
        if not self._is_plain(target, view, [run.source]):
            return
        axes = ((run.length, 1, 1),) if run.length != 1 else ()
        start = run.target - self.starts[target]
        self._add(Placement(run.source, target, run.first, start, axes, _chain(view, casts)))

    def _add(self, item: Placement) -> None:
        self.placements.append(item)
        self._placed.setdefault(item.target, []).append(item)

    def fill(self, target: int, view: Tensor, value: float) -> None:
        """A constant goes into `view`; if sources were placed there before, they are lost."""
        if not view.numel() or not self._is_plain(target, view, []):
            return
        axes = coalesce(tuple(zip(view.shape, view.stride(), strict=True)))
        filled = Fill(target, int(view.storage_offset()) - self.starts[target], axes, value)
        self.fills.append(filled)
        placed = self._placed.get(target)
        if not placed:
            return
        try:
            lost = count([_region(item) for item in placed], [Region(filled.offset, filled.axes)]).covered
        except TooFineError:
            lost = 1  # it cannot be told that none is
        if lost:
            self.block("overwritten", "fill_", [item.source for item in placed], target)

    def _is_plain(self, target: int, view: Tensor, sources: Sequence[int]) -> bool:
        """Whether elements of the view are elements of the target, each once; else it is an obstacle."""
        if view.dtype != self.dtypes[target] or view.is_conj() or view.is_neg():
            detail = f"the target's memory is written as {dtype_name(view.dtype)}"
            self.block("computed", "aten.view", sources, target, detail)
        elif any(size > 1 and not step for size, step in zip(view.shape, view.stride(), strict=True)):
            self.block("overwritten", "aten.expand", sources, target)
        else:
            return True
        return False

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

    def sort(self) -> None:
        """Into an order that does not depend on which thread came first."""
        self.placements.sort(key=lambda item: (item.source, item.target, item.target_offset))
        self.fills.sort(key=lambda item: (item.target, item.offset))
        self.obstacles.sort(key=lambda item: (item.kind, item.operator, item.sources, item.targets))

    def made(self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A tensor that an operator of the loader gave; writing to it is the loader's own affair.

        False if it lies in memory that was there before, such as an argument's.
        """
        key = storage_key(tensor)
        given = tensors_in((*args, *kwargs.values()))
        if key in self._made or key in self.target_of or any(storage_key(item) == key for item in given):
            return False
        # A weak reference lets the memory go and keeps its address from being another's.
        self._made[key] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        if tensor.is_meta:
            self._without_data.append(key)
        return True

    def made_without_data(self) -> list[StorageWeakRef]:
        """The memory of what it made on the meta device, after its twins."""
        return [self._made[key] for key in self._without_data]

    def was_made(self, tensor: Tensor) -> bool:
        """Whether the loader itself made the memory that it lies in."""
        return storage_key(tensor) in self._made


def _chain(view: Tensor, casts: tuple[str, ...]) -> tuple[str, ...]:
    """What the values pass through after the source's own dtype, the target's included."""
    own = dtype_name(view.dtype)
    return casts[1:] if casts[-1] == own else (*casts[1:], own)


def _region(placement: Placement) -> Region:
    axes = tuple((size, target) for size, _, target in placement.axes)
    return Region(placement.target_offset, axes)


def operator_name(operator: torch._ops.OpOverload) -> str:
    """Such as `aten.exp`."""
    return f"{operator.namespace}.{operator._schema.name.rpartition('::')[2]}"
